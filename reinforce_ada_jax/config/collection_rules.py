"""Rules of the `collection` section alone, and the numbers that follow from its settings.

`validate` checks a run by them before any device work, and collection/strategies.py whatever it builds.
"""

from collections.abc import Callable

from reinforce_ada_jax.config.settings import CollectionConfig
from reinforce_ada_jax.config.values import ALLOCATIONS, BASELINES, KEEPS, OBJECTIVES, STRATEGIES, check_choice


def max_draws(collection: CollectionConfig) -> int | None:
    """Returns the most draws for one prompt under the built-in strategies; None where there is no limit."""
    if collection.strategy in ("grpo", "dapo"):
        return collection.group_size
    rounds = collection.samples_per_round * collection.max_rounds
    if collection.strategy == "ngu" and collection.max_draws == 0:
        return None
    if collection.strategy in ("estimate", "ngu") and collection.max_draws is not None:
        return collection.max_draws
    return rounds


def goals(collection: CollectionConfig) -> tuple[int, int]:
    """Returns (k_pos, k_neg), the correct and wrong responses that end the rounds of `positive` and `balance`."""
    half = collection.group_size // 2
    k_pos, k_neg = (1, 0) if collection.strategy == "positive" else (half, collection.group_size - half)
    return (
        k_pos if collection.k_pos is None else collection.k_pos,
        k_neg if collection.k_neg is None else collection.k_neg,
    )


def draw_budget(collection: CollectionConfig) -> float:
    """Returns the mean draws of a prompt under `estimate`."""
    return float(collection.samples_per_round if collection.budget is None else collection.budget)


def strategy_is_known(collection: CollectionConfig) -> None:
    """The strategy is built in, or names a function as file.py:function."""
    strategy = collection.strategy
    if ":" not in strategy and strategy not in STRATEGIES:
        raise ValueError(
            f"collection.strategy is {strategy!r}; it must be one of {', '.join(STRATEGIES)}, or name a function of "
            "yours as file.py:function."
        )


def keep_fits_the_strategy(collection: CollectionConfig) -> None:
    """keep stays empty with dapo and ngu, which drop groups without a signal by rules of their own."""
    if not collection.keep:
        return
    check_choice("collection.keep", collection.keep, KEEPS)
    if collection.strategy in ("dapo", "ngu"):
        raise ValueError(
            f"collection.keep is {collection.keep!r} with the strategy {collection.strategy}, whose own rule of what "
            "to keep drops groups without a signal: leave it empty."
        )


def baseline_is_known(collection: CollectionConfig) -> None:
    """The baseline is empty or one of the built-in ones."""
    if collection.baseline:
        check_choice("collection.baseline", collection.baseline, BASELINES)


def groups_have_a_baseline(collection: CollectionConfig) -> None:
    """A group has at least 2 responses."""
    check_choice("collection.allocation", collection.allocation, ALLOCATIONS)
    check_choice("collection.objective", collection.objective, OBJECTIVES)
    if collection.group_size < 2:
        raise ValueError(
            f"collection.group_size is {collection.group_size}: a group of one has no baseline to differ from. Use at "
            "least 2."
        )


def goals_can_be_met(collection: CollectionConfig) -> None:
    """positive, balance: k_pos + k_neg is at least 1 and at most M * N."""
    if collection.strategy not in ("positive", "balance"):
        return
    (k_pos, k_neg), most = goals(collection), collection.samples_per_round * collection.max_rounds
    if collection.strategy == "positive" and k_neg:
        raise ValueError(
            f"collection.k_neg is {k_neg} with the strategy positive, which looks at correct responses only: use "
            "balance."
        )
    if k_pos < 0 or k_neg < 0 or k_pos + k_neg < 1:
        raise ValueError(
            f"collection.k_pos is {k_pos} and collection.k_neg {k_neg}: neither may be negative, and together they "
            "must be at least 1."
        )
    if k_pos + k_neg > most:
        raise ValueError(
            f"collection.k_pos + collection.k_neg is {k_pos} + {k_neg}, but a prompt gets at most {most} draws "
            f"({collection.max_rounds} rounds of {collection.samples_per_round}): no prompt could meet the rule. Lower "
            "them, or raise collection.max_rounds."
        )


def a_round_fills_a_group(collection: CollectionConfig) -> None:
    """positive, balance: group_size does not exceed samples_per_round."""
    if collection.strategy in ("positive", "balance") and collection.group_size > collection.samples_per_round:
        raise ValueError(
            f"collection.group_size is {collection.group_size}, collection.samples_per_round is "
            f"{collection.samples_per_round}: {collection.strategy} may stop after one round, which must fill a group "
            "and give reward/first_round, so group_size must not exceed samples_per_round. Lower the one or raise the "
            "other."
        )


def budget_is_within_draws(collection: CollectionConfig) -> None:
    """estimate: min_draws <= budget <= max_draws."""
    if collection.strategy != "estimate":
        return
    rounds = collection.samples_per_round * collection.max_rounds
    most = rounds if collection.max_draws is None else collection.max_draws
    budget, least = draw_budget(collection), collection.min_draws
    if not least <= most:
        raise ValueError(f"collection.min_draws is {least} and collection.max_draws {most}: lower the first.")
    if not least <= budget <= most:
        raise ValueError(
            f"collection.budget is {budget:g} draws for a prompt, but every prompt gets at least {least} and at most "
            f"{most}: {least * collection.prompts_per_iteration} to {most * collection.prompts_per_iteration} for "
            f"{collection.prompts_per_iteration} prompts. Choose a budget within [{least}, {most}], or other bounds "
            "(collection.min_draws, collection.max_draws)."
        )
    if collection.keep == "group" and least < collection.group_size:
        raise ValueError(
            f"collection.keep is 'group' with groups of {collection.group_size}, but a prompt may get only {least} "
            "draws: raise collection.min_draws, or keep the pool."
        )


def retries_end(collection: CollectionConfig) -> None:
    """ngu: retry_probability is in [0, 1], and below 1 where max_draws sets no limit."""
    probability, most = collection.retry_probability, max_draws(collection)
    if collection.strategy != "ngu":
        return
    if not 0 <= probability <= 1:
        raise ValueError(f"collection.retry_probability is {probability}; it must be in [0, 1].")
    if most is None and probability == 1:
        raise ValueError(
            "collection.retry_probability is 1 and collection.max_draws 0 (no limit): a prompt that the policy can't "
            "solve would be retried for ever. Lower the probability, or set a limit."
        )
    if most is not None and most < collection.group_size:
        raise ValueError(
            f"collection.max_draws is {most}, less than one round of {collection.group_size} "
            "(collection.group_size): raise it."
        )


def weights_are_finite(collection: CollectionConfig) -> None:
    """objective_epsilon is above 0 where w(p) grows without bound or may be 0, and below 1."""
    epsilon, objective = collection.objective_epsilon, collection.objective
    diverges = objective == "log" or (objective == "power" and collection.objective_alpha < 1)
    if diverges and not epsilon > 0:
        raise ValueError(
            f"collection.objective_epsilon is {epsilon} with the objective {objective}, whose weight w(p) grows "
            "without bound as p falls to 0: set it above 0 (0.01)."
        )
    # What draws pay may be 0 at a pass rate of 0 or 1, and advantages are divided by it.
    vanishes = collection.allocation == "variance" or objective == "power"
    if collection.strategy == "estimate" and vanishes and not epsilon > 0:
        raise ValueError(
            f"collection.objective_epsilon is {epsilon} with the allocation {collection.allocation} and the objective "
            f"{objective}: some pass rates would get no draws and divide advantages by 0. Set it above 0 (0.01)."
        )
    if not epsilon < 1:
        raise ValueError(f"collection.objective_epsilon is {epsilon}; it must be below 1: it is a pass rate.")


RULES: tuple[Callable[[CollectionConfig], None], ...] = (
    strategy_is_known, keep_fits_the_strategy, baseline_is_known, groups_have_a_baseline, goals_can_be_met,
    a_round_fills_a_group, budget_is_within_draws, retries_end, weights_are_finite,
)  # fmt: skip


def check_collection(collection: CollectionConfig) -> None:
    """Raises ValueError for the first rule of the section that is broken."""
    for rule in RULES:
        rule(collection)
