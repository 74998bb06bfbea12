"""Metrics of a run: metrics.jsonl, and the same numbers in TensorBoard, Weights & Biases and trackio."""

import contextlib
import importlib
import io
import json
import math
import os
import pathlib
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.durable import read_records, write_atomically

Metrics = dict[str, int | float]
# Key in a line for the numbers that JSON lacks: {key of a metric: "nan", "inf" or "-inf"}.
NOT_FINITE = "not_finite"


def _to_line(metrics: Mapping[str, int | float]) -> str:
    """Returns a line of strict JSON: a number that is not finite is null, and its text is in NOT_FINITE."""
    strange = {key: str(value) for key, value in metrics.items() if not math.isfinite(value)}
    flagged = dict(metrics) | dict.fromkeys(strange) | ({NOT_FINITE: strange} if strange else {})
    return json.dumps(flagged, allow_nan=False) + "\n"


def _metrics(line: Any) -> Metrics:
    line["iteration"]
    metrics = line | {key: float(text) for key, text in line.pop(NOT_FINITE, {}).items()}
    for key, value in metrics.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{key} is {value!r:.40}, and no number")
    return metrics


def read_metrics(workdir: pathlib.Path) -> list[Metrics]:
    """Returns the finished lines of metrics.jsonl, one object per iteration."""
    kind, remedy = "an object with the metrics of an iteration", "Remove the line."
    return list(read_records(workdir / "metrics.jsonl", _metrics, kind, remedy))


class MetricsWriter:
    """Writer of a run's metrics to metrics.jsonl and to the trackers, with the same names and numbers."""

    def __init__(self, workdir: pathlib.Path, *, last_iteration: int, trackers: str = "", quiet: bool = False):
        """Opens the files for the iterations after `last_iteration`, and removes later lines that a killed run wrote.

        The attribute `lacking` is the number of iterations up to `last_iteration` that have no line. `trackers` is the
        setting `logging.trackers`; with `quiet` the trackers print nothing.
        """
        self._file, self._quiet = workdir / "metrics.jsonl", quiet
        lines = [line for line in read_metrics(workdir) if line["iteration"] <= last_iteration]
        self.lacking = last_iteration - len({line["iteration"] for line in lines})
        write_atomically(self._file, "".join(map(_to_line, lines)))
        start: dict[str, Callable[[str], Any]] = {
            "wandb": lambda project: _start_wandb(workdir, project, quiet=quiet),
            "trackio": lambda project: _start_trackio(workdir, project, quiet=quiet),
            "tensorboard": lambda _: _TensorBoard(workdir / "tensorboard", last_iteration),
        }
        self._trackers = [start[name](project) for name, project in _projects(trackers).items() if name in start]

    def write(self, iteration: int, metrics: Mapping[str, int | float]) -> None:
        """Writes one line, which is in the file when this returns, and plots the metrics.

        Raises FileNotFoundError if the file is gone: a new one would hold only a part of the run.
        """
        try:
            file = self._file.open("r+")
        except FileNotFoundError:
            gone = f"{buckets.origin(self._file)} is gone: it or the work directory was moved or removed during the run"
            raise FileNotFoundError(gone) from None
        with file:
            file.seek(0, os.SEEK_END)
            file.write(_to_line({"iteration": iteration, **metrics}))
        self.plot(iteration, metrics)

    def plot(self, iteration: int, metrics: Mapping[str, int | float]) -> None:
        for tracker in self._trackers:
            # An iteration that is repeated after a resume has equal numbers. Weights & Biases drops it because its step
            # is past, in trackio it is a second point.
            tracker.log(dict(metrics), step=iteration)

    def close(self) -> None:
        for tracker in self._trackers:
            with _silence(self._quiet):
                tracker.finish()


class _TensorBoard:
    """Events of TensorBoard, written in the caller's thread, so that a disk error reaches the caller.

    SummaryWriter of tensorboardX writes in a thread. A full disk ends the thread, and the next events wait without end.
    """

    def __init__(self, folder: pathlib.Path, last_iteration: int):
        # These imports take a third of a second, and the packages are optional.
        from tensorboardX import summary  # noqa: PLC0415
        from tensorboardX.proto import event_pb2  # noqa: PLC0415
        from tensorboardX.record_writer import RecordWriter  # noqa: PLC0415

        folder.mkdir(exist_ok=True)
        protocol: Any = event_pb2  # its classes are made at run time
        self._event, self._scalar = protocol.Event, summary.scalar
        self._records = RecordWriter(str(folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"))
        self._add(file_version="brain.Event:2")
        # Hides the points after `last_iteration`, which a run that was killed has written.
        start = protocol.SessionLog(status=protocol.SessionLog.START)
        self._add(step=last_iteration + 1, session_log=start)

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def log(self, metrics: Mapping[str, int | float], step: int) -> None:
        """Writes the points of one iteration, which are in the file when this returns."""
        for name, value in metrics.items():
            self._add(step=step, summary=self._scalar(name, value))
        self._records.flush()

    def finish(self) -> None:
        with contextlib.suppress(OSError):  # the error of an earlier write, which was raised there
            self._records.close()


def _stored_id(file: pathlib.Path) -> str:
    """Returns the id in a file, a random one if there is none yet."""
    if not file.exists():
        write_atomically(file, uuid.uuid4().hex)
    return file.read_text()


def _config(workdir: pathlib.Path) -> dict[str, Any] | None:
    file = workdir / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _silence(quiet: bool) -> contextlib.AbstractContextManager[Any]:
    return contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext()


def _tracker(name: str, project: str) -> Any:
    """Returns the package of a tracker; ValueError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"logging.trackers has {name}:{project}, but {name} is not installed: pip install {name}, or leave it out."
        ) from error


def _projects(trackers: str) -> dict[str, str]:
    """Returns the project of each tracker by its name; "" for TensorBoard."""
    parts = (entry.strip().partition(":") for entry in trackers.split(","))
    return {name: project for name, _, project in parts}


def check_installed(trackers: str) -> None:
    """Raises ValueError if one of `logging.trackers` is not installed."""
    for name, project in _projects(trackers).items():
        if project:
            _tracker(name, project)


def _start_trackio(workdir: pathlib.Path, project: str, *, quiet: bool) -> Any:
    """Starts or resumes the trackio run of a work directory. Its name has an id, because trackio resumes by name."""
    trackio, name = _tracker("trackio", project), f"{workdir.resolve().name}-{_stored_id(workdir / 'trackio_id')[:8]}"
    with _silence(quiet):
        try:
            # The logging of CPU and GPU by trackio would query the machine every ten seconds.
            return trackio.init(
                project=project, name=name, config=_config(workdir), resume="allow", embed=False, auto_log_gpu=False,
                auto_log_cpu=False,
            )  # fmt: skip
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"trackio: {error} Leave it out of logging.trackers to train without it.") from error


def _start_wandb(workdir: pathlib.Path, project: str, *, quiet: bool) -> Any:
    """Starts or resumes the Weights & Biases run whose id the work directory holds."""
    wandb = _tracker("wandb", project)
    try:
        return wandb.init(
            project=project,
            name=workdir.resolve().name,
            id=_stored_id(workdir / "wandb_id"),
            resume="allow",
            dir=str(workdir),
            config=_config(workdir),
            settings=wandb.Settings(silent=quiet),
        )
    except wandb.Error as error:
        raise ValueError(
            f"wandb: {error} Log in with `wandb login`, set WANDB_MODE=offline, or leave it out of logging.trackers."
        ) from error
