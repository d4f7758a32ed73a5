# SPDX-License-Identifier: Apache-2.0
"""--profile-memory: a timeline of the memory of one training step by its use, and the picture of it."""

from __future__ import annotations

import json
import os
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from megatron.system.whole_file import replace_file
from megatron.training.refusal import Refusal, reason, refusing
from megatron.training.report.memory_picture import KINDS, Profile, draw, peak_of, readable
from megatron.training.report.tensor_memory import Block, TensorMeter
from megatron.training.settings.config import Config


class MemoryProfile:
    """Records one step: make it before the step, call `mark` at each phase and `finish` after the step.

    The meter must be active and recording all the time.

    A storage keeps one kind, which is known after the step: that of its owner; otherwise "activations" if it
    was made in a forward pass and lived until a backward pass began; otherwise "temporary".
    """

    def __init__(self, meter: TensorMeter, chunks: Sequence[nn.Module], optimizer: MegatronOptimizer) -> None:
        self.meter, self.chunks, self.optimizer = meter, chunks, optimizer
        self.kinds: dict[int, str] = {}  # by number of the block
        self.phases: list[tuple[float, int, str]] = []  # time, events before it, name
        self._find_owners()
        self.started, self.first_event = time.perf_counter(), len(meter.history.events)

    def mark(self, phase: str) -> None:
        """A phase begins: forward, backward or optimizer."""
        if not self.phases or self.phases[-1][2] != phase or phase == "forward":
            self.phases.append((time.perf_counter(), len(self.meter.history.events), phase))

    def _find_owners(self) -> None:
        for kind, tensor in owned(self.chunks, self.optimizer):
            block = self.meter.see(tensor)
            if block is not None:
                self.kinds.setdefault(block.number, kind)

    def finish(self) -> Profile:
        """The profile of the step that has ended, as it is written to the JSON file."""
        ended = time.perf_counter()
        self._find_owners()  # again, because this step may have made gradients and states
        history, self.meter.history = self.meter.history, None
        born: dict[int, int] = {}
        changed: dict[int, int] = {}
        for index, (_, number, _) in enumerate(history.events):
            born.setdefault(number, index)
            changed[number] = index
        kinds = {number: self._kind(history.blocks[number], born[number], changed[number]) for number in born}
        sizes = {kind: 0 for kind in KINDS}
        events = []
        for index, (seconds, number, change) in enumerate(history.events):
            if history.blocks[number].place == "elsewhere":
                continue
            kind = kinds[number]
            if index < self.first_event:
                sizes[kind] += change
            else:
                events.append((round(seconds - self.started, 6), KINDS.index(kind), change))
        return {
            "kinds": list(KINDS),
            "seconds": round(ended - self.started, 6),
            "phases": [(name, round(seconds - self.started, 6)) for seconds, _, name in self.phases],
            "start": sizes,
            "events": events,
        }

    def _kind(self, block: Block, born: int, changed: int) -> str:
        """The kind of a block, from the indices of its first and last event."""
        if block.place == "host":
            return "host"
        if block.number in self.kinds:
            return self.kinds[block.number]
        before = bisect_right(self.phases, born, key=lambda phase: phase[1])
        if before == 0 or self.phases[before - 1][2] != "forward":
            return "temporary"
        following = next((index for _, index, name in self.phases[before:] if name == "backward"), None)
        survives = following is not None and (block.size > 0 or changed >= following)
        return "activations" if survives else "temporary"


def owned(chunks: Sequence[nn.Module], optimizer: MegatronOptimizer) -> Iterator[tuple[str, Tensor]]:
    """(kind, tensor) of everything that lives from step to step. If tensors share a storage, its first kind counts."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    buffers = [
        buffer
        for chunk in chunks
        for name in (
            "buffers",
            "expert_parallel_buffers",
        )  # lists in core's DDP; in other modules "buffers" is a method
        if isinstance(getattr(chunk, name, None), list)
        for buffer in getattr(chunk, name)
    ]
    parts = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    main = [
        parameter for part in parts if part is not None for group in part.param_groups for parameter in group["params"]
    ]
    states = [state for part in parts if part is not None for state in part.state.values()]
    owners: list[tuple[str, Any]] = [("parameters", parameter) for parameter in parameters]
    owners += [("parameters", buffer.param_data) for buffer in buffers]
    owners += [("gradients", buffer.grad_data) for buffer in buffers]
    for parameter in (*parameters, *main):
        grad = parameter.grad if parameter.is_leaf else None  # torch warns for other tensors
        owners += [("gradients", grad), ("gradients", getattr(parameter, "main_grad", None))]
    owners += [("optimizer", parameter) for parameter in main]
    owners += [("optimizer", value) for state in states for value in state.values()]
    return ((kind, tensor) for kind, tensor in owners if isinstance(tensor, torch.Tensor))


def check_profile(config: Config, steps: int) -> None:
    """Check --profile-memory before the first step.

    Args:
        steps: the number of steps of this run.

    Raises:
        Refusal: the folder cannot be written, or the run ends before the step to record.
    """
    folder, wanted = config.logging.profile_memory, config.logging.profile_memory_step
    if folder is None:
        return
    if wanted > steps and config.checkpoint.load is None:
        raise Refusal(
            f"--profile-memory records step {wanted} of the run, which has {steps}: use --profile-memory-step {steps}, "
            "or train longer"
        )
    if wanted > steps:  # a run that is restarted with the same flags until it is finished
        config.notes.append(
            f"--profile-memory records nothing: step {wanted} after this start is to be recorded, but "
            f"the run ends after {steps}"
        )
    with refusing(f"--profile-memory {folder} cannot be written", OSError):
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def write_profile(folder: str, iteration: int, profile: Profile, device: str) -> str:
    """Write this rank's JSON file and picture; returns a line for the console. A full disk does not end the run."""
    rank = dist.get_rank()
    profile = {"rank": rank, "iteration": iteration, "device": device, **profile}
    path = os.path.join(folder, f"memory_rank{rank}.json")
    most, kinds = peak_of(profile)
    parts = ", ".join(f"{kind} {readable(size)}" for kind, size in kinds.items())
    try:
        replace_file(path, json.dumps(profile, separators=(",", ":")))
        draw([profile], [f"Memory of step {iteration} on rank {rank}"], path.removesuffix("json") + "png")
    except Exception as error:  # any error in drawing: a run must not end because of a picture
        return f" WARNING: --profile-memory {folder}: {reason(error)}; going on without it"
    return f" > memory of step {iteration}: at most {readable(most)} on the device ({parts}), see {path}"
