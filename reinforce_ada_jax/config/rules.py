"""Rules between settings. Each is a function that raises ValueError with the values and the remedy.

The settings name them (`rule=`), and the first line of each docstring is on the reference page. Rules of the
`collection` section alone are in collection_rules.py.
"""

import json
import math
import re
import urllib.parse
from collections.abc import Callable

from ml_collections import ConfigDict

from reinforce_ada_jax.config.collection_rules import check_collection, correction
from reinforce_ada_jax.config.defaults import resolve
from reinforce_ada_jax.config.paths import check_input, check_source
from reinforce_ada_jax.config.settings import INSTRUCTION, SYSTEM, Config
from reinforce_ada_jax.config.values import check_values

# Longer responses continue when a run resumes. At 20 ms a token, drawing 4,096 tokens again takes 82 s.
LONG_RESPONSE = 4096


def longest_response(config: Config) -> int:
    """Returns the most tokens of any response, in training or evaluation."""
    if config.evaluation.benchmarks:
        return max(config.sampling.max_response_tokens, config.evaluation.max_response_tokens)
    return config.sampling.max_response_tokens


def longest_prompt(config: Config) -> int:
    """Returns the most tokens before a response or, in an environment, before a turn, which earlier turns precede."""
    return config.data.max_prompt_tokens + (longest_response(config) if config.environment.path else 0)


def longest_turn(config: Config) -> int:
    """Returns the most tokens that are drawn at a time: of a response, or of one turn of a trajectory."""
    of_turn = config.environment.max_turn_tokens if config.environment.path else 0
    return min(longest_response(config), of_turn or longest_response(config))


def begun_tokens(config: Config) -> int:
    """Returns the most tokens of a response that continues where it was cut or broken off; 0 if none does.

    With `collection.overlap` = in_flight all responses may continue. Otherwise a response continues only if it was
    running when the run was told to end, and if responses may be longer than LONG_RESPONSE. Shorter ones are drawn
    again, because each prompt row of an engine would need room for their tokens. Long ones are drawn again, too, if
    `sampling.pages` has no room for such a prompt, or in an environment: unfinished trajectories can't continue.
    """
    sampling, most = config.sampling, config.sampling.max_response_tokens - 1
    if config.collection.overlap == "in_flight":
        return most
    if most < LONG_RESPONSE or config.environment.path:
        return 0
    return most if sampling.pages == 0 or sampling.pages >= _pages_beside(config, most) else 0


def least_pages(config: Config) -> int:
    """Returns the smallest number of pages in which one response always finds room.

    The longest prompt holds pages, too. The prompt of a response that continues has all its tokens except one.
    """
    return _pages_beside(config, begun_tokens(config))


def _pages_beside(config: Config, begun: int) -> int:
    """Returns the pages of the longest prompt with `begun` tokens of a response at its end, and of one response.

    For the response, the pages of a prompt with a whole turn are counted, as in `PageBudget`. One page is reserved:
    idle slots and padding write there.
    """
    prompt, page_size = longest_prompt(config), config.sampling.page_size
    return math.ceil((prompt + begun) / page_size) + math.ceil((prompt + longest_turn(config)) / page_size) + 1


def model_and_prompts_are_named(config: Config) -> None:
    """A run names its model and its prompts; a path is of this machine, or of a bucket (gs://)."""
    if not config.model.path:
        raise ValueError("model.path is empty: name a Hugging Face folder, --config.model.path=DIR.")
    if not config.data.prompts:
        raise ValueError("data.prompts is empty: name a source of problems, --config.data.prompts=FILE.jsonl.")


def texts_belong_to_chat(config: Config) -> None:
    """system and instruction differ from their defaults with the template chat only, or are empty with plain."""
    data = config.data
    texts = data.system, data.instruction
    if data.template == "chat" or texts == (SYSTEM, INSTRUCTION) or (data.template == "plain" and not any(texts)):
        return
    raise ValueError(
        f"data.system and data.instruction are used by data.template='chat' only, and it is {data.template!r}: set "
        "data.template=chat, or leave the two out of the configuration."
    )


def invariant_numerics_are_possible(config: Config) -> None:
    """Invariant numerics need float32, no int8, the attention auto, and one device for each of sampler and learner."""
    if config.model.numerics == "fast":
        return
    sampling, mesh = config.sampling, config.mesh
    dtype = config.model.compute_dtype
    dtype = "float32" if dtype == "auto" else dtype  # "auto" becomes float32
    one_device = "it is made for one device"
    needed = (
        ("model.compute_dtype", dtype, "float32", "it is made for float32"),
        ("sampling.kv_dtype", sampling.kv_dtype, "model", "the learner has no keys and values in int8"),
        ("sampling.weight_dtype", sampling.weight_dtype, "model", "the learner has no weights in int8"),
        ("sampling.attention", sampling.attention, "auto", "sampler and learner share one attention"),
        *((f"mesh.{axis}", size, 1, one_device) for axis, size in mesh.axes.items()),
        ("mesh.sampler", mesh.sampler, min(mesh.sampler, 1), one_device),
    )
    for key, value, wanted, reason in needed:
        if value != wanted:
            raise ValueError(
                f"model.numerics is 'invariant', and {key} is {value!r}: {reason}. Set {key} to {wanted!r}, or "
                "model.numerics to 'fast'."
            )


def kinds(config: Config) -> set[str]:
    """Returns the kinds of reward that grade responses or benchmarks; a reward of the user's has none."""
    named = {entry.rpartition("=")[2] for entry in config.evaluation.graders}
    return named | (set() if config.reward.path or config.environment.path else {config.reward.kind})


def own_code_has_workers(config: Config) -> None:
    """A reward or an environment of your own, and the kinds code and judge, run in worker processes only."""
    reward, limited = config.reward, sorted(kinds(config) & {"code", "judge"})
    named = {"reward.path": reward.path, "environment.path": config.environment.path}
    if limited:
        named["reward.kind or evaluation.graders"] = limited[0]
    what = next((f"{key} is {value!r}" for key, value in named.items() if value), "")
    if reward.workers or not what:
        return
    raise ValueError(
        f"reward.workers is 0, and {what}: it is run in grading processes only, which can be limited and replaced. Use "
        "at least 1."
    )


def a_test_fits_the_grading(config: Config) -> None:
    """With the kind code, twice code.processor_s is at least a second below reward.time_limit_s."""
    limit = config.reward.time_limit_s
    if "code" in kinds(config) and config.code.wall_s + 1.0 > limit:
        raise ValueError(
            f"code.processor_s is {config.code.processor_s}, so that a test may take {config.code.wall_s:g} s, and "
            f"reward.time_limit_s is {limit:g}: the grading would be killed before a slow program is. Raise "
            "reward.time_limit_s, or lower code.processor_s."
        )


def a_judge_is_complete(config: Config) -> None:
    """The kind judge needs a url and a model, a parser with one group, a range, and parameters as JSON."""
    judge = config.judge
    if "judge" not in kinds(config):
        return
    address = urllib.parse.urlsplit(judge.url)
    if address.scheme not in ("http", "https") or not address.hostname or address.username or address.query:
        raise ValueError(
            "judge.url must be http(s)://HOST[:PORT]/v1, without a user and a query: it is written to the work "
            "directory. The API key belongs in the environment variable OPENAI_API_KEY."
        )
    if not judge.model:
        raise ValueError("judge.model is empty: name the model of the endpoint, --config.judge.model=NAME.")
    if not judge.score.startswith("json:") and _groups(judge.score) != 1:
        raise ValueError(
            f"judge.score is {judge.score!r}; it must be a regular expression with one group, or json:FIELD."
        )
    if len(judge.range) != 2 or not judge.range[0] < judge.range[1]:
        raise ValueError(f"judge.range is {judge.range}; it must be two numbers, the lower one first.")
    try:
        parameters = json.loads(judge.parameters)
    except (ValueError, RecursionError):
        parameters = None
    if not isinstance(parameters, dict) or {"model", "messages", "stream", "n"} & set(parameters):
        raise ValueError(
            f"judge.parameters is {judge.parameters!r:.200}; it must be a JSON object without model, messages, stream "
            "and n."
        )


def _groups(pattern: str) -> int:
    """Returns the number of groups of a regular expression, -1 if it is none."""
    try:
        return re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError):
        return -1


def an_environment_gives_the_rewards(config: Config) -> None:
    """With an environment there is no other reward, no prefetch of the next iteration, and a chat template."""
    environment, reward = config.environment, config.reward
    if not environment.path:
        return
    named = f"environment.path is {environment.path!r}"
    if reward.path or reward.kind in ("code", "judge"):
        other = f"reward.path is {reward.path!r}" if reward.path else f"reward.kind is {reward.kind!r}"
        raise ValueError(f"{named} and {other}: the environment gives the reward. Leave one of them out.")
    if config.data.template == "plain":
        raise ValueError(
            f"{named}, and data.template is 'plain': an environment speaks in messages, which need the chat template "
            "of the model. Set data.template to 'chat'."
        )
    if config.collection.overlap != "none":
        raise ValueError(
            f"{named}, and collection.overlap is {config.collection.overlap!r}: trajectories of the next iteration "
            "would be kept without their environments. Set it to 'none'."
        )


def penalty_fits_the_response(config: Config) -> None:
    """The length penalty starts within the response."""
    overlong, longest = config.reward.overlong_tokens, config.sampling.max_response_tokens
    if overlong > longest:
        raise ValueError(
            f"reward.overlong_tokens is {overlong}, sampling.max_response_tokens only {longest}: the penalty would "
            "begin before the first token. Lower it."
        )


def _check_multiple(name: str, value: int, of_name: str, of: int) -> None:
    if value % of:
        lower, upper = value - value % of, value + of - value % of
        use = f"{lower} or {upper}" if lower else upper
        raise ValueError(f"{name} is {value}, and must be a multiple of {of_name}, which is {of}. Use {use}.")


def iterations_are_whole_updates(config: Config) -> None:
    """prompts_per_iteration is a multiple of prompts_per_update."""
    _check_multiple(
        "collection.prompts_per_iteration", config.collection.prompts_per_iteration,
        "learning.prompts_per_update", config.learning.prompts_per_update,
    )  # fmt: skip


def updates_are_whole_micro_batches(config: Config) -> None:
    """prompts_per_update * group_size is a multiple of micro_batches * mesh.data * mesh.fsdp."""
    learning = config.learning
    _check_multiple(
        "learning.prompts_per_update * collection.group_size",
        learning.prompts_per_update * config.collection.group_size,
        "learning.micro_batches * mesh.data * mesh.fsdp",
        max(1, learning.micro_batches) * config.mesh.data * config.mesh.fsdp,
    )


def rows_are_cut(config: Config) -> None:
    """mesh.context divides max_prompt_tokens + max_response_tokens, and the attention is auto, blocks or splash."""
    context, attention = config.mesh.context, config.learning.attention
    _check_multiple("data.max_prompt_tokens + sampling.max_response_tokens", config.row_tokens, "mesh.context", context)
    if context > 1 and attention in ("jnp", "cudnn"):
        raise ValueError(
            f"mesh.context is {context}, and learning.attention is {attention!r}, which takes queries of whole rows "
            "alone. Set learning.attention to 'auto', or mesh.context to 1."
        )


def corrections_weigh_whole_responses(config: Config) -> None:
    """aggregation is not seq-mean-token-mean with a correction or with the objective maxrl."""
    collection = config.collection
    kind = correction(collection)
    if kind != "none" or collection.objective == "maxrl":
        _check_aggregation(config, f"the correction {kind} and the objective {collection.objective}")


def _check_aggregation(config: Config, weighs: str) -> None:
    aggregation = config.learning.aggregation
    if aggregation == "seq-mean-token-mean":
        raise ValueError(
            f"learning.aggregation is {aggregation!r} with {weighs}: it divides the weight of a response by its "
            "length, so the update no longer climbs the objective. Use token-mean or seq-mean-token-sum."
        )


def correct_rewards_are_positive(config: Config) -> None:
    """positive_threshold is not negative with the correction exact."""
    threshold = config.reward.positive_threshold
    if threshold < 0 and correction(config.collection) == "exact":
        raise ValueError(
            f"reward.positive_threshold is {threshold:g} with the correction exact, which multiplies the weight of a "
            "correct response by its reward: a correct response with a negative reward would become less probable. "
            "Add a constant to the rewards and set the threshold to at least 0, or set collection.correction to "
            "stratified, which compares rewards with their mean."
        )


def importance_has_a_cap(config: Config) -> None:
    """Importance "sequence" and "mask" have a cap, which with "mask" is at least 1."""
    learning = config.learning
    cap = learning.truncated_is_cap
    if learning.importance == "mask" and cap is not None and cap < 1:
        raise ValueError(
            f"learning.truncated_is_cap is {cap} with the importance mask, under which a larger weight counts as 0: "
            "tokens of the current weights have the weight 1, and nothing would be learned from them. Set it to at "
            "least 1 (IcePop has 5.0)."
        )
    if learning.importance != "token" and learning.truncated_is_cap is None:
        raise ValueError(
            f"learning.importance is {learning.importance!r}, but learning.truncated_is_cap is None: set the largest "
            "weight that counts (2.0 is usual; IcePop has 5.0)."
        )


def proportional_selection_is_corrected(config: Config) -> None:
    """selection proportional: a correction (exact or stratified), or objective maxrl."""
    collection = config.collection
    if collection.selection == "proportional" and correction(collection) == "none" and collection.objective != "maxrl":
        raise ValueError(
            "collection.selection is 'proportional' without a correction: the update is a mean over rows, and their "
            "number depends on the prompts that are drawn. Set collection.correction to exact or stratified, or "
            "selection to shuffled."
        )


def overlap_knows_its_prompts(config: Config) -> None:
    """Overlap needs a strategy that does not plan draws (estimate), shuffled prompts, and no barrier."""
    collection = config.collection
    if collection.overlap == "none":
        return
    if collection.strategy == "estimate":
        raise ValueError(
            f"collection.overlap is {collection.overlap!r}, which begins prompts before it is known how many draws "
            "estimate will allot to them, as follows from the last iteration's verdicts: set it to 'none'."
        )
    if collection.selection != "shuffled":
        raise ValueError(
            f"collection.selection is {collection.selection!r}, which chooses prompts after the last iteration's "
            f"verdicts, and collection.overlap is {collection.overlap!r}, which begins them before: set it to 'none', "
            "or selection to shuffled."
        )
    if collection.barrier:
        raise ValueError(
            f"collection.barrier keeps all prompts in step, collection.overlap={collection.overlap} lets the next "
            "iteration's begin early: choose one of them."
        )


def drawn_ahead_is_young(config: Config) -> None:
    """ngu: max_age is at least the updates of an iteration, where responses are drawn an iteration ahead."""
    if config.collection.strategy == "ngu":
        _check_age(config, "collection.max_age", config.collection.max_age)


def _check_age(config: Config, name: str, max_age: int) -> None:
    collection = config.collection
    iterations = 1 if config.draws_ahead else collection.iterations_ahead
    updates = iterations * (collection.prompts_per_iteration // config.learning.prompts_per_update)
    if max_age < updates:
        cause = "mesh.sampler with collection.max_staleness 1" if config.draws_ahead else "collection.overlap"
        raise ValueError(
            f"{name} is {max_age}, but with {cause} responses are drawn up to {iterations} iterations ahead, and may "
            f"be {updates} updates old when they are trained on (collection.prompts_per_iteration / "
            f"learning.prompts_per_update). They would be left out. Set max_age to at least {updates}."
        )


def check_strategy(config: Config, *, max_age: int | None, estimates: bool, weighs: bool = False) -> None:
    """Raises ValueError if a user's strategy does not fit devices and loss; the rules check the built-in ones.

    `max_age` and `estimates` are those of the `Strategy`; `weighs` is True if it has `coefficients`.
    """
    if weighs:
        _check_aggregation(config, f"the coefficients of {config.collection.strategy}")
    if max_age is not None:
        _check_age(config, f"max_age of {config.collection.strategy}", max_age)
    if estimates:
        _check_estimates(config)


def staleness_fits(config: Config) -> None:
    """An overlap has max_staleness above 0; with mesh.sampler, and without an overlap, it is at most 1."""
    collection, sampler = config.collection, config.mesh.sampler
    if collection.overlap != "none" and not collection.max_staleness:
        raise ValueError(
            f"collection.overlap is {collection.overlap!r} and collection.max_staleness 0: prompts of no later "
            "iteration could start. Set max_staleness to 1, or overlap to 'none'."
        )
    if sampler and collection.max_staleness > 1:
        raise ValueError(
            f"mesh.sampler is {sampler} and collection.max_staleness {collection.max_staleness}: the sampler's "
            "devices draw one iteration ahead. Set max_staleness to 1 or 0."
        )
    if collection.overlap == "none" and collection.max_staleness > 1:
        raise ValueError(
            f"collection.max_staleness is {collection.max_staleness} and collection.overlap 'none': no prompt would "
            "start before its iteration. Set overlap to 'finish' or 'in_flight', or max_staleness to 1."
        )


def devices_are_split(config: Config) -> None:
    """mesh.tensor divides mesh.sampler.

    Neither an overlap nor estimates of the estimator value go with a sampler of its own.
    """
    mesh = config.mesh
    if not mesh.sampler:
        return
    _check_multiple("mesh.sampler", mesh.sampler, "mesh.tensor", mesh.tensor)
    if config.collection.overlap != "none":
        raise ValueError(
            f"mesh.sampler is {mesh.sampler} and collection.overlap {config.collection.overlap!r}: the sampler's "
            "devices draw a whole iteration ahead, and have nothing else to begin. Set collection.overlap to 'none'."
        )
    if config.collection.strategy == "estimate" or config.collection.control_variate == "noise":
        _check_estimates(config)


def _check_estimates(config: Config) -> None:
    if config.mesh.sampler and config.estimator.kind == "value":
        raise ValueError(
            "estimator.kind is 'value', whose estimates need the current weights on the sampler's devices "
            f"(mesh.sampler is {config.mesh.sampler}): use 'ema', or set mesh.sampler to 0."
        )


def barrier_holds_every_prompt(config: Config) -> None:
    """With a barrier the pages hold all prompts of an iteration at a time."""
    collection, sampling = config.collection, config.sampling
    prompts, longest = collection.prompts_per_iteration, config.data.max_prompt_tokens
    if not collection.barrier:
        return
    at_once = (prompts - 1) * math.ceil(longest / sampling.page_size) + least_pages(config)
    if 0 < sampling.pages < at_once:
        raise ValueError(
            f"sampling.pages is {sampling.pages}: with collection.barrier all {prompts} prompts of up to {longest} "
            f"tokens keep their pages until the last round, and with a response's they are {at_once} of "
            f"{sampling.page_size} tokens. Use at least that many, or 0 to have them counted for you."
        )


def pages_hold_a_response(config: Config) -> None:
    """The pages hold the longest prompt and its response."""
    sampling, least = config.sampling, least_pages(config)
    if 0 < sampling.pages < least:
        raise ValueError(
            f"sampling.pages is {sampling.pages}: a prompt of {config.data.max_prompt_tokens} tokens with a response "
            f"of {longest_response(config)} needs {least} pages of {sampling.page_size} tokens (one "
            "of them reserved). Use at least that many, or 0 to have them counted for you."
        )


FIRST: tuple[Callable[[Config], None], ...] = (model_and_prompts_are_named,)  # before the values of single settings
RULES: tuple[Callable[[Config], None], ...] = (
    texts_belong_to_chat, invariant_numerics_are_possible,
    an_environment_gives_the_rewards, own_code_has_workers, a_test_fits_the_grading,
    a_judge_is_complete,
    penalty_fits_the_response,
    iterations_are_whole_updates, updates_are_whole_micro_batches, rows_are_cut,
    corrections_weigh_whole_responses, proportional_selection_is_corrected, correct_rewards_are_positive,
    importance_has_a_cap,
    overlap_knows_its_prompts, drawn_ahead_is_young, staleness_fits, devices_are_split,
    barrier_holds_every_prompt, pages_hold_a_response,
)  # fmt: skip


def check(config: Config, *, trains: bool = True) -> Config:
    """Returns `config`, or raises ValueError for the first rule broken. Touches no device and no file.

    An evaluation, with `trains` False, needs no prompts to train on, and may name its model by a flag.
    """
    for rule in FIRST if trains else ():
        rule(config)
    check_input("model.path", config.model.path)
    check_source("data.prompts", config.data.prompts)
    check_input("logging.compilation_cache", config.logging.compilation_cache)
    for source in config.evaluation.benchmarks:
        check_source("evaluation.benchmarks", source)
    check_values(config)
    check_collection(config.collection)
    for rule in RULES:
        rule(config)
    return config


def validate(config: ConfigDict) -> Config:
    """Returns the checked, immutable configuration; ValueError for the first broken rule. Uses no device or file."""
    return check(resolve(config))
