# SPDX-License-Identifier: Apache-2.0
"""Block sizes of the Triton kernels, by head size and GPU; there is no autotuning at run time.

`tools/measure_hardware.py --attention` measures sizes and writes them into a machine file; `measured_of` reads them.

An H200 has measured those for heads of 128, compute capability 9.0. The others were chosen from the machine code
(`benchmarks/triton_resources.py`), by its count calibrated with that measurement: among a few usual sizes, the ones
that neither repeat products nor spill registers in a loop, and of these the ones with the largest expected rate. Spills
outside of loops are harmless.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

Pass = Literal["forward", "queries", "keys", "backward", "plain"]
"""Kernels: the output; dq; dk and dv; all three gradients in one pass, instead of the two before; the output by plain
ranges with specialised warps, besides "forward" for the others."""


@dataclass(frozen=True)
class Blocks:
    """Sizes of one kernel.

    Attributes:
        block: rows of one program: queries, or keys for dk and dv.
        step: rows of the other side in one step.
        warps: of a program, 32 threads each.
        stages: number of steps whose loads are in flight.
        registers: limit for each thread. It is set where ptxas would otherwise aim at more programs for each
            multiprocessor and spill registers; None elsewhere.
        split: (keys) whether dk and dv are computed by separate programs, so that each has room for its sum.
        one_loop: whether pairs are compared in all ranges. A program then has one loop with slower steps, where it
            would otherwise wait for the first loads of two or three.
        described: (gradients) whether blocks are loaded by descriptors (TMA, on Hopper and newer), which need
            fewer registers, so that no loop of three stages spills. Nothing has measured it.
    """

    block: int
    step: int
    warps: int = 4
    stages: int = 2
    registers: int | None = None
    split: bool = False
    one_loop: bool = False
    described: bool = False


BlockTable = Mapping[Pass, Mapping[int, Blocks]]
"""Measured sizes by pass and head size (a power of two), for elements of two bytes in calls without FEATURES."""

SPECIAL_HEAD = 128  # largest for "backward" and "plain", which would repeat products or exceed memory
INTERPRETED = Blocks(32, 16)  # small, so that short sequences have several blocks

# (compute capability * 10, largest head size) -> block sizes, for elements of two bytes.
TABLE: dict[Pass, dict[tuple[int, int], Blocks]] = {
    "forward": {
        (80, 64): Blocks(128, 64, 8, 3),
        (80, 128): Blocks(128, 64, 8, 3),
        (80, 256): Blocks(64, 32, 4, 2),
        (90, 64): Blocks(128, 64, 8, 3),
        (90, 128): Blocks(128, 64, 8, 3),  # measured
        (90, 256): Blocks(128, 64, 8, 2),
        (100, 64): Blocks(128, 64, 8, 3),
        (100, 128): Blocks(128, 64, 8, 3),
        (100, 256): Blocks(128, 32, 8, 2),
    },
    "queries": {
        (80, 64): Blocks(128, 64, 8, 3),
        (80, 128): Blocks(128, 64, 8, 3),
        (80, 256): Blocks(64, 32, 4, 1),
        (90, 64): Blocks(128, 64, 8, 3),
        (90, 128): Blocks(128, 64, 8, 3),  # measured
        (90, 256): Blocks(128, 32, 8, 3),
        (100, 64): Blocks(128, 64, 8, 3),
        (100, 128): Blocks(128, 64, 8, 3),
        (100, 256): Blocks(128, 32, 8, 1),
    },
    "keys": {
        (80, 32): Blocks(128, 32, 8, 3),
        (80, 64): Blocks(128, 64, 8, 3),
        (80, 128): Blocks(64, 32, 4, 3),
        (80, 256): Blocks(64, 32, 4, 2, split=True),
        (90, 64): Blocks(128, 64, 8, 3),
        (90, 128): Blocks(64, 32, 4, 3),  # measured
        (90, 256): Blocks(128, 32, 8, 2, split=True),
        (100, 64): Blocks(128, 64, 8, 3),
        (100, 128): Blocks(128, 64, 8, 3),
        (100, 256): Blocks(128, 32, 8, 2, split=True),
    },
    "plain": {(90, 64): Blocks(128, 64, 4, 3), (90, 128): Blocks(128, 64, 4, 3)},
    "backward": {  # loops spill a few registers
        (80, 64): Blocks(64, 64, 4, 2),
        (80, 128): Blocks(64, 64, 8, 2),
        (90, 64): Blocks(128, 64, 8, 3),
        (90, 128): Blocks(128, 64, 8, 2),
        (100, 64): Blocks(128, 64, 8, 2),
        (100, 128): Blocks(128, 32, 8, 2),
    },
}

# A program of 8 warps is alone on a multiprocessor, and its begin and end take as long as 14 steps (H200). Below this
# number of keys for each query, about 40 steps, two or three smaller programs share a multiprocessor.
SHORT = 2560
FOR_SHORT: dict[Pass, dict[tuple[int, int], Blocks]] = {
    "forward": {(90, 64): Blocks(64, 64, 4, 3), (90, 128): Blocks(64, 64, 4, 3)},
    "queries": {(90, 64): Blocks(64, 64, 4, 3), (90, 128): Blocks(64, 64, 4, 2)},
    "keys": {(90, 64): Blocks(64, 32, 4, 3)},
}
# Below this number, filling the pipelines of two more loops is expected to take longer than comparing pairs.
ONE_LOOP = 512

# For elements of four bytes, on every GPU; tensor cores do not multiply these. 255 registers are the maximum.
FP32: dict[Pass, dict[int, Blocks]] = {
    "forward": {64: Blocks(16, 16, 8, 1, 128), 128: Blocks(16, 16, 8, 1, 255), 256: Blocks(16, 16, 8, 1, 255)},
    "queries": {64: Blocks(32, 32, 8, 1), 128: Blocks(16, 16, 8, 1, 128), 256: Blocks(16, 16, 8, 1, 128)},
    "keys": {64: Blocks(16, 16, 4, 1), 128: Blocks(16, 16, 8, 1), 256: Blocks(16, 16, 8, 1)},
}


FEATURES = ("mask", "alibi", "softcap", "dropout")

# Smaller blocks where one of these features would spill registers within the loop: (pass, GPU, largest head size).
EXCEPTIONS: dict[tuple[Pass, int, int], list[tuple[set[str], Blocks]]] = {
    ("forward", 80, 256): [({"alibi", "dropout"}, Blocks(32, 32, 4, 2))],
    ("queries", 80, 256): [({"mask", "alibi", "dropout"}, Blocks(32, 32, 4, 1))],
    ("queries", 80, 64): [({"dropout"}, Blocks(128, 32, 8, 2))],
    ("queries", 80, 128): [({"dropout"}, Blocks(64, 64, 8, 2))],
    ("keys", 80, 64): [({"dropout"}, Blocks(128, 32, 8, 2))],
    ("keys", 80, 128): [({"dropout"}, Blocks(64, 64, 8, 2))],
    ("keys", 80, 256): [({"dropout"}, Blocks(32, 32, 4, 1, split=True))],
    ("queries", 90, 128): [({"dropout"}, Blocks(128, 32, 8, 2))],
    ("forward", 90, 256): [({"dropout"}, Blocks(128, 32, 8, 2))],
    ("queries", 90, 256): [({"dropout"}, Blocks(128, 16, 8, 2))],
    ("keys", 90, 256): [({"dropout"}, Blocks(128, 16, 8, 2, split=True))],
    ("keys", 90, 64): [({"mask", "dropout"}, Blocks(128, 32, 8, 2))],
    ("keys", 90, 128): [
        ({"mask"}, Blocks(128, 16, 8, 2)),
        ({"dropout"}, Blocks(64, 16, 4, 3)),
        ({"alibi", "softcap"}, Blocks(128, 32, 8, 2)),
    ],
    ("forward", 100, 256): [({"dropout"}, Blocks(128, 16, 8, 2))],
    ("queries", 100, 256): [({"dropout"}, Blocks(128, 16, 8, 1))],
    ("queries", 100, 64): [({"dropout"}, Blocks(128, 32, 8, 2))],
    ("queries", 100, 128): [({"dropout"}, Blocks(128, 32, 8, 2))],
    ("keys", 100, 64): [({"dropout"}, Blocks(128, 32, 8, 2))],
    ("keys", 100, 128): [({"dropout"}, Blocks(128, 32, 8, 2))],
}


def blocks(
    which: Pass,
    itemsize: int,
    head: int,
    capability: int | None,
    features: Collection[str] = (),
    measured: BlockTable | None = None,
    keys: float = float("inf"),
) -> Blocks:
    """Sizes of a kernel.

    Args:
        itemsize: bytes of an element of q, k and v.
        head: the larger head size of q and v.
        capability: 80, 90, ..; None: the interpreter.
        features: those of `FEATURES` that the call has.
        measured: used for the calls that it is for, instead of the tables here.
        keys: number of keys of a query, on average.
    """
    family, table = _family(capability), TABLE
    if keys < SHORT and any(of == family and size >= head for of, size in FOR_SHORT.get(which, ())):
        table = FOR_SHORT
    if measured and itemsize == 2 and not features and table is TABLE:
        known = measured.get(which, {}).get(1 << (head - 1).bit_length())
        if known is not None:
            return known
    if capability is None:
        return INTERPRETED
    if itemsize == 4:
        known = FP32[which]
        return known[min(size for size in known if size >= head)]
    size = min(size for of, size in table[which] if of == family and size >= head)
    exceptions = EXCEPTIONS.get((which, family, size), ())
    sizes = next((sizes for some, sizes in exceptions if some & set(features)), table[which][family, size])
    return replace(sizes, one_loop=keys < ONE_LOOP and "dropout" not in features)


def _family(capability: int | None) -> int | None:
    """The GPUs of a table's entries; desktop GPUs have the tensor cores of an A100, and at most its shared memory."""
    return capability and (100 if 100 <= capability < 120 else 90 if capability == 90 else 80)


def passes(
    itemsize: int, head: int, measured: BlockTable | None = None, *, deterministic: bool = False
) -> tuple[Pass, ...]:
    """The kernels of a call; "backward" and "plain" where they were measured to be faster.

    ``deterministic``: results must repeat bit for bit, which one pass does not; other arguments as for `blocks`.
    """
    found = [which for which, by_head in (measured or {}).items() if 1 << (head - 1).bit_length() in by_head]
    special = itemsize == 2 and head <= SPECIAL_HEAD
    one = special and "backward" in found and not deterministic
    plain = ("plain",) if special and "plain" in found else ()
    return (*plain, "forward", *(("backward",) if one else ("queries", "keys")))


POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ALLOWED = {
    "block": POWERS[4:],
    "step": POWERS[4:],
    "warps": POWERS[:5],
    "stages": tuple(range(1, 9)),
    "registers": (None, *range(16, 256)),
    "split": (False, True),
    "one_loop": (False, True),
    "described": (False, True),
}


def measured_of(raw: Any) -> dict[Pass, dict[int, Blocks]]:
    """Measured sizes from a machine file's ``attention_blocks``: {pass: {"128": {"block": 128, "step": 64, ..}, ..}}.

    Raises:
        ValueError: a name or value is wrong; the message is one line and begins with its place.
    """
    table: dict[Pass, dict[int, Blocks]] = {}
    for which, by_head in _members(raw, "attention_blocks", get_args(Pass)).items():
        table[which] = {}
        for head, sizes in _members(by_head, f"attention_blocks.{which}", [str(n) for n in POWERS[4:]]).items():
            where = f"attention_blocks.{which}.{head}"
            for name, value in _members(sizes, where, [part.name for part in fields(Blocks)]).items():
                if not any(type(value) is type(allowed) and value == allowed for allowed in ALLOWED[name]):
                    choices = [str(allowed).lower().replace("none", "null") for allowed in ALLOWED[name]]
                    shown = ", ".join(choices if len(choices) < 10 else [*choices[:2], "..", choices[-1]])
                    raise ValueError(f"{where}.{name}: must be one of {shown}")
            for name in ("block", "step"):
                if name not in sizes:
                    raise ValueError(f"{where}.{name}: missing")
            table[which][int(head)] = Blocks(**sizes)
    return table


def _members(value: Any, where: str, names: Collection[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be an object with {', '.join(names)}")
    for name in value:
        if name not in names:
            raise ValueError(f"{where}: may only have {', '.join(names)}")
    return value
