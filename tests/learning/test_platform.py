import jax.numpy as jnp
import pytest

from reinforce_ada_jax.config import CollectionConfig, Config, LearningConfig, MeshConfig, SamplingConfig
from reinforce_ada_jax.learning.learner import loss_config
from reinforce_ada_jax.learning.platform import resolve


@pytest.mark.parametrize(
    ("name", "head_backend", "attention", "remat"),
    [("cpu", "scan", "blocks", "dots"), ("gpu", "scan", "jnp", "full"), ("tpu", "pallas_tpu", "splash", "full")],
)
def test_auto_goes_by_the_platform(name, head_backend, attention, remat):
    platform = resolve(name, LearningConfig(), hidden_size=4096, dtype=jnp.bfloat16)
    assert (platform.head_backend, platform.attention, platform.remat) == (head_backend, attention, remat)
    assert platform.first_moment_dtype is None and platform.interpret == (name != "tpu")
    assert platform.head_tile == ((512, 512) if name == "tpu" else (1024, 1024))


def test_settings_come_before_the_platform():
    learning = LearningConfig(attention="splash", remat="full", first_moment_dtype="bfloat16")
    platform = resolve("cpu", learning, hidden_size=4096, dtype=jnp.float32)
    assert (platform.attention, platform.remat, platform.first_moment_dtype) == ("splash", "full", "bfloat16")
    assert platform.interpret


MODEL = ("model", "model")


@pytest.mark.parametrize(
    ("cap", "overlap", "split", "staleness", "dtypes", "expected"),
    [
        (None, 0, 0, 1, MODEL, None), (None, 1, 0, 1, MODEL, 2.0), (3.0, 1, 0, 1, MODEL, 3.0),
        (3.0, 0, 0, 1, MODEL, 3.0), (None, 0, 1, 1, MODEL, 2.0), (3.0, 0, 1, 1, MODEL, 3.0),
        (None, 0, 1, 0, MODEL, None), (None, 0, 0, 1, ("int8", "model"), 2.0), (3.0, 0, 0, 1, ("int8", "model"), 3.0),
        (None, 0, 0, 1, ("model", "int8"), 2.0),
    ],
)  # fmt: skip
def test_responses_of_earlier_weights_or_in_int8_have_a_capped_weight(cap, overlap, split, staleness, dtypes, expected):
    config = Config(
        sampling=SamplingConfig(kv_dtype=dtypes[0], weight_dtype=dtypes[1]),
        learning=LearningConfig(truncated_is_cap=cap, clip_low=0.1),
        collection=CollectionConfig(overlap_iterations=overlap, max_staleness=staleness),
        mesh=MeshConfig(sampler=split, learner=split),
    )
    assert loss_config(config).truncated_is_cap == expected
    assert loss_config(config).clip_low == 0.1
