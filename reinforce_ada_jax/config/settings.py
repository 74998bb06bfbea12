"""Every setting of a run, once: its type, default, meaning, allowed values, and the rule that ties it to others.

Flags, checks, `--help` and docs/settings.md are made from these records. A file in `configs/` starts from `defaults()`
and changes what it needs; `validate` checks the result and returns a `Config`. Defaults without a note are those of the
paper's runs (arXiv 2510.04996) and its reference program.
"""

import dataclasses
import math
from typing import Any, ClassVar

from reinforce_ada_jax.config import values
from reinforce_ada_jax.config.values import Allowed, empty_or_one_of, one_of

# The wording of the paper's runs: the system message, and the text after the problem in the user's message.
SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."


def setting(default: Any, text: str, allowed: Allowed | None = None, rule: str = "") -> Any:
    """Declares one setting.

    Args:
      default: value where a configuration says nothing.
      text: one line for `--help` and the reference page.
      allowed: values that it may have; None where any value of its type is allowed.
      rule: name of the function in rules.py or collection_rules.py that ties it to other settings.
    """
    return dataclasses.field(default=default, metadata={"text": text, "allowed": allowed, "rule": rule})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Weights that a run starts from, and their precision."""

    path: str = setting(
        "", "Hugging Face folder with config.json, safetensors and tokenizer.json; a GGUF file; or a model of "
        "huggingface.co, OWNER/MODEL or OWNER/MODEL@REVISION, fetched once.", rule="model_and_prompts_are_named",
    )  # fmt: skip
    compute_dtype: str = setting(
        "auto", "Precision of products and activations, on CPUs of products alone; auto: bfloat16, but float32 on CPUs "
        "unless the model is large and dense and the processor is faster in bfloat16; a run keeps the precision of "
        "its start.",
        one_of(("auto", *values.DTYPES)),
    )  # fmt: skip
    numerics: str = setting(
        "fast", '"invariant": log-probabilities of sampler and learner have the same bits, for any slots, pages, '
        "windows and packing; float32 on one CPU device, and slower (docs/concepts/weights.md).",
        one_of(("fast", "invariant")), rule="invariant_numerics_are_possible",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Problems, and how they become prompts."""

    prompts: str = setting(
        "", 'JSONL (also .gz) or Parquet file, folder that `datasets` reads, "hf:NAME:SPLIT", "hf:NAME:SUBSET:SPLIT", '
        '"tfds:NAME/SPLIT", "tfds:DIR", or "cipher:train" (docs/problems.md).', rule="model_and_prompts_are_named",
    )  # fmt: skip
    problem_column: str = setting(
        "", 'Column of the text or messages in prompts, "extra_info.question" for a field; empty: by its name '
        "(docs/problems.md).",
    )  # fmt: skip
    answer_column: str = setting(
        "", 'Column of the reference answer in prompts; "none": no answer, for a reward that reads none; empty: by its '
        "name.",
    )  # fmt: skip
    template: str = setting(
        "qwen_math", '"plain": the problem alone. "qwen_math", "chat": messages in the chat template of the model.',
        one_of(("plain", "qwen_math", "chat")),
    )  # fmt: skip
    system: str = setting(SYSTEM, 'System message of "chat"; empty: none.', rule="texts_belong_to_chat")
    instruction: str = setting(
        INSTRUCTION, 'Text after the problem and a space in "chat".', rule="texts_belong_to_chat"
    )
    max_prompt_tokens: int = setting(
        1024, "Longest prompt in tokens; a longer one is an error and is never cut.", values.TOKENS
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Grading of responses."""

    kind: str = setting("math", "Built-in grader.", one_of(values.REWARDS))
    path: str = setting(
        "", '"file.py:function" of your own, with a signature of ours, TRL, tunix, verl or OpenAI '
        "(docs/how_to/reward.md); several with commas between them, whose sum is the reward; file.py:function=0.5 has "
        "the weight 0.5. Replaces kind.", values.USER_FUNCTIONS, rule="own_code_has_workers",
    )  # fmt: skip
    completions: str = setting(
        "auto", 'What functions of prompts and completions get: "text", or "chat", messages. auto: messages where the '
        "problem has messages or data.template is chat.", one_of(("auto", "text", "chat")),
    )  # fmt: skip
    workers: int = setting(
        2, "Grading processes; 0 grades in this process, for graders that cannot hang or crash.", values.WORKERS,
        rule="own_code_has_workers",
    )  # fmt: skip
    time_limit_s: float = setting(6.0, "Seconds for one grading; the worker is killed after that.", values.SECONDS)
    max_failed: float = setting(
        0.5, "Share of the responses of an iteration whose grading may fail; above it the run stops.", values.SHARE
    )
    positive_threshold: float = setting(
        0.7, "A reward above it counts as correct, for stopping rules and pass rates.", values.FINITE,
        rule="correct_rewards_are_positive",
    )  # fmt: skip
    overlong_tokens: int = setting(
        0, "Tokens before the length limit in which a correct response has a penalty, relative to the other correct "
        "ones of its prompt; it grows linearly to 1 at the limit. 0: none.",
        values.TOKENS_OR_0, rule="penalty_fits_the_response",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """Limits of the reward code, which runs programs against tests (docs/how_to/code.md)."""

    max_tests: int = setting(32, "Tests of a problem that are run, from the first on; 0: all.", values.NOT_NEGATIVE)
    processor_s: int = setting(
        2, "Processor seconds of each process that a test starts; a test ends after twice as many seconds.",
        values.AT_LEAST_1, rule="a_test_fits_the_grading",
    )  # fmt: skip
    # Memory of all processes of a test. Programs of contests have 256 MiB, and Python starts with a tenth of this.
    memory_mib: ClassVar[int] = 1024

    @property
    def wall_s(self) -> float:
        """Seconds for one test: more than the processor seconds, because busy cores must not decide a verdict."""
        return 2.0 * self.processor_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """The reward judge: a model behind an OpenAI-compatible endpoint gives scores (docs/how_to/judge.md)."""

    url: str = setting(
        "", "Endpoint, such as http://localhost:8000/v1; its API key is in the environment variable OPENAI_API_KEY.",
        rule="a_judge_is_complete",
    )  # fmt: skip
    model: str = setting("", "Name of the model there.", rule="a_judge_is_complete")
    template: str = setting(
        "", "File with the jinja2 template of the request, or its text, with {{ problem }}, {{ response }}, "
        "{{ answer }} and other columns; empty: a general one.",
    )  # fmt: skip
    score: str = setting(
        r"(?im)^\W*score\W*?(?:\([^()\n]*\)[^\w\n]*?)?([-−]?\d*\.?\d+)",
        "Regular expression whose group is the score, in its last match; or "
        "json:FIELD.", rule="a_judge_is_complete",
    )  # fmt: skip
    range: tuple[float, ...] = setting(
        (0.0, 10.0), "Scores whose rewards are 0 and 1.", values.FINITE_NUMBERS, rule="a_judge_is_complete"
    )
    parameters: str = setting(
        '{"temperature": 0, "max_tokens": 512}', "Further fields of the request, as a JSON object.",
        rule="a_judge_is_complete",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Tasks of several turns: an environment that answers the model, and gives the reward."""

    path: str = setting(
        "", '"file.py:Class" of your own, or "verifiers:NAME", an environment of that package '
        "(docs/how_to/environments.md). It makes the first messages of each problem, and replaces the reward, whose "
        "workers, time_limit_s (for one answer) and max_failed are those of its processes. "
        "sampling.max_response_tokens bounds a whole trajectory.", values.ENVIRONMENT,
        rule="an_environment_gives_the_rewards",
    )  # fmt: skip
    max_turns: int = setting(8, "Most turns of the model; a trajectory that needs more has failed.", values.DRAWS)
    max_turn_tokens: int = setting(
        0, "Longest turn of the model in tokens; 0: what the trajectory leaves.", values.TOKENS_OR_0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectionConfig:
    """Stopping rules, groups, advantages and objectives."""

    strategy: str = setting(
        "balance", "What is drawn, when to stop, and what is kept (docs/strategies.md).", values.STRATEGY,
    )  # fmt: skip
    selection: str = setting(
        "shuffled", 'Prompts of an iteration: "shuffled" epochs; "proportional", with the probabilities of least noise '
        'for their cost, divided by them (docs/concepts/selection.md); or "file.py:Class".', values.SELECTION,
        rule="proportional_selection_is_corrected",
    )  # fmt: skip
    group_size: int = setting(
        4, "n: responses of one prompt in the update; also the size of a round for grpo, dapo and ngu.",
        values.GROUP,
    )  # fmt: skip
    samples_per_round: int = setting(
        8, "M: draws of one round; estimate: mean draws of a prompt.", values.DRAWS, rule="a_round_fills_a_group"
    )
    max_rounds: int = setting(4, "N: most rounds; a prompt gets at most M * N draws.", values.DRAWS)
    k_pos: int | None = setting(
        None, "Correct responses that end the rounds; default: 1 for positive, n // 2 for balance.",
        rule="goals_can_be_met",
    )  # fmt: skip
    k_neg: int | None = setting(
        None, "Wrong responses that end the rounds; default: 0 for positive, n - n // 2 for balance.",
        rule="goals_can_be_met",
    )  # fmt: skip
    max_draws: int | None = setting(
        None, "estimate, ngu: most draws of a prompt; default M * N; 0 for ngu: no limit.",
        values.DRAWS_OR_NONE, rule="budget_is_within_draws",
    )  # fmt: skip
    allocation: str = setting(
        "", 'estimate: draws proportional to sqrt(w) ("hybrid"), w ("sampling") or w sqrt(p (1 - p)) ("variance"); '
        'advantages pay the rest. Empty: "hybrid", with the objective identity "variance".',
        empty_or_one_of(values.ALLOCATIONS), rule="draws_follow_the_estimate",
    )  # fmt: skip
    unmet: str = setting(
        "keep", 'Prompts whose rule is not met, or whose responses are all alike: "keep" them, "drop" them, or '
        '"replace" them by new prompts.', one_of(("keep", "drop", "replace")), rule="unmet_has_a_rule",
    )  # fmt: skip
    max_extra_batches: int = setting(
        3, 'dapo, ngu, unmet "replace": most replacements of dropped prompts, in multiples of prompts_per_iteration.',
        values.NOT_NEGATIVE,
    )  # fmt: skip
    retry_probability: float = setting(
        0.95, "ngu: probability of one more round, as long as no round improved on the rounds before it.",
        values.PROBABILITY, rule="retries_end",
    )  # fmt: skip
    max_age: int = setting(
        4, "ngu: a response whose age in updates is above it is not trained on.", values.NOT_NEGATIVE,
        rule="drawn_ahead_is_young",
    )  # fmt: skip
    keep: str = setting(
        "", '"group": a balanced group of n; "pool": every response; empty: the choice of the strategy.',
        empty_or_one_of(("group", "pool")), rule="keep_fits_the_strategy",
    )  # fmt: skip
    baseline: str = setting(
        "", 'Subtracted from rewards: the mean of the "group" or the "pool", that of the others ("leave_one_out"), or '
        '"anchored" (docs/algorithms.md); empty: the choice of the strategy.',
        empty_or_one_of(("group", "pool", "leave_one_out", "anchored")),
    )  # fmt: skip
    normalize_by_std: bool = setting(False, "Divide advantages by the standard deviation of the pool.")
    objective: str = setting(
        "identity", 'f of J = E[f(p)]: p, log p ("log"; "maxrl": from one round, without a bound of the weight), '
        "p^alpha, or 1 - (1 - p)^k.", one_of(values.OBJECTIVES), rule="correction_fits",
    )  # fmt: skip
    objective_alpha: float = setting(0.5, "alpha of the objective power.", values.POSITIVE)
    objective_k: int = setting(8, "k of the objective pass_at_k.", values.DRAWS, rule="correction_fits")
    objective_epsilon: float = setting(
        1e-2, "Lower bound of the pass rate in w(p) = f'(p).", values.BELOW_1, rule="weights_are_finite"
    )
    correction: str = setting(
        "", 'Weights of the advantages: "none", as published; "stratified", the group stands for the pool; "exact", '
        "no bias. Empty: exact for positive, balance and ngu with an objective other than identity, else none.",
        empty_or_one_of(values.CORRECTIONS), rule="correction_fits",
    )  # fmt: skip
    control_variate: str = setting(
        "none", 'exact: b, subtracted from the weights of draws: "none", 0; a number, such as "0.03", in the first '
        'round; "noise", in the rounds up to the first correct response, from the pass rate estimated before drawing '
        "and the noise of correct and wrong responses.", values.CONTROL_VARIATE, rule="correction_fits",
    )  # fmt: skip
    prompts_per_iteration: int = setting(
        512, "Prompts of one iteration.", values.AT_LEAST_1, rule="iterations_are_whole_updates"
    )
    barrier: bool = setting(
        False, "Every round waits for all prompts, as in the reference program: the same samples, more time.",
        rule="barrier_holds_every_prompt",
    )  # fmt: skip
    deterministic: bool | None = setting(
        None, "Read verdicts at fixed points, so that equal runs have equal bits on devices whose rounding depends on "
        "the row; default: on CPUs.",
    )  # fmt: skip
    speculative: bool | None = setting(
        None, "Idle slots start a prompt's next rounds before its verdicts are there; draws that are not needed are "
        "discarded: the same samples, less time. Default: where samples_per_round is below group_size, unless "
        "slots are chosen for a CPU.",
    )  # fmt: skip
    overlap: str = setting(
        "none", 'Idle slots start prompts of later iterations, with this iteration\'s weights, where it is not '
        '"none". Responses that run at the end of the iteration: "finish", they are waited for; "in_flight", they go '
        "on in the next one, with its weights.", one_of(values.OVERLAPS), rule="overlap_knows_its_prompts",
    )  # fmt: skip
    max_staleness: int = setting(
        1, "Most iterations between the weights that begin a response and those that learn from it. With an overlap, "
        "it is the number of later iterations whose prompts idle slots start. With mesh.sampler, 1: iteration k + 1 is "
        "drawn while k is learned, from the weights before k; 0: after it, from the weights after k.", values.STALENESS,
        rule="staleness_fits",
    )  # fmt: skip

    @property
    def iterations_ahead(self) -> int:
        """Number of later iterations whose prompts idle slots may start."""
        return self.max_staleness if self.overlap != "none" else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EstimatorConfig:
    """Estimates of pass rates, for the strategy estimate."""

    kind: str = setting(
        "ema", '"ema": each prompt\'s own history; "value": a head on the last prompt token.', one_of(("ema", "value"))
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Training samples and the engine that draws them."""

    temperature: float = setting(1.0, "Sampling temperature of training.", values.TRAINING_TEMPERATURE)
    max_response_tokens: int = setting(2048, "Longest training response in tokens.", values.TOKENS)
    slots: int = setting(
        0, "Responses decoded at the same time in each of mesh.data * mesh.fsdp * mesh.context replicas (with "
        "mesh.sampler, in each of mesh.sampler / mesh.tensor); 0: 256, or on CPUs as many as the strategy keeps busy, "
        "at most 64.",
        values.MANY_OR_0,
    )  # fmt: skip
    window: int = setting(32, "Tokens decoded for all slots in one dispatch.", values.WINDOW)
    page_size: int = setting(64, "Tokens in one page of the key/value cache.", values.WINDOW)
    pages: int = setting(
        0, "Pages of one replica's cache; 0: as many as slots and open prompts need at their longest. Open are a "
        "quarter more prompts than slots, half more if samples_per_round is below 4, or all of them with a barrier; "
        "with collection.overlap=in_flight as many as slots in addition.",
        values.PAGES, rule="pages_hold_a_response",
    )  # fmt: skip
    attention: str = setting(
        "auto", "Decode attention; auto: the one made for the device.",
        one_of(("auto", "jnp", "pallas_tpu", "pallas_gpu")),
    )  # fmt: skip
    kv_dtype: str = setting(
        "model", 'Cached keys and values: "model", in model.compute_dtype, or "int8", with a scale for each token and '
        "head.", one_of(values.DECODE_DTYPES),
    )  # fmt: skip
    weight_dtype: str = setting(
        "model", 'Matrices to decode with: "model", in model.compute_dtype, or "int8", with a scale for each output.',
        one_of(values.DECODE_DTYPES),
    )  # fmt: skip
    drafts: int | None = setting(
        None, "Most tokens that a decode step guesses for one slot; it verifies as many as pay. The samples stay the "
        "same. 0: none; default: 3 on CPUs, with fewer than 8 slots of a model that does not fit into the caches, "
        "else 0.", values.DRAFTS_OR_NONE,
    )  # fmt: skip
    check_invariants: bool = setting(
        False, "Check all pages, rows and requests after every window; slow, for finding faults."
    )

    # Training samples come from the whole distribution, because scores, and so ratios, are computed without truncation.
    top_k: ClassVar[int] = 0
    top_p: ClassVar[float] = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningConfig:
    """Updates: batches, optimiser and loss."""

    prompts_per_update: int = setting(
        128, "Prompts of one update.", values.AT_LEAST_1, rule="iterations_are_whole_updates"
    )
    micro_batches: int = setting(
        0, "Parts in which a minibatch is computed; they change memory and time, not results. 0: on CPUs, parts of at "
        "most 2,048 tokens; elsewhere one.", values.NOT_NEGATIVE, rule="updates_are_whole_micro_batches",
    )  # fmt: skip
    responses_per_row: int = setting(
        16, "Most responses of a row of max_prompt_tokens + max_response_tokens. On CPUs short rows are joined, with "
        "each prompt once for its responses, where attention is in blocks (docs/architecture.md). 1: no packing.",
        values.MANY,
    )  # fmt: skip
    attention: str = setting(
        "auto", 'Learner attention; "blocks": in blocks of queries; "splash": JAX\'s TPU kernels; "cudnn": those of '
        'NVIDIA; auto: "blocks" on CPUs, "splash" on TPUs, "cudnn" on GPUs, or "blocks" where cuDNN can\'t.',
        one_of(("auto", "jnp", "blocks", "splash", "cudnn")),
    )  # fmt: skip
    remat: str = setting(
        "auto", 'Recomputed in the backward pass: "full", each layer; "dots", all but products with weights; auto: '
        '"dots" on CPUs, "full" elsewhere.', one_of(("auto", "full", "dots")),
    )  # fmt: skip
    learning_rate: float = setting(1e-6, "Learning rate after the warm-up.", values.RATE)
    schedule: str = setting(
        "auto", 'Learning rate after the warm-up: "constant", or falling to 0 over the planned updates, as a line '
        '("linear") or half a cosine ("cosine"); auto: "cosine" in sft, otherwise "constant". A run that goes on with '
        "more iterations falls more slowly.", one_of(("auto", "constant", "linear", "cosine")),
    )  # fmt: skip
    warmup_updates: int = setting(10, "Updates of the linear warm-up.", values.NOT_NEGATIVE)
    b1: float = setting(0.9, "AdamW: decay of the first moment.", values.BELOW_1)
    b2: float = setting(0.999, "AdamW: decay of the second moment.", values.BELOW_1)
    epsilon: float = setting(1e-8, "AdamW: epsilon.", values.POSITIVE)
    weight_decay: float = setting(0.0, "AdamW: weight decay.", values.NOT_NEGATIVE_FINITE)
    clip_norm: float = setting(1.0, "Largest global norm of the gradient.", values.POSITIVE)
    loss: str = setting(
        "ppo", 'The loss of a token: "ppo" clips the ratio, "cispo" clips it as a constant weight, "sapo" gates it '
        "smoothly; or a function of yours (docs/how_to/loss.md).", values.LOSS,
    )  # fmt: skip
    clip_low: float = setting(0.2, "The ratio is clipped at 1 - clip_low.", values.BELOW_1)
    clip_high: float = setting(0.28, "The ratio is clipped at 1 + clip_high.", values.POSITIVE)
    dual_clip: float = setting(10.0, 'Bound of the loss "ppo" for A < 0, as a multiple of |A|.', values.ABOVE_1)
    aggregation: str = setting("token-mean", "Mean over tokens or over responses.", one_of(values.AGGREGATIONS),
        rule="corrections_weigh_whole_responses",
    )  # fmt: skip
    ratio: str = setting(
        "token", '"sequence": one ratio for each response, the geometric mean over its tokens (GSPO); '
        '"sequence-token": the same value, with the slope of the ratio of each token (GSPO-token).',
        one_of(("token", "sequence", "sequence-token")),
    )  # fmt: skip
    entropy_coefficient: float = setting(
        0.0, "Weight of the entropy bonus; 0 in the reference script, 1e-4 in the paper's text.", values.FINITE
    )
    kl_coefficient: float = setting(
        0.0, "Weight of the KL term; above 0 the first weights are kept as a reference.", values.NOT_NEGATIVE_FINITE
    )
    kl_kind: str = setting(
        "k3", "Estimator of the KL term. k1 has no gradient in the mean: it penalises nothing, and is a metric only.",
        one_of(("k1", "k2", "k3")),
    )  # fmt: skip
    truncated_is_cap: float | None = setting(
        None, "Cap of the importance weight between sampler and learner; default: none, or 2.0 where responses may "
        "be drawn from earlier weights (collection.overlap, mesh.sampler with max_staleness 1) or in int8 "
        "(sampling.kv_dtype, sampling.weight_dtype).",
        values.POSITIVE_OR_NONE,
    )  # fmt: skip
    importance: str = setting(
        "token", 'With a cap: "token", each token has its own weight, at most the cap; "sequence", a response has the '
        'product of its weights, at most the cap; "mask", a weight below 0.5 or above the cap counts as 0 (IcePop).',
        one_of(("token", "sequence", "mask")), rule="importance_has_a_cap",
    )  # fmt: skip
    max_skipped: int = setting(
        0, "Most updates in a row that are skipped because a loss, gradient or log-probability is not finite; one more "
        "stops the run.", values.NOT_NEGATIVE,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Supervised training before reinforcement learning, by the command sft (docs/how_to/sft.md)."""

    epochs: int = setting(1, "Passes over the rows of data.prompts.", values.AT_LEAST_1)
    validation: str = setting(
        "", "Source of held-out rows, as data.prompts, whose loss is computed every evaluation.every updates; empty: "
        "none.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters in place of full fine-tuning."""

    rank: int = setting(0, "Rank of the adapters; 0: all weights are trained.", values.RANK)
    alpha: float = setting(32.0, "The product of an adapter is scaled by alpha / rank.", values.POSITIVE)
    targets: tuple[str, ...] = setting(
        (values.ALL_LINEAR,), "Projections with adapters, or all-linear.", values.TARGETS
    )

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections that `targets` names, in the order of `values.PROJECTIONS`."""
        names = values.PROJECTIONS
        return names if values.ALL_LINEAR in self.targets else tuple(name for name in names if name in self.targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis of the mesh."""

    data: int = setting(
        1,
        "Devices that each have a copy of the weights; over several TPU slices a multiple of their number.",
        values.MANY,
    )
    fsdp: int = setting(
        1, "Devices that share weights and optimiser state.", values.MANY, rule="updates_are_whole_micro_batches"
    )
    context: int = setting(
        1, "Devices that share the tokens of each row in the learner, for rows of 16k tokens and more; they share "
        "weights and optimiser state too.", values.MANY, rule="rows_are_cut",
    )  # fmt: skip
    tensor: int = setting(1, "Devices that share each product, and the experts of each layer.", values.MANY)
    sampler: int = setting(
        0, "Devices that only draw, beside data * fsdp * context * tensor devices that update; over several processes "
        "all those of the last ones. 0: all devices do both, in turn.", values.MANY_OR_0, rule="devices_are_split",
    )  # fmt: skip

    @property
    def learner(self) -> int:
        """Number of devices of the learner."""
        return math.prod(self.axes.values())

    @property
    def axes(self) -> dict[str, int]:
        """Devices of the learner along each axis."""
        return {"data": self.data, "fsdp": self.fsdp, "context": self.context, "tensor": self.tensor}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints to keep."""

    every: int = setting(50, "Iterations between checkpoints; 0: only at the end.", values.NOT_NEGATIVE)
    minutes: float = setting(
        10.0, "Also save the first iteration that ends this many minutes after the last save; 0: none.",
        values.NOT_NEGATIVE,
    )  # fmt: skip
    keep: int = setting(2, "Newest checkpoints to keep.", values.AT_LEAST_1)
    keep_best: int = setting(
        0, "Checkpoints to keep with the best evaluation (mean of avg@k over benchmarks).", values.NOT_NEGATIVE
    )
    keep_every: int = setting(0, "Also keep a checkpoint every this many iterations; 0: none.", values.NOT_NEGATIVE)
    notice_s: float = setting(
        25.0, "Seconds from SIGTERM or a notice to the end of a machine; no longer save is begun; 0: no limit.",
        values.NOT_NEGATIVE,
    )  # fmt: skip
    accept_changed_reward: bool = setting(
        False, "Resume although your code (reward.path, environment.path, or files of strategy, selection and loss), "
        "the columns that a reward gets, or the tests of programs are not those of the run so far.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluations during and after training."""

    every: int = setting(50, "Iterations between evaluations; 0: none.", values.NOT_NEGATIVE)
    benchmarks: tuple[str, ...] = setting((), 'Sources of problems as in data.prompts, or "cipher:heldout".')
    graders: tuple[str, ...] = setting(
        values.DEFAULT_GRADERS, "BENCHMARK=KIND for benchmarks with a grader of their own.", values.GRADERS,
    )  # fmt: skip
    samples: int = setting(32, "Responses to each problem.", values.MANY)
    temperature: float = setting(1.0, "Sampling temperature; 0: the most probable token.", values.TEMPERATURE)
    top_k: int = setting(0, "Most probable tokens to choose from; 0: all.", values.NOT_NEGATIVE)
    top_p: float = setting(1.0, "Probability mass to choose from.", values.SHARE)
    max_response_tokens: int = setting(4096, "Longest response in tokens.", values.TOKENS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Destinations of metrics, samples and compiled programs."""

    trackers: str = setting(
        "tensorboard", "Where metrics go in addition to metrics.jsonl: tensorboard, wandb:PROJECT (`pip install "
        "wandb`), trackio:PROJECT (`pip install trackio`); several with commas between them.", values.TRACKERS,
    )  # fmt: skip
    sampled_prompts: int = setting(
        4, "Prompts of each iteration whose responses are written to samples/.", values.NOT_NEGATIVE
    )
    profile: int = setting(
        0, "Iteration whose `jax.profiler` trace is written to WORKDIR/profile; 0: none. The first one compiles: take "
        "a later one.", values.NOT_NEGATIVE,
    )  # fmt: skip
    compilation_cache: str = setting(
        "auto", "Folder that keeps compiled programs for later starts, which may be in a bucket (gs://); auto: "
        "$XDG_CACHE_HOME/reinforce_ada_jax/programs (~/.cache/...); empty: none. JAX_COMPILATION_CACHE_DIR, where it "
        "is set, is used instead.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole configuration, immutable. `validate` makes it of the ConfigDict that flags and config files edit."""

    seed: int = setting(0, "Seed of all random numbers.", values.SEED)
    iterations: int = setting(
        400, "Iterations of the run; 400 in the reference script, 600 in the paper's text.", values.NOT_NEGATIVE
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    code: CodeConfig = CodeConfig()
    judge: JudgeConfig = JudgeConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    collection: CollectionConfig = CollectionConfig()
    estimator: EstimatorConfig = EstimatorConfig()
    sampling: SamplingConfig = SamplingConfig()
    learning: LearningConfig = LearningConfig()
    sft: SftConfig = SftConfig()
    lora: LoraConfig = LoraConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def num_updates(self) -> int:
        """Updates of the run, if none is skipped."""
        return self.iterations * self.collection.prompts_per_iteration // self.learning.prompts_per_update

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest prompt and response; rows of the learner may have more."""
        return self.data.max_prompt_tokens + self.sampling.max_response_tokens

    @property
    def draws_in_int8(self) -> bool:
        """True if the sampler rounds more than the learner: responses then come from a slightly different policy."""
        return "int8" in (self.sampling.kv_dtype, self.sampling.weight_dtype)

    @property
    def regularized(self) -> bool:
        """True if the loss has an entropy or a KL term."""
        return bool(self.learning.entropy_coefficient or self.learning.kl_coefficient)

    @property
    def draws_ahead(self) -> bool:
        """True if an iteration is drawn while the one before it is learned."""
        return self.mesh.sampler > 0 and self.collection.max_staleness > 0
