"""Files of a model folder, which may come from anybody: every one is opened through the functions here.

A file must be a regular one of bounded size that belongs to the folder. A link may name another file of the folder. If
the folder is a snapshot in the cache of Hugging Face, a link may name a file of this cache. Any other link is refused:
it could make `export` copy a private file, or name a device that never ends.
"""

import pathlib
import stat
from typing import Any

from reinforce_ada_jax.files.durable import json_object

# A tokenizer.json has a few dozen MB. Files that Python parses have a few MB at most (the index of a thousand layers),
# and need memory of 20 times their size.
MAX_BYTES, MAX_JSON_BYTES = 64 * 2**20, 16 * 2**20
_REMEDY = "Copy it again from the model's folder, from where you trust it."


def is_present(file: pathlib.Path, max_bytes: int | None = MAX_BYTES) -> bool:
    """Returns True if a file is there, directly in its model folder, and may be opened; False if there is none.

    Raises ValueError where it is no regular file, a link to a file elsewhere, or too large.
    """
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # a link to itself
        raise ValueError(f"{file} can't be opened ({error.strerror}). {_REMEDY}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{file} is no regular file, but a folder, a device, a pipe or a socket. {_REMEDY}")
    real, folder = file.resolve(), file.parent.resolve()
    in_cache = folder.parent.name == "snapshots" and real.is_relative_to(folder.parent.parent / "blobs")
    if not (real.is_relative_to(folder) or in_cache):
        remedy = f"name {real} itself" if file.suffix == ".gguf" else "put the file itself there"
        raise ValueError(
            f"{file} is a link to {real}, outside of its folder. Only links within the folder, or into the cache of "
            f"Hugging Face around it, are followed: {remedy} if you trust it."
        )
    if max_bytes is not None and status.st_size > max_bytes:
        raise ValueError(f"{file} has {status.st_size:,} bytes, more than {max_bytes:,}. {_REMEDY}")
    return True


def read_bytes(file: pathlib.Path) -> bytes | None:
    """Returns the content of a file, None if there is none; raises ValueError as `is_present` does."""
    return file.read_bytes() if is_present(file) else None


def read_text(file: pathlib.Path, max_bytes: int = MAX_BYTES) -> str | None:
    """Returns the text of a file, None if there is none; ValueError if it is not UTF-8, or as `is_present` raises."""
    content = file.read_bytes() if is_present(file, max_bytes) else None
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text ({error}). {_REMEDY}") from error


def read_json(file: pathlib.Path) -> dict[str, Any] | None:
    """Returns the object in a JSON file, None if there is none; raises ValueError for any other content."""
    text = read_text(file, MAX_JSON_BYTES)
    return None if text is None else json_object(text, file, _REMEDY)
