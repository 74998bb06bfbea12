"""Where the numbers of a run go: metrics.jsonl, TensorBoard, Weights & Biases, and one line at the terminal."""

import json
import pathlib
import sys
import uuid
from collections.abc import Mapping
from typing import Any

import tqdm

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts XLA compilations of this process: after warm-up there should be none."""

    def __init__(self):
        import jax  # noqa: PLC0415  (what reads a run's numbers needs no jax)

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
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def read(workdir: pathlib.Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, one object an iteration; a last line cut short by a kill is left out.

    Raises:
      ValueError: a finished line is no object with an iteration.
    """
    file = workdir / "metrics.jsonl"
    if not file.exists():
        return []
    lines = []
    # What follows the last line break was never finished.
    for number, text in enumerate(file.read_bytes().split(b"\n")[:-1], start=1):
        try:
            lines.append(json.loads(text))
            lines[-1]["iteration"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file}, line {number}: no metrics of an iteration. Remove the line.") from error
    return lines


def begin_wandb(workdir: pathlib.Path, project: str, *, quiet: bool) -> Any:
    """The run of Weights & Biases that belongs to `workdir`, new or resumed.

    Its id is kept in the work directory: a folder that is begun anew is another run.

    Raises:
      ValueError: wandb isn't installed, or does not begin the run (no login, no network).
    """
    try:
        import wandb  # noqa: PLC0415  (an extra, for those who want it)
    except ImportError as error:
        raise ValueError(
            f"logging.wandb names the project {project!r}, but wandb is not installed: pip install wandb, or leave "
            "logging.wandb empty."
        ) from error
    file = workdir / "wandb_id"
    if not file.exists():
        write_whole(file, uuid.uuid4().hex)
    config = workdir / "config.json"
    try:
        return wandb.init(
            project=project,
            name=workdir.resolve().name,
            id=file.read_text(),
            resume="allow",
            dir=str(workdir),
            config=json.loads(config.read_text(encoding="utf-8")) if config.exists() else None,
            settings=wandb.Settings(silent=quiet),
        )
    except wandb.Error as error:
        raise ValueError(
            f"logging.wandb: {error} Log in with `wandb login`, set WANDB_MODE=offline, or leave logging.wandb empty."
        ) from error


class MetricsWriter:
    """Appends one object an iteration to metrics.jsonl, and the same numbers under the same names to TensorBoard and
    to Weights & Biases."""

    def __init__(
        self, workdir: pathlib.Path, *, last_iteration: int, tensorboard: bool, wandb: str = "", quiet: bool = False
    ):
        """Opens the files for the iterations after `last_iteration`: later ones, of a run that died, are cut off.

        `wandb`: a project; none where empty. `quiet`: Weights & Biases say nothing at the terminal.
        """
        self._file = workdir / "metrics.jsonl"
        kept = [line for line in read(workdir) if line["iteration"] <= last_iteration]
        write_whole(self._file, "".join(json.dumps(line) + "\n" for line in kept))
        self._wandb = begin_wandb(workdir, wandb, quiet=quiet) if wandb else None
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
        """To TensorBoard and Weights & Biases only."""
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, iteration)
            self._tensorboard.flush()
        if self._wandb is not None:
            # Iterations repeated after a resume are dropped there, as their step is past; their numbers are the same.
            self._wandb.log(dict(metrics), step=iteration)

    def close(self) -> None:
        """Ends the TensorBoard file and the run of Weights & Biases."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


class Progress:
    """One line at the terminal: iterations (or what `unit` says) done, rate, time left, and the phase with its numbers.

    A quiet one shows what `say` is told, and nothing else.
    """

    def __init__(self, total: int, done: int, unit: str = "iteration", *, quiet: bool = False):
        # Away from a terminal a line now and then is enough.
        interval = 0.1 if sys.stderr.isatty() else 10.0
        self._quiet = quiet
        self._bar = tqdm.tqdm(
            total=total, initial=done, desc=unit, unit="it", mininterval=interval, dynamic_ncols=True, disable=quiet
        )
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
        """A warning: a line of its own above the progress line."""
        tqdm.tqdm.write(text, file=sys.stderr)

    def note(self, text: str) -> None:
        """News, such as an evaluation's result: the same line, unless this is quiet."""
        if not self._quiet:
            self.say(text)

    def close(self) -> None:
        """Ends the line."""
        self._bar.close()
