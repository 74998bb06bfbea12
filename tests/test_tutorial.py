"""docs/tutorial.md: its commands run as typed and print what it shows; and what examples/word_problems.py makes."""

import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from reinforce_ada_jax import user_code
from reinforce_ada_jax.data import demonstrations, files
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.rewards import math_answer
from tests.running import CONFIGS, ROOT, environment, load, restored

TUTORIAL = ROOT / "docs" / "tutorial.md"
EXAMPLE = user_code.run(ROOT / "examples" / "word_problems.py")
CONFIG: ConfigDict = load(CONFIGS / "word_problems.py").get_config()


def steps() -> list[tuple[str, list[str]]]:
    """(command, lines shown below it) of the console blocks: a command stands behind "$ ", "..." are lines left out."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", TUTORIAL.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                found.append((" ".join(line[2:].split()), []))
            elif line.strip() not in ("", "..."):
                found[-1][1].append(line)
    return found


def shape(line: str) -> str:
    """A line without its numbers, and without how far they are from each other."""
    return " ".join(re.sub(r"\d[\d,.]*|#+", "0", line).split())


def average(shown: str) -> float:
    """avg@k in the table that `evaluate` prints."""
    return float(re.search(r"^\| heldout +\| +256 \| +(\d\.\d+)", shown, re.MULTILINE)[1])


# ---- the commands ----------------------------------------------------------------------------------------------------


def test_every_command_and_flag_is_there():
    commands = [words for words in (shlex.split(command) for command, _ in steps()) if words[0] == "python"]
    programs = [words[2] if words[1] == "-m" else words[1] for words in commands]
    assert programs[0] == "examples/word_problems.py"
    assert {f"reinforce_ada_jax.{name}" for name in ("prepare", "train", "evaluate", "export")} <= set(programs)
    for program, words in zip(programs, commands, strict=True):
        is_module = program.startswith("reinforce_ada_jax.")
        file = pathlib.Path(importlib.util.find_spec(program).origin) if is_module else ROOT / program
        for flag in (word for word in words if word.startswith("--")):
            name, _, value = flag[2:].partition("=")
            if name == "config":
                assert (ROOT / value).is_file()
            elif name.startswith("config."):
                *sections, key = name.split(".")[1:]
                assert key in (CONFIG[sections[0]] if sections else CONFIG)
            else:
                # A flag of its own, or a field of options that are declared as flags.
                declared = rf'"{name}"|^    {name}: ', file.read_text(), re.MULTILINE
                assert re.search(*declared), f"{program} has no --{name}"


@pytest.mark.slow
def test_the_commands_run_as_they_are_typed(tmp_path):
    for folder in ("configs", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    path = os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ["PATH"]))
    environ = environment() | {"PATH": path, "PYTHONPATH": str(ROOT)}
    shown = {}
    for command, expected in steps():
        result = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"{command}\n{result.stderr}"
        printed = [shape(line) for line in result.stdout.splitlines()]
        for line in expected:
            assert shape(line) in printed, f"{command} printed\n{result.stdout}and not\n{line}"
        shown[command] = result.stdout
    first, *_, trained, exported = [average(text) for command, text in shown.items() if ".evaluate" in command]
    print(f"avg@k at first {first:.3f}, trained {trained:.3f}, exported {exported:.3f}")
    assert 0.15 < first < 0.45
    assert trained > first + 0.2
    assert abs(exported - trained) < 0.06  # other draws of the same weights
    state, _ = restored_in(tmp_path, "runs/words/balance")
    _, params = huggingface.load(tmp_path / "runs/words/trained")
    jax.tree.map(np.testing.assert_array_equal, params, state.params)


def restored_in(folder, workdir):
    """The newest checkpoint of a run whose configuration names files below `folder`."""
    before = pathlib.Path.cwd()
    os.chdir(folder)
    try:
        return restored(pathlib.Path(workdir))
    finally:
        os.chdir(before)


# ---- what the first one makes ----------------------------------------------------------------------------------------


def test_no_problem_is_there_twice_and_the_answers_are_right(tmp_path):
    problems, heldout = EXAMPLE.splits(0)
    assert (len(problems), len(heldout)) == (1024, 256)
    assert len({problem.text for problem in (*problems, *heldout)}) == 1280
    for problem in problems:
        first, *changes = map(int, re.findall(r"\d+", problem.text))
        assert (first, tuple(changes)) == (problem.first, tuple(map(abs, problem.changes)))
        name = problem.text.split()[0]
        for sentence, change in zip(problem.text.split(". ")[1:], problem.changes, strict=False):
            # Who has more afterwards, in the words of the sentence.
            more = any(words in sentence for words in (f"gives {name}", "buys", "finds"))
            assert more == (change > 0), sentence
        assert 1 <= problem.answer <= 29
    EXAMPLE.write_problems(tmp_path / "heldout.jsonl", heldout)
    rows = files.read_file(tmp_path / "heldout.jsonl")
    assert [(row["problem"], row["answer"]) for row in rows] == [(p.text, str(p.answer)) for p in heldout]


def test_no_demonstration_is_of_a_held_out_problem():
    _, heldout = EXAMPLE.splits(0)
    texts, drawn = {problem.text for problem in heldout}, EXAMPLE.demonstrations(0, heldout)
    assert texts.isdisjoint(next(drawn)[0] for _ in range(5000))


def test_the_pupil_is_right_every_other_time_and_forgets_carries():
    rng, right = np.random.default_rng(0), []
    for _ in range(2000):
        problem = EXAMPLE.make_problem(rng)
        solution = EXAMPLE.pupils_solution(problem, rng)
        for total, sign, count, result in re.findall(r"(-?\d+) ([+-]) (\d) = (-?\d+)\.", solution):
            assert int(result) - (int(total) + int(sign + count)) in (-10, 0, 10)
        right.append(math_answer.last_boxed(solution) == str(problem.answer))
    assert abs(np.mean(right) - 0.52) < 0.04
    problem = EXAMPLE.Problem("", 14, (-6, 9))
    solutions = {EXAMPLE.pupils_solution(problem, rng) for _ in range(200)}
    assert r"14 - 6 = 8. 8 + 9 = 17. The answer is \boxed{17}." in solutions
    assert r"14 - 6 = 18. 18 + 9 = 17. The answer is \boxed{17}." in solutions  # 10 forgotten twice
    assert r"14 - 6 = 18. 18 - 9 = 9. The answer is \boxed{9}." in solutions  # and the last sentence misread
    graded = [math_answer.grade(solution, "17").correct for solution in solutions]
    assert 0 < sum(graded) < len(graded)


def test_the_tokenizer(tmp_path):
    """The tokenizer of the tutorial is small, ends texts, and reads numbers digit by digit."""
    problems, heldout = EXAMPLE.splits(0)
    drawn = EXAMPLE.demonstrations(0, heldout)
    EXAMPLE.write_tokenizer(tmp_path, [" ".join(next(drawn)) for _ in range(500)])
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size <= EXAMPLE.VOCAB_SIZE and len(tokenizer.stop_ids) == 1
    assert len(tokenizer.encode("1729")) == 4
    limits = CONFIG.data.max_prompt_tokens, CONFIG.sampling.max_response_tokens
    assert limits == (EXAMPLE.MAX_PROMPT_TOKENS, EXAMPLE.MAX_RESPONSE_TOKENS)
    for problem in problems:
        assert len(tokenizer.render(problem.text, "chat", EXAMPLE.CHAT)) <= limits[0]
    for text in ("½ 你好 🙂", problems[0].text, next(drawn)[1]):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    batch = next(EXAMPLE.batches(tokenizer, drawn))
    first, length = batch.response_positions[:, 0], batch.response_length[:, 0]  # one response a row
    assert length.max() < limits[1] and first.max() <= limits[0]
    last = first + length - 1
    assert set(batch.tokens[np.arange(len(batch.tokens)), last]) == set(tokenizer.stop_ids)
    # Its template ends an answer, so sft can train the model, and a conversation of several turns is readable.
    assert set(demonstrations.end_tokens(tokenizer, "chat", EXAMPLE.CHAT)) == set(tokenizer.stop_ids)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
