"""What `benchmark iteration` measures: iterations of `train`, by phase, with rounds free, in step, and overlapping.

The iterations are those of training, with clocks around their phases. Where the weights are made up, so are response
lengths and verdicts: a random model ends no response and solves nothing. Everything else is done, grading too.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.benchmarks import models, workloads
from reinforce_ada_jax.benchmarks import options as options_lib
from reinforce_ada_jax.benchmarks.workloads import Lengths
from reinforce_ada_jax.collection.collect import VerifyFn
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed.signals import Interrupt
from reinforce_ada_jax.policy import huggingface, transformer
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.rewards.shaping import Shaping
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.iteration import Trainer, make_trainer, train_iteration
from reinforce_ada_jax.training.loop import begin_or_resume
from reinforce_ada_jax.training.state import to_record
from reinforce_ada_jax.training.updates import Updates
from reinforce_ada_jax.types import Prompt, Request, Response, Verdict

# What is set in each; of prompts, seeds and everything else they are alike.
VARIANTS = {
    "rounds": {"collection.barrier": False, "collection.overlap_iterations": 0},
    "barrier": {"collection.barrier": True, "collection.overlap_iterations": 0},
    "overlap": {"collection.barrier": False, "collection.overlap_iterations": 1},
}
PHASES = ("collect", "score", "update", "checkpoint")
PASS_RATES = (0.6, 1.2)


# ---- a model that isn't there ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Script:
    """Response lengths and verdicts, each a function of its address: no variant changes them.

    Attributes:
      lengths: of responses, cut at the configuration's limit.
      limit: that one.
      seed: of all.
    """

    lengths: Lengths
    limit: int
    seed: int

    def _random(self, *address: object) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32("/".join(map(str, address)).encode())])

    def length(self, request: Request) -> int:
        """Tokens at which a response ends at the latest."""
        drawn = self.lengths(self._random("length", request.prompt.id, request.draw), (1,))[0]
        return int(np.clip(np.round(drawn), 1, self.limit))

    def verdict(self, prompt: Prompt, response: Response) -> Verdict:
        """Right with the chance of its prompt, which is Beta distributed."""
        chance = self._random("chance", prompt.id).beta(*PASS_RATES)
        correct = bool(self._random("verdict", prompt.id, response.draw).random() < chance)
        return Verdict(correct, float(correct))


class ScriptedRollouts(Rollouts):
    """Rollouts that end responses as the script says."""

    def __init__(self, engine: Any, script: Script):
        super().__init__(engine)
        self.script = script

    def sampler(self, params: Any, *, sampling: SamplingParams, **terms: Any) -> Any:
        """As that of `Rollouts`."""

        def of_request(request: Request) -> SamplingParams:
            return dataclasses.replace(sampling, max_tokens=self.script.length(request))

        return super().sampler(params, sampling=of_request, **terms)


@dataclasses.dataclass(frozen=True, eq=False)
class ScriptedComponents(Components):
    """Components whose verifiers grade, and are not listened to."""

    script: Script | None = None

    def verify_fn(self, verifiers: VerifierPool, shaping: Shaping, grader: str = "") -> VerifyFn:
        """As that of `Components`, with the script's verdicts once the graded ones are there."""
        grade = super().verify_fn(verifiers, shaping, grader)

        def verify(pairs: list[tuple[Prompt, Response]]) -> list[Verdict] | Future[list[Verdict]]:
            scripted = [self.script.verdict(prompt, response) for prompt, response in pairs]
            graded = grade(pairs)
            if not isinstance(graded, Future):
                return scripted
            heard: Future[list[Verdict]] = Future()

            def finish(graded: Future[list[Verdict]]) -> None:
                if heard.set_running_or_notify_cancel():
                    error = graded.exception()
                    heard.set_result(scripted) if error is None else heard.set_exception(error)

            graded.add_done_callback(finish)
            return heard

        return verify


def make_folder(folder: pathlib.Path, tokenizer: pathlib.Path, architecture: Architecture, seed: int) -> None:
    """A model of random weights with another's tokenizer.

    Raises:
      ValueError: `tokenizer` is no folder with one.
    """
    if not tokenizer.is_dir():
        raise ValueError(f"{tokenizer} is no folder: --config.model.path must name one, for its tokenizer.")
    params = transformer.init(architecture, jax.random.key(seed))
    huggingface.save(folder, architecture, params)
    for file in tokenizer.iterdir():
        if file.is_file() and file.name != "config.json" and ".safetensors" not in file.name:
            shutil.copyfile(file, folder / file.name)


# ---- one run with clocks ---------------------------------------------------------------------------------------------


class Clock:
    """Seconds by phase, of one iteration."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin


@dataclasses.dataclass(frozen=True, eq=False)
class ClockedUpdates(Updates):
    """Updates whose phases are timed."""

    clock: Clock

    def minibatches(self, *arguments: Any) -> Any:
        """As that of `Updates`."""
        with self.clock("score"):
            return super().minibatches(*arguments)

    def check_logprobs(self, *arguments: Any) -> Any:
        """As that of `Updates`."""
        with self.clock("score"):
            return super().check_logprobs(*arguments)

    def update(self, *arguments: Any) -> Any:
        """As that of `Updates`."""
        with self.clock("update"):
            return super().update(*arguments)


class ClockedRun:
    """A run whose phases are timed, and the programs of its learner."""

    def __init__(self, trainer: Trainer, params: Params, script: Script | None, stack: contextlib.ExitStack):
        """The files are closed by `stack`."""
        self.clock, learner = Clock(), trainer.learner
        for name in ("score", "update"):
            setattr(learner, name, functools.partial(self._on_device, getattr(learner, name)))
        updates = ClockedUpdates(trainer.config, trainer.strategy, learner, trainer.workdir, self.clock)
        self.trainer = dataclasses.replace(trainer, updates=updates)
        if script is not None:
            rollouts = ScriptedRollouts(trainer.components.engine, script)
            self.trainer = dataclasses.replace(self.trainer, rollouts=rollouts)
        self.checkpoints, self.identity, self.state = begin_or_resume(self.trainer, params, stack)
        self.interrupt = stack.enter_context(Interrupt())

    def _on_device(self, program: Callable[..., Any], *arguments: Any) -> Any:
        with self.clock("programs"):
            return jax.block_until_ready(program(*arguments))

    def timed_iteration(self, verifiers: VerifierPool) -> dict[str, float]:
        """One iteration with a checkpoint: its seconds by phase, and what it collected.

        Writing goes on beside the next iteration in a run; it is waited for here, after the clock.
        """
        self.clock.seconds = seconds = {}
        begin = time.perf_counter()
        progress = Progress(total=1, done=0, quiet=True)
        state, stop = train_iteration(self.trainer, verifiers, self.interrupt, progress, self.state)
        if stop is not None:
            raise stop
        assert state.pending is not None
        metrics, self.state = state.pending, dataclasses.replace(state, pending=None)
        with self.clock("checkpoint"):
            self.checkpoints.save(state.iteration, state.learner, to_record(self.state) | self.identity)
        total = time.perf_counter() - begin
        self.checkpoints.wait()
        written = time.perf_counter() - begin - total
        seconds["collect"] = metrics["time/collect_s"]
        # Of the collection, what the device didn't wait for the host.
        busy = seconds["collect"] - metrics["time/host_between_windows_s"] + seconds.get("programs", 0.0)
        phases = {f"{phase}_s": seconds.get(phase, 0.0) for phase in PHASES}
        return {
            "seconds": total,
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


def _begin(
    config: Config,
    workdir: pathlib.Path,
    lengths: Lengths,
    architecture: Architecture | None,
    stack: contextlib.ExitStack,
) -> ClockedRun:
    """A run of a configuration in a new work directory; with an architecture, of random weights of that shape."""
    folder = components_lib.model_folder(config.model.path)
    if architecture is not None:
        folder = workdir / "model"
        make_folder(folder, components_lib.model_folder(config.model.path), architecture, config.seed)
    config_lib.check(config)
    components = components_lib.build(config, folder)
    prompts = components.prompts(config.data.prompts, config)
    made_up = architecture is not None or not any(folder.glob("*.safetensors"))
    script = Script(lengths, config.sampling.max_response_tokens, config.seed) if made_up else None
    if script is not None:
        fields = {field.name: getattr(components, field.name) for field in dataclasses.fields(components)}
        components = ScriptedComponents(**fields, script=script)
    if any(folder.glob("*.safetensors")):
        params = components_lib.load_params(config, components)
    else:
        dtype = jnp.dtype(config.model.parameter_dtype)
        params = transformer.init(components.architecture, jax.random.key(config.seed), components.mesh, dtype)
    return ClockedRun(make_trainer(config, workdir, components, prompts, params), params, script, stack)


def measure(
    config: Config,
    *,
    variants: Sequence[str] = tuple(VARIANTS),
    repeat: int = 3,
    lengths: Lengths,
    architecture: Architecture | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Iterations of each variant in turns, the first of each not timed: it compiles.

    Args:
      config: of a run; what a variant is about is set here, and nothing is evaluated.
      variants: of `VARIANTS`.
      repeat: timed iterations of each.
      lengths: of responses, where weights are made up.
      architecture: makes them up, for the tokenizer of the configured model.
      log: receives a line for every step.

    Returns:
      By variant, medians over iterations: "seconds" and its parts ("collect_s" with waiting for verdicts, "score_s"
      with the batches' making, "update_s", "checkpoint_s", as long as the loop is held up, "other_s"), "verify_s",
      which grading took beside decoding, "outside_device_share", the share of time in which no program ran, and tokens
      collected. Then "barrier_ratio" and "overlap_ratio", tokens a second of "rounds" over theirs.

    Raises:
      ValueError: an unknown variant, or a configuration that can't be run.
    """
    unknown = sorted(set(variants) - set(VARIANTS))
    if unknown or not variants:
        raise ValueError(f"--variants has {unknown}; it must name some of {', '.join(VARIANTS)}.")
    runs, taken = {}, {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for name in variants:
            quiet = {"logging.tensorboard": False, "logging.wandb": "", "evaluation.every": 0}
            own = config_lib.replaced(config, VARIANTS[name] | quiet)
            workdir = pathlib.Path(folder) / name
            workdir.mkdir()
            verifiers = stack.enter_context(components_lib.verifier_pool(own))
            runs[name] = _begin(own, workdir, lengths, architecture, stack), verifiers
        for turn in range(1 + repeat):
            for name, (run, verifiers) in runs.items():
                taken[name].append(run.timed_iteration(verifiers))
                log(f"iteration {turn}, {name}: {taken[name][-1]['seconds']:.2f} s")
        shape = models.describe(run.trainer.components.architecture)
    result: dict[str, Any] = {
        name: {key: statistics.median(one[key] for one in timed[1:]) for key in timed[0]}
        | {"iterations": repeat, "first_iteration_s": timed[0]["seconds"], "all_seconds": [x["seconds"] for x in timed]}
        for name, timed in taken.items()
    }
    for name in set(variants) - {"rounds"}:
        if "rounds" in result:
            result[f"{name}_ratio"] = result["rounds"]["tokens_per_s"] / result[name]["tokens_per_s"]
    device = jax.devices()[0]
    return result | {
        "scripted": isinstance(run.trainer.rollouts, ScriptedRollouts), "device": device.device_kind,
        "platform": device.platform, "jax": jax.__version__, "model": shape,
    }  # fmt: skip


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Measures the configuration of the flags."""
    if options.config is None:
        raise ValueError("--config is missing: a configuration of train, such as configs/tiny.py.")
    return measure(
        config_lib.resolve(options.config),
        variants=options.variants,
        repeat=options.repeat or 3,
        lengths=workloads.parse_lengths(options.lengths or workloads.ADAPTIVE_LENGTHS),
        architecture=models.shaped(options.shape) if options.shape else None,
        log=options_lib.log,
    )
