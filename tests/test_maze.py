"""examples/maze.py: its mazes, the reward, and its files as the commands read them."""

import json

import numpy as np
import pytest

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax import user_code
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.policy import huggingface
from tests import forked
from tests.running import CONFIGS, ROOT, environment, load

EXAMPLE = user_code.run(ROOT / "examples" / "maze.py")
# The maze of the paper's example, 7 x 7 cells.
PAPERS = (
    "WALL WALL WALL WALL WALL WALL WALL NEWLINE WALL START WALL PATH PATH PATH WALL NEWLINE "
    "WALL PATH WALL PATH WALL WALL WALL NEWLINE WALL PATH PATH PATH PATH PATH WALL NEWLINE "
    "WALL PATH WALL WALL WALL PATH WALL NEWLINE WALL PATH WALL PATH PATH GOAL WALL NEWLINE "
    "WALL WALL WALL WALL WALL WALL WALL NEWLINE"
)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("DOWN DOWN RIGHT RIGHT RIGHT RIGHT DOWN DOWN DONE", True),
        ("DOWN UP DOWN DOWN RIGHT RIGHT RIGHT RIGHT DOWN DOWN DONE", True),  # there and back
        ("DOWN DOWN RIGHT RIGHT RIGHT RIGHT DOWN DOWN", True),  # the end without DONE
        ("DOWN DOWN RIGHT RIGHT RIGHT RIGHT DOWN DOWN DONE UP", True),  # what follows DONE is not walked
        ("DOWN DOWN RIGHT RIGHT RIGHT RIGHT DOWN DOWN LEFT DONE", False),  # past the goal
        ("DOWN DOWN RIGHT RIGHT RIGHT RIGHT DOWN DONE", False),  # not there yet
        ("RIGHT RIGHT DOWN DOWN RIGHT RIGHT DOWN DOWN DONE", False),  # through a wall
        ("UP UP DONE", False),  # out of the maze
        ("DONE", False),
        ("", False),
    ],
)
def test_a_response_is_right_if_its_moves_end_at_the_goal(response, right):
    assert EXAMPLE.reward(response, PAPERS) == right


@pytest.mark.parametrize("size", [7, 9, 17])
def test_rooms_of_a_maze_are_connected_in_one_way_each(size):
    """A tree: all rooms, and one opened wall fewer than rooms."""
    rng, rooms = np.random.default_rng(0), (size // 2) ** 2
    for _ in range(20):
        maze = EXAMPLE.make_maze(rng, size)
        assert len(maze.open) == 2 * rooms - 1
        reached, edge = {(1, 1)}, [(1, 1)]
        while edge:
            row, column = edge.pop()
            beside = {(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)} & maze.open
            edge += beside - reached
            reached |= beside
        assert reached == maze.open and maze.goal in reached
        assert EXAMPLE.reward(maze.solution, maze.text) == 1.0
        assert len(maze.solution.split()) - 1 >= 2 * (size - 3)  # no way is shorter than the distance


def test_no_maze_is_there_twice_and_neither_first_move_is_preferred():
    problems, heldout = EXAMPLE.splits(300, 60, 9, seed=1)
    assert len({*problems, *heldout}) == 360
    directions = [maze.solution.split()[0] for maze in problems]
    assert 100 < directions.count("DOWN") < 200  # 150 and five deviations


def test_the_command_writes_what_sft_and_train_read(tmp_path):
    output = tmp_path / "maze"
    command = ["examples/maze.py", f"--output={output}", "--size=7"]
    command += ["--problems=30", "--heldout=10", "--demonstrations=20"]
    assert forked.run(command, environment()).returncode == 0
    files = ("problems", "demonstrations", "heldout", "validation")
    rows = {name: [json.loads(line) for line in (output / f"{name}.jsonl").read_text().splitlines()] for name in files}
    assert [len(rows[name]) for name in files] == [30, 20, 10, 10]
    for problem, worked in zip(rows["problems"], rows["demonstrations"], strict=False):
        assert problem["problem"] == worked["prompt"]
        assert EXAMPLE.reward(worked["completion"], problem["answer"]) == 1.0

    tokenizer = Tokenizer.load(output / "model")
    prompt = tokenizer.encode(rows["problems"][0]["problem"])
    assert tokenizer.token(int(prompt[0])) == "<bos>" and len(prompt) == 1 + 3 + 7 * 8
    moves = rows["demonstrations"][0]["completion"]
    assert tokenizer.decode(tokenizer.encode(moves, add_special_tokens=False)) == moves
    architecture, _ = huggingface.load(output / "model")
    assert (architecture.num_layers, architecture.hidden_size, architecture.vocab_size) == (4, 256, 32)

    again = forked.run(command, environment())
    assert again.returncode == 2 and "exists already" in again.stderr


def test_mazes_with_an_even_side_are_refused(tmp_path):
    ended = forked.run(["examples/maze.py", f"--output={tmp_path / 'maze'}", "--size=8"], environment())
    assert ended.returncode == 2 and "--size=8 must be odd" in ended.stderr
    assert not (tmp_path / "maze").exists()


def test_more_mazes_than_there_are_is_an_error():
    """9 rooms have 192 spanning trees, by Kirchhoff's theorem; the rarest may not come."""
    problems, heldout = EXAMPLE.splits(130, 50, 7, seed=0)
    assert len({*problems, *heldout}) == 180
    with pytest.raises(ValueError, match=r"193 different problems are asked for, and only 1(8\d|9[0-2]) were found"):
        EXAMPLE.splits(143, 50, 7, seed=0)


def test_the_longest_maze_fits_the_configurations():
    """A way through all 16 rooms has 30 moves, DONE and the end token."""
    longest = EXAMPLE.Maze(9, frozenset({(1, 1), (7, 7)}))
    for name in ("maze", "maze_sft"):
        config = config_lib.resolve(load(CONFIGS / f"{name}.py").get_config())
        assert 1 + len(longest.problem.split()) <= config.data.max_prompt_tokens
        assert 2 * 15 + 2 <= config.sampling.max_response_tokens
