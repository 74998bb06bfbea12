"""Where the numbers of a run go: metrics.jsonl, TensorBoard, and one line at the terminal."""

import json
import pathlib
import sys
from collections.abc import Mapping

import jax
import tqdm

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts XLA compilations of this process: after warm-up there should be none."""

    def __init__(self):
        self.total = 0
        self._read = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration: float, **_) -> None:
        del duration
        self.total += event == COMPILE_EVENT

    def since_last(self) -> int:
        """Compilations since the last call."""
        new, self._read = self.total - self._read, self.total
        return new


def write_whole(file: pathlib.Path, text: str) -> None:
    """Writes a file such that a kill leaves what it held before or all of `text`, never a part."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text)
    partial.replace(file)


def read(workdir: pathlib.Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, one object an iteration; a last line cut short by a kill is left out."""
    file = workdir / "metrics.jsonl"
    if not file.exists():
        return []
    lines = file.read_text().split("\n")
    # What follows the last line break was never finished.
    return [json.loads(line) for line in lines[:-1]]


class MetricsWriter:
    """Appends one object an iteration to metrics.jsonl, and the same numbers under the same names to TensorBoard."""

    def __init__(self, workdir: pathlib.Path, *, last_iteration: int, tensorboard: bool):
        """Opens the files for the iterations after `last_iteration`: later ones, of a run that died, are cut off."""
        self._file = workdir / "metrics.jsonl"
        kept = [line for line in read(workdir) if line["iteration"] <= last_iteration]
        write_whole(self._file, "".join(json.dumps(line) + "\n" for line in kept))
        self._tensorboard = None
        if tensorboard:
            import tensorboardX  # noqa: PLC0415  (a third of a second, for those who want it)

            self._tensorboard = tensorboardX.SummaryWriter(
                str(workdir / "tensorboard"), purge_step=last_iteration + 1, write_to_disk=True
            )

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """One line, on disk when this returns."""
        with self._file.open("a") as file:
            file.write(json.dumps({"iteration": iteration, **metrics}) + "\n")
        self.plot(iteration, metrics)

    def plot(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """To TensorBoard only."""
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, iteration)
            self._tensorboard.flush()

    def close(self) -> None:
        """Ends the TensorBoard file."""
        if self._tensorboard is not None:
            self._tensorboard.close()


class Progress:
    """One line at the terminal: iterations (or what `unit` says) done, rate, time left, and the phase with its latest
    numbers."""

    def __init__(self, total: int, done: int, unit: str = "iteration"):
        # Away from a terminal a line now and then is enough.
        interval = 0.1 if sys.stderr.isatty() else 10.0
        self._bar = tqdm.tqdm(total=total, initial=done, desc=unit, unit="it", mininterval=interval, dynamic_ncols=True)
        self._figures = ""

    def phase(self, text: str) -> None:
        """What is going on within the iteration."""
        self._bar.set_postfix_str(f"{text}  {self._figures}", refresh=False)
        self._bar.update(0)

    def iteration(self, figures: Mapping[str, str]) -> None:
        """One iteration is done; its figures stay in sight."""
        self._figures = "  ".join(f"{name} {value}" for name, value in figures.items())
        self._bar.set_postfix_str(self._figures, refresh=False)
        self._bar.update(1)

    @property
    def done(self) -> int:
        """How many are done."""
        return self._bar.n

    def reach(self, done: int, text: str = "") -> None:
        """So many are done."""
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(done - self._bar.n)

    def say(self, text: str) -> None:
        """A line of its own above the progress line."""
        tqdm.tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """Ends the line."""
        self._bar.close()
