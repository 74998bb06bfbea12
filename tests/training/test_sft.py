"""Supervised training: the loss and its gradient, the learning rate, resumes, adapters, and the exported weights."""

import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax import export, sft, train
from reinforce_ada_jax.data.demonstrations import Demonstration
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.distributed.signals import Interrupted, Stop
from reinforce_ada_jax.learning.batch import Example, make_batch
from reinforce_ada_jax.learning.packing import RowLayout
from reinforce_ada_jax.learning.supervised import SupervisedLearner
from reinforce_ada_jax.policy import huggingface, transformer
from reinforce_ada_jax.training import supervised
from reinforce_ada_jax.training.run import Run
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.types import Prompt, Response
from tests import hosts, standins
from tests.running import assert_same_state, cipher_file, refused, reproducible, restored, tiny
from tests.sampling.tiny import ARCHITECTURE

# ---- the update ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def examples():
    rng = np.random.default_rng(0)
    made = []
    for number in range(8):
        prompt, tokens = (rng.integers(0, 24, rng.integers(1, 7)).astype(np.int32) for _ in range(2))
        response = Response(f"p{number}", 0, tokens, np.zeros(len(tokens), np.float32), truncated=False)
        made.append(Example(prompt, response, 1.0))
    return made


def plain_loss(params, examples):
    """Mean of -log p over the response tokens, from all logits; what follows a sequence in its row is not read."""
    model, rows = transformer.merge(ARCHITECTURE, params), np.zeros((len(examples), 12), np.int32)
    total, count = 0.0, 0
    for row, example in zip(rows, examples, strict=True):
        row[: len(example.prompt) + len(example.response.tokens)] = [*example.prompt, *example.response.tokens]
    hidden = transformer.hidden_states(model, rows, execution=transformer.Execution(jnp.float32))
    logprobs = jax.nn.log_softmax(
        hidden @ model.head[...] if not ARCHITECTURE.tied_embedding else hidden @ model.embedding[...].T
    )
    for row, example in enumerate(examples):
        before, after = len(example.prompt), len(example.response.tokens)
        total -= logprobs[row, np.arange(before - 1, before + after - 1), example.response.tokens].sum()
        count += after
    return total / count


@pytest.fixture(scope="module")
def plain(examples):
    """Weights, with the plain loss of the examples and its gradient."""
    params = transformer.init(ARCHITECTURE, jax.random.key(0))
    return params, *jax.jit(jax.value_and_grad(functools.partial(plain_loss, examples=examples)))(params)


@pytest.mark.parametrize("per_row, micro_batches", [
    *(pytest.param(per_row, 1, marks=pytest.mark.slow) for per_row in (1, 3)), (3, 4),
])  # fmt: skip
def test_an_update_follows_the_plain_cross_entropy(examples, plain, per_row, micro_batches):
    config = config_lib.resolve({
        "model": {"compute_dtype": "float32"}, "data": {"max_prompt_tokens": 6},
        "sampling": {"max_response_tokens": 18, "temperature": 1.0}, "collection": {"group_size": 1},
        "learning": {"prompts_per_update": 8, "micro_batches": micro_batches, "responses_per_row": per_row,
                     "learning_rate": 1e-2, "warmup_updates": 0, "aggregation": "token-mean"},
    })  # fmt: skip
    learner = SupervisedLearner(ARCHITECTURE, config, mesh_lib.make_mesh())
    params, loss, gradient = plain
    norm = math.sqrt(sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(gradient)))
    batch = make_batch(examples, max_prompt_tokens=6, max_response_tokens=18, num_rows=8, layout=RowLayout(per_row))
    batch = learner.put(batch)
    scored = float(learner.score(params, batch).sum()) / sum(len(each.response.tokens) for each in examples)
    state, metrics = learner.update(learner.init(jax.tree.map(jnp.copy, params)), batch)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(-scored, loss, rtol=1e-5)
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-4)
    # The first step of Adam has the size of the learning rate, against the sign of the gradient.
    before, after, slope = (transformer.flatten(tree)["embedding"] for tree in (params, state.params, gradient))
    large = np.abs(slope) > 1e-3
    np.testing.assert_allclose((after - before)[large], -1e-2 * np.sign(slope[large]), rtol=1e-2)


# ---- the command -----------------------------------------------------------------------------------------------------

SETTINGS = {
    "sft.epochs": 2, "learning.prompts_per_update": 16, "learning.responses_per_row": 4, "evaluation.every": 3,
    "data.max_prompt_tokens": 24, "sampling.max_response_tokens": 24, "checkpoint.every": 2,
    "learning.learning_rate": 1e-3, "collection.prompts_per_iteration": 16, "logging.trackers": "",
    "model.compute_dtype": "auto",
}  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Settings of a run of 8 updates on 64 words, with the others as held-out rows."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    return SETTINGS | {"data.prompts": cipher_file(file, 64), "sft.validation": "cipher:heldout"}


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory):
    """Work directory of a run that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    sft.main(tiny(**settings), workdir, quiet=True)
    return workdir


def test_a_run_learns_and_its_export_loads(settings, whole, tmp_path):
    lines = reproducible(whole)
    assert [line["iteration"] for line in lines] == list(range(1, 9))
    assert [line["update/epoch"] for line in lines] == [0] * 4 + [1] * 4
    assert [line["iteration"] for line in lines if "validation/loss" in line] == [3, 6, 8]
    assert lines[-1]["validation/loss"] < lines[2]["validation/loss"] < 0.9
    # The warm-up has five updates, and a cosine follows, which is the default.
    rates = [line["update/learning_rate"] for line in lines[-4:]]
    np.testing.assert_allclose(rates, [1e-3, 1e-3, 0.75e-3, 0.25e-3], rtol=1e-5)
    # Every response of an epoch once: 64 words with their end tokens.
    words = [json.loads(line)["answer"] for line in pathlib.Path(settings["data.prompts"]).read_text().splitlines()]
    assert sum(line["update/response_tokens"] for line in lines[:4]) == sum(len(word) + 1 for word in words)
    export.main(whole, None, tmp_path / "folder")
    mesh = mesh_lib.make_mesh()
    loaded = transformer.flatten(huggingface.load(tmp_path / "folder", mesh, jnp.dtype("float32"))[1])
    state, _ = restored(whole)
    trained = transformer.flatten(state.params)
    assert loaded.keys() == trained.keys()
    for name, array in trained.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_a_second_start_finds_the_dtype_that_the_first_chose(settings, whole):
    """The given configuration says "auto": a config.json that says so, too, differs from what is computed in."""
    assert config_lib.read(whole).model.compute_dtype == "float32"
    sft.dry_run(tiny(**settings), whole)


@pytest.mark.parametrize("at", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_with_the_same_bits(settings, whole, tmp_path, monkeypatch, capsys, at):
    """At 3 the evaluation is due and not done; at 5 the checkpoint is the last update's, made for the request."""
    workdir, iterate = tmp_path / "run", supervised.supervised_iteration

    def until(run, state):
        after = iterate(run, state)
        if after[0].iteration == at:
            run.interrupt.on_notice()
        return after

    with monkeypatch.context() as patch:
        patch.setattr(supervised, "supervised_iteration", until)
        with pytest.raises(SystemExit):
            sft.main(tiny(**settings), workdir, quiet=True)
    assert "python -m reinforce_ada_jax.sft with the same --config" in capsys.readouterr().err
    assert len(reproducible(workdir)) == at - (at == 3)
    sft.main(tiny(**settings), workdir, quiet=True)
    assert reproducible(workdir) == reproducible(whole)
    assert_same_state(workdir, whole)


@pytest.mark.slow  # test_train_lora.py has runs with adapters, and their export
def test_adapters_are_trained_alone(settings, tmp_path):
    workdir = tmp_path / "run"
    sft.main(tiny(**settings | {"lora.rank": 4, "learning.learning_rate": 1e-2, "sft.epochs": 1}), workdir, quiet=True)
    losses = [line["validation/loss"] for line in reproducible(workdir) if "validation/loss" in line]
    assert losses[-1] < losses[0]
    export.main(workdir, None, tmp_path / "adapter", adapter=True)
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


def test_a_request_to_another_process_ends_the_validation_here_too(monkeypatch):
    """A score is a program of all processes: one that ended alone would leave the others in it forever."""
    standins.of_processes(monkeypatch, any_of=lambda flag: True)
    run, state = object.__new__(Run), object.__new__(RunState)
    vars(run).update(config=tiny(**SETTINGS), stop=Stop(asked=lambda: False))
    monkeypatch.setattr(Run, "policy", lambda run, state: {})
    rows = [Demonstration(Prompt("p", "", "", np.ones(1, np.int32)), np.ones(1, np.int32))]
    with pytest.raises(Interrupted):
        supervised.Validation(rows)(run, state)


@pytest.mark.slow  # the runs above have one process
def test_two_processes_train_as_one(settings, tmp_path):
    changed = SETTINGS | {"data.prompts": settings["data.prompts"], "sft.validation": "cipher:heldout", "mesh.data": 2}
    for count in (1, 2):
        command = ["-m", "reinforce_ada_jax.sft", "--config=configs/tiny.py", f"--workdir={tmp_path / str(count)}"]
        hosts.finished(hosts.start([*command, *(f"--config.{key}={value}" for key, value in changed.items())], count,
                                   devices=2))  # fmt: skip
    assert reproducible(tmp_path / "1") == reproducible(tmp_path / "2")


def test_neither_command_goes_on_from_the_other(settings, whole, capsys):
    before = {file: file.read_bytes() for file in whole.iterdir() if file.is_file()}
    shown = refused(capsys, train.main, tiny(**settings), whole, quiet=True)
    assert "holds checkpoints of the command sft" in shown.err
    assert {file: file.read_bytes() for file in whole.iterdir() if file.is_file()} == before


@pytest.mark.parametrize(
    "changed, message",
    [
        (
            {"learning.prompts_per_update": 96, "collection.prompts_per_iteration": 96},
            "64 rows, and an update takes 96",
        ),
        ({"sampling.max_response_tokens": 3}, "limit 3: raise sampling.max_response_tokens"),
        ({"learning.micro_batches": 32}, "learning.prompts_per_update"),
        ({"mesh.sampler": 1}, "mesh.sampler is 1, and supervised training draws nothing"),
    ],
)
def test_what_is_refused_before_anything_is_written(settings, tmp_path, capsys, changed, message):
    assert message in refused(capsys, sft.main, tiny(**settings | changed), tmp_path / "run", quiet=True).err
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_the_rows_and_the_updates(settings, tmp_path, capsys):
    sft.dry_run(tiny(**settings), tmp_path / "run")
    shown = capsys.readouterr().out
    assert "8 updates of 16 rows, epochs: 2" in shown and "64 rows; response from 'answer'" in shown
    assert not (tmp_path / "run").exists()
