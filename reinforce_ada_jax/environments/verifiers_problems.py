"""Writes the tasks of an environment of `verifiers` as a problem file, one JSON object a line.

    python -m reinforce_ada_jax.environments.verifiers_problems --environment=verifiers:gsm8k-v1 --first=0 --num=1000 \\
        --output=problems.jsonl

Each line has `id`, `problem`, `answer` where the task has one, and `task`, from which `reset` makes it again.
"""

import json
import pathlib

from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax.environments import loading
from reinforce_ada_jax.files import durable


def main(environment: str, output: pathlib.Path, first: int, num: int | None) -> None:
    """Writes `num` tasks from the position `first` on, None: all."""
    with cli.user_input():
        _, settings = loading.named(loading.file_reference(environment))
        if settings is None:
            raise ValueError(f"--environment is {environment!r}, which is no environment of verifiers.")
        from reinforce_ada_jax.environments import verifiers_adapter  # noqa: PLC0415  (verifiers is optional)

        rows = list(verifiers_adapter.rows(settings, first, None if num is None else first + num))
        durable.write_atomically(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{len(rows)} tasks: {output}")


if __name__ == "__main__":
    ENVIRONMENT = flags.DEFINE_string("environment", None, "As environment.path names it.", required=True)
    OUTPUT = flags.DEFINE_string("output", None, "The JSONL file to write.", required=True)
    FIRST = flags.DEFINE_integer("first", 0, "Position of the first task.", lower_bound=0)
    NUM = flags.DEFINE_integer("num", None, "Number of tasks; by default all.", lower_bound=1)
    cli.run(lambda: main(ENVIRONMENT.value, pathlib.Path(OUTPUT.value), FIRST.value, NUM.value))
