# SPDX-License-Identifier: Apache-2.0
"""The papers' clusters and models, how they count FLOPs, and the clock that makes the tables of throughput."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.cost.estimate import estimate
from megatron.simulator.cost.operations import BF16
from megatron.simulator.cost.seconds import copy_seconds
from megatron.simulator.cost.trace import HostCopy
from megatron.simulator.machines.machine import Machine
from megatron.simulator.machines.machine_file import load
from megatron.training.families.named import shape, vocabulary
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.models import model_shape

CLUSTERS = Path(__file__).parent / "clusters"


def cluster(name: str) -> Machine:
    """A paper's machines: a shipped machine with constants fitted by fit.py. All heads run on the machine's usual
    attention kernel, also GenSLM's heads of 90, for which our program would use Triton."""
    machine = load(CLUSTERS / f"{name}.json")
    return replace(machine, kernels=dict.fromkeys(machine.kernels, machine.kernels.get(machine.plain_kernel(), 1.0)))


class Clock(Protocol):
    """The source of step times: :class:`Simulated`, or measured runs (``measured.py``)."""

    @property
    def mark(self) -> Literal["measured", "simulated"]:
        """The mark of its rows."""

    @property
    def peak(self) -> float:
        """Peak FLOP/s of a GPU in bf16, for MFU."""

    def seconds(
        self, model: str, workload: Workload, strategy: Strategy, *, inputs_in_host: bool = False
    ) -> float | str:
        """Seconds of a step, or a word such as "OOM" that says why there are none.

        Args:
            model: the name in training/settings/models.py; ``workload.shape`` may have other layers, heads or width.
            inputs_in_host: layer inputs are in host memory, which is not part of the strategy.
        """

    def slowed(self, what: str, **shares: float) -> Clock:
        """A clock with other kernels, which ``what`` describes; ``shares`` are their rates over our kernels' rates."""


@dataclass(frozen=True)
class Simulated:
    """Step times by the cost model on a machine. Memory is not modelled, so no run is out of memory."""

    machine: Machine
    mark: Literal["simulated"] = "simulated"

    @property
    def peak(self) -> float:
        return self.machine.peak["bf16"]

    def seconds(
        self, model: str, workload: Workload, strategy: Strategy, *, inputs_in_host: bool = False
    ) -> float | str:
        """Seconds of the papers' programs: several operations where ``Strategy.fused`` uses one; FPDT's copies
        of layer inputs (``inputs_in_host``) do not overlap with compute (ours do)."""
        took = estimate(workload, replace(strategy, fused=False), self.machine).seconds
        if inputs_in_host:
            copied = float(BF16 * strategy.local_tokens(workload) * workload.shape.hidden)
            waiting = sum(copy_seconds(HostCopy(way, copied), self.machine) for way in ("to_host", "to_device"))
            took += workload.shape.layers * waiting
        return took

    def slowed(self, what: str, **shares: float) -> Simulated:
        ours = asdict(self.machine.calibration)
        rates = {name: share * ours[name] for name, share in shares.items()}
        return Simulated(replace(self.machine, calibration=replace(self.machine.calibration, **rates)))


def clock(name: str, measure: bool) -> Clock:
    """The simulated cluster ``name``, or with ``measure`` this machine's GPUs. If there are no GPUs, the program ends
    with one line and exit code 2."""
    if not measure:
        return Simulated(cluster(name))
    from examples.reproduce.measured import gpus_here

    try:
        return gpus_here()
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(2)


def from_seconds(seconds: float | str, count: Callable[[float], float], digits: int | None = None) -> float | str:
    """``count(seconds)``, rounded to ``digits``; a word in place of seconds is
    returned unchanged."""
    if isinstance(seconds, str):
        return seconds
    return count(seconds) if digits is None else round(count(seconds), digits)


def shape_of(model: str, **sizes: int) -> Shape:
    """A named model with the vocabulary it was published with; ``sizes`` replace its own."""
    return model_shape(ModelConfig(**(shape(model) | sizes)), vocabulary(model))


def usp_tflops(workload: Workload, seconds: float, gpus: int) -> float:
    """TFLOPS per GPU as counted by Megatron-LM of April 2024, and thus in USP's tables 5 to 7.

    They count the full mask, no recompute, and an MLP of two matrices (Llama's has three). Only with this count do the
    152.51 TFLOPS at 120K in the paper's last version follow from the 266 in its first.
    """
    s, h = workload.shape, workload.shape.hidden
    per_token = 1 + s.kv_heads / s.heads + workload.seq_length / h + s.ffn / h + s.vocab / (2 * s.layers * h)
    return 12 * workload.global_batch * workload.seq_length * s.layers * h**2 * per_token / seconds / gpus / 1e12


def deepspeed_tflops(workload: Workload, seconds: float, gpus: int) -> float:
    """TFLOPS per GPU as Megatron-DeepSpeed counts: 96 B S L h^2 (1 + S/6h + V/16Lh), full mask and recompute."""
    s, h = workload.shape, workload.shape.hidden
    per_token = 1 + workload.seq_length / (6 * h) + s.vocab / (16 * s.layers * h)
    return 96 * workload.global_batch * workload.seq_length * s.layers * h**2 * per_token / seconds / gpus / 1e12
