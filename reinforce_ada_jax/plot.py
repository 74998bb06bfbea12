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
from reinforce_ada_jax.config.paths import check_local, check_output
from reinforce_ada_jax.files import buckets, local_copy


def _check_named(workdirs: Sequence[buckets.Named]) -> None:
    if not workdirs:
        raise ValueError("name at least one work directory: python -m reinforce_ada_jax.plot DIR [DIR ...].")


def main(workdirs: Sequence[buckets.Named], output: buckets.Named) -> None:
    """Prints the tables, draws the figures, and writes the page; runs and page may be in buckets."""
    with contextlib.ExitStack() as stack:
        with cli.user_input():
            _check_named(workdirs)
            check_output("--output", output, folder=True)
            folders = [stack.enter_context(local_copy.opened(workdir, "a run"))[0] for workdir in workdirs]
            written = stack.enter_context(buckets.output(output))
        _plot(folders, written, output)


def _plot(workdirs: Sequence[pathlib.Path], output: pathlib.Path, named: buckets.Named) -> None:
    from reinforce_ada_jax.reporting import comparison, curves, history, page, plotting, samples

    with cli.user_input():
        loaded = history.with_unique_names([history.load(workdir) for workdir in workdirs])
        histories = history.with_distinct_benchmarks(loaded)
        responses = samples.read_all([run.workdir for run in histories])
    comparisons = comparison.compare_all(histories)
    for compared in comparisons:
        print(compared.text() + "\n")
        if compared.sentence:
            print(compared.sentence + "\n")
    figures = curves.figures(histories)
    drawn = [figure for figure in figures if figure.panels]
    for figure in drawn:
        plotting.draw(figure.panels, output / figure.name, figure.columns)
    print(f"figures (PNG and SVG): {named}/{{{','.join(figure.name for figure in drawn)}}}")
    written = page.write(output, page.render(page.data(histories, comparisons, figures, responses)))
    print(f"open in a browser: {named if buckets.is_bucket(named) else written.parent}/{written.name}")


def watch(workdirs: Sequence[buckets.Named], host: str, port: int) -> None:
    """Serves the live page of the runs until Ctrl-C."""
    from reinforce_ada_jax.reporting import live

    with cli.user_input():
        _check_named(workdirs)
        for workdir in workdirs:
            check_local("with --watch, a run", workdir)
        folders = [pathlib.Path(workdir) for workdir in workdirs]
        absent = [str(folder) for folder in folders if not folder.is_dir()]
        if absent:
            raise ValueError(f"{', '.join(absent)} is not a folder: name the work directory of a run.")
        listener = live.listen(host, port)
        print(f"open in a browser: {live.address_of(listener)}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            live.serve(folders, listener)


if __name__ == "__main__":
    OUTPUT = flags.DEFINE_string("output", "figures", "The folder for the figures and index.html.")
    WATCH = flags.DEFINE_bool("watch", False, "Serve a page that shows what is new, and write nothing.")
    HOST = flags.DEFINE_string("host", "127.0.0.1", "Address of --watch; 0.0.0.0: every network of this machine.")
    PORT = flags.DEFINE_integer("port", 8080, "Port of --watch; 0 chooses a free one.", 0, 65_535)

    def start(arguments: list[str]) -> None:
        workdirs = [*map(buckets.named, arguments)]
        if WATCH.value:
            watch(workdirs, HOST.value, PORT.value)
        else:
            main(workdirs, buckets.named(OUTPUT.value))

    cli.run_with_arguments(start)
