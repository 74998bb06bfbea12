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
    note: str = ""  # what differs; for a refused name, what to set instead
    # Our value for each of theirs, or our settings ("learning.loss=cispo"); empty where values are the same.
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    others: bool = False  # a value that is not in `values` is taken as it is

    @property
    def known_values(self) -> str:
        """Their values and ours, as text."""
        return ", ".join(f"{theirs} as {ours}" for theirs, ours in self.values.items())


_GROUP = "Responses of a prompt in the update. balance, positive and estimate draw samples_per_round at a time."
_EVALUATIONS = "That of evaluations is evaluation.max_response_tokens."
_NEVER_CUT = "A longer prompt is an error, never cut."
_DEVIATION = "The deviation is that of all responses drawn for the prompt."
_YES_NO = {"True": "True", "true": "True", "False": "False", "false": "False"}
_CLIP = ("learning.clip_low", "learning.clip_high")
_TARGETS = "Several are written as q_proj,v_proj."

ALIASES = {
    # ---- TRL and tunix
    "num_generations": Alias("TRL, tunix", ("collection.group_size",), _GROUP),
    "max_completion_length": Alias("TRL", ("sampling.max_response_tokens",), _EVALUATIONS),
    "max_tokens_to_generate": Alias("tunix", ("sampling.max_response_tokens",), _EVALUATIONS),
    "max_prompt_length": Alias("TRL, tunix", ("data.max_prompt_tokens",), _NEVER_CUT),
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
    "adam_epsilon": Alias("TRL", ("learning.epsilon",)),
    "delta": Alias("TRL", ("learning.dual_clip",), "By default it is 10 here, and there is none in TRL."),
    "model_name_or_path": Alias("TRL", ("model.path",)),
    "lora_r": Alias("TRL", ("lora.rank",)),
    "lora_alpha": Alias("TRL", ("lora.alpha",)),
    "lora_target_modules": Alias("TRL", ("lora.targets",), _TARGETS),
    "save_total_limit": Alias("TRL", ("checkpoint.keep",)),
    "num_generations_eval": Alias("TRL", ("evaluation.samples",)),
    # ---- verl, without its prefix actor_rollout_ref.
    "rollout.n": Alias("verl", ("collection.group_size",), _GROUP),
    "rollout.temperature": Alias("verl", ("sampling.temperature",)),
    "rollout.val_kwargs.n": Alias("verl", ("evaluation.samples",)),
    "rollout.val_kwargs.temperature": Alias("verl", ("evaluation.temperature",)),
    "rollout.val_kwargs.top_p": Alias("verl", ("evaluation.top_p",)),
    "rollout.val_kwargs.top_k": Alias("verl", ("evaluation.top_k",), "0: all tokens.", {"-1": "0"}, others=True),
    "data.train_files": Alias("verl", ("data.prompts",), "One file."),
    "data.val_files": Alias("verl", ("evaluation.benchmarks",)),
    "data.prompt_key": Alias("verl", ("data.problem_column",)),
    "data.max_prompt_length": Alias("verl", ("data.max_prompt_tokens",), _NEVER_CUT),
    "data.max_response_length": Alias("verl", ("sampling.max_response_tokens",), _EVALUATIONS),
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
    "actor.tis_imp_ratio_cap": Alias("verl", ("learning.truncated_is_cap",)),
    "actor.kl_loss_coef": Alias(
        "verl", ("learning.kl_coefficient",), "It counts without use_kl_loss, too: 0 is no KL term."
    ),
    "actor.kl_loss_type": Alias(
        "verl", ("learning.kl_kind",), "",
        {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"},
    ),
    "actor.entropy_coeff": Alias("verl", ("learning.entropy_coefficient",)),
    "actor.optim.lr": Alias("verl", ("learning.learning_rate",)),
    "actor.optim.lr_scheduler_type": Alias("verl", ("learning.schedule",)),
    "actor.optim.weight_decay": Alias("verl", ("learning.weight_decay",)),
    "actor.grad_clip": Alias("verl", ("learning.clip_norm",)),
    f"{VERL_PREFIX}model.path": Alias("verl", ("model.path",)),  # without its prefix the name is ours
    "model.lora_rank": Alias("verl", ("lora.rank",)),
    "model.lora_alpha": Alias("verl", ("lora.alpha",)),
    "model.target_modules": Alias("verl", ("lora.targets",), _TARGETS),
    "algorithm.adv_estimator": Alias(
        "verl", ("collection.strategy",), "Without it the strategy is balance.",
        {
            "grpo": "collection.strategy=grpo collection.normalize_by_std=True",
            "rloo": "collection.strategy=grpo collection.baseline=leave_one_out",
        },
    ),
    "algorithm.norm_adv_by_std_in_grpo": Alias("verl", ("collection.normalize_by_std",), _DEVIATION, _YES_NO),
    "trainer.total_training_steps": Alias("verl", ("iterations",)),
    "trainer.save_freq": Alias("verl", ("checkpoint.every",), "0: only at the end.", {"-1": "0"}, others=True),
    "trainer.test_freq": Alias("verl", ("evaluation.every",), "0: none.", {"-1": "0"}, others=True),
    "trainer.max_actor_ckpt_to_keep": Alias("verl", ("checkpoint.keep",)),
}  # fmt: skip

_UPDATES = "It counts updates. Set {}, in iterations of collection.prompts_per_iteration prompts."
_WHOLE = "Training samples come from the whole distribution, which scores know. evaluation.{} is for evaluations."
# ({program: names without a counterpart}, what to do instead).
_REFUSED = (
    ({"TRL": "per_device_train_batch_size gradient_accumulation_steps"},
     "Set learning.prompts_per_update: prompts of one update on all devices, which are per_device_train_batch_size "
     "* devices * gradient_accumulation_steps / num_generations."),
    ({"verl": "actor.ppo_micro_batch_size actor.ppo_micro_batch_size_per_gpu actor.ppo_max_token_len_per_gpu "
      "actor.use_dynamic_bsz rollout.log_prob_micro_batch_size rollout.log_prob_micro_batch_size_per_gpu "
      "ref.log_prob_micro_batch_size ref.log_prob_micro_batch_size_per_gpu model.use_remove_padding"},
     "Leave it out; learning.micro_batches divides an update where memory is short."),
    ({"TRL": "steps_per_generation generation_batch_size"},
     "Set collection.prompts_per_iteration: prompts drawn with the same weights, generation_batch_size / "
     "num_generations."),
    ({"verl": "data.gen_batch_size"},
     "Set collection.prompts_per_iteration; dapo draws as many replacements as collection.max_extra_batches allows."),
    ({"verl": "algorithm.filter_groups.enable algorithm.filter_groups.metric "
      "algorithm.filter_groups.max_num_gen_batches"},
     "Set collection.strategy=dapo, which replaces prompts without a signal; collection.max_extra_batches limits "
     "the replacements."),
    ({"TRL, tunix": "max_steps"}, _UPDATES.format("iterations")),
    ({"TRL": "save_steps"}, _UPDATES.format("checkpoint.every")),
    ({"TRL": "eval_steps"}, _UPDATES.format("evaluation.every")),
    ({"TRL": "save_strategy eval_strategy"}, "Leave it out: checkpoint.every and evaluation.every are enough."),
    ({"TRL": "num_train_epochs", "verl": "trainer.total_epochs"},
     "Set iterations: one epoch has as many as there are problems / collection.prompts_per_iteration."),
    ({"TRL, tunix": "num_iterations", "verl": "actor.ppo_epochs"},
     "Each minibatch is used for one update: leave it out."),
    ({"TRL": "warmup_ratio", "verl": "actor.optim.lr_warmup_steps_ratio"},
     "Set learning.warmup_updates, a number of updates."),
    ({"verl": "actor.optim.lr_warmup_steps"},
     "It counts iterations. Set learning.warmup_updates, a number of updates."),
    ({"TRL, tunix": "top_k", "verl": "rollout.top_k"}, _WHOLE.format("top_k")),
    ({"TRL, tunix": "top_p", "verl": "rollout.top_p"}, _WHOLE.format("top_p")),
    ({"TRL": "min_p repetition_penalty"}, "Training samples come from the whole distribution, which scores know."),
    ({"verl": "rollout.val_kwargs.do_sample"}, "Set evaluation.temperature=0 for the most probable tokens."),
    ({"TRL": "mask_truncated_completions"}, "Responses at the length limit are trained on, with the reward they have."),
    ({"verl": "reward_model.overlong_buffer.enable reward_model.overlong_buffer.len "
      "reward_model.overlong_buffer.penalty_factor"},
     "Set reward.overlong_tokens, whose penalty is relative to the other correct responses of the prompt."),
    ({"verl": "actor.use_kl_loss algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef"},
     "Set learning.kl_coefficient: a KL term is in the loss, and 0 is none."),
    ({"TRL": "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"},
     "The reference of the KL term stays the first weights."),
    ({"TRL": "vllm_importance_sampling_correction"}, "Set learning.truncated_is_cap, or leave both out."),
    ({"TRL": "optim"}, "The optimizer is AdamW: leave it out."),
    ({"verl": "actor.optim.betas"}, "Set learning.b1 and learning.b2."),
    ({"TRL": "reward_funcs",
      "verl": "custom_reward_function.path custom_reward_function.name reward.custom_reward_function.path "
      "reward.custom_reward_function.name"},
     "Set reward.path to file.py:function."),
    ({"TRL": "reward_weights"}, "Write each one behind its function in reward.path: file.py:function=0.5."),
    ({"verl": "reward_model.enable reward_model.reward_manager"}, "Set reward.kind, or reward.path."),
    ({"verl": "rollout.multi_turn.enable rollout.multi_turn.max_assistant_turns"},
     "Set environment.path and environment.max_turns."),
    ({"TRL": "dataset_name dataset_config dataset_train_split"}, "Set data.prompts=hf:NAME:SUBSET:SPLIT, or a file."),
    ({"TRL": "shuffle_dataset remove_unused_columns data_seed"},
     "Leave it out: epochs are shuffled with seed, and a reward gets every column."),
    ({"verl": "data.shuffle data.seed"}, "Leave it out: epochs are shuffled with seed."),
    ({"verl": "data.filter_overlong_prompts data.truncation"},
     "Leave it out: a prompt above data.max_prompt_tokens is an error, and the command prepare drops it."),
    ({"TRL": "bf16 fp16 dtype torch_dtype"}, "Set model.compute_dtype, or leave it out."),
    ({"TRL": "gradient_checkpointing", "verl": "model.enable_gradient_checkpointing"},
     "Set learning.remat, or leave it out."),
    ({"TRL": "use_vllm vllm_mode vllm_gpu_memory_utilization use_liger_kernel attn_implementation",
      "verl": "rollout.name rollout.mode rollout.gpu_memory_utilization rollout.enforce_eager "
      "rollout.free_cache_engine rollout.max_num_seqs rollout.max_num_batched_tokens rollout.enable_chunked_prefill "
      "rollout.load_format"},
     "Leave it out: the engine is built in, and sampling.slots is its size."),
    ({"TRL": "vllm_tensor_parallel_size fsdp deepspeed"}, "Set mesh.fsdp and mesh.tensor."),
    ({"verl": "rollout.tensor_model_parallel_size actor.ulysses_sequence_parallel_size actor.strategy "
      "actor.fsdp_config.param_offload actor.fsdp_config.optimizer_offload ref.fsdp_config.param_offload "
      "trainer.n_gpus_per_node trainer.nnodes"},
     "Set mesh.fsdp, mesh.tensor and mesh.context; nothing is offloaded."),
    ({"TRL": "use_peft"}, "Set lora.rank above 0."),
    ({"TRL": "lora_dropout"}, "Adapters have no dropout: leave it out."),
    ({"TRL": "load_in_4bit load_in_8bit"}, "Weights are not quantized; sampling.weight_dtype=int8 is for sampling."),
    ({"TRL": "report_to run_name logging_dir", "verl": "trainer.logger trainer.project_name trainer.experiment_name"},
     "Set logging.trackers: tensorboard, wandb:PROJECT or trackio:PROJECT."),
    ({"TRL": "logging_steps log_completions num_completions_to_print"},
     "Leave it out: every iteration is in metrics.jsonl, and logging.sampled_prompts prompts of it are in samples/."),
    ({"TRL": "output_dir", "verl": "trainer.default_local_dir"}, "Use the flag --workdir."),
    ({"TRL": "resume_from_checkpoint", "verl": "trainer.resume_mode"},
     "Leave it out: the same command resumes the run in --workdir."),
    ({"TRL": "push_to_hub"}, "Leave it out: the command export writes a Hugging Face folder."),
    ({"verl": "trainer.val_before_train"}, "Leave it out: evaluations begin before the first update."),
    ({"verl": "trainer.critic_warmup algorithm.gamma algorithm.lam"}, "Leave it out: there is no critic."),
)  # fmt: skip
ALIASES |= {
    name: Alias(program, (), what) for by_program, what in _REFUSED for program, names in by_program.items()
    for name in names.split()
}  # fmt: skip


def find(name: str) -> Alias | None:
    """Returns the alias that a dotted name means; None if there is none."""
    return ALIASES.get(name) or ALIASES.get(name.removeprefix(VERL_PREFIX))


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

    An alias that sets several settings does not set those that are also given under their own names.

    Raises:
      ValueError: names or values have no counterpart, one line for each; or a setting is given by two names.
    """
    matches = [re.fullmatch(r"--?config\.([\w.]+)=(.*)", argument, re.DOTALL) for argument in arguments]
    given: dict[str, str] = {}  # {setting: the name that sets this setting only}
    for name, value in (match.groups() for match in matches if match):
        keys = [setting.partition("=")[0] for setting in _settings(name, value)]
        if len(keys) == 1 and given.setdefault(keys[0], name) != name:
            raise ValueError(f"--config.{given[keys[0]]} and --config.{name} are both {keys[0]}: drop one of them.")
    result, notes, refused = [], [], []
    for argument, match in zip(arguments, matches, strict=True):
        alias = find(match[1]) if match else None
        if match is None or alias is None:
            result.append(argument)
            continue
        name, value = match.groups()
        if refusal := _refusal(name, value, alias):
            refused.append(refusal)
            continue
        settings = [each for each in _settings(name, value) if given.get(each.partition("=")[0], name) == name]
        result += [f"--config.{setting}" for setting in settings]
        what = " and ".join(settings) or "nothing, other flags set all of it"
        notes.append(f"{name} of {alias.libraries} is {what} here. {alias.note}".strip())
    if refused:
        raise ValueError("\n".join(dict.fromkeys(refused)))
    return result, notes


def _settings(name: str, value: str) -> list[str]:
    """Returns our settings, as KEY=VALUE, for a name with this value."""
    alias = find(name)
    if alias is None:
        return [f"{name}={value}"]
    ours = alias.values.get(value)
    return ours.split() if ours and "=" in ours else [f"{key}={ours or value}" for key in alias.keys]


def _refusal(name: str, value: str, alias: Alias) -> str:
    """Returns why a name, or its value, has no counterpart, and what to set; "" if it has one."""
    if not alias.keys:
        return f"--config.{hint(name)}"
    if not alias.values or alias.others or value in alias.values:
        return ""
    return f"--config.{name}={value} has no counterpart. Known are {alias.known_values}; or set {alias.keys[0]}."
