"""Evaluation by the command: every response is stored with its verdict, and can be graded again without a model."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from reinforce_ada_jax import cli
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.data.prompts import to_prompt
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.compilation import EarlyCompilation
from reinforce_ada_jax.distributed.program_cache import keep_programs
from reinforce_ada_jax.evaluation import evaluator, fixed_draws, response_store
from reinforce_ada_jax.evaluation.evaluator import Benchmarks
from reinforce_ada_jax.evaluation.response_store import GradedResponses, ResponseStore, hash_of_problems, writing
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.policy import adapter_files, hub_models, huggingface
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.rewards.shaping import Shaping
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import fingerprints, summary, trained
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.reward_check import check_reward, reward_columns
from reinforce_ada_jax.types import Verdict

_SAVED = "Graded responses are stored"
# What to do about a reward that could not grade the responses.
_REMEDY = "Fix it, then grade the stored responses again with --regrade."


@dataclasses.dataclass(frozen=True)
class PolicySource:
    """Source of an evaluated policy's weights: a run's checkpoint, or a model folder."""

    workdir: pathlib.Path | None  # of the run; None for a model folder
    folder: pathlib.Path  # the model folder; for a run, the folder of its `model.path`

    def newest_iteration(self, config: Config) -> int:
        return 0 if self.workdir is None else trained.newest_iteration(self.workdir, config)

    def fingerprint(self, iteration: int) -> str:
        if self.workdir is None:
            return adapter_files.fingerprint(self.folder)
        return fingerprints.recorded(self.workdir, iteration)

    def load(self, config: Config, components: Components, iteration: int) -> Params:
        """Returns the weights of an iteration, in `model.compute_dtype`."""
        if self.workdir is None:
            return components_lib.load_params(config, components, config.model.compute_dtype)
        return trained.read_policy(self.workdir, config, components, iteration)

    def output(self, iteration: int) -> pathlib.Path:
        """Returns the default folder of the stored responses."""
        if self.workdir is None:
            name = hub_models.repository(self.folder) or self.folder.resolve().name
            return pathlib.Path("evaluations") / pathlib.Path(name).name
        return self.workdir / "evaluations" / f"{iteration:06d}"

    def newest_output(self) -> pathlib.Path:
        """Returns the default folder with the newest stored responses; ValueError if a run has none."""
        if self.workdir is None:
            return self.output(0)
        folders = (folder for folder in (self.workdir / "evaluations").glob("[0-9]*") if folder.is_dir())
        stored = [int(folder.name) for folder in folders if folder.name.isdecimal()]  # not a copy, "000040-old"
        if not stored:
            raise ValueError(
                f"{buckets.origin(self.workdir)} holds no stored responses: evaluate without --regrade first."
            )
        return self.output(max(stored))


@dataclasses.dataclass(frozen=True)
class StoredEvaluation:
    """All responses of an evaluation, by benchmark."""

    output: pathlib.Path  # the folder of the stores
    benchmarks: Benchmarks
    stores: Mapping[str, ResponseStore]
    initial: Mapping[str, Mapping[str, float]]  # pass rates before training, by benchmark and id

    @property
    def drawn(self) -> Mapping[str, Any]:
        """Settings of the draws, from the header of the first store."""
        return next(iter(self.stores.values())).header["drawn"]

    @functools.cached_property
    def responses(self) -> dict[str, GradedResponses]:
        """Responses of the problems that have all their samples."""
        samples = self.drawn["samples"]
        return {name: self.stores[name].complete(prompts, samples) for name, prompts in self.benchmarks.items()}


def _initial_pass_rates(folder: pathlib.Path | None, benchmarks: Benchmarks) -> dict[str, dict[str, float]]:
    """Returns initial pass rates by benchmark and id, from the evaluation in `folder`; None: from the problem files."""
    return {
        name: evaluator.known_pass_rates(prompts)
        if folder is None
        else response_store.pass_rates(folder / f"{name}.jsonl", prompts)
        for name, prompts in benchmarks.items()
    }


def _stores(
    config: Config,
    components: Components,
    benchmarks: Benchmarks,
    words: Mapping[str, int],
    output: pathlib.Path,
    source: PolicySource,
    iteration: int,
) -> dict[str, ResponseStore]:
    """Returns the store of each benchmark; ValueError where a file has draws of another policy or with other settings.

    A folder has the responses of one model folder only, because its results.json names one model.

    `words` are the first words of the addresses. The headers have them, because two commands may have drawn two
    benchmarks with equal ids and the same noise.
    """
    settings, graders = config.evaluation, components_lib.benchmark_graders(config)
    fingerprint, stores = source.fingerprint(iteration), {}
    if source.workdir is None:
        response_store.check_model(output, fingerprint)
    for name, prompts in benchmarks.items():
        drawn = response_store.drawn_with(
            config, fingerprint, settings, settings.samples, prompts,
            stop_ids=list(components.tokenizer.stop_ids), iteration=iteration, stream=words[name],
        )  # fmt: skip
        header = {"drawn": drawn, "graded": response_store.graded_by(config, graders.get(name, ""), prompts)}
        stores[name] = ResponseStore(response_store.of_process(output / f"{name}.jsonl"), header)
    return stores


def evaluate(
    config: Config,
    source: PolicySource,
    output: pathlib.Path | None,
    initial: pathlib.Path | None = None,
    *,
    cost: fixed_draws.Cost | None = None,
) -> StoredEvaluation | None:
    """Draws and grades the responses that the stores in `output` lack; None: in the default folder.

    `initial` is the folder of an earlier evaluation of the same problems, which gives their initial pass rates. With
    `cost` it is a dry run: the input is only checked and described. A dry run returns None, and so do all processes
    except process 0.
    """
    settings, dry_run = config.evaluation, cost is not None
    with cli.user_input():
        mesh_lib.available_devices()
        # All processes take that of process 0: a training may write another checkpoint meanwhile.
        iteration = int(processes.of_writer(str(source.newest_iteration(config))))
        components = components_lib.build(config, source.folder)
        read: list[str] = []
        benchmarks = evaluator.load_benchmarks(components, config, read.append)
        every = [prompt for prompts in benchmarks.values() for prompt in prompts]
        components = components_lib.for_responses(config, components, every, settings.samples)
        processes.check_same("the configurations", config_lib.to_json(config))
        processes.check_same("the problems", "".join(map(hash_of_problems, benchmarks.values())))
        rates = _initial_pass_rates(initial, benchmarks) if processes.is_writer() else {}
        output, graders = output or source.output(iteration), components_lib.benchmark_graders(config)
        words = evaluator.streams(benchmarks, iteration)
        stores = _stores(config, components, benchmarks, words, output, source, iteration)
        missing = {
            name: response_store.wanted_by_writer(prompts, stores[name].missing(prompts, settings.samples))
            for name, prompts in benchmarks.items()
        }
        verifier_pool = components_lib.verifier_pool(config, output)
        of_user = [prompts[0] for name, prompts in missing.items() if prompts and name not in graders]
        reward = check_reward(config, verifier_pool, of_user)
        if dry_run and source.workdir is None:
            huggingface.check_weights(components.folder, components.architecture)
        keep_programs("" if dry_run else config.logging.compilation_cache)
        draws, compilation = any(missing.values()) and not dry_run, EarlyCompilation()
        ready = compilation.add(components.engine.programs() if draws else {})
        params = source.load(config, components, iteration) if draws else None
    policy = (
        str(components.folder) if source.workdir is None else f"{buckets.origin(source.workdir)}, iteration {iteration}"
    )
    counts = {name: (len(prompts), len(missing[name])) for name, prompts in benchmarks.items()}
    model = summary.model_and_memory(config, components, policy)
    text = summary.drawing(model, counts, read, settings.samples, settings, output, reward=reward)
    if cost is not None:
        text = f"{text}\n{cost(config, components, settings.samples * len(every), settings.max_response_tokens)}"
    if processes.is_writer():
        print(summary.dry_run(config, text) if dry_run else text, flush=True)
    if dry_run:
        return None
    if params is not None:
        total, lacking = map(sum, zip(*counts.values(), strict=True))
        opened = writing(stores.values(), total, total - lacking, "problems")
        with compilation, opened as progress, verifier_pool as verifiers:
            ready(progress.phase)
            rollouts = Rollouts(components.engine)
            weights = rollouts.decode_weights(params)
            verify = evaluator.verify_fns(components, verifiers, config)
            for name, prompts in missing.items():
                draw = fixed_draws.from_policy(
                    weights, rollouts, settings, words[name], config, components, verify[name]
                )
                draw_this = functools.partial(draw, samples=settings.samples)
                fixed_draws.fill(stores[name], prompts, draw_this, progress, _SAVED, rollouts, f"{name}: ")
                stores[name].finish(benchmarks[name])
    result = StoredEvaluation(output, benchmarks, stores, rates) if processes.is_writer() else None
    responses = {} if result is None else result.responses
    fixed_draws.check_graded(config, components.graders(verifier_pool), "the evaluation", responses.values(), _REMEDY)
    return result


def regrade(
    config: Config,
    source: PolicySource,
    output: pathlib.Path | None,
    initial: pathlib.Path | None = None,
    *,
    samples: int | None = None,
) -> StoredEvaluation:
    """Grades the stored responses again, without weights or engine.

    `samples` is the number of responses that each problem must have; None: any number. The process ends with one line
    if there is another number of them, or if an environment graded them.
    """
    with cli.user_input():
        if config.environment.path:
            raise ValueError(
                f"environment.path is {config.environment.path!r}: it graded the trajectories while they were drawn, "
                "and --regrade can't repeat that. Evaluate again, with another --output."
            )
        output, graders = output or source.newest_output(), components_lib.benchmark_graders(config)
        sources = evaluator.by_name(config.evaluation.benchmarks)
        no_tokens = np.zeros(0, np.int32)
        benchmarks = {
            name: [to_prompt(problem, no_tokens) for problem in components_lib.load_problems(path, config)]
            for name, path in sources.items()
        }
        rates = _initial_pass_rates(initial, benchmarks)
        stores: dict[str, ResponseStore] = {}
        for name, prompts in benchmarks.items():
            file = output / f"{name}.jsonl"
            stored = response_store.read_header(file)
            graded = response_store.graded_by(config, graders.get(name, ""), prompts)
            if samples not in (None, drawn := stored["drawn"].get("samples")):
                raise ValueError(
                    f"--samples is {samples}, and {buckets.origin(file)} has {drawn} responses of each problem: "
                    "--regrade draws none. Leave out --samples, or draw with another --output."
                )
            header = {"drawn": stored["drawn"] | {"problems": hash_of_problems(prompts)}, "graded": graded}
            before, now = (each["reward"] for each in (stored["graded"], graded))
            print(f"{name}: graded by {now}" + (f", in place of {before}" if now != before else ", again"), flush=True)
            stores[name] = ResponseStore(file, header, regrade=True)
        if len({store.header["drawn"]["samples"] for store in stores.values()}) > 1:
            folder = buckets.origin(output)
            raise ValueError(f"the benchmarks in {folder} have different numbers of samples: --benchmarks=one of them.")
        verifier_pool = components_lib.verifier_pool(config, output)
        check_reward(config, verifier_pool, [benchmarks[name][0] for name in stores if name not in graders])
    shaping, total = Shaping(config.reward.positive_threshold), sum(map(len, stores.values()))
    with writing(stores.values(), total, 0, "responses") as progress, verifier_pool as verifiers:
        for name, store in stores.items():
            prompt_of, grader = {prompt.id: prompt for prompt in benchmarks[name]}, graders.get(name, "")

            def grade(texts, lengths, prompt_of=prompt_of, grader=grader) -> list[Verdict]:
                given = [(text, prompt_of[name]) for name, text in texts]
                pairs = [(text, prompt.answer, reward_columns(config, prompt)) for text, prompt in given]
                return shaping.all(verifiers.grade_all(pairs, grader), lengths)

            begin = progress.done
            for done in store.regrade(grade):
                progress.reach(begin + done, name)
    result = StoredEvaluation(output, benchmarks, stores, rates)
    counts = {name: (len(result.responses[name]), len(prompts)) for name, prompts in benchmarks.items()}
    unfinished = [f"{name} {found:,} of {wanted:,}" for name, (found, wanted) in counts.items() if found < wanted]
    if unfinished:
        cli.fail(
            f"the stored responses are graded again, but some problems lack responses ({', '.join(unfinished)}): the "
            "same command without --regrade draws them.",
            cli.STOPPED,
        )
    fixed_draws.check_graded(config, verifier_pool, "the evaluation", result.responses.values(), _REMEDY)
    return result
