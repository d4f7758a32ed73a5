# SPDX-License-Identifier: Apache-2.0
"""Give a reader thousands of broken and hostile files, and detect all forbidden behaviour.

A :class:`Reader` has valid files to begin with, a function that changes them, and one that reads them. Inputs are read
in a forked child that monitors itself: an audit hook sees what is run, imported, opened and sent; there are limits for
memory and CPU time, and the result is checked. A reader may end in two ways: with a value, or with one ``Refusal``
whose text is one short line that can be printed.

Input number N of a reader is always the same, so its number identifies a failure. The input is added to
``tests/fuzz/corpus.zip``, from where every later run reads it again.

    python -m pytest tests/fuzz                                       # the corpus
    python -m pytest tests/fuzz --lab                                 # 100 new inputs for each reader
    FUZZ=10000 FUZZ_SEED=7 python -m pytest tests/fuzz --lab -k json  # more and other inputs, only for some readers
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import mmap
import os
import resource
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from megatron.system import own_process
from megatron.training.refusal import Refusal
from tests.fuzz.extremes import with_extremes
from tests.patience import patience

# Modules of the standard library that encodings import by name: import them before a monitored read.
for _name in ("cp437", "idna", "latin_1", "utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le"):
    importlib.import_module(f"encodings.{_name}")

CORPUS = Path(__file__).with_name("corpus.zip")
BATCH = 500  # inputs held in memory
LONGEST = 1000  # characters of a refusal
HUNG = 60.0  # seconds without an answer, on a quiet machine, after which a child is killed


@dataclass(frozen=True)
class Reader:
    """One reader of files from elsewhere.

    Args:
        name: the name of the reader and of its folder in the corpus.
        file: the name that each input has in its folder.
        seeds: makes valid inputs, which must be read without a refusal.
        change: makes a new input from a valid one; all chance comes from the ``Random``.
        read: reads the folder.
        other_files: further files in the folder, by name.
        memory: MiB that reading one input may take.
        seconds: of CPU time that reading one input may take.
        trusted: installed packages; the reader may import all of their modules, also those that an input names.
    """

    name: str
    file: str
    seeds: Callable[[], Sequence[bytes]]
    change: Callable[[Random, bytes], bytes]
    read: Callable[[Path], Any]
    other_files: Mapping[str, bytes] = field(default_factory=dict)
    memory: int = 256
    seconds: float = 5.0
    trusted: tuple[str, ...] = ()


@dataclass
class Failure:
    """A forbidden action of a reader."""

    label: str  # names the input
    what: str
    data: bytes


@dataclass
class Outcome:
    """The results for some inputs."""

    values: int = 0
    refusals: int = 0
    seconds: float = 0.0
    lines: Counter[str] = field(default_factory=Counter)  # refusals without their digits, to see which ones occurred
    failures: list[Failure] = field(default_factory=list)


def fresh(reader: Reader, seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """(label, input) of ``count`` new inputs."""
    seeds = reader.seeds()
    for number in range(count):
        random = Random(f"{reader.name} {seed} {number}")
        yield f"seed {seed}, number {number}", reader.change(random, random.choice(seeds))


def extremes(reader: Reader, most: int | None = None) -> list[tuple[str, bytes]]:
    """(label, input) of valid files with one extreme number each; ``most``: only this many of them, by chance."""
    inputs = [
        (f"seed {at}, extreme {n}", one)
        for at, data in enumerate(reader.seeds())
        for n, one in enumerate(with_extremes(data))
    ]
    return inputs if most is None else Random(reader.name).sample(inputs, min(most, len(inputs)))


def corpus(reader: Reader) -> list[tuple[str, bytes]]:
    """(name, input) of a reader's inputs in the corpus."""
    with zipfile.ZipFile(CORPUS) as kept:
        names = sorted(name for name in kept.namelist() if name.startswith(f"{reader.name}/"))
        return [(name, kept.read(name)) for name in names]


def keep(reader: Reader, failure: Failure) -> Path:
    """Add a failing input to the corpus; returns the archive."""
    name = f"{reader.name}/failed_" + "".join(one if one.isalnum() else "_" for one in failure.label)
    with CORPUS.open("r+b") as file, zipfile.ZipFile(file, "a") as kept:
        if name not in kept.namelist():
            kept.writestr(zipfile.ZipInfo(name), failure.data, zipfile.ZIP_DEFLATED)  # always with the same date
    return CORPUS


def run(reader: Reader, inputs: Iterator[tuple[str, bytes]] | list[tuple[str, bytes]], folder: Path) -> Outcome:
    """Read all inputs in a child. If the child dies, the input that it was reading fails, and another child continues.

    What a program reads in a process of its own (own_process.py) is read in the child, which is faster. Inputs that
    fail so are read again as in a program.

    Args:
        folder: an empty folder that only this reader uses.
    """
    outcome, begin = Outcome(), time.monotonic()
    left = iter(inputs)
    while todo := list(islice(left, BATCH)):
        first = 0
        while first < len(todo):
            first = _run_child(reader, todo, first, folder, outcome, fork=False)
    again = [(one.label, one.data) for one in outcome.failures]
    outcome.failures, first = [], 0
    while first < len(again):
        first = _run_child(reader, again, first, folder, outcome, fork=True)
    outcome.seconds = time.monotonic() - begin
    return outcome


def _run_child(
    reader: Reader, todo: list[tuple[str, bytes]], first: int, folder: Path, outcome: Outcome, *, fork: bool
) -> int:
    """Fork a child that begins at input ``first``; returns the number of the first input that is not read yet."""
    progress = mmap.mmap(-1, 8)  # number of the input that is being read
    progress[:] = struct.pack("q", first)
    receiving, sending = os.pipe()
    number = os.fork()
    if number == 0:
        try:
            os.close(receiving)
            with os.fdopen(sending, "w") as pipe:
                _child(reader, todo, first, folder, progress, pipe, fork)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(sending)
    rows, hung = _listen(receiving, progress)
    if hung:
        os.kill(number, signal.SIGKILL)
    _, status = os.waitpid(number, 0)
    done = False
    for row in rows:
        done = done or row["kind"] == "done"
        if row["kind"] == "failure":
            label, data = todo[row["number"]] if row["number"] >= 0 else ("a valid file", b"")
            outcome.failures.append(Failure(label, row["what"], data))
        elif row["kind"] == "done":
            outcome.values += row["values"]
            outcome.refusals += row["refusals"]
            outcome.lines.update(row["lines"])
    if done:
        return len(todo)
    at = struct.unpack("q", progress[:])[0]
    label, data = todo[at] if at >= 0 else ("a valid file", b"")
    late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    why = "hangs" if hung else "takes too long" if late else f"ends the process (status {status})"
    outcome.failures.append(Failure(label, why, data))
    return at + 1 if at >= 0 else len(todo)


def _listen(receiving: int, progress: mmap.mmap) -> tuple[list[dict[str, Any]], bool]:
    """(messages of a child, whether it stopped answering)."""
    import select

    text, last, since = b"", progress[:], time.monotonic()
    with os.fdopen(receiving, "rb", buffering=0) as pipe:
        while True:
            if select.select([pipe], [], [], 1.0)[0]:
                part = pipe.read(1 << 16)
                if not part:
                    return [json.loads(line) for line in text.splitlines()], False
                text += part
            if progress[:] != last:
                last, since = progress[:], time.monotonic()
            elif time.monotonic() - since > patience(HUNG):
                return [json.loads(line) for line in text.splitlines()[:-1]], True


# In the child.


class Caught(BaseException):
    """Raised before a forbidden action."""


@dataclass
class _Watch:
    """State of the audit hook, which cannot be removed and therefore exists only in the child."""

    folder: str
    trusted: tuple[str, ...] = ()
    learning: bool = True  # while valid files are read, all actions are permitted
    on: bool = False
    seen: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 1 << 20))  # permitted actions, a line each; shared
    text: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 1 << 12))  # shared with the reader's own process

    @property
    def caught(self) -> str:
        """What was forbidden."""
        return self.text[:].rstrip(b"\0").decode("utf-8", "replace")

    @caught.setter
    def caught(self, what: str) -> None:
        self.text[:] = what.encode("utf-8", "replace")[: len(self.text)].ljust(len(self.text), b"\0")

    def __call__(self, event: str, arguments: tuple) -> None:
        if not self.on:
            return
        what = self._of_interest(event, arguments)
        if what is None or self._is_trusted(event, what[1]):
            return
        line = json.dumps(what).encode() + b"\n"
        if self.seen.find(line, 0) >= 0:
            return
        if self.learning:
            self.seen.seek(self.seen.find(b"\0", 0))
            self.seen.write(line)
            return
        self.caught = self.caught or " ".join(what)
        raise Caught(self.caught)

    def _is_trusted(self, event: str, what: str) -> bool:
        if event == "marshal.loads":  # loads a .pyc that was just opened
            return bool(self.trusted)
        if event == "import":
            return what.split(".")[0] in self.trusted
        # jinja2 compiles templates to Python code.
        if "jinja2" in self.trusted and event in ("compile", "code.__new__", "exec"):
            if "<unknown>" in what or "<template>" in what:
                return True
        places = [os.path.dirname(sys.modules[name].__file__) + os.sep for name in self.trusted if name in sys.modules]
        return event in ("open", "exec", "compile") and what.startswith(tuple(places))

    def _of_interest(self, event: str, arguments: tuple) -> tuple[str, str] | None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, int):
                return None
            where = os.path.realpath(os.fsdecode(path))
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            if where.startswith(self.folder + os.sep):
                return None
            return ("writes" if writes else "opens", where)
        if event in ("import", "pickle.find_class"):
            return event, ".".join(map(str, arguments[: 1 if event == "import" else 2]))
        if event == "exec":
            return event, f"{arguments[0].co_filename} {arguments[0].co_name}"
        if event == "compile":
            return event, str(arguments[1])
        if event in ("os.scandir", "os.listdir", "os.walk"):
            return None
        if event == "os.fork" and sys._getframe(2).f_code is own_process.in_own_process.__code__:
            return None
        if event == "os.kill" and arguments[0] in _children():
            return None  # of in_own_process
        if event in EVENTS or event.startswith(("subprocess.", "socket.", "ctypes.", "shutil.", "tempfile.", "os.")):
            return event, repr(arguments)[:200]
        return None


EVENTS = {"code.__new__", "marshal.loads", "function.__new__", "pty.spawn", "sys.settrace"}


def _children() -> list[int]:
    with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
        return list(map(int, file.read().split()))


def _child(
    reader: Reader,
    todo: list[tuple[str, bytes]],
    first: int,
    folder: Path,
    progress: mmap.mmap,
    pipe: Any,
    fork: bool,
) -> None:
    def send(**row: Any) -> None:
        pipe.write(json.dumps(row) + "\n")
        pipe.flush()

    faulthandler.disable()  # a crash is reported by the parent
    folder = folder / str(os.getpid())
    _prepare(reader, folder)
    os.chdir(folder)
    watch = _Watch(os.path.realpath(folder), reader.trusted)
    sys.addaudithook(watch)
    signal.signal(signal.SIGVTALRM, _late)
    progress[:] = struct.pack("q", -1)
    own_process.FORK, watch.on = fork, True  # learn what each process of its own needs, also if no valid file has one
    list(own_process.in_own_process(lambda: iter([(1,)]), memory=1 << 28, seconds=5))
    watch.on = False
    # Valid files are read twice, because the first read imports modules; here, where the monitor learns their names.
    for data, own_process.FORK in [(one, fork and again) for one in reader.seeds() for again in (False, True)]:
        what, _ = _read(reader, folder, data, watch)
        if what != "value":
            send(kind="failure", number=-1, what=f"a valid file is not read: {what}")
    watch.learning = False
    _limit_memory(reader.memory)
    values = refusals = 0
    lines: Counter[str] = Counter()
    for number in range(first, len(todo)):
        progress[:] = struct.pack("q", number)
        what, line = _read(reader, folder, todo[number][1], watch)
        values += what == "value"
        refusals += what == "refusal"
        if what not in ("value", "refusal"):
            send(kind="failure", number=number, what=what)
        elif line:
            lines["".join(one for one in line if not one.isdigit())[-80:]] += 1
    send(kind="done", values=values, refusals=refusals, lines=dict(lines.most_common(200)))
    shutil.rmtree(folder, ignore_errors=True)


def _prepare(reader: Reader, folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, data in reader.other_files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / reader.file).parent.mkdir(parents=True, exist_ok=True)


def _late(*_: Any) -> None:
    raise Caught("takes too long")


def _limit_memory(most: int) -> None:
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (most << 20), resource.RLIM_INFINITY))


def _read(reader: Reader, folder: Path, data: bytes, watch: _Watch) -> tuple[str, str]:
    """("value", ""), ("refusal", its text), or (what the reader did wrong, "")."""
    (folder / reader.file).write_bytes(data)
    watch.caught = ""
    kind, line, value = "value", "", None
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, reader.seconds)
        signal.setitimer(signal.ITIMER_PROF, 2 * reader.seconds)  # ends calls that do not return from C
        watch.on = True
        try:
            value = reader.read(folder)
        finally:
            watch.on = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
    except Refusal as refusal:
        kind, line = "refusal", refusal.render()
        if wrong := _wrong_refusal(refusal, line):
            return wrong, ""
    except Caught as caught:
        return str(caught), ""
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"raises {type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})", ""
    if watch.caught:
        return watch.caught, ""
    if isinstance(value, str) and not _is_line(value):
        return f"returns a text that is not one short line: {value[:200]!r}", ""
    return kind, line


def _wrong_refusal(refusal: Refusal, line: str) -> str | None:
    if not _is_line(str(refusal)) or not _is_line(line):
        return f"its refusal is not one short line that can be printed: {str(refusal)[:200]!r}"
    error: BaseException | None = refusal
    while error is not None:  # a MemoryError may be the cause of the refusal
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return f"wants more memory than it may have: {str(error)[:200]}"
        error = error.__cause__ or error.__context__
    return None


def _is_line(text: str) -> bool:
    return text.isprintable() and 0 < len(text) <= LONGEST
