"""A study of `bench.studies`: the noise that an unequal choice of prompts saves, by enumeration.

Noise times cost of an update is E[v / q] E[c q] over the prompts, for the noise v = E[sum of a_i^2] and the draws c of
a prompt, and its probability q relative to the mean. With the best q, which is proportional to sqrt(v / c), it is
E[sqrt(v c)]^2. Both are divided by E[v] E[c], the value for equal probabilities.
"""

import numpy as np
from jaxtyping import Float

from reinforce_ada_jax.analysis import enumeration
from reinforce_ada_jax.analysis.inputs import Inputs
from reinforce_ada_jax.analysis.tables import number, rate_panel, table, write
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.inclusion import relative_probabilities
from reinforce_ada_jax.collection.selection import BINS, PASS_RATE, UNIFORM, bins_of
from reinforce_ada_jax.config import CollectionConfig

SELECTION_STRATEGIES = ("positive/1x32+log", "positive/1x32+power", "positive/1x32+identity+exact", "grpo@8+stratified")
# Beta distributions of pass rates: like published ones, at both ends, late in training, hard.
POPULATIONS = ((0.6, 1.2), (0.5, 0.5), (3.0, 0.6), (0.4, 3.0))
# Pass rates of a population, equally spaced in log(p / (1 - p)): 1e-8 to 1 - 1e-8.
NODES = 1.0 / (1.0 + np.exp(-np.linspace(-18.0, 18.0, 361)))


def population(a: float, b: float) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, " P"]]:
    """Returns pass rates, and the shares of a Beta distribution at them."""
    density = NODES**a * (1.0 - NODES) ** b
    return NODES, density / density.sum()


def noise_and_draws(
    section: CollectionConfig, rates: Float[np.ndarray, " P"]
) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, " P"]]:
    """Returns E[sum of a_i^2] and the expected draws of a prompt at pass rates in (0, 1)."""
    found = enumeration.expectations(section, rates)
    # If no response has a coefficient, noise and signal are 0, and `score_noise`, their ratio, is nan.
    return np.nan_to_num(found.score_noise * np.square(found.signal)), found.draws


def _estimates(
    section: CollectionConfig, rates: Float[np.ndarray, " P"]
) -> tuple[Float[np.ndarray, " S"], Float[np.ndarray, "S P"]]:
    """Returns the pass rates expected after two collections (`Ema`), and their probabilities at the true rates."""
    ends = enumeration.outcomes(strategies.build(section), rates)
    drawn, correct = ((PASS_RATE["decay"] * counts[:, None] + counts).ravel() for counts in (ends.drawn, ends.correct))
    prior_correct, prior_wrong = PASS_RATE["prior_correct"], PASS_RATE["prior_wrong"]
    probability = (ends.probability[:, None] * ends.probability).reshape(-1, len(rates))
    return (correct + prior_correct) / (drawn + prior_correct + prior_wrong), probability


def savings(
    section: CollectionConfig, rates: Float[np.ndarray, " P"], shares: Float[np.ndarray, " P"]
) -> tuple[float, float]:
    """Computes noise times cost relative to that of equal probabilities.

    Args:
      section: the `collection` section.
      rates: P pass rates in (0, 1).
      shares: of the population at each of them.

    Returns:
      With the best probabilities; and with those of the selection `proportional`, whose bins have their exact means
      and whose pass rates come from two earlier collections of each prompt.
    """
    noise, draws = noise_and_draws(section, rates)
    equal = (shares @ noise) * (shares @ draws)
    best = (shares @ np.sqrt(noise * draws)) ** 2 / equal

    estimates, probability = _estimates(section, rates)
    bins = bins_of(estimates)
    by_state = probability @ np.stack([shares * noise, shares * draws], axis=1)
    of_bin = np.zeros((BINS, 2))
    np.add.at(of_bin, bins, by_state)
    sizes = np.sqrt(of_bin[bins, 0] / of_bin[bins, 1])
    q = relative_probabilities(sizes, probability @ shares, UNIFORM)
    return float(best), float((1.0 / q) @ by_state[:, 0] * (q @ by_state[:, 1]) / equal)


def selection(inputs: Inputs) -> None:
    """Reports what the selection `proportional` saves for each strategy, on four populations or on a prompt set."""
    populations = {f"Beta({a:g}, {b:g})": population(a, b) for a, b in POPULATIONS}
    if inputs.prompts is not None:
        rates, counts = np.unique(np.clip(inputs.prompts, 1e-3, 1 - 1e-3), return_counts=True)
        populations = {"prompt set": (rates, counts / counts.sum())}
    rows, curves = [], {}
    for entry, section in inputs.sections.items():
        noise, draws = noise_and_draws(section, inputs.pass_rates)
        curves[entry] = np.sqrt(noise / draws) / np.sqrt(noise / draws).max()
        rows += [[entry, name, *map(number, savings(section, *pair))] for name, pair in populations.items()]
    header = ["strategy", "pass rates", "best", "after two visits"]
    print("Noise times draws, relative to equal probabilities, if all scores are equally large.\n")
    print(table(header, rows))
    panel = rate_panel("best probability, relative to the largest", inputs.pass_rates, curves)
    write(inputs.output, "selection", [panel], {"columns": header, "rows": rows})
