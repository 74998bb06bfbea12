"""Compiles all programs of a run with a model of two layers for TPU slices, and prints a table for docs/scale.md.

    pip install libtpu
    python dev/slices.py                       # all slices, one process after another: about an hour on two cores
    python dev/slices.py v5e:4x4 v5p:2x2x1     # only these

The programs are those of a training with a KL term: the decode window, the hand-over of the weights, the scoring pass
and the update. `mesh.fsdp` takes the chips that `mesh.tensor` leaves.
"""

import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time

SLICES = (
    "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v6e:2x4", "v6e:4x4", "v6e:8x8", "v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4",
)  # fmt: skip
TENSOR = (1, 2, 4)
PROGRAMS = ("decode window of 16", "reshard", "score", "update")
# Heads of 128 numbers, as published models have them, and as many as divide by every `mesh.tensor`.
MODEL = {
    "model_type": "qwen2", "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
CONFIG = ("configs/tiny.py", "model.compute_dtype=bfloat16", "learning.kl_coefficient=0.01", "sampling.slots=2")
ROOT = pathlib.Path(__file__).parents[1]


def compile_slice(topology: str, tensor: int, model: str) -> str:
    """Returns the cell of a slice and `mesh.tensor`: what was compiled, or why not."""
    chips = math.prod(int(size) for size in topology.partition(":")[2].split("x"))
    file, *changes = CONFIG
    changes += [f"mesh.fsdp={chips // tensor}", f"mesh.tensor={tensor}"]
    command = [sys.executable, "-m", "reinforce_ada_jax.compile_check", "--json", f"--config={file}"]
    command += [f"--topology={topology}", f"--model={model}", *(f"--config.{change}" for change in changes)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        return (result.stderr.strip().splitlines() or [f"code {result.returncode}"])[-1]
    compiled = tuple(program["program"] for program in json.loads(result.stdout))
    return "all" if compiled == PROGRAMS else ", ".join(compiled)


def main(slices: list[str]) -> None:
    """Prints the table, a line when a slice is ready."""
    print("| slice |", " | ".join(f"`mesh.tensor` {tensor}" for tensor in TENSOR), "|\n|---|" + "---|" * len(TENSOR))
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for topology in slices or SLICES:
            cells = []
            for tensor in TENSOR:
                begin = time.monotonic()
                cells.append(compile_slice(topology, tensor, folder))
                print(f"{topology} tensor {tensor}: {time.monotonic() - begin:.0f} s: {cells[-1]}", file=sys.stderr)
            print("|", " | ".join([topology, *cells]), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
