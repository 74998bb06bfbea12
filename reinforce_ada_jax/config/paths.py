"""Checks of the paths that a user names, made before any work: inputs can be read, outputs can be written."""

import errno
import os
import pathlib
import re
import tempfile

from reinforce_ada_jax.files import buckets

# "gs://bucket/x", and "gs:/bucket/x", as pathlib shortens it.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")


def check_local(name: str, path: object, *, others: str = "") -> None:
    """Raises ValueError if `path` is a URL. The message has the flag `name`, and `others`, further places allowed."""
    if _URL.match(str(path)):
        url = _URL.sub(r"\1://", str(path))
        raise ValueError(
            f"{name} is {url!r}, and only folders and files of this machine{others} can be read and written. Copy it, "
            "or mount the bucket (gcsfuse), and name the path here."
        )


def check_input(name: str, path: object) -> None:
    """Raises ValueError if `path` is a URL, unless it is in a usable bucket; arguments as for `check_local`."""
    if buckets.is_bucket(path):
        buckets.check(name, path)
    else:
        check_local(name, path, others=" and buckets of Google Cloud (gs://)")


def check_source(name: str, source: str) -> None:
    """Raises ValueError as `check_input` does, but not for the sources "tfds:/DIR" and "hf:/DIR": they are no URLs."""
    if buckets.is_bucket(source) or "://" in source:
        check_input(name, source)


def check_output(name: str, path: str | pathlib.Path, *, folder: bool) -> None:
    """Raises ValueError if `path`, a `folder` or a file, can't be written: hours of work must not end with this error.

    It may exist; the folders above it need not. In a bucket (gs://) nothing is asked yet.
    """
    check_input(name, path)
    if buckets.is_bucket(path):
        return
    path = pathlib.Path(path)
    if str(path).encode("utf-8", "ignore").decode() != str(path):  # Orbax takes text alone, at the first checkpoint
        raise ValueError(f"{name} is {str(path)!r}, and not UTF-8: name another path.")
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{name} is {str(path)!r}, a link to {os.readlink(path)!r}, which is not there: make it.")
    if path.exists() and path.is_dir() != folder:
        found, wanted = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise ValueError(f"{name} is {str(path)!r}, which is a {found}: name another path, of a {wanted}.")
    above = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not (path.exists() or above.is_dir()):
        raise ValueError(f"{name} is {str(path)!r}, but {str(above)!r} is a file: name another path.")
    try:  # permissions are not enough: root may write everywhere, but nothing can be made in /proc
        if not os.access(above, os.W_OK):
            raise PermissionError
        if not path.exists():
            os.rmdir(tempfile.mkdtemp(dir=above))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # another path does not help
            raise
        raise ValueError(f"{name} is {str(path)!r}, and {str(above)!r} can't be written: name another path.") from None
