"""Compiler flags of tests, and the folder of their programs; imported before jax is."""

import importlib.metadata
import os
import pathlib
import shutil
import threading
import time

# Tests spend their time compiling tiny programs. Without optimisation, and with XLA's older emitters of loops in place
# of those that go through MLIR, that takes a sixth of the time. One module of LLVM instead of 32 saves a fifth of it.
# Devices that wait for each other end the process after 40 s otherwise. On a busy machine they took longer once.
QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600"
)
if importlib.metadata.version("jaxlib").startswith("0.10."):  # a later XLA has no other emitters, and ends the process
    QUICKLY = f"--xla_cpu_use_fusion_emitters=false {QUICKLY}"
DEVICES = "--xla_force_host_platform_device_count="
# For commands that tests start. They share the programs of the test process, whose flags are the same.
COMMANDS = f"{DEVICES}1 {QUICKLY}"

# Programs of all test processes, and of the commands that they start, across sessions. JAX's key of a program covers
# its text, the compiler's version and its flags.
PROGRAMS = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "programs"
IN_USE = PROGRAMS / "in_use"
MAX_BYTES = 2**30
PROGRAMS_OF_A_CONTEXT = 100
LONGEST_COMPILATION_S = 60.0  # after which a process compiles what another one was to
POLL_S = 0.02
CHOSEN = "REINFORCE_ADA_TEST_PROGRAMS"  # the folder of this session, for its workers
# A program for `python -c` that runs the module in its first argument with `share_programs`.
SHARING = (
    "import runpy, sys; from tests import compiling; compiling.share_programs();"
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def _is_running(pid: str) -> bool:
    return pid.isdigit() and pathlib.Path(f"/proc/{pid}").exists()


def open_programs() -> pathlib.Path:
    """Returns the folder of this session's programs; the first process of a session chooses it.

    Without `share_programs` JAX writes entries in place: a killed process leaves half of one. A folder whose last
    session did not end is therefore emptied. A session beside a running one has a folder of its own.
    """
    if CHOSEN in os.environ:
        return pathlib.Path(os.environ[CHOSEN])
    folder = PROGRAMS
    owner = IN_USE.read_text() if IN_USE.exists() else ""
    if _is_running(owner):
        folder = PROGRAMS.with_name(f"programs-{os.getpid()}")
    elif owner or sum(file.stat().st_size for file in PROGRAMS.rglob("*") if file.is_file()) > MAX_BYTES:
        shutil.rmtree(PROGRAMS, ignore_errors=True)  # another session may empty it as well
    folder.mkdir(parents=True, exist_ok=True)
    (folder / IN_USE.name).write_text(str(os.getpid()))
    os.environ[CHOSEN] = str(folder)
    return folder


def close_programs() -> None:
    """Ends the session's use of its folder, in the process that opened it."""
    folder = pathlib.Path(os.environ[CHOSEN])
    if (folder / IN_USE.name).read_text() != str(os.getpid()):
        return
    if folder == PROGRAMS:
        for claim in folder.glob("*.claim"):
            claim.unlink()
        IN_USE.unlink()
    else:
        shutil.rmtree(folder)


def keeping() -> dict[str, str]:
    """The environment in which jax keeps each program that it compiles, in the folder of the session."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(open_programs()),
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",  # else a program's key depends on the folder
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def share_contexts() -> None:
    """Lowers many programs of a thread in one context of MLIR: 4 ms of the processor for each, a fifth of a small one.

    A context keeps the constants of its programs, so another one follows after some. It must be called after jax is
    imported.
    """
    from jax._src.interpreters import mlir  # noqa: PLC0415 (conftest.py sets what jax reads before)

    make, own = mlir.make_ir_context, threading.local()

    def context():
        if getattr(own, "programs", PROGRAMS_OF_A_CONTEXT) == PROGRAMS_OF_A_CONTEXT:
            own.context, own.programs = make(), 0
        own.programs += 1
        return own.context

    mlir.make_ir_context = context


def share_programs() -> None:
    """Makes this process write each program whole, so that all processes of a session can share one folder.

    Of several processes that need a program at the same time one compiles it, and the others wait for its file. Only
    process 0 of a run writes programs: the others give it a second to begin.

    A program's key has the kinds of the devices that it uses, not their ids and not the number of all devices. It must
    be called after jax is imported. The names of the files are those of jax.
    """
    from jax._src import cache_key, compilation_cache, distributed  # noqa: PLC0415 (conftest.py sets what jax reads before)
    from jax._src.compilation_cache_interface import CacheInterface  # noqa: PLC0415

    class Folder(CacheInterface):
        """Programs in files, with the names that jax gives them."""

        def __init__(self, path: str):
            self._path = pathlib.Path(path)
            self._path.mkdir(parents=True, exist_ok=True)

        def get(self, key: str) -> bytes | None:
            began, writes = time.monotonic(), not distributed.global_state.process_id
            while True:
                try:
                    return (self._path / f"{key}-cache").read_bytes()
                except FileNotFoundError:
                    owner = self._owner(key, claim=writes)
                waited = time.monotonic() - began
                if owner == str(os.getpid()) or waited > (LONGEST_COMPILATION_S if _is_running(owner) else 1.0):
                    return None
                time.sleep(POLL_S)

        def put(self, key: str, value: bytes) -> None:
            partial = self._path / f"{key}.{os.getpid()}"
            partial.write_bytes(value)
            partial.replace(self._path / f"{key}-cache")
            self._claim(key).unlink(missing_ok=True)

        def _claim(self, key: str) -> pathlib.Path:
            return self._path / f"{key}.claim"

        def _owner(self, key: str, claim: bool) -> str:
            """Returns the id of the process that compiles a program, which is this one where it may `claim` it."""
            file = self._claim(key)
            if claim:
                own = self._path / f"{key}.{os.getpid()}.{threading.get_ident()}"
                own.write_text(str(os.getpid()))
                try:
                    os.link(own, file)  # all of it, or an error where the file is there
                except FileExistsError:
                    pass
                finally:
                    own.unlink()
            try:
                return file.read_text()
            except FileNotFoundError:
                return ""

    compilation_cache.get_file_cache = lambda path: (Folder(path), path)
    cache_key._hash_accelerator_config = cache_key._hash_devices
    hash_options = cache_key._hash_serialized_compile_options
    cache_key._hash_serialized_compile_options = lambda hashed, options, **_: hash_options(hashed, options, True)
