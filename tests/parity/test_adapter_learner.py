"""Live parity of training adapters with torch and peft: losses, log-probabilities, gradients, AdamW. `make parity`."""

import json

import jax
import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file

from reinforce_ada_jax.config import LoraConfig
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning.adapter_learner import AdapterLearner, Clip, LossRow
from reinforce_ada_jax.learning.optimizer import AdamParams
from reinforce_ada_jax.policy import adapter_files, huggingface, lora
from tests.golden.transformers import make_golden
from tests.parity.published import from_pretrained
from tests.parity.test_transformers import MODELS
from tests.policy.adapting import random_adapters

# peft 0.21.2 asks transformers 5.23 by a name that version 6 will not know.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
CLIP = Clip(0.8, 1.2)


def their_losses(name, logprobs, row):
    factors, old = torch.from_numpy(row.factors), torch.from_numpy(row.old_logprobs)
    if name == "cross_entropy":
        return -factors * logprobs
    ratio = torch.exp(logprobs - old)
    if name == "importance_sampling":
        return -ratio * factors
    return -torch.minimum(ratio * factors, ratio.clamp(CLIP.low, CLIP.high) * factors)


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo"])
@pytest.mark.parametrize("name", ["qwen2-tied-group-of-2", "qwen3-tied-wide-heads"])
def test_two_steps_are_those_of_torch(name, loss, tmp_path):
    make_golden.random_model(MODELS[name], 7).save_pretrained(tmp_path / "base")
    mesh = mesh_lib.make_mesh()
    architecture, base = huggingface.load(tmp_path / "base", mesh)
    chosen = lora.make(LoraConfig(rank=4, alpha=32.0))
    adapters = jax.device_put(random_adapters(architecture, chosen), lora.shardings(architecture, chosen, mesh))
    learner = AdapterLearner(architecture, base, mesh, np.float32)
    state = learner.with_new_optimizer(adapters, chosen)
    rng = np.random.default_rng(0)
    rows = []
    for length in (9, 14):
        tokens, targets = rng.integers(3, architecture.vocab_size, (2, length)).astype(np.int32)
        rows.append(LossRow(tokens, targets, *rng.normal([[0.0], [-6.0]], 0.5, (2, length)).astype(np.float32)))

    adapter_files.save(tmp_path / "before", architecture, adapters, chosen, base=tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(from_pretrained(tmp_path / "base"), tmp_path / "before", is_trainable=True)
    theirs.eval()
    parameters = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for _ in range(2):
        sums, logprobs, losses = learner.forward_backward(state.params, None, chosen, rows, loss, CLIP)
        optimizer.zero_grad()
        for row, our_logprobs, our_losses in zip(rows, logprobs, losses, strict=True):
            logits = theirs(torch.from_numpy(row.tokens)[None].long()).logits[0]
            distribution = torch.log_softmax(logits, dim=-1)
            found = distribution.gather(1, torch.from_numpy(row.targets)[:, None].long())[:, 0]
            per_token = their_losses(loss, found, row)
            per_token.sum().backward()
            np.testing.assert_allclose(our_logprobs, found.detach().numpy(), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(our_losses, per_token.detach().numpy(), rtol=1e-5, atol=1e-5)
        gradients = {
            key.replace(".default", ""): parameter.grad.numpy()
            for key, parameter in theirs.named_parameters()
            if parameter.grad is not None
        }
        ours = adapter_files.peft_tensors(architecture, sums, chosen)
        assert ours.keys() == gradients.keys()
        largest = max(np.abs(gradient).max() for gradient in gradients.values())
        for key, gradient in gradients.items():
            np.testing.assert_allclose(ours[key] / largest, gradient / largest, atol=1e-5)
        optimizer.step()
        state, _ = learner.step(state, sums, chosen, AdamParams(1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1))

    adapter_files.save(tmp_path / "after", architecture, state.params, chosen, base=tmp_path / "base")
    theirs.save_pretrained(tmp_path / "theirs")
    ours, expected = (load_file(tmp_path / folder / adapter_files.WEIGHTS) for folder in ("after", "theirs"))
    assert ours.keys() == expected.keys()
    for key, weight in expected.items():
        np.testing.assert_allclose(ours[key], weight, atol=1e-5)
    assert json.loads((tmp_path / "after" / adapter_files.CONFIG).read_text())["lora_alpha"] == 32.0
    # What was trained is what peft loads.
    loaded = peft.PeftModel.from_pretrained(from_pretrained(tmp_path / "base"), tmp_path / "after").eval()
    with torch.no_grad():
        logits = loaded(torch.from_numpy(rows[0].tokens)[None].long()).logits[0]
    again = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(rows[0].targets)[:, None].long())[:, 0]
    np.testing.assert_allclose(learner.forward(state.params, chosen, rows[:1])[0], again.numpy(), rtol=1e-4, atol=1e-4)
