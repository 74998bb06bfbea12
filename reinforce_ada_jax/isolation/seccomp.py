"""System calls that a sandboxed program may not make; Linux on x86-64 and 64-bit ARM.

Behind namespaces the filter is a second line of defence. Where the system allows no namespaces, only the filter keeps a
program from the network and from signals to others. A refused call fails with EPERM.
"""

import ctypes
import errno
import platform
import sys

from reinforce_ada_jax.isolation.namespaces import check, libc

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of 32-bit words
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_NEW_NAMESPACE = 0x7E020000  # every CLONE_NEW... of clone()
_X32 = 0x40000000  # the second table of x86-64
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Number by name: (x86-64, ARM).
_REFUSED = {
    # Other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "move_pages": (279, 239),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122),
    # Other file systems and namespaces, whose owner could mount without a limit.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "fsopen": (430, 430), "fsmount": (432, 432), "open_tree": (428, 428),
    "move_mount": (429, 429), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "quotactl": (179, 60),
    # Memory that belongs to no process, and what outlives one.
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    # The network, and parts of the kernel that no solution needs.
    "socket": (41, 198), "io_uring_setup": (425, 425), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "personality": (135, 92), "syslog": (103, 116),
}  # fmt: skip
# Signals: where other processes are visible, a program may send none, not even to itself.
_SIGNALS = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
}  # fmt: skip
_CLONE, _CLONE3, _PRLIMIT = (56, 220), (435, 435), (302, 261)
SUPPORTED = sys.platform == "linux" and platform.machine() in _ARCHITECTURES


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("if_true", ctypes.c_uint8), ("if_false", ctypes.c_uint8),
                ("value", ctypes.c_uint32)]  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def _instructions(signals: bool) -> list[tuple[int, int, int, int]]:
    """Returns the filter as (code, jump if true, jump if false, value); jumps count instructions to leave out."""
    machine = platform.machine()
    column = list(_ARCHITECTURES).index(machine)
    refused = [*_REFUSED.values(), *(() if signals else _SIGNALS.values())]
    refuse, allow = (_RETURN, 0, 0, _REFUSE | errno.EPERM), (_RETURN, 0, 0, _ALLOW)
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *([(_AT_LEAST, 0, 1, _X32), refuse] if machine == "x86_64" else []),
        *(part for numbers in refused for part in ((_EQUAL, 0, 1, numbers[column]), refuse)),
        # The flags of clone3() are in memory, where no filter can look. After ENOSYS the C library uses clone().
        (_EQUAL, 0, 1, _CLONE3[column]),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACE),
        refuse,
        allow,
        (_EQUAL, 0, 3, _PRLIMIT[column]),
        (_LOAD, 0, 0, _ARGUMENT),
        (_EQUAL, 1, 0, 0),  # limits of this process
        refuse,
        allow,
    ]


def install(*, signals: bool) -> None:
    """Refuses the calls from now on, in this process and in all that it starts; its rights can only shrink.

    With `signals` it may send some, because it is in a process namespace of its own.
    """
    if sys.platform != "linux":
        return
    check(libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    if not SUPPORTED:
        return
    instructions = _instructions(signals)
    array = (_Instruction * len(instructions))(*instructions)
    program = _Program(len(instructions), array)
    check(libc().prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0), "prctl(PR_SET_SECCOMP)")
