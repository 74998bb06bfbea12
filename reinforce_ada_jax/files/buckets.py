"""Buckets of Google Cloud Storage: their URLs, their objects as files of this machine, and the checkpoints in them.

Objects can't be appended to, so files are written on this machine and uploaded as a whole; `local_copy.py` does this
for a folder that changes. Only Orbax writes into a bucket directly. gcsfs, which Orbax's paths need as well, is the
optional extra `gcs`, and is imported only where a bucket is named.
"""

import contextlib
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

# A path in a bucket is an epath.Path: it has pathlib.Path's operations, but is a subclass of pathlib.PurePath only.
if TYPE_CHECKING:
    AnyPath = pathlib.Path
else:
    AnyPath = pathlib.PurePath

_BUCKET = re.compile(r"gs:/+")  # pathlib shortens "gs://bucket/x" to "gs:/bucket/x"
ORIGIN = ".reinforce_ada_jax_origin"  # file of a local copy that holds the URL of the folder in the bucket
CHECKPOINTS = "checkpoints"  # folder of a work directory that is never copied to this machine
INSTALL = "pip install --no-deps -r requirements-gcs.txt, or pip install 'reinforce_ada_jax[gcs]'"


# A folder or a file as a user names it: a path of this machine, or a URL.
Named = pathlib.Path | str


class BucketError(OSError):
    """A bucket can't be read or written, even after the retries of gcsfs or TensorStore."""


def is_bucket(path: object) -> bool:
    """Returns True for the URL of an object or a folder in a bucket, also as pathlib shortens it."""
    return _BUCKET.match(str(path)) is not None


def url(path: object) -> str:
    """Returns "gs://BUCKET/NAME" without a slash at the end."""
    return "gs://" + _BUCKET.sub("", str(path)).rstrip("/")


def named(text: str) -> Named:
    """Returns the URL of a bucket as text, anything else as a path."""
    return url(text) if is_bucket(text) else pathlib.Path(text)


def check(name: str, path: object) -> None:
    """Raises ValueError if the extra is missing, or the URL is unusable. `name` is the flag, for messages."""
    if not _BUCKET.sub("", str(path)).partition("/")[0]:
        raise ValueError(f"{name} is {str(path)!r}, which names no bucket: gs://BUCKET/NAME.")
    if any(each in str(path) for each in "*?["):  # gcsfs would look for, move and remove the folders that match
        raise ValueError(f"{name} is {url(path)!r}, and * ? [ are wildcards in names of a bucket: name another folder.")
    if importlib.util.find_spec("gcsfs") is None:
        raise ValueError(f"{name} is {url(path)!r}, and buckets need the extra gcs: {INSTALL}.")


def file_system() -> Any:
    """Returns the file system of gcsfs that epath uses as well; it repeats requests that failed for a moment."""
    # By default gcsfs asks for the kind of each bucket, through another interface, which needs rights of its own.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec  # noqa: PLC0415
    import fsspec.config  # noqa: PLC0415

    # Other processes write into the same folder: a cached listing would hide this.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return fsspec.filesystem("gcs", finalize_on_close=True)


@contextlib.contextmanager
def reachable(path: object) -> Iterator[None]:
    """Turns errors of gcsfs and TensorStore, which have many classes, into BucketError with the URL and the reason."""
    try:
        yield
    except BucketError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        name = url(path) if is_bucket(path) else path
        raise BucketError(f"{name} can't be read or written: {reason}") from error


def path(folder_or_url: object) -> AnyPath:
    """Returns a path with pathlib's operations, on this machine or in a bucket."""
    if not is_bucket(folder_or_url):
        return pathlib.Path(str(folder_or_url))
    file_system()
    from etils import epath  # noqa: PLC0415

    found: Any = epath.Path(url(folder_or_url))
    return found


def origin(path: pathlib.Path) -> str:
    """Returns what the user named: the URL of a file or a folder in a local copy, else the path itself."""
    for folder in (path, *path.parents):
        if (folder / ORIGIN).is_file():
            url_of_folder = (folder / ORIGIN).read_text(encoding="utf-8")
            return f"{url_of_folder}/{path.relative_to(folder)}".removesuffix("/.")
    return str(path)


def checkpoints(workdir: pathlib.Path) -> AnyPath:
    """Returns the folder of a run's checkpoints; for a local copy of a bucket it is the folder in the bucket."""
    named = origin(workdir)
    return path(f"{named}/{CHECKPOINTS}") if is_bucket(named) else workdir.absolute() / CHECKPOINTS


def read_bytes(file: AnyPath) -> bytes:
    """Returns the content of a file; FileNotFoundError if there is none, BucketError if the bucket does not answer."""
    if not is_bucket(file):
        return file.read_bytes()
    with reachable(file):
        if file.exists():
            return file.read_bytes()
    raise FileNotFoundError(f"There is no {file}.")


def move(folder: AnyPath, target: AnyPath) -> None:
    """Moves a folder; in a bucket its objects are copied, then removed."""
    if is_bucket(folder):
        with reachable(folder):
            file_system().mv(str(folder), str(target), recursive=True)
    else:
        folder.rename(target)


def remove(folder: AnyPath) -> None:
    """Removes a folder and its contents; errors are ignored."""
    if is_bucket(folder):
        with contextlib.suppress(OSError), reachable(folder):
            file_system().rm(str(folder), recursive=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def cache_folder(name: str) -> pathlib.Path:
    """Returns $XDG_CACHE_HOME/reinforce_ada_jax/NAME; XDG_CACHE_HOME is ~/.cache where it is not set.

    Raises ValueError if that is not set either, as for a user that only a container's start has named.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return pathlib.Path(cache).expanduser() / "reinforce_ada_jax" / name
    except RuntimeError as error:
        raise ValueError(f"{cache} is no folder, because it names no home: set XDG_CACHE_HOME, or HOME.") from error


def objects(folder: str) -> dict[str, Mapping[str, Any]]:
    """Returns the objects of a folder, or the one object itself, with the bucket's information on each.

    The keys are names relative to the folder; "" for the object that `folder` itself names. Raises BucketError for a
    name that leads out of the folder.
    """
    with reachable(folder):
        begin = folder.removeprefix("gs://").rstrip("/")
        found = file_system().find(begin, detail=True)
    names = sorted(name for name in found if not name.endswith("/"))
    for name in names:  # anybody who may write into the bucket chooses them
        if ".." in pathlib.PurePosixPath(name.removeprefix(begin)).parts:
            raise BucketError(f"{url(folder)} holds an object whose name has '..', gs://{name}: remove or rename it.")
    return {name.removeprefix(begin).strip("/"): found[name] for name in names}


def newest(source: str) -> tuple[dict[str, Mapping[str, Any]], pathlib.Path]:
    """Returns `objects(source)`, and where this machine's copy of this version is; ValueError if there is none."""
    found = objects(source)
    if not found:
        raise ValueError(f"There is no {source}: name an object or a folder of a bucket that holds something.")
    versions = "\n".join(f"{name} {about.get('generation')} {about['size']}" for name, about in found.items())
    version = hashlib.sha256(f"{source}\n{versions}".encode()).hexdigest()[:16]
    bucket, name = source.removeprefix("gs://").split("/")[0], source.rpartition("/")[2]
    return found, cache_folder("buckets") / bucket / version / name


def fetch(source: str) -> pathlib.Path:
    """Returns this machine's copy of an object or a folder, one for each version; ValueError if there is none."""
    source = url(source)
    found, copied = newest(source)
    home = copied.parent
    if not home.exists():
        home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent, prefix=".partial-") as partial:
            download(source, [*found], pathlib.Path(partial) / "new" / copied.name)
            with contextlib.suppress(OSError):  # another process was faster
                (pathlib.Path(partial) / "new").rename(home)
    return copied


def local(source: str) -> pathlib.Path:
    """Returns a path of this machine for what is only read: `fetch` of a URL, else the path itself."""
    return fetch(source) if is_bucket(source) else pathlib.Path(source)


def download(source: str, names: list[str], target: pathlib.Path) -> None:
    """Copies objects of a folder, or the object `source` itself, to this machine; `names` are keys of `objects`."""
    files = [target / name if name else target for name in names]
    for folder in {file.parent for file in files}:
        folder.mkdir(parents=True, exist_ok=True)
    begin = source.removeprefix("gs://")
    with reachable(source):
        file_system().get([f"{begin}/{name}" if name else begin for name in names], [str(file) for file in files])


def upload(files: Mapping[pathlib.Path, str]) -> None:
    """Copies files of this machine to objects, each of which is replaced as a whole: {file: URL}."""
    if files:
        with reachable(next(iter(files.values()))):
            targets = [target.removeprefix("gs://") for target in files.values()]
            file_system().put([str(file) for file in files], targets)


@contextlib.contextmanager
def output(target: Named, *, new: bool = False) -> Iterator[pathlib.Path]:
    """Yields the path to write a file or a folder to, and uploads it at the end if `target` is in a bucket.

    After an error nothing is uploaded. Raises ValueError if a `new` target exists.
    """
    if not is_bucket(target):
        yield pathlib.Path(target)
        return
    if new and objects(url(target)):
        raise ValueError(f"{url(target)} exists: name another one, or remove it first.")
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder) / url(target).rpartition("/")[2]
        yield written
        files = [written] if written.is_file() else sorted(file for file in written.rglob("*") if file.is_file())
        upload({file: f"{url(target)}/{file.relative_to(written)}".removesuffix("/.") for file in files})
