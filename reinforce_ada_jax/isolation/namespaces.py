"""A file system, process table and network of its own for a child process; Linux only, in one thread.

The new root is a small file system in memory. It has the folders that Python needs, for reading only, and three that
can be written to, which share its size limit. It has no /proc. It ends with its last process.
"""

import ctypes
import os
import pathlib
import sys

_NEW_MOUNTS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_MOUNT_SETATTR, _AT_RECURSIVE, _AT_FDCWD = 442, 0x8000, -100
_RDONLY, _NOSUID = 1, 2
_PR_SET_DUMPABLE = 4
# The new root is mounted here, because no Python is installed there.
_MOUNT_POINT = "/proc"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32")
_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
HOME = "/work"
_WRITABLE = (HOME, "/tmp", "/dev/shm")
_MAX_FILES = 4096


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    result = libc().mount(*texts, ctypes.c_ulong(flags), None if options is None else options.encode())
    check(result, f"mount {target}")


def _read_only(target: str) -> None:
    attributes = _MountAttributes(_RDONLY | _NOSUID, 0, 0, 0)
    arguments = (ctypes.c_int(_AT_FDCWD), target.encode(), ctypes.c_uint(_AT_RECURSIVE), ctypes.byref(attributes))
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    check(libc().syscall(ctypes.c_long(_MOUNT_SETATTR), *arguments, size), f"mount_setattr {target}")


def _bind(path: str) -> None:
    target = _MOUNT_POINT + path
    pathlib.Path(target).parent.mkdir(parents=True, exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        pathlib.Path(target).touch()
    _mount(path, target, None, _BIND | _RECURSIVE)
    if not path.startswith("/dev/"):
        _read_only(target)


def _of_python() -> list[str]:
    """Returns the folders of this interpreter and of its environment that are not in those of the system."""
    folders: list[str] = []
    for prefix in (sys.base_prefix, sys.base_exec_prefix, sys.prefix):
        for folder in (os.path.abspath(prefix), os.path.realpath(prefix)):
            if not any(f"{folder}/".startswith(f"{known}/") for known in (*_SYSTEM, *folders)):
                folders.append(folder)
    return folders


def enter(owner: int | None) -> None:
    """Moves this process into new namespaces, and its later children into a new process table.

    `owner` is the user id that programs will have, where this process is root and can choose one; None: its own.
    """
    user, group = os.getuid(), os.getgid()
    flags = _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_PIDS | _NEW_NET | (_NEW_USER if owner is None else 0)
    check(libc().unshare(flags), "unshare")
    if owner is None:
        pathlib.Path("/proc/self/setgroups").write_text("deny")
        pathlib.Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        pathlib.Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)


def new_root(owner: int | None, size_bytes: int) -> None:
    """Makes the new file system the root of this process, with HOME as its folder; `owner` as in `enter`."""
    _mount("sandbox", _MOUNT_POINT, "tmpfs", _NOSUID, f"size={size_bytes},nr_inodes={_MAX_FILES},mode=755")
    for path in (*_SYSTEM, *_of_python(), *_FILES):
        if os.path.lexists(path):
            _bind(path)
    for path in _WRITABLE:
        folder = _MOUNT_POINT + path
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, 0o700)
        if owner is not None:
            os.chown(folder, owner, owner)
    os.chroot(_MOUNT_POINT)
    os.chdir(HOME)


def protect() -> None:
    """Makes this process unreadable for the processes that it starts."""
    check(libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")
