"""avg@k and pass@k of a run's newest checkpoint, or of a Hugging Face folder, on benchmark files.

python -m reinforce_ada_jax.evaluate --config=configs/tiny.py --workdir=runs/tiny
python -m reinforce_ada_jax.evaluate --config=configs/qwen_1p5b.py --model=HF_DIR --benchmarks=a.jsonl --samples=32
"""

import functools
import json
import math
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from reinforce_ada_jax import assembly, command, sharing
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.assembly import Parts
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import VerifyFn, collect
from reinforce_ada_jax.data.prompts import benchmark_name
from reinforce_ada_jax.metrics import Progress, write_whole
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.rewards.shaping import Shaping
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.sampling.token import stream
from reinforce_ada_jax.types import Pool, Prompt

Benchmarks = dict[str, list[Prompt]]


def pass_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """The unbiased chance that at least one of k samples is correct: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def statistics(pools: Sequence[Pool]) -> dict[str, float]:
    """avg@n with its standard error over problems, pass@k for k = 1, 2, 4, ..., n, and the truncated share.

    Args:
      pools: one a problem, all of n responses.
    """
    num_correct = np.array([pool.correct.sum() for pool in pools])
    samples = len(pools[0].responses)
    shares = num_correct / samples
    error = shares.std(ddof=1) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0
    result = {"avg": float(shares.mean()), "avg_standard_error": float(error)}
    for k in (2**power for power in range(samples.bit_length())):
        result[f"pass_at_{k}"] = float(np.mean([pass_at_k(int(c), samples, k) for c in num_correct]))
    truncated = [response.truncated for pool in pools for response in pool.responses]
    return result | {"truncated_share": float(np.mean(truncated))}


def load_benchmarks(parts: Parts, config: ConfigDict) -> Benchmarks:
    """The configured benchmarks by name, tokenised.

    Raises:
      ValueError: two of them have the same name.
    """
    benchmarks: Benchmarks = {}
    for source in config.evaluation.benchmarks:
        name = benchmark_name(source)
        if name in benchmarks:
            raise ValueError(f"two benchmarks are called {name!r}: rename one of the files.")
        benchmarks[name] = parts.prompts(source, config)
    return benchmarks


def verify_fns(parts: Parts, verifiers: VerifierPool, config: ConfigDict) -> dict[str, VerifyFn]:
    """How each benchmark is graded. Right or wrong: nothing shapes the reward of an evaluation."""
    shaping, graders = Shaping(config.reward.positive_threshold), assembly.benchmark_graders(config)
    names = map(benchmark_name, config.evaluation.benchmarks)
    return {name: parts.verify_fn(verifiers, shaping, graders.get(name, "")) for name in names}


def evaluate(
    benchmarks: Benchmarks,
    params: Params,
    rollouts: Rollouts,
    verify_fns: dict[str, VerifyFn],
    config: ConfigDict,
    iteration: int,
    on_progress: Callable[[str], None],
) -> dict[str, float]:
    """`evaluation/<set>/...` of these weights: samples drawn and graded by the very loop that trains."""
    metrics = {}
    strategy = strategies.fixed(config.evaluation.samples)
    evaluation = config.evaluation
    sampling = SamplingParams(
        evaluation.max_response_tokens, evaluation.temperature, top_k=evaluation.top_k, top_p=evaluation.top_p
    )
    sample_fn = rollouts.sampler(params, stream=stream(iteration, evaluation=True), sampling=sampling)

    def report(closed: int, drawn: int) -> None:
        on_progress(f"evaluating {name}: {closed}/{len(prompts)} problems, {drawn:,} responses")

    for name, prompts in benchmarks.items():
        pools = sharing.draw_everywhere(
            prompts,
            strategy,
            functools.partial(
                collect,
                sample_fn=sample_fn,
                verify_fn=verify_fns[name],
                deterministic=assembly.deterministic(config),
                on_progress=report,
            ),
        )
        metrics |= {f"evaluation/{name}/{key}": value for key, value in statistics(pools).items()}
    return metrics


def save(workdir: pathlib.Path, iteration: int, metrics: dict[str, float]) -> pathlib.Path:
    """Writes evaluations/<iteration>.json; benchmarks evaluated before and not now stay in it."""
    file = workdir / "evaluations" / f"{iteration:06d}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(file.read_text()) if file.exists() else {"iteration": iteration}
    now = {key.split("/")[1] for key in metrics}
    others = {key: value for key, value in before.items() if "/" not in key or key.split("/")[1] not in now}
    write_whole(file, json.dumps(others | metrics, indent=2) + "\n")
    return file


def table(metrics: dict[str, float], samples: int) -> str:
    """A line a benchmark: avg@k with its standard error, pass@k, truncated share."""
    names = list(dict.fromkeys(key.split("/")[1] for key in metrics))
    powers = [2**power for power in range(1, samples.bit_length())]
    header = ["benchmark", f"avg@{samples}", *(f"pass@{k}" for k in powers), "truncated"]
    lines = [header]
    for name in names:
        value = {key.split("/")[2]: number for key, number in metrics.items() if key.split("/")[1] == name}
        average = f"{value['avg']:.3f} ± {value['avg_standard_error']:.3f}"
        lines.append(
            [name, average, *(f"{value[f'pass_at_{k}']:.3f}" for k in powers), f"{value['truncated_share']:.3f}"]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main(
    config: ConfigDict, workdir: str | None, model: str | None, benchmarks: list[str], samples: int | None
) -> None:
    """Reads the weights, evaluates, prints the table, and keeps it in the work directory."""
    from reinforce_ada_jax import export  # noqa: PLC0415  (export reads checkpoints; Orbax takes a second to import)

    with command.user_input():
        if (workdir is None) == (model is None):
            raise ValueError("give either --workdir (a run of ours) or --model (a Hugging Face folder).")
        if benchmarks:
            config.evaluation.benchmarks = tuple(benchmarks)
        if samples is not None:
            config.evaluation.samples = samples
        config_lib.validate(config)
        if not config.evaluation.benchmarks:
            raise ValueError("there is nothing to evaluate on: --benchmarks=FILE.jsonl[,FILE.jsonl].")
        folder = pathlib.Path(model) if model else assembly.model_folder(config.model.path)
        parts = assembly.parts(config, folder)
        sets = load_benchmarks(parts, config)
        verifier_pool = assembly.verifier_pool(config)
        if workdir is None:
            iteration, params = 0, huggingface.load(folder, parts.mesh, config.model.parameter_dtype)[1]
        else:
            iteration, params = export.read_params(
                pathlib.Path(workdir), config, parts, None, config.model.compute_dtype
            )
    progress = Progress(total=1, done=0)
    with verifier_pool as verifiers:
        metrics = evaluate(
            sets,
            params,
            Rollouts(parts.engine),
            verify_fns(parts, verifiers, config),
            config,
            iteration,
            progress.phase,
        )
    progress.close()
    print(table(metrics, config.evaluation.samples))
    if workdir is not None:
        print(f"kept in {save(pathlib.Path(workdir), iteration, metrics)}")


if __name__ == "__main__":
    CONFIG = command.define_config()
    WORKDIR = flags.DEFINE_string("workdir", None, "A run's work directory: its newest checkpoint is evaluated.")
    MODEL = flags.DEFINE_string("model", None, "A Hugging Face folder to evaluate instead.")
    BENCHMARKS = flags.DEFINE_list("benchmarks", [], "JSONL files, in place of the configured ones.")
    SAMPLES = flags.DEFINE_integer("samples", None, "Responses for each problem, in place of evaluation.samples.")
    command.run(lambda: main(CONFIG.value, WORKDIR.value, MODEL.value, BENCHMARKS.value, SAMPLES.value))
