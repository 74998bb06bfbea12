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
    assert TOKENIZER.decode(batch.tokens[0, 8 : last[0]]) == cipher.demonstrations(128, np.random.default_rng(0))[0][1]


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
