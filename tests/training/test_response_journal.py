"""Files of responses that no checkpoint holds: the run and the weights that they belong to take them, and no other."""

import dataclasses
import functools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.collection.serialization import CollectedShard, from_bytes
from reinforce_ada_jax.learning.update import LearnerState
from reinforce_ada_jax.training import fingerprints
from reinforce_ada_jax.training.response_journal import FOLDER, ResponseJournal
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.types import PartialRollouts, Pool, Prompt, Response, Verdict
from tests import standins

PROMPTS = [Prompt(name, "", "", np.zeros(1, np.int32)) for name in "abc"]
IDENTITY = {"prompts": "these", "reward": "this"}


def response(name, draw, num_tokens=3):
    return Response(name, draw, np.full(num_tokens, draw, np.int32), np.zeros(num_tokens, np.float32), False, 6)


COMPLETE = CollectedShard(
    [Pool(PROMPTS[0], (response("a", 0),), (Verdict(True, 1.0),), 1, True, 0.25, (1,), (5,))],
    {"c": PartialRollouts((response("c", 0), None), (), 0, (2,))},
    {"tokens": 8, "host_s": 0.5},
)
PARTIAL = {
    name: PartialRollouts((response(name, 0), response(name, 1), None), (Verdict(False, 0.0),), 1, (1, 2))
    for name in "abc"
}


def state(iteration, weight=1.0) -> RunState:
    learner = LearnerState({"weight": jnp.full(3, weight, jnp.float32)}, (), jnp.int32(0))
    return RunState(learner, {}, iteration)


def opened(workdir, identity=IDENTITY, limit_bytes=10**6, broken_off=True, **clock) -> ResponseJournal:
    return ResponseJournal(workdir, identity, limit_bytes=limit_bytes, broken_off=broken_off, **clock)


def test_a_complete_collection_comes_back_with_its_counts(tmp_path):
    kept = opened(tmp_path)
    assert kept.write(state(6), COMPLETE)
    assert kept.read(state(6), PROMPTS) is None, "it is of this start"
    found = opened(tmp_path).read(state(6), PROMPTS)
    (pool,), (own,) = found.pools, COMPLETE.pools
    for field in ("verdicts", "rounds", "met", "estimate", "round_sizes", "discarded"):
        assert getattr(pool, field) == getattr(own, field)
    assert pool.responses[0].tokens.tolist() == [0, 0, 0] and pool.responses[0].policy_version == 6
    assert (found.counts, found.partial.keys()) == ({"tokens": 8, "host_s": 0.5}, {"c"})


@pytest.mark.parametrize("change", ["weights", "iteration", "identity", "damage", "nothing"])
def test_other_weights_other_runs_and_damaged_files_are_drawn_again(tmp_path, change):
    opened(tmp_path).write(state(6), COMPLETE)
    (file,) = (tmp_path / FOLDER).iterdir()
    if change == "damage":
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
    kept = opened(tmp_path, IDENTITY | {"reward": "another"} if change == "identity" else IDENTITY)
    before = state(5 if change == "iteration" else 6, 1.5 if change == "weights" else 1.0)
    assert (kept.read(before, PROMPTS) is None) == (change != "nothing")


def begun(journal, iteration=7):
    """The record of a collection of this iteration that may be broken off."""
    journal.read(state(iteration - 1), PROMPTS)
    return journal.begin()


def test_a_collection_that_was_broken_off_is_kept_where_other_slots_give_the_same_bits(tmp_path):
    for broken_off, expected in ((False, 0), (True, 6)):
        kept = opened(tmp_path, broken_off=broken_off)
        collected = begun(kept)
        collected.partial.update(PARTIAL)
        collected.counts["tokens"] = 9
        assert kept.write_broken_off() == expected
    found = opened(tmp_path).read(state(6), PROMPTS)
    assert found.pools == [] and found.counts == {"tokens": 9}
    assert found.partial["b"].verdicts == PARTIAL["b"].verdicts and found.partial["b"].responses[2] is None
    assert found.partial["b"].responses[1].tokens.tolist() == [1, 1, 1]


def test_a_collection_that_goes_on_is_stored_once_a_minute(tmp_path):
    """For a kill; where writing takes long, less often: at most 2 % of the time."""
    # The clock is asked at the start, by `read`, and by `store_so_far` when it begins and, if due, after it wrote.
    times = iter([0, 0, 59, 60, 61, 119, 121, 131, 600, 631, 632])
    kept = opened(tmp_path, clock=lambda: float(next(times)))
    assert kept.read(state(6), PROMPTS) is None  # at 0 s
    asked = []

    def so_far():
        asked.append(len(asked) + 1)
        return CollectedShard([], {"a": PARTIAL["a"]}, {"tokens": len(asked)})

    for expected in ([], [1], [1], [1, 2], [1, 2], [1, 2, 3]):
        kept.store_so_far(7, so_far)
        assert asked == expected
    found = opened(tmp_path).read(state(6), PROMPTS)
    assert found.counts == {"tokens": 3} and found.partial["a"].responses[1].tokens.tolist() == [1, 1, 1]


def test_process_0_stores_what_all_processes_have_so_far(tmp_path, monkeypatch):
    """Twice a minute. Of another process the newest message counts, and none about an earlier iteration."""
    here, messages = SimpleNamespace(index=0, seconds=0.0), [b"6\nof another iteration"]
    standins.of_processes(
        monkeypatch, total=lambda: 2, count=lambda: 2, is_writer=lambda: here.index == 0,
        exchange=lambda payload: [payload], of_writer=lambda text: text,
        send=lambda process, message: messages.append(message), has_sent=lambda process: bool(messages),
        receive=lambda process: messages.pop(0),
    )  # fmt: skip
    journals = [opened(tmp_path, clock=lambda: here.seconds) for _ in range(2)]
    for journal in journals:
        journal.read(state(6), PROMPTS)
    standins.not_called(monkeypatch, fingerprints, "numbers")  # the processes do not meet in `store_so_far`

    stored, file = [], tmp_path / FOLDER / "000007.responses"
    for here.seconds, drawn in ((29.0, ("a", "b")), (31.0, ("", "b")), (59.0, ("a", "bc")), (62.0, ("a", "bc"))):
        for here.index in (1, 0):
            partial, counts = {name: PARTIAL[name] for name in drawn[here.index]}, {"tokens": 1 + here.index}
            journals[here.index].store_so_far(7, functools.partial(CollectedShard, [], partial, counts))
        content = file.read_bytes().partition(b"\n")[2] if file.exists() else b""
        stored.append("".join(sorted(from_bytes(content, PROMPTS).partial)) if content else "")
    monkeypatch.undo()
    assert stored == ["", "b", "b", "abc"]
    found = opened(tmp_path).read(state(6), PROMPTS)
    assert found.partial["b"].verdicts == PARTIAL["b"].verdicts and found.counts == {"tokens": 3}


def test_what_was_stored_stays_until_newer_responses_of_its_prompts_are_there(tmp_path):
    """A second kill soon after a resume: those who drew the other prompts have sent nothing yet."""
    kept = opened(tmp_path)
    begun(kept).partial.update(PARTIAL)
    kept.write_broken_off()
    kept = opened(tmp_path, clock=iter([0.0, 0.0, 60.0, 60.0]).__next__)
    assert kept.read(state(6), PROMPTS).num_responses == 6
    longer = PartialRollouts(tuple(response("a", draw) for draw in range(3)), (), 0, (3,))
    kept.store_so_far(7, lambda: CollectedShard([], {"a": longer}))
    found = opened(tmp_path).read(state(6), PROMPTS)
    assert {name: sum(map(bool, each.responses)) for name, each in found.partial.items()} == {"a": 3, "b": 2, "c": 2}


@pytest.mark.parametrize("why", ["rounds by slot", "not begun"])
def test_a_collection_that_goes_on_is_not_stored(tmp_path, why):
    kept = opened(tmp_path, broken_off=why == "not begun", clock=iter([0.0, 0.0, 100.0, 100.0]).__next__)
    kept.read(state(6), PROMPTS)
    kept.store_so_far(8 if why == "not begun" else 7, lambda: COMPLETE)
    assert not (tmp_path / FOLDER).exists()


def drawn_ahead(weight=1.0, cursor=0) -> RunState:
    """A state after iteration 6 whose next one is drawn from weights that are older than the learner's."""
    older = {"weight": jnp.full(3, weight, jnp.bfloat16)}
    return dataclasses.replace(state(6, 3.0), sampler_weights=older, selection={"cursor": cursor})


@pytest.mark.parametrize("how", ["complete", "broken off", "killed"])
def test_a_collection_that_is_drawn_ahead_belongs_to_the_weights_that_draw_it(tmp_path, monkeypatch, how):
    """They are known before the updates end, so it is stored meanwhile, from the thread that draws."""
    ahead, kept = drawn_ahead(), opened(tmp_path, clock=iter([0.0, 0.0, 60.0, 60.0]).__next__)
    kept.read(ahead, PROMPTS)
    with monkeypatch.context() as patch:
        standins.not_called(patch, fingerprints, "numbers")
        if how == "complete":
            kept.write(dataclasses.replace(ahead, learner=state(6, 4.0).learner), COMPLETE)
        elif how == "broken off":
            kept.begin().partial.update(PARTIAL)
            assert kept.write_broken_off() == 6
        else:
            kept.store_so_far(7, lambda: CollectedShard([], PARTIAL))
    for other in (drawn_ahead(weight=1.5), drawn_ahead(cursor=1), state(6)):
        assert opened(tmp_path).read(other, PROMPTS) is None
    assert opened(tmp_path).read(drawn_ahead(), PROMPTS).num_responses == (2 if how == "complete" else 6)


def test_the_limit_counts_all_files_and_leaves_out_prompts_of_a_broken_collection(tmp_path):
    assert opened(tmp_path, limit_bytes=10).write(state(6), COMPLETE) is False
    assert not (tmp_path / FOLDER).exists()
    long = {name: PartialRollouts((response(name, 0, 500),), (), 0, (1,)) for name in "abc"}
    kept = opened(tmp_path, limit_bytes=12_000)  # 9,000 of tokens: two prompts with 4,000 each
    begun(kept).partial.update(long)
    assert kept.write_broken_off() == 2
    size = (tmp_path / FOLDER / "000007.responses").stat().st_size
    assert 8_000 < size < 12_000
    kept = opened(tmp_path, limit_bytes=12_000)
    begun(kept, 8).partial.update(long)
    assert kept.write_broken_off() == 0, "iteration 7 has the space"


def test_the_limit_counts_recorded_experts(tmp_path):
    kept = opened(tmp_path, limit_bytes=12_000)  # of each prompt 80 bytes of tokens and 4,000 of experts
    recorded = [dataclasses.replace(response(name, 0, 10), experts=np.ones((20, 200), np.uint8)) for name in "abc"]
    begun(kept).partial.update({each.prompt_id: PartialRollouts((each, None), (), 0, (2,)) for each in recorded})
    assert kept.write_broken_off() == 2
    assert opened(tmp_path).read(state(6), PROMPTS).partial["b"].responses[0].experts.shape == (20, 200)


def test_files_go_with_the_checkpoint_that_has_their_iteration(tmp_path):
    kept = opened(tmp_path)
    for iteration in (5, 6, 7):
        kept.write(state(iteration), COMPLETE)
    kept.forget(7)
    assert [file.name for file in (tmp_path / FOLDER).iterdir()] == ["000008.responses"]
