"""`evaluate` and `prepare` as several processes on loopback leave the files of one process."""

import json
import pathlib
import re
import signal
import time

import pytest

from reinforce_ada_jax import cli
from reinforce_ada_jax import evaluate as evaluate_lib
from reinforce_ada_jax.distributed.watchdog import RESTART
from tests import hosts
from tests.running import cipher_file, tiny

SMALL = ("--config=configs/tiny.py", "--samples=4", "--config.sampling.slots=4", "--config.sampling.window=4")
MESH = "--config.mesh.data=2"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return cipher_file(tmp_path_factory.mktemp("shared") / "words.jsonl", 48)


def evaluate(words: str, output: pathlib.Path | str) -> list[str]:
    return ["-m", "reinforce_ada_jax.evaluate", *SMALL, MESH, "--model=package:cipher", f"--benchmarks={words}",
            f"--output={output}"]  # fmt: skip


def prepare(words: str, output: pathlib.Path | str) -> list[str]:
    return ["-m", "reinforce_ada_jax.prepare", *SMALL, MESH, f"--input={words}", f"--output={output}",
            "--max_pass_rate=0.5"]  # fmt: skip


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# Tests/distributed/test_processes.py has evaluations of two processes, test_evaluate.py what is stored.
@pytest.mark.slow
def test_two_processes_store_the_evaluation_of_one(tmp_path):
    words = cipher_file(tmp_path / "words.jsonl", 12)
    # With the engine of both processes, and of test_evaluate.py: it is compiled once.
    engine = {"sampling.slots": 4, "sampling.window": 4}
    options = evaluate_lib.Options(model="package:cipher", benchmarks=[words], samples=4, output=str(tmp_path / "1"))
    evaluate_lib.main(tiny(**engine), options)
    spoke, silent = hosts.finished(hosts.start(evaluate(words, tmp_path / "2"), 2, devices=2))
    assert "words" in spoke and "words" not in silent
    one, two = contents(tmp_path / "1"), contents(tmp_path / "2")
    assert one == two and one.keys() == {"words.jsonl", "words.header.json", "table.md", "results.json"}
    stored = [json.loads(line) for line in one["words.jsonl"].splitlines()]
    assert [(row["prompt"], row["draw"]) for row in stored] == [
        (f"heldout-{number:04d}", draw) for number in range(12) for draw in range(4)
    ]


@pytest.mark.slow  # the test above has two processes that draw and store for both commands
def test_two_processes_prepare_the_prompts_of_one(words, tmp_path):
    found = []
    for count in (1, 2):
        output = tmp_path / str(count) / "prompts.jsonl"
        output.parent.mkdir()
        hosts.finished(hosts.start(prepare(words, output), count, devices=2))
        found.append(contents(output.parent))
    assert found[0] == found[1]
    assert found[0].keys() == {
        "prompts.jsonl", "prompts.manifest.json", "prompts.draws/references.jsonl",
        "prompts.draws/references.header.json", "prompts.draws/responses.jsonl", "prompts.draws/responses.header.json",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, RESTART), (signal.SIGTERM, RESTART), (signal.SIGINT, cli.INTERRUPTED)]
)
def test_an_end_of_either_keeps_what_both_graded(words, tmp_path, number, code):
    one, two = tmp_path / "1", tmp_path / "2"
    hosts.finished(hosts.start(evaluate(words, one), 1, devices=2))
    processes = hosts.start(evaluate(words, two), 2, devices=2)
    files = [two / "words.jsonl", two / "words.part-1.jsonl"]
    while not all(file.exists() and file.read_bytes().count(b"\n") > 10 for file in files):
        assert all(process.poll() is None for process in processes), [each.communicate() for each in processes]
        time.sleep(0.005)
    processes[1].send_signal(number)
    said = [process.communicate(timeout=60)[1] for process in processes]
    if number == signal.SIGKILL:
        assert processes[0].returncode == code and "error: process 1 of 2 is gone" in said[0]
    else:
        assert [process.returncode for process in processes] == [code, code], said
        assert all("Graded responses are stored; the same command again goes on from there." in text for text in said)
    stored = sum(file.read_bytes().count(b"\n") for file in files)
    out = hosts.finished(hosts.start(evaluate(words, two), 1, devices=2))[0]
    begun = re.search(r"problems    words 48 \((\d+) of them stored\)", out)
    assert begun is not None and 4 * int(begun[1]) <= stored, out
    assert contents(one) == contents(two)
