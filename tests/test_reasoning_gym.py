"""Examples of reasoning-gym: problems, rewards and a model, with a generator in place of the package's."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from bench import methods
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax import user_code
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.policy import huggingface
from tests.running import CONFIGS, ROOT, environment, load

EXAMPLE = ROOT / "examples" / "reasoning_gym_problems.py"
# Questions repeat after 50; the answer has the settings.
GENERATOR = """
def create_dataset(name, size, seed, **settings):
    for number in range(size):
        yield {"question": f"{name} {(number + seed) % 50}", "answer": repr(settings), "metadata": {}}
"""


REWARDS = user_code.run(ROOT / "examples" / "reasoning_gym_rewards.py")
MODELS = user_code.run(ROOT / "examples" / "reasoning_gym_models.py")
# The end of two questions of `shortest_path`, whose words before the grid have a colon too.
GRID = "Cells: *, # and O.\nNow, find the shortest path from * to # in the following grid:\n"
ONE_WAY = GRID + "X O O *\n# O X O\nO X O O\n"
NO_WAY = GRID + "O X X O\nO O O X\n* O X #\n"
SEVERAL_WAYS = GRID + "* O X\nO O O\nX O #\n"


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


@pytest.mark.parametrize(
    ("problem", "answer", "response", "score"),
    [
        (ONE_WAY, "left left down left", "left left down left", 1.0),
        (ONE_WAY, "left left down left", " left  left down left\n", 1.0),
        (ONE_WAY, "left left down left", "LEFT LEFT DOWN LEFT", 0.0),
        (ONE_WAY, "left left down left", "left left down left left right", 0.0),  # out of the grid and back
        (ONE_WAY, "left left down left", "left left down left right left", 0.5),  # longer than needed
        (ONE_WAY, "left left down left", "left left down left there", 0.0),
        (ONE_WAY, "left left down left", "left down left left", 0.0),  # through X
        (ONE_WAY, "left left down left", "left left down", 0.0),
        (ONE_WAY, "left left down left", "infeasible", 0.0),
        (ONE_WAY, "left left down left", "", 0.0),
        (SEVERAL_WAYS, "right down right down", "down right down right", 1.0),
        (SEVERAL_WAYS, "right down right down", "down right right down", 1.0),
        (SEVERAL_WAYS, "right down right down", "right right down down", 0.0),
        (NO_WAY, "infeasible", "infeasible", 1.0),
        (NO_WAY, "infeasible", "Infeasible", 0.0),
        (NO_WAY, "infeasible", "up", 0.0),
    ],
)
def test_a_way_is_right_where_the_score_of_the_generator_is_1(problem, answer, response, score):
    """Scores are those of reasoning-gym 0.1.25."""
    assert REWARDS.shortest_path(response, answer, problem) == (score == 1.0)


@pytest.mark.parametrize(
    ("response", "score"),
    [("lebA", 1.0), ("LEBA", 1.0), ("lebA ", 0.8), ("lebAx", 0.8), ("leb", 0.75), ("Abel", 0.0), ("", 0.0)],
)
def test_a_word_is_right_where_the_score_of_the_generator_is_1(response, score):
    assert REWARDS.spell_backward(response, "lebA") == (score == 1.0)


def test_worked_answers_are_all_shortest_ways():
    rng = np.random.default_rng(0)
    ways = [MODELS.random_shortest_path("right down right down", SEVERAL_WAYS, rng) for _ in range(200)]
    assert set(ways) == {f"{first} {second}" for first in ("right down", "down right") for second in
                         ("right down", "down right")}  # fmt: skip
    assert MODELS.random_shortest_path("left left down left", ONE_WAY, rng) == "left left down left"
    assert MODELS.random_shortest_path("infeasible", NO_WAY, rng) == "infeasible"


@pytest.mark.parametrize(
    ("task", "question", "answer"),
    [
        ("shortest_path", SEVERAL_WAYS, "right down right down"),
        ("spell_backward", "Spell this word backward (example: sun -> nus): Abel", "lebA"),
    ],
    ids=["shortest_path", "spell_backward"],
)
def test_a_model_reads_the_questions_as_they_are(tmp_path, monkeypatch, task, question, answer):
    """The text that all questions share is one token; worked answers end with the stop token."""
    rows = iter([{"question": text, "answer": answer} for text in (question, question + " ")])
    package = type(sys)("reasoning_gym")
    package.create_dataset = lambda *_, **__: rows
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    learned = []
    monkeypatch.setattr(
        MODELS.warm_start, "fit", lambda _, params, batches, **__: learned.append(next(batches)) or params
    )
    MODELS.main(tmp_path / "made", task, (1, 1), updates=2, seed=0)
    tokenizer = Tokenizer.load(tmp_path / "made" / "model")
    tokens = tokenizer.encode(question)
    assert tokenizer.token(int(tokens[0])) == "<bos>" and len(tokens) == 2 + (9 if task == "shortest_path" else 4)
    assert tokenizer.decode(tokenizer.encode(answer, add_special_tokens=False)) == answer
    (batch,) = learned
    first, last = batch.response_positions[:, 0], batch.response_positions[:, 0] + batch.response_length[:, 0] - 1
    assert (batch.tokens[np.arange(len(last)), last] == tokenizer.stop_ids[0]).all()
    texts = {tokenizer.decode(row[start:end]) for row, start, end in zip(batch.tokens, first, last, strict=True)}
    assert len(texts) == (4 if task == "shortest_path" else 1) and answer in texts
    architecture, _ = huggingface.load(tmp_path / "made" / "model")
    assert architecture.vocab_size == tokenizer.vocab_size


@pytest.mark.parametrize("task", ["shortest_path", "spell_backward"])
def test_the_longest_problem_fits_the_configuration(task):
    module = load(CONFIGS / "reasoning_gym.py")
    config = config_lib.replaced(config_lib.resolve(module.get_config()), dict(methods.TASKS[task].settings))
    assert config.data.prompts.startswith(f"runs/{task}/") and config.reward.path.endswith(f":{task}")
    assert (config.data.max_prompt_tokens, config.sampling.max_response_tokens) == (
        MODELS.MAX_PROMPT_TOKENS, MODELS.MAX_RESPONSE_TOKENS,
    )  # fmt: skip
    assert 2 + 5 * 5 <= MODELS.MAX_PROMPT_TOKENS  # <bos>, the shared text, and the cells
