"""Models of huggingface.co by their names.

One process fetches a model into the cache of `huggingface_hub`, which other programs use. Of several processes each
copies only the parts of the weights that it reads, unless this cache has them.
Only safetensors, JSON and tokenizer files at the top of a repository are fetched: no pickle, and no code. The cache's
locks make it safe that several processes of a run fetch one model at once.
"""

import contextlib
import fnmatch
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from reinforce_ada_jax.files import buckets, partial_copy
from reinforce_ada_jax.policy import weight_files
from reinforce_ada_jax.policy.huggingface import TOKENIZER_FILES

SMALL = ["*.json", *(name for name in TOKENIZER_FILES if not name.endswith(".json"))]
FILES = [f"*{partial_copy.SUFFIX}", *SMALL]
OTHERS = ["*/*", "consolidated*"]  # folders with copies for other programs, and a second copy of the weights
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?:@[\w./-]{1,95})?")
_REPOSITORY = "models--"


def is_name(path: str) -> bool:
    """Returns True if `path` may name a model of the hub, OWNER/MODEL or OWNER/MODEL@REVISION."""
    return bool(_NAME.fullmatch(path))


def repository(folder: pathlib.Path) -> str | None:
    """Returns the name OWNER/MODEL of a folder in the cache, None for any other folder."""
    folder = folder.absolute()
    found = folder.parents[1].name if len(folder.parts) > 2 and folder.parent.name == "snapshots" else ""
    return found.removeprefix(_REPOSITORY).replace("--", "/") if found.startswith(_REPOSITORY) else None


@contextlib.contextmanager
def _reachable(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # errors of huggingface_hub and of its HTTP client have no common class
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk
        name, _, revision = path.partition("@")
        lines = str(error).strip().splitlines() or [""]
        at = f" at revision {revision!r}" if revision else ""
        raise ValueError(
            f"{name} is not a folder, and the model{at} can't be fetched from huggingface.co ({type(error).__name__}: "
            f"{lines[0]:.200}). Check name and network (HF_TOKEN for a private model), or name a folder on this "
            "machine."
        ) from error


def _snapshot(path: str, files: list[str]) -> pathlib.Path:
    # These imports take 0.6 s; a model in a folder does not need them.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.utils import disable_progress_bars  # noqa: PLC0415

    if not sys.stderr.isatty():
        disable_progress_bars()
    name, _, revision = path.partition("@")
    with _reachable(path):
        return pathlib.Path(
            snapshot_download(name, revision=revision or None, allow_patterns=files, ignore_patterns=OTHERS)
        )


def _check_weights(name: str, weights: list[str]) -> None:
    if not weights:
        raise ValueError(
            f"{name} has no safetensors on huggingface.co, and weights in pickles are never read: they can run any "
            "code. Convert it where you trust it, and name the folder: transformers.AutoModelForCausalLM"
            f".from_pretrained({name!r}).save_pretrained(folder)."
        )


def fetch(path: str) -> pathlib.Path:
    """Returns the folder of a model, after fetching the files that the cache lacks.

    `path` is OWNER/MODEL, of the main branch, or OWNER/MODEL@REVISION with a branch, tag or commit.

    Raises:
      ValueError: there is no such model or revision, it has no safetensors, or neither the hub nor the cache has it.
    """
    folder = _snapshot(path, FILES)
    _check_weights(path.partition("@")[0], [file.name for file in folder.glob(f"*{partial_copy.SUFFIX}")])
    return folder


def commit(path: str) -> str:
    """Returns the newest commit of a model, the cache's if the hub can't be reached; ValueError as `fetch` raises."""
    return _snapshot(path, SMALL).name


def fetch_parts(path: str, commit: str) -> pathlib.Path:
    """Returns the folder of a model's commit as `fetch` does, with the headers of its weights alone (`partial_copy`).

    If the cache has the weights as well, it is the folder in the cache. Raises ValueError as `fetch` does.
    """
    from huggingface_hub import HfFileSystem  # noqa: PLC0415

    name = path.partition("@")[0]
    snapshot = _snapshot(f"{name}@{commit}", SMALL)
    with contextlib.suppress(ValueError):
        weight_files.find(snapshot)
        return snapshot
    folder = buckets.cache_folder("hub") / f"{_REPOSITORY}{name.replace('/', '--')}" / "snapshots" / commit
    if folder.exists():
        return folder
    with _reachable(path):
        listed: list[Any] = HfFileSystem().ls(f"{name}@{commit}", detail=True)
    sizes = {pathlib.PurePosixPath(file["name"]).name: file["size"] for file in listed if file["type"] == "file"}
    weights = [file for file in sizes if file.endswith(partial_copy.SUFFIX) and not fnmatch.fnmatch(file, OTHERS[1])]
    _check_weights(name, weights)
    sources = {
        file: partial_copy.Source(f"{partial_copy.HUB}{name}@{commit}/{file}", sizes[file], {"cache_type": "none"})
        for file in weights
    }

    def copy_others(new: pathlib.Path) -> None:
        for file in snapshot.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in SMALL):
                shutil.copyfile(file, new / file.name)

    partial_copy.make(folder, sources, copy_others)
    return folder
