"""Compiles a run's programs for a TPU slice that isn't there, and says whether they fit and how fast they could be.

    python -m reinforce_ada_jax.compile_check --config=configs/qwen_1p5b.py --topology=v5e:2x4 [--model=DIR] [--json]

Needs `pip install libtpu` (the TPU compiler; any machine will do) and of the model only its config.json, or nothing for
a model whose sizes are known (`policy/presets.py`). Exit code 1: something doesn't fit; 2: the input is at fault.

Memory is the compiler's own account, per device, and what passes between chips is read from the compiled program. FLOPs
and bytes are counted (`planning/roofline.py`), and `planning/plan.py` adds them up. The least time says
nothing of how well the hardware is used. Nothing here has run on a TPU.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import sys
import time
from typing import Any

import jax
from absl import flags
from jax.experimental import topologies

from reinforce_ada_jax import cli
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.planning import plan as plan_lib
from reinforce_ada_jax.planning import roofline
from reinforce_ada_jax.planning.programs import (
    Abstract,
    Program,
    abstract_run,
    engine_programs,
    learner_programs,
)
from reinforce_ada_jax.planning.roofline import GIB, Chip
from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.policy.architecture import Architecture, from_hf
from reinforce_ada_jax.policy.huggingface import read_config
from reinforce_ada_jax.policy.presets import PUBLISHED
from reinforce_ada_jax.sampling.paged_attention import FOR_PLATFORM
from reinforce_ada_jax.sampling.state import EngineOptions
from reinforce_ada_jax.training import components as components_lib

# A program that computes so much more than it is counted to do repeats work on several devices: the compiler has split
# something otherwise than was meant. (Counts of whole programs agree to 3 %.)
REPEATED_WORK = 1.1


# ---- compiling -----------------------------------------------------------------------------------------------------


def _compiler_flops(compiled: Any) -> float | None:
    """FLOPs of a program as the compiler counts them: the body of a loop once."""
    analysis = compiled.cost_analysis() or {}
    return analysis.get("flops")


def compile_program(program: Program, chip: Chip) -> dict[str, Any]:
    """Compiles, and says what `main` prints and writes; sizes and work per device.

    `hbm_peak_bytes` is the program alone, arguments included. Where it doesn't compile for want of memory, `arguments`
    and `temporaries` are None, and the peak too unless it was HBM that ran out. Where the target doesn't show its
    compiled program there are no `collectives`, and `sent_bytes` is counted by hand, or None.
    """
    begin = time.monotonic()
    arguments = temporaries = peak = reason = sent = repeated = None
    collectives: dict[str, int] = {}
    try:
        compiled = program.lower().compile()
        memory = compiled.memory_analysis()
        arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        peak = memory.peak_memory_in_bytes
        counted = _compiler_flops(compiled) if program.work.once else None
        repeated = counted / program.work.once if counted else None
        text = compiled_text(compiled)
        if text is None:
            sent = program.sent
        else:
            sent, collectives = roofline.sent_bytes(text, program.turns)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        peak = needed_bytes(reason)
    seconds, bound = roofline.roofline(program.work, chip, sent or 0.0)
    over = 0 if peak is None else max(0, peak + program.beside_bytes - chip.hbm_bytes)
    return {
        "program": program.name,
        "compile_seconds": round(time.monotonic() - begin, 1),
        "hbm_argument_bytes": arguments,
        "hbm_temporary_bytes": temporaries,
        "hbm_peak_bytes": peak,
        "hbm_beside_bytes": program.beside_bytes,
        "hbm_limit_bytes": chip.hbm_bytes,
        "fits": reason is None and not over,
        "over_bytes": over,
        "reason": reason,
        "unit": program.unit,
        "flops": program.work.flops,
        "bytes": program.work.bytes,
        "sent_bytes": sent,
        "collectives": collectives,
        "compute_seconds": program.work.flops / chip.flops,
        "link_seconds": None if sent is None else sent / chip.link,
        "least_seconds": seconds,
        "bound": bound,
        "necessary_flops": program.necessary,
        "compiled_over_counted_flops": repeated,
    }


def resident_result(run: Abstract, chip: Chip) -> dict[str, Any]:
    """What stays on each device throughout, in the form of a program's result: where that is too much, nothing fits."""
    size = run.resident_bytes
    over = max(0, size - chip.hbm_bytes)
    return {
        "program": "learner state and cache",
        "hbm_peak_bytes": size,
        "hbm_beside_bytes": 0,
        "hbm_limit_bytes": chip.hbm_bytes,
        "flops": 0.0,
        "fits": not over,
        "over_bytes": over,
    }


def compiled_text(compiled: Any) -> str | None:
    """The compiled program as text; None where the target doesn't show it."""
    try:
        return compiled.as_text()
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None


def needed_bytes(message: str) -> int | None:
    """The HBM that a CompileTimeHbmOom message asks for: "... (27.14G) exceeds available HBM (15.75G)"."""
    found = re.search(r"\(([\d.]+)([KMG])\) exceeds available HBM", message)
    return int(float(found[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[found[2]]) if found else None


# ---- input -------------------------------------------------------------------------------------------------------


def topology_devices(topology: str) -> list[jax.Device]:
    """The devices of a slice, which need not exist.

    Raises:
      ValueError: no compiler here, or no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("compiling for a TPU needs its compiler, which any machine can run: pip install libtpu.")
    # The compiler asks where it runs: first a metadata server, which hangs outside Google's cloud, and then these, of
    # which it complains where they are missing. What they say changes nothing: the topology is named.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # No chip is touched: several may compile at a time, and beside a run that has the chips.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")  # leave a TPU that is here to those who use it
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"--topology={topology}: {error}") from error


def find_architecture(path: str, model: str | None) -> tuple[Architecture, str]:
    """(architecture, where it was found): the --model folder, the configuration's, or the published sizes.

    Raises:
      ValueError: in none of them.
    """
    if model is not None:
        return read_config(model), model
    folder = components_lib.model_folder(path)
    if folder.is_dir():
        return read_config(folder), str(folder)
    if folder.name in PUBLISHED:
        return from_hf(PUBLISHED[folder.name]), f"the published sizes of {folder.name}"
    raise ValueError(
        f"{folder} is not a folder, and the sizes of {folder.name!r} aren't known here (only of "
        f"{', '.join(PUBLISHED)}): --model=DIR with a config.json is enough."
    )


def engine_options(config: Config, architecture: Architecture) -> EngineOptions:
    """The run's engine on a TPU.

    Raises:
      ValueError: it asks for the attention of a GPU.
    """
    # Which tokens end a response changes no size, and the tokenizer that says so may not be here.
    options = components_lib.engine_options(config, architecture.eos_ids or (0,))
    attention = FOR_PLATFORM["tpu"] if config.sampling.attention == "auto" else config.sampling.attention
    if attention == "pallas_gpu":
        raise ValueError("sampling.attention is 'pallas_gpu': a TPU takes auto, pallas_tpu or jnp.")
    return dataclasses.replace(options, attention=attention)


# ---- output ------------------------------------------------------------------------------------------------------


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


def _sent(result: dict[str, Any]) -> str:
    return "-" if result["sent_bytes"] is None else f"{result['sent_bytes'] / 1e9:.2f}"


def row(result: dict[str, Any]) -> str:
    """A line of the table."""
    fits = "yes" if result["fits"] else f"NO: {_gib(result['over_bytes'])} GiB over" if result["over_bytes"] else "NO"
    return (
        f"{result['program']:22}{result['compile_seconds']:7.1f} s{_gib(result['hbm_argument_bytes']):>11}"
        f"{_gib(result['hbm_temporary_bytes']):>13}{_gib(result['hbm_peak_bytes']):>7}"
        f"{_gib(result['hbm_beside_bytes']):>8}{_gib(result['hbm_limit_bytes']):>8}"
        f"{result['flops'] / 1e9:14,.0f}{result['bytes'] / 1e9:10,.2f}{_sent(result):>9}"
        f"{1e3 * result['least_seconds']:11,.2f} ms a {result['unit']}, {result['bound']:9}  {fits}"
    )


HEADER = (
    f"{'program':22}{'compile':>9}{'arguments':>11}{'temporaries':>13}{'peak':>7}{'beside':>8}{'limit':>8}"
    f"{'GFLOP':>14}{'GB':>10}{'GB sent':>9}{'at least':>11}"
)


def remarks(result: dict[str, Any]) -> list[str]:
    """What is to be said of a program beside its line of the table."""
    lines = [result["reason"]] if result["reason"] else []
    if result["collectives"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(result["collectives"].items()))
        lines.append(f"{kinds}: {1e3 * result['link_seconds']:,.2f} ms over links")
    elif result["sent_bytes"]:
        lines.append(
            f"counted by hand, for want of the compiled program: {1e3 * result['link_seconds']:,.2f} ms over links"
        )
    if result["necessary_flops"]:
        lines.append(
            f"{result['flops'] / result['necessary_flops']:.2f} times the FLOPs of 6 N D + attention (4 N D under "
            f"adapters); compute {1e3 * result['compute_seconds']:,.0f} ms"
        )
    if (result["compiled_over_counted_flops"] or 0.0) > REPEATED_WORK:
        lines.append(
            f"WARNING: the compiled program does {result['compiled_over_counted_flops']:.2f} times the work that is "
            "counted (each loop's body once): devices repeat each other's, and the least time is that much too low."
        )
    return lines


@dataclasses.dataclass(frozen=True)
class Lengths:
    """What the flags say of prompts and responses; None: half of the limit, or what the strategy draws."""

    prompt_tokens: int | None = None
    response_tokens: int | None = None
    draws: float | None = None
    pass_rates: tuple[float, float] = (0.6, 1.2)

    def statistics(self, config: Config) -> plan_lib.Statistics:
        """With what isn't given filled in.

        Raises:
          ValueError: a mean outside of what is possible.
        """
        limits = {
            "--mean_prompt_tokens": (self.prompt_tokens, config.data.max_prompt_tokens),
            "--mean_response_tokens": (self.response_tokens, config.sampling.max_response_tokens),
        }
        for name, (value, limit) in limits.items():
            if value is not None and not 1 <= value <= limit:
                raise ValueError(f"{name} is {value}; it must be 1 to {limit}.")
        prompt, response = (limit // 2 if value is None else value for value, limit in limits.values())
        if self.draws is not None and not self.draws > 0:
            raise ValueError(f"--mean_draws is {self.draws}; it must be above 0.")
        if not min(self.pass_rates) > 0:
            raise ValueError(f"--pass_rates is {self.pass_rates}; a Beta distribution's a and b are above 0.")
        draws = plan_lib.expected_draws(config.collection, self.pass_rates) if self.draws is None else self.draws
        most = strategies.build(config.collection).max_kept
        keeps_any = most is not None and most > config.collection.group_size
        return plan_lib.Statistics(prompt, response, draws, filled=min(1.0, draws / most) if keeps_any else 1.0)


def main(config: Config, topology: str, model: str | None, lengths: Lengths, file: str | None) -> None:
    """Compiles one program after the other, and ends the process with code 1 where one doesn't fit."""
    with cli.user_input():
        config_lib.check(config)
        chip = roofline.chip_of(topology)
        architecture, source = find_architecture(config.model.path, model)
        options = engine_options(config, architecture)
        statistics = lengths.statistics(config)
        if file not in (None, "-") and not pathlib.Path(file).absolute().parent.is_dir():
            raise ValueError(f"--json={file}: the folder to write it to does not exist.")
        devices = topology_devices(topology)
        mesh = mesh_lib.make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
        if mesh.size < len(devices):
            raise ValueError(
                f"--topology={topology} has {len(devices)} devices, mesh.data * mesh.fsdp * mesh.tensor only "
                f"{mesh.size}: set --config.mesh.fsdp={len(devices) // (config.mesh.data * config.mesh.tensor)}, or "
                "name a smaller slice."
            )
        run = abstract_run(config, architecture, options, mesh)
        programs = engine_programs(run, statistics.context) + learner_programs(run)
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    output = sys.stderr if file == "-" else sys.stdout
    adapters = ""
    if run.learner.lora is not None:
        count = lora.num_parameters(architecture, run.learner.lora)
        adapters = f"; {count:,} weights of adapters are trained, those under them stay in {config.model.compute_dtype}"
    print(
        f"slice    {topology}, {len(devices)} devices of {_gib(chip.hbm_bytes)} GiB; mesh {axes}\n"
        f"model    {architecture.family}, {architecture.num_parameters:,} weights, from {source}\n"
        f"engine   {run.engine.replicas} replicas, each of {options.slots} slots, {options.pages:,} pages of "
        f"{options.page_size} tokens, {options.attention}, "
        f"{options.dtype}; slots see {statistics.context:,.0f} tokens in the mean\n"
        f"learner  {run.batch.tokens.shape[0]} micro-batches of {run.learner.micro_rows} rows of "
        f"{run.batch.tokens.shape[2]:,} tokens{adapters}\n\n"
        f"Per device; memory in GiB; `beside` is what else a training run keeps there meanwhile.\n{HEADER}",
        file=output,
        flush=True,
    )
    resident = resident_result(run, chip)
    if resident["fits"]:
        results = []
        for program in programs:
            with cli.user_input():
                results.append(compile_program(program, chip))
            lines = [row(results[-1]), *(f"    {line}" for line in remarks(results[-1]))]
            print("\n".join(lines), file=output, flush=True)
        plan = plan_lib.plan_text(
            config, architecture, options, dict(mesh.shape), chip, results, statistics, run.learner_bytes
        )
        print(f"\nA plan from rooflines, not a measurement:\n{plan}", file=output)
    else:
        results = [resident]
        print(
            f"nothing is compiled: learner state ({_gib(run.learner_bytes)}) and cache ({_gib(run.cache_bytes)}) "
            f"are {_gib(resident['over_bytes'])} GiB over",
            *plan_lib.remedies(config, architecture, options, results, run.learner_bytes),
            sep="\nchange   ",
            file=output,
        )
    if file == "-":
        print(json.dumps(results, indent=2))
    elif file is not None:
        pathlib.Path(file).write_text(json.dumps(results, indent=2) + "\n")
    if not all(result["fits"] for result in results):
        sys.exit(cli.STOPPED)


if __name__ == "__main__":
    CONFIG = cli.define_config()
    TOPOLOGY = flags.DEFINE_string("topology", None, "The slice: v5e:2x4, v5p:2x2x1, v6e:2x4, ...", required=True)
    MODEL = flags.DEFINE_string("model", None, "A folder with the model's config.json, in place of model.path.")
    PROMPT = flags.DEFINE_integer("mean_prompt_tokens", None, "Of a prompt; half of the limit.")
    RESPONSE = flags.DEFINE_integer("mean_response_tokens", None, "Of a response; half of the limit.")
    DRAWS = flags.DEFINE_float("mean_draws", None, "Responses drawn for a prompt; what the strategy comes to.")
    RATES = flags.DEFINE_list("pass_rates", ["0.6", "1.2"], "a,b of the prompts' Beta distribution, for the draws.")
    JSON = flags.DEFINE_string("json", None, "A file for the results as a list; --json alone prints it, and only it.")
    sys.argv = ["--json=-" if argument == "--json" else argument for argument in sys.argv]

    def start() -> None:
        with cli.user_input():
            if len(RATES.value) != 2:
                raise ValueError(f"--pass_rates is {','.join(RATES.value)}: write two numbers, as in 0.6,1.2.")
            rates = float(RATES.value[0]), float(RATES.value[1])
        main(
            config_lib.resolve(CONFIG.value),
            TOPOLOGY.value,
            MODEL.value,
            Lengths(PROMPT.value, RESPONSE.value, DRAWS.value, rates),
            JSON.value,
        )

    cli.run(start)
