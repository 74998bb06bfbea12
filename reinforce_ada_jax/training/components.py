"""The parts of a run, put together from its configuration, for training and for evaluation.

Stages don't know each other. Here the engine gets the stop tokens of the tokenizer, and the verifier gets its text.
"""

import dataclasses
import difflib
import functools
import itertools
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection import slot_choice
from reinforce_ada_jax.collection.collect import VerifyFn
from reinforce_ada_jax.collection.estimators import Ema
from reinforce_ada_jax.collection.strategies import Strategy
from reinforce_ada_jax.collection.trajectories import Trajectories
from reinforce_ada_jax.config import CollectionConfig, Config, EvaluationConfig, collection_rules
from reinforce_ada_jax.data import prompts as prompts_lib
from reinforce_ada_jax.data import tokenizer_trial
from reinforce_ada_jax.data.problems import Problem, description, place
from reinforce_ada_jax.data.rows import NO_ANSWER, Columns
from reinforce_ada_jax.data.templates import chat_from_config
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.environments.workers import EnvironmentPool
from reinforce_ada_jax.files import buckets, partial_copy
from reinforce_ada_jax.learning import platform as platform_lib
from reinforce_ada_jax.learning.value_head import ValueHead
from reinforce_ada_jax.policy import hub_models, huggingface, lora
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting.progress import watched
from reinforce_ada_jax.rewards import (
    cipher,
    code_tests,
    gsm8k,
    judge_template,
    math_answer,
    minerva,
    reference,
    reference_minerva,
)
from reinforce_ada_jax.rewards.loading import GradeFn, Made
from reinforce_ada_jax.rewards.shaping import Shaping
from reinforce_ada_jax.rewards.workers import Pair, VerifierPool
from reinforce_ada_jax.sampling.draft_choice import with_drafts
from reinforce_ada_jax.sampling.engine import Engine, choose_apart, choose_tail, enough_open_prompts, enough_pages
from reinforce_ada_jax.sampling.paged_attention import choose_backend
from reinforce_ada_jax.sampling.rings import choose_ring_window
from reinforce_ada_jax.sampling.state import EngineOptions
from reinforce_ada_jax.training import host_memory
from reinforce_ada_jax.training.environments import Drawing, Environments
from reinforce_ada_jax.training.reward_check import output_file, reward_columns
from reinforce_ada_jax.types import Prompt, Response, Verdict

# Slots of a replica where a step of many rows takes as long as one of few: on accelerators, and for small models.
MOST_SLOTS = 256
# `for_responses` rounds slots and prompt lengths up to multiples of these: each pair is a program to compile.
SLOTS_STEP, LENGTHS_STEP = 8, 64
# Prompt tokens that are prefilled before a decode step. A chunk takes its tokens from several prompts.
PREFILL_TOKENS = 256
ASSETS = pathlib.Path(__file__).parents[1] / "assets"
PACKAGE_PREFIX = "package:"


def local_folder(path: str) -> pathlib.Path:
    """Returns the folder that `path` names, existing or not; "package:cipher" is part of the package.

    Raises ValueError for another model of the package: there is none.
    """
    if path.startswith(PACKAGE_PREFIX):
        if path != f"{PACKAGE_PREFIX}cipher":
            raise ValueError(f"there is no model {path!r}: the only model of the package is {PACKAGE_PREFIX}cipher.")
        return ASSETS / path.removeprefix(PACKAGE_PREFIX)
    return pathlib.Path(path)


def model_folder(path: str) -> pathlib.Path:
    """Returns the local folder of a model; every process calls it. ValueError if there is none.

    From a bucket, or from the hub to several processes, it has the headers of the weights alone. The processes read the
    same version.
    """
    if buckets.is_bucket(path):
        folder = partial_copy.fetch(path)
        processes.check_same(f"the versions of {path}", folder.parent.name)
        return folder
    folder = local_folder(path)
    if folder.exists() or not hub_models.is_name(path):
        return folder
    if processes.count() == 1:
        return hub_models.fetch(path)
    return hub_models.fetch_parts(path, processes.of_writer(hub_models.commit(path) if processes.is_writer() else ""))


def load_problems(source: str, config: Config) -> list[Problem]:
    """Returns the problems of a source. Benchmarks may lack the columns that `data` names.

    Raises ValueError where the source can't be read, its responses are programs and a problem has no tests, or its
    grader compares responses with answers and there are none.
    """
    data, trained_on = config.data, source == config.data.prompts
    kind = "" if config.reward.path or config.environment.path else config.reward.kind
    kind = kind if trained_on else benchmark_graders(config).get(prompts_lib.benchmark_name(source), kind)
    answer = data.answer_column or (NO_ANSWER if kind == "code" or config.environment.path else "")
    if answer == NO_ANSWER and kind not in ("", "code", "judge"):  # all rewards would be 0
        if trained_on:
            raise ValueError(
                f"data.answer_column is {NO_ANSWER!r}, but reward.kind={kind} compares responses with answers. Name "
                "the column of the answers, or choose a reward that reads none."
            )
        answer = ""
    problems = prompts_lib.load_problems(source, Columns(data.problem_column, answer, required=trained_on))
    for problem in problems if kind == "code" else ():
        try:
            code_tests.read_tests(problem.get("columns", {}))
        except ValueError as error:
            raise ValueError(f"{place(problem)}: {error}. docs/how_to/code.md has the forms.") from error
    return problems


@dataclasses.dataclass(frozen=True, eq=False)
class Components:
    """Parts that a configuration and a model folder determine, without the weights; `mesh` is the learner's.

    `environments` is None where a response is one turn. `slots_reason` says why this number of slots was chosen.
    """

    folder: pathlib.Path
    architecture: Architecture
    tokenizer: Tokenizer
    mesh: Mesh
    engine: Engine
    reward_columns: Callable[[Prompt], dict[str, Any]]
    environments: Environments | None
    slots_reason: str

    @property
    def only_draws(self) -> bool:
        """True in a process that has no device of the learner."""
        return not self.mesh.local_devices

    def draws_speculatively(self, collection: CollectionConfig) -> bool:
        """Returns True if idle slots start rounds before the verdicts that ask for them.

        Where slots are chosen for a CPU, few are idle, and each token drawn in vain costs time.
        """
        chosen = bool(self.slots_reason) and self.engine.options.slots < MOST_SLOTS
        return collection_rules.draws_speculatively(collection) and not (chosen and collection.speculative is None)

    def prompts(self, source: str, config: Config, report: Callable[[str], None] | None = None) -> list[Prompt]:
        """Returns the tokenised prompts of a source; `report` gets a line on the columns that were read."""
        problems = load_problems(source, config)
        if report is not None:
            report(description(source, problems))
        data, chat = config.data, chat_from_config(config)
        if self.environments is not None:
            problems = self.environments.with_messages(problems)
            chat = dataclasses.replace(chat, tools=self.environments.tools)
        return prompts_lib.tokenize(problems, self.tokenizer, data.template, data.max_prompt_tokens, chat)

    def trajectories(self, config: Config, stream: int, max_tokens: int) -> Trajectories | None:
        """Returns the queue of turns of one drawing; None where a response is one turn."""
        if self.environments is None:
            return None
        return Trajectories(
            Drawing(self.environments, stream), max_turns=config.environment.max_turns, max_tokens=max_tokens,
            max_begun=self.engine.options.slots * self.engine.replicas, deterministic=deterministic(config),
        )  # fmt: skip

    def graders(self, verifiers: VerifierPool) -> VerifierPool | EnvironmentPool:
        """Returns the pool that gives the rewards."""
        return verifiers if self.environments is None else self.environments.pool

    def verify_fn(self, verifiers: VerifierPool, shaping: Shaping, grader: str = "") -> VerifyFn:
        """Returns the function that decodes responses to text and grades them, without waiting if there are workers.

        `grader` names one of the pool's other graders; by default training's grades.
        """

        def graded(prompt: Prompt, response: Response) -> Pair:
            return self.tokenizer.decode(response.tokens), prompt.answer, self.reward_columns(prompt)

        def verify(pairs: list[tuple[Prompt, Response]]) -> list[Verdict] | Future[list[Verdict]]:
            texts = itertools.starmap(graded, pairs)
            shape = functools.partial(shaping.all, lengths=[response.num_sampled for _, response in pairs])
            if verifiers.workers:
                return verifiers.submit(texts, grader, then=shape)
            return shape(verifiers.grade_all(texts, grader))

        return verify


def choose_slots(
    config: Config, architecture: Architecture, platform: str, strategy: Strategy | None = None
) -> tuple[int, str]:
    """Returns the number of slots of a replica, and the reason for it; "" if `sampling.slots` sets it.

    On CPUs the time of a step grows with its rows, idle ones included. So a training, which has a strategy, gets as
    many slots as its rounds keep busy. For models as small as the built-in ones the number makes no difference.
    """
    if config.sampling.slots:
        return config.sampling.slots, ""
    if platform != "cpu" or architecture.num_parameters < platform_lib.LARGE:
        return MOST_SLOTS, f"the default for {'small models' if platform == 'cpu' else platform.upper() + 's'}"
    if strategy is None:
        return slot_choice.CHOICES[0], "on a CPU more rows are no cheaper each"
    prompts = config.collection.prompts_per_iteration
    slots, share = slot_choice.choose_slots(strategy, prompts)
    return slots, f"{prompts} prompts are expected to keep {share:.0%} of these busy, without draws ahead of verdicts"


def engine_options(
    config: Config, architecture: Architecture, stop_ids: tuple[int, ...], slots: int | None = None
) -> EngineOptions:
    """Returns the options of the engine that a configuration describes; settings that are 0 are computed.

    `slots` are those of `choose_slots`; None: `sampling.slots`.
    """
    sampling = config.sampling
    slots = slots or sampling.slots or MOST_SLOTS
    # With only as many open prompts as slots, the queue is empty while the next rounds are prepared
    # (docs/performance.md). With a barrier, no prompt closes before the last prompt's round has begun.
    open_prompts = enough_open_prompts(slots, config.collection.samples_per_round)
    barrier_prompts = config.collection.prompts_per_iteration if config.collection.barrier else 0
    attention = choose_backend(sampling.attention, config.model.numerics)
    in_flight = config.collection.overlap == "in_flight"
    if in_flight:  # each response that goes on has a prompt of its own
        open_prompts += slots
    # Merged adapters, W + scaling * A B, lose changes below 1/512 of a weight in bfloat16, and below half a scale in
    # int8: the sampler had 0.37 of the policy's change (tests/sampling/test_engine.py). In float32 nothing is lost, and
    # they are merged: a step is faster, and invariant numerics need the same sums in sampler and learner.
    merges = config.model.compute_dtype == "float32" and sampling.weight_dtype == "model"
    options = EngineOptions(
        slots=slots,
        begun_tokens=config_lib.begun_tokens(config),
        finishes=config_lib.begun_tokens(config) > 0 and not in_flight,
        window=sampling.window,
        page_size=sampling.page_size,
        pages=sampling.pages,
        open_prompts=max(open_prompts, barrier_prompts),
        prefill_tokens=PREFILL_TOKENS,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config_lib.longest_response(config),
        stop_ids=stop_ids,
        seed=config.seed,
        dtype=config.model.compute_dtype,
        apart=choose_apart(attention, config.model.compute_dtype),
        attention=attention,
        kv_dtype=sampling.kv_dtype,
        weight_dtype=sampling.weight_dtype,
        adapters=None if merges else lora.make(config.lora),
        # A resumed run has no texts of earlier iterations, and results round differently by the position of a row.
        keep_drafts=not deterministic(config),
        tail=choose_tail(architecture),
        check_invariants=sampling.check_invariants,
        records_experts=architecture.num_experts > 0,
    )
    pages = options.pages or max(enough_pages(options), config_lib.least_pages(config))
    if pages >= 2**31:
        raise ValueError(
            f"{slots:,} slots, prompts of up to {options.max_prompt_tokens:,} tokens and responses of up to "
            f"{options.max_response_tokens:,} need {pages:,} pages of {options.page_size}, and devices count them in "
            "32 bits. Lower one of them."
        )
    options = dataclasses.replace(options, pages=pages)
    if not config.environment.path:
        return dataclasses.replace(options, ring_window=choose_ring_window(architecture, options))
    # A trajectory in flight needs two more rows: one for its messages so far, and one that keeps its turn for the next
    # turn. Its pages are those of a response: at most as many trajectories as slots are in flight.
    return dataclasses.replace(
        options,
        open_prompts=options.open_prompts + 2 * options.slots,
        max_prompt_tokens=config_lib.longest_prompt(config),
        max_response_tokens=config_lib.longest_turn(config),
    )


def for_devices(config: Config, workdir: pathlib.Path | None = None, model: str | None = None) -> Config:
    """Returns the configuration with `model.compute_dtype` chosen: that of the run in `workdir`, or by the devices.

    On a CPU `auto` depends on the size of the model at `model`, or at `model.path`: products of a large one are
    measured. Several processes measure nothing, since they must agree.

    Raises ValueError where JAX finds no device, the work directory is damaged, or there is no model.
    """
    config = config if workdir is None else config_lib.with_saved_dtype(config, workdir)
    platform, size = mesh_lib.available_devices()[0].platform, 0
    path = model or config.model.path
    if path and platform == "cpu" and config.model.compute_dtype == "auto" and jax.process_count() == 1:
        architecture = huggingface.read_config(model_folder(path))
        size = 0 if architecture.num_experts else architecture.num_parameters
    return platform_lib.chosen_dtype(config, platform, size)


def _make_engine(
    config: Config, architecture: Architecture, stop_ids: tuple[int, ...], slots: int, *, trains: bool
) -> tuple[Mesh, Engine]:
    """Returns the learner's mesh and the engine."""
    options = engine_options(config, architecture, stop_ids, slots)
    # Commands that do not train read weights in the type of decoding, and hold no second copy of them. They need no
    # record of experts. Their prompts share the pages of a common system message, and rings cannot be shared. A
    # response that they break off is drawn again.
    if not trains:
        options = dataclasses.replace(options, apart=False, records_experts=False, ring_window=0, begun_tokens=0)
    options = with_drafts(options, architecture, config.sampling.drafts, jax.default_backend())
    mesh, sampler_mesh = mesh_lib.split_meshes(config.mesh)
    return mesh, Engine(architecture, options, mesh=sampler_mesh, learner_mesh=mesh)


def for_responses(config: Config, components: Components, prompts: Sequence[Prompt], samples: int) -> Components:
    """Returns the components of a command that draws `samples` responses to each prompt, with no more room than that.

    On CPUs an idle row costs what a busy one does, and the cache has pages for the longest prompt in each slot:
    SmolLM2-135M with texts of 512 + 512 tokens took 5.8 GB with 64 slots. Raises ValueError where weights and cache do
    not fit the machine.
    """
    engine, responses = components.engine, samples * len(prompts)
    is_set = not components.slots_reason or engine.options.slots >= MOST_SLOTS
    if not is_set and processes.count() == 1:
        slots = -(-responses // (engine.replicas * SLOTS_STEP)) * SLOTS_STEP
        reason = f"{responses:,} responses fill no more" if slots < engine.options.slots else components.slots_reason
        slots, longest = min(slots, engine.options.slots), max(len(prompt.tokens) for prompt in prompts)
        if not config.environment.path:  # where prompts grow
            longest = min(-(-longest // LENGTHS_STEP) * LENGTHS_STEP, config.data.max_prompt_tokens)
            config = config_lib.replaced(config, {"data.max_prompt_tokens": longest})
        _, engine = _make_engine(config, components.architecture, components.tokenizer.stop_ids, slots, trains=False)
        components = dataclasses.replace(components, engine=engine, slots_reason=reason)
    host_memory.check(engine, components.architecture.num_parameters * jnp.dtype(config.model.compute_dtype).itemsize)
    return components


def build(config: Config, folder: pathlib.Path, strategy: Strategy | None = None) -> Components:
    """Reads the folder's JSON files and builds mesh and engine; no weight is read and nothing is compiled.

    `strategy` is that of a training. Raises ValueError where the folder, the configuration or the machine is wrong.
    """
    mesh_lib.available_devices()
    architecture = huggingface.read_config(folder).for_texts(
        config.data.max_prompt_tokens + config_lib.longest_response(config)
    )
    attention, platform = config.sampling.attention, jax.default_backend()
    if attention.startswith("pallas") and not attention.endswith(platform):
        raise ValueError(f"sampling.attention is {attention!r}, and the devices are {platform}: set it to 'auto'.")
    tokenizer_trial.check(folder, chat_from_config(config))
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > architecture.vocab_size:
        raise ValueError(
            f"the tokenizer of {folder} has {tokenizer.vocab_size} tokens, the model's embedding only "
            f"{architecture.vocab_size} rows: they don't belong together."
        )
    if adapters := lora.make(config.lora):
        lora.adapter_shapes(architecture, adapters)  # before any weight is read
    slots, reason = choose_slots(config, architecture, platform, strategy)
    mesh, engine = _make_engine(config, architecture, tokenizer.stop_ids, slots, trains=strategy is not None)
    if strategy is None and engine.hand_over is not None:
        raise ValueError(
            f"mesh.sampler is {config.mesh.sampler}, so that some processes only draw, and this command does not "
            "train: set mesh.sampler to 0, and mesh.data to more."
        )
    environments = Environments(config, tokenizer) if config.environment.path else None
    columns = functools.partial(reward_columns, config)
    return Components(folder, architecture, tokenizer, mesh, engine, columns, environments, reason)


def deterministic(config: Config) -> bool:
    """Returns True if the order of events must not depend on time: as configured, by default on CPUs."""
    chosen = config.collection.deterministic
    return jax.default_backend() == "cpu" if chosen is None else chosen


def rounds_alike(config: Config) -> bool:
    """Returns True if a response keeps its bits in another slot, or if the run does not promise equal bits."""
    if config.model.numerics == "invariant":
        return config.collection.overlap == "none"  # idle slots decide which responses are prefetched
    return not deterministic(config)


def shaping(config: Config) -> Shaping:
    """Returns the shaping of graded rewards for training; evaluations use only its threshold."""
    reward = config.reward
    return Shaping(reward.positive_threshold, reward.overlong_tokens, config.sampling.max_response_tokens)


def benchmark_graders(config: Config) -> dict[str, str]:
    """Returns {benchmark: kind of reward} of the benchmarks that have a grader of their own."""
    kinds = dict(entry.rsplit("=", 1) for entry in config.evaluation.graders)
    names = [prompts_lib.benchmark_name(source) for source in config.evaluation.benchmarks]
    return {name: kinds[name] for name in names if name in kinds}


def check_graders(config: Config, sources: Sequence[str]) -> None:
    """Raises ValueError if an entry of `evaluation.graders`, other than a default, names none of the benchmarks."""
    names = [prompts_lib.benchmark_name(source) for source in sources]
    for entry in config.evaluation.graders:
        named = entry.rpartition("=")[0] or entry
        if entry not in EvaluationConfig().graders and named not in names:
            nearest = difflib.get_close_matches(named, names, 1)
            raise ValueError(
                f"evaluation.graders has {entry!r}, but no benchmark is called {named!r}"
                + (f": did you mean {nearest[0]!r}?" if nearest else f"; there are {', '.join(names) or 'none'}.")
            )


def _judge_settings(config: Config, folder: pathlib.Path | None) -> dict[str, Any]:
    cache = None
    if folder is not None:
        index = processes.index()
        cache = str(folder.absolute() / (f"judge.{index}.sqlite3" if index else "judge.sqlite3"))
    settings = dataclasses.asdict(config.judge) | {"template": judge_template.checked(config.judge.template)}
    return {"settings": settings, "cache": cache, "time_limit_s": config.reward.time_limit_s}


def verifier_pool(config: Config, folder: pathlib.Path | None = None, grade_fn: GradeFn | None = None) -> VerifierPool:
    """Returns the verifier processes of a run, a context manager.

    They grade by `reward.path` or `reward.kind`; a call may name the kind of a benchmark instead. The output of
    `reward.path` functions goes to a file in `folder` (None: to stderr). With `grade_fn`, which a worker could not
    import, this process grades, without a time limit. Raises ValueError if `reward.path` names no function of a Python
    file, or there is `grade_fn` too.
    """
    reward, code = config.reward, config.code
    if config.environment.path:  # it gives the rewards
        return no_verifiers(config)
    limits = {"processor_s": code.processor_s, "wall_s": code.wall_s, "memory_bytes": code.memory_mib * 2**20}
    # No published problem needs more: programs read stdin and write stdout, and few start a thread.
    limits |= {"files_bytes": 16 * 2**20, "processes": 16}
    of_code = {"time_limit_s": reward.time_limit_s, "max_tests": code.max_tests, "limits": limits}
    kinds: dict[str, GradeFn | Made] = {
        "cipher": cipher.grade,
        "math": math_answer.grade,
        "minerva": minerva.grade,
        "gsm8k": gsm8k.grade,
        "reference": reference.grade,
        "reference_evaluation": reference.grade_evaluation,
        "reference_minerva": reference_minerva.grade,
        "code": Made("reinforce_ada_jax.rewards.code:grader", of_code),
        "judge": Made("reinforce_ada_jax.rewards.judge:Judge", _judge_settings(config, folder)),
    }
    others = {kind: kinds[kind] for kind in benchmark_graders(config).values()}
    if grade_fn is not None:
        if reward.path:
            raise ValueError(
                f"reward.path is {reward.path!r}, and a reward function is given as well: use one of them."
            )
        return VerifierPool(grade_fn, 0, reward.time_limit_s, others)
    output = output_file(folder) if folder is not None and reward.path else None
    graded_by = reward.path or kinds[reward.kind]
    return VerifierPool(graded_by, reward.workers, reward.time_limit_s, others, output=output)


def no_verifiers(config: Config) -> VerifierPool:
    """Returns a pool without processes, for runs in which no verifier grades."""
    return VerifierPool(math_answer.grade, 0, config.reward.time_limit_s)


def load_params(config: Config, components: Components, dtype: str | None = None, *, quiet: bool = False) -> Params:
    """Returns the weights of the model folder, with the learner's shardings.

    The default `dtype` is float32; where adapters are trained it is `model.compute_dtype`. Process 0 counts the layers
    at the terminal, unless `quiet`.
    """
    dtype = dtype or (config.model.compute_dtype if config.lora.rank else "float32")
    watch = functools.partial(watched, quiet=quiet or not processes.is_writer())
    return huggingface.load(components.folder, components.mesh, jnp.dtype(dtype), watch)[1]


def make_estimator(config: Config, components: Components) -> Ema | ValueHead:
    """Returns the estimator of pass rates that the `estimator` section describes."""
    if config.estimator.kind == "ema":
        return Ema()
    return ValueHead(
        components.architecture,
        components.mesh,
        dtype=platform_lib.activation_dtype(config.model.compute_dtype, jax.default_backend()),
        max_prompt_tokens=config.data.max_prompt_tokens,
    )
