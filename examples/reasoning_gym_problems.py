"""Problems of a generator of reasoning-gym, as files for `train` and `evaluate`.

    pip install reasoning-gym==0.1.25
    python examples/reasoning_gym_problems.py --generator=chain_sum --output=runs/sums \\
        --settings=min_terms=2,max_terms=2,min_digits=1,max_digits=2

Written are problems.jsonl and heldout.jsonl ("problem", "answer"); no question is in both. reasoning-gym (Apache-2.0,
github.com/open-thought/reasoning-gym) has about a hundred generators. Their questions are used as they are. Choose a
`reward.kind` that compares the answers of the generator: `gsm8k` for whole numbers.
"""

import json
import pathlib

import problem_files
from absl import flags

from reinforce_ada_jax import cli


def parsed(settings: list[str]) -> dict[str, object]:
    """Returns {name: value} of texts "name=value"; values are JSON, or else text. ValueError: there is no "="."""
    found: dict[str, object] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--settings has {setting!r}, which is not name=value.")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def main(output: pathlib.Path, generator: str, settings: list[str], sizes: tuple[int, int], seed: int) -> None:
    """Writes the two files, of `sizes` problems, into the new folder `output`."""
    with cli.user_input():
        if output.exists():
            raise ValueError(f"{output} exists already: remove it, or give another --output.")
        try:
            import reasoning_gym  # noqa: PLC0415  (a package that this one does not need)
        except ImportError as error:
            raise ValueError(f"{error}. Run: pip install reasoning-gym") from error
        rows = iter(reasoning_gym.create_dataset(generator, size=10**9, seed=seed, **parsed(settings)))

        def draw() -> tuple[str, str]:
            row = next(rows)
            return row["question"], row["answer"]

        drawn = problem_files.distinct(draw, sum(sizes))
    output.mkdir(parents=True)
    for name, pairs in (("problems", drawn[: sizes[0]]), ("heldout", drawn[sizes[0] :])):
        named = enumerate(pairs)
        problem_files.write(
            output / f"{name}.jsonl", [{"id": f"{name}-{n:05d}", "problem": q, "answer": a} for n, (q, a) in named]
        )
    print(f"{sizes[0]:,} problems of {generator}, {sizes[1]:,} held out: {output}")


if __name__ == "__main__":
    OUTPUT = flags.DEFINE_string("output", None, "The folder to write; it must not exist.", required=True)
    GENERATOR = flags.DEFINE_string("generator", None, "Name of a generator of reasoning-gym.", required=True)
    SETTINGS = flags.DEFINE_list("settings", [], "Its settings: name=value, with commas between.")
    PROBLEMS = flags.DEFINE_integer("problems", 3000, "Problems to train on.", 1, 10**6)
    HELDOUT = flags.DEFINE_integer("heldout", 96, "Problems held out.", 1, 10**6)
    SEED = flags.DEFINE_integer("seed", 0, "Of the generator.")

    def start() -> None:
        sizes = PROBLEMS.value, HELDOUT.value
        main(pathlib.Path(OUTPUT.value), GENERATOR.value, SETTINGS.value, sizes, SEED.value)

    cli.run(start)
