"""A step of GRPO on the published model beside one of TRL, from the same weights and responses. `make parity`."""

import dataclasses

import datasets
import jax
import pytest
import torch
import transformers
import trl
from safetensors.torch import load_file

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.advantages import make_group
from reinforce_ada_jax.config import CollectionConfig, LearningConfig
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.learning.batch import make_batch
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import updates
from reinforce_ada_jax.types import Prompt, Verdict
from tests.parity import published

pytestmark = [
    pytest.mark.skipif(published.GGUF is None, reason=published.NO_GGUF),
    # TRL 1.16 asks transformers 5.23 by a name that version 6 will not know.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
QUESTIONS = ("Name the capital of France.", "Write a haiku about rain.")
DRAWS, LIMIT = 4, 24
# With so large an epsilon AdamW's step is smooth in the gradient: otherwise signs of its smallest entries decide.
LEARNING = dict(learning_rate=1e-3, epsilon=1e-4, clip_norm=1.0)


def reward(tokens) -> float:
    """Share of different tokens."""
    return len(set(tokens)) / len(tokens)


def our_step(before, after):
    """Draws responses and makes one update; writes the weights into two folders; returns (pools, metrics)."""
    tokenizer, mesh = Tokenizer.load(published.GGUF), make_mesh()
    texts = [tokenizer.render_messages([{"role": "user", "content": question}]) for question in QUESTIONS]
    prompts = [Prompt(text, "", "", tokenizer.encode(text)) for text in texts]
    size, most = len(prompts), max(len(prompt.tokens) for prompt in prompts)
    config = dataclasses.replace(
        published.run_config(most, LIMIT),
        collection=CollectionConfig(strategy="grpo", group_size=DRAWS, prompts_per_iteration=size),
        learning=LearningConfig(prompts_per_update=size, warmup_updates=0, **LEARNING),
    )
    architecture, params = huggingface.load(published.GGUF, mesh)
    huggingface.save(before, architecture, params, tokenizer_from=published.GGUF)
    options = components_lib.engine_options(config, architecture, tokenizer.stop_ids)
    drawn = published.draw(Rollouts(Engine(architecture, options, mesh=mesh)), params, prompts, DRAWS, 1.0, LIMIT)
    rewards = [[reward(response.tokens.tolist()) for response in pool.responses] for pool in drawn]
    pools = [
        dataclasses.replace(pool, verdicts=tuple(Verdict(False, value) for value in values))
        for pool, values in zip(drawn, rewards, strict=True)
    ]
    groups = [make_group(pool, strategies.build(config.collection)) for pool in pools]
    kept = [example for group in groups for example in updates.examples(group, 1.0)]
    batch = make_batch(kept, max_prompt_tokens=most, max_response_tokens=LIMIT, num_rows=size * DRAWS)
    learner = Learner(architecture, config, mesh)
    state, metrics = learner.update(learner.init(params), learner.put(dataclasses.replace(batch, old_logprobs=None)))
    huggingface.save(after, architecture, state.params)
    return pools, jax.device_get(metrics)


def their_step(pools, before, folder):
    """Makes TRL's step on the responses of the pools, in a folder of its own; returns (model, what it logged)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(before, dtype=torch.float32)
    config = trl.GRPOConfig(
        output_dir=str(folder), max_steps=1, num_generations=DRAWS, max_completion_length=LIMIT,
        per_device_train_batch_size=len(pools) * DRAWS, gradient_accumulation_steps=1,
        learning_rate=LEARNING["learning_rate"], adam_epsilon=LEARNING["epsilon"], max_grad_norm=LEARNING["clip_norm"],
        lr_scheduler_type="constant", scale_rewards="none", beta=0.0, bf16=False, activation_checkpointing=False,
        use_cpu=True, shuffle_dataset=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    by_prompt = {pool.prompt.id: pool for pool in pools}

    def rollout(prompts, trainer):
        assert prompts == [pool.prompt.id for pool in pools for _ in range(DRAWS)]
        responses = [by_prompt[prompt].responses[row % DRAWS] for row, prompt in enumerate(prompts)]
        return {
            "prompt_ids": [by_prompt[prompt].prompt.tokens.tolist() for prompt in prompts],
            "completion_ids": [response.tokens.tolist() for response in responses],
            "logprobs": [response.logprobs.tolist() for response in responses],
        }

    tokenizer = transformers.AutoTokenizer.from_pretrained(before)
    trainer = trl.GRPOTrainer(
        model=model, args=config, processing_class=tokenizer, rollout_func=rollout,
        reward_funcs=lambda completion_ids, **_: [reward(tokens) for tokens in completion_ids],
        train_dataset=datasets.Dataset.from_dict({"prompt": list(by_prompt)}),
    )  # fmt: skip
    trainer.train()
    return model, trainer.state.log_history[0]


def test_a_step_of_grpo_is_that_of_trl(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # of rollout_func
    before, after = tmp_path / "before", tmp_path / "after"
    pools, ours = our_step(before, after)
    assert len({len(response.tokens) for pool in pools for response in pool.responses}) > 1
    assert all(len(set(pool.rewards.tolist())) > 1 for pool in pools)
    model, theirs = their_step(pools, before, tmp_path / "theirs")
    assert float(ours.loss) == pytest.approx(theirs["loss"], rel=1e-5)
    assert float(ours.entropy) == pytest.approx(theirs["entropy"], rel=1e-5)
    assert float(ours.grad_norm) == pytest.approx(theirs["grad_norm"], rel=1e-4)  # torch sums its squares in float32
    first, last = (load_file(folder / "model.safetensors") for folder in (before, after))
    distance, size = 0.0, 0.0
    for name, weight in model.named_parameters():
        change = (weight.detach() - first[name]).double()
        distance += float((last[name] - first[name] - change).square().sum())
        size += float(change.square().sum())
    assert distance**0.5 < 1e-4 * size**0.5
