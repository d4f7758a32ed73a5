# SPDX-License-Identifier: Apache-2.0
"""A problem, and a plan for it: a strategy with its memory, whether that fits, and its time."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.formulas.device_memory import Memory, device_memory
from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.estimate import Estimate, estimate
from megatron.simulator.machines.machine import Machine
from megatron.simulator.planner.search_space import Limits

HOST_SHARE = 0.9  # of a node's memory that offloading may fill; the rest is for the processes themselves

Grid = tuple[int, int, int, int, int]
"""TP, Ulysses, Ring, DP, PP."""


@dataclass(frozen=True)
class Problem:
    """What is planned: a workload on ``gpus`` of a machine's GPUs, within what the user has settled.

    Attributes:
        spare: bytes of a device that a plan must leave.
        node: GPUs that a node has, where ``machine.gpus`` of them are used; 0: all are.
    """

    workload: Workload
    gpus: int
    machine: Machine
    limits: Limits = Limits()
    spare: float = 0.0
    node: int = 0

    @property
    def gpus_per_node(self) -> int:
        return min(self.gpus, self.machine.gpus)

    @property
    def node_words(self) -> str:
        """How many GPUs of a node are used, where it is not all."""
        partly = self.gpus > self.machine.gpus and self.node > self.machine.gpus
        return f", {self.machine.gpus} of a node's {self.node} in use" if partly else ""

    @property
    def host_room(self) -> float:
        """Bytes of host memory for one GPU."""
        return HOST_SHARE * self.machine.host_memory / self.gpus_per_node


@dataclass(frozen=True)
class Fit:
    """A strategy, and whether it fits.

    Attributes:
        memory: of the fullest pipeline stage.
        room: bytes that a device has for it; host_room: that its host has, a GPU; spare: of the device's, to be left.
    """

    strategy: Strategy
    memory: Memory
    room: float
    host_room: float
    spare: float = field(default=0.0, kw_only=True)

    @property
    def margin(self) -> float:
        """Bytes to OOM on the device; negative: that it lacks."""
        return self.room - self.memory.total

    @property
    def host_margin(self) -> float:
        """The same of the host."""
        return self.host_room - self.memory.host

    @property
    def fits(self) -> bool:
        return self.margin >= self.spare and self.host_margin >= 0

    @property
    def tight(self) -> bool:
        """Whether it fits, but for what should be left."""
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


def weighed(problem: Problem, strategy: Strategy) -> Fit:
    """Memory of one strategy."""
    room = problem.machine.usable_memory
    return Fit(strategy, fullest(problem.workload, strategy), room, problem.host_room, spare=problem.spare)


def priced(problem: Problem, strategy: Strategy) -> Plan:
    """Memory and time of one strategy."""
    fit, time = weighed(problem, strategy), estimate(problem.workload, strategy, problem.machine)
    return Plan(strategy, fit.memory, fit.room, fit.host_room, time, spare=fit.spare)


def fullest(workload: Workload, strategy: Strategy) -> Memory:
    """Of the first pipeline stage, which holds the most micro-batches, the second, which also waits to send gradients,
    or the last, which has the loss."""
    stages = {0, min(1, strategy.pipeline - 1), strategy.pipeline - 1}
    return max((device_memory(workload, strategy, stage=stage) for stage in stages), key=lambda memory: memory.total)


def too_much_model(fit: Fit) -> bool:
    """Whether model states alone are too much for a device, whatever is saved of the rest. Units of several layers do
    not tell: ZeRO 3 gathers all weights of one."""
    if fit.strategy.recompute_method == "uniform" and fit.strategy.recompute_layers > 1:
        return False
    return fit.memory.total - fit.memory.activations - fit.memory.temporary > fit.room


def better(plan: Plan, other: Plan) -> bool:
    """Faster; or as fast to one part in a thousand, with less memory."""
    if abs(plan.seconds - other.seconds) > 1e-3 * other.seconds:
        return plan.seconds < other.seconds
    return plan.memory.total < other.memory.total
