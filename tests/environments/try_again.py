"""A task in turns: the built-in model has three tries at a word; its environment waits where a test says so."""

import json
import pathlib
import shutil

from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.training import components

# "=" and "." are the characters of the model's vocabulary that are no letters.
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
CLASS = """
import os, pathlib, time

FOLDER = pathlib.Path(__file__).parent

class TryAgain:
    def __init__(self, rng):
        self.rng, self.tries = rng, 0

    def reset(self, problem):
        self.name, self.answer = problem["id"], problem["answer"]
        return [{"role": "user", "content": problem["problem"]}]

    def step(self, messages):
        self.tries += 1
        if self.tries > 1:
            self.follow()
        if messages[-1]["content"] == self.answer:
            return 1 / self.tries
        if self.tries == 3:
            print("three tries")
            return 0
        return [{"role": "user", "content": "." * int(self.rng.integers(1, 3)) + "="}]

    def follow(self):
        # A line for each turn but the first ones. They wait from the line on that the file "hold" names.
        with (FOLDER / "turns").open("a") as file:
            file.write(self.name + chr(10))
        hold = FOLDER / "hold"
        if hold.exists() and len((FOLDER / "turns").read_text().splitlines()) > int(hold.read_text()):
            with (FOLDER / "held").open("a") as file:
                file.write(str(os.getpid()) + chr(10))
            while hold.exists():
                time.sleep(0.01)


class Broken(TryAgain):
    def step(self, messages):
        raise RuntimeError("no luck today")

class Strict(TryAgain):
    def step(self, messages):
        said = messages[-1]["content"]
        if said == "e":
            raise RuntimeError
        if said == "t":
            time.sleep(3600)
        if said == "c":
            os._exit(3)
        return 1 if said == "r" else -1
"""


def write(folder: pathlib.Path) -> pathlib.Path:
    """Writes the model, the environment `mine.py`, 12 problems and 8 that are held out; returns the folder."""
    shutil.copytree(components.model_folder("package:cipher"), folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "mine.py").write_text(CLASS)
    for name, split, count in (("prompts", "train", 12), ("heldout", "heldout", 8)):
        lines = [json.dumps(problem) + "\n" for problem in cipher.problems(split)[:count]]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def settings(folder: pathlib.Path) -> dict[str, object]:
    """Returns the settings of runs on the task."""
    return {
        "model.path": str(folder / "model"), "data.prompts": str(folder / "prompts.jsonl"),
        "data.template": "chat", "data.system": "", "data.instruction": "", "data.max_prompt_tokens": 8,
        "evaluation.benchmarks": (str(folder / "heldout.jsonl"),), "evaluation.max_response_tokens": 24,
        "sampling.max_response_tokens": 24, "environment.path": f"{folder}/mine.py:TryAgain",
        "environment.max_turns": 3, "environment.max_turn_tokens": 8, "reward.time_limit_s": 30.0, "reward.workers": 2,
    }  # fmt: skip
