"""Names of TRL, verl and tunix for our settings: what each one means here. docs/how_to/coming_from.md has the table.

A name with the same meaning is accepted, with a note. A name whose meaning differs is refused, with the setting to use.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

# verl's prefix of the sections actor, rollout and model.
VERL_PREFIX = "actor_rollout_ref."


@dataclasses.dataclass(frozen=True)
class Alias:
    """A setting of another program."""

    libraries: str  # programs that have it
    keys: tuple[str, ...]  # our settings, which all get the value; empty if the name is refused
    note: str = ""  # what differs; of a refused name, what to set
    # Our value for each of theirs, or our settings ("learning.loss=cispo"); empty where values are the same.
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def known_values(self) -> str:
        """Their values and ours, as text."""
        return ", ".join(f"{theirs} as {ours}" for theirs, ours in self.values.items())


_BATCH = "Set learning.prompts_per_update: prompts of one update on all devices, not responses of one device."
_UPDATES = "It counts updates. Set {}, in iterations of collection.prompts_per_iteration prompts."
_WHOLE = "Training samples come from the whole distribution, which scores know. evaluation.{} is for evaluations."
_GROUP = "Responses of a prompt in the update. balance, positive and estimate draw samples_per_round at a time."
_NEVER_CUT = "A longer prompt is an error, never cut."
_DEVIATION = "The deviation is that of all responses drawn for the prompt."
_EPOCHS = "Set iterations; a pass over the prompts has no special place."
_YES_NO = {"True": "True", "true": "True", "False": "False", "false": "False"}
_CLIP = ("learning.clip_low", "learning.clip_high")

ALIASES = {
    # ---- TRL and tunix
    "num_generations": Alias("TRL, tunix", ("collection.group_size",), _GROUP),
    "max_completion_length": Alias("TRL", ("sampling.max_response_tokens",)),
    "max_tokens_to_generate": Alias("tunix", ("sampling.max_response_tokens",)),
    "max_prompt_length": Alias("TRL, tunix", ("data.max_prompt_tokens",), _NEVER_CUT),
    "top_k": Alias("TRL, tunix", (), _WHOLE.format("top_k")),
    "top_p": Alias("TRL, tunix", (), _WHOLE.format("top_p")),
    "temperature": Alias("TRL, tunix", ("sampling.temperature",)),
    "beta": Alias("TRL, tunix", ("learning.kl_coefficient",)),
    "epsilon": Alias("TRL, tunix", _CLIP, "Both bounds; epsilon_high sets the upper one alone."),
    "epsilon_high": Alias("TRL, tunix", ("learning.clip_high",)),
    "loss_type": Alias(
        "TRL", ("learning.aggregation",), "Means are over the whole minibatch.",
        {
            "dapo": "token-mean", "bnpo": "token-mean", "grpo": "seq-mean-token-mean",
            "dr_grpo": "seq-mean-token-sum-norm", "cispo": "learning.loss=cispo",
            "sapo": "learning.loss=sapo learning.aggregation=seq-mean-token-mean",
        },
    ),
    "vllm_importance_sampling_mode": Alias(
        "TRL", ("learning.importance",), "Set learning.truncated_is_cap too: here there is no weight by default.",
        {"token_truncate": "token", "sequence_truncate": "sequence", "token_mask": "mask"},
    ),
    "vllm_importance_sampling_cap": Alias("TRL", ("learning.truncated_is_cap",)),
    "importance_sampling_level": Alias("TRL", ("learning.ratio",)),
    "scale_rewards": Alias(
        "TRL", ("collection.normalize_by_std",), _DEVIATION, _YES_NO | {"group": "True", "none": "False"}
    ),
    "learning_rate": Alias("TRL", ("learning.learning_rate",), "Without lr_scheduler_type it is constant."),
    "lr_scheduler_type": Alias(
        "TRL", ("learning.schedule",), "The default of TRL is linear.",
        {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"},
    ),
    "warmup_steps": Alias("TRL", ("learning.warmup_updates",)),
    "weight_decay": Alias("TRL", ("learning.weight_decay",)),
    "max_grad_norm": Alias("TRL", ("learning.clip_norm",)),
    "adam_beta1": Alias("TRL", ("learning.b1",)),
    "adam_beta2": Alias("TRL", ("learning.b2",)),
    "model_name_or_path": Alias("TRL", ("model.path",)),
    "lora_r": Alias("TRL", ("lora.rank",)),
    "lora_alpha": Alias("TRL", ("lora.alpha",)),
    "max_steps": Alias("TRL, tunix", (), _UPDATES.format("iterations")),
    "num_train_epochs": Alias("TRL", (), _EPOCHS),
    "num_iterations": Alias("TRL, tunix", (), "Each minibatch is used for one update: leave it out."),
    "per_device_train_batch_size": Alias("TRL", (), _BATCH),
    "gradient_accumulation_steps": Alias("TRL", (), f"{_BATCH} learning.micro_batches computes it in parts."),
    "save_steps": Alias("TRL", (), _UPDATES.format("checkpoint.every")),
    "eval_steps": Alias("TRL", (), _UPDATES.format("evaluation.every")),
    "output_dir": Alias("TRL", (), "Use the flag --workdir."),
    "reward_funcs": Alias("TRL", (), "Set reward.path to file.py:function."),
    "reward_weights": Alias("TRL", (), "Write each one behind its function in reward.path: file.py:function=0.5."),
    # ---- verl, without its prefix actor_rollout_ref.
    "rollout.n": Alias("verl", ("collection.group_size",), _GROUP),
    "rollout.temperature": Alias("verl", ("sampling.temperature",)),
    "data.train_files": Alias("verl", ("data.prompts",)),
    "data.max_prompt_length": Alias("verl", ("data.max_prompt_tokens",), _NEVER_CUT),
    "data.max_response_length": Alias("verl", ("sampling.max_response_tokens",)),
    "data.train_batch_size": Alias("verl", ("collection.prompts_per_iteration",)),
    "actor.ppo_mini_batch_size": Alias("verl", ("learning.prompts_per_update",)),
    "actor.clip_ratio": Alias("verl", _CLIP, "Both bounds; clip_ratio_low and clip_ratio_high set one of them."),
    "actor.clip_ratio_low": Alias("verl", ("learning.clip_low",)),
    "actor.clip_ratio_high": Alias("verl", ("learning.clip_high",)),
    "actor.clip_ratio_c": Alias("verl", ("learning.dual_clip",)),
    "actor.loss_agg_mode": Alias("verl", ("learning.aggregation",)),
    "actor.policy_loss.loss_mode": Alias(
        "verl", ("learning.loss",), "",
        {
            "vanilla": "ppo", "cispo": "cispo", "sapo": "sapo",
            "gspo": "learning.ratio=sequence-token learning.aggregation=seq-mean-token-mean",
        },
    ),
    "algorithm.rollout_correction.rollout_is": Alias(
        "verl", ("learning.importance",), "Set learning.truncated_is_cap too: here there is no weight by default.",
        {"token": "token", "sequence": "sequence"},
    ),
    "algorithm.rollout_correction.rollout_is_threshold": Alias("verl", ("learning.truncated_is_cap",)),
    "actor.kl_loss_coef": Alias("verl", ("learning.kl_coefficient",), "No use_kl_loss: 0 is no KL term."),
    "actor.kl_loss_type": Alias(
        "verl", ("learning.kl_kind",), "",
        {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"},
    ),
    "actor.entropy_coeff": Alias("verl", ("learning.entropy_coefficient",)),
    "actor.optim.lr": Alias("verl", ("learning.learning_rate",)),
    "actor.optim.lr_scheduler_type": Alias("verl", ("learning.schedule",)),
    "model.lora_rank": Alias("verl", ("lora.rank",)),
    "model.lora_alpha": Alias("verl", ("lora.alpha",)),
    "algorithm.norm_adv_by_std_in_grpo": Alias("verl", ("collection.normalize_by_std",), _DEVIATION, _YES_NO),
    "trainer.total_training_steps": Alias("verl", ("iterations",)),
    "trainer.save_freq": Alias("verl", ("checkpoint.every",), "0 instead of -1: only at the end."),
    "trainer.test_freq": Alias("verl", ("evaluation.every",), "0 instead of -1: none."),
    "trainer.total_epochs": Alias("verl", (), _EPOCHS),
}  # fmt: skip


def find(name: str) -> Alias | None:
    """Returns the alias that a dotted name means; None if there is none."""
    return ALIASES.get(name.removeprefix(VERL_PREFIX))


def hint(name: str) -> str:
    """Returns the sentence on a setting of another program; "" if the name is none of them."""
    alias = find(name)
    if alias is None:
        return ""
    if not alias.keys:
        return f"{name} of {alias.libraries} has no counterpart. {alias.note}"
    values = f" ({alias.known_values})" if alias.values else ""
    return f"{name} of {alias.libraries} is {' and '.join(alias.keys)} here{values}."


def translate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns (arguments with our settings in place of the names of other programs, notes for the user).

    An alias of two settings leaves out one that is also given by itself.

    Raises:
      ValueError: a name or its value has no counterpart, or a setting is given by two names.
    """
    matches = [re.fullmatch(r"--?config\.([\w.]+)=(.*)", argument, re.DOTALL) for argument in arguments]
    given: dict[str, str] = {}  # name by the setting that it sets alone
    for name in (match[1] for match in matches if match):
        alias = find(name)
        keys = (name,) if alias is None else alias.keys
        if len(keys) == 1 and given.setdefault(keys[0], name) != name:
            raise ValueError(f"--config.{given[keys[0]]} and --config.{name} are both {keys[0]}: drop one of them.")
    result, notes = [], []
    for argument, match in zip(arguments, matches, strict=True):
        alias = find(match[1]) if match else None
        if match is None or alias is None:
            result.append(argument)
            continue
        if not alias.keys:
            raise ValueError(f"--config.{hint(match[1])}")
        value = _value(match[1], match[2], alias)
        keys = [key for key in alias.keys if given.get(key, match[1]) == match[1]]
        settings = value.split() if "=" in value else [f"{key}={value}" for key in keys]
        result += [f"--config.{setting}" for setting in settings]
        what = " and ".join(settings) or "nothing, other flags set both"
        notes.append(f"{match[1]} of {alias.libraries} is {what} here. {alias.note}".strip())
    return result, notes


def _value(name: str, value: str, alias: Alias) -> str:
    if alias.values and value not in alias.values:
        raise ValueError(
            f"--config.{name}={value} has no counterpart. Known are {alias.known_values}; or set {alias.keys[0]}."
        )
    return alias.values.get(value, value)
