"""Runs side by side: a table at the terminal, figures, and a page to read responses on, from their work directories.

    python -m reinforce_ada_jax.plot runs/demo/grpo runs/demo/balance --output=figures

Writes PNG and SVG figures and index.html, which opens from the folder without a server. Everything is shown against
updates *and* against generated tokens and time: a strategy that draws more responses for each update has to be judged
by all of them.
"""

import pathlib
from collections.abc import Sequence

import numpy as np
from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax.reporting import drawing
from reinforce_ada_jax.reporting import page as page_lib
from reinforce_ada_jax.reporting.curves import figures
from reinforce_ada_jax.reporting.history import History, at_tokens, load, told_apart

EARLY_UPDATES = 25
SPENT = (f"zero-signal 1-{EARLY_UPDATES}", "tokens", "tokens/update")


def table_rows(histories: Sequence[History], benchmark: str) -> tuple[list[int], list[list[str]]]:
    """Updates after which an evaluation was made; and of each run its name, the averages at these, zero-signal share
    early on, tokens spent, tokens an update."""
    evaluated = [history for history in histories if benchmark in history.evaluations]
    moments = sorted({int(update) for history in evaluated for update in history.evaluations[benchmark][0]})
    rows = []
    for history in evaluated:
        updates, _, average, _ = history.evaluations[benchmark]
        by_update = dict(zip(updates.astype(int), average, strict=True))
        early = history.metrics["collection/zero_signal_share"][history.updates <= EARLY_UPDATES]
        rows.append([
            history.name, *(f"{by_update[moment]:.3f}" if moment in by_update else "" for moment in moments),
            f"{early.mean():.2f}" if early.size else "", f"{history.tokens[-1]:,.0f}",
            f"{history.tokens[-1] / history.updates[-1]:,.0f}",
        ])  # fmt: skip
    return moments, rows


def table(histories: Sequence[History], benchmark: str) -> str:
    """`table_rows` for the terminal."""
    moments, found = table_rows(histories, benchmark)
    place = 1 + len(moments)  # of a column that only its heading is in
    title = f"{benchmark} avg@{histories[0].samples} after"
    rows = [[title, *map(str, moments), "updates", *SPENT], *([*row[:place], "", *row[place:]] for row in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [[f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)] for row in rows]
    return "\n".join("  ".join([f"{row[0]:<{widths[0]}}", *line]) for row, line in zip(rows, lines, strict=True))


def what_was_spent(first: History, second: History, benchmark: str) -> str:
    """One sentence on two runs: what the second gained for each update, and what it paid for that."""
    last = min(first.evaluations[benchmark][0][-1], second.evaluations[benchmark][0][-1])
    ends = [float(np.interp(last, h.evaluations[benchmark][0], h.evaluations[benchmark][2])) for h in (first, second)]
    spent = [float(np.interp(last, h.updates, h.tokens)) for h in (first, second)]
    budget = min(spent)
    level = [at_tokens(history, benchmark, budget) for history in (first, second)]
    return (
        f"After {last:.0f} updates {second.name} stands at {ends[1]:.3f} and {first.name} at {ends[0]:.3f}, and "
        f"{second.name} generated {spent[1] / spent[0]:.1f} times the tokens to get there; when both have generated "
        f"{budget:,.0f} tokens, {second.name} stands at {level[1]:.3f} and {first.name} at {level[0]:.3f}."
    )


def summaries(histories: Sequence[History]) -> list[page_lib.Summary]:
    """Table and sentence of each benchmark."""
    result = []
    for benchmark in dict.fromkeys(name for history in histories for name in history.evaluations):
        both = len(histories) == 2 and all(benchmark in history.evaluations for history in histories)
        sentence = what_was_spent(*histories, benchmark) if both else ""
        moments, rows = table_rows(histories, benchmark)
        title = f"{benchmark} avg@{histories[0].samples} after"
        header = [title, *(f"{moment:,} updates" for moment in moments), *SPENT]
        result.append(page_lib.Summary(benchmark, [header, *rows], sentence))
    return result


def main(workdirs: Sequence[pathlib.Path], output: pathlib.Path) -> None:
    """Prints the tables, draws the figures, writes the page, and names it."""
    with cli.user_input():
        if not workdirs:
            raise ValueError("name at least one work directory: python -m reinforce_ada_jax.plot DIR [DIR ...].")
        histories = told_apart([load(workdir) for workdir in workdirs])
        responses = page_lib.read_responses(histories)
    found = summaries(histories)
    for summary in found:
        print(table(histories, summary.benchmark) + "\n")
        if summary.sentence:
            print(summary.sentence + "\n")
    made = figures(histories)
    for figure in made:
        if figure.panels:
            drawing.draw(figure.panels, output / figure.name, figure.columns)
    drawn = [figure.name for figure in made if figure.panels]
    print(f"figures (PNG and SVG): {output}/{{{','.join(drawn)}}}")
    print(f"open in a browser: {page_lib.write(output, histories, found, made, responses)}")


if __name__ == "__main__":
    OUTPUT = flags.DEFINE_string("output", "figures", "The folder for the figures and index.html.")
    cli.run_with_arguments(lambda arguments: main([pathlib.Path(a) for a in arguments], pathlib.Path(OUTPUT.value)))
