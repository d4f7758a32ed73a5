# SPDX-License-Identifier: Apache-2.0
"""A planning problem, and plans for it: strategies with memory and time."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.formulas.device_memory import Memory, device_memory
from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.estimate import Estimate, estimate
from megatron.simulator.machines.machine import Machine
from megatron.simulator.planner.search_space import Limits

HOST_SHARE = 0.9  # share of a node's memory that offloading may use; the processes need the rest

Grid = tuple[int, int, int, int, int]
"""TP, Ulysses, Ring, DP, PP."""


@dataclass(frozen=True)
class Problem:
    """What is planned: a workload on ``gpus`` GPUs of a machine, within the user's limits."""

    workload: Workload
    gpus: int
    machine: Machine
    limits: Limits = Limits()
    spare: float = 0.0  # bytes of a device that a plan must leave free
    node: int = 0  # GPUs of a node, if only `machine.gpus` of them are used; 0: all are used

    @property
    def gpus_per_node(self) -> int:
        return min(self.gpus, self.machine.gpus)

    @property
    def node_words(self) -> str:
        """How many GPUs of a node are used, if not all; otherwise empty."""
        partly = self.gpus > self.machine.gpus and self.node > self.machine.gpus
        return f", {self.machine.gpus} of a node's {self.node} in use" if partly else ""

    @property
    def host_room(self) -> float:
        """Bytes of host memory for one GPU."""
        return HOST_SHARE * self.machine.host_memory / self.gpus_per_node


@dataclass(frozen=True)
class Fit:
    """A strategy, and whether it fits."""

    strategy: Strategy
    memory: Memory  # of the pipeline stage that needs most
    room: float  # usable bytes of a device
    host_room: float  # usable host memory per GPU
    spare: float = field(default=0.0, kw_only=True)  # bytes of `room` to leave free

    @property
    def margin(self) -> float:
        """Bytes that are left on the device; negative: bytes that are missing."""
        return self.room - self.memory.total

    @property
    def host_margin(self) -> float:
        """Bytes that are left of host memory; negative: bytes that are missing."""
        return self.host_room - self.memory.host

    @property
    def lack(self) -> float:
        """The larger share of device and host memory that is missing; negative: all of it fits."""
        return max(-self.margin / self.room, -self.host_margin / self.host_room)

    @property
    def fits(self) -> bool:
        return self.margin >= self.spare and self.host_margin >= 0

    @property
    def tight(self) -> bool:
        """Whether it fits, but leaves less than ``spare``."""
        return 0 <= self.margin < self.spare and self.host_margin >= 0

    @property
    def grid(self) -> Grid:
        s = self.strategy
        return s.tensor, s.ulysses, s.ring, s.data, s.pipeline


@dataclass(frozen=True)
class Plan(Fit):
    """A strategy, with memory and time."""

    estimate: Estimate

    @property
    def seconds(self) -> float:
        return self.estimate.seconds


def memory_fit(problem: Problem, strategy: Strategy) -> Fit:
    """Memory of a strategy, and whether it fits."""
    room = problem.machine.usable_memory
    return Fit(strategy, fullest(problem.workload, strategy), room, problem.host_room, spare=problem.spare)


def priced(problem: Problem, strategy: Strategy) -> Plan:
    """Memory and time of a strategy."""
    fit, time = memory_fit(problem, strategy), estimate(problem.workload, strategy, problem.machine)
    return Plan(strategy, fit.memory, fit.room, fit.host_room, time, spare=fit.spare)


def fullest(workload: Workload, strategy: Strategy, itemsize: int = 2) -> Memory:
    """Memory of the pipeline stage that needs most.

    If layers are alike, this is the first stage (most micro-batches in flight), the second (it also keeps a gradient to
    send) or the last (the loss).
    """
    stages = {0, min(1, strategy.pipeline - 1), strategy.pipeline - 1}
    if workload.shape.mixed:
        stages = set(range(strategy.pipeline))
    every = (device_memory(workload, strategy, itemsize=itemsize, stage=stage) for stage in stages)
    return max(every, key=lambda memory: memory.total)


def states_exceed_device(fit: Fit) -> bool:
    """Whether model states exceed a device, so that no activation saving helps.

    False for recompute in units of several layers, because ZeRO 3 gathers all weights of a unit.
    """
    if fit.strategy.recompute_method == "uniform" and fit.strategy.recompute_layers > 1:
        return False
    return fit.memory.total - fit.memory.activations - fit.memory.temporary > fit.room


def better(plan: Plan, other: Plan) -> bool:
    """Whether ``plan`` is faster; if the times differ by less than a thousandth, whether it needs less memory."""
    if abs(plan.seconds - other.seconds) > 1e-3 * other.seconds:
        return plan.seconds < other.seconds
    return plan.memory.total < other.memory.total
