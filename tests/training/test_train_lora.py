"""A small run that trains adapters: what it keeps, that it resumes bit for bit, and what is made of it afterwards."""

import contextlib
import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax import evaluate, export, train
from reinforce_ada_jax.learning.update import LearnerState
from reinforce_ada_jax.policy import adapter_files, huggingface, lora, transformer
from reinforce_ada_jax.reporting import writers
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import loop, startup
from tests.running import (
    assert_same_state,
    cipher_file,
    compiles_nothing_early,
    refused,
    reproducible,
    restored,
    saved_config,
    tiny,
)
from tests.running import train as train_once

ITERATIONS = 4
SETTINGS = {
    "iterations": ITERATIONS, "checkpoint.every": 2, "evaluation.every": 4, "evaluation.samples": 2,
    "logging.trackers": "", "collection.prompts_per_iteration": 8, "learning.prompts_per_update": 4,
    "learning.learning_rate": 5e-3, "learning.kl_coefficient": 0.01, "lora.rank": 4, "sampling.slots": 32,
}  # fmt: skip
BASE = components_lib.model_folder("package:cipher")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(workdir) -> stdout of a finished run."""
    benchmark = cipher_file(tmp_path_factory.mktemp("shared") / "heldout.jsonl", 32)
    config = tiny(**SETTINGS | {"evaluation.benchmarks": (benchmark,)})

    def start(workdir):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            train.main(config, workdir, quiet=False)
        return out.getvalue()

    return start


@pytest.fixture(scope="module")
def unbroken(start, tmp_path_factory):
    """(work directory, stdout) of a run that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("unbroken") / "run"
    return workdir, start(workdir)


@pytest.fixture(scope="module")
def trained(unbroken):
    """(learner state as numpy, record, what the adapters are) of its end."""
    state, record = restored(unbroken[0])
    return state, record, lora.Lora(4, 32.0, tuple(lora.TARGETS))


def test_a_checkpoint_holds_adapters_and_their_moments_only(unbroken, trained):
    state, record, chosen = trained
    architecture = huggingface.read_config(BASE)
    adapters = lora.num_parameters(architecture, chosen)
    assert f"{adapters:,} adapter weights (rank 4, alpha 32, on q_proj, " in unbroken[1]
    # Two moments, and two counts: Adam's and the schedule's.
    assert sum(leaf.size for leaf in jax.tree.leaves(state.optimizer)) == 2 * adapters + 2
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == adapters < architecture.num_parameters / 10
    assert record["base"] == adapter_files.fingerprint(BASE)
    for name, x in transformer.flatten(state.params).items():
        assert x.any(), name


def test_the_run_learns_beside_a_reference_that_is_its_base(unbroken):
    lines = writers.read_metrics(unbroken[0])
    assert all(line["update/logprob_gap_max"] < 1e-4 for line in lines)
    # Adapters begin as no change: there is no distance from the reference before the first update.
    assert 0 <= lines[0]["update/kl"] < lines[-1]["update/kl"]
    assert [line["compile/count"] for line in lines[1:]] == [0] * (ITERATIONS - 1)


def test_a_run_of_adapters_resumes_bit_for_bit(start, unbroken, tmp_path):
    # As after a kill in iteration 3 or 4: the checkpoint of iteration 2 is the newest, later lines are there.
    resumed = shutil.copytree(unbroken[0], tmp_path / "resumed")
    shutil.rmtree(resumed / "checkpoints" / str(ITERATIONS))
    assert "resuming after iteration 2" in start(resumed)
    assert reproducible(resumed) == reproducible(unbroken[0])
    assert_same_state(resumed, unbroken[0])


# ---- what is made of it --------------------------------------------------------------------------------------------


def test_an_export_is_the_merged_policy(trained, unbroken, tmp_path):
    state, _, chosen = trained
    export.main(unbroken[0], None, tmp_path / "model")
    architecture, whole = huggingface.load(tmp_path / "model")
    base = huggingface.load(BASE)[1]
    tokens = jnp.arange(3, 35).reshape(2, 16)
    policy = lora.adapted(base, jax.tree.map(jnp.asarray, state.params), chosen)
    logits = transformer.logits(architecture, policy, tokens)
    np.testing.assert_allclose(transformer.logits(architecture, whole, tokens), logits, atol=1e-4)
    assert jnp.abs(logits - transformer.logits(architecture, base, tokens)).max() > 1e-2
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_an_export_of_the_adapters_alone(trained, unbroken, tmp_path, capsys):
    state, _, chosen = trained
    export.main(unbroken[0], 2, tmp_path / "earlier", adapter=True)
    export.main(unbroken[0], None, tmp_path / "adapter", adapter=True)
    assert f"iteration {ITERATIONS} of {unbroken[0]} written to {tmp_path / 'adapter'}" in capsys.readouterr().out
    names = (adapter_files.CONFIG, adapter_files.WEIGHTS)
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == set(names)
    again = tmp_path / "again"
    adapter_files.save(again, huggingface.read_config(BASE), state.params, chosen, base=BASE)
    earlier, written, expected = (
        [(tmp_path / folder / name).read_bytes() for name in names] for folder in ("earlier", "adapter", "again")
    )
    assert written == expected and written[0] == earlier[0] and written[1] != earlier[1]


@pytest.mark.slow
def test_evaluate_gives_the_figures_of_a_run_of_adapters(unbroken, tmp_path):
    workdir = shutil.copytree(unbroken[0], tmp_path / "run")
    file = workdir / "evaluations" / "000004.json"
    file.unlink()
    evaluate.main(saved_config(workdir), evaluate.Options(workdir=str(workdir)))
    assert file.read_text() == (unbroken[0] / "evaluations" / "000004.json").read_text()


def test_adapters_on_another_base_are_refused(unbroken, tmp_path, capsys):
    workdir, other = shutil.copytree(unbroken[0], tmp_path / "run"), shutil.copytree(BASE, tmp_path / "other")
    architecture, params = huggingface.load(BASE)
    huggingface.save(tmp_path / "doubled", architecture, jax.tree.map(lambda x: 2 * x, params))
    shutil.copyfile(tmp_path / "doubled" / "model.safetensors", other / "model.safetensors")
    config = json.loads((workdir / "config.json").read_text())
    config["model"]["path"] = str(other)
    (workdir / "config.json").write_text(json.dumps(config))
    shown = refused(capsys, export.main, workdir, None, tmp_path / "new")
    assert "is not the model that these adapters were trained on" in shown.err
    assert not (tmp_path / "new").exists()


# ---- one base ------------------------------------------------------------------------------------------------------


@pytest.fixture
def begin(monkeypatch):
    """begin(workdir, changes) -> (run, state) of a run at its beginning, in this process."""
    compiles_nothing_early(monkeypatch)
    with contextlib.ExitStack() as stack:

        def begin(workdir, **changes):
            config = tiny(**{"logging.trackers": "", **changes})
            return startup.start(startup.read_inputs(config, workdir, lambda *_: None), workdir, stack, quiet=True)

        yield begin


def pointers(tree):
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}


def test_learner_policy_and_reference_share_one_base(tmp_path, begin):
    run, state = begin(tmp_path / "run", **{"lora.rank": 4, "learning.kl_coefficient": 0.1})
    assert run.reference is run.base
    assert pointers(run.policy(state)) == pointers(run.base) | pointers(state.learner.params)
    assert isinstance(state.learner, LearnerState) and not pointers(state.learner) & pointers(run.base)


def test_a_frozen_base_is_kept_in_the_precision_of_its_products(tmp_path, begin):
    run, state = begin(tmp_path / "run", **{"lora.rank": 4, "model.compute_dtype": "bfloat16"})
    assert {leaf.dtype for leaf in jax.tree.leaves(run.base)} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.learner.params)} == {jnp.dtype("float32")}


# tests/sampling/test_engine.py has what the sampler decodes from.
@pytest.mark.slow
def test_in_bfloat16_the_gap_is_that_of_a_run_of_all_weights(tmp_path):
    settings = {
        "iterations": 3, "checkpoint.every": 0, "evaluation.every": 0, "logging.trackers": "",
        "collection.prompts_per_iteration": 16, "learning.prompts_per_update": 16, "sampling.slots": 32,
        "model.compute_dtype": "bfloat16", "learning.learning_rate": 5e-3,
    }  # fmt: skip
    found = []
    for rank in (0, 4):
        train_once(tiny(**settings, **{"lora.rank": rank}), tmp_path / str(rank))
        found.append([line["update/logprob_gap"] for line in writers.read_metrics(tmp_path / str(rank))])
    # Engine and learner round the same numbers. Largest of three iterations, seeds 0, 1, 2: 1e-9, 8e-10, 9e-6 with all
    # weights (2e-5 on a processor with AVX2), and 4e-7, 2e-7, 1e-6 with adapters. With adapters in bfloat16 in the
    # engine alone it is 5e-5, and where they are merged into bfloat16 weights 2e-3.
    of_all, of_adapters = map(max, found)
    assert of_adapters < 1e-5 and of_all < 1e-4


def test_without_a_rank_there_is_no_base(tmp_path, begin, capsys):
    run, state = begin(tmp_path / "run")
    assert run.base is None and run.policy(state) is state.learner.params
    loop.save(run, state)
    run.checkpoints.wait()
    shown = refused(capsys, export.main, tmp_path / "run", None, tmp_path / "adapter", adapter=True)
    assert "trained all weights (lora.rank is 0): export them without --adapter" in shown.err
