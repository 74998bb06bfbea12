"""`bench.studies`: numbers, tables and a figure for questions that the paper leaves open.

    python -m bench.studies --study=zero_variance
    python -m bench.studies --study=epsilon
    python -m bench.studies --study=objectives --output=figures
    python -m bench.studies --study=signal --pass_rates=0.02,0.05,0.1,0.2,0.5,0.8,0.95
    python -m bench.studies --study=selection --histogram=prompts.jsonl
    python -m bench.studies --study=learning --strategy=grpo@4,grpo@16,balance,estimate+log

The other flags are those of `simulate`.

zero_variance   how often a group of n has no signal, and how often a strategy's pool has none
epsilon         where the least pass rate of w(p) biases the log objective, and how much noise it saves
learning        which strategy learns fastest per draw, and which per update

objective_studies.py and selection_studies.py have three more.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags
from jaxtyping import Float

from bench import objective_studies, selection_studies
from bench.learning_curves import average, learn, population
from reinforce_ada_jax import cli, simulate
from reinforce_ada_jax.analysis.enumeration import expectations
from reinforce_ada_jax.analysis.inputs import Inputs
from reinforce_ada_jax.analysis.tables import number, rate_panel, rate_table, table, write
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.objectives import Objective
from reinforce_ada_jax.collection.strategies import StrategyConfig
from reinforce_ada_jax.config.collection_rules import allocation
from reinforce_ada_jax.reporting.panels import Curve, Panel

GROUP_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
EPSILONS = (0.0, 1e-4, 1e-3, 1e-2, 3e-2, 0.1)
# Used for an epsilon of 0, at which w(0) is infinite. An all-wrong pool has advantages of 0 for any weight, and the
# pass rates of all other pools are so far above this value that it changes nothing.
NO_EPSILON = 1e-12
# The study `learning`: a quarter of the population per update, as in the published runs. A logit moves by LEARNING_RATE
# times the gradient, or by LENGTH in root mean square where gradients have equal lengths.
POPULATION, PROMPTS_PER_UPDATE, LEARNING_RATE, LENGTH = 512, 128, 1.0, 0.1
UPDATES, DRAWS, SEEDS = (25, 50, 100, 200, 400), (25_000, 50_000, 100_000, 200_000, 400_000), 4


def zero_variance_probability(
    group_sizes: Sequence[int], pass_rates: Float[np.ndarray, " P"]
) -> Float[np.ndarray, "N P"]:
    """Computes p^n + (1 - p)^n, the probability that n independent responses are all correct or all wrong."""
    sizes = np.asarray(group_sizes, np.float64)[:, None]
    return pass_rates**sizes + (1.0 - pass_rates) ** sizes


def equal_group_size(share: float, pass_rates: Float[np.ndarray, " P"]) -> int:
    """Returns the least n whose groups are all correct or all wrong with at most this probability, at each pass rate.

    Pass rates are above 0 and below 1.
    """
    # The larger of the two terms of p^n + (1 - p)^n is at most `share`, and the other one adds no more than that.
    largest = np.maximum(pass_rates, 1.0 - pass_rates).max()
    size = int(np.ceil(np.log(max(share, 1e-300)) / np.log(largest) - 1e-9))
    while zero_variance_probability([size], pass_rates).max() > share + 1e-12:
        size += 1
    return size


def zero_variance(inputs: Inputs) -> None:
    """Reports how often a group of n is all correct or all wrong, and how often the pool of a strategy is."""
    rates = inputs.pass_rates
    found = {entry: expectations(section, rates) for entry, section in inputs.sections.items()}
    groups = zero_variance_probability(GROUP_SIZES, rates)
    lines = {f"n={n}": row for n, row in zip(GROUP_SIZES, groups, strict=True)}
    pools = {f"{entry} pool": exact.zero_variance for entry, exact in found.items()}
    columns = dict(lines)
    for entry, exact in found.items():
        columns |= {f"{entry} pool": exact.zero_variance, f"{entry} draws": exact.draws}
    print("Probability that n responses, or the pool of a strategy, are all correct or all wrong.\n")
    print(rate_table(rates, columns))
    result: dict[str, Any] = {"pass_rates": rates, "group_sizes": GROUP_SIZES, "groups": groups, "exact": found}
    inside = np.flatnonzero((rates > 0) & (rates < 1))
    for entry, exact in found.items() if inside.size else ():
        worst = int(inside[exact.zero_variance[inside].argmax()])
        share, rate = exact.zero_variance[worst], rates[worst]
        needed = equal_group_size(share, rates[inside])
        print(
            f"\n{entry} loses at most {share:.1%} of its pools, at p = {rate:.4f}, with {exact.draws[worst]:.1f} "
            f"draws there and {exact.draws.mean():.1f} on average over these pass rates; groups of one size that lose "
            f"no more have n = {needed}, everywhere."
        )
    if inputs.prompts is not None:
        result["prompt_set"] = mean = zero_variance_probability(GROUP_SIZES, inputs.prompts).mean(axis=1)
        print(f"\nMean over {len(inputs.prompts):,} prompts, those of rates 0 and 1 included:")
        print(table([f"n={n}" for n in GROUP_SIZES], [[number(x) for x in mean]]))
    panel = rate_panel("probability of zero variance", rates, lines | pools)
    write(inputs.output, "zero_variance", [panel], result)


def epsilon_effect(
    config: StrategyConfig, pass_rates: Float[np.ndarray, " P"], epsilon: float
) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, " P"]]:
    """Computes (bias factor, noise to signal) of the log objective with one `objective_epsilon`; 0 is allowed here.

    The bias factor is E[g] over the exact gradient (1 / p) p (1 - p), the noise Var(g) / E[g]^2. In `estimate` draws
    provide the part w_sample of the weight, but relative to the other prompts (N_x / mean N). So its bias factor is in
    units of the mean of w_sample: 1 is an unbiased gradient up to one factor for all prompts. Its draws are whole
    numbers; at 4 or 5 draws the rounding alone moves the gradient by a tenth.

    Args:
      config: settings of the strategy; the objective is taken to be "log", the correction "none".
      pass_rates: above 0 and below 1.
      epsilon: at least 0.
    """
    config = dataclasses.replace(
        strategies.with_defaults(config),
        objective="log",
        correction="none",
        objective_epsilon=max(epsilon, NO_EPSILON),
    )
    found, unit = expectations(config, pass_rates), 1.0
    if strategies.build(config).plan is not None:
        objective = Objective("log", epsilon=config.objective_epsilon)
        shares = objective.sample_weight(allocation(config), pass_rates)
        unit = float(np.mean(shares))
    return found.relative_signal * unit, found.variance


def where_epsilon_binds(
    pass_rates: Float[np.ndarray, " P"], without: Float[np.ndarray, " P"], bias: Float[np.ndarray, " P"]
) -> Float[np.ndarray, " B"]:
    """Returns the pass rates whose bias factor differs by more than a tenth from the one without epsilon."""
    return pass_rates[np.abs(bias / without - 1.0) > 0.1]


def epsilon(inputs: Inputs) -> None:
    """Reports which epsilon binds where under the log objective."""
    rates = inputs.pass_rates
    if not ((rates > 0) & (rates < 1)).all():
        raise ValueError("--study=epsilon needs pass rates above 0 and below 1, where log p has a slope.")
    panels, result = [], {"pass_rates": rates, "epsilons": EPSILONS}
    for entry, section in inputs.sections.items():
        effects = {f"eps={value:g}": epsilon_effect(section, rates, value) for value in EPSILONS}
        bias, noise = ({label: effect[part] for label, effect in effects.items()} for part in (0, 1))
        print(f"{entry}, bias factor: E[g] / exact gradient of log p (1: unbiased)\n{rate_table(rates, bias)}\n")
        print(f"{entry}, noise to signal: Var(g) / E[g]^2\n{rate_table(rates, noise)}\n")
        without = bias["eps=0"]
        binds = {value: where_epsilon_binds(rates, without, bias[f"eps={value:g}"]) for value in EPSILONS if value}
        for value, binding in binds.items():
            where = "at p = " + ", ".join(f"{rate:.4f}" for rate in binding) if binding.size else "nowhere"
            print(f"{entry}, eps = {value:g}: moves the gradient by more than a tenth {where}")
        if strategies.build(section).plan is not None:
            print("(shares of a budget are whole draws, so a share of few draws moves by a tenth or more at once)")
        print(f"{entry}, eps = 0: the bias factor is between {without.min():.2f} and {without.max():.2f}.\n")
        result[entry] = {"bias": bias, "variance": noise, "binds": binds}
        panels += [rate_panel(f"{entry}: bias factor", rates, bias)]
        panels += [rate_panel(f"{entry}: noise to signal", rates, noise, "log")]
    write(inputs.output, "epsilon", panels, result)


def learning(inputs: Inputs) -> None:
    """Reports which strategy learns fastest per update, and which per draw."""
    start = population(POPULATION) if inputs.prompts is None else inputs.prompts
    size = min(PROMPTS_PER_UPDATE, len(start))
    print(f"{len(start):,} prompts of mean pass rate {start.mean():.3f}, {size} per update, {SEEDS} seeds.")
    print("Prompts do not help each other here; bench/learning_curves.py says what else this model leaves out.")
    panels: list[Panel] = []
    result: dict[str, Any] = {"start": start}
    for equal, rate, title in (
        (False, LEARNING_RATE, "gradients as they are"),
        (True, LENGTH, "gradients of equal lengths, as Adam makes them"),
    ):
        rows, lines, by_draw, results = [], [], [], {}
        for entry, section in inputs.sections.items():
            curves = [
                learn(
                    section, start, updates=UPDATES[-1], draws=DRAWS[-1], prompts_per_update=size,
                    learning_rate=rate, equal_lengths=equal, seed=run,
                )
                for run in range(SEEDS)
            ]  # fmt: skip
            updates, draws, error = average(curves, UPDATES, DRAWS)
            spent = float(np.mean([curve.draws[UPDATES[-1]] for curve in curves])) / UPDATES[-1] / size
            rows.append([entry, *(f"{x:.3f}" for x in (*updates, *draws)), f"{spent:.1f}", f"{error:.3f}"])
            style, drawn = len(lines), curves[0].draws <= DRAWS[-1]
            lines.append(Curve(entry, style, np.arange(UPDATES[-1] + 1), curves[0].pass_rate[: UPDATES[-1] + 1]))
            by_draw.append(Curve(entry, style, curves[0].draws[drawn], curves[0].pass_rate[drawn]))
            results[entry] = {"by_update": updates, "by_draws": draws, "standard_error": error}
        header = [f"{x} up." for x in UPDATES] + [f"{x // 1000}k dr." for x in DRAWS]
        print(f"\nMean pass rate after updates, and after draws; {title}")
        print(table(["", *header, "draws a prompt", "+-"], rows))
        ends = {name: {entry: each[name][-1] for entry, each in results.items()} for name in ("by_update", "by_draws")}
        first = {name: max(values, key=values.__getitem__) for name, values in ends.items()}
        print(
            f"Farthest after {UPDATES[-1]} updates: {first['by_update']}, {max(ends['by_update'].values()):.3f}; after "
            f"{DRAWS[-1]:,} draws: {first['by_draws']}, {max(ends['by_draws'].values()):.3f}."
        )
        panels += [
            Panel(f"mean pass rate, {'equal lengths' if equal else 'as they are'}", label, "", drawn)
            for label, drawn in (("updates", lines), ("draws", by_draw))
        ]
        result[title] = results
    write(inputs.output, "learning", panels, result | {"updates": UPDATES, "draws": DRAWS})


STUDIES = {
    "zero_variance": zero_variance, "epsilon": epsilon, "learning": learning,
    "objectives": objective_studies.objectives, "signal": objective_studies.signal,
    "selection": selection_studies.selection,
}  # fmt: skip
# The strategies of a study if the user names none; the other studies then have the configured one.
STRATEGIES = {
    "epsilon": ("balance", "estimate"),
    "objectives": ("estimate+log", "estimate+power"),
    "signal": objective_studies.SIGNAL_STRATEGIES,
    "selection": selection_studies.SELECTION_STRATEGIES,
    "learning": ("grpo@4", "grpo@8", "grpo@16", "positive", "balance", "estimate+log", "dapo", "ngu"),
}


def define_flags(values: flags.FlagValues = flags.FLAGS) -> flags.FlagValues:
    """Defines the flags of `simulate`, and --study."""
    simulate.define_flags(values)
    flags.DEFINE_enum("study", None, [*STUDIES], "The study.", required=True, flag_values=values)
    return values


def main(options: flags.FlagValues) -> None:
    """Prints the study that the flags ask for."""
    with cli.user_input():
        STUDIES[options.study](simulate.read_inputs(options, STRATEGIES.get(options.study, ())))


if __name__ == "__main__":
    define_flags()
    cli.run(lambda: main(flags.FLAGS), {"Flags": {*flags.FLAGS} - {*simulate.SETTINGS}})
