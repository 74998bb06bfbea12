"""Computes draws, signal and noise of a collection strategy, before a model runs.

    python -m reinforce_ada_jax.simulate --strategy=balance --pass_rates=0.01:0.99
    python -m reinforce_ada_jax.simulate --strategy=grpo@8,positive,balance --max_rounds=8 --output=figures
    python -m reinforce_ada_jax.simulate --config=configs/qwen_1p5b.py --histogram=prompts.jsonl

The table is exact (analysis/enumeration.py defines its columns). A strategy is written NAME, NAME@n for groups of n,
NAME/MxN for N rounds of M, and NAME+log, NAME+exact or NAME+log+none for another objective and correction; NAME may be
file.py:function. For `estimate` the pass rates given are the prompts that share the budget. A --histogram is a JSONL
file whose lines have a "pass_rate", as `prepare` writes them. Settings that decide what is drawn and kept are flags,
too, such as --group_size=8 and --objective=log: --help=collection describes them.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict

from reinforce_ada_jax import cli
from reinforce_ada_jax.analysis.comparison import compare
from reinforce_ada_jax.analysis.inputs import NUM_RATES, Inputs, parse_pass_rates, read_histogram, strategy_settings
from reinforce_ada_jax.config import CollectionConfig, defaults, resolve
from reinforce_ada_jax.config.paths import check_local, check_output

# Settings of the `collection` section that decide what is drawn and kept; each is a flag.
SETTINGS = (
    "group_size", "samples_per_round", "max_rounds", "k_pos", "k_neg", "max_draws", "retry_probability",
    "objective", "objective_alpha", "objective_k", "objective_epsilon", "correction", "control_variate", "baseline",
    "keep", "allocation", "normalize_by_std",
)  # fmt: skip


def get_config() -> ConfigDict:
    """Returns the configuration without --config: every setting at its default."""
    return defaults()


def define_flags(values: flags.FlagValues = flags.FLAGS) -> flags.FlagValues:
    """Defines --config, the flags of the command, and one flag for each of SETTINGS."""
    cli.config_flag(values, "The configuration to begin with: a packaged one, or a file.", default=__file__)
    rates = f"LOW:HIGH, evenly spaced in logits, LOW:HIGH:COUNT ({NUM_RATES}), or a comma list."
    flags.DEFINE_string("pass_rates", "0.01:0.99", rates, flag_values=values)
    flags.DEFINE_string("histogram", None, "A JSONL file of prompts with pass rates.", flag_values=values)
    flags.DEFINE_string("output", None, "A folder for figure and numbers.", flag_values=values)
    flags.DEFINE_list("strategy", [], "One or several: NAME@n/MxN+objective+correction.", flag_values=values)
    flags.DEFINE_integer("tokens_per_response", None, "Mean length of a response.", 1, flag_values=values)
    for field in dataclasses.fields(CollectionConfig):
        if field.name in SETTINGS:
            cli.DEFINE[field.type](field.name, None, field.metadata["text"], flag_values=values)
    return values


def read_inputs(options: flags.FlagValues, strategies: Sequence[str] = ()) -> Inputs:
    """Returns the inputs that the flags name; prints a summary of the prompt set, where there is one.

    Where the flags name no strategy, `strategies` are used, or else the configured one. Raises ValueError where a
    strategy, a pass rate or the prompt file breaks a rule.
    """
    given = {name: options[name].value for name in SETTINGS}
    section = resolve(options.config).collection
    section = dataclasses.replace(section, **{name: value for name, value in given.items() if value is not None})
    if options.output is not None:
        check_local("--output", options.output)
        check_output("--output", options.output, folder=True)
    if options["strategy"].present and not options.strategy:
        raise ValueError("--strategy is empty: name a strategy, such as --strategy=balance, or leave the flag out.")
    entries = list(dict.fromkeys(options.strategy)) or strategies or (section.strategy,)
    inputs = Inputs(
        {entry: strategy_settings(entry, section) for entry in entries}, parse_pass_rates(options.pass_rates),
        output=options.output, tokens_per_response=options.tokens_per_response,
    )  # fmt: skip
    if not options.histogram:
        return inputs
    prompts, lacking = read_histogram(pathlib.Path(options.histogram))
    print(f"{options.histogram}: {len(prompts):,} prompts of mean pass rate {prompts.mean():.3f}")
    if lacking:
        lines = ", ".join(map(str, lacking[:5])) + (", ..." if len(lacking) > 5 else "")
        print(f"{len(lacking):,} lines without a pass_rate are left out: {lines}")
    print()
    return dataclasses.replace(inputs, prompts=prompts)


def main(options: flags.FlagValues) -> None:
    """Prints the table that the flags ask for."""
    with cli.user_input():
        compare(read_inputs(options))


if __name__ == "__main__":
    define_flags()
    cli.run(lambda: main(flags.FLAGS), {"Flags": {*flags.FLAGS} - {*SETTINGS}})
