"""Environments of verifiers: our adapter against their own rollouts, with the same scripted model.

Theirs run as they do without us: the harness `null` is a program, and tools are servers in processes of their own.
"""

import asyncio
import contextlib
import json
import pathlib
import sys

import pytest
import verifiers.v1 as vf
from verifiers.v1.clients.client import RelayReply
from verifiers.v1.interception import InterceptionServerConfig
from verifiers.v1.runtimes.subprocess import SubprocessRuntime

from reinforce_ada_jax.environments import loading, verifiers_adapter
from reinforce_ada_jax.environments.episode import Episode, Invalid
from reinforce_ada_jax.environments.tool_calls import parse_calls
from reinforce_ada_jax.environments.workers import EnvironmentPool
from tests.running import ROOT, load

PACKAGES = pathlib.Path(__file__).with_name("verifiers_packages")
SEATS = {"guess_numbers": "player", "add_numbers": "agent"}


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """The packages can be imported, here and in processes."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))


@pytest.fixture
def loaded():
    """loading.load, whose environments end with the test."""
    classes = []

    def load_one(reference):
        classes.append(loading.load(loading.file_reference(reference)))
        return classes[-1]

    yield load_one
    for each in classes:
        each.shut_down()


class Script(vf.Client):
    """A model that says its turns one after the other, as a stream."""

    def __init__(self, turns):
        self.turns, self.said = turns, 0

    async def get_response(self, *arguments, **options):
        raise NotImplementedError

    async def relay(self, dialect, body, session_id=None, headers=None):
        text, self.said = self.turns[self.said], self.said + 1
        before, calls = parse_calls(text, ["calc_add", "calc_fail"])
        message = {"role": "assistant", "content": before or None}
        if calls:
            message["tool_calls"] = [
                {"index": number, "id": f"id{self.said}-{number}", "type": "function", "function": call._asdict()}
                for number, call in enumerate(calls)
            ]
        choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        raw = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}

        async def chunks():
            for event in dialect.stream_events(raw):
                yield event

        return RelayReply("text/event-stream", chunks(), close=lambda: asyncio.sleep(0))


async def rollout(name, index, turns):
    """(messages, reward) of verifiers' own rollout."""
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    config = vf.resolve_env_config({"taskset": {"id": name}, SEATS[name]: seat})
    config = config.model_copy(update={"interception": InterceptionServerConfig()})
    environment, endpoint = vf.load_environment(config), vf.EvalClientConfig()
    async with environment.serving():
        environment._interception.clients[endpoint.model_dump_json()] = Script(turns)
        task = list(environment.taskset)[index]
        episode = await environment.run_episode(task, vf.ModelContext(model="m", client=endpoint))
    assert episode.ok, (episode.errors, episode.traces)
    return [plain(message) for message in episode.traces[0].messages], episode.traces[0].reward


def plain(message):
    if message.role != "assistant" or not message.tool_calls:
        return message.role, message.content or ""
    return "assistant", [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


@pytest.fixture
def in_this_interpreter(monkeypatch):
    """The program of the harness runs in this environment; by default uv makes another one."""

    async def prepare(self, script, env=None, *, activate=True):
        file = self.workdir / "program.py"
        file.write_text(script)
        return [sys.executable, str(file)]

    monkeypatch.setattr(SubprocessRuntime, "prepare_uv_script", prepare)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("name", "index", "turns", "reward"),
    [
        ("guess_numbers", 4, ["3", "5"], 0.75 + 0.25 / 2 + 1.0),  # the bonus of finalize
        ("guess_numbers", 4, ["3", "7", "6"], 0.25 / 3),  # the limit of turns ends it
        ("add_numbers", 2, [call("calc_add", a=2, b=3), "5 apples"], 1.0 + 0.1 * 1.5),
        ("add_numbers", 2, [call("calc_add", a="x"), "no"], 0.1 * 0.5),
        # The stop sees the results of turns that were answered: it ends the episode before the third turn.
        ("add_numbers", 2, [call("calc_fail") + call("nothing"), "5 apples"], 1.0 + 0.1),
    ],
)
def test_messages_and_rewards_are_those_of_verifiers(name, index, turns, reward, in_this_interpreter, loaded):
    messages, expected = asyncio.run(rollout(name, index, turns))
    assert expected == pytest.approx(reward)
    environment = loaded(f"verifiers:{name}")
    row = next(iter(verifiers_adapter.rows(name, index, index + 1)))
    episode = Episode(environment, row, ())
    replies = [episode.answer(turn) for turn in turns]
    assert replies[-1] == pytest.approx(reward) and not any(isinstance(reply, float) for reply in replies[:-1])
    ours = [(each["role"], each["content"]) for each in episode.messages]
    for position, (role, text) in enumerate(ours):
        found = parse_calls(text, ["calc_add", "calc_fail"])[1] if role == "assistant" else []
        if found:
            ours[position] = role, [(each.name, json.loads(each.arguments)) for each in found]
    assert ours == messages


def test_tools_are_offered_as_their_server_describes_them(loaded):
    functions = [tool["function"] for tool in loaded("verifiers:add_numbers").tool_schemas]
    assert [function["name"] for function in functions] == ["calc_add", "calc_fail"]
    assert functions[0]["description"] == "Adds two numbers."
    assert functions[0]["parameters"]["required"] == ["a"]


def test_many_episodes_in_a_worker_and_failures():
    rows = list(verifiers_adapter.rows("guess_numbers", 0, None))
    with contextlib.closing(EnvironmentPool("verifiers:guess_numbers", workers=1, timeout_s=30.0)) as pool:
        pool.check()
        first = [pool.reset(row).result().messages for row in rows]
        assert (
            first == [({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess, 1 to 7."})] * 7
        )
        episodes = [pool.begin(row, (0,), first[0]) for row in rows]
        hints = [pool.step(episode, "4").result() for episode in episodes]
        assert [reply.reward or reply.messages[0]["content"] for reply in hints] == [
            "lower", "lower", "lower", 1.0, "higher", "higher", "higher",
        ]  # fmt: skip
        failed = pool.step(episodes[0], "crash").result()
        assert failed.failure == "error" and "the game crashed" in pool.failure
        pool._workers[0].start().process.kill()  # the others are played again
        assert pool.step(episodes[1], "2").result().reward == 0.75 + 0.25 / 2 + 1.0


def test_an_environment_in_a_file(tmp_path, loaded):
    file = tmp_path / "mine.py"
    source = (PACKAGES / "guess_numbers.py").read_text()
    file.write_text(f"{source}\nshort = vf.resolve_env_config({{'taskset': {{'id': 'guess_numbers'}}, "
                    "'player': {'max_turns': 1}})\n")  # fmt: skip
    row = next(iter(verifiers_adapter.rows("guess_numbers", 4, 5)))
    assert Episode(loaded(f"{file}:Game"), row, ()).answer("3") == [{"role": "user", "content": "higher"}]
    assert Episode(loaded(f"{file}:short"), row, ()).answer("3") == 0.25


@pytest.mark.parametrize(
    ("turns", "answers"),
    [
        (["5"], [1.2]),
        (["2", "7", "5"], ["higher", "lower", 1 + 0.2 / 3]),
        (["1", "2", "3"], ["higher", "higher", 0.0]),
        (["8"], [0.0]),
    ],
)
def test_the_example(loaded, turns, answers):
    environment = loaded(f"{ROOT}/examples/verifiers_game.py:Game")
    row = next(iter(verifiers_adapter.rows("verifiers_game", 4, 5)))
    episode = Episode(environment, row, ())
    assert episode.messages == [{"role": "user", "content": "Guess, 1 to 7."}]
    replies = [episode.answer(turn) for turn in turns]
    assert [reply if isinstance(reply, float) else reply[0]["content"] for reply in replies] == answers


def test_an_environment_may_begin_without_a_prompt_and_add_several_messages(tmp_path, monkeypatch, loaded):
    (tmp_path / "opener.py").write_text("""
import verifiers.v1 as vf

class Tasks(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    def load(self):
        yield vf.Task(vf.TaskData())

class Config(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()

class Opener(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            await talk.turn("hello")
            last = await talk.turn([{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
        talk.trace.record_reward("length", len(last.last_reply), 0.5)

__all__ = ["Opener", "Tasks"]
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    (row,) = verifiers_adapter.rows("opener", 0, None)
    assert row["problem"] == row["id"] == "opener-000000"
    episode = Episode(loaded("verifiers:opener"), row, ())
    assert episode.messages == [{"role": "user", "content": "hello"}]
    assert [reply["content"] for reply in episode.answer("a")] == ["one", "two"]
    assert episode.answer("four") == 2.0


REFUSED = """
import verifiers.v1 as vf

class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    NEEDS_CONTAINER = {container}

class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(vf.TaskData(prompt="x"))

class Config(vf.EnvConfig):
    {seats}

class Both(vf.Env[Config]):
    async def run(self, task, agents):
        {run}

__all__ = ["Both", "Tasks"]
"""
ONE, RUN = "solver: vf.AgentConfig = vf.AgentConfig()", "await agents.solver.run(task)"


@pytest.mark.parametrize(
    ("name", "container", "seats", "run", "reason"),
    [
        ("boxed", True, ONE, RUN, "its tasks need containers"),
        ("judged", False, f"{ONE}; judge: vf.AgentConfig = vf.AgentConfig()", RUN, "the agents solver, judge"),
        ("docker", False, ONE.replace("()", "(runtime={'type': 'docker'})"), RUN, "its agent needs a container"),
        ("shell", False, ONE.replace("()", "(harness={'id': 'bash'})"), RUN, "the program 'bash'"),
        ("twice", False, ONE, f"{RUN}; {RUN}", "ran its agent twice"),
        ("never", False, ONE, "pass", "never ran its agent"),
    ],
)
def test_what_needs_more_than_one_chat_is_refused(tmp_path, monkeypatch, loaded, name, container, seats, run, reason):
    (tmp_path / f"{name}.py").write_text(REFUSED.format(container=container, seats=seats, run=run))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Invalid, match=reason):
        Episode(loaded(f"verifiers:{name}"), {"task": '{"prompt": "x"}'}, ()).answer("y")


def test_tasks_become_a_problem_file(tmp_path):
    output = tmp_path / "problems.jsonl"
    load(pathlib.Path(verifiers_adapter.__file__).with_name("verifiers_problems.py")).main(
        "verifiers:add_numbers", output, 3, 2
    )
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["id"], row["problem"], row["answer"]) for row in rows] == [
        ("add_numbers-000003", "3 + 3 apples", "6 apples"),
        ("add_numbers-000004", "4 + 3 apples", "7 apples"),
    ]
