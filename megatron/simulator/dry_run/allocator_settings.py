# SPDX-License-Identifier: Apache-2.0
"""What PYTORCH_ALLOC_CONF, or PYTORCH_CUDA_ALLOC_CONF as it was called, says to PyTorch's allocator.

Names and meanings are those of PyTorch's notes on CUDA memory management and of c10/core/AllocatorConfig.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.simulator.dry_run.pool import LARGE_SEGMENT, MIB
from megatron.training.refusal import Refusal

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first one counts, as in PyTorch
INTERVALS = 16  # of sizes, 1 MiB to 64 GiB by powers of two, that roundup_power2_divisions is told by
NOT_DEVICE_MEMORY = (  # they change host memory, locks or graphs
    "pinned_use_cuda_host_register", "pinned_num_register_threads", "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb", "pinned_free_catch_all", "release_lock_on_cudamalloc",
    "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        max_split_size: bytes; larger blocks are not cut; None: all may be.
        max_non_split_rounding: bytes that such a block may be larger than what it is taken for.
        divisions: parts between two powers of two that sizes are rounded up to, by interval; 0 and 1: none.
        fraction: of the device's memory that the process may have.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_SEGMENT
    divisions: tuple[int, ...] = ()
    fraction: float = 1.0


def from_environment(environment: Mapping[str, str]) -> tuple[str, Settings, list[str]] | None:
    """Name of the variable that is set, what it says, and a line for each thing of it that is not modelled.

    Raises:
        Refusal: PyTorch would refuse it too.
    """
    name = next((name for name in VARIABLES if environment.get(name)), None)
    if name is None:
        return None
    found, notes = {}, []
    for key, value in _pairs(name, environment[name]):
        if key == "expandable_segments":
            found[key] = _truth(name, key, value)
        elif key in ("max_split_size_mb", "max_non_split_rounding_mb"):
            found[key.removesuffix("_mb")] = _mebibytes(name, key, value)
        elif key == "roundup_power2_divisions":
            found["divisions"] = _divisions(name, value)
        elif key == "per_process_memory_fraction":
            found["fraction"] = _share(name, key, value)
        elif key == "garbage_collection_threshold":
            _share(name, key, value)
            notes.append(
                f"{name}: {key} is not modelled: PyTorch obeys it only where a program limits its share of the memory"
            )
        elif key == "backend" and value in ("native", "cudaMallocAsync"):
            if value != "native":
                notes.append(f"{name}: backend {value} is not modelled: what is told is PyTorch's own allocator")
        elif key not in NOT_DEVICE_MEMORY:
            raise Refusal(f"{name}: {key}:{value} is no option of PyTorch's allocator")
    return name, Settings(**found), notes


def _pairs(name: str, text: str) -> list[tuple[str, str]]:
    parts = re.split(r",(?![^\[]*\])", text.replace(" ", ""))
    pairs = [part.split(":", 1) for part in parts if part]
    if any(len(pair) != 2 for pair in pairs):
        raise Refusal(f"{name}={text}: give option:value, with commas between them")
    return [(key, value) for key, value in pairs]


def _truth(name: str, key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise Refusal(f"{name}: {key} is True or False, not {value}")
    return value == "True"


def _mebibytes(name: str, key: str, value: str) -> int:
    if not value.isdigit() or int(value) < LARGE_SEGMENT // MIB:
        raise Refusal(f"{name}: {key} is a number of MiB, {LARGE_SEGMENT // MIB} or more, not {value}")
    return int(value) * MIB


def _share(name: str, key: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise Refusal(f"{name}: {key} is a share above 0 and at most 1, not {value}")
    return share


def _divisions(name: str, text: str) -> tuple[int, ...]:
    """``4`` for all sizes, or ``[256:1,512:2,>:8]``: from 256 MiB on 1, from 512 on 2, above 8; below 256 as there."""

    def power(value: str, least: int) -> int:
        if not value.isdigit() or int(value) & (int(value) - 1) or int(value) < least:
            raise Refusal(f"{name}: roundup_power2_divisions:{text}: {value} is no power of two")
        return int(value)

    if not text.startswith("["):
        return (power(text, 1),) * INTERVALS
    found, last = [0] * INTERVALS, None
    for part in text.strip("[]").split(","):
        size, _, value = part.partition(":")
        parts = power(value, 0)
        if size == ">":
            begin = 0 if last is None else last + 1
            found[begin:] = [parts] * (INTERVALS - begin)
            continue
        at = min(power(size, 1).bit_length() - 1, INTERVALS - 1)
        if last is None:
            found[:at] = [parts] * at
        found[at] = parts
        last = at
    return tuple(found)
