"""Names of TRL, verl and tunix: accepted with a note, or refused with the setting to use."""

import re

import pytest

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import aliases


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (["num_generations=8"], ["collection.group_size=8"]),
        (["rollout.n=8"], ["collection.group_size=8"]),
        (["actor_rollout_ref.rollout.n=8"], ["collection.group_size=8"]),
        (["max_completion_length=512"], ["sampling.max_response_tokens=512"]),
        (["beta=0.04"], ["learning.kl_coefficient=0.04"]),
        (["loss_type=grpo"], ["learning.aggregation=seq-mean-token-mean"]),
        (["loss_type=dapo"], ["learning.aggregation=token-mean"]),
        (["loss_type=dr_grpo"], ["learning.aggregation=seq-mean-token-sum-norm"]),
        (["loss_type=cispo"], ["learning.loss=cispo"]),
        (["loss_type=sapo"], ["learning.loss=sapo", "learning.aggregation=seq-mean-token-mean"]),
        (["vllm_importance_sampling_mode=sequence_truncate"], ["learning.importance=sequence"]),
        (["actor.policy_loss.loss_mode=vanilla"], ["learning.loss=ppo"]),
        (["scale_rewards=none"], ["collection.normalize_by_std=False"]),
        (["actor.kl_loss_type=low_var_kl"], ["learning.kl_kind=k3"]),
        (["actor_rollout_ref.model.path=models/a"], ["model.path=models/a"]),
        (["trainer.save_freq=20"], ["checkpoint.every=20"]),
        (["trainer.save_freq=-1"], ["checkpoint.every=0"]),
        (["rollout.val_kwargs.top_k=-1"], ["evaluation.top_k=0"]),
        # verl divides by the deviation unless it is told not to.
        (["algorithm.adv_estimator=grpo"], ["collection.strategy=grpo", "collection.normalize_by_std=True"]),
        (
            ["algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=False"],
            ["collection.strategy=grpo", "collection.normalize_by_std=False"],
        ),
        # A value that means another setting than the name's own leaves that one free.
        (
            ["loss_type=cispo", "learning.aggregation=token-mean"],
            ["learning.loss=cispo", "learning.aggregation=token-mean"],
        ),
        (
            ["loss_type=sapo", "learning.aggregation=token-mean"],
            ["learning.loss=sapo", "learning.aggregation=token-mean"],
        ),
        # TRL clips at 1 - epsilon and 1 + epsilon, unless epsilon_high is given.
        (["epsilon=0.1"], ["learning.clip_low=0.1", "learning.clip_high=0.1"]),
        (["epsilon=0.1", "epsilon_high=0.3"], ["learning.clip_low=0.1", "learning.clip_high=0.3"]),
        (["epsilon_high=0.3", "epsilon=0.1"], ["learning.clip_high=0.3", "learning.clip_low=0.1"]),
        (["learning.clip_low=0.2", "epsilon=0.1"], ["learning.clip_low=0.2", "learning.clip_high=0.1"]),
    ],
    ids=" ".join,
)
def test_a_name_with_the_same_meaning(given, taken):
    arguments, notes = aliases.translate([f"--config.{item}" for item in given])
    assert arguments == [f"--config.{item}" for item in taken]
    assert len(notes) == sum(item not in taken for item in given)


def test_other_arguments_stay():
    ours = ["--config=tiny", "--config.learning.epsilon=1e-6", "--workdir=num_generations=8", "rollout.n=8"]
    assert aliases.translate(ours) == (ours, [])


def test_a_note_names_the_program_and_the_setting():
    _, notes = aliases.translate(["--config.max_prompt_length=64"])
    assert notes == [
        "max_prompt_length of TRL, tunix is data.max_prompt_tokens=64 here. A longer prompt is an error, never cut."
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["max_steps=100"], "--config.max_steps of TRL, tunix has no counterpart. It counts updates. Set iterations"),
        (["per_device_train_batch_size=8"], "Set learning.prompts_per_update: prompts of one update on all devices"),
        (["loss_type=vespo"], "loss_type=vespo has no counterpart. Known are dapo as token-mean, .* set learning.aggr"),
        (
            ["num_generations=8", "collection.group_size=4"],
            "num_generations and --config.collection.group_size are both",
        ),
        (["rollout.n=8", "num_generations=8"], "rollout.n and --config.num_generations are both collection.group_size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_name_that_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        aliases.translate([f"--config.{item}" for item in given])


def test_one_message_has_all_names_that_are_refused():
    given = ["use_vllm=True", "beta=0.04", "loss_type=vespo", "bf16=True", "use_vllm=True"]
    with pytest.raises(ValueError) as caught:
        aliases.translate([f"--config.{item}" for item in given])
    lines = str(caught.value).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["--config.use_vllm", "--config.loss_type=vespo", "--config.bf16"]
    assert lines[2] == "--config.bf16 of TRL has no counterpart. Set model.compute_dtype, or leave it out."


def test_sentences_name_settings():
    ours = config_lib.flatten(config_lib.defaults().to_dict())
    sections = {key.split(".")[0] for key in ours if "." in key}
    named = {name for alias in aliases.ALIASES.values() for name in re.findall(r"([a-z]+\.\w+)", alias.note)}
    assert "evaluation.top_k" in named
    assert {name for name in named if name.split(".")[0] in sections} <= ours.keys()


def test_the_table_fits_the_settings():
    ours = {key: field.metadata["allowed"] for key, field in config_lib.settings()}
    assert not ours.keys() & aliases.ALIASES.keys()
    for name, alias in aliases.ALIASES.items():
        assert set(alias.keys) <= ours.keys(), name
        assert alias.keys or alias.note, name
        for value in alias.values.values():
            settings = [item.split("=") for item in value.split()] if "=" in value else [(alias.keys[0], value)]
            for key, text in settings:
                assert ours[key] is None or ours[key].holds(int(text) if text.isdigit() else text), (name, value)


def test_python_names_the_setting():
    with pytest.raises(ValueError, match="key num_generations. num_generations of TRL, tunix is collection.group_size"):
        config_lib.resolve({"num_generations": 8})
