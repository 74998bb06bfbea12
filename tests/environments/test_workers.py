"""Environments in worker processes that hang, die and lie (`classes.Obedient` does what the model's text says)."""

import contextlib
import math
import pathlib
import time

import pytest

from reinforce_ada_jax.environments import loading, workers
from reinforce_ada_jax.environments.workers import EnvironmentPool, Episode
from reinforce_ada_jax.isolation import process_tree
from reinforce_ada_jax.isolation.messages import Malformed
from tests import standins

FILE = pathlib.Path(__file__).with_name("classes.py")
PROBLEM = {"problem": "2 + 3"}
FIRST = ({"role": "user", "content": "2 + 3"},)


def episode(pool: EnvironmentPool, address=(1, 2)) -> Episode:
    return pool.begin(PROBLEM, address, FIRST)


def says(pool: EnvironmentPool, trajectory: Episode, text: str):
    reply = pool.step(trajectory, text).result()
    return reply.failure or (reply.messages[0]["content"] if reply.messages else reply.reward)


@pytest.fixture(scope="module")
def pool():
    with contextlib.closing(EnvironmentPool(f"{FILE}:Obedient", workers=1, timeout_s=3.0)) as pool:
        yield pool


def test_turns_of_many_trajectories_in_one_process(pool):
    assert pool.reset(PROBLEM).result().messages == FIRST
    a, b = episode(pool), episode(pool)
    assert says(pool, a, "x") == "turn 1 of 2 messages"
    assert says(pool, b, "x") == "turn 1 of 2 messages"
    assert says(pool, a, "y") == "turn 2 of 4 messages"
    assert says(pool, a, "end") == 3.0
    assert says(pool, b, "numpy") == 0.5


@pytest.mark.parametrize(
    ("hostile", "failure", "why"),
    [
        ("raise", "error", "KeyError: 'secret'"),
        ("quit", "error", "SystemExit"),
        ("nan", "error", "the final reward must be finite"),
        ("text", "error", "step() returned 'well done': it must return a list of messages"),
        ("assistant", "error", "each with role (user, tool or system)"),
        ("empty", "error", "step() returned []"),
        ("none", "error", "step() returned None"),
        ("dict", "error", "step() returned {'role': 'user', 'content': 'a message'}"),
        ("bytes", "error", "step() returned [{'role': 'user', 'content': b'bytes'}]"),
        ("huge", "error", "OverflowError: int too large"),
        ("interrupt", "error", "KeyboardInterrupt"),
        ("forge", "crash", "its process wrote to its socket at every try"),
        ("babble", "crash", "its process wrote to its socket at every try"),
        ("half", "crash", "its process wrote to its socket at every try"),
        ("flood", "crash", "its process wrote to its socket at every try"),
        ("unplug", "crash", "its "),
        ("long", "error", "messages of more than"),
        ("exit", "crash", "exit code 3"),
        ("hang", "timeout", "took more than 3 s (reward.time_limit_s)"),
    ],
)
def test_a_failure_ends_one_trajectory_and_leaves_its_neighbour(pool, hostile, failure, why):
    neighbour, failing = episode(pool), episode(pool)
    drawn = says(pool, neighbour, "random")
    assert says(pool, neighbour, "x") == "turn 2 of 4 messages"
    pool.failure = ""
    assert says(pool, failing, hostile) == failure
    assert why in pool.failure
    # Made again where the process ended: the random number of its first turn is drawn again, and is the same.
    assert says(pool, neighbour, "x") == "turn 3 of 6 messages"
    assert says(pool, neighbour, "end") == 4.0
    assert says(pool, episode(pool), "random") == drawn


def test_problems_that_cannot_begin_leave_the_others_alone():
    with contextlib.closing(EnvironmentPool(f"{FILE}:Begins", workers=1, timeout_s=1.0)) as begins:
        for problem, failure, why in (
            ("hang", "timeout", "took more than 1 s"),
            ("long", "error", "messages of more than 130,072 bytes"),
            ("exit", "crash", "exit code 3"),
            ("raise", "error", "KeyError: 'secret'"),
            ("nothing", "error", "reset() returned None: it must return a list of messages"),
        ):
            begins.failure = ""
            futures = [begins.reset({"problem": each}) for each in (problem, "2 + 3")]
            failed, fine = (future.result() for future in futures)
            assert failed.failure == failure and why in begins.failure and fine.messages == FIRST


@pytest.mark.parametrize(
    "message",
    [
        {}, {"reward": None}, {"reward": 1}, {"reward": True}, {"reward": math.nan}, {"reward": "1.0"},
        {"messages": []},
        {"messages": {}}, {"messages": "text"}, {"messages": ["text"]}, {"messages": [{"role": "user"}]},
        {"messages": [{"content": "x"}]}, {"messages": [{"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]}, {"messages": [{"role": "user", "content": "x", "name": None}]},
        {"messages": [*FIRST, {"role": "user", "content": ["x"]}]}, {"failure": 3}, {"failure": None},
    ],
    ids=str,
)  # fmt: skip
def test_an_answer_that_no_worker_gives_is_malformed(message):
    """The process runs the user's code, which can write to its socket; what it says becomes tokens of a prompt."""
    with pytest.raises(Malformed):
        workers._read(message)


def test_the_three_answers_of_a_worker_are_read():
    assert workers._read({"failure": "why"}) == "why"
    assert workers._read({"reward": -0.5}) == workers.Reply(reward=-0.5)
    tool = {"role": "tool", "name": "add", "content": "5"}
    assert workers._read({"messages": [tool, *FIRST]}) == workers.Reply(messages=(tool, *FIRST))


def test_a_file_that_ends_its_process_is_said_after_three_tries(tmp_path):
    (tmp_path / "starts").touch()
    file = tmp_path / "ends.py"
    starts = str(tmp_path / "starts")
    file.write_text(
        f"import os\nwith open({starts!r}, 'a') as file:\n    file.write('.')\nos._exit(0)\nclass Game: ..."
    )
    with contextlib.closing(EnvironmentPool(f"{file}:Game", workers=1, timeout_s=5.0)) as pool:
        with pytest.raises(ValueError, match="3 environment processes in a row did not start with .*ends.py:Game"):
            pool.check()
    assert (tmp_path / "starts").read_text() == "..."


@pytest.mark.slow  # tests/rewards/test_workers.py has it
def test_a_file_whose_import_never_ends_is_tried_once(tmp_path, monkeypatch):
    standins.constants(monkeypatch, workers.workers_lib, TRIAL_LIMIT_S=0.5)
    file, starts = tmp_path / "endless.py", tmp_path / "starts"
    file.write_text(f"with open({str(starts)!r}, 'a') as file:\n    file.write('.')\nwhile True: ...\nclass Game: ...")
    with contextlib.closing(EnvironmentPool(f"{file}:Game", workers=1, timeout_s=5.5)) as pool:
        with pytest.raises(ValueError, match=r"endless.py:Game': its import took more than 6 s \(0.5 s and"):
            pool.check()
    assert starts.read_text() == "."


def test_the_answer_of_a_fork_is_not_taken_for_that_of_a_neighbour(pool):
    assert says(pool, episode(pool), "double") == "twice"
    neighbour = episode(pool)
    assert says(pool, neighbour, "slow") == "slow"  # the other answer comes meanwhile
    assert says(pool, neighbour, "x") == "turn 2 of 4 messages"


def test_an_episode_that_closes_the_outputs_leaves_them_to_its_neighbours(pool, tmp_path):
    silent, neighbour = episode(pool), episode(pool)
    assert says(pool, silent, "silence") == "silence"
    pool.program.output = tmp_path / "output.log"  # of a run, which exists when its processes have begun
    assert says(pool, neighbour, "speak") == "spoken"
    assert says(pool, silent, "silence") == "silence"
    assert says(pool, silent, "speak") == "spoken"
    assert pool.program.output.read_text() == 2 * "a line\nanother line\n"
    pool.program.output = None


def test_a_worker_killed_from_outside_is_replaced_and_no_trajectory_fails(pool):
    trajectory = episode(pool)
    assert says(pool, trajectory, "x") == "turn 1 of 2 messages"
    pool._workers[0].child.process.kill()
    assert says(pool, trajectory, "x") == "turn 2 of 4 messages"
    pool.failure = ""
    assert says(pool, trajectory, "die") == "crash"  # at every try
    assert "killed at every try" in pool.failure


def test_an_answer_that_differs_when_it_is_repeated_is_a_failure(pool):
    trajectory = episode(pool)
    says(pool, trajectory, "time")
    assert says(pool, episode(pool), "exit") == "crash"
    pool.failure = ""
    assert says(pool, trajectory, "x") == "error"
    assert "answered otherwise when it was repeated" in pool.failure


def test_randomness_is_that_of_the_address(pool):
    numbers = [says(pool, episode(pool, address), "random") for address in [(1,), (1,), (2,)]]
    assert numbers[0] == numbers[1] != numbers[2]


def test_first_messages_depend_on_the_problem_only():
    with contextlib.closing(EnvironmentPool(f"{FILE}:Moody", workers=1, timeout_s=5.0)) as pool:
        first = pool.reset(PROBLEM).result().messages
        assert says(pool, pool.begin(PROBLEM, (), first), "x") == "error"
        assert "reset() returned other messages than at the start" in pool.failure


def test_calls_of_tools_are_answered_and_other_turns_are_stepped():
    with contextlib.closing(EnvironmentPool(f"{FILE}:WithTools", workers=2, timeout_s=5.0)) as pool:
        pool.check()
        assert [tool["function"]["name"] for tool in pool.tools] == ["add", "fail"]
        a, b = episode(pool), episode(pool)
        call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
        assert pool.step(a, call).result().messages == ({"role": "tool", "name": "add", "content": "5"},)
        assert says(pool, b, "wrong") == 0.0
        assert says(pool, a, "done") == 1.0


def test_an_environment_that_calls_its_tools_itself_gets_the_calls():
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    with contextlib.closing(EnvironmentPool(f"{FILE}:OwnTools", workers=1, timeout_s=5.0)) as pool:
        pool.check()
        assert [tool["function"]["name"] for tool in pool.tools] == ["look"]
        assert pool.step(episode(pool), call).result().messages == ({"role": "tool", "content": call.upper()},)


@pytest.mark.parametrize(
    ("name", "message"),
    [("NoStep", "the class NoStep has no method step()"), ("function", "and not a class")],
)
def test_what_is_no_environment_is_refused(name, message):
    with contextlib.closing(EnvironmentPool(f"{FILE}:{name}", workers=1, timeout_s=5.0)) as pool:
        with pytest.raises(ValueError) as caught:
            pool.check()
    assert message in str(caught.value)


def test_a_long_reason_for_no_start_is_shown(tmp_path):
    """One that no message has room for would be taken for a crash."""
    file = tmp_path / "long.py"
    file.write_text("class Game: ...\nraise ValueError('too long ' * 20_000)")
    with contextlib.closing(EnvironmentPool(f"{file}:Game", workers=1, timeout_s=5.0)) as pool:
        with pytest.raises(ValueError, match="ValueError: too long too long"):
            pool.check()


def test_the_file_is_parsed_before_a_process_starts(tmp_path):
    assert loading.file_reference(f"{FILE}:Moody") == f"{FILE}:Moody"
    with pytest.raises(ValueError, match="defines no 'Mody'"):
        loading.file_reference(f"{FILE}:Mody")
    with pytest.raises(ValueError, match="there is no file"):
        loading.file_reference(f"{tmp_path / 'none.py'}:Moody")


def test_an_environment_of_verifiers_is_found_and_not_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for file in ("verifiers/__init__.py", "verifiers/v1/tasksets/arena/__init__.py", "my_game/__init__.py"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("raise RuntimeError('imported')")
    for name in ("my-game", "owner/My-Game@0.2", "arena"):
        assert loading.file_reference(f"verifiers:{name}") == f"verifiers:{name}"
    before = loading.file_hash("verifiers:my-game")
    assert before == loading.file_hash("verifiers:owner/my_game")
    (tmp_path / "my_game" / "rules.py").write_text("MOVES = 3")
    assert loading.file_hash("verifiers:my-game") != before
    with pytest.raises(ValueError, match="there is no Python package 'your_game': install the environment"):
        loading.file_reference("verifiers:your-game")


def test_close_ends_every_process():
    pool = EnvironmentPool(f"{FILE}:Obedient", workers=2, timeout_s=60.0)
    left = int(says(pool, episode(pool), "leave"))
    assert process_tree.is_running(left)
    hanging = pool.step(episode(pool), "hang")
    running = [worker.child.process for worker in pool._workers if worker.child]
    pool.close()
    assert all(process.returncode is not None for process in running)
    assert isinstance(hanging.exception(), RuntimeError)
    for _ in range(3_000):  # a killed process may take time to end
        if not process_tree.is_running(left):
            break
        time.sleep(0.01)
    assert not process_tree.is_running(left)
