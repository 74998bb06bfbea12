"""Agent of an environment of `verifiers`: a chat in this process, whose tools are called in this process, too."""

import contextlib
import copy
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp  # pyright: ignore[reportMissingImports]  (verifiers brings it)
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]  (optional)
from mcp.server.mcpserver import MCPServer  # pyright: ignore[reportMissingImports]  (verifiers brings it)
from mcp.server.mcpserver.exceptions import ToolError  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.utils.compaction import bound_tool_message  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content  # pyright: ignore[reportMissingImports]
from verifiers.v1.mcp.server import _call_state  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils.decorators import discover_decorated  # pyright: ignore[reportMissingImports]

_NEVER_S = 1e9


class Tool:
    """A tool of a tool server, which is in this process."""

    def __init__(self, toolset: "vf.Toolset", server: MCPServer, name: str, schema: dict[str, Any]):
        self._toolset, self._server, self._name, self.schema = toolset, server, name, schema

    async def call(self, arguments: dict[str, Any], state: "vf.State") -> Any:
        """Returns the content of the message with the result; it is the error's text where the tool fails."""
        token = _call_state.set(state if isinstance(state, self._toolset._state_cls) else None)
        try:
            result = await self._server.call_tool(self._name, arguments)
        except ToolError as error:
            return str(error)
        finally:
            _call_state.reset(token)
        return mcp_content_to_chat_content(result.content)


async def tools_of(toolset: "vf.Toolset") -> dict[str, Tool]:
    """Returns the tools of a tool server by the names that the model sees."""
    server = MCPServer(toolset.server_name or type(toolset).__name__, log_level="WARNING")
    for method in discover_decorated(toolset, "tool"):
        text = (method.__doc__ or "").strip() or None
        server.add_tool(method, name=method.tool_name or method.__name__, description=text)
    tools = {}
    for found in await server.list_tools():
        name = f"{toolset.server_name}_{found.name}" if toolset.server_name else found.name
        function = {"name": name, "description": found.description or "", "parameters": found.input_schema}
        tools[name] = Tool(toolset, server, found.name, {"type": "function", "function": function})
    return tools


class Agent(vf.Agent):
    """The agent that is trained. Its rollouts are those of verifiers, without processes for tools."""

    def __init__(
        self, name: str, config: "vf.AgentConfig", interception: Any, chat: "Chat", begin: Callable[..., None]
    ):
        """`begin` gets the trace of a rollout before it begins."""
        # Another harness is a program. A turn of the model can't be repeated, so there are no retries. A clock would
        # count the model's time, in which a run may update its weights, or be interrupted.
        timeout = config.timeout.model_copy(update={"rollout": _NEVER_S})
        update = {"harness": chat.config, "runtime": vf.SubprocessConfig(), "retries": vf.RetryConfig()}
        update |= {"timeout": timeout}
        super().__init__(config.model_copy(update=update), interception=interception)
        self.harness, self._name, self._begin = chat, name, begin

    async def run(self, task: "vf.Task", *, on_trace=None, **options) -> "vf.Trace":
        """Plays a task that has no user."""
        return await super().run(self._ready(task), on_trace=self._watch(on_trace), **options)

    @contextlib.asynccontextmanager
    async def interaction(self, task: "vf.Task", *, on_trace=None, **options) -> AsyncIterator["vf.Interaction"]:
        """Plays a task whose user is the environment."""
        async with super().interaction(self._ready(task), on_trace=self._watch(on_trace), **options) as interaction:
            yield interaction

    def _ready(self, task: "vf.Task") -> "vf.Task":
        self.harness.toolsets = task.toolsets(task.config)
        without = copy.copy(task)
        without.toolsets = lambda config: []
        return without

    def _watch(self, on_trace):
        def watch(trace: "vf.Trace") -> None:
            trace.agent.name, trace.agent.trainable = self._name, self.trainable
            self._begin(trace)
            if on_trace is not None:
                on_trace(trace)

        return watch


class Chat(vf.Harness):
    """Chat with tools, as verifiers' harness `null` has it: it ends with a turn that calls no tool."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    def __init__(self, http: aiohttp.ClientSession, shared: Mapping[str, Tool]):
        """`http` asks for turns; `shared` are the tools that all episodes have."""
        super().__init__(vf.HarnessConfig(id="null"))
        self._http, self._shared, self.toolsets = http, shared, []
        self._tools: dict[str, Tool] = {}

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> "vf.ProgramResult":
        """Asks for turns and calls tools, until a turn has no call or the episode is stopped."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        tools = await self._started(trace)
        body = {"model": ctx.model, "messages": messages, "tools": [tool.schema for tool in tools.values()]}
        if not tools:
            del body["tools"]
        bearer, done = {"Authorization": f"Bearer {secret}"}, vf.ProgramResult(exit_code=0, stdout="", stderr="")
        while True:
            url = f"{endpoint}/chat/completions"
            async with self._http.post(url, headers=bearer, json=body) as answer:
                if answer.status != 200:
                    if trace.stop_condition is None:
                        raise vf.HarnessError(await answer.text())
                    return done
                message = (await answer.json())["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return done
            for call in message["tool_calls"]:
                name, content = call["function"]["name"], f"error: unknown tool {call['function']['name']!r}"
                if name in tools:
                    content = await tools[name].call(json.loads(call["function"]["arguments"]), trace.state)
                result = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
                messages.append(bound_tool_message(result))

    async def _started(self, trace: "vf.Trace") -> dict[str, Tool]:
        """Returns the tools; those of the task are started for the first turn."""
        if not self._tools:
            self._tools |= self._shared
            for toolset in self.toolsets:
                await toolset.setup()
                await toolset.setup_task(trace.task.data)
                self._tools |= await tools_of(toolset)
        return self._tools

    async def cleanup(self, trace: "vf.Trace", runtime: "vf.Runtime") -> None:
        for toolset in self.toolsets:
            await toolset._exit_stack.aclose()
