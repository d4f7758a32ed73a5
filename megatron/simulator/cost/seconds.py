# SPDX-License-Identifier: Apache-2.0
"""Seconds of one event of a trace on a machine, with all its repetitions.

These functions take a few microseconds, because a planner prices a million events.

**Kernels** follow a roofline: the slower of arithmetic, at the rate of a kernel of this size, and memory traffic, but
at least a launch. The size of a GEMM is the geometric mean of its dimensions, batch included: on an H100, one curve
over that mean describes measured products of all shapes between 256 and 4096. The size of attention is twice the
average number of keys that a query sees: the length of a causal tile, twice a full tile's length, less under masks.
A flash kernel's inner loop has iterations in proportion to this size.

**Transfers** depend on their size and on the nodes of the group's ranks: see collective_cost.py.
"""

from __future__ import annotations

from megatron.decisions.kernel_order import preferred
from megatron.simulator.cost.collective_cost import price_of
from megatron.simulator.cost.trace import HostCopy, Kernel, Transfer
from megatron.simulator.machines.machine import Machine


def attention_named(kernel: str) -> str:
    """The name of an attention kernel in a trace."""
    return f"{kernel}_attention"


# Other names mean the machine's own choice. FlashAttention 1 ("flash1") occurs in published runs only.
ATTENTION = {attention_named(kernel): kernel for kernel in (*preferred(None), "flash1")}
# Those to chosen keys are also written in Triton.
ATTENTION |= dict.fromkeys(("chosen_forward", "chosen_query_grads", "chosen_key_grads", "mean_weights"), "triton")


def kernel_seconds(kernel: Kernel, machine: Machine) -> float:
    """Seconds of all ``count`` repetitions."""
    calibration = machine.calibration
    traffic = kernel.bytes / (machine.memory_bandwidth * calibration.memory)
    kind = kernel.kind
    if kind == "memory":
        return kernel.count * (machine.launch + traffic)
    flops = kernel.flops
    if flops <= 0:
        return kernel.count * max(machine.launch, traffic)
    if kind == "gemm":
        rate = sustained(machine.gemm((flops / 2) ** (1 / 3)), machine) * calibration.gemm
    else:
        rate = sustained(attention_rate(kernel, machine), machine) * calibration.attention
    peak = machine.peak
    dtype = "fp32" if kernel.itemsize >= 4 else "fp8" if kernel.itemsize == 1 and kind == "gemm" else "bf16"
    if dtype != machine.dtype:
        rate *= peak[dtype] / peak[machine.dtype] * (calibration.fp8 if dtype == "fp8" else 1.0)
    if rate > peak[dtype]:
        rate = peak[dtype]
    return kernel.count * max(machine.launch, flops / rate, traffic)


def sustained(rate: float, machine: Machine) -> float:
    """FLOP/s under the machine's power limit; ``rate`` was measured under the limit :attr:`Power.rated`.

    Power above idle grows with the FLOP/s and, because voltage follows the clock, also with the clock: at clock s, a
    kernel with a share r of the fastest product's rate draws r s^2 of that product's power.
    """
    power = machine.power
    if power is None or power.limit >= power.rated:
        return rate
    available = (power.limit - power.idle) / (power.rated - power.idle)
    drawn = rate / machine.gemm.points[-1][1]
    return rate * min(1.0, (available / drawn) ** 0.5)


def attention_rate(kernel: Kernel, machine: Machine) -> float:
    """FLOP/s by the kernel's table on this machine. A kernel without ``shape`` counts as a large one."""
    name = ATTENTION.get(kernel.name)
    if not kernel.shape:
        return machine.attention_rate(name or machine.plain_kernel(), None, backward=kernel.backward)
    queries, keys, heads, head_size = kernel.shape
    # FLOPs per pair and head size. Triton's backward pass is two launches of 6 and 8: on average 7.
    twice = kernel.backward and name == "triton"
    pairs = kernel.flops / ((7 if twice else 10 if kernel.backward else 4) * heads * head_size)
    name = name or machine.plain_kernel(head_size)
    rate = machine.attention_rate(name, 2 * pairs / max(queries, keys), backward=kernel.backward)
    if twice and name in machine.kernel_rates:  # measured rates count five products of the seven
        rate *= 7 / 5
    return rate * machine.head_size(head_size)


def transfer_seconds(transfer: Transfer, machine: Machine) -> float:
    """Seconds of all ``count`` repetitions; 0 for a group of one rank."""
    ranks, stride = transfer.group.size, transfer.group.stride
    if ranks <= 1:
        return 0.0
    key = transfer.kind, ranks, stride
    price = machine.prices.get(key)
    if price is None:
        price = machine.prices[key] = price_of(*key, machine)
    size = transfer.bytes + transfer.excess
    if size >= price.beyond:
        return transfer.count * (price.large.latency + size * price.large.rate)
    return transfer.count * price(size)


def copy_seconds(copy: HostCopy, machine: Machine) -> float:
    """Seconds of all ``count`` repetitions while every GPU of the node copies."""
    link = machine.host_link
    return copy.count * (copy.bytes / (link.bandwidth * machine.calibration.host) + link.latency)
