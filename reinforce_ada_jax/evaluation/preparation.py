"""Preparation of prompts: problems chosen by how often a model solves them.

The manifest has the numbers of problems that were left out, by reason. The folder of the draws has every response: so
the same command continues after a kill, and another band of pass rates needs no new draws.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import pathlib
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence

from reinforce_ada_jax import cli
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config, values
from reinforce_ada_jax.config.paths import check_output, check_source
from reinforce_ada_jax.data.problems import Problem, description, to_row
from reinforce_ada_jax.data.prompts import short_prompts
from reinforce_ada_jax.data.templates import chat_from_config
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.compilation import EarlyCompilation
from reinforce_ada_jax.distributed.program_cache import keep_programs
from reinforce_ada_jax.evaluation import fixed_draws, response_store
from reinforce_ada_jax.evaluation.response_store import GradedResponse, GradedResponses, ResponseStore
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.durable import write_atomically
from reinforce_ada_jax.policy import adapter_files, huggingface
from reinforce_ada_jax.rewards.shaping import Shaping
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.token import stream
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import reward_check, summary
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.types import Prompt, Verdict

# Number of reference answers that a process grades before they are stored.
VERIFIED_AT_ONCE = 256
BAR_WIDTH = 40


@dataclasses.dataclass(frozen=True)
class Band:
    """Pass rates that are chosen: above `least`, at most `most`."""

    least: float
    most: float

    def __post_init__(self):
        if not 0.0 <= self.least < self.most <= 1.0:
            raise ValueError(
                f"--min_pass_rate is {self.least:g} and --max_pass_rate {self.most:g}; both must be in [0, 1], the "
                "first below the second: problems with a pass rate above the first and at most the second are kept."
            )

    def check(self, samples: int) -> None:
        """Raises ValueError if no number of correct draws of `samples` has a pass rate in the band."""
        if not any(number / samples in self for number in range(samples + 1)):
            raise ValueError(
                f"--samples is {samples}: pass rates are multiples of 1/{samples}, and none has {self}. No prompt "
                "could be kept. Raise --samples, or widen --min_pass_rate and --max_pass_rate."
            )

    def __contains__(self, pass_rate: float) -> bool:
        return self.least < pass_rate <= self.most

    def __str__(self) -> str:
        return f"{self.least:g} < pass rate <= {self.most:g}"


@dataclasses.dataclass(frozen=True)
class OutputFiles:
    """Files of the command: the prompts, their manifest, and the folder of the draws."""

    output: pathlib.Path

    @property
    def manifest(self) -> pathlib.Path:
        return self.output.with_suffix(".manifest.json")

    @property
    def draws(self) -> pathlib.Path:
        return self.output.with_suffix(".draws")

    @property
    def names(self) -> tuple[str, ...]:
        """Prefixes of the names of all files."""
        return tuple(path.name for path in (self.output, self.manifest, self.draws))

    def check(self, source: str) -> None:
        """Raises ValueError if the output can't be written, or is a file that this command did not write."""
        check_source("--input", source)
        for path in (self.output, self.manifest, self.draws):
            check_output("--output", path, folder=path == self.draws)
        if self.output.suffix != ".jsonl":
            raise ValueError(f"--output is {self.output}; it must end with .jsonl, because it gets one problem a line.")
        if self.output.exists() and not self.manifest.exists():
            raise ValueError(
                f"{buckets.origin(self.output)} exists and was not written by this command: give another --output."
            )
        if pathlib.Path(source).exists() and self.output.resolve() == pathlib.Path(source).resolve():
            raise ValueError(f"--input and --output are both {self.output}: give another --output.")


# ---- without a model -------------------------------------------------------------------------------------------------


def first_of_each(problems: Sequence[Problem]) -> list[Problem]:
    """Returns the first problem with each text; later ones are left out, whatever their answers.

    Texts are compared in Unicode's composed form, with each run of white space as one space. Case counts. For a problem
    with messages, all but the system's are compared.
    """
    firsts: dict[str, Problem] = {}
    for problem in problems:
        messages = problem.get("prompt", [{"role": "user", "content": problem["problem"]}])
        text = "\n".join(message["content"] for message in messages if message["role"] != "system")
        firsts.setdefault(" ".join(unicodedata.normalize("NFC", text).split()), problem)
    return list(firsts.values())


def _unique_and_short(
    config: Config, components: Components, problems: Sequence[Problem]
) -> tuple[list[Prompt], dict[str, int]]:
    """Returns (prompts to verify, counts of problems read and left out so far)."""
    if config.environment.path:
        raise ValueError(
            f"environment.path is {config.environment.path!r}, and prepare measures pass rates of single responses "
            "only: measure trajectories with evaluate."
        )
    unique = first_of_each(problems)
    limit = config.data.max_prompt_tokens
    template, chat = config.data.template, chat_from_config(config)
    prompts, too_long = short_prompts(unique, components.tokenizer, template, limit, chat)
    if not prompts:
        raise ValueError(f"none of {len(unique):,} prompts has at most {limit:,} tokens: raise data.max_prompt_tokens.")
    return prompts, {"read": len(problems), "duplicate": len(problems) - len(unique), "too_long": len(too_long)}


def verify_references(config: Config, prompts: Sequence[Prompt], verifiers: VerifierPool) -> list[tuple[str, Verdict]]:
    r"""Grades each reference answer against itself, in a box (`\boxed{72}`) or, if that fails, as it is (`72`).

    Some verifiers read only one of the two forms; a reference that fails in both forms can never be matched. Returns
    the graded text and the verdict of each prompt; each process grades its share.
    """
    shaping, count = Shaping(config.reward.positive_threshold), processes.count()

    def grade(texts: Sequence[str], prompts: Sequence[Prompt]) -> list[tuple[str, Verdict]]:
        given = zip(texts, prompts, strict=True)
        pairs = [(text, prompt.answer, reward_check.reward_columns(config, prompt)) for text, prompt in given]
        return list(zip(texts, shaping.all(verifiers.grade_all(pairs), [0] * len(pairs)), strict=True))

    share = prompts[processes.index() :: count]
    own = grade([rf"\boxed{{{prompt.answer}}}" for prompt in share], share)
    failed = [index for index, (_, verdict) in enumerate(own) if not verdict.correct]
    plain = grade([share[index].answer for index in failed], [share[index] for index in failed])
    for index, (text, verdict) in zip(failed, plain, strict=True):
        if verdict.correct:
            own[index] = text, verdict
    message = json.dumps([[text, dataclasses.astuple(verdict)] for text, verdict in own]).encode()
    graded: list[tuple[str, Verdict]] = [("", Verdict(False, 0.0))] * len(prompts)
    for index, shard in enumerate(processes.exchange(message)):
        graded[index::count] = [(text, Verdict(*verdict)) for text, verdict in json.loads(shard)]
    return graded


def _with_valid_reference(
    config: Config, prompts: Sequence[Prompt], files: OutputFiles, verifiers: VerifierPool
) -> list[Prompt]:
    """Returns the prompts whose references pass. Verdicts are stored: with time limits, a second one could differ."""
    with cli.user_input():
        header = {
            "drawn": {"problems": response_store.hash_of_problems(prompts)},
            "graded": response_store.graded_by(config, "", prompts),
        }
        store = ResponseStore(files.draws / "references.jsonl", header)
    if missing := response_store.wanted_by_writer(prompts, store.missing(prompts, 1)):
        size, writer = VERIFIED_AT_ONCE * processes.count(), processes.is_writer()
        stores, done = [store] if writer else [], len(prompts) - len(missing)
        with response_store.writing(stores, len(prompts), done, "references") as progress:
            for first in range(0, len(missing), size):
                chunk = missing[first : first + size]
                verified = verify_references(config, chunk, verifiers)
                if writer:
                    store.add(
                        (prompt.id, 0, text, GradedResponse(0, False, verdict))
                        for prompt, (text, verdict) in zip(chunk, verified, strict=True)
                    )
                progress.reach(progress.done + len(chunk))
    correct = num_correct(store.complete(prompts, 1))
    # Without an answer (data.answer_column=none) there is nothing that could fail.
    valid = [each for each in prompts if correct.get(each.id) or not each.answer]
    passed = response_store.wanted_by_writer(prompts, valid)
    if not passed:
        cli.fail(
            f"none of {len(prompts):,} reference answers passes its own verification by "
            f"{config.reward.path or config.reward.kind!r}: choose the reward that fits them. The verdicts are in "
            f"{buckets.origin(store.file)}."
        )
    return passed


# ---- drawing and choosing --------------------------------------------------------------------------------------------


def num_correct(drawn: GradedResponses) -> dict[str, int]:
    return {name: sum(response.verdict.correct for response in draws) for name, draws in drawn.items()}


def histogram(correct: Sequence[int], samples: int, band: Band) -> str:
    """Returns problems by pass rate as lines of text; a star marks the pass rates in the band."""
    counts = collections.Counter(correct)
    most = max(counts.values())
    lines = ["pass rate  problems"]
    for number in range(samples + 1):
        star = "*" if number / samples in band else " "
        bar = "#" * -(-counts[number] * BAR_WIDTH // most)
        lines.append(f"{number / samples:9.3f} {star} {counts[number]:7,}  {bar}".rstrip())
    return "\n".join(lines)


def few_prompts(count: int, wanted: int) -> str:
    """Returns a warning if `count` prompts are too few for a training with `wanted` in an iteration, else ""."""
    if count >= wanted:
        return ""
    return (
        f"warning: an iteration of train takes {wanted:,} different prompts (collection.prompts_per_iteration), and "
        f"there are {count:,}. Give more problems, widen the pass rates, or train with "
        f"--config.collection.prompts_per_iteration and --config.learning.prompts_per_update of at most {count:,}."
    )


def _write(
    config: Config,
    files: OutputFiles,
    problems: Sequence[Problem],
    correct: Mapping[str, int],
    counts: dict[str, int],
    band: Band,
    store: ResponseStore,
) -> None:
    """Chooses the problems in the band, and writes the prompts and the manifest.

    `correct` has the number of correct draws by problem id, `counts` the numbers of problems read and left out before.
    """
    drawn = store.header["drawn"]
    samples, source = drawn["samples"], config.data.prompts
    rates = {name: number / samples for name, number in correct.items()}
    chosen: list[Problem] = [
        {**problem, "pass_rate": rates[problem["id"]]} for problem in problems if rates.get(problem["id"], -1.0) in band
    ]
    counts = counts | {
        "pass_rate_too_low": sum(rate <= band.least for rate in rates.values()),
        "pass_rate_too_high": sum(rate > band.most for rate in rates.values()),
        "kept": len(chosen),
    }
    print(histogram(list(correct.values()), samples, band))
    print(", ".join(f"{reason.replace('_', ' ')} {count:,}" for reason, count in counts.items()))
    if not chosen:
        cli.fail(
            f"no prompt has {band}, so nothing is written. Move --min_pass_rate and --max_pass_rate to where the "
            f"prompts are (the same command chooses again without drawing: {buckets.origin(files.draws)} has the "
            "responses)."
        )
    file = pathlib.Path(source)
    content = file.read_bytes() if file.is_file() else json.dumps(list(map(to_row, problems))).encode()
    text = "".join(json.dumps(to_row(problem), ensure_ascii=False) + "\n" for problem in chosen)
    manifest = {
        "input": {"source": source, "sha256": hashlib.sha256(content).hexdigest()},
        "output": {"file": files.output.name, "sha256": hashlib.sha256(text.encode()).hexdigest()},
        "model": {"path": config.model.path, "fingerprint": drawn["model"]},
        "seed": config.seed,
        "samples": samples,
        "min_pass_rate_exclusive": band.least,
        "max_pass_rate_inclusive": band.most,
        "counts": counts,
        "histogram": [list(correct.values()).count(number) for number in range(samples + 1)],
        "config": json.loads(config_lib.to_json(config)),
    }
    # The manifest first: `OutputFiles.check` refuses an output without one.
    write_atomically(files.manifest, json.dumps(manifest, indent=2) + "\n")
    write_atomically(files.output, text)
    output, described = buckets.origin(files.output), buckets.origin(files.manifest)
    print(f"{len(chosen):,} prompts with {band} are in {output}, the manifest is {described}")
    if warning := few_prompts(len(chosen), config.collection.prompts_per_iteration):
        print(warning, file=sys.stderr)


def _drawn(
    config: Config,
    components: Components,
    prompts: Sequence[Prompt],
    files: OutputFiles,
    verifiers: VerifierPool,
    samples: int,
    describe: Callable[[int, int], str],
) -> ResponseStore:
    """Returns the store with the responses to the prompts; draws those that it lacks.

    `describe` returns the text that is printed before, from the numbers of prompts and of prompts without responses.
    """
    with cli.user_input():
        fingerprint, stop_ids = adapter_files.fingerprint(components.folder), list(components.tokenizer.stop_ids)
        drawn = response_store.drawn_with(config, fingerprint, config.sampling, samples, prompts, stop_ids=stop_ids)
        header = {"drawn": drawn, "graded": response_store.graded_by(config, "", prompts)}
        store = ResponseStore(response_store.of_process(files.draws / "responses.jsonl"), header)
        missing = response_store.wanted_by_writer(prompts, store.missing(prompts, samples))
        compilation = EarlyCompilation()
        ready = compilation.add(components.engine.programs() if missing else {})
        params = components_lib.load_params(config, components, config.model.compute_dtype) if missing else None
    if processes.is_writer():
        print(describe(len(prompts), len(missing)), flush=True)
    if params is not None:
        done = len(prompts) - len(missing)
        with compilation, response_store.writing([store], len(prompts), done, "prompts") as progress:
            ready(progress.phase)
            rollouts = Rollouts(components.engine)
            verify = components.verify_fn(verifiers, Shaping(config.reward.positive_threshold))
            draw = fixed_draws.from_policy(params, rollouts, config.sampling, stream(0), config, components, verify)
            saved = f"Graded responses are stored in {buckets.origin(files.draws)}"
            fixed_draws.fill(store, missing, functools.partial(draw, samples=samples), progress, saved, rollouts)
            store.finish(prompts)
    return store


def prepare(
    config: Config,
    source: str,
    files: OutputFiles,
    pass_rates: tuple[float, float],
    samples: int,
    *,
    cost: fixed_draws.Cost | None = None,
) -> None:
    """Writes the problems of `source` whose pass rates are in (pass_rates[0], pass_rates[1]].

    Duplicates, too long problems, and problems whose reference fails its own verification are left out. For each of the
    others `samples` responses are drawn, at addresses that no iteration of a training uses. With `cost` it is a dry
    run: the input is checked and described, and nothing is written.
    """
    with cli.user_input():
        band = Band(*pass_rates)
        values.MANY.check("--samples", samples)
        band.check(samples)
        files.check(source)
        changes = {"data.prompts": source, "evaluation.benchmarks": (), "evaluation.graders": (), "lora.rank": 0}
        config = config_lib.check(config_lib.replaced(config, changes))
        config = components_lib.for_devices(response_store.with_stored_dtype(config, [files.draws / "responses.jsonl"]))
        problems = components_lib.load_problems(source, config)
        components = components_lib.build(config, components_lib.model_folder(config.model.path))
        processes.check_same("the configurations", config_lib.to_json(config))
        verifier_pool = components_lib.verifier_pool(config, files.draws)
        prompts, counts = _unique_and_short(config, components, problems)
        components = components_lib.for_responses(config, components, prompts, samples)
        processes.check_same("the problems", response_store.hash_of_problems(prompts))
        reward = reward_check.check_reward(config, verifier_pool, prompts[:1])
        if cost is not None or not files.draws.exists():
            huggingface.check_weights(components.folder, components.architecture)

    def describe(found: int, missing: int) -> str:
        model = summary.model_and_memory(config, components, str(components.folder))
        read, sets = [description(source, problems)], {source: (found, missing)}
        return summary.drawing(model, sets, read, samples, config.sampling, files.output, reward=reward)

    if cost is not None:
        if processes.is_writer():
            taken = cost(config, components, samples * len(prompts), config.sampling.max_response_tokens)
            print(summary.dry_run(config, f"{describe(len(prompts), len(prompts))}\n{taken}"))
        return
    keep_programs(config.logging.compilation_cache)
    with verifier_pool as verifiers:
        passed = _with_valid_reference(config, prompts, files, verifiers)
        counts["reference_fails"] = len(prompts) - len(passed)
        warning = few_prompts(len(passed), config.collection.prompts_per_iteration)
        if warning and processes.is_writer():
            print(warning, file=sys.stderr)  # no band of pass rates can keep enough
        store = _drawn(config, components, passed, files, verifiers, samples, describe)
    drawn = store.complete(passed, samples) if processes.is_writer() else {}
    remedy = f"Fix it, remove {buckets.origin(store.file)} and its header, and run the same command again."
    fixed_draws.check_graded(config, verifiers, "the problems", [drawn], remedy)
    if processes.is_writer():
        verdicts = [response.verdict for responses in drawn.values() for response in responses]
        kind, share = "" if config.reward.path else config.reward.kind, reward_check.share_without_answer(verdicts)
        flag = "--config.reward.kind=gsm8k"
        if warning := reward_check.without_answer(kind, share, f" in {buckets.origin(store.file)}", flag):
            print(f"warning: {warning}", file=sys.stderr)
        _write(config, files, problems, num_correct(drawn), counts, band, store)
    processes.any_of(False)  # waits until process 0 has written everything
