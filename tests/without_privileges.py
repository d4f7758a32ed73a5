# SPDX-License-Identifier: Apache-2.0
"""Run a program with root's privileges given up: ``python without_privileges.py UMASK PROGRAM ...``.

The user is still root, but owners and modes of files are checked as for other users. (Another user would need
permission to read Python and this repository.)
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys

CAPSET, VERSION = {"x86_64": 126, "aarch64": 91}, 0x20080522  # number of the system call, and of its version 3


def give_up() -> None:
    """Drop all capabilities of this process. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    head, none = (ctypes.c_uint32 * 2)(VERSION, 0), (ctypes.c_uint32 * 6)()
    if libc.syscall(CAPSET[os.uname().machine], head, none):
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    os.umask(int(sys.argv[1], 8))
    give_up()
    sys.argv = sys.argv[2:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
