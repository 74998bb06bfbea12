"""Checkpoints of a run, saved and restored by Orbax; training/state.py says what one holds.

Saving runs in the background, one checkpoint at a time. A checkpoint that was unfinished when the process died is never
used. The JSON record has a fingerprint of each array, computed on the devices before the array is written. So a flipped
bit or a missing file is found before the run trains on it.

An evaluation that ends after its iteration was saved changes only the record: a small file, written atomically, so that
a kill never damages the arrays. A resumed run reads the evaluations, and so knows the best checkpoints.

Each record has the id of its run and its iteration (training/records.py). A checkpoint that was copied in from another
run, or renamed, is never used, counted or removed. It is moved away if this run saves an iteration with its number.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import pathlib
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.compilation import return_freed_memory
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.durable import write_atomically
from reinforce_ada_jax.learning.update import LearnerState
from reinforce_ada_jax.policy.transformer import Params, flatten, nest
from reinforce_ada_jax.training import fingerprints, records
from reinforce_ada_jax.training.records import DamagedError, damaged, first_line
from reinforce_ada_jax.training.save_times import SaveTimes, num_bytes

# Folders next to `checkpoints`: damaged checkpoints, and those of other runs that had the number of a save.
DAMAGED, FOREIGN = "damaged_checkpoints", "foreign_checkpoints"
COMMITTED = "commit_success.txt"  # Orbax's last object of a checkpoint in a bucket
# Attempts to remove the folder of a failed save: its threads may still write files into it.
REMOVALS = 20
# Bytes of arrays that a save on a CPU copies at a time. Copying all of SmolLM2-135M (1.6 GB) took 1.0 to 1.3 GB of
# memory. Twice this much takes 0.24 GB more than this, and no less time.
MOST_COPIED = 2**27


def _is_noise(record: logging.LogRecord) -> bool:
    """Returns True for messages of Orbax that tell a user nothing.

    They are stack traces of its threads, one per array (NotSavedError gives their reason once), and complaints about
    its file of item types, which is not read here.
    """
    if record.exc_info is not None:
        return "orbax" in record.pathname or record.name == "asyncio"
    return "orbax" in record.pathname and "Metadata file" in str(record.msg)


for _name in ("absl", "asyncio"):  # asyncio logs errors of Orbax's coroutines
    logging.getLogger(_name).addFilter(lambda record: not _is_noise(record))


@functools.cache
def _ignore_coroutines() -> None:
    """Hides the stack traces of Orbax's coroutines: a failed save prints one per array."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        file = getattr(getattr(unraisable.object, "cr_code", None), "co_filename", "")
        if str(unraisable.exc_value) != "Event loop is closed" and "orbax" not in file:
            before(unraisable)

    sys.unraisablehook = hook


class NotSavedError(OSError):
    """A checkpoint could not be written; those before it are unchanged."""


@dataclasses.dataclass
class Retention(checkpoint_managers.PreservationPolicy):
    """Rule for the checkpoints to keep; Orbax's own policies know only the evaluations of this process."""

    newest: int  # number of newest ones to keep
    best: int  # number of best ones to keep by evaluation; of equal ones the newest
    every: int  # keep each iteration that is a multiple of this; 0: none
    evaluations: dict[int, float]  # evaluation by iteration
    foreign: dict[int, str]  # checkpoints of other runs, neither counted nor removed: {iteration: reason}

    def of(self, iterations: Sequence[int]) -> set[int]:
        """Returns the iterations to keep."""
        evaluated = sorted((self.evaluations[i], i) for i in iterations if i in self.evaluations)
        retained = set(sorted(iterations)[-self.newest :])
        retained |= {i for _, i in evaluated[-self.best :]} if self.best else set()
        return retained | {i for i in iterations if self.every and i % self.every == 0}

    def should_preserve(
        self,
        checkpoints: Sequence[Any],  # PolicyCheckpointInfo, a protocol that can't be checked at run time
        *,
        context: checkpoint_managers.PreservationContext,
    ) -> list[bool]:
        del context
        retained = self.of([each.step for each in checkpoints if each.step not in self.foreign]) | self.foreign.keys()
        return [checkpoint.step in retained for checkpoint in checkpoints]


class Checkpoints:
    """The `checkpoints` folder of a work directory."""

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        keep: int,
        keep_best: int = 0,
        keep_every: int = 0,
        run_id: str | None = None,
        writes: bool = False,
        largest_bytes: int = 0,
    ):
        """Opens the folder, or makes it. `Retention` describes `keep`, `keep_best` and `keep_every`.

        `largest_bytes` are those of the learner's largest array on a CPU. A save then copies `MOST_COPIED` bytes of the
        learner's arrays at a time, or a little more than this array. With 0 it copies as many as it can write at once.

        Checkpoints of runs with another id than `run_id` are left alone; with None only iterations are compared. The
        process that trains in the work directory has `writes`: it alone removes the files of unfinished saves, because
        another process would remove a save that is still in progress.
        """
        self.folder = buckets.checkpoints(workdir)
        self._writes, self._run_id = writes, run_id
        self.saved_at = time.monotonic()  # when the last save began, or the folder was opened
        self._saving: int | None = None  # the newest save, until `check` or `wait` has found it complete
        _ignore_coroutines()
        if writes:
            self._remove_unfinished()
            processes.any_of(False)  # waits until process 0 has removed them
        among = set(range(processes.count())) if processes.drawing() else None  # those that only draw take no part
        if among is not None:  # Orbax makes the folder only where all processes take part
            self.folder.mkdir(parents=True, exist_ok=True)
        self.times = SaveTimes(workdir)
        self._retention = Retention(keep, keep_best, keep_every, {}, {})
        handlers: dict[str, Any] | None = None
        if largest_bytes:
            # Orbax refuses an array above the limit, and takes fractions of GB. The sampler's arrays may be larger.
            limit: Any = max(MOST_COPIED, 1.1 * largest_bytes) / 1e9
            handlers = {
                "learner": ocp.StandardCheckpointHandler(save_concurrent_gb=limit),
                "sampler": ocp.StandardCheckpointHandler(),
                "run": ocp.JsonCheckpointHandler(),
            }
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self._retention,
                enable_async_checkpointing=True,
                create=among is None,
                multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=among),
                async_options=ocp.AsyncOptions(post_finalization_callback=self.times.complete),
            ),
            item_names=("learner", "run", "sampler"),
            item_handlers=handlers,
        )
        self._retention.evaluations, self._retention.foreign = self._saved()

    def _remove_unfinished(self) -> None:
        """Removes the folders of saves that were cut off; in a bucket Orbax marks those that are finished."""
        for _ in range(REMOVALS if processes.is_writer() else 0):
            unfinished = list(self.folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"))
            if buckets.is_bucket(self.folder):
                folders = self.folder.iterdir() if self.folder.exists() else ()
                unfinished = [folder for folder in folders if not (folder / COMMITTED).exists()]
            for folder in unfinished:
                buckets.remove(folder)  # a folder that stays only costs space
            if not unfinished:
                return
            time.sleep(0.1)

    def _saved(self) -> tuple[dict[int, float], dict[int, str]]:
        """Returns, by iteration, the evaluations and the reasons why checkpoints are foreign, as process 0 reads them.

        Damaged records are left out: `restore_newest` finds them.
        """
        evaluations, foreign = {}, {}
        for iteration in self._manager.all_steps() if processes.is_writer() else ():
            with contextlib.suppress(DamagedError):
                record = records.read(self.folder, iteration)
                why = records.foreign(record, iteration, self._run_id)
                if why:
                    foreign[iteration] = why
                elif record.get("evaluation") is not None:
                    evaluations[iteration] = float(record["evaluation"])
        both = json.dumps([list(evaluations.items()), list(foreign.items())])
        evaluations, foreign = json.loads(processes.of_writer(both))
        return dict(map(tuple, evaluations)), dict(map(tuple, foreign))

    def warnings(self) -> list[str]:
        """Returns a sentence for each checkpoint of another run."""
        return [
            f"checkpoint {iteration} in {self.folder} does not belong to this run and is not used: {why}."
            for iteration, why in sorted(self._retention.foreign.items())
        ]

    def latest(self) -> int | None:
        """Returns the newest complete iteration of the run, or None."""
        return max(self.iterations(), default=None)

    def newest_on_disk(self) -> int:
        """Returns the newest iteration of the run that `check` or `wait` has found complete; 0 without one."""
        return max((iteration for iteration in self.iterations() if iteration != self._saving), default=0)

    def iterations(self) -> list[int]:
        """Returns all iterations of the run that are saved or being saved, ascending."""
        return sorted({*self._manager.all_steps()} - self._retention.foreign.keys())

    def save(
        self,
        iteration: int,
        learner: LearnerState,
        run: dict[str, Any],
        evaluation: float | None = None,
        sampler: Params | None = None,
    ) -> None:
        """Begins to write a checkpoint when the one before is written; the arrays may be donated after the call.

        If the iteration is already saved with the same arrays, only its record is replaced; a saved evaluation stays if
        none is given. If it is saved with other arrays, it stays as it is. `run` is the record; iteration, run id and
        fingerprints are added. `sampler` has the weights that the next iteration is drawn from, if they are not the
        learner's.
        """
        own = {"run_id": self._run_id, "iteration": iteration, "evaluation": evaluation}
        own["fingerprints"] = fingerprints.numbers(learner)
        own["sampler_fingerprints"] = None if sampler is None else fingerprints.numbers(sampler)
        record = run | own
        if iteration in self._retention.foreign:
            self._move_away(iteration, FOREIGN)
        if iteration in self._manager.all_steps():
            with self._writing():
                self._amend(iteration, record)
            return
        if evaluation is not None:
            self._retention.evaluations[iteration] = evaluation
        if processes.count() == 1 < processes.total():  # Orbax refuses arrays of one of several processes
            learner, sampler = jax.device_get((learner, sampler))
        items: dict[str, Any] = {
            "learner": ocp.args.StandardSave(learner), "run": ocp.args.JsonSave(records.with_checksum(record))
        }  # fmt: skip
        if sampler is not None:
            items["sampler"] = ocp.args.StandardSave(sampler)
        with self._writing():
            self._manager.wait_until_finished()
            self.saved_at, self._saving = time.monotonic(), iteration
            self.times.begin(iteration, num_bytes((learner, sampler)))
            # force: otherwise Orbax silently skips an iteration that is older than the newest folder of any run.
            self._manager.save(iteration, args=ocp.args.Composite(**items), force=True)

    def _amend(self, iteration: int, record: dict[str, Any]) -> None:
        """Replaces a saved record of the same arrays, and removes checkpoints that `Retention` then does not keep."""
        self._manager.wait_until_finished()
        saved = self.record(iteration)
        if record["evaluation"] is None:
            record["evaluation"] = saved["evaluation"]
        same_arrays = record["fingerprints"] == saved["fingerprints"]
        changed = same_arrays and records.checksum(record) != records.checksum(saved)
        # Process 0 decides, because it writes the record. All processes have read the old one by then.
        if not processes.of_writer("changed" if changed else ""):
            return
        if processes.is_writer():
            write_atomically(records.record_file(self.folder, iteration), json.dumps(records.with_checksum(record)))
        if record["evaluation"] is not None:
            self._retention.evaluations[iteration] = record["evaluation"]
        retained = self._retention.of(self.iterations())
        for other in self.iterations():
            if other not in retained:
                self._manager.delete(other)

    def check(self) -> None:
        """Raises NotSavedError if a save in the background failed."""
        # Orbax's `check_for_errors` raises nothing after a failed save: its own thread has taken the error by then.
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until all saves are on disk; raises NotSavedError if one failed."""
        with self._writing():
            self._manager.wait_until_finished()
        if self._saving is not None:
            return_freed_memory()  # a save of SmolLM2-135M leaves 0.4 GB
        self._saving = None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk: OSError of Python, or ValueError of TensorStore
            # Orbax leaves coroutines of the other arrays unawaited; Python would warn after our last line.
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            of_system = re.search(r"os_error_code='(\d+)'", str(error))  # after three paths, in TensorStore's text
            reason = os.strerror(int(of_system[1])) if of_system else first_line(error)
            self._manager.reload()  # a save that failed has removed none of those that it would replace
            raise NotSavedError(f"no checkpoint could be written to {self.folder}: {reason}") from error

    def record(self, iteration: int) -> dict[str, Any]:
        """Returns the JSON record of an iteration; DamagedError if it can't be read, or is not what was saved."""
        return records.read(self.folder, iteration)

    def restore(
        self,
        iteration: int,
        target: LearnerState,
        sampler: Params | None = None,
        accept: Callable[[dict[str, Any]], None] = lambda record: None,
    ) -> tuple[LearnerState, dict[str, Any], Params | None]:
        """Returns the learner's state of an iteration, its record, and the weights that the next one is drawn from.

        `target` and `sampler` give shapes, dtypes and shardings. Without `sampler` the sampler's weights are not read.
        They are None if the checkpoint has none. `accept` may refuse the record with a ValueError. Raises DamagedError
        if some process can't read a part of it, or a part is not what was saved.
        """
        broken: DamagedError | None = None
        record: dict[str, Any] = {}
        try:
            record = self.record(iteration)
        except DamagedError as error:
            broken = error
        if processes.any_of(broken is not None):
            raise broken or damaged(self.folder, iteration, "another process can't read its record")
        accept(record)
        learner = self._restore_arrays(iteration, "learner", target, record["fingerprints"])
        expected = record["sampler_fingerprints"]
        if sampler is not None:
            sampler = None if expected is None else self._restore_arrays(iteration, "sampler", sampler, expected)
        return learner, record, sampler

    def restore_params(self, iteration: int, target: Params, only: str = "") -> Params:
        """Returns the learner's weights of an iteration; the optimizer's arrays are not read.

        `target` gives shapes, dtypes and shardings of all weights. With `only`, a dotted name, one weight is read, and
        returned in the same tree without the others. Raises DamagedError if a part of them can't be read, or is not
        what was saved.
        """
        names = [
            jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(target)
        ]
        # The fingerprints of a learner's state begin with those of its weights.
        expected = dict(zip(names, self.record(iteration)["fingerprints"], strict=False))
        if only:
            target, expected = nest({only: flatten(target)[only]}), {only: expected[only]}
        item = {"params": target}
        args = ocp.args.PyTreeRestore(
            item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
        )

        def read() -> Params:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                return checkpointer.restore(self.folder / str(iteration) / "learner", args=args)["params"]

        return self._checked(iteration, read, target, list(expected.values()))

    def _restore_arrays(self, iteration: int, item: str, target: Any, expected: Sequence[int]) -> Any:
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(target)})
        return self._checked(iteration, lambda: self._manager.restore(iteration, args=args)[item], target, expected)

    def _checked(self, iteration: int, read: Callable[[], Any], target: Any, expected: Sequence[int]) -> Any:
        """Returns the arrays that `read` reads; DamagedError, in every process, if they are not what was saved.

        Raises ValueError where the machine could not read them, and they may be whole.
        """
        broken: Exception | None = None
        arrays: Any = None
        try:
            arrays = read()
        except Exception as error:  # Orbax and TensorStore raise many kinds for a broken file
            broken = error
        fault = records.fault_of_machine(broken)
        if processes.any_of(fault is not None):
            reason = first_line(fault or broken) if broken else "another process can't read it"
            raise records.unread(self.folder, iteration, reason) from broken
        if processes.any_of(broken is not None):
            what = "its arrays can't be read: files are missing, cut short or changed"
            raise damaged(self.folder, iteration, what) from broken
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(target)]
        changed = [path for path, a, b in zip(paths, fingerprints.numbers(arrays), expected, strict=True) if a != b]
        if changed:
            what = f"{len(changed)} of {len(paths)} arrays are not what was saved, {changed[0]} first"
            raise damaged(self.folder, iteration, what)
        return arrays

    def restore_newest(
        self,
        target: LearnerState,
        accept: Callable[[dict[str, Any]], None],
        say: Callable[[str], None],
        sampler: Params | None = None,
    ) -> tuple[LearnerState, dict[str, Any], Params | None] | None:
        """Returns the newest undamaged checkpoint, as `restore` does, or None without a checkpoint.

        Damaged ones are moved away, and `say` gets a warning. Raises ValueError if all are damaged, or if processes see
        different folders.
        """
        for text in self.warnings():
            say(text)
        iterations = self._iterations_of_all()
        for iteration in reversed(iterations):
            try:
                return self.restore(iteration, target, sampler, accept)
            except DamagedError as error:
                self._move_away(iteration, DAMAGED)
                say(f"{error} It was moved to {self.folder.with_name(DAMAGED)}.")
        if iterations:
            raise ValueError(
                f"all {len(iterations)} checkpoints in {self.folder} were damaged: the run can't be resumed. Restore "
                "the folder from a copy, or start again with another --workdir."
            )
        return None

    def _iterations_of_all(self) -> list[int]:
        """Returns all complete iterations, once every process sees the same; ValueError if they differ for too long."""
        seen: list[bytes] = []
        for _ in range(processes.SHARED_AFTER_S):
            seen = processes.exchange(json.dumps(self.iterations()).encode())
            if len(set(seen)) == 1:
                return self.iterations()
            time.sleep(1.0)
            self._manager.reload()
        lists = ", ".join(f"process {number} {mine.decode()}" for number, mine in enumerate(seen))
        raise ValueError(
            f"the processes see different checkpoints in {self.folder}: {lists}. Give all of them one folder (a "
            "mounted bucket, NFS)."
        )

    def _move_away(self, iteration: int, name: str) -> None:
        if processes.is_writer():
            there = self.folder.with_name(name)
            there.mkdir(exist_ok=True)
            # In a bucket an empty folder does not exist.
            taken = {each.name for each in there.iterdir()} if there.exists() else set()
            number = next(number for number in itertools.count() if f"{iteration}.{number}" not in taken)
            buckets.move(self.folder / str(iteration), there / f"{iteration}.{number}")
        self._retention.evaluations.pop(iteration, None)
        self._retention.foreign.pop(iteration, None)
        processes.any_of(False)  # waits until process 0 has moved it
        self._manager.reload()

    def close(self) -> None:
        """Releases Orbax's threads, and removes a failed save. Call `wait` first: it says why a save failed."""
        with contextlib.suppress(Exception):
            self._manager.close()
        if self._writes:
            self._remove_unfinished()
