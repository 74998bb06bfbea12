"""Expected updates of corrected prompts, by enumeration of everything that an update depends on.

Two prompts, the outcomes and the lengths of all their responses, the rows that are kept, and the divisors. A response
is one of a few kinds, each correct or wrong and of one length; the policy of a prompt has one logit for each kind, so
the score of kind r is e_r - pi. The expected update of a prompt must be f'(p), cut at the most draws, times grad p,
with one constant for both prompts.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from reinforce_ada_jax.collection import corrections, strategies
from reinforce_ada_jax.collection.advantages import Group, make_group
from reinforce_ada_jax.collection.objectives import Objective
from reinforce_ada_jax.collection.selection import Proportional
from reinforce_ada_jax.collection.strategies import PromptProgress
from reinforce_ada_jax.training.updates import coefficient_factor, examples
from reinforce_ada_jax.types import Pool, Prompt, Response, ScoreNoise, Verdict
from tests import standins
from tests.running import tiny
from tests.scripted_rng import ScriptedRng

# (correct, tokens) of each kind of response, and the probabilities of the kinds for two prompts: p = 0.25 and 0.7.
KINDS = [(True, 1), (True, 5), (False, 1), (False, 2)]
POLICIES = [np.array([0.1, 0.15, 0.45, 0.3]), np.array([0.5, 0.2, 0.1, 0.2])]
RIGHT = np.array([correct for correct, _ in KINDS], float)
ESTIMATE, NOISE = 0.4, ScoreNoise(0.6, 0.8, 1.1)  # known before drawing, and not quite right
ROUNDS = 1.7  # expected
CONSTANT = 1 / (2 * ROUNDS * 8)  # two prompts, and the longest response has 8 tokens

SINGLE = {"strategy": "positive", "samples_per_round": 1, "max_rounds": 4}
PAIRS = {"strategy": "positive", "samples_per_round": 2, "max_rounds": 2}
BALANCE = {"strategy": "balance", "samples_per_round": 2, "max_rounds": 2, "group_size": 2}
EIGHTS = {"strategy": "positive", "samples_per_round": 8, "max_rounds": 1}
ONE_ROUND = {"strategy": "grpo", "group_size": 8}
SHAPES = {"single": SINGLE, "pairs": PAIRS, "balance": BALANCE, "eights": EIGHTS, "one round": ONE_ROUND}
OBJECTIVES = {
    "identity": Objective("identity"), "log": Objective("log"), "power": Objective("power", 0.5),
    "pass_at_k": Objective("pass_at_k", k=2),
}  # fmt: skip


def make_config(shape, objective, **changes):
    collection = shape | {"correction": "exact", "objective": objective.name, "objective_k": objective.k}
    settings = {f"collection.{name}": value for name, value in collection.items()}
    sizes = {"collection.prompts_per_iteration": 2, "learning.prompts_per_update": 2}
    return tiny(**settings | sizes | changes)


def rounds_of(size, policy):
    """Every result of a round, as kinds in draw order, with its probability; large rounds in one order of each."""
    if size <= 2:
        return [(kinds, math.prod(policy[list(kinds)])) for kinds in itertools.product(range(len(KINDS)), repeat=size)]
    results = []
    for kinds in itertools.combinations_with_replacement(range(len(KINDS)), size):
        counts = np.bincount(kinds, minlength=len(KINDS))
        orders = math.factorial(size) / math.prod(math.factorial(count) for count in counts)
        results.append((kinds, orders * math.prod(policy**counts)))
    return results


def pools_of(strategy, name, policy):
    """Every pool that a prompt may end with: its kinds in draw order, the pool, and its probability."""
    prompt = Prompt(name, "", "", np.ones(1, np.int32))
    open_pools, ended = [((), (), 1.0)], []
    while open_pools:
        kinds, sizes, probability = open_pools.pop()
        correct = sum(KINDS[kind][0] for kind in kinds)
        progress = PromptProgress(prompt, len(sizes), len(kinds), correct, estimate=ESTIMATE)
        size = strategies.round_size(strategy, progress)
        if size:
            of_round = rounds_of(size, policy)
            open_pools += [((*kinds, *more), (*sizes, size), probability * share) for more, share in of_round]
            continue
        responses = tuple(
            Response(name, draw, np.ones(KINDS[kind][1], np.int32), np.full(KINDS[kind][1], -1.0, np.float32), False)
            for draw, kind in enumerate(kinds)
        )
        verdicts = tuple(Verdict(KINDS[kind][0], float(KINDS[kind][0])) for kind in kinds)
        pool = Pool(prompt, responses, verdicts, len(sizes), strategy.met(progress), ESTIMATE, sizes, noise=NOISE)
        ended.append((kinds, pool, probability))
    assert math.fsum(probability for *_, probability in ended) == pytest.approx(1.0, abs=1e-12)
    return ended


def expected_updates(config, factor_of=coefficient_factor, coefficients=None):
    """The expected update of each prompt's logits; with other `coefficients` than those of the configuration."""
    strategy = strategies.build(config.collection, regularized=config.regularized)
    if coefficients is not None:
        strategy = dataclasses.replace(strategy, coefficients=coefficients, max_kept=None)
    every = []
    for name, policy in zip("ab", POLICIES, strict=True):
        found = []
        for kinds, pool, probability in pools_of(strategy, name, policy):
            group, update = make_group(pool, strategy), np.zeros(len(KINDS))
            for draw, example in zip(group.kept.tolist(), examples(group, 1.0), strict=True):
                assert example.response is pool.responses[draw]
                update += example.advantage * (np.eye(len(KINDS))[kinds[draw]] - policy)
            tokens = sum(pool.responses[draw].num_sampled for draw in group.kept.tolist())
            found.append((group, probability, update, tokens))
        every.append(found)
    expected = np.zeros((2, len(KINDS)))
    by_tokens = config.learning.aggregation == "token-mean"
    for (first, p, of_first, tokens), (second, q, of_second, more) in itertools.product(*every):
        dealt = [group for group in (first, second) if group.kept.size]
        if not dealt:
            continue
        counted = tokens + more if by_tokens else len(first.kept) + len(second.kept)  # what the loss divides by
        factor = factor_of(config, dealt, ROUNDS)
        expected += p * q * factor / counted * np.array([of_first, of_second])
    return expected


def wanted_updates(config, objective):
    """f'(p), its series cut at the most draws, times grad p, for each prompt."""
    most = strategies.build(config.collection).max_draws
    wanted = []
    for policy in POLICIES:
        p = policy @ RIGHT
        wanted.append(objective.series(most) @ (1 - p) ** np.arange(most) * policy * (RIGHT - p))
    return np.array(wanted)


VARIANTS = [("token-mean", "none"), ("seq-mean-token-sum", "none"), ("token-mean", "noise"), ("token-mean", "0.03")]


def whole_updates():
    """All combinations; of the fast ones each shape has each objective and each variant once."""
    for (row, shape), (column, objective), (number, variant) in itertools.product(
        enumerate(SHAPES), enumerate(OBJECTIVES), enumerate(VARIANTS)
    ):
        is_slow = number != (row + column) % len(VARIANTS)
        yield pytest.param(
            SHAPES[shape], OBJECTIVES[objective], *variant, id="-".join((shape, objective, *variant)),
            marks=[pytest.mark.slow] * is_slow,
        )  # fmt: skip


@pytest.mark.parametrize(("shape", "objective", "aggregation", "control_variate"), [*whole_updates()])
def test_the_expected_update_is_the_gradient_of_the_objective(shape, objective, aggregation, control_variate):
    changes = {"learning.aggregation": aggregation, "collection.control_variate": control_variate}
    config = make_config(shape, objective, **changes)
    np.testing.assert_allclose(
        expected_updates(config), CONSTANT * wanted_updates(config, objective), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("shape", ["single", "pairs", "balance"])
def test_exact_climbs_the_rewards_of_correct_responses(shape):
    # E[r s | correct] = grad E[r c] / p, with c = 1 for a correct response. The reward 0.5 of a wrong one has no part.
    rewards, objective, policy = np.array([1.0, 0.8, 0.5, 0.0]), OBJECTIVES["power"], POLICIES[0]
    strategy, found = strategies.build(make_config(SHAPES[shape], objective).collection), np.zeros(len(KINDS))
    for kinds, pool, probability in pools_of(strategy, "a", policy):
        verdicts = tuple(Verdict(KINDS[kind][0], rewards[kind]) for kind in kinds)
        group = make_group(dataclasses.replace(pool, verdicts=verdicts), strategy)
        for draw, coefficient in zip(group.kept.tolist(), group.advantages, strict=True):
            found += probability * coefficient * (np.eye(len(KINDS))[kinds[draw]] - policy)
    of_correct, failures = rewards * RIGHT, 1 - policy @ RIGHT
    slope = objective.series(4) @ failures ** np.arange(4)
    np.testing.assert_allclose(found, slope * policy * (of_correct - policy @ of_correct), rtol=1e-9)


@pytest.mark.parametrize("covered", [1, 2, 3])
def test_a_limit_of_covered_draws_changes_no_expectation(monkeypatch, covered):
    standins.constants(monkeypatch, corrections, MAX_COVERED=covered)
    config = make_config(SINGLE, OBJECTIVES["log"], **{"collection.control_variate": "noise"})
    assert error_of(config) < 1e-9


def samples():
    """Shapes, objectives and control variates; of the fast ones each shape has each objective once."""
    shapes = [name for name in SHAPES if name != "one round"]
    for (row, shape), (column, objective), (number, variate) in itertools.product(
        enumerate(shapes), enumerate(OBJECTIVES), enumerate(("none", "noise"))
    ):
        is_slow = number != (row + column) % 2
        names, marks = (shape, objective, variate), [pytest.mark.slow] * is_slow
        yield pytest.param(SHAPES[shape], OBJECTIVES[objective], variate, True, id="-".join(names), marks=marks)
    yield pytest.param(SINGLE, OBJECTIVES["log"], "noise", False, id="not divided")


@pytest.mark.parametrize(("shape", "objective", "control_variate", "divided"), [*samples()])
def test_the_expected_update_of_a_sample_is_the_mean_over_the_data(shape, objective, control_variate, divided):
    # One of two prompts is drawn, with probabilities that follow from pools before.
    changes = {"prompts_per_iteration": 1, "control_variate": control_variate}
    config = make_config(
        shape, objective, **{f"collection.{name}": value for name, value in changes.items()},
        **{"learning.prompts_per_update": 1},
    )  # fmt: skip
    strategy = strategies.build(config.collection)
    every = [pools_of(strategy, name, policy) for name, policy in zip("ab", POLICIES, strict=True)]
    before = pools_of(strategies.build(make_config(PAIRS, objective).collection), "a", POLICIES[0])
    unsolved, solved = (
        next(
            dataclasses.replace(pool, prompt=every[rate][0][1].prompt)
            for _, pool, _ in before
            if pool.correct.mean() == rate
        )
        for rate in (0, 1)
    )
    selection = Proportional([unsolved.prompt, solved.prompt])
    for _ in range(2):
        rows = Group(unsolved, np.zeros(1, int), np.array([1.0])), Group(solved, np.zeros(1, int), np.array([3.0]))
        selection.observe(rows * 50)
    probabilities, found = selection.probabilities(1), np.zeros((2, len(KINDS)))
    assert 0.2 < probabilities.min() < 0.4
    for prompt, point in enumerate((0.0, 1.0 - 1e-9)):
        choice = selection.choose(1, ScriptedRng((0, 1), point))
        weight = choice.weight_of()["ab"[prompt]] if divided else 1.0
        for kinds, pool, probability in every[prompt]:
            group = make_group(pool, strategy, prompt_weight=weight)
            if not group.kept.size:
                continue
            factor = coefficient_factor(config, [group], ROUNDS)
            tokens = sum(pool.responses[draw].num_sampled for draw in group.kept.tolist())
            for draw, example in zip(group.kept.tolist(), examples(group, factor), strict=True):
                score = np.eye(len(KINDS))[kinds[draw]] - POLICIES[prompt]
                found[prompt] += probabilities[prompt] * probability * example.advantage / tokens * score
    wanted = CONSTANT * wanted_updates(config, objective)
    if not divided:
        wanted *= 2 * probabilities[:, None]
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


def error_of(config, factor_of=coefficient_factor, coefficients=None):
    """The largest relative error of the direction of an expected update, whatever its length is."""
    found, wanted = expected_updates(config, factor_of, coefficients), wanted_updates(config, OBJECTIVES["log"])
    scale = (found * wanted).sum() / (wanted * wanted).sum()
    return np.abs(found / (scale * wanted) - 1).max()


def own_rounds(config, groups, rounds):
    """As an earlier version had it: divided by the rounds that the two prompts took themselves."""
    return coefficient_factor(config, groups, sum(group.pool.rounds for group in groups))


def own_tokens(config, groups, rounds):
    """The mean over tokens as it is."""
    return 1.0


def solved_prompts(config, groups, rounds):
    """A mean over the prompts that have rows."""
    return coefficient_factor(config, groups, rounds) / len(groups)


@pytest.mark.parametrize(
    ("wrong", "control_variate"),
    [
        (own_rounds, "none"),
        (own_tokens, "none"),
        (solved_prompts, "none"),
        (own_rounds, "noise"),
        (own_tokens, "noise"),
    ],
)
def test_a_divisor_that_depends_on_outcomes_is_found(wrong, control_variate):
    config = make_config(SINGLE, OBJECTIVES["log"], **{"collection.control_variate": control_variate})
    assert error_of(config) < 1e-9
    assert error_of(config, wrong) > 1e-2


def own_outcomes(pool):
    """b from the pass rate of the draws that it is subtracted from."""
    return [pool.correct.mean()] * pool.rounds


def all_rounds(pool):
    """b from the number of rounds, which is known at the end only."""
    return [0.5 / pool.rounds] * pool.rounds


def last_draw_left_out(pool):
    """b for failures alone."""
    return [0.4] * (pool.rounds - 1)


@pytest.mark.parametrize("wrong", [own_outcomes, all_rounds, last_draw_left_out])
def test_a_control_variate_that_is_not_fixed_before_its_draws_is_found(wrong):
    config = make_config(SINGLE, OBJECTIVES["log"])
    right = corrections.exact(OBJECTIVES["log"], control_variate=lambda pool: [0.4, 0.3, 0.2, 0.1])
    assert error_of(config, coefficients=right) < 1e-9
    assert error_of(config, coefficients=corrections.exact(OBJECTIVES["log"], control_variate=wrong)) > 1e-2
