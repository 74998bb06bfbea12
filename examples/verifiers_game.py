"""The guessing game of examples/environments.py, written for the `verifiers` package (docs/how_to/environments.md).

A wrong guess is answered by "higher" or "lower". The number found gives 1, and finding it early up to 0.2 more.
"""

import verifiers.v1 as vf

NUMBERS, GUESSES, COPIES = 7, 3, 16


class Data(vf.TaskData):
    """A task: its prompt, and the number to be found."""

    answer: int


class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    """Rewards of a conversation."""

    @vf.reward
    async def found(self, trace) -> float:
        """1 if the last guess is the number."""
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.2)
    async def early(self, trace) -> float:
        """1 for the first guess, 1/2 for the second one, and so on, if it is the number."""
        return await self.found(trace) / trace.num_turns


class Numbers(vf.Taskset[Task, vf.TasksetConfig]):
    """Every number several times: what the model can't know is the only difference."""

    def load(self):
        """Yields the tasks."""
        for index in range(NUMBERS * COPIES):
            answer = 1 + index % NUMBERS
            yield Task(Data(prompt=f"Guess, 1 to {NUMBERS}.", answer=answer), self.config.task)


class Config(vf.EnvConfig):
    """The environment has one agent, which has three guesses."""

    player: vf.AgentConfig = vf.AgentConfig(max_turns=GUESSES)


class Game(vf.Env[Config]):
    """The environment is the user of the conversation."""

    async def run(self, task, agents):
        """Answers guesses until the number is found, or a turn is no number of the game."""
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply in map(str, range(1, NUMBERS + 1)):
                guess = int(segment.last_reply)
                if guess == task.data.answer:
                    break
                segment = await interaction.turn("higher" if guess < task.data.answer else "lower")


__all__ = ["Game", "Numbers"]
