"""A guessing game whose user is the environment, with two weighted rewards and a limit of turns."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: int


class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.75)
    async def found(self, trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.25)
    async def short(self, trace) -> float:
        return 1.0 / trace.num_turns


class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=3)


class Game(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                said = segment.last_reply
                if said == "crash":
                    raise RuntimeError("the game crashed")
                if not said.isdecimal() or int(said) == task.data.answer:
                    break
                segment = await interaction.turn("higher" if int(said) < task.data.answer else "lower")

    async def finalize(self, task, episode):
        episode.traces[0].record_reward("bonus", 0.5 * (episode.num_turns == 2), weight=2.0)


class Numbers(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for number in range(1, 8):
            yield Task(Data(prompt="Guess, 1 to 7.", system_prompt="Be brief.", answer=number), self.config.task)


__all__ = ["Game", "Numbers"]
