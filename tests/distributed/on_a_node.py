# SPDX-License-Identifier: Apache-2.0
"""Runs a program on a simulated node, given by environment variables: ``on_a_node.py PROGRAM ...``

NAMESPACE: name of the network namespace. HOST: the node's host name. HOSTS: file in place of /etc/hosts. Needs root.
"""

import ctypes
import os
import runpy
import socket
import sys

NEW_MOUNTS, NEW_NAMES, NEW_NETWORK = 0x00020000, 0x04000000, 0x40000000  # CLONE_NEWNS, _NEWUTS, _NEWNET
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000  # MS_BIND, MS_REC, MS_PRIVATE


def enter(namespace: str, host: str, hosts: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), name)

    with open(f"/run/netns/{namespace}") as file:
        call("setns", file.fileno(), NEW_NETWORK)
    call("unshare", NEW_MOUNTS | NEW_NAMES)
    call("mount", b"none", b"/", None, RECURSIVE | PRIVATE, None)
    call("mount", hosts.encode(), b"/etc/hosts", None, BIND, None)
    socket.sethostname(host)


if __name__ == "__main__":
    enter(*(os.environ[name] for name in ("NAMESPACE", "HOST", "HOSTS")))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
