"""Measures parts of a run, and plans runs on machines that aren't there.

    python -m reinforce_ada_jax.benchmark rollout --model=HF_DIR --workload=FILE --slots=64 --window=64 --json=OUT
    python -m reinforce_ada_jax.benchmark rollout ... --against=transformers --against_python=.venv-parity/bin/python
    python -m reinforce_ada_jax.benchmark rollout --model=Qwen2.5-1.5B --dtype=bfloat16 --requests=1024
        --prompt_tokens=512 --response_tokens=1024 --slots=256 --page_size=64
    python -m reinforce_ada_jax.benchmark adaptive --slots=256 --scale=0.25 --barrier
    python -m reinforce_ada_jax.benchmark adaptive --simulate --slots=512 --lengths=RUN --model=Qwen2.5-1.5B
        --dtype=bfloat16 --bandwidth=8.1e11
    python -m reinforce_ada_jax.benchmark learning --output=runs/learning --seeds=5 --jobs=2 --json=OUT
    python -m reinforce_ada_jax.benchmark update --model=HF_DIR --against=transformers
        --against_python=.venv-parity/bin/python --json=OUT
    python -m reinforce_ada_jax.benchmark iteration --config=configs/tiny.py --json=OUT
    python -m reinforce_ada_jax.benchmark iteration ... --against=trl --against_python=PYTHON
    python -m reinforce_ada_jax.benchmark loss --rows=16 --row_tokens=1024 --words=151936 --columns=256 --json=OUT
    python -m reinforce_ada_jax.benchmark split --config=configs/tiny.py --shape=128x4 --json=OUT
    python -m reinforce_ada_jax.benchmark split --config=configs/qwen_1p5b.py --topology=v5e:2x4
    python -m reinforce_ada_jax.benchmark start --json=OUT
    python -m reinforce_ada_jax.benchmark accelerator --json=OUT
    python -m reinforce_ada_jax.benchmark preemption --config=configs/tiny.py --json=OUT
    python -m reinforce_ada_jax.benchmark turns --shape=512x8 --slots=16 --json=OUT
    python -m reinforce_ada_jax.benchmark serve --shape=512x8 --slots=64 --requests=256 --json=OUT

`rollout` draws a fixed number of responses for each prompt. `adaptive` draws rounds until scripted verdicts balance.
`learning` trains the built-in model with every algorithm. `update` measures one update of the learner, `loss` the
policy loss and its gradients, and `iteration` whole iterations by their phases. `split` measures iterations that are
drawn while the one before is learned, and predicts them for a TPU slice. `start` measures the seconds until the first
sampled token. `turns` draws trajectories of several turns, beside one turn of as many tokens. `serve` samples through
the server of the tinker client, beside the engine alone. `accelerator` puts hand-over, prefill, decoding, loss and
update beside the limits of the device. `preemption` tells a run to end in each phase, and measures the work that is
lost and the seconds to the end. --simulate runs only the scheduling.
docs/performance.md explains the numbers and lists results.
"""

import importlib
import json
from typing import Any

from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax.benchmarks import options
from reinforce_ada_jax.config.paths import check_output
from reinforce_ada_jax.files import buckets

# Modules of `benchmarks`, each with a function `run` from the flags to its numbers.
BENCHMARKS = (
    "rollout",
    "adaptive",
    "learning",
    "loss",
    "update",
    "iteration",
    "split",
    "start",
    "serve",
    "accelerator",
    "preemption",
    "turns",
)


def measured(name: str, values: flags.FlagValues) -> dict[str, Any]:
    """Runs a benchmark and returns its numbers; impossible flags end the process."""
    from reinforce_ada_jax.distributed import mesh

    with cli.user_input():
        if values.json:
            check_output("--json", values.json, folder=False)
        on_cpu = mesh.available_devices()[0].platform == "cpu"
        if values.dtype == "auto":  # the subprocesses of `accelerator` have another device than this process
            values.dtype = "float32" if on_cpu and name != "accelerator" else "bfloat16"
        return importlib.import_module(f"reinforce_ada_jax.benchmarks.{name}").run(values)


def summary(result: dict[str, Any], indent: str = "") -> str:
    """Returns a line for each number, nested ones indented."""
    lines = []
    for name, value in result.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}", summary(value, indent + "  ")]
            continue
        if isinstance(value, float):
            text = f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"
        elif isinstance(value, list):
            text = " ".join(f"{item:.3g}" for item in value)
        else:
            text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        lines.append(f"{indent}{name:<28}{text}")
    return "\n".join(lines)


def main(arguments: list[str], values: flags.FlagValues) -> None:
    """Runs the benchmark that the first argument names, prints its numbers, and keeps them in --json."""
    from reinforce_ada_jax.files.durable import write_atomically

    if len(arguments) != 1 or arguments[0] not in BENCHMARKS:
        cli.fail(f"name one benchmark, and nothing else: {', '.join(BENCHMARKS)}. Options are --name=value.")
    result = {"benchmark": arguments[0], **measured(arguments[0], values)}
    print(summary(result))
    if values.json:
        with buckets.output(values.json) as file:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(result, indent=2) + "\n")
        print(f"kept in {values.json}")


if __name__ == "__main__":
    options.define_flags(flags.FLAGS)

    def run_named(arguments: list[str]) -> None:
        import jax

        from reinforce_ada_jax.benchmarks import engines

        if arguments and arguments[0] in ("update", "accelerator", "preemption"):
            jax.config.update("jax_platforms", "cpu")  # accelerators belong to its subprocesses
        elif arguments and arguments[0] in ("rollout", "adaptive", "split"):
            engines.use_one_core_per_replica(flags.FLAGS)
        main(arguments, flags.FLAGS)

    cli.run_with_arguments(run_named)
