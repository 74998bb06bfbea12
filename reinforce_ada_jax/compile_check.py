"""Compiles a run's programs for a TPU slice or GPUs that are not there: memory, traffic, least time.

    python -m reinforce_ada_jax.compile_check --config=configs/qwen_1p5b.py --topology=v5e:2x4 [--model=DIR] [--json]

Needs `pip install libtpu`, the TPU compiler, or for a topology such as h100:8 `pip install 'jax[cuda12]'`; any machine
will do. Of the model it needs only the config.json, or nothing where the sizes are known (`policy/presets.py`). Exit
code 1: something doesn't fit; 2: the input is at fault.

Memory is the compiler's own account, per device. FLOPs and bytes are counted (`planning/roofline.py`), and
`planning/plan.py` adds up the seconds that they take at least. Traffic between chips and the start of kernels take more
time. `simulate` computes the draws of a strategy, for --mean_draws. This command runs none of the programs, and no TPU
has run one yet.
"""

import dataclasses
import json
import sys

from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.config.paths import check_output
from reinforce_ada_jax.files import buckets


def main(
    config: Config,
    topology: str,
    model: str | None,
    file: str | None,
    *,
    prompt_tokens: int | None = None,
    response_tokens: int | None = None,
    draws: float | None = None,
    slices: int = 1,
) -> None:
    """Checks the input, compiles, writes the JSON, and ends the process with code 1 where something doesn't fit."""
    from reinforce_ada_jax.planning import plan, report

    with cli.user_input():
        config_lib.check(config)
        means = plan.statistics(config, prompt_tokens=prompt_tokens, response_tokens=response_tokens, draws=draws)
        if file not in (None, "-"):
            check_output("--json", file, folder=False)
        output = sys.stderr if file == "-" else sys.stdout
        results = report.check_slice(
            config, topology, model, means, log=lambda text: print(text, file=output, flush=True), slices=slices
        )
    text = json.dumps([dataclasses.asdict(result) for result in results], indent=2)
    if file == "-":
        print(text)
    elif file is not None:
        with buckets.output(file) as written:
            written.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(text + "\n")
    if not all(result.fits for result in results):
        sys.exit(cli.STOPPED)


if __name__ == "__main__":
    CONFIG = cli.define_config()
    TOPOLOGY = flags.DEFINE_string(
        "topology", None, "The slice, or the GPUs of a host: v5e:2x4, v6e:2x4, h100:8, ...", required=True
    )
    SLICES = flags.DEFINE_integer("slices", 1, "Equal slices of the run; mesh.data goes over them.", lower_bound=1)
    MODEL = flags.DEFINE_string("model", None, "A folder with the model's config.json, in place of model.path.")
    PROMPT = flags.DEFINE_integer("mean_prompt_tokens", None, "Mean length of prompts; default: half the limit.")
    RESPONSE = flags.DEFINE_integer("mean_response_tokens", None, "Mean length of responses; default: half the limit.")
    DRAWS = flags.DEFINE_float("mean_draws", None, "Mean responses for a prompt; default: those of its first round.")
    JSON = flags.DEFINE_string("json", None, "A file for the results as a list; --json alone prints it, and only it.")
    sys.argv = ["--json=-" if argument == "--json" else argument for argument in sys.argv]
    cli.run(
        lambda: main(
            cli.resolved(CONFIG), TOPOLOGY.value, MODEL.value, JSON.value,
            prompt_tokens=PROMPT.value, response_tokens=RESPONSE.value, draws=DRAWS.value, slices=SLICES.value,
        )
    )  # fmt: skip
