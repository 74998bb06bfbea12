"""Minibatches of an iteration, with a learner that is scripted: what is refused, skipped, written down and said."""

import dataclasses
import itertools
import json
import re
import time
from unittest.mock import Mock

import numpy as np
import pytest

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.advantages import make_group
from reinforce_ada_jax.collection.averages import Averages
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.distributed.signals import Interrupted, Stop
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.learning.logprob_gap import LogprobGap
from reinforce_ada_jax.learning.packing import RowLayout
from reinforce_ada_jax.learning.update import EXPERT_METRICS, LearnerState, UpdateMetrics
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.training.run import Run, TrainingStopped
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.training.updates import (
    batch_rows,
    check_logprobs,
    expected_rounds,
    make_minibatches,
    make_updates,
    update_means,
)
from reinforce_ada_jax.types import Pool, Prompt, Response, Verdict
from tests.running import tiny
from tests.sampling.tiny import ARCHITECTURE

COUNT = 3  # minibatches, each of two prompts


def response(prompt_id, draw):
    logprobs = -np.ones(2 + draw % 2, np.float32)
    return Response(prompt_id, draw, np.ones(len(logprobs), np.int32), logprobs, False)


def make_group_of(name, outcomes, rounds, config, strategy=None):
    """The group of one prompt with these outcomes of its draws."""
    responses = tuple(response(name, draw) for draw in range(len(outcomes)))
    verdicts = tuple(Verdict(outcome == 1, float(outcome)) for outcome in outcomes)
    pool = Pool(Prompt(name, "", "", np.ones(3, np.int32)), responses, verdicts, rounds, True)
    return make_group(pool, strategy or strategies.build(config.collection))


def make_groups(config):
    strategy = strategies.build(config.collection)
    groups = []
    for row in range(2 * COUNT):
        verdicts = tuple(Verdict(draw % 2 == 0, float(draw % 2 == 0)) for draw in range(4))
        responses = tuple(response(f"p{row}", draw) for draw in range(4))
        pool = Pool(Prompt(f"p{row}", "", "", np.ones(3, np.int32)), responses, verdicts, 1, True)
        groups.append(make_group(pool, strategy, np.zeros(4, int)))
    return groups


def after(updates: int) -> LearnerState:
    """The state after `updates` updates; it has no weights."""
    return LearnerState({}, (), updates)


class ScriptedLearner(Learner):
    """Scores as the engine did, and makes updates whose gradients are finite or not, as `finite` says.

    Without old log-probabilities it finds `gap`, and makes no update where that is too large or not finite.
    """

    layout, micro_rows, architecture, loss_needs_all = RowLayout(), 8, ARCHITECTURE, False

    def __init__(self, finite, score=lambda logprobs: logprobs, gap=(0.0, 0.0, 1.0, 0.0)):
        self.finite, self._score, self.gap = iter(finite), score, LogprobGap(*np.float32(gap))
        self.versions = []

    def put(self, batch):
        return batch

    def score(self, params, batch, between):
        return self._score(batch.behaviour_logprobs.copy())

    def update(self, state, batch, base, policy_version, between):
        between()
        gap = None if batch.old_logprobs is not None else self.gap
        finite = next(self.finite) and (gap is None or not gap.num_not_finite)
        loss = np.float32(state.updates) if finite else np.float32(np.nan)
        numbers = dict.fromkeys(UpdateMetrics._fields, loss) | {"computed_share": np.float32(1), "gap": gap}
        numbers |= {"finite": np.bool(finite), "weights_finite": np.bool(True)}
        self.versions.append(policy_version)
        made = finite and (gap is None or gap.largest < 1e-3)
        return after(state.updates + made), UpdateMetrics(**numbers)


def make_run(config, learner, workdir, strategy=None, stop=None):
    """A run of which only the updates are made; it has no weights."""
    run = Mock(
        spec=Run, config=config, strategy=strategy or strategies.build(config.collection), learner=learner,
        workdir=workdir, base=None, reference=None, progress=Mock(spec=Progress), stop=stop or Stop(),
    )  # fmt: skip
    run.policy = lambda state: {}
    return run


def before(iteration, updates=0, skipped=0, rounds=1.0):
    """The state before an iteration, in which prompts are expected to take as many rounds."""
    averages = Averages({"rounds": (rounds, 1.0)})
    return RunState(after(updates), {}, iteration=iteration - 1, skipped_in_a_row=skipped, averages=averages)


def deal(run, groups, rounds=1.0):
    return make_minibatches(run, before(1, rounds=rounds), groups)


def check(run, minibatches, iteration, say):
    run.progress.say = say
    return check_logprobs(run, before(iteration), minibatches)


def update(run, minibatches, iteration, say, updates=0, skipped=0):
    run.progress.say = say
    return make_updates(run, before(iteration, updates, skipped), minibatches)


@pytest.fixture
def updates(tmp_path):
    def make(finite=(True,) * COUNT, score=lambda logprobs: logprobs, gap=(0.0, 0.0, 1.0, 0.0), **changes):
        config = tiny(**{
            "collection.prompts_per_iteration": 2 * COUNT, "learning.prompts_per_update": 2, **changes,
        })  # fmt: skip
        made = make_run(config, ScriptedLearner(finite, score, gap), tmp_path)
        return made, deal(made, make_groups(config))

    return make


def test_every_update_counts(updates):
    made, minibatches = updates()
    said = []
    checked, gap = check(made, minibatches, 1, said.append)
    assert all(minibatch.finite for minibatch in checked)
    assert gap == {"update/logprob_gap": 0.0, "update/logprob_gap_max": 0.0}
    done = update(made, checked, 1, said.append, skipped=2)
    assert done.learner.updates == COUNT and done.metrics["update/count"] == COUNT and not said and done.stopped is None
    assert done.skipped_in_a_row == 0 and done.metrics["update/loss"] == np.mean(range(COUNT))


def test_updates_that_would_outlast_the_machine_are_broken_off(updates):
    made, minibatches = updates()
    asked, agreed = [], []

    class Late(Stop):
        def agree(self):
            agreed.append(0)

        def has_time(self, seconds):
            asked.append(seconds)
            return len(asked) < 4

    scripted = made.learner.update
    made.learner.update = lambda *arguments: (time.sleep(0.05), scripted(*arguments))[1]
    made.stop = Late()
    with pytest.raises(Interrupted):
        update(made, minibatches, 1, pytest.fail)
    # Before the second and the third of them, and inside of them, with the time that those left take.
    assert COUNT > 2 and len(asked) == 4 and all(seconds > 0 for seconds in asked[::2])
    assert asked[1] <= asked[0] and asked[3] <= asked[2]
    assert len(agreed) == 1, "inside the first one, which has not taken the state"


def test_a_request_to_end_breaks_off_the_first_update(updates):
    made, minibatches = updates()
    made.stop = Stop(asked=lambda: True, time_left=pytest.fail)
    with pytest.raises(Interrupted):
        update(made, minibatches, 1, pytest.fail)


def test_a_gradient_that_is_not_finite_stops_and_is_written_down(updates, tmp_path):
    made, minibatches = updates([True, False])
    done = update(made, minibatches, 7, print)
    stopped = done.stopped
    assert done.learner.updates == 1 and done.metrics["update/count"] == 1, "the state before it; the third is left out"
    assert re.match(r"iteration 7, update 2 of 3: loss nan, .* not finite\.", str(stopped))
    file = tmp_path / "non_finite" / "000007-2.json"
    assert str(file) in str(stopped) and "learning.max_skipped is 0" in str(stopped)
    written = json.loads(file.read_text())
    assert (written["iteration"], written["update"]) == (7, 2)
    kept = [(row["prompt"], row["draw"]) for row in written["responses"]]
    assert sorted(kept) == sorted(
        (group.pool.prompt.id, draw) for group in minibatches[1].groups for draw in group.kept.tolist()
    )
    assert len(kept) == 8
    for row in written["responses"]:
        assert row["prompt_tokens"] == 3 and row["response_tokens"] == 2 + row["draw"] % 2
        assert row["advantage"] == (0.5 if row["reward"] else -0.5) and row["least_logprob"] == -1.0


def test_skipped_updates_are_counted_and_do_not_spoil_the_means(updates):
    made, minibatches = updates([False, True, False], **{"learning.max_skipped": 3})
    said = []
    done = update(made, minibatches, 1, said.append, updates=5)
    assert done.stopped is None and done.learner.updates == 6
    assert done.metrics["update/count"] == 1 and done.metrics["update/loss"] == 5.0
    assert done.skipped_in_a_row == 1 and len(said) == 2 and all("It is skipped." in text for text in said)


def test_too_many_in_a_row_stop(updates):
    made, minibatches = updates([False] * 9, **{"learning.max_skipped": 4})
    first = update(made, minibatches, 1, [].append)
    second = update(made, minibatches, 2, [].append, skipped=first.skipped_in_a_row)
    assert re.search(r"update 2 of 3: .* makes 5 in a row; learning.max_skipped is 4", str(second.stopped))


def poison(logprobs):
    logprobs[logprobs.shape[0] // 2, 0] = np.nan
    return logprobs


def test_a_log_probability_that_is_not_finite(updates, tmp_path):
    made, minibatches = updates([], score=poison)
    checked, gap = check(made, minibatches, 1, print)
    assert gap["update/logprob_gap_max"] == 0.0
    done = update(made, checked, 1, print)
    assert re.match(r"iteration 1, update 1 of 3: a log-probability is not finite\.", str(done.stopped))
    assert (tmp_path / "non_finite" / "000001-1.json").exists() and done.metrics["update/count"] == 0
    made, minibatches = updates([], score=poison, **{"learning.max_skipped": 3})
    done = update(made, check(made, minibatches, 1, print)[0], 1, [].append)
    assert done.stopped is None and done.skipped_in_a_row == 3 and done.metrics["update/count"] == 0


def test_skipped_updates_are_in_a_row_only_without_one_between_them(updates, tmp_path):
    # The first and the third have a log-probability that is not finite, which is known before any update is made.
    scores = itertools.count()
    made, minibatches = updates(
        score=lambda logprobs: logprobs if next(scores) == 1 else poison(logprobs),
        **{"learning.max_skipped": 1},
    )
    checked, _ = check(made, minibatches, 4, print)
    assert [minibatch.finite for minibatch in checked] == [False, True, False]
    done = update(made, checked, 4, [].append)
    assert done.stopped is None and done.skipped_in_a_row == 1 and done.metrics["update/count"] == 1
    assert sorted(file.name for file in (tmp_path / "non_finite").iterdir()) == ["000004-1.json", "000004-3.json"]
    # A gradient of the second one that is not finite has a file of its own, and ends the run: two in a row.
    made.learner.finite = iter([False])
    done = update(made, checked, 5, [].append)
    assert re.match(r"iteration 5, update 2 of 3: loss .* makes 2 in a row", str(done.stopped))
    assert (tmp_path / "non_finite" / "000005-2.json").exists()


def test_what_padding_holds_is_no_log_probability(updates):
    def poison_padding(logprobs):
        logprobs[:, 3:] = np.nan  # no response has more than three tokens
        return logprobs

    made, minibatches = updates(score=poison_padding)
    checked, gap = check(made, minibatches, 1, print)
    assert all(minibatch.finite for minibatch in checked)
    assert gap == {"update/logprob_gap": 0.0, "update/logprob_gap_max": 0.0}


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "remedy"),
    [
        ("float32", "model", None), ("bfloat16", "model", "model.compute_dtype is too coarse"),
        ("float32", "int8", "set sampling.weight_dtype or sampling.kv_dtype to model"),
    ],
)  # fmt: skip
def test_a_gap_between_engine_and_learner(updates, dtype, weight_dtype, remedy):
    changes = {"model.compute_dtype": dtype, "sampling.weight_dtype": weight_dtype}
    made, minibatches = updates(score=lambda logprobs: logprobs + np.float32(0.1), **changes)
    said = []
    if remedy is None:
        with pytest.raises(TrainingStopped, match=r"engine and learner disagree by 0\.1 .* explains 1e-05 and 0\.01\."):
            check(made, minibatches, 1, said.append)
        return
    checked, gap = check(made, minibatches, 1, said.append)
    assert len(checked) == COUNT and gap["update/logprob_gap"] == pytest.approx(0.1, rel=1e-5)
    assert "iteration 1: engine and learner differ by 0.1 a token on average" in said[0] and remedy in said[0]
    # Samples of an earlier policy may differ as much as they like.
    assert check(made, minibatches, 2, said.append)[1] == {}


def test_rows_of_a_batch_are_one_number_or_grow_by_doubling(updates):
    # Two prompts an update. At most 16 responses a prompt need 32 rows; without a limit there are 2 x 4 at first.
    ngu = {"collection.strategy": "ngu", "collection.group_size": 4}
    limited, unlimited = (updates(**ngu | {"collection.max_draws": most})[0] for most in (16, 0))

    def found(of, sizes):
        return [batch_rows(of.config, of.strategy, of.learner, rows) for rows in sizes]

    assert found(limited, (0, 9, 32)) == [32, 32, 32]
    assert found(unlimited, (0, 8, 9, 33)) == [8, 8, 16, 64]


def test_groups_without_kept_responses_make_no_minibatch(updates):
    made, _ = updates()
    nothing = {"kept": np.zeros(0, int), "advantages": np.zeros(0)}
    groups = [dataclasses.replace(group, **nothing) for group in make_groups(made.config)]
    assert deal(made, groups) == []
    done = update(made, [], 1, print, updates=3)
    assert done.stopped is None and done.learner.updates == 3
    assert done.metrics["update/count"] == 0 and done.metrics["update/loss"] == 0.0


# ---- one update an iteration: the update compares log-probabilities itself -------------------------------------------

ONE = {"learning.prompts_per_update": 2 * COUNT}


def test_one_update_compares_its_own_log_probabilities(updates):
    # Of 40 tokens drawn from these weights, 3e-4 in all; one of them is ill-conditioned.
    made, (minibatch,) = updates(score=pytest.fail, gap=(3e-4, 2e-4, 40.0, 0.0), **ONE)
    assert minibatch.batch.old_logprobs is None
    assert check(made, [minibatch], 5, pytest.fail) == ([minibatch], {})
    done = update(made, [minibatch], 5, pytest.fail)
    assert done.stopped is None and done.learner.updates == 1
    assert done.metrics["update/logprob_gap"] == pytest.approx(7.5e-6)
    assert done.metrics["update/logprob_gap_max"] == pytest.approx(2e-4)
    assert made.learner.versions == [4]  # responses of the fifth iteration are drawn from the weights of the fourth


def test_one_token_may_not_differ_by_more_than_rounding(updates):
    # Of 100,000 tokens, 2e-7 on average.
    made, minibatches = updates(gap=(0.02, 0.02, 1e5, 0.0), **ONE)
    done = update(made, minibatches, 1, pytest.fail)
    assert re.match(r"engine and learner disagree by 2e-07 .* on average, and by 0\.02 at most; in", str(done.stopped))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gap_of_the_only_update(updates, dtype):
    made, minibatches = updates(gap=(1.0, 0.11, 10.0, 0.0), **ONE, **{"model.compute_dtype": dtype})
    said = []
    done = update(made, minibatches, 1, said.append)
    if dtype == "float32":
        # The learner leaves the state as it was, and nothing counts as an update.
        assert re.match(r"engine and learner disagree by 0\.1 .* by 0\.11 at most; in", str(done.stopped)) and not said
        assert done.learner.updates == 0 and done.metrics["update/count"] == 0
        return
    assert done.stopped is None and done.metrics["update/logprob_gap"] == pytest.approx(0.1)
    assert "iteration 1: engine and learner differ by 0.1 a token on average" in said[0]


def test_a_log_probability_of_the_only_update_that_is_not_finite(updates, tmp_path):
    made, minibatches = updates(gap=(np.nan, np.nan, 4.0, 1.0), **ONE)
    done = update(made, minibatches, 1, print)
    assert re.match(r"iteration 1, update 1 of 1: a log-probability is not finite\.", str(done.stopped))
    assert done.learner.updates == 0 and (tmp_path / "non_finite" / "000001-1.json").exists()
    made, minibatches = updates(gap=(np.nan, np.nan, 4.0, 1.0), **ONE, **{"learning.max_skipped": 3})
    done = update(made, minibatches, 1, [].append)
    assert done.stopped is None and done.skipped_in_a_row == 1 and done.metrics["update/count"] == 0
    assert done.metrics["update/logprob_gap"] == done.metrics["update/logprob_gap_max"] == 0.0


# ---- responses whose advantage is 0 ----------------------------------------------------------------------------------


def all_correct(groups, rows):
    """The groups, some of them with equal rewards and so without advantages."""
    verdicts = (Verdict(True, 1.0),) * 4
    return [
        dataclasses.replace(group, pool=dataclasses.replace(group.pool, verdicts=verdicts), advantages=np.zeros(4))
        if row in rows else group
        for row, group in enumerate(groups)
    ]  # fmt: skip


def test_zero_advantages_are_left_out_where_that_saves_a_micro_batch(updates):
    # 24 responses, 8 rows a micro-batch. Four groups of six without advantages leave 8 responses, one micro-batch.
    made, _ = updates(**ONE)
    (minibatch,) = deal(made, all_correct(make_groups(made.config), {0, 1, 3, 4}))
    batch = minibatch.batch
    assert (batch.response_length > 0).sum() == 8 and batch.response_length[:8].all()
    assert batch.left_out.sum(axis=0).tolist() == [4 * 10, 16]  # draws of 2, 3, 2 and 3 tokens
    assert batch.advantages[:8].any(axis=-1).all() and len(batch.tokens) == 24  # compiled for 24 rows, whatever is left
    # Two such groups leave 16: two micro-batches. Three leave 12, and the other four rows are filled.
    for rows, computed in (({0, 5}, 16), ({0, 2, 5}, 16), ({0}, 24), (set(), 24), (set(range(6)), 0)):
        (minibatch,) = deal(made, all_correct(make_groups(made.config), rows))
        assert (minibatch.batch.response_length > 0).sum() == computed
        assert minibatch.batch.left_out[0, 1] == 24 - computed


@pytest.mark.parametrize("term", ["entropy_coefficient", "kl_coefficient"])
def test_zero_advantages_are_computed_where_another_term_needs_them(updates, term):
    made, _ = updates(**ONE, **{f"learning.{term}": 0.01})
    (minibatch,) = deal(made, all_correct(make_groups(made.config), {0, 1, 3, 4}))
    assert (minibatch.batch.response_length > 0).sum() == 24 and not minibatch.batch.left_out.any()


@pytest.mark.parametrize(
    ("penalty", "computed"), [("0.1 * (ratio - 1) ** 2", 24), ("0.1 * (ratio - 1) * advantages", 8)]
)
def test_zero_advantages_are_computed_where_a_users_loss_has_terms_without_them(updates, tmp_path, penalty, computed):
    (tmp_path / "mine.py").write_text(
        f"def mine(config, ratio, logprobs, advantages):\n    return {penalty} - ratio * advantages\n"
    )
    made, _ = updates(**ONE, **{"learning.loss": f"{tmp_path / 'mine.py'}:mine"})
    made.learner.loss_needs_all = Learner(ARCHITECTURE, made.config, mesh_lib.make_mesh(1, 1, 1)).loss_needs_all
    (minibatch,) = deal(made, all_correct(make_groups(made.config), {0, 1, 3, 4}))
    assert (minibatch.batch.response_length > 0).sum() == computed


def test_an_update_that_computed_nothing_says_nothing_of_the_entropy():
    numbers = dict.fromkeys(UpdateMetrics._fields, np.float32(0)) | {"finite": np.bool(True), "gap": None}
    some = {"entropy": np.float32(2), "loss": np.float32(1), "computed_share": np.float32(0.5)}
    one = UpdateMetrics(**numbers | some)
    means = update_means([one, UpdateMetrics(**numbers)])
    assert means["update/entropy"] == 2.0
    assert means["update/loss"] == 0.5 and means["update/computed_share"] == 0.25 and means["update/count"] == 2


def test_the_load_of_experts_is_that_of_updates_with_a_row():
    numbers = dict.fromkeys(UpdateMetrics._fields, np.float32(0)) | {"finite": np.bool(True), "gap": None}
    made = {"computed_share": np.float32(1), "expert_load_max": np.float32(3), "expert_idle_share": np.float32(0.25)}
    means = update_means([UpdateMetrics(**numbers), UpdateMetrics(**numbers | made)])
    assert (means["update/expert_load_max"], means["update/expert_idle_share"]) == (3.0, 0.25)
    dense = UpdateMetrics(**numbers | dict.fromkeys(EXPERT_METRICS))
    for results in ([dense, dense], [UpdateMetrics(**numbers)], []):
        assert not any("expert" in key for key in update_means(results))


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_a_corrected_update_is_a_sum_with_a_constant_divisor(tmp_path, aggregation):
    config = tiny(**{
        "collection.prompts_per_iteration": 4, "learning.prompts_per_update": 2, "collection.objective": "log",
        "collection.strategy": "positive", "collection.samples_per_round": 2, "collection.max_rounds": 4,
        "learning.aggregation": aggregation,
    })  # fmt: skip
    outcomes = {"one": [1, 1], "two": [0, 0, 0, 1], "never": [0] * 8, "three": [0, 0, 0, 0, 1, 0]}
    groups = [make_group_of(name, drawn, len(drawn) // 2, config) for name, drawn in outcomes.items()]
    made = make_run(config, ScriptedLearner([True] * 2), tmp_path)
    first, second = deal(made, groups, rounds=3.5)
    # Two prompts an update, 3.5 expected rounds, at most 8 tokens. The 10 rounds drawn are not in it, nor are the rows
    # and tokens that the loss divides by: draws 0, 2 and 4 have two tokens, draws 1 and 3 have three.
    assert [len(minibatch.groups) for minibatch in (first, second)] == [1, 2]
    for minibatch, coefficients, tokens in ((first, [0.5, 0.5], 5), (second, [1.0, 1.0], 5)):
        rows = np.flatnonzero(minibatch.batch.response_mask[:, 0])
        assert minibatch.batch.response_length.sum() == tokens
        counted = {"token-mean": tokens, "seq-mean-token-sum": len(rows)}.get(aggregation, len(rows) * 8)
        expected = np.array(coefficients) / (2 * 3.5 * 8)
        np.testing.assert_allclose(minibatch.batch.advantages[rows, 0] / counted, expected, rtol=1e-6)


EXACT = {
    "collection.prompts_per_iteration": 4, "learning.prompts_per_update": 4, "collection.objective": "log",
    "collection.strategy": "positive", "collection.samples_per_round": 2, "collection.max_rounds": 4,
}  # fmt: skip
OUTCOMES = {"one": [1, 1], "two": [0, 0, 0, 1], "never": [0] * 8, "three": [0, 0, 0, 0, 1, 0]}


def one_minibatch(tmp_path, **changes):
    """The minibatch of prompts with OUTCOMES, and the rows of each response in it, by (prompt, draw)."""
    config = tiny(**EXACT | changes)
    strategy = strategies.build(config.collection, regularized=config.regularized)
    groups = [make_group_of(name, drawn, len(drawn) // 2, config, strategy) for name, drawn in OUTCOMES.items()]
    (minibatch,) = deal(make_run(config, ScriptedLearner([True]), tmp_path, strategy), groups)
    rows = [(group.pool.prompt.id, draw) for group in groups for draw in group.kept.tolist()]
    return minibatch.batch, {key: row for row, key in enumerate(rows)}


@pytest.mark.parametrize("control_variate", ["none", "0.03"])
@pytest.mark.parametrize("term", ["entropy_coefficient", "kl_coefficient"])
def test_a_corrected_update_regularises_the_first_rounds(tmp_path, term, control_variate):
    variate = {"collection.control_variate": control_variate}
    batch, rows = one_minibatch(tmp_path, **variate, **{f"learning.{term}": 0.01})
    first = [(name, draw) for name in OUTCOMES for draw in (0, 1)]
    assert sorted(rows) == sorted([*first, ("two", 3), ("three", 4)])
    # Prompts weigh the same, solved or not, and so do the draws of a first round. Later ones have no such term.
    # A coefficient a_i and the 1 / M = 1/2 of a first round's draw have one factor: tokens / (4 prompts * 8 tokens).
    factor = batch.response_length.sum() / (4 * 8)
    for key, row in rows.items():
        mask = batch.response_mask[row]
        np.testing.assert_allclose(batch.regularization[row][mask], factor * 0.5 * (key in first), rtol=1e-6)
    variates = 0.0 if control_variate == "none" else 0.03
    advantages = {key: batch.advantages[row, 0] / factor for key, row in rows.items()}
    expected = dict.fromkeys(first, -variates) | {("one", 0): 0.5 - variates, ("one", 1): 0.5 - variates}
    assert advantages == pytest.approx(expected | {("two", 3): 1.0, ("three", 4): 1.0}, rel=1e-6)


def test_expected_rounds_are_those_of_the_iterations_before():
    config = tiny(**EXACT)
    strategy = strategies.build(config.collection)
    assert expected_rounds(config, strategy, Averages()) == 4, "the most, until something is known"
    averages = Averages().after({"rounds": (30.0, 10)}).after({"rounds": (40.0, 20)})
    assert expected_rounds(config, strategy, averages) == (0.5 * 30 + 40) / (0.5 * 10 + 20)
    fixed = tiny(**EXACT | {"collection.strategy": "grpo", "collection.correction": "exact"})
    assert expected_rounds(fixed, strategies.build(fixed.collection), Averages()) == 1
    endless = tiny(**EXACT | {"collection.strategy": "ngu", "collection.max_draws": 0})
    assert expected_rounds(endless, strategies.build(endless.collection), Averages()) == 1


def test_without_entropy_and_kl_a_corrected_update_has_its_rows_alone(tmp_path):
    batch, rows = one_minibatch(tmp_path)
    assert sorted(rows) == [("one", 0), ("one", 1), ("three", 4), ("two", 3)] and batch.regularization is None


def test_an_aggregation_that_divides_by_length_is_refused():
    changes = {"collection.objective": "log", "learning.aggregation": "seq-mean-token-mean"}
    with pytest.raises(ValueError, match="divides the weight of a response by its length"):
        config_lib.check(tiny(**changes))
    config_lib.check(tiny(**changes | {"collection.correction": "none"}))


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_request_to_end_is_heard_before_each_minibatch_is_scored(updates, calls):
    asked, scored = [], []

    def is_asked() -> bool:
        asked.append(len(scored))
        return len(asked) == calls

    def score(logprobs):
        scored.append(logprobs)
        return logprobs

    made, _ = updates([], score)
    scored.clear()
    made.stop = Stop(is_asked)
    with pytest.raises(Interrupted):
        deal(made, make_groups(made.config))
    assert asked == [*range(calls)] and len(scored) == calls - 1
