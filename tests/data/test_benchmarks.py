"""Every benchmark file loads; prompts have the published lengths."""

import pytest

from reinforce_ada_jax.data.prompts import load_problems, tokenize
from reinforce_ada_jax.data.tokenizer import Tokenizer
from tests.data import shared

pytestmark = shared.MARKS

COUNTS = {
    "aime24": 30,
    "aime25": 30,
    "aime_like_160": 160,
    "amc23": 40,
    "gsm8k_test": 1319,
    "gsm8k_train": 7473,
    "hmmt_feb_2024": 30,
    "hmmt_feb_2025": 30,
    "math500": 500,
    "math_train": 7472,
    "minerva_math": 272,
    "olympiadbench": 675,
}
EVALUATED = ("aime_like_160", "math500", "minerva_math", "gsm8k_test")
LIMIT = 1024  # tokens of a prompt in the paper's runs


def source(name):
    return str(shared.FOLDER / "benchmarks" / f"{name}.jsonl")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Tokenizer.load(shared.model_folder("qwen2.5-math", tmp_path_factory.mktemp("models") / "qwen"))


def test_every_file_loads():
    files = sorted(file.stem for file in (shared.FOLDER / "benchmarks").glob("*.jsonl"))
    assert {name: len(load_problems(source(name))) for name in files} == COUNTS


@pytest.mark.parametrize("name", EVALUATED)
def test_prompts_are_within_the_limit(qwen, name):
    prompts = tokenize(load_problems(source(name)), qwen, "qwen_math", LIMIT)
    assert len(prompts) == COUNTS[name]
    # Template, system message and instruction make 50 tokens.
    assert min(len(prompt.tokens) for prompt in prompts) > 50


def test_two_of_olympiadbench_are_longer_and_are_reported(qwen):
    problems = load_problems(source("olympiadbench"))
    message = r"2 prompts have 1,285 to 1,296 tokens, limit 1,024: .* Their ids: olympiad/2625, olympiad/2626\."
    with pytest.raises(ValueError, match=message):
        tokenize(problems, qwen, "qwen_math", LIMIT)
    prompts = tokenize(problems, qwen, "qwen_math", 4096)
    assert len(prompts) == 675 and sum(len(prompt.tokens) > LIMIT for prompt in prompts) == 2
