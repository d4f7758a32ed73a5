# SPDX-License-Identifier: Apache-2.0
"""Run an iterator in a process of its own, which can be ended.

A file from elsewhere may abort a library that is not written in Python, or make it compute or allocate without end.
No handler in the same process can end that.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

from megatron.system.processes import end_with_forking_thread

GIB = 1 << 30
FORK = True  # False in tests that follow what an iterator does
Item = tuple[int | float | str | bytes, ...]


class Ended(Exception):
    """The process ended before its iterator did; the text says why, to follow the name of what was read."""


def in_own_process(
    items: Callable[[], Iterator[Item]], *, memory: int, seconds: int, errors: tuple[type[Exception], ...] = ()
) -> Iterator[Item]:
    """The items of an iterator that a forked process runs. It ends with this process, and when the caller stops.

    Args:
        items: makes the iterator, in the process. What it prints is discarded.
        memory: bytes by which the process may grow.
        seconds: of CPU time for one item.
        errors: of the iterator, which are raised here with the same arguments.

    Raises:
        Ended: the process took more, or a library ended it, or the iterator raised another error.
    """
    if not FORK:
        yield from items()
        return
    nowhere, parent = os.open(os.devnull, os.O_WRONLY), os.getpid()
    most, (receiving, sending) = _own_memory() + memory, os.pipe()
    number = os.fork()
    if number == 0:
        try:
            end_with_forking_thread()
            if os.getppid() == parent:
                os.close(receiving)
                os.dup2(nowhere, 1)
                os.dup2(nowhere, 2)
                with os.fdopen(sending, "wb") as pipe:
                    _limit(most, seconds)
                    _send_all(items, pipe, memory, seconds, errors)
        finally:
            os._exit(0)
    os.close(sending)
    os.close(nowhere)
    finished = False
    try:
        with os.fdopen(receiving, "rb") as pipe:
            while (message := _receive(pipe)) is not None:
                kind, *values = message
                finished = kind != "item"
                if kind == "end":
                    return
                if kind == "error":
                    raise errors[values[0]](*values[1:])
                if kind == "other":
                    raise Ended(values[0])
                yield tuple(values)
        finished = True
    finally:
        if not finished:
            os.kill(number, signal.SIGKILL)
        _, status = os.waitpid(number, 0)
    raise Ended(_why(status, seconds))


def _why(status: int, seconds: int) -> str:
    name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "an error"
    if name == "SIGXCPU":
        return f"it takes more than {seconds} s of CPU time"
    if name == "SIGKILL":
        return "the process that read it was killed, perhaps because memory ran out"
    return f"the process that read it ended by {name}"


# In the process.


def _limit(most: int, seconds: int) -> None:
    for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU):
        signal.signal(one, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this process
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    _lower(resource.RLIMIT_AS, most)
    _limit_seconds(seconds)


def _send_all(
    items: Callable[[], Iterator[Item]], pipe: IO[bytes], memory: int, seconds: int, errors: tuple[type[Exception], ...]
) -> None:
    try:
        for item in items():
            _send(pipe, "item", *item)
            _limit_seconds(seconds)
        _send(pipe, "end")
    except BrokenPipeError:
        pass
    except MemoryError:
        _send(pipe, "other", f"it takes more than {memory / GIB:.3g} GiB of memory")
    except errors as error:
        index = next(index for index, kind in enumerate(errors) if isinstance(error, kind))
        plain = all(one is None or isinstance(one, (int, float, str)) for one in error.args)
        _send(pipe, "error", index, *(error.args if plain and error.args else [str(error)]))
    except Exception as error:
        _send(pipe, "other", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _lower(limit: int, value: int) -> None:
    """Lower a limit, which this process may do, and its descendants cannot undo by accident."""
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if soft == resource.RLIM_INFINITY else min(soft, value), hard))


def _limit_seconds(seconds: int) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _own_memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


# Messages: a length, a JSON list in which bytes are {"bytes": length}, then all bytes.


def _send(pipe: IO[bytes], *values: Any) -> None:
    parts = [value for value in values if isinstance(value, bytes)]
    text = json.dumps([{"bytes": len(value)} if isinstance(value, bytes) else value for value in values]).encode()
    pipe.write(len(text).to_bytes(8, sys.byteorder) + text)
    pipe.writelines(parts)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> list[Any] | None:
    """The values of the next message; None if the process ended before it was complete."""
    head = pipe.read(8)
    length = int.from_bytes(head, sys.byteorder)
    text = pipe.read(length)
    if len(head) < 8 or len(text) < length:
        return None
    values = json.loads(text)
    for at, value in enumerate(values):
        if isinstance(value, dict):
            values[at] = pipe.read(value["bytes"])
            if len(values[at]) < value["bytes"]:
                return None
    return values
