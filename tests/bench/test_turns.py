"""`bench.turns`: the same tokens in one turn and in several, on a toy model."""

import pytest

from bench import command_line, turns
from tests.bench.test_rollout import parsed
from tests.running import refused


def flags_of(arguments: str):
    return parsed(*arguments.split())


@pytest.mark.slow  # two engines to compile
def test_turns_beside_one_turn():
    arguments = "--shape=16x1 --slots=4 --requests=6 --prompt_tokens=5 --response_tokens=20 --page_size=8 --repeat=1"
    found = command_line.measured(turns.run, flags_of(f"{arguments} --turns=3 --environment_tokens=4"))
    assert (found["trajectories"], found["tokens"]) == (6, 120)
    assert found["shape"] == {"turns": 3, "sampled": 4, "environment": 4}
    # 4 tokens of each prompt, and 4 of the environment before each later turn; whole prompts have 5 + 8 and 5 + 16
    # tokens, and the last one starts the response.
    assert found["one_turn"]["prefilled_tokens"] == 6 * 4
    assert found["turns"]["prefilled_tokens"] == 6 * (4 + 2 * 4)
    assert found["turns"]["continued_tokens"] == 6 * (8 + 16)
    assert found["turns_prefilled_whole"]["prefilled_tokens"] == 6 * (4 + 12 + 20)
    assert found["turns_ratio"] == found["turns"]["cpu_s"] / found["one_turn"]["cpu_s"]


def test_tokens_that_turns_cannot_share(capsys):
    flags = flags_of("--shape=16x1 --response_tokens=20 --turns=4 --environment_tokens=8")
    shown = refused(capsys, command_line.measured, turns.run, flags)
    assert "can't be shared equally by --turns=4" in shown.err
