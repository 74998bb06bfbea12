"""Training, from a Hugging Face folder to checkpoints: the loop, read from top to bottom.

    python -m reinforce_ada_jax.train --config=configs/tiny.py --workdir=runs/tiny

An iteration is one collection of prompts and the updates made from it:

    prompts -> engine -> verifier -> pools -> groups + advantages -> batch -> update -> the same weights

Start-up: check the configuration (no device yet), the work directory, the model folder and the prompts; load the
weights, or the newest checkpoint; say what will run. Ctrl-C ends the run after saving the last finished iteration.
"""

import collections
import dataclasses
import functools
import pathlib
import re
import time
from collections.abc import Sequence

import jax
import numpy as np
from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection import serialization, strategies
from reinforce_ada_jax.collection.advantages import Group, make_group
from reinforce_ada_jax.collection.collect import EstimateFn, SampleFn, collect
from reinforce_ada_jax.collection.estimators import calibration
from reinforce_ada_jax.collection.metrics import collection_metrics
from reinforce_ada_jax.collection.prefetch import Prefetch
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.data.prompts import PromptCursor, next_prompts, prompts_after
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.signals import Interrupt, Interrupted
from reinforce_ada_jax.distributed.watchdog import RESTART
from reinforce_ada_jax.evaluation.evaluator import Benchmarks, Evaluator, load_benchmarks
from reinforce_ada_jax.learning.learner import Learner, LearnerState
from reinforce_ada_jax.learning.value_head import ValueHead
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting import samples
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.reporting.writers import MetricsWriter
from reinforce_ada_jax.rewards.workers import CannotStart, VerifierPool
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.sampling.token import stream
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import resume, sharded_collection, summary
from reinforce_ada_jax.training.checkpoint import Checkpoints, abstract_state, fingerprints, holds_checkpoint
from reinforce_ada_jax.training.compile_counter import CompileCounter
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.updates import TrainingStopped, Updates
from reinforce_ada_jax.training.workdir import WorkdirLock, write_config
from reinforce_ada_jax.types import PartialRollouts, Pool, Prompt


class Run:
    """One training run: its components, its state, and the phases of an iteration."""

    def __init__(
        self,
        config: Config,
        workdir: pathlib.Path,
        components: Components,
        prompts: list[Prompt],
        benchmarks: Benchmarks,
        params: Params | None,
        *,
        quiet: bool = False,
    ):
        """`params`: weights of a run that begins; a run found in `workdir` goes on from its newest checkpoint.

        Where adapters are trained, `params` are the base's, and are read again where they aren't given.
        """
        self.config, self.workdir, self.components = config, workdir, components
        self.prompts, self.benchmarks = prompts, benchmarks
        self.strategy = strategies.build(config.collection)
        self.compiles = CompileCounter()
        self.learner = Learner(components.architecture, config, components.mesh)
        self.updates = Updates(config, self.strategy, self.learner, workdir)
        self.identity = resume.identity(config, components, prompts)
        # The frozen weights under the adapters; None where all weights are trained.
        self.base: Params | None = None
        if self.learner.lora is not None:
            self.base = components_lib.load_params(config, components) if params is None else params
        self.checkpoints = Checkpoints(
            workdir,
            keep=config.checkpoint.keep,
            keep_best=config.checkpoint.keep_best,
            keep_every=config.checkpoint.keep_every,
            writes=True,
        )
        self.iteration = 0
        self.cursor = PromptCursor(seed=config.seed)
        self.whole = True  # False while an update has the state
        self.stopped: TrainingStopped | None = None  # why the run must end after this iteration
        self.evaluation: float | None = None  # mean avg@k of the weights as they are, where they were evaluated
        # Metrics of the iteration just finished, until they are complete (its evaluation done) and written.
        self.pending: dict[str, float] | None = None
        # Responses of the next iteration's prompts, drawn where this one's left slots idle.
        self.partial: dict[str, PartialRollouts] = {}
        self.estimator = components_lib.make_estimator(config, components) if self.strategy.plan else None
        self.state = self._begin_or_resume(params)
        # What the KL term compares with: the weights that the run began with, frozen. Adapters began as no change.
        self.reference: Params | None = None
        if config.learning.kl_coefficient:
            self.reference = (
                components_lib.load_params(config, components, config.model.compute_dtype)
                if self.base is None
                else self.base
            )
        fingerprints(self.state)  # compiled now, not at the first checkpoint
        self.rollouts = Rollouts(components.engine)
        self.expected_draws = sharded_collection.ExpectedDraws(config.collection)
        self.interrupt = Interrupt()
        written = self.iteration - (self.pending is not None)
        self.metrics = None
        if processes.is_writer():
            self.metrics = MetricsWriter(
                workdir,
                last_iteration=written,
                tensorboard=config.logging.tensorboard,
                wandb=config.logging.wandb,
                quiet=quiet,
            )

    @property
    def resume(self) -> str:
        """How to go on from here."""
        return (
            f"python -m reinforce_ada_jax.train with the same --config and --workdir={self.workdir} goes on from there."
        )

    # ---- state ---------------------------------------------------------------------------------------------------

    def _begin_or_resume(self, params: Params | None) -> LearnerState:
        restored = self.checkpoints.restore_newest(
            *abstract_state(self.config, self.learner),
            accept=functools.partial(resume.check, self.workdir, self.components.folder, self.identity),
            say=lambda text: print(f"warning: {text}"),
        )
        if restored is None and self.learner.lora is not None:
            return self.learner.init(components_lib.new_adapters(self.config, self.components, self.learner.lora))
        if restored is None:
            return self.learner.init(
                components_lib.load_params(self.config, self.components) if params is None else params
            )
        state, saved = restored
        self.iteration, self.pending = saved["iteration"], saved["pending"]
        self.cursor = PromptCursor.from_json(saved["cursor"])
        self.updates.skipped_in_a_row = saved["skipped_in_a_row"]
        self.partial = serialization.partial_from_text(saved["partial_rollouts"])
        if self.estimator is not None:
            self.estimator.load_json(saved["estimator"])
        return state

    def save(self) -> None:
        """Begins to write the whole state as of the last finished iteration."""
        saved = {
            "iteration": self.iteration,
            "cursor": self.cursor.to_json(),
            "skipped_in_a_row": self.updates.skipped_in_a_row,
            "pending": self.pending,
            "partial_rollouts": serialization.partial_to_text(self.partial),
            "estimator": None if self.estimator is None else self.estimator.to_json(),
            **self.identity,
        }
        self.checkpoints.save(self.iteration, self.state, saved, self.evaluation)

    def policy(self) -> Params:
        """The current weights, to score with and to decode from. An update donates them: ask anew after each."""
        return self.learner.policy(self.state.params, self.base)

    # ---- the phases of an iteration ------------------------------------------------------------------------------

    def estimate_fn(self) -> EstimateFn | None:
        """Pass rates expected under the current weights, where the strategy plans with them."""
        if isinstance(self.estimator, ValueHead):
            return functools.partial(self.estimator.estimate, self.policy())
        return None if self.estimator is None else self.estimator.estimate

    def sample_fn(self) -> SampleFn:
        """Draws from the current weights, as the next iteration does."""
        iteration, sampling = self.iteration + 1, self.config.sampling
        return self.rollouts.sampler(
            self.policy(),
            stream=stream(iteration),
            sampling=SamplingParams(
                sampling.max_response_tokens, sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
            ),
            prefetch_stream=stream(iteration + 1) if self.config.collection.overlap_iterations else None,
            policy_version=self.iteration,
        )

    def collect(
        self,
        prompts: Sequence[Prompt],
        replacements: Sequence[Prompt],
        upcoming: Prefetch,
        verifiers: VerifierPool,
        progress: Progress,
    ) -> tuple[list[Group], dict]:
        """Draws and grades responses until every prompt's rule is met.

        `replacements` take the place of those of which nothing is kept; idle slots begin the `upcoming` ones.
        """
        iteration, collection = self.iteration + 1, self.config.collection
        begin, verify_s = time.monotonic(), verifiers.busy_s

        sample_fn = self.sample_fn()
        verify_fn = self.components.verify_fn(verifiers, components_lib.shaping(self.config))

        def draw(work: sharded_collection.Job) -> tuple[list[Pool], sharded_collection.Counts]:
            def report(closed: int, drawn: int) -> None:
                self.interrupt.check()
                rate = self.rollouts.counts.tokens / (time.monotonic() - begin)
                share = f"{closed}/{len(work.prompts)} prompts"
                progress.phase(f"collecting: {share}, {drawn:,} responses, {rate:,.0f} tokens/s")

            pools = collect(
                work.prompts,
                sample_fn,
                verify_fn,
                work.strategy,
                replacements=work.replacements,
                estimate_fn=work.estimate_fn,
                seed=self.config.seed,
                iteration=iteration,
                barrier=collection.barrier,
                deterministic=components_lib.deterministic(self.config),
                partial=work.partial,
                prefetch=work.prefetch,
                on_progress=report,
            )
            return pools, collections.Counter(dataclasses.asdict(self.rollouts.counts))

        work = sharded_collection.Job(prompts, self.strategy, replacements, self.estimate_fn(), self.partial, upcoming)
        pools, counts = sharded_collection.collect_everywhere(work, draw, self.expected_draws)
        updates = collection.prompts_per_iteration // self.config.learning.prompts_per_update
        groups = []
        for pool in pools:
            ages = np.array([(self.iteration - response.policy_version) * updates for response in pool.responses])
            groups.append(make_group(pool, self.strategy, ages))
        metrics = collection_metrics(groups, collection.group_size, len(prompts)) | calibration(pools)
        metrics["collection/slot_utilisation"] = counts["tokens"] / max(counts["slot_steps"], 1)
        metrics["collection/prefills"] = counts["prefills"]
        metrics["collection/dispatches"] = counts["dispatches"]
        metrics["collection/ahead"] = sum(
            response.policy_version < self.iteration for pool in pools for response in pool.responses
        )
        metrics["time/collect_s"] = time.monotonic() - begin
        metrics["time/verify_s"] = verifiers.busy_s - verify_s
        metrics["time/reshard_s"], metrics["memory/reshard_bytes"] = dataclasses.astuple(self.rollouts.reshard)
        metrics["time/host_between_windows_s"] = counts["host_s"] / processes.count()
        return groups, metrics

    def say_what_is_missing(self, groups: Sequence[Group], progress: Progress) -> None:
        """A word where an iteration trains on less than it was meant to."""
        wanted, kept = self.config.collection.prompts_per_iteration, sum(bool(group.kept.size) for group in groups)
        if self.strategy.extra_batches and kept < wanted:
            progress.say(
                f"iteration {self.iteration + 1}: {kept} of {wanted} groups have a signal after {len(groups)} prompts, "
                "which are all that collection.max_extra_batches and the data allow; the update goes on with them."
            )
        if not kept:
            progress.say(f"iteration {self.iteration + 1}: every group was dropped, so nothing is updated.")

    def update(self, groups: Sequence[Group], progress: Progress) -> dict[str, float]:
        """One optimiser step a minibatch of the groups.

        Where the run must end in the midst of them, the iteration ends with those that were made.
        """
        iteration, skipped = self.iteration + 1, self.updates.skipped_in_a_row
        minibatches = self.updates.minibatches(groups, self.policy(), self.reference)
        try:
            finite, metrics = self.updates.check_logprobs(minibatches, iteration, progress.say)
            self.whole = False
            self.state, means, stopped = self.updates.update(self.state, self.base, finite, iteration, progress.say)
            self.whole = True
            if stopped is not None and not means["update/count"]:
                raise stopped
        except (
            TrainingStopped
        ):  # nothing of this iteration is in the weights: it will be drawn, and its skips counted, again
            self.updates.skipped_in_a_row = skipped
            raise
        self.stopped, self.evaluation = stopped, None
        return metrics | means | {"update/skipped": len(minibatches) - means["update/count"]}

    def evaluate(self, verifiers: VerifierPool, progress: Progress) -> dict[str, float]:
        """avg@k and pass@k of the current weights, also kept in evaluations/."""

        def report(text: str) -> None:
            self.interrupt.check()
            progress.phase(text)

        begin = time.monotonic()
        metrics = self.evaluator(verifiers)(self.policy(), self.iteration, report)
        averages = (f"{key.split('/')[1]} {value:.3f}" for key, value in metrics.items() if key.endswith("/avg"))
        progress.note(f"iteration {self.iteration}: avg@{self.config.evaluation.samples} {', '.join(averages)}")
        return metrics | {"time/evaluate_s": time.monotonic() - begin}

    # ---- the loop ------------------------------------------------------------------------------------------------

    def one_iteration(self, verifiers: VerifierPool, progress: Progress) -> dict[str, float]:
        """Collect, update, advance; the metrics of this iteration."""
        size = self.config.collection.prompts_per_iteration
        prompts, cursor = next_prompts(self.prompts, self.cursor, size)
        upcoming = Prefetch(())
        if self.config.collection.overlap_iterations:
            current = {prompt.id for prompt in prompts}  # an epoch's end and the next one's beginning may share some
            following = next_prompts(self.prompts, cursor, size)[0]
            upcoming = Prefetch([prompt for prompt in following if prompt.id not in current])
        replacements = []
        if self.strategy.extra_batches:
            taken = {prompt.id for prompt in prompts}
            replacements = prompts_after(self.prompts, cursor, self.strategy.extra_batches * size, taken)
        groups, metrics = self.collect(prompts, [prompt for prompt, _ in replacements], upcoming, verifiers, progress)
        used = len(groups) - size
        if used:
            cursor = replacements[used - 1][1]
        if processes.is_writer():
            file = self.workdir / "samples" / f"{self.iteration + 1:06d}.jsonl"
            samples.write(file, groups[: self.config.logging.sampled_prompts], self.components.tokenizer.decode)
        progress.phase("updating")
        self.say_what_is_missing(groups, progress)
        metrics |= self.update(groups, progress)
        if self.estimator is not None:
            metrics |= self.estimator.observe([group.pool for group in groups])
        self.iteration, self.cursor, self.partial = self.iteration + 1, cursor, upcoming.partial
        return metrics

    def due(self, every: int) -> bool:
        """Whether something done every so many iterations is due after this one; it always is after the last."""
        last = self.iteration == self.config.iterations
        return every > 0 and (self.iteration % every == 0 or last)

    def evaluator(self, verifiers: VerifierPool) -> Evaluator:
        """Returns the evaluation function of this run."""
        return Evaluator(self.components, self.config, self.workdir, self.benchmarks, self.rollouts, verifiers)

    def loop(self, verifiers: VerifierPool, progress: Progress) -> None:
        """All iterations that are left."""
        first = self.iteration == 0 and self.config.evaluation.every and self.benchmarks
        if first and not self.evaluator(verifiers).is_done(0):
            before = self.evaluate(verifiers, progress)
            if self.metrics is not None:
                self.metrics.plot(0, before)
        while self.pending is not None or self.iteration < self.config.iterations:
            self.interrupt.agree()
            self.checkpoints.check()
            if self.pending is None:
                self.pending = self.one_iteration(verifiers, progress)
            if self.benchmarks and self.due(self.config.evaluation.every):
                self.pending |= self.evaluate(verifiers, progress)
            self.pending |= {"compile/count": self.compiles.since_last(), "memory/peak_bytes": peak_memory()}
            if self.metrics is not None:
                self.metrics.write(self.iteration, self.pending)
            progress.iteration(
                {
                    "reward": f"{self.pending['reward/first_round']:.3f}",
                    "zero-signal": f"{self.pending['collection/zero_signal_share']:.2f}",
                    "entropy": f"{self.pending['update/entropy']:.2f}",
                }
            )
            averages = [value for key, value in self.pending.items() if re.fullmatch("evaluation/.*/avg", key)]
            self.evaluation, self.pending = float(np.mean(averages)) if averages else None, None
            if self.stopped is not None:
                raise self.stopped
            # One that was saved before its evaluation, on the way out, is completed.
            saved = self.iteration in self.checkpoints.iterations()
            if saved or self.due(self.config.checkpoint.every) or self.iteration == self.config.iterations:
                self.save()


def peak_memory() -> int:
    """Bytes in use at most on the first device, where the backend counts them; else 0."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("peak_bytes_in_use", 0)


def until_the_end(run: Run, verifier_pool: VerifierPool, progress: Progress) -> tuple[str, int]:
    """The loop; then why it ended early and the exit code, or "" and 0. Its state is on disk when this returns."""
    said, code = "", 0
    try:
        with verifier_pool as verifiers:
            run.loop(verifiers, progress)
    except Interrupted:
        run.save()
        preempted = run.interrupt.preempted()
        code = RESTART if preempted else cli.INTERRUPTED
        said = f"{'told to end' if preempted else 'interrupted'}; iteration {run.iteration} is saved. {run.resume}"
    except TrainingStopped as error:
        run.save()
        code, said = cli.STOPPED, f"{error} The state before it is saved as iteration {run.iteration}."
    except OSError:
        raise
    except Exception as error:
        # A fault, of ours or in a user's reward or strategy. Others of several processes may not have met it: no save.
        if not run.whole or processes.count() > 1:
            raise
        run.save()
        run.checkpoints.wait()
        if not isinstance(error, CannotStart):
            raise
        code, said = cli.STOPPED, f"{error.line} Iteration {run.iteration} is saved. {run.resume}"
    run.checkpoints.wait()
    return said, code


def disk_trouble(run: Run, error: OSError) -> str:
    """What to say where a file of the run can't be read or written."""
    whole = max(run.checkpoints.iterations(), default=None)
    kept = "No checkpoint was finished yet." if whole is None else f"The newest whole checkpoint is of {whole}."
    return f"{error}. The run stops before it trains on. {kept} Mend that (a full disk: make room), then: {run.resume}"


def main(config: Config, workdir: pathlib.Path, *, quiet: bool = False) -> None:
    """Start-up in order, then the loop, then where things are."""
    silent = quiet or not processes.is_writer()
    with cli.user_input():
        config_lib.check(config)
        strategies.build(config.collection)  # a user's own file is read here
        config_lib.check_workdir(config, workdir)
        components = components_lib.build(config, components_lib.model_folder(config.model.path))
        prompts = components.prompts(config.data.prompts, config)
        next_prompts(prompts, PromptCursor(config.seed), config.collection.prompts_per_iteration)
        benchmarks = load_benchmarks(components, config)
        verifier_pool = components_lib.verifier_pool(config)
        # Whatever is wrong with the weights shows before the first file is written.
        params = None if holds_checkpoint(workdir) else components_lib.load_params(config, components)
        processes.check_same("the configurations", config_lib.to_json(config))
        processes.check_same("the prompts", " ".join(prompt.id for prompt in prompts))
        lock = WorkdirLock(workdir)
        write_config(config, workdir)
        run = Run(config, workdir, components, prompts, benchmarks, params, quiet=quiet)
    if not silent:
        print(summary.summary(config, workdir, components, len(prompts)))
        if run.iteration:
            print(f"resuming after iteration {run.iteration}")
    progress = Progress(config.iterations, run.iteration, quiet=silent)
    try:
        said, code = until_the_end(run, verifier_pool, progress)
        processes.leave()
    except OSError as error:
        said, code = disk_trouble(run, error), cli.STOPPED
    finally:
        if run.metrics is not None:
            run.metrics.close()
        run.checkpoints.close()
        lock.close()
    progress.close()
    if said:
        cli.fail(said, code)
    if processes.is_writer():
        print(
            f"finished iteration {run.iteration}. Weights: {workdir}/checkpoints; export them with\n"
            f"  python -m reinforce_ada_jax.export --workdir={workdir} --output=HF_DIR"
        )


if __name__ == "__main__":
    CONFIG = cli.define_config()
    WORKDIR = flags.DEFINE_string(
        "workdir", None, "Where the run's files go; a run found there is resumed.", required=True
    )
    DISTRIBUTED = flags.DEFINE_bool(
        "distributed", False, "One process of several, which the cluster (TPU pod, Slurm, MPI) knows; start it on all."
    )
    QUIET = flags.DEFINE_bool("quiet", False, "Only warnings, errors and the final line.")

    def start() -> None:
        with processes.member():  # one that can't join ends at once, too
            with cli.user_input():
                processes.initialize(cluster=DISTRIBUTED.value)
            main(config_lib.resolve(CONFIG.value), pathlib.Path(WORKDIR.value), quiet=QUIET.value)

    cli.run(start)
