# SPDX-License-Identifier: Apache-2.0
"""GEMM and copy rates, and from them machine.json, a machine file for --gpu (docs/use/machine-files.md)."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.stage import Case, Figures, Sizes, Stage, read
from megatron.context_parallel.attention import kernels
from megatron.simulator.machines import measure_device
from megatron.simulator.machines.machine_file import known
from megatron.training.report.mfu import GPU_PEAKS

MACHINE = "machine.json"


def run(stage: Stage, sizes: Sizes, device: torch.device) -> None:
    """Measure square products, the products of a layer, copies, the shortest kernel, and attention."""
    dtype = dtype_of(device)
    cases = [Case(f"gemm {size}", partial(square, size, dtype, device, sizes.window)) for size in sizes.gemm]
    for name, (n, k) in products(sizes).items():
        work = partial(product, sizes.gemm[-1] // 2, n, k, dtype, device, sizes.window)
        cases.append(Case(f"{name} {n} x {k}", work))
    cases += [Case("memory", partial(memory, sizes, device)), Case("host", partial(host, sizes, device))]
    cases.append(Case("launch", lambda: {"seconds": measure_device.launch_seconds(device, sizes.window)}))
    model = sizes.model
    for length in sizes.rates:
        work = partial(measure_device.attention_rates, length, model.heads, model.head_dim, dtype, device, sizes.window)
        cases.append(Case(f"attention over {length}", partial(both_rates, work)))
    how = {"device": device, "dtype": dtype, "head_dim": model.head_dim}
    stage.report["attention_kernel"] = kernels.select("auto", **how).name
    stage.run(cases)
    machine = machine_of(stage.report, device)
    (stage.folder / MACHINE).write_text(json.dumps(machine, indent=1) + "\n")


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def products(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """(columns, inner size) of a layer's linear maps and of the logits."""
    model = sizes.model
    return {
        "qkv": ((model.heads + 2 * model.kv_heads) * model.head_dim, model.hidden),
        "attention out": (model.hidden, model.heads * model.head_dim),
        "mlp up": (2 * model.ffn, model.hidden),
        "mlp down": (model.hidden, model.ffn),
        "logits": (model.vocab, model.hidden),
    }


def square(size: int, dtype: torch.dtype, device: torch.device, window: float) -> Figures:
    return {"size": size, "flops_per_second": measure_device.gemm_rate(size, dtype, device, window)}


def product(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, window: float) -> Figures:
    """[m, k] times [k, n] with a transposed weight, as in a linear layer."""
    a, weight = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
    seconds = measure_device.seconds_of(lambda: a @ weight.t(), device, window)
    return {"m": m, "n": n, "k": k, "flops_per_second": 2 * m * n * k / seconds}


def memory(sizes: Sizes, device: torch.device) -> Figures:
    return {"bytes_per_second": measure_device.memory_bandwidth(sizes.copy_bytes, device, sizes.window)}


def host(sizes: Sizes, device: torch.device) -> Figures:
    """Bandwidth and latency of copies between host and device, in the slower direction."""
    bandwidth, latency = measure_device.host_copy(sizes.copy_bytes, device, sizes.window)
    return {"bytes_per_second": bandwidth, "latency": latency}


def both_rates(work: partial) -> Figures:
    forward, backward = work()
    return {"size": work.args[0], "forward": forward, "backward": backward}


def best_gemm(folder: Path) -> float | None:
    """FLOP/s of the fastest square product; None: not measured yet."""
    cases = (read(folder, "rates") or {}).get("cases", {})
    rates = [f["flops_per_second"] for name, f in cases.items() if name.startswith("gemm ") and "failed" not in f]
    return max(rates, default=None)


def gemm_rate(folder: Path, sizes: Sizes, device: torch.device) -> float:
    """The GEMM rate to compare kernels with, from the stage "rates" if it has run, otherwise measured now."""
    return best_gemm(folder) or measure_device.gemm_rate(sizes.gemm[-1], dtype_of(device), device, sizes.window)


def machine_of(report: Figures, device: torch.device) -> Figures:
    """Fields of a machine file: measured figures that extend the shipped machine with this GPU, or H100-80G."""
    cases = {name: figures for name, figures in report["cases"].items() if "failed" not in figures}
    gemm = rising(cases, "gemm ", "flops_per_second")
    forward, backward = (rising(cases, "attention over ", way) for way in ("forward", "backward"))
    kernel = report["attention_kernel"]
    cuda = device.type == "cuda"
    own, other = ("bf16", "fp32") if cuda else ("fp32", "bf16")
    rates = [rate for points in (gemm, forward, backward) for _, rate in points]
    name = report["device"]
    sheet = next((1e12 * peak for word, peak in GPU_PEAKS.items() if cuda and word.lower() in name.lower()), 0.0)
    fields: Figures = {
        "extends": shipped(name) or "H100-80G",
        "name": name,
        "gpus": 1,
        "dtype": own,
        "attention_kernel": kernel,
        "kernels": {kernel: 1.0},
        "gemm": gemm,
        "attention": forward,
        "attention_backward": backward,
    }
    if rates:
        fields["peak"] = {own: max(*rates, sheet), other: max(*rates, sheet) / 2}
    if "memory" in cases:
        fields |= {"memory_bandwidth": cases["memory"]["bytes_per_second"], "calibration": {"memory": 1.0, "host": 1.0}}
    if "host" in cases:
        fields["host_link"] = {"bandwidth": cases["host"]["bytes_per_second"], "latency": cases["host"]["latency"]}
    if "launch" in cases:
        fields["launch"] = cases["launch"]["seconds"]
    if cuda:
        fields["memory"] = torch.cuda.get_device_properties(device).total_memory
        fields["capability"] = report["capability"]
    output = f"measured on {name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    fields = {key: value for key, value in fields.items() if value}
    chosen = ("extends", "name", "gpus", "dtype", "attention_kernel")
    return fields | {"sources": {key: output for key in fields if key not in chosen}}


def rising(cases: Figures, kind: str, rate: str) -> list[list[float]]:
    return sorted([f["size"], f[rate]] for name, f in cases.items() if name.startswith(kind))


def shipped(device: str) -> str | None:
    """The name of the shipped machine with this GPU."""
    return next((name for name in known() if name.split("-")[0].lower() in device.lower()), None)
