"""Compiled programs that outlive their process: the folder, its entries, and what a kill or a fault leaves."""

import os
import pathlib

import jax
import pytest

from reinforce_ada_jax.distributed import program_cache
from reinforce_ada_jax.distributed.program_cache import ProgramBucket, ProgramFolder
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.buckets import BucketError
from tests import standins
from tests.bucket_server import Buckets, serving
from tests.running import environment, run_python

# Four starts, between which JAX forgets its programs; prints the result, and how many were compiled and read.
PROGRAM = """
import collections, pathlib, sys
import jax
from reinforce_ada_jax.distributed.program_cache import keep_programs

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
keep_programs("auto")

def start():
    jax.clear_caches()
    before = events.copy()
    result = float(jax.jit(lambda x: x * x)(3.0))
    print(result, *(events[name] - before[name] for name in ("cache_misses", "cache_hits")))

start()
start()
(entry,) = (file for file in pathlib.Path(sys.argv[1]).rglob("*") if file.is_file())
entry.write_bytes(entry.read_bytes()[:-100])
start()
start()
"""


def test_second_start_compiles_nothing_and_damage_is_repaired(tmp_path):
    env = {name: value for name, value in environment().items() if not name.startswith(("JAX_COMPILATION", "JAX_PERS"))}
    done = run_python("-c", PROGRAM, str(tmp_path), env=env | {"XDG_CACHE_HOME": str(tmp_path)})
    # JAX's own cache would warn of the damaged entry, at this and at every later start.
    assert (done.stdout.split("\n"), done.stderr) == (["9.0 1 0", "9.0 0 1", "9.0 1 0", "9.0 0 1", ""], "")
    (folder,) = (tmp_path / "reinforce_ada_jax" / "programs").iterdir()
    assert folder.stat().st_mode & 0o077 == 0  # who writes there runs code here


def test_default_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert buckets.cache_folder("programs") == pathlib.Path("/scratch/reinforce_ada_jax/programs")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert buckets.cache_folder("programs") == pathlib.Path("/home/me/.cache/reinforce_ada_jax/programs")


def test_folder_that_jax_has_stays(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    program_cache.keep_programs(str(tmp_path / "other"))
    assert before and jax.config.jax_compilation_cache_dir == before and not any(tmp_path.iterdir())


def test_folder_that_cannot_be_made_is_said(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        program_cache.keep_programs("")
        assert capsys.readouterr().err == ""
        # A container may run as a user without a home, and "auto" is the default of every command.
        monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-here")
        for chosen in (str(tmp_path / "file"), "~nobody-here/programs", "auto"):
            program_cache.keep_programs(chosen)
            assert jax.config.jax_compilation_cache_dir is None
            err = capsys.readouterr().err
            assert err.startswith("warning: compiled programs are not kept") and err.count("\n") == 1
        assert "set XDG_CACHE_HOME, or HOME)" in err
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_least_recently_used_entries_go_first(tmp_path):
    folder = ProgramFolder(tmp_path, max_bytes=250)
    for age, key in ((30, "a"), (20, "b"), (10, "c")):
        folder.put(key, bytes(40))  # 72 bytes with its hash
        os.utime(tmp_path / key, (age, age))
    os.utime(tmp_path / "a", (25, 25))
    assert folder.get("c") == bytes(40)  # used now
    folder.put("d", bytes(40))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "c", "d"]
    folder.put("e", bytes(251))  # larger than the folder may be
    assert folder.get("e") is None and folder.get("d") == bytes(40)


def test_full_disk_ends_writing_not_the_run(tmp_path, capsys, monkeypatch):
    folder = ProgramFolder(tmp_path)
    folder.put("a", b"old")

    with monkeypatch.context() as patch:
        standins.failing(patch, program_cache.os, "replace", OSError(28, "No space left on device"))
        folder.put("b", b"new")
    folder.put("c", b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    assert (folder.get("a"), folder.get("b")) == (b"old", None)
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_files_of_killed_writers_are_removed_later(tmp_path):
    for name, age in (("old.partial", 1.0), ("new.partial", None)):
        (tmp_path / name).write_bytes(b"half")
        if age is not None:
            os.utime(tmp_path / name, (age, age))
    ProgramFolder(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["new.partial"]


# ---- in a bucket -----------------------------------------------------------------------------------------------------

URL = "gs://programs/kept/here"


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("gcsfs")
    served, patch = Buckets(), pytest.MonkeyPatch()
    with serving(served) as address:
        for name, value in address.items():
            patch.setenv(name, value)
        yield served
    patch.undo()


def folder(path):
    path.mkdir()
    return ProgramFolder(path)


def test_another_node_finds_the_programs_in_the_bucket(server, tmp_path):
    first = ProgramBucket(URL, folder(tmp_path / "first"))
    first.put("a", b"program a")
    assert server.names(URL) == ["a"]
    before = len(server.requests)
    assert (first.get("a"), first.get("b")) == (b"program a", None)  # its own folder has "a", and the bucket had no "b"
    assert len(server.requests) == before
    second = ProgramBucket(URL, folder(tmp_path / "second"))
    assert (second.get("a"), second.get("a")) == (b"program a", b"program a")
    assert ProgramFolder(tmp_path / "second").get("a") == b"program a"  # fetched once
    # What is damaged is compiled and written again; what was deleted is compiled.
    server.write(f"{URL}/a", b"x" * 50)
    third = ProgramBucket(URL, folder(tmp_path / "third"))
    del server.objects["programs", "kept/here/a"]
    assert third.get("a") is None
    server.write(f"{URL}/a", b"x" * 50)
    fourth = ProgramBucket(URL, folder(tmp_path / "fourth"))
    assert fourth.get("a") is None
    fourth.put("a", b"program a")
    assert ProgramBucket(URL, folder(tmp_path / "fifth")).get("a") == b"program a"


def test_a_bucket_that_fails_is_said_once_and_the_folder_goes_on(server, tmp_path, capsys, monkeypatch):
    programs = ProgramBucket("gs://programs/failing", folder(tmp_path / "folder"))

    class Refusing:
        def pipe_file(self, *_):
            raise PermissionError("no rights on programs/failing")

    monkeypatch.setattr(program_cache.buckets, "file_system", Refusing)
    programs.put("a", b"program a")
    programs.put("b", b"program b")
    assert (programs.get("a"), programs.get("b")) == (b"program a", b"program b")
    err = capsys.readouterr().err
    assert err.count("compiled programs are not kept") == err.count("no rights on programs/failing") == 1

    unreadable = BucketError("gs://programs/failing can't be read or written: no rights")
    standins.failing(monkeypatch, program_cache.buckets, "objects", unreadable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        program_cache.keep_programs("gs://programs/failing")
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert "can't be read or written: no rights" in capsys.readouterr().err


# A node, and the one that replaces it: prints the result, and how many programs were compiled and read.
NODES = """
import collections, shutil, sys
import jax
from reinforce_ada_jax.distributed import program_cache
from reinforce_ada_jax.files import buckets

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
program_cache.keep_programs("gs://programs/nodes")
for _ in range(2):
    before = events.copy()
    result = float(jax.jit(lambda x: x * x)(3.0))
    print(result, *(events[name] - before[name] for name in ("cache_misses", "cache_hits")))
    shutil.rmtree(buckets.cache_folder("programs"))
    jax.config.update("jax_compilation_cache_dir", None)
    jax.clear_caches()
    program_cache.keep_programs("gs://programs/nodes")
"""


def test_a_node_that_replaces_another_compiles_nothing(server, tmp_path):
    env = {name: value for name, value in environment().items() if not name.startswith(("JAX_COMPILATION", "JAX_PERS"))}
    done = run_python("-c", NODES, env=env | {"XDG_CACHE_HOME": str(tmp_path)})
    assert (done.stdout.split("\n"), done.stderr) == (["9.0 1 0", "9.0 0 1", ""], "")
    (name,) = server.names("gs://programs/nodes")
    assert name.startswith(f"{program_cache._machine()}/")
