"""Live parity with peft, on a random model made on the spot. Needs torch: `make parity`."""

import json

import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers

from reinforce_ada_jax.config import LoraConfig
from reinforce_ada_jax.policy import adapter_files, huggingface, lora, transformer
from tests.golden.transformers import make_golden
from tests.parity.published import from_pretrained
from tests.parity.test_transformers import MODELS
from tests.policy.adapting import random_adapters

# peft 0.21.2 asks transformers 5.23 by a name that version 6 will not know.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
CASES = {
    "qwen2-tied-group-of-2": ("all-linear",),
    "qwen3-tied-wide-heads": ("all-linear",),
    "llama-scaled-tied": ("q_proj", "v_proj", "down_proj"),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(folder of the base, folder of the adapter, architecture, policy, what the adapters are, tokens)"""
    base_folder, adapter_folder = (tmp_path_factory.mktemp("lora") / name for name in ("base", "adapter"))
    make_golden.random_model(MODELS[request.param], 7).save_pretrained(base_folder)
    architecture, base = huggingface.load(base_folder)
    chosen = lora.make(LoraConfig(rank=4, alpha=8.0, targets=tuple(CASES[request.param])))
    adapters = random_adapters(architecture, chosen)
    adapter_files.save(adapter_folder, architecture, adapters, chosen, base=base_folder)
    tokens = np.random.default_rng(0).integers(3, architecture.vocab_size, (2, 24)).astype(np.int32)
    return base_folder, adapter_folder, architecture, lora.adapted(base, adapters, chosen), chosen, tokens


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def test_peft_loads_our_adapter_and_computes_the_same(case):
    base_folder, adapter_folder, architecture, policy, _, tokens = case
    plain = from_pretrained(base_folder)
    before = their_logits(plain, tokens)
    theirs = peft.PeftModel.from_pretrained(plain, adapter_folder).eval()
    ours = transformer.logits(architecture, policy, jnp.asarray(tokens))
    with_adapter = their_logits(theirs, tokens)
    np.testing.assert_allclose(with_adapter, ours, rtol=1e-4, atol=1e-4)
    assert np.abs(with_adapter - before).max() > 0.1
    # By the name of the base in the file alone.
    again = peft.AutoPeftModelForCausalLM.from_pretrained(adapter_folder, attn_implementation="eager").eval()
    np.testing.assert_array_equal(their_logits(again, tokens), with_adapter)


def test_a_merged_export_is_the_unmerged_policy_there(case, tmp_path):
    _, _, architecture, policy, _, tokens = case
    huggingface.save(tmp_path / "merged", architecture, lora.merged(policy))
    ours = transformer.logits(architecture, policy, jnp.asarray(tokens))
    np.testing.assert_allclose(their_logits(from_pretrained(tmp_path / "merged"), tokens), ours, rtol=1e-4, atol=1e-4)


def test_what_peft_saves_has_our_names_and_shapes(case, tmp_path):
    base_folder, adapter_folder, *_, chosen, _ = case
    settings = peft.LoraConfig(
        r=chosen.rank, lora_alpha=chosen.alpha, target_modules=list(chosen.targets), task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base_folder), settings)
    theirs.save_pretrained(tmp_path / "theirs")
    written = [huggingface.weight_files.read_headers([folder / adapter_files.WEIGHTS])
               for folder in (tmp_path / "theirs", adapter_folder)]  # fmt: skip
    assert {name: header.shape for name, header in written[0].items()} == {
        name: header.shape for name, header in written[1].items()
    }
    config, our_config = (json.loads((folder / adapter_files.CONFIG).read_text())
                          for folder in (tmp_path / "theirs", adapter_folder))  # fmt: skip
    assert our_config.keys() <= config.keys()
    different = {key for key in our_config if our_config[key] != config[key]}
    assert different <= {"target_modules", "base_model_name_or_path"}
    assert set(our_config["target_modules"]) == set(config["target_modules"])


def test_all_linear_means_what_peft_means(case):
    base_folder, *_ = case
    settings = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base_folder), settings)
    adapted = {name.split(".lora_A")[0].rsplit(".", 1)[1] for name in theirs.state_dict() if ".lora_A" in name}
    assert adapted == set(lora.TARGETS)
