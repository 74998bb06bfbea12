"""`bench.iteration`: iterations of training by phase, with rounds free, in step, and overlapping; beside TRL's.

The iterations are those of training, with clocks around their phases. Random weights end no response and solve no
problem, so with them response lengths and verdicts are scripted. Everything else is done as in training, also grading.
"""

import contextlib
import dataclasses
import functools
import pathlib
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from absl import flags

from bench import command_line, inputs, models, workloads
from bench.json_subprocess import JsonSubprocess
from bench.measuring import in_turns, machine
from bench.options import DEFAULT_VARIANTS, VARIANTS, check_baseline
from bench.workloads import Lengths
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection import selection as selection_lib
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import VerifyFn
from reinforce_ada_jax.collection.selection import PromptCursor, next_prompts
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed.signals import Interrupt
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.policy import huggingface, transformer
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.rewards.shaping import Shaping
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import resume, startup
from reinforce_ada_jax.training.compile_counter import CompileCounter
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.iteration import train_iteration
from reinforce_ada_jax.training.loop import save
from reinforce_ada_jax.training.run import Inputs, Run
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.types import Prompt, Request, RequestQueue, Response, Verdict

BASELINES = {"trl": pathlib.Path(__file__).parent / "baselines" / "trl_iteration.py"}
PHASES = ("collect", "score", "update", "checkpoint")


# ---- scripted responses ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Script:
    """Response lengths up to `limit` tokens, and verdicts: functions of an address, so equal in every variant."""

    lengths: Lengths
    limit: int
    seed: int

    def _random(self, *address: object) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32("/".join(map(str, address)).encode())])

    def length(self, request: Request) -> int:
        """Returns the tokens of a response."""
        drawn = self.lengths(self._random("length", request.prompt.id, request.draw), (1,))[0]
        return int(np.clip(np.round(drawn), 1, self.limit))

    def verdict(self, prompt: Prompt, draw: int) -> Verdict:
        """Returns a verdict that is correct at the prompt's pass rate."""
        pass_rate = self._random("chance", prompt.id).beta(*workloads.PASS_RATES)
        correct = bool(self._random("verdict", prompt.id, draw).random() < pass_rate)
        return Verdict(correct, float(correct))


class ScriptedRollouts(Rollouts):
    """Rollouts whose responses have the script's lengths."""

    def __init__(self, engine: Engine, script: Script):
        super().__init__(engine)
        self.script = script

    def sampler(
        self, params: Params | None, *, sampling: SamplingParams | Callable[[Request], SamplingParams], **others: Any
    ) -> Callable[[RequestQueue], Iterator[list[Response]]]:
        """Returns the sampler of `Rollouts`, with the script's lengths as limits."""

        def scripted(request: Request) -> SamplingParams:
            configured = sampling if isinstance(sampling, SamplingParams) else sampling(request)
            return dataclasses.replace(configured, max_tokens=self.script.length(request))

        return super().sampler(params, sampling=scripted, **others)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ScriptedComponents(Components):
    """Components whose verifiers grade all responses; the verdicts that count are the script's."""

    script: Script

    def verify_fn(self, verifiers: VerifierPool, shaping: Shaping, grader: str = "") -> VerifyFn:
        """Returns the function of `Components`, but with the script's verdicts, at the time of the graded ones."""
        grade = super().verify_fn(verifiers, shaping, grader)

        def verify(pairs: list[tuple[Prompt, Response]]) -> list[Verdict] | Future[list[Verdict]]:
            scripted = [self.script.verdict(prompt, response.draw) for prompt, response in pairs]
            graded = grade(pairs)
            if not isinstance(graded, Future):
                return scripted
            replaced: Future[list[Verdict]] = Future()

            def finish(graded: Future[list[Verdict]]) -> None:
                if replaced.set_running_or_notify_cancel():
                    error = graded.exception()
                    replaced.set_result(scripted) if error is None else replaced.set_exception(error)

            graded.add_done_callback(finish)
            return replaced

        return verify


def make_folder(folder: pathlib.Path, tokenizer: pathlib.Path, architecture: Architecture, seed: int) -> None:
    """Writes a model of random weights with the tokenizer of another folder.

    Raises:
      ValueError: `tokenizer` is not a folder.
    """
    if not tokenizer.is_dir():
        raise ValueError(f"{tokenizer} is not a folder: --config.model.path must name one, for its tokenizer.")
    params = transformer.init(architecture, jax.random.key(seed))
    huggingface.save(folder, architecture, params)
    for file in tokenizer.iterdir():
        if file.is_file() and file.name != "config.json" and ".safetensors" not in file.name:
            shutil.copyfile(file, folder / file.name)


# ---- one run with clocks ---------------------------------------------------------------------------------------------


class Clock:
    """Seconds of one iteration by phase; "programs" are those of the learner on the device."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    def call(self, phase: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Calls a function and adds its seconds to a phase."""
        begin = time.perf_counter()
        result = function(*arguments, **keywords)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
        return result


class ClockedRun:
    """A run whose phases are timed, and the programs of its learner."""

    def __init__(self, run: Run, state: RunState, script: Script | None):
        self.clock, self.run, self.state, self.script = Clock(), run, state, script
        for name in ("score", "update"):
            setattr(run.learner, name, functools.partial(self._on_device, getattr(run.learner, name)))

    def _on_device(self, program: Callable[..., Any], *arguments: Any) -> Any:
        return self.clock.call("programs", lambda: jax.block_until_ready(program(*arguments)))

    def next_iteration(self) -> Mapping[str, float]:
        """Runs one iteration without a checkpoint; returns its metrics."""
        state, stopped = train_iteration(self.run, self.state)
        if stopped is not None:
            raise stopped
        assert state.pending is not None
        self.state = dataclasses.replace(state, pending=None)
        return state.pending

    def timed_iteration(self, turn: int) -> dict[str, float]:
        """Runs one iteration with a checkpoint; returns its seconds by phase, and counts of its collection.

        In a run a checkpoint is written during the next iteration. Here the run waits for it, outside of the clock.
        """
        del turn
        self.clock.seconds = seconds = {}
        begin, cpu_begin = time.perf_counter(), time.process_time()
        metrics = self.next_iteration()
        self.clock.call("checkpoint", save, self.run, self.state)
        total, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
        self.run.checkpoints.wait()
        written = time.perf_counter() - begin - total
        seconds |= {phase: metrics[f"time/{phase}_s"] for phase in ("collect", "score", "update")}
        # The device is busy in a collection unless it waits for the host.
        busy = seconds["collect"] - metrics["time/host_between_windows_s"] + seconds.get("programs", 0.0)
        phases = {f"{phase}_s": seconds.get(phase, 0.0) for phase in PHASES}
        return {
            "seconds": total,
            "cpu_seconds": cpu,
            **phases,
            "other_s": total - sum(phases.values()),
            "verify_s": metrics["time/verify_s"],
            "checkpoint_written_s": written,
            "host_between_windows_s": metrics["time/host_between_windows_s"],
            "outside_device_share": 1 - busy / total,
            "tokens": metrics["collection/tokens"],
            "responses": metrics["collection/responses"],
            "tokens_per_s": metrics["collection/tokens"] / total,
            "slot_utilisation": metrics["collection/slot_utilisation"],
            "updates": metrics["update/count"],
        }


def begin(
    config: Config,
    workdir: pathlib.Path,
    lengths: Lengths,
    architecture: Architecture | None,
    stack: contextlib.ExitStack,
) -> ClockedRun:
    """Begins a run in a new work directory; with `architecture`, it has random weights of that shape.

    Nothing is evaluated.
    """
    workdir.mkdir()
    config = components_lib.for_devices(config_lib.replaced(config, inputs.QUIET | {"evaluation.every": 0}))
    verifiers = stack.enter_context(components_lib.verifier_pool(config))
    folder = components_lib.model_folder(config.model.path)
    if architecture is not None:
        make_folder(workdir / "model", folder, architecture, config.seed)
        folder = workdir / "model"
    config_lib.check(config)
    components = components_lib.build(config, folder)
    prompts = components.prompts(config.data.prompts, config)
    has_weights, script = any(folder.glob("*.safetensors")), None
    if architecture is not None or not has_weights:
        script = Script(lengths, config.sampling.max_response_tokens, config.seed)
        engine = components.engine
        options = dataclasses.replace(engine.options, stop_ids=())  # random weights would draw stop tokens at times
        engine = Engine(engine.architecture, options, mesh=engine.mesh, learner_mesh=components.mesh)
        fields: dict[str, Any] = {each.name: getattr(components, each.name) for each in dataclasses.fields(components)}
        fields["engine"] = engine
        components = ScriptedComponents(**fields, script=script)
    if has_weights:
        params = components_lib.load_params(config, components)
    else:
        params = transformer.init(components.architecture, jax.random.key(config.seed), components.mesh)
    strategy = strategies.build(config.collection, regularized=config.regularized)
    selection = selection_lib.build(config.collection, prompts, config.seed, extra_batches=strategy.extra_batches)
    interrupt, progress = stack.enter_context(Interrupt()), Progress(total=1, done=0, quiet=True)
    given = Inputs(
        config=config,
        given=config,
        components=components,
        prompts=prompts,
        selection=selection,
        strategy=strategy,
        verifiers=verifiers,
        learner=Learner(components.architecture, config, components.mesh),
        iterate=train_iteration,
    )
    base, reference = startup.frozen_weights(given, params)
    estimator = components_lib.make_estimator(config, components) if strategy.estimates else None
    run = Run(
        **vars(given),
        workdir=workdir,
        rollouts=Rollouts(components.engine) if script is None else ScriptedRollouts(components.engine, script),
        estimator=estimator,
        base=base,
        reference=reference,
        stop=interrupt.stop(progress.phase),
        interrupt=interrupt,
        progress=progress,
        checkpoints=startup.open_checkpoints(given, workdir, stack),
        identity=resume.identity(given),
        compiles=CompileCounter(),
    )
    stack.enter_context(run.ahead)
    state = startup.first_state(given, params, estimator)
    return ClockedRun(run, state, script)


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Another program to measure: its name, the interpreter of its environment, and its micro-batches."""

    name: str
    python: str
    micro_batches: int


def start_baseline(
    baseline: Baseline, run: Run, script: Script | None, iterations: int
) -> tuple[JsonSubprocess, dict[str, Any]]:
    """Starts a baseline with the weights, prompts and rewards of a run; returns it and its description.

    Raises:
      ValueError: its iterations would do other work than ours, or it does not start.
    """
    name, collection, limit = baseline.name, run.config.collection, run.config.sampling.max_response_tokens
    if script is None or (script.lengths(np.random.default_rng(0), (1_000,)).round() != limit).any():
        raise ValueError(
            f"--against={name} needs random weights whose responses all have sampling.max_response_tokens: --shape or "
            f"--model, and --lengths={limit},0.0001,{limit},{limit}."
        )
    if collection.strategy != "grpo" or collection.prompts_per_iteration != run.config.learning.prompts_per_update:
        raise ValueError(
            f"--against={name} does GRPO with one update an iteration. Set collection.strategy=grpo, and learning."
            "prompts_per_update to collection.prompts_per_iteration."
        )
    chosen, cursor = [], PromptCursor(run.config.seed)
    for _ in range(iterations):
        prompts, cursor = next_prompts(run.prompts, cursor, collection.prompts_per_iteration)
        chosen += prompts
    draws = range(collection.group_size)
    rewards = [[script.verdict(prompt, draw).reward for draw in draws] for prompt in chosen]
    process = JsonSubprocess(name, [baseline.python, str(BASELINES[name])])
    return process, process.load_baseline(
        model=str(run.components.folder), rewards=rewards, response_tokens=limit,
        prompts=[run.components.tokenizer.decode(prompt.tokens) for prompt in chosen],
        prompts_per_iteration=collection.prompts_per_iteration, micro_batches=baseline.micro_batches,
    )  # fmt: skip


def measure(
    config: Config,
    *,
    variants: Sequence[str] = DEFAULT_VARIANTS,
    repeat: int = 3,
    lengths: Lengths,
    architecture: Architecture | None = None,
    against: Baseline | None = None,
) -> dict[str, Any]:
    """Measures iterations of each variant in turns; the first of each compiles and is not timed.

    With `architecture` the weights are random, of that shape, and the tokenizer is that of the configured model.
    `lengths` are the response lengths of random weights.

    Returns:
      By variant, medians over iterations, explained in docs/performance.md; "barrier_ratio", "overlap_ratio" and
      "invariant_ratio", tokens a second of "rounds" divided by those of the variant; with a baseline "time_ratio" and
      "cpu_time_ratio", seconds of the first variant divided by those of the baseline.

    Raises:
      ValueError: an unknown variant, or a configuration that can't be run.
    """
    unknown = sorted(set(variants) - set(VARIANTS))
    if unknown or not variants:
        raise ValueError(f"--variants has {unknown}; it must name some of {', '.join(VARIANTS)}.")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        runs = {
            name: begin(
                config_lib.replaced(config, VARIANTS[name]), pathlib.Path(folder) / name, lengths, architecture, stack
            )
            for name in variants
        }
        iterate = {name: run.timed_iteration for name, run in runs.items()}
        first, described = runs[variants[0]], {}
        if against is not None:
            process, described = start_baseline(against, first.run, first.script, 1 + repeat)
            stack.callback(process.close)
            iterate[against.name] = process.run
        timed = in_turns(iterate, repeat, lambda taken: f"{taken['seconds']:.2f} s")
    result: dict[str, Any] = {
        name: {key: statistics.median(one[key] for one in taken[1:]) for key in taken[0]}
        | {"iterations": repeat, "first_iteration_s": taken[0]["seconds"], "all_seconds": [x["seconds"] for x in taken]}
        for name, taken in timed.items()
    }
    for name in variants:
        if "rounds" in result and name != "rounds":
            result[f"{name}_ratio"] = result["rounds"]["tokens_per_s"] / result[name]["tokens_per_s"]
    if against is not None:
        ours, theirs = result[variants[0]], result[against.name]
        theirs |= described | {"micro_batches": against.micro_batches}
        if ours["tokens"] != theirs["tokens"]:
            raise ValueError(f"{ours['tokens']:,} tokens, and {theirs['tokens']:,} of {against.name}: other work.")
        result |= {f"{key}time_ratio": ours[f"{key}seconds"] / theirs[f"{key}seconds"] for key in ("", "cpu_")}
    scripted, model = first.script is not None, models.describe(first.run.components.architecture)
    return result | machine() | {"scripted": scripted, "model": model}


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Measures the configuration of the flags."""
    check_baseline(options, BASELINES)
    against = options.against and Baseline(options.against, options.against_python, options.micro_batches)
    return measure(
        inputs.config_of(options),
        variants=options.variants,
        repeat=options.repeat or 3,
        lengths=workloads.parse_lengths(options.lengths or workloads.ADAPTIVE_LENGTHS),
        architecture=inputs.architecture_of(options) if options.shape or options.model else None,
        against=against,
    )


if __name__ == "__main__":
    command_line.start("iteration", run)
