"""Rules of the `collection` section alone, and the numbers that follow from its settings.

`validate` checks a run with them before any device work; collection/strategies.py checks each strategy that it builds.
"""

from collections.abc import Callable

from reinforce_ada_jax.config.settings import CollectionConfig
from reinforce_ada_jax.config.values import check_values

MIN_DRAWS = 2  # of a prompt under `estimate`: one draw has no mean to differ from


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


def first_round(collection: CollectionConfig) -> int | None:
    """Returns the draws of the first round of every prompt; None where they differ or a user's strategy decides."""
    if collection.strategy in ("positive", "balance"):
        return collection.samples_per_round
    return collection.group_size if collection.strategy in ("grpo", "dapo", "ngu") else None


def goals(collection: CollectionConfig) -> tuple[int, int]:
    """Returns (k_pos, k_neg), the correct and wrong responses that end the rounds of `positive` and `balance`."""
    half = collection.group_size // 2
    k_pos, k_neg = (1, 0) if collection.strategy == "positive" else (half, collection.group_size - half)
    return (
        k_pos if collection.k_pos is None else collection.k_pos,
        k_neg if collection.k_neg is None else collection.k_neg,
    )


def max_correct(collection: CollectionConfig) -> int | None:
    """Returns the most correct draws of a prompt; None for `balance`, and where rounds have no fixed size."""
    if collection.strategy == "balance":
        return None
    before = goals(collection)[0] - 1 if collection.strategy == "positive" else 0
    size = first_round(collection)
    return None if size is None else before + size


def correction(collection: CollectionConfig) -> str:
    """Returns the correction; where none is set, `exact` for adaptive strategies with an objective other than identity.

    The published runs have the objective identity, so they have no correction.
    """
    if collection.correction:
        return collection.correction
    adaptive = collection.strategy in ("positive", "balance", "ngu")
    return "exact" if adaptive and collection.objective != "identity" else "none"


def allocation(collection: CollectionConfig) -> str:
    """Returns how `estimate` allots draws; where it is not set, "variance" if w(p) is constant, else "hybrid"."""
    return collection.allocation or ("variance" if weight_is_constant(collection) else "hybrid")


def weight_is_constant(collection: CollectionConfig) -> bool:
    """Returns whether w(p) = f'(p) is the same for all pass rates."""
    exponents = {"identity": 0.0, "power": collection.objective_alpha - 1}
    return exponents.get(collection.objective) == 0


def draws_speculatively(collection: CollectionConfig) -> bool:
    """Returns True if idle slots start rounds before the verdicts that ask for them.

    By default it is True only for small rounds. Rounds of M = 8 leave few slots idle: 0.936 of slot-steps are useful
    with and without it. With M = 1 it is 0.89 with it and 0.52 without (docs/performance.md).
    """
    if collection.speculative is None:
        return collection.samples_per_round < collection.group_size
    return collection.speculative


def keep_fits_the_strategy(collection: CollectionConfig) -> None:
    """keep stays empty with dapo and ngu, which drop groups by rules of their own; it is no group with estimate."""
    if collection.keep and collection.strategy in ("dapo", "ngu"):
        raise ValueError(
            f"collection.keep is {collection.keep!r} with the strategy {collection.strategy}, whose own rule of what "
            "to keep drops groups without a signal: leave it empty."
        )
    if collection.keep == "group" and collection.strategy == "estimate":
        raise ValueError(
            "collection.keep is 'group' with the strategy estimate, which draws more responses for prompts that weigh "
            "more: groups of one size would lose this part of the weight. Leave it empty."
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


def unmet_has_a_rule(collection: CollectionConfig) -> None:
    """unmet is "keep" except with positive and balance, without a correction."""
    if collection.unmet != "keep" and collection.strategy not in ("positive", "balance"):
        raise ValueError(
            f"collection.unmet is {collection.unmet!r} with the strategy {collection.strategy}, but only positive and "
            "balance may end without their rule being met (dapo and ngu replace prompts by rules of their own): leave "
            "it at 'keep'."
        )
    if collection.unmet != "keep" and correction(collection) != "none":
        raise ValueError(
            f"collection.unmet is {collection.unmet!r} with the correction {correction(collection)}, whose expectation "
            "counts every prompt, solved or not: leave it at 'keep', or set the correction to none."
        )


def draws_follow_the_estimate(collection: CollectionConfig) -> None:
    """estimate: not pass_at_k; where w(p) is constant (identity), the allocation is "variance"."""
    if collection.strategy == "estimate" and collection.objective == "pass_at_k":
        raise ValueError(
            "collection.objective is 'pass_at_k' with the strategy estimate, whose number of draws follows w(p), and "
            "this weight falls to 0 where a prompt is always solved. Use the objective identity, log or power, or the "
            "strategy positive or balance."
        )
    if collection.strategy == "estimate" and weight_is_constant(collection) and allocation(collection) != "variance":
        raise ValueError(
            f"collection.allocation is {collection.allocation!r} with the objective {collection.objective}, whose "
            "weight is the same for every prompt: whatever is estimated, every prompt would get "
            f"{collection.samples_per_round} draws. Use the strategy grpo with groups of that size, the allocation "
            "variance, or the objective log or power."
        )


def a_round_fills_a_group(collection: CollectionConfig) -> None:
    """positive, balance: group_size does not exceed samples_per_round, where the update needs whole groups."""
    if collection.keep == "pool" or correction(collection) != "none":
        return
    if collection.strategy in ("positive", "balance") and collection.group_size > collection.samples_per_round:
        raise ValueError(
            f"collection.group_size is {collection.group_size}, collection.samples_per_round is "
            f"{collection.samples_per_round}: {collection.strategy} may stop after one round, which must fill a group. "
            "Lower group_size, raise samples_per_round, or set collection.correction to stratified or exact, which "
            "need no whole group."
        )


def budget_is_within_draws(collection: CollectionConfig) -> None:
    """estimate: samples_per_round is at least 2 and at most max_draws."""
    mean, most = collection.samples_per_round, max_draws(collection)
    if collection.strategy == "estimate" and most is not None and not MIN_DRAWS <= mean <= most:
        raise ValueError(
            f"collection.samples_per_round is {mean}, the mean draws of a prompt under estimate, but every prompt gets "
            f"at least {MIN_DRAWS} and at most {most}. Use at least {MIN_DRAWS}, and a collection.max_draws that is "
            "not below it."
        )


def retries_end(collection: CollectionConfig) -> None:
    """ngu: max_draws is at least group_size; where it sets no limit, retry_probability is below 1."""
    most = max_draws(collection)
    if collection.strategy != "ngu":
        return
    if most is None and collection.retry_probability == 1:
        raise ValueError(
            "collection.retry_probability is 1 and collection.max_draws 0 (no limit): a prompt that the policy can't "
            "solve would be retried forever. Lower the probability, or set a limit."
        )
    if most is not None and most < collection.group_size:
        raise ValueError(
            f"collection.max_draws is {most}, less than one round of {collection.group_size} "
            "(collection.group_size): raise it."
        )


def weights_are_finite(collection: CollectionConfig) -> None:
    """objective_epsilon is above 0 where w(p) grows without bound or may be 0."""
    epsilon, objective = collection.objective_epsilon, collection.objective
    diverges = objective == "log" or (objective == "power" and collection.objective_alpha < 1)
    if diverges and not epsilon > 0:
        raise ValueError(
            f"collection.objective_epsilon is {epsilon} with the objective {objective}, whose weight w(p) grows "
            "without bound as p falls to 0: set it above 0 (0.01)."
        )
    # The part of the weight that draws provide may be 0 at a pass rate of 0 or 1; advantages are divided by it.
    vanishes = allocation(collection) == "variance" or objective == "power"
    if collection.strategy == "estimate" and vanishes and not epsilon > 0:
        raise ValueError(
            f"collection.objective_epsilon is {epsilon} with the allocation {allocation(collection)} and the objective "
            f"{objective}: some pass rates would get no draws and divide advantages by 0. Set it above 0 (0.01)."
        )


def correction_fits(collection: CollectionConfig) -> None:
    """A correction has its own weights and baseline; objectives other than identity need one where pools are kept."""
    kind, strategy, objective = correction(collection), collection.strategy, collection.objective
    other_weights = collection.keep or collection.baseline or collection.normalize_by_std
    if objective == "maxrl" and (strategy != "grpo" or kind != "none" or other_weights):
        raise ValueError(
            f"collection.objective is 'maxrl' with the strategy {strategy} and the correction {kind}: it has "
            "weights of its own over one fixed round. Use the strategy grpo without keep, baseline, normalize_by_std "
            "and correction, or the objective log with the correction exact, which climbs the same with adaptive "
            "rounds."
        )
    if collection.control_variate != "none" and kind != "exact":
        raise ValueError(
            f"collection.control_variate is {collection.control_variate!r} with the correction {kind}: it belongs to "
            "the correction exact."
        )
    if kind == "none":
        _weights_count_once(collection)
        return
    if strategy not in ("grpo", "positive", "balance", "ngu"):
        raise ValueError(
            f"collection.correction is {kind!r} with the strategy {strategy}: it is derived for grpo, positive, "
            "balance and ngu. Set it to none, or give a strategy of your own its `coefficients`."
        )
    if collection.baseline or collection.normalize_by_std:
        raise ValueError(
            f"collection.correction is {kind!r}, which has weights and a baseline of its own: leave "
            "collection.baseline empty and collection.normalize_by_std off, or set the correction to none."
        )
    if kind == "exact":
        _series_is_reached(collection)


def _weights_count_once(collection: CollectionConfig) -> None:
    """Raises ValueError if w(p) counts twice: in the number of draws, which grows as p falls, and as a factor."""
    pools = collection.strategy == "ngu" or (
        collection.strategy in ("positive", "balance") and collection.keep == "pool"
    )
    if pools and collection.objective != "identity":
        raise ValueError(
            f"collection.objective is {collection.objective!r} with the strategy {collection.strategy}, every response "
            "kept and no correction: hard prompts have more responses in the update, and each is multiplied by w(p) as "
            "well, so w(p) counts twice. Set collection.correction to exact or stratified."
        )


def _series_is_reached(collection: CollectionConfig) -> None:
    """Raises ValueError if the rounds may end before the first correct response, or before the series begins."""
    most = max_draws(collection)
    if collection.strategy in ("positive", "balance") and goals(collection)[0] < 1:
        raise ValueError(
            "collection.k_pos is 0 with the correction exact, whose weights need a correct response: use at least 1."
        )
    if collection.objective == "pass_at_k" and most is not None and most < collection.objective_k:
        raise ValueError(
            f"collection.objective_k is {collection.objective_k}, but a prompt gets at most {most} draws, so the "
            "gradient would be 0. Lower objective_k, or allow more draws."
        )
    if collection.strategy == "ngu" and not collection.retry_probability > 0 and most != collection.group_size:
        raise ValueError(
            "collection.retry_probability is 0 with the correction exact, which divides by it: use the strategy grpo."
        )


RULES: tuple[Callable[[CollectionConfig], None], ...] = (
    keep_fits_the_strategy, goals_can_be_met, unmet_has_a_rule, draws_follow_the_estimate, a_round_fills_a_group,
    budget_is_within_draws, retries_end, weights_are_finite, correction_fits,
)  # fmt: skip


def check_collection(collection: CollectionConfig) -> None:
    """Raises ValueError for the first setting of the section whose value is not allowed, or the first broken rule."""
    check_values(collection, "collection.")
    for rule in RULES:
        rule(collection)
