"""Environments of the `verifiers` package (0.4) as classes with `reset` and `step`. For workers only.

verifiers runs a whole episode by itself, and its agent asks an endpoint for each turn of the model. Here an episode is
a task of an event loop, which waits at each request until `step` brings the turn. The environment, the hooks of its
tasks, stops, rewards and the server that receives requests are those of verifiers. The agent is a chat in this process,
and the tools are called in this process.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import aiohttp  # pyright: ignore[reportMissingImports]  (verifiers brings it)
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]  (optional)
from verifiers.v1.configs.agent import agent_config_fields  # pyright: ignore[reportMissingImports]
from verifiers.v1.interception import InterceptionServer  # pyright: ignore[reportMissingImports]

from reinforce_ada_jax.environments.episode import Invalid, Message
from reinforce_ada_jax.environments.tool_calls import parse_calls
from reinforce_ada_jax.environments.verifiers_agent import Agent, Chat, Tool, tools_of


def adapt(settings: Any) -> "type[Environment]":
    """Returns the class of an environment, given the id of a taskset (an installed package) or an `EnvConfig`.

    Raises Invalid if the environment needs something that is not here: a second model, a container, a program as agent.
    """
    config = vf.resolve_env_config({"taskset": {"id": settings}} if isinstance(settings, str) else settings)
    host = _Host(vf.load_environment(config))
    return type("Environment", (Environment,), {"host": host, "tool_schemas": host.run(host.start())})


def rows(settings: Any, start: int, stop: int | None) -> Iterable[dict[str, Any]]:
    """Yields tasks of an environment as rows of a problem file: those at the positions from `start` to `stop`."""
    config = vf.resolve_env_config({"taskset": {"id": settings}} if isinstance(settings, str) else settings)
    tasks = vf.load_environment(config).taskset.skip(start)
    for task in tasks if stop is None else tasks.take(stop - start):
        data, name = task.data.model_dump(mode="json", exclude_none=True), f"{config.taskset.id}-{task.data.idx:06d}"
        yield {
            "id": name,
            "problem": task.data.prompt_text or name,  # the environment may begin the conversation without a prompt
            "answer": str(data.get("answer", "")),
            "task": json.dumps(data),
        }


class Environment:
    """An episode of verifiers: each step gives it a turn of the model, and runs it up to its next request."""

    host: ClassVar["_Host"]
    tool_schemas: ClassVar[Sequence[Mapping[str, Any]]] = ()

    @classmethod
    def shut_down(cls) -> None:
        cls.host.run(cls.host.stop())
        cls.host.loop.close()

    def reset(self, problem: Mapping[str, Any]) -> list[Message]:
        """Begins the task of a row, and returns the messages of the first request."""
        if "task" not in problem:
            command = "python -m reinforce_ada_jax.environments.verifiers_problems"
            raise Invalid(f"the row has no column 'task': write the problems with {command}")
        self._episode = _Episode(self.host)
        task_class, config = self.host.task_class, self.host.environment.taskset.config.task
        task = task_class(task_class.data_type().model_validate_json(problem["task"]), config)
        self._running = self.host.loop.create_task(self._episode.play(task))
        first = self._advance()
        if isinstance(first, float):
            raise Invalid("the episode ended before the first turn of the model")
        self._seen = first
        return [_message(each) for each in first]

    def step(self, messages: Sequence[Message]) -> list[Message] | float:
        """Gives the newest turn to the episode, and returns what the next request adds, or the reward."""
        turn = _assistant(messages[-1]["content"], self.tool_schemas, len(messages))
        self._episode.turn.set_result(turn)
        following = self._advance()
        if isinstance(following, float):
            return following
        before = [*self._seen, turn]
        if list(map(_plain, following[: len(before)])) != list(map(_plain, before)):
            raise Invalid(
                "the environment changed earlier messages of the conversation, whose tokens are fixed: it may only add "
                "messages"
            )
        self._seen = following
        return [_message(each) for each in following[len(before) :]]

    def __del__(self):
        if hasattr(self, "_running"):
            self._running.cancel()  # an abandoned episode ends while the loop runs for others

    def _advance(self) -> Any:
        """Runs the episode to its next request and returns the messages, or to its end and returns the reward."""
        asked = self._episode.asked
        self.host.run(asyncio.wait([self._running, asked], return_when=asyncio.FIRST_COMPLETED))
        if self._running.done():
            return self._running.result()
        self._episode.asked = self.host.loop.create_future()
        return asked.result()


def _message(wire: Mapping[str, Any]) -> Message:
    content = wire["content"]
    if isinstance(content, list):
        if any(part["type"] != "text" for part in content):
            raise Invalid("a message of the environment has an image, and models here read text only")
        content = "\n".join(part["text"] for part in content)
    return {"role": wire["role"], "content": content}


def _plain(wire: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the parts of a message that must not change: role, text and calls."""
    calls = [call["function"] for call in wire.get("tool_calls") or ()]
    return wire["role"], wire["content"] or "", [(call["name"], call["arguments"]) for call in calls]


def _assistant(text: str, tools: Sequence[Mapping[str, Any]], position: int) -> dict[str, Any]:
    """Returns a turn of the model as a message of the chat interface."""
    before, calls = parse_calls(text, [tool["function"]["name"] for tool in tools]) if tools else (text, [])
    if not calls:
        return {"role": "assistant", "content": text}
    made = [
        {"id": f"call_{position}_{number}", "type": "function", "function": call._asdict()}
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": before or None, "tool_calls": made}


class _Model(vf.Client):
    """The model that all agents ask: it gives each request to the episode of its trace, and waits for the turn."""

    def __init__(self):
        self.episodes: dict[str, _Episode] = {}

    async def get_response(self, dialect, body, sampling, session_id: Any = None, turn=None, headers=None) -> Any:
        message = await self.episodes[session_id].ask(body["messages"])
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        raw = {"id": session_id, "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


class _Host:
    """An environment of verifiers in this process: the event loop, and all that its episodes share."""

    def __init__(self, environment: "vf.Env"):
        _check(environment)
        self.environment, self.loop = environment, asyncio.new_event_loop()
        self.task_class = type(environment.taskset).task_type()
        self.model, self.endpoint = _Model(), vf.EvalClientConfig()
        self.shared: dict[str, Tool] = {}

    def run(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(awaitable)

    async def start(self) -> list[dict[str, Any]]:
        """Starts the parts that all episodes share, and returns the schemas of all tools."""
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        self.interception = InterceptionServer()
        self.interception.clients[self.endpoint.model_dump_json()] = self.model
        await self.interception.start()
        taskset = self.environment.taskset
        for toolset in taskset.toolsets(taskset.config):
            await toolset.setup()
            self.shared |= await tools_of(toolset)
        await self.environment.start()
        tools = dict(self.shared)
        for toolset in self.task_class.toolsets(taskset.config.task):
            tools |= await tools_of(toolset)
        return [tool.schema for tool in tools.values()]

    async def stop(self) -> None:
        given_up = asyncio.all_tasks() - {asyncio.current_task()}
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        await self.environment.stop()
        await self.http.close()
        await self.interception.stop()


def _check(environment: "vf.Env") -> None:
    """Refuses an environment that can't be played by one model in this process."""
    taskset, seats, reasons = environment.taskset, agent_config_fields(environment.config), []
    task_class = type(taskset).task_type()
    bundled = vf.default_harness_id(taskset.config.id)
    default = "null" if bundled == "bash" else bundled  # "bash" if the package has no harness of its own
    programs = {seat.harness.id if seat.harness else default for seat in seats.values()}
    toolsets = [*taskset.toolsets(taskset.config), *task_class.toolsets(taskset.config.task)]
    if len(seats) > 1:
        reasons.append(f"it has the agents {', '.join(seats)}, and there is one model, which is trained")
    if programs - {"null"}:
        reasons.append(f"its agent is the program {max(programs - {'null'})!r}, and here an agent is a chat")
    # The default is a remote container, which a chat does not need.
    if any(seat.runtime not in (vf.AgentConfig().runtime, vf.SubprocessConfig()) for seat in seats.values()):
        reasons.append("its agent needs a container")
    if task_class.NEEDS_CONTAINER:
        reasons.append("its tasks need containers")
    if taskset.config.task.judges:
        reasons.append("its rewards need a judge, which is another model")
    if any(toolset.config.url or toolset.config.runtime.type != "subprocess" for toolset in toolsets):
        reasons.append("its tools run on another machine")
    if reasons:
        raise Invalid(f"the environment {environment.config.env_id!r} cannot be used: {'; '.join(reasons)}")


class _Episode:
    """One episode: `play` is the task, `asked` gets the messages of a request, `turn` the model's answer."""

    def __init__(self, host: _Host):
        self.host, self.turn = host, host.loop.create_future()
        self.asked: asyncio.Future[list[dict[str, Any]]] = host.loop.create_future()
        self.trace: Any = None

    async def ask(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Gives a request to `step`, and returns the turn that answers it."""
        if self.asked.done():
            raise Invalid("the environment asks for two turns at the same time")
        self.turn = self.host.loop.create_future()
        self.asked.set_result(messages)
        return await self.turn

    async def play(self, task: "vf.Task") -> float:
        """Plays a task to its end, as `Env.run_episode` does, and returns the weighted sum of the rewards."""
        environment = self.host.environment
        agents = vf.Agents(environment.config, self._seat)
        try:
            await environment.setup(agents)
            await environment.run(task, agents)
            if self.trace is None:
                raise Invalid("the environment never ran its agent")
            about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
            info = vf.EnvInfo(id=environment.config.env_id)
            await environment.finalize(task, vf.Episode(env=info, task=about, traces=[self.trace]))
        finally:
            if self.trace is not None:
                self.host.model.episodes.pop(self.trace.id, None)
        trace: Any = self.trace
        if not trace.ok:
            raise Invalid(f"{trace.last_error.type}: {trace.last_error.message}")
        return float(trace.reward)

    def begin(self, trace: "vf.Trace") -> None:
        if self.trace is not None:
            raise Invalid("the environment ran its agent twice: a trajectory is one conversation")
        self.trace = trace
        self.host.model.episodes[trace.id] = self

    def _seat(self, name: str, config: "vf.AgentConfig") -> Agent:
        asking = config.model_copy(update={"client": self.host.endpoint, "model": "policy"})
        return Agent(name, asking, self.host.interception, Chat(self.host.http, self.host.shared), self.begin)
