"""Files of graded responses, so that a command that was killed continues where it stopped.

A store is NAME.jsonl, one response per line, and NAME.header.json, which says how they were drawn and graded. Each line
is added as soon as its response is graded. The address of a sample decides its randomness, so responses that a kill
lost are drawn again with the same tokens. scores.py computes the results.

With several processes, process 0 writes the store. Each other process writes the responses that it graded to a part of
the store, NAME.part-K.jsonl, until process 0 has them.
"""

import collections
import contextlib
import dataclasses
import fcntl
import glob
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from reinforce_ada_jax import cli
from reinforce_ada_jax.config import Config, EvaluationConfig, SamplingConfig, replaced
from reinforce_ada_jax.config.resume import shortened
from reinforce_ada_jax.config.values import DTYPES
from reinforce_ada_jax.data.problems import json_hash
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.environments.loading import file_hash
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.durable import HEADER, finished_lines, read_object, read_records, write_atomically
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.rewards import code_tests
from reinforce_ada_jax.rewards.loading import files_hash, judge_template
from reinforce_ada_jax.types import Prompt, Response, Verdict

# Lines graded again at a time: enough to keep every worker busy, few enough to hold their texts in memory.
REGRADED_AT_ONCE = 1024
PART = ".part-"

Header = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class GradedResponse:
    tokens: int  # number of sampled tokens, including the stop token
    truncated: bool
    verdict: Verdict

    @classmethod
    def of(cls, response: Response, verdict: Verdict) -> "GradedResponse":
        return cls(response.num_sampled, response.truncated, verdict)


# By prompt id; the responses of a prompt in the order of their draws.
GradedResponses = dict[str, list[GradedResponse]]


def drawn_with(
    config: Config,
    fingerprint: str,
    settings: SamplingConfig | EvaluationConfig,
    samples: int,
    prompts: Sequence[Prompt],
    **details: Any,
) -> dict[str, Any]:
    """Returns the part of a header that decides the responses.

    `fingerprint` identifies the weights; `settings` is the section with temperature, top_k, top_p and the length limit.
    """
    keys, environment = ("temperature", "top_k", "top_p", "max_response_tokens"), config.environment
    trajectories = {
        "environment": environment.path,
        "environment_file": file_hash(environment.path),
        "max_turns": environment.max_turns,
        "max_turn_tokens": environment.max_turn_tokens,
        "columns": columns_hash(prompts),
    }
    return {
        "model": fingerprint,
        "compute_dtype": config.model.compute_dtype,
        **{key: getattr(config.sampling, key) for key in ("kv_dtype", "weight_dtype")},
        "seed": config.seed,
        "samples": samples,
        **{key: getattr(settings, key) for key in keys},
        **details,
        **(trajectories if environment.path else {}),
        **{key: getattr(config.data, key) for key in ("template", "system", "instruction")},
        "problems": hash_of_problems(prompts),
    }


def graded_by(config: Config, grader: str, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Returns the part of a header that decides the verdicts; `grader` is a benchmark's own kind of reward, or ""."""
    reward = config.reward
    of_user = bool(reward.path) and not grader
    kind, settings = "" if of_user else grader or reward.kind, {}
    if kind == "code":
        tests = code_tests.tests_hash(prompt.columns for prompt in prompts)
        settings = {"code": dataclasses.asdict(config.code), "tests": tests}
    if kind == "judge":
        section = dataclasses.asdict(config.judge) | {"template": judge_template(config.judge.template)}
        settings = {"judge": section | {"range": list(config.judge.range)}}  # a list, as it is read from JSON
    return {
        "reward": grader or reward.path or reward.kind,
        "file": files_hash(reward.path) if of_user else "",
        **({"completions": reward.completions} if of_user else {}),
        **({"columns": columns_hash(prompts)} if of_user or kind == "judge" else {}),
        **settings,
        "positive_threshold": reward.positive_threshold,
        "answers": json_hash([prompt.answer for prompt in prompts]),
    }


def hash_of_problems(prompts: Iterable[Prompt]) -> str:
    """Returns the hash of ids and texts that identifies the problems in a header."""
    return json_hash([(prompt.id, prompt.source_text) for prompt in prompts])


def columns_hash(prompts: Iterable[Prompt]) -> str:
    """Returns the hash of the columns of problems, which a reward of the user or an environment gets."""
    return json_hash([prompt.columns for prompt in prompts])


def of_process(file: pathlib.Path) -> pathlib.Path:
    """Returns the file that this process adds to: the store in process 0, else a part of it."""
    index = processes.index()
    return file.with_name(f"{file.stem}{PART}{index}{file.suffix}") if index else file


def wanted_by_writer(prompts: Iterable[Prompt], wanted: Iterable[Prompt]) -> list[Prompt]:
    """Returns in every process the prompts that process 0 has in `wanted`; the `wanted` of others is ignored."""
    ids = set(json.loads(processes.of_writer(json.dumps([prompt.id for prompt in wanted]))))
    return [prompt for prompt in prompts if prompt.id in ids]


def read_header(file: pathlib.Path) -> Header:
    """Returns the header of an existing store; ValueError if there is none, or it is no header."""
    header = file.with_suffix(HEADER)
    if file.exists() and not header.exists():
        lacking = buckets.origin(header)
        raise ValueError(f"{lacking} is missing, which says what {file.name} holds: remove or rename it.")
    if not header.exists():
        raise ValueError(f"there are no stored responses {buckets.origin(file)}: evaluate without --regrade first.")
    remedy = f"It says what {file.name} holds: restore it, or remove both."
    found = read_object(header, remedy)
    if not all(isinstance(found.get(part), dict) for part in ("drawn", "graded")):
        raise ValueError(f"{buckets.origin(header)} has no objects drawn and graded. {remedy}")
    return found


def check_model(folder: pathlib.Path, fingerprint: str) -> None:
    """Raises ValueError if `folder` holds responses of other weights: a folder has the results of one model."""
    for header in sorted(folder.glob(f"*{HEADER}")):
        file = header.with_name(header.name.removesuffix(HEADER) + ".jsonl")
        stored = read_header(file)["drawn"].get("model") if file.exists() and file.stat().st_size else fingerprint
        if stored != fingerprint:
            raise ValueError(
                f"{buckets.origin(file)} holds responses of another model (fingerprint {stored!s:.12}, now "
                f"{fingerprint:.12}), and one folder has the results of one model: give another --output, or remove "
                "its files."
            )


def with_stored_dtype(config: Config, files: Iterable[pathlib.Path]) -> Config:
    """Returns `config` with the dtype of the first existing store in place of model.compute_dtype "auto".

    On a busy machine "auto" might measure another dtype than before, and the same command would be refused.
    """
    headers = [file for file in files if file.exists() and file.with_suffix(HEADER).exists()]
    if not headers or config.model.compute_dtype != "auto" or processes.count() > 1:
        return config
    dtype = read_header(headers[0])["drawn"].get("compute_dtype")
    return replaced(config, {"model.compute_dtype": dtype}) if dtype in DTYPES else config


def _parsed(row: Any) -> tuple[dict[str, Any], GradedResponse]:
    verdict = Verdict(row["correct"], float(row["reward"]), str(row["reason"]))
    return row, GradedResponse(int(row["tokens"]), row["truncated"], verdict)


def _line(prompt_id: str, draw: int, text: str, graded: GradedResponse) -> str:
    row = {"prompt": prompt_id, "draw": draw, "response": text, "tokens": graded.tokens, "truncated": graded.truncated}
    verdict = dataclasses.asdict(graded.verdict)
    if not verdict["rewards"]:
        del verdict["rewards"]
    return json.dumps(row | verdict, ensure_ascii=False) + "\n"


def _differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns lines "key: stored -> now" for one part of a header; "" if the two are equal."""
    now = json.loads(json.dumps(now))
    lines = [
        f"{key}: {stored.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in dict.fromkeys([*stored, *now])
        if stored.get(key, KeyError) != now.get(key, KeyError)
    ]
    return shortened(lines) if lines else ""


class ResponseStore:
    """Graded responses of one set of prompts, in one file. Enter it to add responses; nothing is written before.

    `header` is {"drawn": ..., "graded": ...} of the responses that will be added. Raises ValueError if stored responses
    were drawn or graded differently; with `regrade` another grader is allowed.
    """

    def __init__(self, file: pathlib.Path, header: Header, *, regrade: bool = False):
        self.file, self.header, self._regrade = file, header, regrade
        self._header_file = file.with_suffix(HEADER)
        self._by_draw: dict[str, dict[int, GradedResponse]] = collections.defaultdict(dict)
        if self._size():
            self._check()
        pattern = f"{glob.escape(file.stem)}{PART}*{file.suffix}"
        self._parts = [ResponseStore(part, header, regrade=regrade) for part in sorted(file.parent.glob(pattern))]
        self._read()

    def _size(self) -> int:
        return self.file.stat().st_size if self.file.exists() else 0

    def _check(self) -> None:
        named, stored = buckets.origin(self.file), read_header(self.file)
        if lines := _differences(stored["drawn"], self.header["drawn"]):
            raise ValueError(
                f"{named} holds responses that were drawn with other settings (stored -> now):\n{lines}\nContinue "
                "with the stored values, give another --output, or remove the file to draw again."
            )
        lines = _differences(stored["graded"], self.header["graded"])
        if lines and not self._regrade:
            raise ValueError(
                f"{named} holds responses that were graded differently (stored -> now):\n{lines}\nGrade them again "
                "(evaluate has --regrade), continue with the stored values, or remove the file to draw again."
            )

    def _rows(self) -> Iterator[tuple[dict[str, Any], GradedResponse]]:
        remedy = "Remove the line (the response is drawn again), or the file."
        return read_records(self.file, _parsed, "a stored response", remedy)

    def _read(self) -> None:
        self._by_draw.clear()
        self._seen_bytes = self._size()
        for row, graded in self._rows():
            self._by_draw[row["prompt"]].setdefault(row["draw"], graded)

    def __len__(self) -> int:
        return sum(map(len, self._by_draw.values()))

    def __enter__(self) -> "ResponseStore":
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            self._stream = opened.enter_context(self.file.open("ab"))
            try:
                fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(
                    f"{buckets.origin(self.file)} is being written by another process: wait for it, or end it."
                ) from error
            # Only with the lock: the header describes the responses of the process that holds it.
            if not self._size():  # a header without responses belongs to a file that was removed
                self._write_header()
            else:
                self._check()
            if self._size() != self._seen_bytes:  # another process has written after this one read
                self._read()
            os.truncate(self.file, sum(map(len, finished_lines(self.file))))
            for part in self._parts:
                self._take_over(part)
            opened.pop_all()
        self._parts = []
        return self

    def _take_over(self, part: "ResponseStore") -> None:
        """Adds the responses of a part, and removes the part if no process of this run writes to it."""
        for row, graded in part._rows():
            if row["draw"] not in self._by_draw[row["prompt"]]:
                self._by_draw[row["prompt"]][row["draw"]] = graded
                self._stream.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
        self._stream.flush()
        owner = part.file.stem.rpartition(PART)[2]
        if owner not in map(str, range(processes.count())):
            part.remove()

    def remove(self) -> None:
        for file in (self.file, self._header_file):
            file.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def _write_header(self) -> None:
        write_atomically(self._header_file, json.dumps(self.header, indent=2) + "\n")

    def complete(self, prompts: Iterable[Prompt], samples: int) -> GradedResponses:
        """Returns the responses of the prompts that have all `samples` of them, in the store or in its parts."""
        found: GradedResponses = {}
        for prompt in prompts:
            draws = collections.ChainMap(*(each._by_draw.get(prompt.id, {}) for each in (self, *reversed(self._parts))))
            if len(draws) == samples:
                found[prompt.id] = [draws[draw] for draw in range(samples)]
        return found

    def missing(self, prompts: Iterable[Prompt], samples: int) -> list[Prompt]:
        return [prompt for prompt in prompts if not self.complete([prompt], samples)]

    def add(self, entries: Iterable[tuple[str, int, str, GradedResponse]]) -> None:
        """Writes (prompt id, draw, text, response); a draw that is stored already is not written again."""
        lines = []
        for prompt_id, draw, text, graded in entries:
            if draw not in self._by_draw[prompt_id]:
                self._by_draw[prompt_id][draw] = graded
                lines.append(_line(prompt_id, draw, text, graded))
        self._stream.write("".join(lines).encode())
        self._stream.flush()

    def finish(self, prompts: Iterable[Prompt]) -> None:
        """Sorts the responses and removes the parts, after all are added; every process must call it."""
        if processes.is_writer():
            self._sort({prompt.id: number for number, prompt in enumerate(prompts)})
        processes.any_of(False)  # from now on no part is needed
        if not processes.is_writer():
            self.remove()

    def _sort(self, numbers: Mapping[str, int]) -> None:
        partial, begins, begin = self.file.with_name(f"{self.file.name}.partial"), {}, 0
        with self.file.open("rb") as stored, partial.open("wb") as ordered:
            for line in stored:
                row = json.loads(line)
                begins.setdefault((numbers[row["prompt"]], row["draw"]), begin)
                begin += len(line)
            for _, begin in sorted(begins.items()):
                stored.seek(begin)
                ordered.write(stored.readline())
        partial.replace(self.file)

    def regrade(self, grade: Callable[[list[tuple[str, str]], list[int]], list[Verdict]]) -> Iterator[int]:
        """Writes the file again with new verdicts; yields the number of responses graded so far.

        `grade` takes (prompt id, text) pairs and token counts.
        """
        partial = self.file.with_name(f"{self.file.name}.partial")
        done = 0
        with partial.open("w", encoding="utf-8") as stream:
            stored = self._rows()
            while rows := [row for row, _ in itertools.islice(stored, REGRADED_AT_ONCE)]:
                pairs = [(row["prompt"], row["response"]) for row in rows]
                for row, verdict in zip(rows, grade(pairs, [row["tokens"] for row in rows]), strict=True):
                    graded = GradedResponse(row["tokens"], row["truncated"], verdict)
                    self._by_draw[row["prompt"]][row["draw"]] = graded
                    stream.write(_line(row["prompt"], row["draw"], row["response"], graded))
                done += len(rows)
                yield done
        # The header comes last: after a kill between the two, the old header still asks for --regrade.
        partial.replace(self.file)
        self._write_header()


def pass_rates(file: pathlib.Path, prompts: Iterable[Prompt]) -> dict[str, float]:
    """Returns pass rates by prompt id from an earlier evaluation's store; ValueError unless it has all prompts."""
    prompts = list(prompts)
    if not file.with_suffix(HEADER).exists():
        raise ValueError(f"there are no stored responses {file}: --initial names the folder of an earlier evaluation.")
    header = read_header(file)
    if header["drawn"]["problems"] != hash_of_problems(prompts):
        raise ValueError(
            f"{file} holds responses to other problems than the benchmark's: evaluate that policy on the same problems."
        )
    found = ResponseStore(file, header, regrade=True).complete(prompts, header["drawn"]["samples"])
    if len(found) < len(prompts):
        raise ValueError(
            f"{file} has all its responses for {len(found):,} of {len(prompts):,} problems: finish that evaluation "
            "first (the same command again)."
        )
    return {name: sum(response.verdict.correct for response in draws) / len(draws) for name, draws in found.items()}


@contextlib.contextmanager
def writing(stores: Iterable[ResponseStore], total: int, done: int, unit: str) -> Iterator[Progress]:
    """Opens the stores for adding responses, and yields a progress line; ends the process if one cannot be opened."""
    with contextlib.ExitStack() as stack:
        with cli.user_input():
            for store in stores:
                stack.enter_context(store)
        progress = Progress(total, done, unit, quiet=not processes.is_writer())
        yield stack.enter_context(contextlib.closing(progress))
