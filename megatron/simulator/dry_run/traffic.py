# SPDX-License-Identifier: Apache-2.0
"""Bytes that the kernels of one layer read and write, forward and backward, by purpose.

They are the difference between dry runs with three and with two layers. The purpose of an operation follows from the
innermost file of ``FILES`` in its call stack or, if there is none, from the operation's name.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from copy import deepcopy
from typing import Any

from megatron.simulator.cost.trace import Kernel, Phase
from megatron.simulator.dry_run.one_rank import run_rank
from megatron.simulator.dry_run.recording.recorder import Recorder
from megatron.simulator.machines.machine import Machine
from megatron.training.settings.config import Config

LAYERS = (2, 3)
PACKAGE = "megatron/context_parallel/"
# Purpose by the beginning of the file's path in the package; the first match counts.
FILES = {
    "positions/rope": "RoPE",
    "attention/ulysses": "all-to-all: packing, unpacking",
    "attention/kernels/sums": "attention: merges, sums, casts",
    "attention/attend": "attention: merges, sums, casts",
    "attention/ring": "ring: buffers",
    "attention/": "attention: copies around its kernels",
    "fpdt/": "FPDT: copies, sums",
}
FUNCTIONS = {"packed": "ring: buffers"}  # of attention/kernels/sums.py
# For other operations: the names that the recorder gives them, by purpose.
NAMES = {
    "norm": "rms_norm rms_norm_backward native_layer_norm native_layer_norm_backward",
    "activation": "swiglu swiglu_back bias_swiglu bias_swiglu_back",
    "residual": "bias_dropout_add_fused_train bias_dropout_add_fused_inference add",  # add: gradients of both branches
    "QKV: split, joined": "cat clone",
    "weight gradients: fp32 sums": "add_",
}
REST = "other"

Traffic = dict[str, dict[str, float]]
"""Bytes by group, in each of "forward" and "backward"."""


class TrafficRecorder(Recorder):
    """A recorder that also adds up the bytes of kernels by purpose.

    Attributes:
        bytes: by (phase, purpose).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bytes: Counter[tuple[str, str]] = Counter()
        self._read = 0
        self._phase = ""

    def note(self, *args: Any) -> None:
        super().note(*args)
        self._count_new()

    def fused(self, *args: Any) -> Any:
        out = super().fused(*args)
        self._count_new()
        return out

    def _count_new(self) -> None:
        """Add the events that the current operation has appended to the trace."""
        for event in self.trace.events[self._read :]:
            if isinstance(event, Phase):
                self._phase = event.name
            elif isinstance(event, Kernel):
                self.bytes[self._phase, group_of(event)] += event.bytes * event.count
        self._read = len(self.trace.events)


def group_of(kernel: Kernel) -> str:
    """The purpose of the kernel that is just being recorded."""
    if kernel.kind != "memory":
        return "GEMM" if kernel.kind == "gemm" else "attention: its kernels"
    frame = sys._getframe(1)
    while frame is not None:
        _, package, file = frame.f_code.co_filename.rpartition(PACKAGE)
        if package:
            if group := FUNCTIONS.get(frame.f_code.co_name):
                return group
            for begins, group in FILES.items():
                if file.startswith(begins):
                    return group
        frame = frame.f_back
    return next((purpose for purpose, names in NAMES.items() if kernel.name in names.split()), REST)


def layer_traffic(
    config: Config, world_size: int, rank: int, vocab_size: int, machine: Machine, *, fused_rope: bool = True
) -> Traffic:
    """Bytes of one layer on a rank of a simulated cluster of ``machine``'s GPUs.

    Args:
        config: completed for ``world_size``, one pipeline stage.
        fused_rope: Triton's kernel computes RoPE; False: PyTorch's operations do, as if Triton were not installed.

    Raises:
        Refusal: the run itself would be refused.
    """
    few, more = (_bytes_of(config, layers, world_size, rank, vocab_size, machine, fused_rope) for layers in LAYERS)
    traffic: Traffic = defaultdict(dict)
    for (phase, group), size in sorted(more.items(), key=lambda item: -item[1]):
        if phase in ("forward", "backward") and (of_one := size - few[phase, group]):
            traffic[group][phase] = of_one / (LAYERS[1] - LAYERS[0])
    return dict(traffic)


def _bytes_of(
    config: Config, layers: int, world_size: int, rank: int, vocab_size: int, machine: Machine, fused_rope: bool
) -> Counter[tuple[str, str]]:
    config = deepcopy(config)
    config.model.num_layers = layers
    recorders: list[TrafficRecorder] = []

    def recorder(*args: Any, **kwargs: Any) -> TrafficRecorder:
        recorders.append(TrafficRecorder(*args, **kwargs))
        return recorders[0]

    options = {"machine": machine, "fused_rope": fused_rope}
    run_rank(config, world_size, rank, vocab_size, recorder=recorder, every_chunk=True, **options)
    return recorders[0].bytes
