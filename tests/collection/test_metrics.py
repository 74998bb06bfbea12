"""Metrics of a collection, each against a few pools that are counted by hand."""

import dataclasses
import itertools

import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.collection.collect import collect
from reinforce_ada_jax.collection.metrics import MAX_ROUND_METRICS, collection_metrics
from reinforce_ada_jax.types import Pool, Prompt, Response, Verdict


def make_group(prompt_id, rewards, advantages, *, rounds, met, lengths, truncated=(), reasons=()):
    responses = tuple(
        Response(prompt_id, draw, np.zeros(length, np.int32), np.full(length, -draw, np.float32), draw in truncated)
        for draw, length in enumerate(lengths)
    )
    reasons = [*reasons, *[""] * (len(rewards) - len(reasons))]
    verdicts = tuple(Verdict(reward > 0.7, reward, reason) for reward, reason in zip(rewards, reasons, strict=True))
    pool = Pool(Prompt(prompt_id, "", "", np.zeros(1, np.int32)), responses, verdicts, rounds, met)
    return Group(pool, np.arange(len(advantages)), np.array(advantages))


def measured(groups, group_size, num_prompts=None, thresholds=None):
    """Metrics of groups without replacements, with the thresholds of a balanced group."""
    half = group_size // 2
    return collection_metrics(groups, group_size, num_prompts or len(groups), thresholds or (half, group_size - half))


def test_by_hand():
    """Each metric of some groups is that counted by hand."""
    groups = [
        # Never solved: 6 draws in 3 rounds.
        make_group(
            "a", [0.0] * 6, [0.0, 0.0], rounds=3, met=False, lengths=[1] * 6, truncated=(0, 5),
            reasons=["timeout", "no_answer", "no_answer", "crash"],
        ),
        # Solved at the third draw.
        make_group("b", [0.0, 0.0, 1.0, 1.0], [-0.5, 0.5], rounds=2, met=True, lengths=[3, 3, 2, 2]),
        # One draw only: fewer than n.
        make_group("c", [1.0], [1.0], rounds=1, met=True, lengths=[4], reasons=["too_long"]),
    ]  # fmt: skip
    assert measured(groups, group_size=2) == {
        # The first two draws: means 0, 0 and 1 (c has one). Pool means 0, 1/2, 1 would give 1/2.
        "reward/first_round": pytest.approx(1 / 3),
        "reward/first_round_correct": pytest.approx(1 / 3),
        # 3 hits in 11 responses.
        "reward/pool": pytest.approx(3 / 11),
        # Log-probability -0 of every first draw, -1 of every second one: a has a token each, b three. All draws of all
        # prompts would give 39 / 20.
        "collection/entropy": pytest.approx((1 + 3) / (2 + 6 + 4)),
        "collection/responses": 11,
        "collection/tokens": 6 + 10 + 4,
        "collection/kept": 2 + 2 + 1,
        "collection/replacements": 0,
        "collection/rounds_mean": 2.0,
        "collection/zero_signal_share": pytest.approx(1 / 3),
        "collection/dropped_share": 0.0,
        "collection/weight_clipped_share": 0.0,
        "collection/unmet_share": pytest.approx(1 / 3),
        "collection/truncated_share": pytest.approx(2 / 11),
        # All rewards of a are 0, and c has one; b has both rewards.
        "frac_reward_zero_std": pytest.approx(2 / 3),
        "completions/mean_length": pytest.approx(20 / 11),
        # Rounds 3, 2, 1.
        "collection/active_round_1": 3,
        "collection/active_round_2": 2,
        "collection/active_round_3": 1,
        # 6, 4 and 1 draws; a tenth of the way from 1 to 6 in two steps: 1 + 0.2 * 3, 4 + 0.8 * 2.
        "collection/draws_mean": pytest.approx(11 / 3),
        "collection/draws_p10": pytest.approx(1.6),
        "collection/draws_p50": 4.0,
        "collection/draws_p90": pytest.approx(5.6),
        "collection/draws_max": 6,
        # 11 draws; three groups of two are 6.
        "collection/extra_samples": 5,
        # c in its only round, b in its second, a never.
        "collection/met_round_1": 1,
        "collection/met_round_2": 2,
        "collection/met_round_3": 2,
        # A correct response within 1, 2, 3 rounds: the third draw of b is in its second round.
        "collection/met_k_pos_round_1": 1,
        "collection/met_k_pos_round_2": 2,
        "collection/met_k_pos_round_3": 2,
        # Of one each: a has no correct response, c no wrong one.
        "collection/below_k_pos_share": pytest.approx(1 / 3),
        "collection/below_k_neg_share": pytest.approx(1 / 3),
        "collection/unmet_no_correct_share": pytest.approx(1 / 3),
        "collection/unmet_no_wrong_share": 0.0,
        # A response without an answer or too long to look at is no failure of the verifier.
        "collection/verifier_failures": 2,
        "collection/verdict_crash": 1,
        "collection/verdict_no_answer": 2,
        "collection/verdict_timeout": 1,
        "collection/verdict_too_long": 1,
    }


def test_replacements_are_counted_and_kept_out_of_the_first_round():
    groups = [
        make_group("dropped", [0.0, 0.0], [], rounds=1, met=False, lengths=[1, 1]),
        make_group("kept", [1.0, 0.0], [0.5, -0.5], rounds=1, met=True, lengths=[1, 1]),
        make_group("replacement", [1.0, 0.8], [0.1, -0.1], rounds=1, met=True, lengths=[1, 1]),
    ]
    metrics = measured(groups, group_size=2, num_prompts=2)
    # A replacement is there because another failed: with it the pass rate of the data would be 1/2, not 1/4.
    assert metrics["reward/first_round"] == metrics["reward/first_round_correct"] == 0.25
    assert metrics["collection/replacements"] == 1
    # The draws for a replacement are extra: 6 in all, where two prompts of GRPO have 4.
    assert metrics["collection/extra_samples"] == 2
    assert metrics["collection/dropped_share"] == metrics["collection/zero_signal_share"] == pytest.approx(1 / 3)
    assert metrics["collection/kept"] == 4


def test_tokens_of_an_environment_are_not_counted():
    logprobs = np.array([-1, 0, 0, 0, -3], np.float32)
    response = Response("p", 0, np.zeros(5, np.int32), logprobs, False, segments=(1, 3, 1))
    pool = Pool(Prompt("p", "", "", np.zeros(1, np.int32)), (response,), (Verdict(True, 1.0),), 1, True)
    metrics = measured([Group(pool, np.zeros(0, int), np.zeros(0))], group_size=1)
    assert metrics["collection/tokens"] == metrics["completions/mean_length"] == 2
    assert metrics["collection/entropy"] == 2  # (1 + 3) / 2; over all tokens 4 / 5


def first_round_of_all_sequences(sizes, group_size, met) -> float:
    """`reward/first_round` over all sequences of outcomes, once each: its expectation at a pass rate of 1/2."""
    outcomes = list(itertools.product((0.0, 1.0), repeat=sum(sizes)))
    strategy = strategies.Strategy(
        next_draws=lambda progress: 0 if met(progress) else (*sizes, 0)[progress.rounds],
        met=met,
        keep=strategies.keep_all,
        max_draws=sum(sizes),
        max_kept=None,
    )
    prompts = [Prompt(str(row), "", "", np.zeros(1, np.int32)) for row in range(len(outcomes))]

    def sample(queue):
        while requests := queue.take(64):
            token = np.zeros(1, np.int32), np.zeros(1, np.float32)
            yield [Response(request.prompt.id, request.draw, *token, False) for request in requests]

    def verify(pairs):
        rewards = [outcomes[int(prompt.id)][response.draw] for prompt, response in pairs]
        return [Verdict(reward > 0.5, reward) for reward in rewards]

    pools = collect(prompts, sample, verify, strategy)
    assert {pool.round_sizes for pool in pools} == {sizes[:rounds] for rounds in range(1, len(sizes) + 1)}
    groups = [Group(pool, np.zeros(0, int), np.zeros(0)) for pool in pools]
    return measured(groups, group_size)["reward/first_round"]


@pytest.mark.parametrize(
    ("sizes", "group_size"),
    [
        ((1,) * 6, 4),  # single draws
        ((2, 2, 2), 4),  # the first n draws would be 2 of mean 2/3 (three in four) or 4 of mean 1/4: 0.5625
        ((4, 4), 4),
        ((1, 5), 4),
        ((5, 1), 4),
    ],
)
def test_first_round_is_the_pass_rate_for_rounds_of_any_size(sizes, group_size):
    assert first_round_of_all_sequences(sizes, group_size, lambda progress: progress.correct > 0) == 0.5


def test_first_round_is_the_first_n_draws_where_the_round_has_more():
    # A first round of 5, n = 4, then one more draw: its fifth draw is no part of the mean, its fourth is.
    group = make_group("a", [1.0, 0.0, 0.0, 1.0, 1.0, 1.0], [], rounds=2, met=True, lengths=[1] * 6)
    unequal = Group(dataclasses.replace(group.pool, round_sizes=(5, 1)), group.kept, np.zeros(0))
    assert measured([unequal], group_size=4)["reward/first_round"] == 0.5
    # A pool that does not name its rounds has equal ones: 3 and 3.
    assert measured([group], group_size=4)["reward/first_round"] == pytest.approx(1 / 3)


def test_outcome_and_reward_are_two_things():
    # A penalty took half of a right answer's reward: the pass rate does not see it.
    pool = make_group("long", [1.0, 0.5], [0.1, -0.1], rounds=1, met=True, lengths=[1, 1]).pool
    right = Pool(pool.prompt, pool.responses, (Verdict(True, 1.0), Verdict(True, 0.5)), 1, True)
    metrics = measured([Group(right, np.arange(2), np.array([0.1, -0.1]))], group_size=2)
    assert (metrics["reward/first_round"], metrics["reward/first_round_correct"]) == (0.75, 1.0)


def test_extra_samples_are_negative_where_fewer_are_drawn():
    groups = [make_group(name, [0.0] * 2, [], rounds=1, met=True, lengths=[1] * 2) for name in "ab"]
    assert measured(groups, group_size=4)["collection/extra_samples"] == -4


def test_shares_below_the_thresholds_at_the_end():
    rewards = {"a": [1.0, 1.0, 1.0, 0.0], "b": [1.0, 0.0, 0.0, 0.0], "c": [1.0, 1.0, 0.0, 0.0], "d": [0.0] * 4}
    groups = [make_group(name, row, [], rounds=2, met=name == "a", lengths=[1] * 4) for name, row in rewards.items()]
    found = {
        thresholds: tuple(
            measured(groups, 4, thresholds=thresholds)[f"collection/below_k_{side}_share"] for side in ("pos", "neg")
        )
        for thresholds in ((3, 1), (1, 0), (2, 2), (4, 4))
    }
    # Correct 3, 1, 2, 0 of 4.
    assert found == {(3, 1): (0.75, 0.0), (1, 0): (0.25, 0.0), (2, 2): (0.5, 0.25), (4, 4): (1.0, 0.75)}


def test_thresholds_met_within_rounds_of_different_sizes():
    # Rounds of 1, 3 and 2: correct draws 0, 3 and 5.
    group = make_group("a", [1.0, 0.0, 0.0, 1.0, 0.0, 1.0], [], rounds=3, met=True, lengths=[1] * 6)
    pool = dataclasses.replace(group.pool, round_sizes=(1, 3, 2))
    metrics = measured([dataclasses.replace(group, pool=pool)], 4, thresholds=(2, 3))
    assert [metrics[f"collection/met_k_pos_round_{number}"] for number in (1, 2, 3)] == [0, 1, 1]
    # The rule was met at the end, with the third wrong one.
    assert [metrics[f"collection/met_round_{number}"] for number in (1, 2, 3)] == [0, 0, 1]


def test_unmet_prompts_by_the_side_they_lack():
    wanted = {
        "none right": ([0.0, 0.0, 0.0], False),
        "none wrong": ([1.0, 1.0, 1.0], False),
        "too few right": ([0.0, 1.0, 0.0], False),
        "none wrong either, and content with it": ([1.0, 1.0, 1.0], True),
        "none wrong, again": ([1.0, 1.0], False),
    }
    groups = [
        make_group(name, rewards, [], rounds=1, met=met, lengths=[1] * len(rewards))
        for name, (rewards, met) in wanted.items()
    ]
    metrics = measured(groups, group_size=2)
    assert metrics["collection/unmet_share"] == pytest.approx(0.8)
    assert metrics["collection/unmet_no_correct_share"] == pytest.approx(0.2)
    assert metrics["collection/unmet_no_wrong_share"] == pytest.approx(0.4)


def test_rounds_without_a_limit_do_not_make_keys_without_a_limit():
    group = make_group("hard", [0.0] * 50, [], rounds=50, met=False, lengths=[1] * 50)
    for name in ("active", "met", "met_k_pos"):
        rounds = [key for key in measured([group], group_size=2) if f"/{name}_round" in key]
        assert rounds == [f"collection/{name}_round_{number}" for number in range(1, MAX_ROUND_METRICS + 1)]


def test_the_length_penalty_of_right_answers():
    group = make_group("a", [1.0, 0.0, 1.0], [0.0] * 3, rounds=1, met=True, lengths=[1] * 3)
    assert "reward/penalty" not in measured([group], group_size=2)
    first, wrong, last = group.pool.verdicts
    verdicts = dataclasses.replace(first, penalty=0.5), wrong, last
    metrics = measured(
        [dataclasses.replace(group, pool=dataclasses.replace(group.pool, verdicts=verdicts))], group_size=2
    )
    # Over the two right answers, one of them within the limit; the first two rewards stay 1 and 0.
    assert (metrics["reward/penalty"], metrics["reward/first_round"]) == (0.25, 0.5)
