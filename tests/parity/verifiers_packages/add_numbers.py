"""Sums with a tool server, whose calls are counted in the state, and a stop after three results."""

import verifiers.v1 as vf


class State(vf.State):
    sums: int = 0


class ToolsConfig(vf.ToolsetConfig):
    pass


class Tools(vf.Toolset[ToolsConfig, State]):
    TOOL_PREFIX = "calc"

    async def setup_task(self, task):
        self.unit = task.unit

    @vf.tool
    async def add(self, a: int, b: int = 1) -> str:
        """Adds two numbers."""
        self.state.sums += 1
        return f"{a + b} {self.unit}"

    @vf.tool
    def fail(self) -> str:
        """Fails."""
        raise RuntimeError("no luck")


class Data(vf.TaskData):
    answer: str
    unit: str


class Task(vf.Task[Data, State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(ToolsConfig())]

    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.1)
    async def asked(self, trace) -> float:
        return trace.state.sums + 0.5 * len(trace.tool_messages)

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return len(trace.tool_messages) >= 2


class Sums(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for number in range(5):
            yield Task(
                Data(prompt=f"{number} + 3 apples", answer=f"{number + 3} apples", unit="apples"), self.config.task
            )


__all__ = ["Sums"]

if __name__ == "__main__":
    Tools.run()
