"""Hostile folders and files read as commands read them: one line each, in bounded time and memory.

    python -m tests.hostile.trials folders|files FIRST LAST     # prints a JSON object for each seed below LAST

Each seed is tried in this one process, so that an import of jax serves all. One that hangs or kills the process is the
last one printed: its verdict is missing.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
import resource
import signal
import sys
import tempfile

from reinforce_ada_jax.data.prompts import load_problems, tokenize
from reinforce_ada_jax.data.templates import Chat
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.training import components as components_lib
from tests.hostile import data_files, model_folders
from tests.running import tiny

# Processor time: the machine may have other work. SIGALRM ends the process where native code never returns.
MAX_S, MAX_BYTES, ALARM_S = 10.0, 10**9, 120


@dataclasses.dataclass(frozen=True)
class Trial:
    """Result of reading one of them; `problem` is "" where it was refused as it should be."""

    seed: int
    harm: str
    said: str
    processor_s: float
    peak_bytes: int
    problem: str


def _processor_s() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _peak_bytes() -> int:
    """Returns the most memory of this process since `_forget_peak`, or of a child so far."""
    status = pathlib.Path("/proc/self/status").read_text()
    own = 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])
    return max(own, 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def _forget_peak() -> None:
    with contextlib.suppress(OSError):  # a system that does not allow it: the peak is that of all trials
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def read_folder(folder: pathlib.Path) -> None:
    """Reads a model folder as a command does, and renders and encodes a problem."""
    config = tiny(**{"model.path": str(folder)})
    built = components_lib.build(config, folder)
    problem = {"id": "a", "problem": "What is 1 + 1?", "answer": "2"}
    tokenize([problem], built.tokenizer, "qwen_math", 1024, Chat())
    huggingface.load(folder)


def read_file(file: pathlib.Path, tokenizer: components_lib.Tokenizer) -> None:
    """Reads a data file as a command does."""
    tokenize(load_problems(str(file)), tokenizer, "plain", 1024)


def attempt(seed: int, harm: str, read, *arguments) -> Trial:
    """Returns what reading did."""
    _forget_peak()
    began, said, problem = _processor_s(), "", "was not refused"
    signal.alarm(ALARM_S)
    try:
        read(*arguments)
    except ValueError as error:
        said, problem = str(error), ""
    except BaseException as error:
        said, problem = repr(error)[:300], f"{type(error).__name__}, no ValueError"
    signal.alarm(0)
    used_s, peak = _processor_s() - began, _peak_bytes()
    for wrong, why in (
        ("\n" in said, "more than one line"), (len(said) > 3000, "a long line"),
        (used_s > MAX_S, f"{used_s:.1f} s"), (peak > MAX_BYTES, f"{peak:,} bytes"),
    ):  # fmt: skip
        problem = problem or (why if wrong else "")
    return Trial(seed, harm, said, round(used_s, 3), peak, problem)


def folders(first: int, last: int):
    """Yields trials of hostile model folders."""
    with tempfile.TemporaryDirectory() as scratch:
        whole = model_folders.write_whole(pathlib.Path(scratch) / "whole")
        read_folder(whole)  # what is hostile differs from something that is read
        for seed in range(first, last):
            folder = pathlib.Path(scratch) / str(seed) / "model"
            harm = model_folders.write(whole, folder, seed)
            yield attempt(seed, harm, read_folder, folder)


def files(first: int, last: int):
    """Yields trials of hostile data files."""
    with tempfile.TemporaryDirectory() as scratch:
        whole = model_folders.write_whole(pathlib.Path(scratch) / "whole")
        tokenizer = components_lib.Tokenizer.load(whole)
        file = pathlib.Path(scratch) / "problems.jsonl"
        file.write_bytes(data_files.lines(data_files.GOOD))
        read_file(file, tokenizer)
        for seed in range(first, last):
            harm = data_files.write(file, seed)
            yield attempt(seed, harm, read_file, file, tokenizer)


def main(kind: str, first: int, last: int) -> None:
    """Prints the trials of some seeds."""
    for trial in (folders if kind == "folders" else files)(first, last):
        print(json.dumps(dataclasses.asdict(trial)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
