"""What the settings of a collection mean together: derived numbers, and the rules that they must keep.

For the `collection` section of a configuration, or anything that has its fields. config.py checks a run with it before
any device work, collection/strategies.py whatever it builds.
"""

from typing import Any

STRATEGIES = ("grpo", "positive", "balance", "estimate", "dapo", "ngu")
KEEPS = ("group", "pool")
BASELINES = ("group", "pool", "leave_one_out", "anchored")
OBJECTIVES = ("identity", "log", "power")
ALLOCATIONS = ("hybrid", "sampling", "variance")


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}.")


def max_draws(collection: Any) -> int | None:
    """The most draws for one prompt under the built-in strategies; None: there is no limit."""
    if collection.strategy in ("grpo", "dapo"):
        return collection.group_size
    rounds = collection.samples_per_round * collection.max_rounds
    if collection.strategy == "ngu" and collection.max_draws == 0:
        return None
    if collection.strategy in ("estimate", "ngu") and collection.max_draws is not None:
        return collection.max_draws
    return rounds


def goals(collection: Any) -> tuple[int, int]:
    """(k_pos, k_neg): correct and wrong responses that end the rounds of `positive` and `balance`."""
    half = collection.group_size // 2
    k_pos, k_neg = (1, 0) if collection.strategy == "positive" else (half, collection.group_size - half)
    return (
        k_pos if collection.k_pos is None else collection.k_pos,
        k_neg if collection.k_neg is None else collection.k_neg,
    )


def draw_budget(collection: Any) -> float:
    """Draws for a prompt on average, under `estimate`."""
    return float(collection.samples_per_round if collection.budget is None else collection.budget)


def check_collection(collection: Any) -> None:
    """The rules of the `collection` section that concern its strategy and its objective.

    Raises:
      ValueError: the first rule broken.
    """
    strategy, group_size, most = collection.strategy, collection.group_size, max_draws(collection)
    if ":" not in strategy and strategy not in STRATEGIES:
        raise ValueError(
            f"collection.strategy is {strategy!r}; it must be one of {', '.join(STRATEGIES)}, or name a function of "
            "yours as file.py:function."
        )
    if collection.keep:
        check_choice("collection.keep", collection.keep, KEEPS)
        if strategy in ("dapo", "ngu"):
            raise ValueError(
                f"collection.keep is {collection.keep!r} with the strategy {strategy}, whose own rule of what to keep "
                "drops groups without a signal: leave it empty."
            )
    if collection.baseline:
        check_choice("collection.baseline", collection.baseline, BASELINES)
    check_choice("collection.allocation", collection.allocation, ALLOCATIONS)
    check_choice("collection.objective", collection.objective, OBJECTIVES)
    if group_size < 2:
        raise ValueError(
            f"collection.group_size is {group_size}: a group of one has no baseline to differ from. Use at least 2."
        )
    if strategy in ("positive", "balance"):
        _check_rounds(collection, most)
    if strategy == "estimate":
        _check_budget(collection, most)
    if strategy == "ngu":
        _check_retries(collection, most)
    diverges = collection.objective == "log" or (collection.objective == "power" and collection.objective_alpha < 1)
    if diverges and not collection.objective_epsilon > 0:
        raise ValueError(
            f"collection.objective_epsilon is {collection.objective_epsilon} with the objective "
            f"{collection.objective}, whose weight w(p) grows without bound as p falls to 0: set it above 0 (0.01)."
        )
    # What draws pay may be 0 at a pass rate of 0 or 1, and advantages are divided by it.
    vanishes = collection.allocation == "variance" or collection.objective == "power"
    if strategy == "estimate" and vanishes and not collection.objective_epsilon > 0:
        raise ValueError(
            f"collection.objective_epsilon is {collection.objective_epsilon} with the allocation "
            f"{collection.allocation} and the objective {collection.objective}: some pass rates would get no draws and "
            "divide advantages by 0. Set it above 0 (0.01)."
        )
    if not collection.objective_epsilon < 1:
        raise ValueError(
            f"collection.objective_epsilon is {collection.objective_epsilon}; it must be below 1: it is a pass rate."
        )


def _check_rounds(collection: Any, most: int) -> None:
    """`positive` and `balance`: the rule can be met, and one round fills a group."""
    k_pos, k_neg = goals(collection)
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
    if collection.group_size > collection.samples_per_round:
        raise ValueError(
            f"collection.group_size is {collection.group_size}, collection.samples_per_round is "
            f"{collection.samples_per_round}: {collection.strategy} may stop after one round, which must fill a group "
            "and give reward/first_round, so group_size must not exceed samples_per_round. Lower the one or raise the "
            "other."
        )


def _check_budget(collection: Any, most: int) -> None:
    """`estimate`: the bounds leave room for the budget."""
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


def _check_retries(collection: Any, most: int | None) -> None:
    """`ngu`: retries end."""
    chance = collection.retry_probability
    if not 0 <= chance <= 1:
        raise ValueError(f"collection.retry_probability is {chance}; it must be in [0, 1].")
    if most is None and chance == 1:
        raise ValueError(
            "collection.retry_probability is 1 and collection.max_draws 0 (no limit): a prompt that the policy can't "
            "solve would be retried for ever. Lower the probability, or set a limit."
        )
    if most is not None and most < collection.group_size:
        raise ValueError(
            f"collection.max_draws is {most}, less than one round of {collection.group_size} "
            "(collection.group_size): raise it."
        )
