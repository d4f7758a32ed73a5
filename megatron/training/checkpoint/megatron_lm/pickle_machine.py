# SPDX-License-Identifier: Apache-2.0
"""Execute the instructions of a pickle without ever calling what the pickle names.

Python's unpickler looks up and calls any function or class that a file names. This machine looks nothing up: a name in
a file remains a pair of strings. Only if that pair is a key of the caller's table is an object created, by the caller's
function. Every other object becomes an :class:`Unread`, which holds only its name.

Work and memory are bounded by the number of bytes read: no instruction allocates a length that the file only claims,
containers are counted, nothing can contain itself, and structures that grow exponentially when they are traversed (a
list that contains another list twice, fifty levels deep) are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Pair = tuple[str, str]  # module and name, as they stand in the file
SCALARS = frozenset((int, float, bool, str, bytes, type(None)))
DEEPEST = 100  # levels of nested containers
INTEGER_BYTES = 64  # random generators have integers of 128 bits; nothing in a checkpoint is longer than this
KEY_PARTS = 64  # bounds the cost of hashing a tuple that is a dictionary's key
# Modules and functions that only an attack names. They would not be called either, but a file with them is refused.
ACTING = frozenset("os posix nt sys subprocess socket shutil importlib runpy ctypes pty code codeop webbrowser".split())
BUILTINS = ("builtins", "__builtin__")
ACTING_BUILTINS = frozenset("eval exec execfile compile open __import__ input breakpoint apply".split())


class BadPickle(ValueError):
    """A pickle that is damaged, or contains something that a checkpoint never needs."""


@dataclass(frozen=True, eq=False)
class Unread:
    """Stands for a function, a class, or an object of a class that is not in the caller's table."""

    of: str  # module and name, with a dot between them


@dataclass(frozen=True)
class Table:
    """What a machine creates for the names in a file.

    Args:
        constants: values of names, such as dtypes.
        makers: functions that create an object from the arguments in the file; they raise ValueError if these are
            invalid.
        builders: by the type of the object, functions that apply the state in the file to it.
        strict: refuse all other names; otherwise they become :class:`Unread`.
    """

    constants: Mapping[Pair, Any]
    makers: Mapping[Pair, Callable[..., Any]]
    builders: Mapping[type, Callable[[Any, Any], None]]
    strict: bool = False


class Machine:
    """Executes one pickle.

    Args:
        data: bytes with the pickle at ``start``.
        stored: returns the object of a persistent id, which ``torch.save`` uses for storages.
    """

    def __init__(self, data: Any, table: Table, start: int = 0, stored: Callable[[Any], Any] | None = None) -> None:
        self.data, self.at, self.table, self.stored = data, start, table, stored
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        # By id of a container: its depth, its number of parts when traversed, whether it is in another container.
        self.sizes: dict[int, list[int]] = {}
        self.kept: list[Any] = []  # keeps all containers alive, so that their ids in ``sizes`` stay unique
        self.most = 1000 + (len(data) - start) // 4  # limit of the number of containers
        self.largest = 100_000 + 16 * (len(data) - start)  # limit of the number of parts when traversed

    def load(self) -> Any:
        """Returns the object, and moves ``at`` to the end of the pickle. Raises BadPickle."""
        data, stop = self.data, len(self.data)
        try:
            while self.at < stop:
                code = data[self.at]
                self.at += 1
                if code == STOP:
                    result = self.stack.pop()
                    if self.stack or self.marked:
                        raise BadPickle("its stack is not empty at the end")
                    return result
                step = STEPS[code]
                if step is None:
                    raise BadPickle(f"instruction {code:#04x} does not occur in checkpoints")
                step(self)
        except (LookupError, UnicodeDecodeError, TypeError, AttributeError, OverflowError) as error:
            raise BadPickle(f"it is damaged at byte {self.at} ({type(error).__name__})") from None
        raise BadPickle("it ends too early")

    # Used by the instructions below.

    def take(self, count: int) -> Any:
        """The next bytes of the file."""
        begin, end = self.at, self.at + count
        if end > len(self.data):
            raise BadPickle("it ends too early")
        self.at = end
        return self.data[begin:end]

    def number(self, count: int) -> int:
        """The next ``count`` bytes as an unsigned integer."""
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        """The text up to the next newline."""
        end = bytes(self.data[self.at : self.at + 500]).find(b"\n")
        if end < 0:
            raise BadPickle("a name in it does not end")
        text = bytes(self.take(end + 1))[:-1]
        return text.decode()

    def since_mark(self) -> list[Any]:
        """Take the objects since the last mark from the stack."""
        items = self.stack
        self.stack = self.marked.pop()
        return items

    def remember(self, number: int) -> None:
        """Store the object on top of the stack in the memo."""
        if number > len(self.data):
            raise BadPickle("an index of its memo is too large")
        self.memo[number] = self.stack[-1]

    def new(self, made: Any) -> Any:
        """Count a new container, and return it."""
        self.kept.append(made)
        if len(self.kept) > self.most:
            raise BadPickle("it has more objects than fit into a file of this length")
        return made

    def put_into(self, container: Any, parts: Any) -> None:
        """Record that ``container`` contains ``parts``, which must not change after that."""
        sizes = self.sizes
        own = sizes.get(id(container))
        if own is None:
            own = sizes[id(container)] = [1, 1, 0]
        elif own[2]:
            raise BadPickle("an object in it changes after it was put into another one")
        depth, traversed = own[0], own[1]
        for part in parts:
            traversed += 1
            if type(part) in SCALARS:
                continue
            if part is container:
                raise BadPickle("an object in it contains itself")
            other = sizes.get(id(part))
            if other is None:
                other = sizes[id(part)] = [1, 1, 1]
                self.kept.append(part)
            else:
                other[2] = 1
            traversed += other[1]
            if other[0] >= depth:
                depth = other[0] + 1
        if depth > DEEPEST:
            raise BadPickle(f"it has more than {DEEPEST} levels")
        if traversed > self.largest:
            raise BadPickle("it repeats parts of itself too often")
        own[0], own[1] = depth, traversed

    def push_tuple(self, items: list[Any]) -> None:
        self.stack.append(self.filled(tuple(items)))

    def filled(self, made: tuple | frozenset) -> Any:
        """Count a new container with its parts, and return it."""
        self.new(made)
        if made:  # Python has only one empty tuple
            self.put_into(made, made)
        return made

    def key(self, key: Any) -> Any:
        """``key``, if a dictionary can have it. Raises BadPickle."""
        if type(key) is tuple and not self._short(key):
            raise BadPickle("a key in it is too long")
        if isinstance(key, (list, dict, set, bytearray)):
            raise BadPickle("a key in it is not hashable")
        return key

    def _short(self, key: tuple) -> bool:
        return self.sizes.get(id(key), (0, 0))[1] <= KEY_PARTS

    def put_pairs(self, target: Any, items: list[Any]) -> None:
        """Put keys and values, which alternate in ``items``, into ``target``."""
        if not isinstance(target, dict):
            if isinstance(target, Unread):  # an object of a subclass of dict
                return
            raise BadPickle("it puts keys into an object that is not a dictionary")
        if len(items) % 2:
            raise BadPickle("a key in it has no value")
        self.check_values(items)
        self.put_into(target, items)
        for index in range(0, len(items), 2):
            target[self.key(items[index])] = items[index + 1]

    def check_values(self, items: list[Any]) -> None:
        """With a strict table, refuse functions and classes as values."""
        if self.table.strict and any(type(item) is _Name for item in items):
            raise BadPickle("it has a name in place of a value")

    def put_items(self, target: Any, items: list[Any]) -> None:
        """Add ``items`` to a list or a set."""
        self.check_values(items)
        if type(target) is list:
            self.put_into(target, items)
            target.extend(items)
        elif type(target) is set:
            self.put_into(target, items)
            target.update(map(self.key, items))
        elif not isinstance(target, Unread):
            raise BadPickle("it puts items into an object that is not a list")

    def name(self, module: Any, name: Any) -> None:
        """Push the table's constant for a name; otherwise the name itself, uncalled."""
        if type(module) is not str or type(name) is not str:
            raise BadPickle("a name in it is not a string")
        pair, table = (module, name), self.table
        if pair in table.constants:
            self.stack.append(table.constants[pair])
            return
        if pair not in table.makers:
            if "." in name or module.partition(".")[0] in ACTING or (module in BUILTINS and name in ACTING_BUILTINS):
                raise BadPickle(f"it asks for {module}.{name}, which could run code")
            if table.strict:
                raise BadPickle(f"{module}.{name} does not belong in this file")
        self.stack.append(_Name(f"{module}.{name}", pair))

    def make(self, callee: Any, arguments: Any) -> None:
        """Push the object that the caller's table creates for a name and arguments."""
        if type(arguments) is not tuple:
            raise BadPickle("arguments in it are not a tuple")
        if not isinstance(callee, Unread):
            raise BadPickle("it calls an object that is not a name")
        maker = self.table.makers.get(callee.pair) if type(callee) is _Name else None
        made = self.new(Unread(callee.of) if maker is None else maker(*arguments))
        if maker is not None and type(made) not in SCALARS and id(made) not in self.sizes:
            self.put_into(made, arguments)
        self.stack.append(made)

    def build(self, target: Any, state: Any) -> None:
        """Apply a state to an object with the table's builder for its type."""
        if isinstance(target, Unread):
            return
        builder = self.table.builders.get(type(target))
        if builder is None:
            raise BadPickle(f"it gives a state to a {type(target).__name__}")
        self.put_into(target, (state,))
        builder(target, state)


@dataclass(frozen=True, eq=False)
class _Name(Unread):
    """A name that was not called."""

    pair: Pair


# The instructions, each a function of the machine. Codes as in the standard library's pickle.py.
STOP = ord(".")
_DOUBLE, _INT = struct.Struct(">d"), struct.Struct("<i")


def _mark(machine: Machine) -> None:
    if len(machine.marked) > DEEPEST:
        raise BadPickle(f"it has more than {DEEPEST} levels")
    machine.marked.append(machine.stack)
    machine.stack = []


def _pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.since_mark()


def _long(machine: Machine) -> None:
    count = machine.number(1)
    if count > INTEGER_BYTES:
        raise BadPickle("an integer in it is too long")
    machine.stack.append(int.from_bytes(machine.take(count), "little", signed=True))


def _made_of_number(length: int, make: Callable[[Machine, int], Any]) -> Callable[[Machine], None]:
    """A step that reads a number of ``length`` bytes and pushes what ``make`` returns for it."""
    return lambda machine: machine.stack.append(make(machine, machine.number(length)))


def _put(length: int) -> Callable[[Machine], None]:
    return lambda machine: machine.remember(machine.number(length))


def _constant(value: Any) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(value)


def _empty(kind: type) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(machine.new(kind()))


def _tuple(count: int) -> Callable[[Machine], None]:
    def step(machine: Machine) -> None:
        stack = machine.stack
        if len(stack) < count:
            raise IndexError
        items = stack[-count:]
        del stack[-count:]
        machine.push_tuple(items)

    return step


def _put_last(put: Callable[[Machine, Any, list[Any]], None], count: int = 0) -> Callable[[Machine], None]:
    """A step that puts the last ``count`` objects, by default those since the mark, into the object below them."""

    def step(machine: Machine) -> None:
        items = [machine.stack.pop() for _ in range(count)][::-1] if count else machine.since_mark()
        put(machine, machine.stack[-1], items)

    return step


def _frozen(machine: Machine) -> None:
    made = machine.filled(frozenset(map(machine.key, machine.since_mark())))
    machine.stack.append(made)


def _global(machine: Machine) -> None:
    module = machine.line()
    machine.name(module, machine.line())


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.name(module, name)


def _reduce(machine: Machine) -> None:
    arguments, callee = machine.stack.pop(), machine.stack.pop()
    machine.make(callee, arguments)


def _new_with_names(machine: Machine) -> None:
    named = machine.stack.pop()
    if named != {}:
        raise BadPickle("an object in it is made with named arguments")
    _reduce(machine)


def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    machine.build(machine.stack[-1], state)


def _stored(machine: Machine) -> None:
    if machine.stored is None:
        raise BadPickle("it refers to an object outside of the file")
    machine.stack.append(machine.stored(machine.stack.pop()))


_NAMED: dict[str, Callable[[Machine], None]] = {
    "\x80": lambda machine: machine.take(1),  # the protocol's version
    "\x95": lambda machine: machine.take(8),  # length of the next frame
    "(": _mark,
    "0": _pop,
    "1": lambda machine: machine.since_mark(),
    "N": _constant(None),
    "\x88": _constant(True),
    "\x89": _constant(False),
    "J": lambda machine: machine.stack.append(_INT.unpack(machine.take(4))[0]),
    "\x8a": _long,
    "G": lambda machine: machine.stack.append(_DOUBLE.unpack(machine.take(8))[0]),
    ")": _constant(()),
    "\x85": _tuple(1),
    "\x86": _tuple(2),
    "\x87": _tuple(3),
    "t": lambda machine: machine.push_tuple(machine.since_mark()),
    "]": _empty(list),
    "a": _put_last(Machine.put_items, 1),
    "e": _put_last(Machine.put_items),
    "}": _empty(dict),
    "s": _put_last(Machine.put_pairs, 2),
    "u": _put_last(Machine.put_pairs),
    "\x8f": _empty(set),
    "\x90": _put_last(Machine.put_items),
    "\x91": _frozen,
    "c": _global,
    "\x93": _stack_global,
    "R": _reduce,
    "\x81": _reduce,
    "\x92": _new_with_names,
    "b": _build,
    "Q": _stored,
    "q": _put(1),
    "r": _put(4),
    "\x94": lambda machine: machine.remember(len(machine.memo)),
}
for _lengths, _make in (  # bytes of the number, by code
    ({"K": 1, "M": 2}, lambda machine, number: number),
    ({"\x8c": 1, "X": 4, "\x8d": 8}, lambda machine, size: str(machine.take(size), "utf-8")),
    ({"C": 1, "B": 4, "\x8e": 8}, lambda machine, size: bytes(machine.take(size))),
    ({"\x96": 8}, lambda machine, size: bytearray(machine.take(size))),
    ({"h": 1, "j": 4}, lambda machine, number: machine.memo[number]),
):
    _NAMED |= {code: _made_of_number(length, _make) for code, length in _lengths.items()}
STEPS: list[Callable[[Machine], None] | None] = [_NAMED.get(chr(code)) for code in range(256)]
