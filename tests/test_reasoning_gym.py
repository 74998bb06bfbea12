"""examples/reasoning_gym_problems.py: the files that it writes, with a generator in place of the package's."""

import json
import re
import subprocess
import sys

import pytest

from tests.running import CONFIGS, ROOT, environment, load

EXAMPLE = ROOT / "examples" / "reasoning_gym_problems.py"
# Questions repeat after 50; the answer has the settings.
GENERATOR = """
def create_dataset(name, size, seed, **settings):
    for number in range(size):
        yield {"question": f"{name} {(number + seed) % 50}", "answer": repr(settings), "metadata": {}}
"""


def made(tmp_path, *arguments):
    """(process, problems, problems held out) of the command."""
    output = tmp_path / "data"
    command = [sys.executable, EXAMPLE, f"--output={output}", "--generator=sums", *arguments]
    paths = environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    process = subprocess.run(command, env=paths, capture_output=True, text=True, check=False)
    files = [output / f"{name}.jsonl" for name in ("problems", "heldout")]
    rows = [[json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file in files]
    return process, *rows


@pytest.fixture
def generator(tmp_path):
    (tmp_path / "reasoning_gym.py").write_text(GENERATOR)


def test_no_question_is_in_both_files(tmp_path, generator):
    process, problems, heldout = made(
        tmp_path, "--problems=40", "--heldout=10", "--seed=7", "--settings=terms=2,sign=both"
    )
    assert process.returncode == 0, process.stderr
    assert [row["problem"] for row in problems] == [f"sums {number % 50}" for number in range(7, 47)]
    assert len({row["problem"] for row in (*problems, *heldout)}) == 50 and len(heldout) == 10
    assert problems[3] == {"id": "problems-00003", "problem": "sums 10", "answer": "{'terms': 2, 'sign': 'both'}"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--problems=45", "--heldout=10"], "55 different problems are asked for, and only 50 were found"),
        (["--settings=terms"], "--settings has 'terms', which is not name=value."),
    ],
)
def test_mistakes(tmp_path, generator, arguments, says):
    process, *rows = made(tmp_path, *arguments)
    assert process.returncode == 2 and says in process.stderr and process.stderr.count("\n") < 4
    assert rows == [[], []]


def test_the_configuration_reads_the_files_that_its_own_command_writes():
    module = load(CONFIGS / "smollm2_sums.py")
    output, config = re.search(r"--output=(\S+)", module.__doc__)[1], module.get_config()
    assert config.data.prompts == f"{output}/problems.jsonl"
    assert config.evaluation.benchmarks == (f"{output}/heldout.jsonl",)
