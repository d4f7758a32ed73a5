# SPDX-License-Identifier: Apache-2.0
"""Confines a process and all its children: they may read files, and write only to given paths.

Linux' Landlock controls where files are opened for writing, created, renamed and removed. A seccomp filter refuses what
Landlock does not control: sockets, signals, owners, modes and times of files, device commands. Capabilities are
dropped, limits are set, and setuid programs gain nothing. A confined process cannot undo any of it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from pathlib import Path

MEMORY, FILE = 4 << 30, 64 << 20  # limits in bytes: address space of a process, size of a file

# Numbers of system calls: Landlock's, then the refused ones on (x86-64, arm64); -1: this machine has no such call.
RULESET, ADD_RULE, RESTRICT = 444, 445, 446
REFUSED = {
    "socket": (41, 198), "io_uring_setup": (425, 425), "ioctl": (16, 29), "openat2": (437, 437),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "ptrace": (101, 117),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "setsid": (112, 157), "setpgid": (109, 154),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "prlimit64": (302, 261), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1),
    "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469), "truncate": (76, 45),
    "shmat": (30, 196), "shmctl": (31, 195), "shmget": (29, 194), "semget": (64, 190), "semctl": (66, 191),
    "msgget": (68, 186), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282),
}  # fmt: skip
OPEN = ((2, -1, 1), (257, 56, 2))  # open and openat: numbers, and which argument holds the flags
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, and AUDIT_ARCH

EXECUTE, WRITE, READ, LIST, TRUNCATE = 1, 1 << 1, 1 << 2, 1 << 3, 1 << 14
KNOWN = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # rights by version of Landlock
RULE_PATH, NO_NEW_PRIVILEGES, SECCOMP, SECCOMP_FILTER = 1, 38, 22, 2
DROP_FROM_BOUND, AMBIENT, CLEAR_ALL = 24, 47, 4


class NotConfined(OSError):
    """The kernel refuses to confine; nothing has been started."""


def why_not() -> str:
    """Why this machine cannot confine a process; empty if it can."""
    if platform.machine() not in MACHINES or platform.system() != "Linux":
        return f"{platform.system()} on {platform.machine()} cannot confine a process here"
    return "" if _version() >= 1 else "this kernel, or this container, has no Landlock to confine a process with"


def confine(folders: list[Path], files: list[Path]) -> None:
    """Confine the calling process permanently. Call it between fork and exec.

    Args:
        folders: folders in which anything may be created, changed and removed.
        files: files that may be written to, but not replaced.

    Raises:
        NotConfined: the kernel refused a part of the confinement.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = _version()
    rights = KNOWN[max(known for known in KNOWN if known <= version)] if version >= 1 else 0
    scopes = 3 if version >= 6 else 0  # abstract sockets, signals
    network = 3 if version >= 4 else 0  # to bind and connect TCP
    attributes = struct.pack("<QQQ", rights, network, scopes)[: 24 if scopes else 16 if network else 8]
    ruleset = _checked(libc.syscall(RULESET, attributes, len(attributes), 0), "landlock_create_ruleset")
    file_rights = (WRITE | TRUNCATE) & rights
    paths = [(Path("/"), EXECUTE | READ | LIST), *((folder, rights) for folder in folders)]
    paths += [(file, READ | file_rights) for file in (*files, Path("/dev/null"))]
    for path, allowed in paths:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("<Qi", allowed, opened)
        _checked(libc.syscall(ADD_RULE, ruleset, RULE_PATH, rule, 0), f"landlock_add_rule {path}")
        os.close(opened)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _drop_capabilities(libc)
    _checked(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")
    _checked(libc.syscall(RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
    _filter(libc)


def _version() -> int:
    """The version of the kernel's Landlock; below 1: the kernel has none."""
    return ctypes.CDLL(None, use_errno=True).syscall(RULESET, None, ctypes.c_size_t(0), 1)


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise NotConfined(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Drop all capabilities. The files of root, which it still owns, are protected by Landlock."""
    for number in range(64):
        libc.prctl(DROP_FROM_BOUND, number, 0, 0, 0)  # fails without that right, and then there is nothing to drop
    libc.prctl(AMBIENT, CLEAR_ALL, 0, 0, 0)
    _checked(libc.capset(struct.pack("<Ii", 0x20080522, 0), bytes(24)), "capset")


def _filter(libc: ctypes.CDLL) -> None:
    """Classic BPF over (number, architecture, instruction, six arguments): each refused call fails with EPERM.

    ioctl fails with ENOTTY, which programs expect when they test whether they write to a terminal. O_TRUNC with a
    read-only mode is refused, since it empties the file and older versions of Landlock do not control it.
    """
    column, architecture = MACHINES[platform.machine()]
    load, equal, above, masked, end = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, kill = 0x7FFF0000, 0x80000000
    eperm, enotty = 0x00050000 | 1, 0x00050000 | 25
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, kill), (load, 0, 0, 0)]
    code += [(above, 0, 1, 0x40000000), (end, 0, 0, eperm)]  # x32 has other numbers
    for *numbers, argument in OPEN:
        if numbers[column] >= 0:
            code += [(equal, 0, 5, numbers[column]), (load, 0, 0, 16 + 8 * argument)]
            code += [(masked, 0, 0, os.O_ACCMODE | os.O_TRUNC), (equal, 0, 1, os.O_TRUNC), (end, 0, 0, eperm)]
            code += [(end, 0, 0, allow)]
    for name, numbers in REFUSED.items():
        if numbers[column] >= 0:
            code += [(equal, 0, 1, numbers[column]), (end, 0, 0, enotty if name == "ioctl" else eperm)]
    code += [(end, 0, 0, allow)]
    instructions = b"".join(struct.pack("<HBBI", *one) for one in code)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("@HP", len(code), ctypes.addressof(buffer))
    _checked(libc.prctl(SECCOMP, SECCOMP_FILTER, program, 0, 0), "seccomp")
