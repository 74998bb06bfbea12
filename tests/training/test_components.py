"""Choices by device and by size of the model, where a configuration leaves them open."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.config import Config, replaced
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.types import Prompt
from tests import running, standins
from tests.policy import recording
from tests.sampling import tiny

SMALL = tiny.ARCHITECTURE
LARGE = dataclasses.replace(SMALL, vocab_size=10**7)
ROUNDS_OF_TWO = {
    "collection.strategy": "positive", "collection.objective": "log", "collection.samples_per_round": 2,
    "collection.max_rounds": 8, "collection.prompts_per_iteration": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "platform", "set_slots", "slots"),
    [(LARGE, "cpu", 0, 16), (LARGE, "cpu", 40, 40), (LARGE, "tpu", 0, 256), (SMALL, "cpu", 0, 256)],
    ids=["large on a CPU", "as set", "TPU", "small"],
)
def test_slots_are_those_that_small_rounds_keep_busy_on_a_cpu(architecture, platform, set_slots, slots):
    config = replaced(Config(), ROUNDS_OF_TWO | {"sampling.slots": set_slots})
    strategy = strategies.build(config.collection)
    chosen, reason = components_lib.choose_slots(config, architecture, platform, strategy)
    assert chosen == slots
    assert bool(reason) == (set_slots == 0)


@pytest.mark.parametrize(("limit", "is_long"), [(48, False), (49, True)])
def test_the_longest_text_of_a_run_chooses_the_rotary_frequencies(tmp_path, limit, is_long):
    folder = shutil.copytree(components_lib.model_folder("package:cipher"), tmp_path / "phi")
    described = json.loads((recording.GOLDEN / "phi3" / "config.json").read_text())  # made for texts of 64 tokens
    (folder / "config.json").write_text(json.dumps(described | {"vocab_size": 256}))
    config = running.tiny(
        **{"model.compute_dtype": "float32", "data.max_prompt_tokens": 16, "sampling.max_response_tokens": 16}
    )
    config = replaced(config, {"evaluation.benchmarks": ("a.jsonl",), "evaluation.max_response_tokens": limit})
    components = components_lib.build(config, folder)
    assert components.architecture.rope_scaling.is_long == is_long
    assert components.engine.architecture == components.architecture


def test_commands_without_a_strategy_decode_as_many_rows_as_pay_on_a_cpu():
    assert components_lib.choose_slots(Config(), LARGE, "cpu")[0] == 64


def test_draws_get_no_more_room_than_they_need_where_a_cpu_chose_it():
    config = components_lib.for_devices(running.tiny(**{"sampling.slots": 32, "data.max_prompt_tokens": 512}))
    chosen = components_lib.build(config, components_lib.model_folder(config.model.path))
    prompts = [Prompt(str(length), "", "", np.zeros(length, np.int32)) for length in (5, 65)]
    assert components_lib.for_responses(config, chosen, prompts, 5) is chosen  # a setting stays

    chosen = dataclasses.replace(chosen, slots_reason="on a CPU")
    few = components_lib.for_responses(config, chosen, prompts, 9)  # 18 responses
    options = few.engine.options
    assert (options.slots, options.max_prompt_tokens, few.slots_reason) == (24, 128, "18 responses fill no more")
    assert few.engine.cache_bytes < chosen.engine.cache_bytes / 2
    assert few.mesh == chosen.mesh and options.stop_ids == chosen.engine.options.stop_ids
    many = components_lib.for_responses(config, chosen, prompts[:1], 100)
    assert (many.engine.options.slots, many.engine.options.max_prompt_tokens) == (32, 64)
    assert many.slots_reason == "on a CPU"


@pytest.mark.parametrize(
    ("model", "changes", "processes", "chosen"),
    [
        ("large", {}, 1, "bfloat16"), ("small", {}, 1, "float32"), ("large", {}, 2, "float32"),
        ("large", {"model.compute_dtype": "float32"}, 1, "float32"), (None, {}, 1, "float32"),
    ],
)  # fmt: skip
def test_on_a_fast_cpu_the_precision_goes_by_the_model_that_is_named(model, changes, processes, chosen, monkeypatch):
    """Another model may be named than the run's own, as by `evaluate --model`; several processes measure nothing."""
    sizes = {"large": LARGE, "small": SMALL}
    standins.processor(monkeypatch, fast_in_bfloat16=True)
    monkeypatch.setattr(components_lib, "model_folder", lambda path: path)
    monkeypatch.setattr(components_lib.huggingface, "read_config", lambda folder: sizes[folder])
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    config = replaced(Config(), {"model.path": "small"} | changes) if model else Config()
    assert components_lib.for_devices(config, model=model).model.compute_dtype == chosen
