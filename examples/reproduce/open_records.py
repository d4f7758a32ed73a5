# SPDX-License-Identifier: Apache-2.0
"""Reads training runs that others have published, on many machines and by many programs, and splits them in two halves.

The split was fixed before anything was fitted: each source belongs to one half with all its rows, by the parity of the
SHA-256 of its name in ``published/records.json``. Constants are fitted to the even half; the odd half is the test.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "published" / "records.json"
AFTER_FREEZE = FILE.parent / "after_freeze.json"  # runs that came later: record_checks.py


@dataclass(frozen=True)
class Record:
    """One published figure, and everything known about the run.

    Attributes:
        where: the place in the source.
        machine: a shipped machine's name.
        precision: of the linear layers: ``bf16``, ``fp8`` (one scale per tensor) or ``mxfp8``.
        zero: 0 and 1: weights not split; 3: FSDP. shard: ranks that FSDP splits over (HSDP); 0: all.
        recompute: ``none``, ``full``, ``op`` (every second product, operations between), ``alternate`` (every second
            layer), or a share of the layers.
        kernel: of attention: ``flash1``, ``flash`` (FlashAttention-2), ``flash_attn`` (3 on Hopper), ``cudnn``.
        runs: ``eager``, ``compiled`` (torch.compile), ``fused`` (Transformer Engine's and apex' kernels) or ``ours``.
        overlap: TP's transfers overlap its products, and messages of a pipeline with virtual stages overlap its work.
        balance: how a ring splits the sequence.
        offload: layer inputs are kept in host memory.
        fpdt_chunk: FPDT's chunk in tokens, in host memory; 0: no FPDT.
        gradients: how its program sums them over ranks: ``fp32`` or ``bf16``.
        weights: how new ones reach all ranks: by one ``gather``, or by a ``broadcast`` of each rank's shard.
        optimizer: where its step runs: ``gpu``, ``cpu`` (at host memory's speed) or ``deepspeed`` (also the CPU).
        network, link: bytes per second and GPU, between nodes and within a node; 0: the machine's.
        node: GPUs of a node; 0: the machine's.
        unpriced: why no model of the run as described can be right, by the source's own statements; such runs are
            shown, and counted separately.
        value, unit: the figure: tokens/s/GPU, s/step, causal or full-mask TFLOPS/GPU.
    """

    source: str
    where: str
    machine: str
    gpus: int
    model: str
    seq_length: int
    global_batch: int
    micro_batch: int
    precision: str
    tp: int
    ulysses: int
    ring: int
    pp: int
    vp: int
    dp: int
    zero: int
    recompute: str | float
    kernel: str
    runs: str
    value: float
    unit: str
    shard: int = 0
    overlap: bool = False
    balance: str = "zigzag"
    offload: bool = False
    fpdt_chunk: int = 0
    gradients: str = "fp32"
    weights: str = "gather"
    optimizer: str = "gpu"
    network: float = 0.0
    node: int = 0
    link: float = 0.0
    unpriced: str = ""

    @property
    def fitted(self) -> bool:
        """Whether its source is in the half that constants are fitted to."""
        return in_fitted_half(self.source)


def in_fitted_half(source: str) -> bool:
    """The rule: the SHA-256 of the source's name is even."""
    return int(sha256(source.encode()).hexdigest(), 16) % 2 == 0


@lru_cache
def published_file() -> dict[str, Any]:
    """``models``, ``sources``, ``records`` and what was ``left_out``, as the file has them."""
    return json.loads(FILE.read_text(encoding="utf-8"))


@lru_cache
def models() -> dict[str, dict[str, Any]]:
    """Sizes of the models by name, for the records and for the runs that came later."""
    return published_file()["models"] | json.loads(AFTER_FREEZE.read_text(encoding="utf-8"))["models"]


def records() -> list[Record]:
    """All records, in the file's order.

    Raises:
        TypeError: a record lacks a field or has one that is unknown.
    """
    return [Record(**raw) for raw in published_file()["records"]]


def left_out() -> list[tuple[str, Record | None]]:
    """Runs that are not among the records, with the reason, and the run if enough is known to simulate it."""
    result = published_file()["left_out"]
    return [(f"{one['what']}: {one['why']}", Record(**one["run"]) if "run" in one else None) for one in result]


def distinct(rows: list[Record]) -> int:
    """Number of configurations: rows that differ only in value and place count once."""
    names = [field.name for field in fields(Record) if field.name not in ("value", "where", "source")]
    return len({tuple(getattr(row, name) for name in names) for row in rows})
