# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a published training run by our cost model, from its shape, grid, program and machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from examples.reproduce.open_records import Record, models
from megatron.formulas.flops import forward_flops
from megatron.formulas.parameters import stage_parameters
from megatron.formulas.strategy import Group, Shape, Strategy, Workload
from megatron.simulator.cost.estimate import estimate
from megatron.simulator.cost.layer_program import Program
from megatron.simulator.cost.operations import BF16, FP32, collective
from megatron.simulator.cost.seconds import transfer_seconds
from megatron.simulator.machines.machine import Machine
from megatron.simulator.machines.machine_file import load

# The architecture by the first four letters of the machine's name.
FAMILY = {"A100": "Ampere", "A800": "Ampere", "H100": "Hopper", "H200": "Hopper", "B200": "Blackwell"}
# Adam on a CPU reads fp32 gradient, weight and two moments, and writes three of them and a bf16 weight. Bandwidth of a
# node's host memory in bytes per second (assumed), which all of its ranks share.
CPU_ADAM_BYTES, HOST_MEMORY = 30, 3e11
# DeepSpeed's offloaded optimizer, seconds per parameter of a node: Llama 2 7B on 4 A100 goes from 0.5 to "over 7" s per
# step (DeepSpeed, blogs/deepspeed-zenflow/README.md): it also waits for its copies, clips and casts on the CPU.
DEEPSPEED_ADAM = 6.5 / 6.74e9


@dataclass(frozen=True)
class Predicted:
    """Tokens per second and GPU, published and by the model, and the model's seconds by cause."""

    record: Record
    published: float
    ours: float
    parts: dict[str, float]

    @property
    def error(self) -> float:
        """The error of a step's seconds, in percent of the published ones."""
        return 100 * (self.published / self.ours - 1)

    @property
    def rate_error(self) -> float:
        """The error of tokens per second, in percent of the published ones."""
        return 100 * (self.ours / self.published - 1)


def family(machine: str) -> str:
    """The architecture, whose constants all its machines share."""
    return FAMILY[machine[:4]]


def shape_of(record: Record) -> Shape:
    """The shape of the run's model. If pipeline stages do not divide the layers, its program counts embedding and loss
    as layers, which is modelled by a divisible number of layers and a very small vocabulary."""
    sizes = dict(models()[record.model])
    learned = sizes.pop("learned_positions", False)
    shape = Shape(**sizes, positions=record.seq_length if learned else 0)
    if shape.layers % record.pp:
        return replace(shape, layers=-(-shape.layers // record.pp) * record.pp, vocab=1024)
    return shape


def strategy_of(record: Record, recompute: str) -> Strategy:
    return Strategy(
        tensor=record.tp, ulysses=record.ulysses, ring=record.ring, pipeline=record.pp, virtual=record.vp,
        data=record.shard or record.dp, micro_batch=record.micro_batch, zero=record.zero, recompute=recompute,
        offload_checkpoints=record.offload and recompute == "full", fpdt_chunk=record.fpdt_chunk,
        fused=record.runs != "eager", balance=record.balance,
    )  # fmt: skip


def program_of(record: Record) -> Program:
    """The run's program. Recompute ``op`` is torchtitan's policy, which computes every second product again: for Llama
    wk, wo and w3."""
    again = 0.0
    if record.recompute == "op":
        s = shape_of(record)
        kv, width = s.kv_heads * s.head_dim, s.heads * s.head_dim
        again = (kv + width + s.ffn) / (2 * width + 2 * kv + 3 * s.ffn)
    gradients = FP32 if record.gradients == "fp32" else BF16
    return Program(record.runs, record.kernel, record.precision != "bf16", record.overlap, again, gradients)


@cache
def _machine(name: str, network: float, node: int, link: float) -> Machine:
    machine = load(name)
    if network:
        machine = replace(machine, network=replace(machine.network, bandwidth=network))
    if link:
        machine = replace(machine, link=replace(machine.link, bandwidth=link))
    return replace(machine, gpus=node or machine.gpus)


def machine_of(record: Record, constants: dict[str, dict[str, float]]) -> Machine:
    """The shipped machine with the ``constants`` of its family instead of the file's shares."""
    machine = _machine(record.machine, record.network, record.node, record.link)
    shares = constants.get(family(record.machine), {})
    return replace(machine, calibration=replace(machine.calibration, **shares))


def predict(record: Record, constants: dict[str, dict[str, float]]) -> Predicted:
    """Predict a run. ``constants`` by family replace those of the machine file; missing constants keep its values."""
    machine = machine_of(record, constants)
    parts = _parts(record, machine)
    tokens = record.global_batch * record.seq_length / record.gpus
    return Predicted(record, published_rate(record), tokens / sum(parts.values()), parts)


def published_rate(record: Record) -> float:
    """Tokens per second and GPU, for any unit of the figure."""
    if record.unit == "tokens/s/GPU":
        return record.value
    if record.unit == "s/step":
        return record.global_batch * record.seq_length / record.value / record.gpus
    own = {name: models()[record.model][name] for name in ("layers", "vocab")}
    one = forward_flops(replace(shape_of(record), **own), record.seq_length)
    attention = one.attention * (0.5 if record.unit.startswith("causal") else 1.0)
    return record.value * 1e12 / (3 * (one.gemm + attention) / record.seq_length)


def _parts(record: Record, machine: Machine) -> dict[str, float]:
    share = {"none": 0.0, "op": 0.0, "full": 1.0, "alternate": 0.5}.get(record.recompute, record.recompute)
    workload = Workload(shape_of(record), record.seq_length, record.global_batch)
    if record.shard:
        workload = replace(workload, global_batch=record.global_batch * record.shard // record.dp)
    program = program_of(record)
    parts: dict[str, float] = {}
    for recompute, weight in (("none", 1 - share), ("full", share)):
        if weight:
            estimated = estimate(workload, strategy_of(record, recompute), machine, program).parts
            for name, seconds in estimated.items():
                parts[name] = parts.get(name, 0.0) + weight * seconds
    if record.shard:
        parts["dp"] += _across_nodes(record, machine, sum(parts.values()))
    if record.weights == "broadcast":
        parts["dp"] += _broadcasts(record, machine)
    if record.optimizer != "gpu":
        parts["optimizer"] = _on_the_cpu(record, machine)
    return parts


def _across_nodes(record: Record, machine: Machine, step: float) -> float:
    """Seconds of summing bf16 gradients over nodes that do not overlap with the backward pass. Each node has all
    weights (HSDP) or states (ZeRO 1). FSDP sums in each micro-batch, ZeRO 1 in the last."""
    held = stage_parameters(shape_of(record), 1, 1, 0).numel / record.shard
    group = Group(record.gpus // record.shard, record.shard)
    took = transfer_seconds(collective("all_reduce", "dp", group, BF16 * held), machine)
    backward = step * 2 / 3
    if record.zero < 2:
        backward /= record.global_batch // (record.dp * record.micro_batch)
    return max((1 - machine.calibration.overlap) * took, took - backward)


def _broadcasts(record: Record, machine: Machine) -> float:
    """Additional seconds if each rank's shard of new weights is broadcast instead of one all-gather."""
    group = strategy_of(record, "none").group("dp")
    held = BF16 * stage_parameters(shape_of(record), record.tp, record.pp, 0).numel
    one = transfer_seconds(collective("broadcast", "dp", group, held / group.size), machine)
    return max(0.0, group.size * one - transfer_seconds(collective("all_gather", "dp", group, held), machine))


def _on_the_cpu(record: Record, machine: Machine) -> float:
    """Adam in host memory: copies of gradients and weights, and its own memory traffic."""
    held = stage_parameters(shape_of(record), 1, 1, 0).numel / record.gpus
    ranks = min(record.gpus, machine.gpus)
    if record.optimizer == "deepspeed":
        return DEEPSPEED_ADAM * held * ranks
    copies = (4 + BF16) * held / (machine.host_link.bandwidth * machine.calibration.host)
    return copies + CPU_ADAM_BYTES * held * ranks / HOST_MEMORY
