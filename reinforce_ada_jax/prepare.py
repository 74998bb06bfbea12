"""Prompts to train on, chosen from problems by how often a model solves them.

    python -m reinforce_ada_jax.prepare --config=configs/qwen_1p5b.py --input=problems.jsonl --output=prompts.jsonl \\
        --max_pass_rate=0.125

Kept are problems that are there once, whose prompt is no longer than data.max_prompt_tokens, whose reference answer
passes its own verification, and of which the model (model.path) solves a share p, min_pass_rate < p <= max_pass_rate,
of --samples draws made as in training (the `sampling` section). With the default of 0 for the first, those never
solved are left out: the paper's hard set is 0 < p <= 0.125, its easy one 0 < p <= 0.313, of 16 draws (arXiv
2510.04996).

Beside prompts.jsonl stand prompts.manifest.json, which says what was left out and why, and the folder prompts.draws,
which keeps every response: the same command goes on after a kill, and another band is chosen without drawing anew.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import sys
import unicodedata
from collections.abc import Iterator, Sequence

from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.data.problems import Problem, problems_hash
from reinforce_ada_jax.data.prompts import load_problems, tokenize
from reinforce_ada_jax.data.templates import chat_from_config
from reinforce_ada_jax.evaluation import response_store
from reinforce_ada_jax.evaluation.response_store import Graded, Responses, Store
from reinforce_ada_jax.policy import adapter_files
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting.files import write_atomically
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.rewards.shaping import Shaping
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.sampling.token import stream
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import summary
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.types import Prompt, Verdict

SAMPLES, MIN_PASS_RATE, MAX_PASS_RATE = 16, 0.0, 0.313
# Reference answers graded at a time, after which they are on disk.
VERIFIED_AT_ONCE = 256
BAR_WIDTH = 40


@dataclasses.dataclass(frozen=True)
class Band:
    """Which pass rates are wanted: above `least`, up to `most` and that included."""

    least: float
    most: float

    def __post_init__(self):
        if not 0.0 <= self.least < self.most <= 1.0:
            raise ValueError(
                f"--min_pass_rate is {self.least:g} and --max_pass_rate {self.most:g}; both must be in [0, 1], the "
                "first below the second: kept is what lies above the first, up to and with the second."
            )

    def __contains__(self, pass_rate: float) -> bool:
        return self.least < pass_rate <= self.most

    def __str__(self) -> str:
        return f"{self.least:g} < pass rate <= {self.most:g}"


@dataclasses.dataclass(frozen=True)
class Files:
    """What the command writes."""

    output: pathlib.Path

    @property
    def manifest(self) -> pathlib.Path:
        return self.output.with_suffix(".manifest.json")

    @property
    def draws(self) -> pathlib.Path:
        return self.output.with_suffix(".draws")

    def check(self, source: str) -> None:
        """Raises ValueError where the output would overwrite what isn't this command's."""
        if self.output.suffix != ".jsonl":
            raise ValueError(f"--output is {self.output}; it must end with .jsonl: it gets one problem a line.")
        if self.output.exists() and not self.manifest.exists():
            raise ValueError(f"{self.output} exists and is not of this command's making: give another --output.")
        if pathlib.Path(source).exists() and self.output.resolve() == pathlib.Path(source).resolve():
            raise ValueError(f"--input and --output are both {self.output}: give another --output.")


# ---- what needs no model ---------------------------------------------------------------------------------------------


def normalized(problem: str) -> str:
    """A problem's text as it is compared: Unicode's composed form, runs of white space as one space. Case counts."""
    return " ".join(unicodedata.normalize("NFC", problem).split())


def first_of_each(problems: Sequence[Problem]) -> list[Problem]:
    """The problems without those whose text came before, whatever their answers."""
    firsts: dict[str, Problem] = {}
    for problem in problems:
        firsts.setdefault(normalized(problem["problem"]), problem)
    return list(firsts.values())


def verify_references(
    prompts: Sequence[Prompt], store: Store, verifiers: VerifierPool, shaping: Shaping, progress: Progress
) -> None:
    r"""Grades each reference answer against itself, in a box (`\boxed{72}`) or, where that fails, as it is (`72`).

    Which of the two a verifier reads is its own affair; a reference that passes neither way can't be matched.
    """
    for first in range(0, len(prompts), VERIFIED_AT_ONCE):
        some = prompts[first : first + VERIFIED_AT_ONCE]
        texts = [rf"\boxed{{{prompt.answer}}}" for prompt in some]
        verdicts = _graded(texts, some, verifiers, shaping)
        failed = [place for place, verdict in enumerate(verdicts) if not verdict.correct]
        again = _graded([some[place].answer for place in failed], [some[place] for place in failed], verifiers, shaping)
        for place, verdict in zip(failed, again, strict=True):
            if verdict.correct:
                texts[place], verdicts[place] = some[place].answer, verdict
        store.add(
            (prompt.id, 0, text, Graded(0, False, verdict))
            for prompt, text, verdict in zip(some, texts, verdicts, strict=True)
        )
        progress.reach(progress.done + len(some))


def _graded(
    texts: Sequence[str], prompts: Sequence[Prompt], verifiers: VerifierPool, shaping: Shaping
) -> list[Verdict]:
    pairs = [(text, prompt.answer) for text, prompt in zip(texts, prompts, strict=True)]
    return shaping.all(verifiers.grade_all(pairs), [0] * len(pairs))


# ---- the draws -------------------------------------------------------------------------------------------------------


def draw(
    config: Config,
    components: Components,
    params: Params,
    prompts: Sequence[Prompt],
    store: Store,
    verifiers: VerifierPool,
    samples: int,
    progress: Progress,
) -> None:
    """Draws and grades `samples` responses of each prompt, with addresses that no iteration of a training has."""
    sampling = config.sampling
    rollouts = Rollouts(components.engine)
    done = progress.done
    response_store.draw(
        prompts,
        rollouts.sampler(
            params,
            stream=stream(0),
            sampling=SamplingParams(
                sampling.max_response_tokens, sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
            ),
        ),
        components.verify_fn(verifiers, Shaping(config.reward.positive_threshold)),
        samples,
        slots=components.engine.options.slots * components.engine.replicas,
        deterministic=components_lib.deterministic(config),
        store=store,
        decode=components.tokenizer.decode,
        on_progress=lambda closed, drawn: progress.reach(done + closed, f"{drawn:,} responses"),
    )


# ---- what comes of it ------------------------------------------------------------------------------------------------


def num_correct(drawn: Responses) -> dict[str, int]:
    """Correct responses by problem id."""
    return {name: sum(response.verdict.correct for response in draws) for name, draws in drawn.items()}


def histogram(correct: Sequence[int], samples: int, band: Band) -> str:
    """Problems by pass rate as lines of text; a star marks what the band keeps."""
    counts = collections.Counter(correct)
    most = max(counts.values())
    lines = ["pass rate  problems"]
    for number in range(samples + 1):
        kept = "*" if number / samples in band else " "
        bar = "#" * -(-counts[number] * BAR_WIDTH // most)
        lines.append(f"{number / samples:9.3f} {kept} {counts[number]:7,}  {bar}".rstrip())
    return "\n".join(lines)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _line(problem: Problem, pass_rate: float) -> str:
    row = {key: problem[key] for key in ("id", "problem", "answer")} | {"pass_rate": pass_rate}
    return json.dumps(row | problem.get("labels", {}), ensure_ascii=False) + "\n"


def _input_hash(source: str, problems: Sequence[Problem]) -> str:
    """Of a file's bytes, or of what another source gave."""
    file = pathlib.Path(source)
    return _sha256(file.read_bytes() if file.is_file() else json.dumps(list(problems)).encode())


def write(
    config: Config,
    files: Files,
    source: str,
    problems: Sequence[Problem],
    correct: dict[str, int],
    counts: dict[str, int],
    band: Band,
    header: response_store.Header,
) -> None:
    """Chooses, and writes the prompts and the manifest; says what was left out.

    Args:
      source: of the problems.
      problems: as read.
      correct: correct responses of those that were drawn for, by id.
      counts: problems by what became of them so far.
      band: which pass rates are wanted.
      header: of the stored responses.
    """
    samples = header["drawn"]["samples"]
    rates = {name: number / samples for name, number in correct.items()}
    chosen = [problem for problem in problems if rates.get(problem["id"], -1.0) in band]
    counts["pass_rate_too_low"] = sum(rate <= band.least for rate in rates.values())
    counts["pass_rate_too_high"] = sum(rate > band.most for rate in rates.values())
    counts["kept"] = len(chosen)
    print(histogram(list(correct.values()), samples, band))
    print(", ".join(f"{reason.replace('_', ' ')} {count:,}" for reason, count in counts.items()))
    if not chosen:
        cli.fail(
            f"no prompt has {band}, so nothing is written. Move --min_pass_rate and --max_pass_rate to where the "
            f"prompts are (the same command chooses again without drawing: {files.draws} has the responses)."
        )
    text = "".join(_line(problem, rates[problem["id"]]) for problem in chosen)
    manifest = {
        "input": {"source": source, "sha256": _input_hash(source, problems)},
        "output": {"file": files.output.name, "sha256": _sha256(text.encode())},
        "model": {"path": config.model.path, "fingerprint": header["drawn"]["model"]},
        "seed": config.seed,
        "samples": samples,
        "min_pass_rate_exclusive": band.least,
        "max_pass_rate_inclusive": band.most,
        "counts": counts,
        "histogram": [list(correct.values()).count(number) for number in range(samples + 1)],
        "config": json.loads(config_lib.to_json(config)),
    }
    # The manifest first: an output without one is taken for somebody else's.
    write_atomically(files.manifest, json.dumps(manifest, indent=2) + "\n")
    write_atomically(files.output, text)
    print(f"{len(chosen):,} prompts with {band} are in {files.output}, what was left out in {files.manifest}")


# ---- the command -----------------------------------------------------------------------------------------------------


def _header(config: Config, components: Components, prompts: Sequence[Prompt], samples: int) -> response_store.Header:
    sampling = {key: getattr(config.sampling, key) for key in ("temperature", "top_k", "top_p", "max_response_tokens")}
    sampling |= {"stop_ids": list(components.tokenizer.stop_ids)}
    drawn = response_store.drawn_with(config, adapter_files.fingerprint(components.folder), sampling, samples)
    return {
        "drawn": drawn | {"problems": problems_hash((prompt.id, prompt.problem) for prompt in prompts)},
        "graded": response_store.graded_by(config, "", [prompt.answer for prompt in prompts]),
    }


def _missing(prompts: Sequence[Prompt], store: Store, samples: int) -> list[Prompt]:
    there = store.of((prompt.id for prompt in prompts), samples)
    return [prompt for prompt in prompts if prompt.id not in there]


@contextlib.contextmanager
def _adding(store: Store, total: int, missing: int, unit: str) -> Iterator[Progress]:
    """The store, entered, and a progress line over what it gets."""
    with contextlib.ExitStack() as stack:
        with cli.user_input():
            stack.enter_context(store)
        yield stack.enter_context(contextlib.closing(Progress(total, total - missing, unit)))


def _unique_and_short(
    config: Config, components: Components, problems: Sequence[Problem]
) -> tuple[list[Prompt], dict[str, int]]:
    """(prompts worth verifying, problems read and left out so far)."""
    unique = first_of_each(problems)
    data = config.data
    prompts = tokenize(unique, components.tokenizer, data.template, sys.maxsize, chat_from_config(config))
    short = [prompt for prompt in prompts if len(prompt.tokens) <= data.max_prompt_tokens]
    if not short:
        raise ValueError(
            f"none of {len(unique):,} prompts has at most {data.max_prompt_tokens:,} tokens: raise "
            "data.max_prompt_tokens."
        )
    duplicates = len(problems) - len(unique)
    return short, {"read": len(problems), "duplicate": duplicates, "too_long": len(prompts) - len(short)}


def _verified(config: Config, prompts: Sequence[Prompt], files: Files, verifiers: VerifierPool) -> list[Prompt]:
    """The prompts whose references pass; the verdicts are stored, as a time limit is not the same twice."""
    with cli.user_input():
        store = Store(files.draws / "references.jsonl", {
            "drawn": {"problems": problems_hash((prompt.id, prompt.problem) for prompt in prompts)},
            "graded": response_store.graded_by(config, "", [prompt.answer for prompt in prompts]),
        })  # fmt: skip
    if missing := _missing(prompts, store, 1):
        with _adding(store, len(prompts), len(missing), "references") as progress:
            verify_references(missing, store, verifiers, Shaping(config.reward.positive_threshold), progress)
    correct = num_correct(store.of((prompt.id for prompt in prompts), 1))
    passed = [prompt for prompt in prompts if correct[prompt.id]]
    if not passed:
        cli.fail(
            f"none of {len(prompts):,} reference answers passes its own verification by "
            f"{config.reward.path or config.reward.kind!r}: choose the reward that fits them. The verdicts are in "
            f"{store.file}."
        )
    return passed


def prepare(config: Config, source: str, files: Files, pass_rates: tuple[float, float], samples: int) -> None:
    """Reads, verifies, draws, chooses, writes."""
    with cli.user_input():
        band = Band(*pass_rates)
        if samples < 1:
            raise ValueError(f"--samples is {samples}; it must be at least 1.")
        files.check(source)
        nothing = {"evaluation.benchmarks": (), "evaluation.graders": ()}
        config = config_lib.check(config_lib.replaced(config, {"data.prompts": source} | nothing))
        problems = load_problems(source)
        components = components_lib.build(config, components_lib.model_folder(config.model.path))
        verifier_pool = components_lib.verifier_pool(config)
        prompts, counts = _unique_and_short(config, components, problems)
    with verifier_pool as verifiers:
        passed = _verified(config, prompts, files, verifiers)
        counts["reference_fails"] = len(prompts) - len(passed)
        with cli.user_input():
            store = Store(files.draws / "responses.jsonl", _header(config, components, passed, samples))
            missing = _missing(passed, store, samples)
            params = components_lib.load_params(config, components, config.model.compute_dtype) if missing else None
        shown = {source: (len(passed), len(missing))}
        who = str(components.folder)
        print(summary.drawing(config, components, who, shown, samples, config.sampling, files.output), flush=True)
        if params is not None:
            with _adding(store, len(passed), len(missing), "prompts") as progress:
                draw(config, components, params, missing, store, verifiers, samples, progress)
    correct = num_correct(store.of((prompt.id for prompt in passed), samples))
    write(config, files, source, problems, correct, counts, band, store.header)


def main(config: Config, source: str, output: pathlib.Path, pass_rates: tuple[float, float], samples: int) -> None:
    """`prepare`, which Ctrl-C ends with a word."""
    files = Files(output)
    with cli.interruptible(f"What is graded is kept in {files.draws}"):
        prepare(config, source, files, pass_rates, samples)


if __name__ == "__main__":
    CONFIG = cli.define_config()
    INPUT = flags.DEFINE_string(
        "input", None, "Problems: a JSONL file, or any other source that data.prompts may name.", required=True
    )
    OUTPUT = flags.DEFINE_string("output", None, "The JSONL file of prompts to write.", required=True)
    LEAST = flags.DEFINE_float("min_pass_rate", MIN_PASS_RATE, "Pass rates must lie above it (exclusive).")
    MOST = flags.DEFINE_float("max_pass_rate", MAX_PASS_RATE, "Pass rates may reach it (inclusive).")
    COUNT = flags.DEFINE_integer("samples", SAMPLES, "Responses drawn for each problem.")
    cli.run(
        lambda: main(
            config_lib.resolve(CONFIG.value),
            INPUT.value,
            pathlib.Path(OUTPUT.value),
            (LEAST.value, MOST.value),
            COUNT.value,
        )
    )
