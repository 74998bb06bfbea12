"""Every default, once; and every check that needs no device.

A file in `configs/` starts from `defaults()` and changes what it means to change. `validate` runs before any device
work and names the rule, the values and the remedy; what each value may be is in config/values.py. Numbers without a note
are those of the paper's runs (arXiv 2510.04996) and its reference program.
"""

import json
import math
import pathlib
from typing import Any

from ml_collections import config_dict

from reinforce_ada_jax.config.collection_rules import check_collection
from reinforce_ada_jax.config.values import ALL_LINEAR, check_values

# The wording of the paper's runs: system message, and what follows the problem in the user's message.
SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."
DAY = "2024-07-26"  # which Llama's templates fall back on
# A resume may change these; any other difference is another run.
RESUMABLE = (
    *("iterations", "checkpoint", "evaluation", "logging"),
    *("sampling.check_invariants", "learning.non_finite", "learning.max_skipped"),
)
# Keys of older runs that changed no result; nothing reads them any more.
RETIRED = ("learning.logprob_chunk",)
# What an evaluation of a run must have in common with it. How fast and on what it is drawn is free, as is `evaluation`.
DRAWN_WITH = ("seed", "model", "lora", "data.template", "data.system", "data.instruction", "data.date")
GRADED_BY = ("reward.kind", "reward.path", "reward.positive_threshold")


def defaults() -> config_dict.ConfigDict:
    """The whole configuration, every key with its default."""
    config = config_dict.create(
        seed=0,
        iterations=400,  # the reference script; the paper's text says 600
        model=dict(
            path="",  # a Hugging Face folder: config.json, safetensors, tokenizer.json
            compute_dtype="bfloat16",
            parameter_dtype="float32",  # master weights and what the optimiser sees
        ),
        data=dict(
            # A JSONL file {"id", "problem", "answer"}, "tfds:NAME/SPLIT", "tfds:DIR", "hf:NAME:SPLIT" or
            # "hf:NAME:SUBSET:SPLIT", "cipher:train".
            prompts="",
            # "plain": the problem as it is. "qwen_math", "chat": messages in the model's own chat template, which say
            # what the paper's say, or `system` and `instruction`.
            template="qwen_math",
            system=SYSTEM,  # "": no system message
            instruction=INSTRUCTION,  # follows the problem and a space
            date=DAY,  # what a template that prints the date is told (Llama-3.2's), so that a run is its seed
            max_prompt_tokens=1024,  # a longer prompt is an error: it is never cut
        ),
        reward=dict(
            kind="math",  # one of config_rules.REWARDS, or "function": yours, named by
            path="",  # "file.py:function": (response, answer) -> number, bool or Verdict; in place of any other kind
            workers=2,  # grading processes; 0 grades in this process (for checkers that can neither hang nor crash)
            time_limit_s=6.0,  # wall clock for one grading, enforced by killing the worker
            positive_threshold=0.7,  # a graded reward above it is correct: what stopping rules and pass rates look at
            overlong_tokens=0,  # the last so many tokens before the length limit cost, in a straight line, up to
            overlong_penalty=1.0,
        ),
        collection=dict(
            strategy="balance",  # one of collection_rules.STRATEGIES, or "file.py:function" (docs/strategies.md)
            group_size=4,  # n: rows of one prompt that reach the update; of grpo, dapo and ngu the size of a round
            samples_per_round=8,  # M
            max_rounds=4,  # N: at most M * N draws for a prompt
            # Correct and wrong responses that end the rounds.
            k_pos=config_dict.placeholder(int),  # default: 1 for positive, n // 2 for balance
            k_neg=config_dict.placeholder(int),  # default: 0 for positive, n - n // 2 for balance
            # estimate: N_x is fixed before drawing, within [min_draws, max_draws], and sums to budget * prompts.
            min_draws=2,
            max_draws=config_dict.placeholder(int),  # N_max, of ngu too, where 0 is no limit; default: M * N
            budget=config_dict.placeholder(float),  # draws for a prompt on average; default: M
            # N_x goes with sqrt(w); "sampling": with w; "variance": with sqrt((1 - p) / p). Advantages pay the rest.
            allocation="hybrid",
            max_extra_batches=3,  # dapo: how often an iteration's prompts may be drawn anew for dropped groups
            retry_probability=0.95,  # ngu: of one more round for a prompt that is all wrong
            max_age=4,  # ngu: updates since a response was drawn, beyond which it is not trained on
            keep="",  # "group": a balanced group of n; "pool": every response; default: the strategy's own
            baseline="",  # one of collection_rules.BASELINES; default: the strategy's own
            normalize_by_std=False,
            objective="identity",  # J = E[f(p)]: f = p, log p, or p^alpha
            objective_alpha=0.5,
            objective_epsilon=1e-2,  # pass rates below it count as it in w(p) = f'(p)
            prompts_per_iteration=512,
            barrier=False,  # rounds of all prompts in step, as in the reference program: the same samples, more time
            # Hear verdicts at fixed points, so that equal runs make equal bits on devices that round by row position;
            # default: on CPUs.
            deterministic=config_dict.placeholder(bool),
            # 1: slots that would be idle begin the next iteration's prompts, under this iteration's weights.
            overlap_iterations=0,
        ),
        estimator=dict(  # of pass rates, for the strategy estimate
            kind="ema",  # "value": a head on the policy's last prompt token
            decay=0.85,
            prior_correct=0.5,  # a and b of the Beta prior
            prior_wrong=0.5,
            learning_rate=3e-2,  # of the value head
            steps=8,  # of its optimiser, for every iteration's pools
        ),
        sampling=dict(
            temperature=1.0,
            top_k=0,  # 0 and 1.0 only: cut off, samples are of another policy than the one that is trained
            top_p=1.0,
            max_response_tokens=2048,
            slots=256,  # responses decoded side by side, in each of mesh.data * mesh.fsdp replicas
            window=32,  # tokens decoded for all slots in one dispatch
            page_size=64,  # tokens a page of the key/value cache holds
            pages=0,  # pages of a replica's cache; 0: enough for every slot and `open_prompts`
            # Prompts whose pages a replica holds at a time; 0: a quarter more than slots, or all behind a barrier.
            open_prompts=0,
            prefill_rows=16,  # prompts prefilled in one dispatch
            attention="auto",  # "jnp", "pallas_tpu" or "pallas_gpu"; auto: the one made for the device
            # Look after every window whether pages, rows and requests are all accounted for: to find a fault, slowly.
            check_invariants=False,
        ),
        learning=dict(
            prompts_per_update=128,  # 4 updates an iteration
            micro_batches=1,  # the minibatch is split into this many; changes memory, not results
            # At most so many responses share a row of max_prompt_tokens + max_response_tokens; 1: each has its own.
            responses_per_row=16,
            attention="auto",  # "jnp", or "splash": JAX's kernels for TPU (interpreted elsewhere); auto: by the device
            # What the backward pass computes again: "full", each layer; "dots", all but the products with weights, a
            # quarter less to compute for several times the activations; auto: "dots" on CPUs, "full" elsewhere.
            remat="auto",
            learning_rate=1e-6,
            warmup_updates=10,
            b1=0.9,
            b2=0.999,
            epsilon=1e-8,
            weight_decay=0.0,
            # auto: that of the weights. "bfloat16" beside float32: a sixth less to keep of weights and moments.
            first_moment_dtype="auto",
            clip_norm=1.0,
            clip_low=0.2,
            clip_high=0.28,
            dual_clip=10.0,
            aggregation="token-mean",
            ratio="token",  # "sequence": one ratio a response, the geometric mean of its tokens' (GSPO)
            entropy_coefficient=0.0,  # the reference script; the paper's text says 1e-4
            kl_coefficient=0.0,  # above 0: a frozen copy of the first weights is kept as reference
            kl_kind="k3",
            # Cap of the sampler/learner importance weight; default: none, or 2.0 with overlap_iterations.
            truncated_is_cap=config_dict.placeholder(float),
            # Where a loss, gradient or log-probability isn't finite: "stop" the run, or "skip" the update. What it was
            # made of is written to non_finite/ either way.
            non_finite="stop",
            max_skipped=3,  # in a row; the next one stops the run
        ),
        lora=dict(
            rank=0,  # of the adapters that are trained in place of the weights; 0: the weights themselves
            alpha=32.0,  # an adapter's product counts alpha / rank
            targets=(ALL_LINEAR,),  # of config_rules.LORA_TARGETS
        ),
        mesh=dict(data=1, fsdp=1, tensor=1),
        checkpoint=dict(
            every=50,
            keep=2,  # the newest ones
            keep_best=0,  # beside them, so many with the best evaluation (the mean of avg@k over the benchmarks)
            keep_every=0,  # and those of every so many iterations; 0: none
        ),
        evaluation=dict(
            every=50,
            benchmarks=(),  # JSONL files, or "cipher:heldout"
            # Benchmarks that are graded otherwise than training, by the stem of their file.
            graders=("minerva_math=minerva", "gsm8k_test=gsm8k"),
            samples=32,
            temperature=1.0,  # 0: the most probable token
            top_k=0,  # 0: all
            top_p=1.0,
            max_response_tokens=4096,
        ),
        logging=dict(
            tensorboard=True,
            wandb="",  # a project of Weights & Biases, where `wandb` is installed; "": none
            sampled_prompts=4,  # prompts of each iteration whose responses are written to samples/
        ),
    )
    return config.lock()  # so that a config file that misspells a key is told, too


def _multiple(name: str, value: int, of_name: str, of: int) -> None:
    if value % of:
        lower, upper = value - value % of, value + of - value % of
        raise ValueError(
            f"{name} must be a multiple of {of_name}: {value} is not one of {of}. Use {lower or upper} or {upper}."
        )


def longest_response(config: config_dict.ConfigDict) -> int:
    """Tokens of the longest response that will be sampled, training or evaluation."""
    if config.evaluation.benchmarks:
        return max(config.sampling.max_response_tokens, config.evaluation.max_response_tokens)
    return config.sampling.max_response_tokens


def least_pages(config: config_dict.ConfigDict) -> int:
    """Pages without which one response may never find room.

    The longest prompt holds its pages; its draw has pages of its own from the prompt's last, partly filled one on, and
    one page is never handed out: it takes the writes of idle slots and of padding.
    """
    prompt, page_size = config.data.max_prompt_tokens, config.sampling.page_size
    return math.ceil(prompt / page_size) + math.ceil((prompt + longest_response(config)) / page_size) + 1


def _check_reward(config: config_dict.ConfigDict) -> None:
    reward, longest = config.reward, config.sampling.max_response_tokens
    if reward.kind == "function" and not reward.path:
        raise ValueError(
            "reward.kind is 'function', but reward.path is empty: name yours, --config.reward.path=FILE.py:FUNCTION."
        )
    if reward.path and not reward.workers:
        raise ValueError(
            f"reward.workers is 0, and reward.path {reward.path!r}: code that isn't ours is run in grading processes "
            "only, which can be limited and replaced. Use at least 1."
        )
    if not reward.overlong_tokens <= longest:
        raise ValueError(
            f"reward.overlong_tokens is {reward.overlong_tokens}, sampling.max_response_tokens only {longest}: the "
            "penalty would begin before the first token. Lower it."
        )


def _check_sampling(config: config_dict.ConfigDict) -> None:
    collection, sampling = config.collection, config.sampling
    if sampling.top_k != 0 or sampling.top_p != 1:
        raise ValueError(
            f"sampling.top_k is {sampling.top_k} and sampling.top_p {sampling.top_p}: training samples must come from "
            "the policy as it is (0 and 1.0), or every ratio of the update is wrong. To cut off the tail in "
            "evaluations, set evaluation.top_k and evaluation.top_p."
        )
    if collection.overlap_iterations and collection.strategy in ("estimate", "dapo"):
        raise ValueError(
            f"collection.overlap_iterations begins prompts before it is known what {collection.strategy} will ask of "
            "them (estimate allots draws after the last iteration's verdicts, dapo does not know its prompts yet): set "
            "it to 0."
        )
    if collection.overlap_iterations and collection.barrier:
        raise ValueError(
            "collection.barrier keeps all prompts in step, collection.overlap_iterations lets the next iteration's "
            "begin early: choose one of them."
        )
    if collection.barrier and 0 < sampling.open_prompts < collection.prompts_per_iteration:
        raise ValueError(
            f"sampling.open_prompts is {sampling.open_prompts}, collection.prompts_per_iteration is "
            f"{collection.prompts_per_iteration}: with collection.barrier every prompt stays open until the last "
            "round, so all must be open at a time. Use at least so many, or 0 to have them counted for you."
        )
    prompts, longest = collection.prompts_per_iteration, config.data.max_prompt_tokens
    at_once = (prompts - 1) * math.ceil(longest / sampling.page_size) + least_pages(config)
    if collection.barrier and 0 < sampling.pages < at_once:
        raise ValueError(
            f"sampling.pages is {sampling.pages}: with collection.barrier all {prompts} prompts of up to {longest} "
            f"tokens keep their pages until the last round, and with a response's they are {at_once} of "
            f"{sampling.page_size} tokens. Use at least so many, or 0 to have them counted for you."
        )
    if sampling.pages and sampling.pages < least_pages(config):
        raise ValueError(
            f"sampling.pages is {sampling.pages}: a prompt of {config.data.max_prompt_tokens} tokens with a response "
            f"of {longest_response(config)} needs {least_pages(config)} pages of {sampling.page_size} tokens (one "
            "of them reserved). Use at least so many, or 0 to have them counted for you."
        )


def _check_sizes(config: config_dict.ConfigDict) -> None:
    """An iteration is whole updates, and an update whole micro-batches."""
    collection, learning = config.collection, config.learning
    _multiple(
        "collection.prompts_per_iteration",
        collection.prompts_per_iteration,
        "learning.prompts_per_update",
        learning.prompts_per_update,
    )
    _multiple(
        "learning.prompts_per_update * collection.group_size",
        learning.prompts_per_update * collection.group_size,
        "learning.micro_batches * mesh.data * mesh.fsdp",
        learning.micro_batches * config.mesh.data * config.mesh.fsdp,
    )


def validate(config: config_dict.ConfigDict) -> None:
    """Raises ValueError for the first rule broken. Touches no device and no file."""
    if not config.model.path:
        raise ValueError("model.path is empty: name a Hugging Face folder, --config.model.path=DIR.")
    if not config.data.prompts:
        raise ValueError("data.prompts is empty: name a source of problems, --config.data.prompts=FILE.jsonl.")
    check_values(config)
    if config.data.template != "chat" and (config.data.system, config.data.instruction) != (SYSTEM, INSTRUCTION):
        raise ValueError(
            f"data.system and data.instruction are used by data.template='chat' only, and it is "
            f"{config.data.template!r}: set it, or leave the two as they are."
        )
    if config.model.parameter_dtype != "float32":
        raise ValueError(
            f"model.parameter_dtype is {config.model.parameter_dtype!r}: a step of the optimiser is less than bfloat16 "
            "weights can tell apart, and most would never change. Use float32; learning.first_moment_dtype=bfloat16 "
            "and lora.rank save memory."
        )
    check_collection(config.collection)
    _check_reward(config)
    _check_sizes(config)
    _check_sampling(config)


def to_json(config: config_dict.ConfigDict) -> str:
    """The resolved configuration as indented JSON text."""
    return json.dumps(json.loads(config.to_json_best_effort()), indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> config_dict.ConfigDict:
    """The configuration that `to_json` wrote."""
    saved = json.loads(text)
    for key in {"benchmarks", "graders"} & saved["evaluation"].keys():  # older runs have no graders
        saved["evaluation"][key] = tuple(saved["evaluation"][key])
    if "lora" in saved:  # runs from before there were adapters have none
        saved["lora"]["targets"] = tuple(saved["lora"]["targets"])
    for section, key in (name.split(".") for name in RETIRED):
        saved.get(section, {}).pop(key, None)
    config = defaults()
    config.update(saved)
    return config


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def differences(config: config_dict.ConfigDict, saved: dict[str, Any]) -> list[str]:
    """Lines "key: saved -> now" for the keys that make `config` another run than the one `saved` describes.

    A key that is newer than the run has its default there: that is what was done before there was a choice.
    """
    now, then = _flatten(json.loads(to_json(config))), _flatten(json.loads(to_json(defaults()))) | _flatten(saved)
    return [
        f"{key}: {then.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted(now.keys() | then.keys())
        if not {key, key.split(".")[0]} & {*RESUMABLE, *RETIRED} and now.get(key, KeyError) != then.get(key, KeyError)
    ]


def check_workdir(config: config_dict.ConfigDict, workdir: pathlib.Path) -> None:
    """Raises ValueError when `workdir` holds a run of another configuration."""
    file = workdir / "config.json"
    if not file.exists():
        return
    different = differences(config, json.loads(file.read_text()))
    if different:
        lines = "\n  ".join(different)
        raise ValueError(
            f"{workdir} holds a run of another configuration (saved -> now):\n  {lines}\nResume it with its own "
            f"values, or choose another --workdir. What may change: {', '.join(RESUMABLE)}."
        )


def check_evaluated(config: config_dict.ConfigDict, workdir: pathlib.Path, keys: tuple[str, ...]) -> None:
    """Raises ValueError when `config` isn't that of the run in `workdir` in one of `keys`."""
    file = workdir / "config.json"
    if not file.exists():
        return
    different = [
        line
        for line in differences(config, json.loads(file.read_text()))
        if any(f"{line.partition(': ')[0]}.".startswith(f"{key}.") for key in keys)
    ]
    if different:
        lines = "\n  ".join(different)
        raise ValueError(
            f"{workdir} holds a run of another configuration (saved -> now):\n  {lines}\nIts figures would be another "
            "policy's or another task's. Evaluate it with its own --config and values."
        )
