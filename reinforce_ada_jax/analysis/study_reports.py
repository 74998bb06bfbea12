"""Answers to the questions of simulate.py, in words, tables and figures; the numbers are of analysis/studies.py.

Every function takes the settings of each strategy asked for, pass rates, the pass rates of a prompt set where one was
named, the folder for a figure, and a seed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from reinforce_ada_jax.analysis import enumeration, studies
from reinforce_ada_jax.analysis.tables import Panel, by_rate, number, rate_scale, table, write
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.config import CollectionConfig

Sections = Mapping[str, CollectionConfig]

GROUP_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
EPSILONS = (0.0, 1e-4, 1e-3, 1e-2, 3e-2, 0.1)
# Of the question `learning`: a quarter of the population an update, as in the published runs. A logit moves by
# LEARNING_RATE times the gradient; where gradients have equal lengths, by so much in root mean square.
POPULATION, PROMPTS_PER_UPDATE, LEARNING_RATE, LENGTH = 512, 128, 1.0, 0.1
UPDATES, DRAWS, SEEDS = (25, 50, 100, 200, 400), (25_000, 50_000, 100_000, 200_000, 400_000), 4


def zero_variance(
    sections: Sections, pass_rates: np.ndarray, prompts: np.ndarray | None, output: str | None, seed: int
) -> None:
    """How often is a group of n all correct or all wrong, and how often the pool that a strategy draws?"""
    del seed
    found = {entry: enumeration.expectations(part, pass_rates) for entry, part in sections.items()}
    groups = studies.zero_variance(GROUP_SIZES, pass_rates)
    columns = {f"n={n}": row for n, row in zip(GROUP_SIZES, groups, strict=True)}
    for entry, exact in found.items():
        columns |= {f"{entry} pool": exact.zero_variance, f"{entry} draws": exact.draws}
    print("Chance that n responses are all correct or all wrong, p^n + (1 - p)^n, and what the strategy makes of it.\n")
    print(by_rate(pass_rates, columns))
    result: dict[str, Any] = {"pass_rates": pass_rates, "group_sizes": GROUP_SIZES, "groups": groups, "exact": found}
    for entry, exact in found.items():
        inside = np.flatnonzero((pass_rates > 0) & (pass_rates < 1))
        if not inside.size:
            continue
        worst = int(inside[exact.zero_variance[inside].argmax()])
        chance, rate = exact.zero_variance[worst], pass_rates[worst]
        # One of the two terms of p^n + (1 - p)^n decides where the chance is largest.
        needed = np.ceil(np.log(max(chance, 1e-300)) / np.log(max(rate, 1 - rate)) - 1e-9)
        print(
            f"\n{entry} loses at most {chance:.1%} of its pools, at p = {rate:.4f}, with {exact.draws[worst]:.1f} "
            f"draws there and {exact.draws.mean():.1f} on average over these pass rates; groups of one size that lose "
            f"no more have n = {needed:.0f}, everywhere."
        )
    if prompts is not None:
        result["prompt_set"] = mean = studies.zero_variance(GROUP_SIZES, prompts).mean(axis=1)
        print(f"\nOver {len(prompts):,} prompts, which include those that no number of draws helps (rates 0 and 1):")
        print(table([f"n={n}" for n in GROUP_SIZES], [[number(x) for x in mean]]))
    scale = rate_scale(pass_rates)
    lines = {f"n={n}": (pass_rates, row) for n, row in zip(GROUP_SIZES, groups, strict=True)}
    lines |= {f"{entry} pool": (pass_rates, exact.zero_variance) for entry, exact in found.items()}
    write(output, "zero_variance", [Panel("chance of zero variance", "pass rate", lines, scale)], result)


def epsilon(
    sections: Sections, pass_rates: np.ndarray, prompts: np.ndarray | None, output: str | None, seed: int
) -> None:
    """Which epsilon binds where, under the log objective?"""
    del prompts, seed
    scale, panels, result = rate_scale(pass_rates), [], {"pass_rates": pass_rates, "epsilons": EPSILONS}
    if scale != "logit":
        raise ValueError("--question=epsilon needs pass rates above 0 and below 1, where log p has a slope.")
    found = {
        entry: {epsilon: studies.epsilon_effect(part, pass_rates, epsilon) for epsilon in EPSILONS}
        for entry, part in sections.items()
    }
    for entry, effects in found.items():
        bias = {f"eps={epsilon:g}": bias for epsilon, (bias, _) in effects.items()}
        noise = {f"eps={epsilon:g}": noise for epsilon, (_, noise) in effects.items()}
        print(f"{entry}, bias factor: E[g] / exact gradient of log p (1: unbiased)\n{by_rate(pass_rates, bias)}\n")
        print(f"{entry}, noise to signal: Var(g) / E[g]^2\n{by_rate(pass_rates, noise)}\n")
        reading = {eps: studies.where_epsilon_binds(pass_rates, bias["eps=0"], bias[f"eps={eps:g}"])
                   for eps in EPSILONS if eps}  # fmt: skip
        for eps, binding in reading.items():
            where = "at p = " + ", ".join(f"{rate:.4f}" for rate in binding) if binding.size else "nowhere"
            print(f"{entry}, eps = {eps:g}: moves the gradient by more than a tenth {where}")
        if strategies.build(sections[entry]).plan is not None:
            print("(shares of a budget are whole draws, so a share of few draws moves by a tenth or more at once)")
        least = effects[0.0][0]
        print(f"{entry}, eps = 0: the bias factor is between {least.min():.2f} and {least.max():.2f} all by itself.\n")
        result[entry] = {"bias": bias, "variance": noise, "binds": reading}
        for title, values, y_scale in (("bias factor", bias, "linear"), ("noise to signal", noise, "log")):
            lines = {label: (pass_rates, y) for label, y in values.items()}
            panels.append(Panel(f"{entry}: {title}", "pass rate", lines, scale, y_scale))
    write(output, "epsilon", panels, result)


def learning(
    sections: Sections, pass_rates: np.ndarray, prompts: np.ndarray | None, output: str | None, seed: int
) -> None:
    """Who learns fastest for each update, and who for each draw?"""
    del pass_rates
    start = studies.population(POPULATION) if prompts is None else prompts
    size = min(PROMPTS_PER_UPDATE, len(start))
    print(f"{len(start):,} prompts of mean pass rate {start.mean():.3f}, {size} an update, {SEEDS} seeds.")
    print("Prompts do not help each other here; what else this leaves out: analysis/studies.py, `learn`.")
    panels, result = [], {"start": start}
    for equal, rate, title in (
        (False, LEARNING_RATE, "gradients as they are"),
        (True, LENGTH, "gradients of equal lengths, as Adam makes them"),
    ):
        rows, lines, by_draw = [], {}, {}
        for entry, part in sections.items():
            curves = [
                studies.learn(
                    entry, part, start, updates=UPDATES[-1], draws=DRAWS[-1], prompts_per_update=size,
                    learning_rate=rate, equal_lengths=equal, seed=seed + run,
                )
                for run in range(SEEDS)
            ]  # fmt: skip
            updates, draws, error = studies.average(curves, UPDATES, DRAWS)
            spent = float(np.mean([curve.draws[UPDATES[-1]] for curve in curves])) / UPDATES[-1] / size
            rows.append([entry, *(f"{x:.3f}" for x in (*updates, *draws)), f"{spent:.1f}", f"{error:.3f}"])
            lines[entry] = np.arange(UPDATES[-1] + 1), curves[0].pass_rate[: UPDATES[-1] + 1]
            seen = curves[0].draws <= DRAWS[-1]
            by_draw[entry] = curves[0].draws[seen], curves[0].pass_rate[seen]
            result.setdefault(title, {})[entry] = {"by_update": updates, "by_draws": draws, "standard_error": error}
        header = [f"{x} up." for x in UPDATES] + [f"{x // 1000}k dr." for x in DRAWS]
        print(f"\nMean pass rate after updates, and after draws; {title}")
        print(table(["", *header, "draws a prompt", "+-"], rows))
        by_update, by_draws = (
            max(result[title].items(), key=lambda item, name=name: item[1][name][-1])
            for name in ("by_update", "by_draws")
        )
        print(
            f"Farthest after {UPDATES[-1]} updates: {by_update[0]}, {by_update[1]['by_update'][-1]:.3f}; after "
            f"{DRAWS[-1]:,} draws: {by_draws[0]}, {by_draws[1]['by_draws'][-1]:.3f}."
        )
        for label, values in (("updates", lines), ("draws", by_draw)):
            panels.append(Panel(f"mean pass rate, {'equal lengths' if equal else 'as they are'}", label, values))
    write(output, "learning", panels, result | {"updates": UPDATES, "draws": DRAWS})
