# SPDX-License-Identifier: Apache-2.0
"""Network cards with a delay, for network namespaces: ``python -m tests.faults.relay 0.01 sn0 sn1``.

Makes ``eth0`` in each namespace and carries packets to addresses that end in 1, 2, ... until it is ended. Linux' netem
does this better, if the kernel has it.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000


def card(namespace: str) -> int:
    """A descriptor of the namespace's ``eth0``: reading gives sent packets, and writing delivers packets."""
    libc = ctypes.CDLL(None, use_errno=True)
    own, entered = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(entered, 0):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
    libc.setns(own, 0)
    os.close(own)
    os.close(entered)
    return descriptor


def relay(delay: float, cards: list[int]) -> None:
    """Carry packets for ever, each ``delay`` seconds late."""
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select(cards, [], [], pause)[0]:
            packet = os.read(source, 65536)
            to = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the address ends in the number of the node
            if 0 <= to < len(cards):
                number += 1
                heapq.heappush(waiting, (time.monotonic() + delay, number, cards[to], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(waiting)
            try:
                os.write(target, packet)
            except BlockingIOError:  # its queue is full: the packet is lost
                pass


if __name__ == "__main__":
    result = [card(name) for name in sys.argv[2:]]
    print("ready", flush=True)
    relay(float(sys.argv[1]), result)
