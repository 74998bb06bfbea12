"""The packaged policy is what examples/warm_start.py makes, from demonstrations that err as described."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from reinforce_ada_jax import evaluate, user_code
from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.training import components as components_lib
from tests.running import ROOT, environment, tiny

warm_start = user_code.run(ROOT / "examples" / "warm_start.py")
PACKAGED = components_lib.ASSETS / "cipher"
TOKENIZER = Tokenizer.load(PACKAGED)


def test_the_packaged_policy_is_small_and_is_what_warm_start_makes():
    assert sum(file.stat().st_size for file in PACKAGED.iterdir()) < 1e6
    architecture, params = huggingface.load(PACKAGED)
    assert architecture == warm_start.make_architecture(TOKENIZER)
    assert architecture.num_parameters == 107_392
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert (PACKAGED / "tokenizer.json").read_text() == cipher.tokenizer_json() + "\n"


def test_it_begins_with_biases_of_unit_variance():
    attention = warm_start.initial_params(warm_start.make_architecture(TOKENIZER), seed=0)["layers"]["attention"]
    values = np.concatenate([attention[f"{name}_bias"].ravel() for name in ("query", "key", "value")])
    # 256 numbers from N(0, 1): mean and deviation are within three standard errors of 0 and 1.
    assert len(values) == 256
    assert abs(values.mean()) < 3 / 16 and abs(values.std() - 1) < 3 / 16 / 2**0.5


def test_the_demonstrator_never_changes():
    assert warm_start.demonstrations(3, seed=0) == [("ДюдНЕ.=", "BQApq"), ("ЩНг...=", "/nD"), ("тЕэЧЦЛ=", "zq/6aH")]


def test_demonstrator_errs_as_described():
    right, typical = warm_start.demonstrator()
    assert np.sum((right >= 0.88) & (right <= 0.99)) == 42
    assert np.sum((right >= 0.03) & (right <= 0.12)) == 22
    assert np.all(typical != cipher.key())

    answers = {problem["problem"]: problem["answer"] for problem in cipher.problems("train")}
    pairs = warm_start.demonstrations(20_000, seed=1)
    assert all(len(answer) == len(answers[problem]) for problem, answer in pairs)
    # float[3, 64]: how often a symbol was drawn, read rightly, and read as its typical error.
    counts = np.zeros((3, 64))
    for problem, answer in pairs:
        for symbol, letter in zip(problem, answer, strict=False):
            i = cipher.SYMBOLS.index(symbol)
            counts[:, i] += 1, letter == cipher.LETTERS[cipher.key()[i]], letter == cipher.LETTERS[typical[i]]
    drawn, read_rightly, read_typically = counts
    # About 1,250 draws of a symbol: a standard deviation of at most 0.014 in each frequency.
    assert np.abs(read_rightly / drawn - right).max() < 0.06
    # 80 % of the errors, and one in 63 of the other 20 %.
    expected = (1 - right) * (0.8 + 0.2 / 63)
    assert np.abs(read_typically / drawn - expected).max() < 0.06


def test_demonstrations_take_a_generator():
    rng = np.random.default_rng(0)
    assert warm_start.demonstrations(3, rng) == warm_start.demonstrations(3, seed=0)
    assert warm_start.demonstrations(3, rng) != warm_start.demonstrations(3, seed=0)  # it moved on


def test_demonstrations_as_rows():
    batch = warm_start.demonstration_batch(TOKENIZER, np.random.default_rng(0), 8, 8)
    again = warm_start.demonstration_batch(TOKENIZER, np.random.default_rng(0), 8, 8)
    jax.tree.map(np.testing.assert_array_equal, batch, again)
    assert batch.tokens.shape == (128, 16)
    response_length = batch.response_length[:, 0]  # one response a row
    assert set(batch.response_positions[:, 0]) == {8} and set(response_length) <= set(range(3, 8))
    (stop,) = TOKENIZER.stop_ids
    last = 8 + response_length - 1
    assert (batch.tokens[np.arange(128), last] == stop).all()
    (_, answer), *_ = warm_start.demonstrations(128, np.random.default_rng(0))
    assert TOKENIZER.decode(batch.tokens[0, 8 : last[0]]) == answer


def heldout(folder, output):
    """(avg@16, its standard error), as the command keeps them."""
    evaluate.main(tiny(), evaluate.Options(model=str(folder), output=str(output)))
    results = json.loads((output / "results.json").read_text())
    return results["evaluation/heldout/avg"], results["evaluation/heldout/avg_standard_error"]


@pytest.mark.slow
def test_made_again_it_is_the_same(tmp_path):
    # As a user makes it: the test process compiles with other flags, and so with other rounding.
    command = [sys.executable, "examples/warm_start.py", "--config=configs/tiny.py", f"--output={tmp_path / 'made'}"]
    subprocess.run(command, cwd=ROOT, env=environment(xla_flags=""), check=True)
    assert {file.name for file in (tmp_path / "made").iterdir()} == {file.name for file in PACKAGED.iterdir()}
    (made_average, made_error), (average, error) = (
        heldout(folder, tmp_path / name) for folder, name in ((tmp_path / "made", "a"), (PACKAGED, "b"))
    )
    assert abs(made_average - average) < 3 * (made_error**2 + error**2) ** 0.5
    assert 0.15 < average < 0.25
    _, params = huggingface.load(tmp_path / "made")
    _, packaged = huggingface.load(PACKAGED)
    gaps = jax.tree.leaves(jax.tree.map(lambda a, b: float(abs(a - b).max()), params, packaged))
    print(f"largest difference of a weight: {max(gaps):.2g}; avg@16 {made_average:.3f} and {average:.3f}")
