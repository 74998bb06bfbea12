"""Responses drawn and graded, and the files that keep them, so that a command that was killed goes on from there.

A store is NAME.jsonl, one response a line, and beside it NAME.header.json, which says what they were drawn with and
graded by. Lines are only ever added, a prompt's together, as soon as they are graded. A sample's randomness is its
address, so whatever a kill took is drawn again to the token. What is made of them is evaluate.py's and prepare.py's.
"""

import collections
import dataclasses
import fcntl
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

import numpy as np

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import SampleFn, VerifyFn, collect
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.data.problems import json_hash
from reinforce_ada_jax.reporting.files import write_atomically
from reinforce_ada_jax.training.sharded_collection import draw_everywhere
from reinforce_ada_jax.types import Prompt, Response, Verdict

# Lines graded again at a time: enough to keep every worker busy, few enough to be held with their texts.
REGRADED_AT_ONCE = 1024
# `draw` opens so many turns of all slots at a time. Their token arrays are held until the last one ends; the idle slots
# of the end are then 1/64 or so of the work.
TURNS_AT_ONCE = 64

HEADER = ".header.json"
Header = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Graded:
    """One graded response as statistics see it.

    Attributes:
      tokens: how many, the stop token included.
      truncated: as `Response.truncated`.
      verdict: what the verifier said.
    """

    tokens: int
    truncated: bool
    verdict: Verdict


# By prompt id; a prompt's responses in the order of their draws.
Responses = dict[str, list[Graded]]


def drawn_with(config: Config, model: str, sampling: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """The part of a header that decides the responses; `problems` (`problems_hash`) is still to be added.

    Args:
      config: its seed, precision and template count.
      model: fingerprint of the weights.
      sampling: temperature, limits, what ends a response.
      samples: responses a prompt.
    """
    return {
        "model": model,
        **{key: getattr(config.model, key) for key in ("parameter_dtype", "compute_dtype")},
        "seed": config.seed,
        "samples": samples,
        **sampling,
        **{key: getattr(config.data, key) for key in ("template", "system", "instruction", "date")},
    }


def graded_by(config: Config, grader: str, answers: Iterable[str]) -> dict[str, Any]:
    """The part of a header that decides the verdicts; `grader` as for `Parts.verify_fn`."""
    reward = config.reward
    of_user = bool(reward.path) and not grader
    return {
        "reward": grader or reward.path or reward.kind,
        # A function that was edited is another one.
        "file": json_hash(pathlib.Path(reward.path.rpartition(":")[0]).read_text("utf-8")) if of_user else "",
        "positive_threshold": reward.positive_threshold,
        "answers": json_hash(list(answers)),
    }


def read_header(file: pathlib.Path) -> Header:
    """The header of a store that is there already.

    Raises:
      ValueError: there is none.
    """
    header = file.with_suffix(HEADER)
    if not header.exists():
        raise ValueError(f"there are no stored responses {file}: evaluate without --regrade first.")
    return json.loads(header.read_text("utf-8"))


def _graded(row: Mapping[str, Any]) -> Graded:
    return Graded(
        int(row["tokens"]), row["truncated"], Verdict(row["correct"], float(row["reward"]), str(row["reason"]))
    )


def _line(prompt_id: str, number: int, text: str, graded: Graded) -> str:
    row = {"prompt": prompt_id, "draw": number, "response": text}
    row |= {"tokens": graded.tokens, "truncated": graded.truncated} | dataclasses.asdict(graded.verdict)
    return json.dumps(row, ensure_ascii=False) + "\n"


def _differences(stored: Header, now: Header) -> dict[str, list[str]]:
    """Lines "key: stored -> now" for each part of a header."""
    now = json.loads(json.dumps(now))
    return {
        part: [
            f"{key}: {stored[part].get(key, 'absent')} -> {now[part].get(key, 'absent')}"
            for key in dict.fromkeys([*stored[part], *now[part]])
            if stored[part].get(key, KeyError) != now[part].get(key, KeyError)
        ]
        for part in now
    }


class Store:
    """The responses kept in one file. Enter it to add some; nothing is written before.

    Args:
      file: NAME.jsonl.
      header: {"drawn": ..., "graded": ...} of what is about to be added.
      regrade: what the stored ones were graded by may differ: `regrade` is about to be called.

    Raises:
      ValueError: the file's responses were drawn with something else, or graded by something else; or one of its lines
        can't be read.
    """

    def __init__(self, file: pathlib.Path, header: Header, *, regrade: bool = False):
        self.file, self.header = file, header
        self._header_file = file.with_suffix(HEADER)
        self._by_draw: dict[str, dict[int, Graded]] = collections.defaultdict(dict)
        self._stream = None
        if self._holds_something():
            if not self._header_file.exists():
                raise ValueError(f"{self._header_file} is missing, which says what {file} holds: remove or rename it.")
            self._check(json.loads(self._header_file.read_text("utf-8")), regrade)
        self._read()

    def _holds_something(self) -> bool:
        return self.file.exists() and self.file.stat().st_size > 0

    def _read(self) -> None:
        self._by_draw.clear()
        self._finished_bytes = 0
        self._seen_bytes = self.file.stat().st_size if self.file.exists() else 0
        for line in self._lines():
            self._by_draw[line["prompt"]].setdefault(line["draw"], _graded(line))

    def _check(self, stored: Header, regrade: bool) -> None:
        different = _differences(stored, self.header)
        if different["drawn"]:
            lines = "\n  ".join(different["drawn"])
            raise ValueError(
                f"{self.file} holds responses that were drawn otherwise (stored -> now):\n  {lines}\nGo on with the "
                "stored values, give another --output, or remove the file to draw anew."
            )
        if different["graded"] and not regrade:
            lines = "\n  ".join(different["graded"])
            raise ValueError(
                f"{self.file} holds responses that were graded otherwise (stored -> now):\n  {lines}\nGrade them "
                "again (evaluate has --regrade), go on with the stored values, or remove the file to draw anew."
            )

    def _lines(self) -> Iterator[dict[str, Any]]:
        """The finished lines; what follows the last line break was cut off by a kill."""
        if not self.file.exists():
            return
        with self.file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    row = json.loads(line)
                    _graded(row)
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{self.file}, line {number} is no stored response ({error!r}): remove the line (the response "
                        "is drawn again), or the file."
                    ) from error
                self._finished_bytes += len(line)
                yield row

    def __len__(self) -> int:
        return sum(map(len, self._by_draw.values()))

    def __enter__(self) -> Self:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if not self._holds_something():  # a header without responses is of a file that was removed
            write_atomically(self._header_file, json.dumps(self.header, indent=2) + "\n")
        self._stream = self.file.open("ab")
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._stream.close()
            raise ValueError(f"{self.file} is being written by another process: wait for it, or end it.") from error
        if self.file.stat().st_size != self._seen_bytes:  # another process has written since
            self._read()
        os.truncate(self.file, self._finished_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def of(self, prompt_ids: Iterable[str], samples: int) -> Responses:
        """The responses of those prompts that have all of theirs."""
        found = ((name, self._by_draw.get(name, {})) for name in prompt_ids)
        return {name: [draws[draw] for draw in range(samples)] for name, draws in found if len(draws) == samples}

    def add(self, entries: Iterable[tuple[str, int, str, Graded]]) -> None:
        """Writes (prompt id, draw, text, graded); what is there already stays as it is."""
        lines = []
        for prompt_id, number, text, graded in entries:
            if number not in self._by_draw[prompt_id]:
                self._by_draw[prompt_id][number] = graded
                lines.append(_line(prompt_id, number, text, graded))
        self._stream.write("".join(lines).encode())
        self._stream.flush()

    def regrade(
        self, answers: Mapping[str, str], grade: Callable[[list[tuple[str, str]], list[int]], list[Verdict]]
    ) -> Iterator[int]:
        """Writes the file anew with the verdicts of `grade` on its texts; yields how many it has graded.

        Args:
          answers: by prompt id.
          grade: (text, answer) pairs and token counts -> verdicts.
        """
        partial = self.file.with_name(f"{self.file.name}.partial")
        done = 0
        with partial.open("w", encoding="utf-8") as stream:
            lines = self._lines()
            while rows := list(itertools.islice(lines, REGRADED_AT_ONCE)):
                pairs = [(row["response"], answers[row["prompt"]]) for row in rows]
                for row, verdict in zip(rows, grade(pairs, [row["tokens"] for row in rows]), strict=True):
                    graded = Graded(row["tokens"], row["truncated"], verdict)
                    self._by_draw[row["prompt"]][row["draw"]] = graded
                    stream.write(_line(row["prompt"], row["draw"], row["response"], graded))
                done += len(rows)
                yield done
        # In this order: a kill between the two leaves a header that asks for grading again.
        partial.replace(self.file)
        write_atomically(self._header_file, json.dumps(self.header, indent=2) + "\n")


class _Recorder:
    """Hears what the verifier says beside the collection, and hands it on as soon as it is there."""

    def __init__(self, verify_fn: VerifyFn, keep: Callable[[list[tuple[Prompt, Response]], list[Verdict]], None]):
        self._verify_fn, self._keep = verify_fn, keep
        self._pending: collections.deque = collections.deque()

    def verify(self, pairs: list[tuple[Prompt, Response]]) -> list[Verdict] | Future[list[Verdict]]:
        verdicts = self._verify_fn(pairs)
        self._pending.append((pairs, verdicts))
        return verdicts

    def settle(self) -> None:
        """Keeps what is graded, in the order of the calls."""
        while self._pending:
            pairs, verdicts = self._pending[0]
            if isinstance(verdicts, Future):
                if not verdicts.done():
                    return
                verdicts = verdicts.result()
            self._pending.popleft()
            self._keep(pairs, verdicts)


def draw(
    prompts: Sequence[Prompt],
    sample_fn: SampleFn,
    verify_fn: VerifyFn,
    samples: int,
    *,
    slots: int,
    deterministic: bool,
    store: Store | None = None,
    decode: Callable[[np.ndarray], str] = str,
    on_progress: Callable[[int, int], None],
) -> Responses:
    """`samples` graded responses of every prompt, in the order of prompts.

    Args:
      prompts: with distinct ids.
      sample_fn: as for `collect`; called once for each stretch of the prompts.
      verify_fn: as for `collect`.
      samples: responses a prompt.
      slots: responses that are decoded side by side.
      deterministic: as for `collect`.
      store: entered; gets each prompt's responses as soon as they are graded.
      decode: tokens -> the text to be stored.
      on_progress: called with (prompts done, responses drawn) so far.
    """
    drawn: Responses = {}

    def keep(pairs: list[tuple[Prompt, Response]], verdicts: list[Verdict]) -> None:
        if store is not None:
            store.add(
                (prompt.id, response.draw, decode(response.tokens), _one(response, verdict))
                for (prompt, response), verdict in zip(pairs, verdicts, strict=True)
            )

    recorder = _Recorder(verify_fn, keep)
    size = max(1, TURNS_AT_ONCE * slots // samples)
    for first in range(0, len(prompts), size):

        def report(closed: int, finished: int, first: int = first) -> None:
            recorder.settle()
            on_progress(first + closed, first * samples + finished)

        collect_fn = functools.partial(
            collect,
            sample_fn=sample_fn,
            verify_fn=recorder.verify,
            deterministic=deterministic,
            on_progress=report,
        )
        for pool in draw_everywhere(prompts[first : first + size], strategies.fixed(samples), collect_fn):
            drawn[pool.prompt.id] = [_one(*pair) for pair in zip(pool.responses, pool.verdicts, strict=True)]
        recorder.settle()
    return drawn


def _one(response: Response, verdict: Verdict) -> Graded:
    return Graded(len(response.tokens), response.truncated, verdict)
