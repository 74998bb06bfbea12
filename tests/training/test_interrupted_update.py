"""A request to end that comes inside an update: the state before it is saved, and the resumed run has the same bits."""

import signal

import pytest

from reinforce_ada_jax.learning import platform
from reinforce_ada_jax.learning.update import UpdatePrograms
from reinforce_ada_jax.training.loop import Ending
from tests import standins
from tests.running import ROOT, assert_same_state, reproducible, restored, tiny, train

SETTINGS = {
    "iterations": 3, "checkpoint.every": 3, "evaluation.every": 0, "logging.trackers": "", "sampling.slots": 32,
    "collection.prompts_per_iteration": 8, "learning.prompts_per_update": 8, "learning.micro_batches": 8,
}  # fmt: skip


def ends_inside(patch, number):
    """Sends SIGTERM after the second program of this update; returns the number of programs of each update."""
    programs = []

    def update(self, state, batch, base, version, between, original=UpdatePrograms.__call__):
        programs.append(0)

        def ask():
            programs[-1] += 1
            if len(programs) == number and programs[-1] == 2:
                signal.raise_signal(signal.SIGTERM)
            between()

        return original(self, state, batch, base, version, ask)

    patch.setattr(UpdatePrograms, "__call__", update)
    return programs


CASES = {
    "plain": {},
    # Its `to_json` returns what `observe` changes, so iteration 2 must not be in the state of iteration 1.
    "selection of a file": {"collection.selection": f"{ROOT / 'examples/rivals/mopps.py'}:MoPPS"},
    "overlap": {"collection.overlap": "finish"},
    "split devices": {"mesh.sampler": 1},
    "sharded adapters, reference": {"mesh.fsdp": 2, "mesh.data": 2, "lora.rank": 4, "learning.kl_coefficient": 0.01},
}


@pytest.mark.parametrize(
    "changes", [pytest.param(CASES[name], id=name, marks=[pytest.mark.slow] if CASES[name] else []) for name in CASES]
)
def test_an_update_that_a_signal_breaks_off_is_made_again(tmp_path, monkeypatch, changes):
    standins.constants(monkeypatch, platform, PROGRAM_S=0.0)  # one micro-batch in a program
    config = tiny(**SETTINGS | changes)
    assert train(config, tmp_path / "unbroken").ending is Ending.FINISHED
    with monkeypatch.context() as patch:
        programs = ends_inside(patch, 2)
        outcome = train(config, tmp_path / "run")
    assert outcome.ending is Ending.PREEMPTED and "iteration 1 is saved" in outcome.message
    assert programs == [programs[0], 2] and programs[0] > 2
    (_, record) = restored(tmp_path / "run")
    assert record["iteration"] == 1 and record["pending"] is None
    assert len(list((tmp_path / "run" / "unfinished").iterdir())) == 1, "the responses of iteration 2 are kept"

    assert train(config, tmp_path / "run").ending is Ending.FINISHED
    assert_same_state(tmp_path / "run", tmp_path / "unbroken")
    assert reproducible(tmp_path / "run") == reproducible(tmp_path / "unbroken")
