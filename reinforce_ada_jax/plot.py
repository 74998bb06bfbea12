"""Compares runs: a table at the terminal, figures, and a page with their responses.

    python -m reinforce_ada_jax.plot runs/demo/grpo runs/demo/balance --output=figures

Writes PNG and SVG figures and index.html, which opens from the folder without a server. Everything is shown against
updates, generated tokens and time, because strategies draw different numbers of responses per update.
"""

import pathlib
from collections.abc import Sequence

from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax.config.paths import check_output


def main(workdirs: Sequence[pathlib.Path], output: pathlib.Path) -> None:
    """Prints the tables, draws the figures, and writes the page."""
    from reinforce_ada_jax.reporting import comparison, curves, drawing, history, page, samples

    with cli.user_input():
        if not workdirs:
            raise ValueError("name at least one work directory: python -m reinforce_ada_jax.plot DIR [DIR ...].")
        check_output("--output", output, folder=True)
        histories = history.with_unique_names([history.load(workdir) for workdir in workdirs])
        responses = samples.read_all([run.workdir for run in histories])
    comparisons = comparison.compare_all(histories)
    for compared in comparisons:
        print(compared.text() + "\n")
        if compared.sentence:
            print(compared.sentence + "\n")
    figures = curves.figures(histories)
    drawn = [figure for figure in figures if figure.panels]
    for figure in drawn:
        drawing.draw(figure.panels, output / figure.name, figure.columns)
    print(f"figures (PNG and SVG): {output}/{{{','.join(figure.name for figure in drawn)}}}")
    written = page.write(output, page.render(page.data(histories, comparisons, figures, responses)))
    print(f"open in a browser: {written}")


if __name__ == "__main__":
    OUTPUT = flags.DEFINE_string("output", "figures", "The folder for the figures and index.html.")
    cli.run_with_arguments(lambda arguments: main([pathlib.Path(a) for a in arguments], pathlib.Path(OUTPUT.value)))
