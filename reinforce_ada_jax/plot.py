"""Compares runs: a table at the terminal, figures, and a page with their responses.

    python -m reinforce_ada_jax.plot runs/demo/grpo runs/demo/balance --output=figures

Writes PNG and SVG figures and index.html, one file that opens without a server. Everything is shown against updates,
generated tokens and time, because strategies draw different numbers of responses per update.

    python -m reinforce_ada_jax.plot runs/demo/grpo runs/demo/balance --watch --port=8080

Serves the same page, which shows what is new while the runs go on, until Ctrl-C. It writes no file.
"""

import contextlib
import pathlib
from collections.abc import Sequence

from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax.config.paths import check_output


def _check_named(workdirs: Sequence[pathlib.Path]) -> None:
    if not workdirs:
        raise ValueError("name at least one work directory: python -m reinforce_ada_jax.plot DIR [DIR ...].")


def main(workdirs: Sequence[pathlib.Path], output: pathlib.Path) -> None:
    """Prints the tables, draws the figures, and writes the page."""
    from reinforce_ada_jax.reporting import comparison, curves, drawing, history, page, samples

    with cli.user_input():
        _check_named(workdirs)
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


def watch(workdirs: Sequence[pathlib.Path], host: str, port: int) -> None:
    """Serves the live page of the runs until Ctrl-C."""
    from reinforce_ada_jax.reporting import live

    with cli.user_input():
        _check_named(workdirs)
        absent = [str(workdir) for workdir in workdirs if not workdir.is_dir()]
        if absent:
            raise ValueError(f"{', '.join(absent)} is not a folder: name the work directory of a run.")
        listener = live.listen(host, port)
        print(f"open in a browser: {live.address_of(listener)}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            live.serve(workdirs, listener)


if __name__ == "__main__":
    OUTPUT = flags.DEFINE_string("output", "figures", "The folder for the figures and index.html.")
    WATCH = flags.DEFINE_bool("watch", False, "Serve a page that shows what is new, and write nothing.")
    HOST = flags.DEFINE_string("host", "127.0.0.1", "Address of --watch; 0.0.0.0: every network of this machine.")
    PORT = flags.DEFINE_integer("port", 8080, "Port of --watch; 0 chooses a free one.", 0, 65_535)

    def start(arguments: list[str]) -> None:
        workdirs = [pathlib.Path(argument) for argument in arguments]
        if WATCH.value:
            watch(workdirs, HOST.value, PORT.value)
        else:
            main(workdirs, pathlib.Path(OUTPUT.value))

    cli.run_with_arguments(start)
