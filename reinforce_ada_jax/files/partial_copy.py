"""Copies of safetensors files of a bucket or of huggingface.co that hold only the parts that this machine reads.

FOLDER, the model's folder, has the header of each file alone, so any program that takes it for the whole refuses it.
FOLDER.blocks has a file of the full size with holes in it, and the CRC-32 of each block that was copied. A block is
there if its bytes have its CRC. So no order of writes matters: after a kill or a loss of power, or where a file was cut
or damaged, the blocks that do not fit are copied again.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import json
import pathlib
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from reinforce_ada_jax.files import buckets, durable

SUFFIX = ".safetensors"
HUB = "hf://"  # begins the source of a file of huggingface.co
# A header of 16 MiB has 150,000 tensors. One at the library's own limit of 100 MB takes 24 seconds and 1.8 GB.
MAX_HEADER_BYTES = 16 * 2**20
# A host copies up to one block more at each end of its part of a tensor: 64 hosts copy 1.2 times a model of 70B.
BLOCK = 2**18
REQUEST_BLOCKS, REQUESTS = 64, 8  # of one request at most, and requests at the same time: 128 MiB of memory

Span = tuple[int, int]  # first byte in a file, and the one after the last
MIB = 2**20
Watch = Callable[[range, str], Iterable[int]]  # gets numbers and what they count, and returns the numbers


class Source(NamedTuple):
    """A file elsewhere: its URL, its size in bytes, and arguments of the file system that pin its version."""

    url: str
    size: int
    version: dict[str, Any]


def _blocks_folder(folder: pathlib.Path) -> pathlib.Path:
    return folder.with_name(f"{folder.name}.blocks")


class PartialCopy:
    """One file of a model's folder, `header`; `file` is the one with holes."""

    def __init__(self, header: pathlib.Path):
        """Raises ValueError if the record of the file's source is damaged."""
        home = _blocks_folder(header.parent)
        self.file, self._sums_file = home / header.name, home / f"{header.name}.crc"
        about = durable.read_object(home / f"{header.name}.json", f"Remove {header.parent} and {home}.")
        self._url, self._size, self._version = about["url"], about["size"], about["version"]
        self._there = np.zeros(-(-self._size // BLOCK), bool)  # blocks whose CRC this process has compared
        for file, size in ((self.file, self._size), (self._sums_file, 4 * len(self._there))):
            with file.open("ab") as stream:
                if stream.tell() != size:
                    stream.truncate(size)

    @functools.cached_property
    def _file_system(self) -> Any:
        if not self._url.startswith(HUB):
            return buckets.file_system()
        from huggingface_hub import HfFileSystem  # noqa: PLC0415  (0.6 s; a model in a folder does not need it)

        return HfFileSystem()

    def header(self) -> bytes:
        """Returns the length of the header and the header; all of it is there afterwards."""
        size = int.from_bytes(self._begin(8), "little")
        return self._begin(8 + min(size, MAX_HEADER_BYTES))

    def _begin(self, end: int) -> bytes:
        for _ in self.copy([(0, end)]):
            pass
        with self.file.open("rb") as stream:
            return stream.read(end)

    @functools.cached_property
    def _tensors(self) -> tuple[int, dict[str, Any]]:
        content = self.header()
        return len(content), json.loads(content[8:])

    def span(self, name: str, rows: slice) -> Span:
        """Returns the bytes of some rows (along the first axis) of a tensor; the library has checked the header."""
        data, tensors = self._tensors
        begin, end = tensors[name]["data_offsets"]
        count = (tensors[name]["shape"] or [1])[0]
        first, last, _ = rows.indices(count)
        row_bytes = (end - begin) // max(count, 1)
        return data + begin + first * row_bytes, data + begin + last * row_bytes

    def missing(self, spans: Iterable[Span]) -> list[range]:
        """Returns the blocks with these bytes that are not there, as requests."""
        wanted = np.zeros_like(self._there)
        for begin, end in spans:
            wanted[begin // BLOCK : -(-end // BLOCK)] = True
        wanted &= ~self._there
        if wanted.any():
            sums = np.fromfile(self._sums_file, "<u4")
            with self.file.open("rb") as stream:
                for number in np.flatnonzero(wanted & (sums != 0)):
                    stream.seek(int(number) * BLOCK)
                    self._there[number] = zlib.crc32(stream.read(BLOCK)) == sums[number]
        requests: list[range] = []
        for number in np.flatnonzero(wanted & ~self._there).tolist():
            if requests and requests[-1].stop == number and len(requests[-1]) < REQUEST_BLOCKS:
                requests[-1] = range(requests[-1].start, number + 1)
            else:
                requests.append(range(number, number + 1))
        return requests

    def _request(self, blocks: range) -> int:
        begin, end = blocks.start * BLOCK, min(blocks.stop * BLOCK, self._size)
        with buckets.reachable(self._url):
            path = self._url.partition("://")[2]
            content = self._file_system.cat_file(path, begin, end, **self._version)
            if len(content) != end - begin:
                raise buckets.BucketError(
                    f"{self._url}: of the {end - begin:,} bytes from {begin:,} on {len(content):,} came"
                )
        view = memoryview(content)
        sums = np.array([zlib.crc32(view[at : at + BLOCK]) for at in range(0, len(view), BLOCK)], "<u4")
        for file, at, new in ((self.file, begin, view), (self._sums_file, 4 * blocks.start, sums.data)):
            with file.open("r+b") as stream:
                stream.seek(at)
                stream.write(new)
        self._there[blocks.start : blocks.stop] = True
        return len(blocks)

    def copy(self, spans: list[Span]) -> Iterator[int]:
        """Copies what is missing of these bytes; yields the number of blocks of each request that is done.

        Another process of this machine that copies parts of the same file waits, then finds them.
        """
        if not self.missing(spans):
            return
        fetch, _ = self._request, self._file_system  # made in this thread: each would list the folder again
        with durable.exclusive(self._sums_file), concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
            requests = [pool.submit(fetch, blocks) for blocks in self.missing(spans)]
            try:
                for done in concurrent.futures.as_completed(requests):
                    yield done.result()
            finally:
                pool.shutdown(cancel_futures=True)


def find(file: pathlib.Path) -> PartialCopy | None:
    """Returns the partial copy that a file of a model's folder is the header of, None if the file is the whole.

    The header is there. Raises ValueError or BucketError as `PartialCopy` and `copy` do.
    """
    header = file.resolve()
    record = _blocks_folder(header.parent) / f"{header.name}.json"
    # A folder from elsewhere must not choose what is read, with this user's rights, from which bucket.
    if not (record.is_file() and record.is_relative_to(buckets.cache_folder("").resolve())):
        return None
    partial = PartialCopy(header)
    partial.header()
    return partial


def whole(file: pathlib.Path, spans: Iterable[Span] = ()) -> pathlib.Path:
    """Returns a file of the full size, in which the header and `spans` are there at least; raises as `find` does."""
    partial = find(file)
    if partial is None:
        return file
    copy({partial: [*spans]}, lambda numbers, what: numbers)
    return partial.file


def copy(wanted: Mapping[PartialCopy, list[Span]], watch: Watch) -> None:
    """Copies what is missing of these bytes; `watch` counts the MiB. BucketError if the source does not answer."""
    total = sum(len(blocks) for partial, spans in wanted.items() for blocks in partial.missing(spans))
    if not total:
        return
    shown, done = iter(watch(range(total * BLOCK // MIB), "MiB of weights fetched")), 0
    for count in itertools.chain.from_iterable(partial.copy(spans) for partial, spans in wanted.items()):
        before, done = done, done + count
        _skip(shown, done * BLOCK // MIB - before * BLOCK // MIB)
    _skip(shown, None)  # what another process has copied meanwhile


def _skip(items: Iterator[int], count: int | None) -> None:
    for _ in itertools.islice(items, count):
        pass


def make(folder: pathlib.Path, sources: Mapping[str, Source], others: Callable[[pathlib.Path], None]) -> None:
    """Makes a model's folder: `others` writes the files that are copied as a whole, `sources` are all others by name.

    The folder appears as a whole, or not at all; another process may make it at the same time. Raises BucketError if a
    source does not answer.
    """
    if folder.exists():
        return
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as temporary:
        new = pathlib.Path(temporary) / folder.name
        home = _blocks_folder(new)
        new.mkdir()
        home.mkdir()
        for name, source in sources.items():
            (home / f"{name}.json").write_text(json.dumps(source._asdict()), encoding="utf-8")
        files = [PartialCopy(new / name) for name in sources]
        with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
            for partial, header in zip(files, pool.map(PartialCopy.header, files), strict=True):
                (new / partial.file.name).write_bytes(header)
        others(new)
        for path in (home, new):  # the blocks first: where the folder is, they are
            with contextlib.suppress(OSError):  # another process was faster
                path.rename(folder.parent / path.name)


def fetch(url: str) -> pathlib.Path:
    """Returns this machine's copy of a model in a bucket, as `buckets.fetch`, but of weights the headers alone."""
    url = buckets.url(url)
    found, folder = buckets.newest(url)
    weights = [name for name in found if name.endswith(SUFFIX) and "/" not in name]
    if not weights:
        return buckets.fetch(url)
    sources = {
        name: Source(f"{url}/{name}", int(found[name]["size"]), {"generation": found[name].get("generation")})
        for name in weights
    }
    others = [name for name in found if name not in sources]
    make(folder, sources, lambda new: buckets.download(url, others, new))
    return folder
