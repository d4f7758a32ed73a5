# SPDX-License-Identifier: Apache-2.0
"""The two numbers in MFU: floating-point operations of a step, and the peak rate of the device."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from megatron.context_parallel.layout.masks import Causal, Mask, MaskFunction
from megatron.formulas.flops import forward_flops
from megatron.training.model.attention_rule import layer_masks
from megatron.training.settings.config import Config
from megatron.training.settings.models import model_shape

# Dense bf16 peak of one device, TFLOP/s (NVIDIA's data sheets, without sparsity), by a part of its name.
GPU_PEAKS = {
    "GB200": 2500.0, "B200": 2250.0, "GH200": 989.4, "H200": 989.4, "H100 PCIe": 756.0, "H100": 989.4, "H800": 989.4,
    "H20": 148.0, "L40S": 362.0, "L20": 119.5, "A100": 312.0, "A800": 312.0, "A40": 149.7, "A10": 125.0, "V100": 125.0,
    "RTX 4090": 165.2, "RTX 3090": 71.0,
}  # fmt: skip


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one sample of ``seq_length`` tokens, forward and backward.

    ``model`` counts the pairs that the mask allows (half of them for a causal mask; packed documents count as one) and
    no recompute. ``old_papers`` counts all pairs, and the forward pass twice under full recompute, as older papers do.
    """

    model: float
    old_papers: float


def step_flops(config: Config, vocab_size: int) -> StepFlops:
    """FLOPs per sample; the backward pass has twice those of the forward pass."""
    shape, length, ahead = (
        model_shape(config.model, vocab_size),
        config.data.seq_length,
        config.model.mtp_num_layers or 0,
    )
    if shape.mixture:
        layers = *shape.mixture.layers, *shape.mixture.layers[-1:] * ahead
        shape = replace(shape, mixture=replace(shape.mixture, layers=layers))
    forward = forward_flops(replace(shape, layers=shape.layers + ahead), length)
    # Each layer of multi-token prediction also has a projection from twice the width, and the output layer once more.
    gemm = forward.gemm + ahead * (forward.logits + 4 * length * shape.hidden**2)
    recompute = 4 if config.attention.recompute_granularity == "full" else 3
    model = 3 * gemm + attended_share(config) * (3 * forward.attention + forward.choice)
    return StepFlops(model, recompute * (gemm + forward.attention) + (recompute - 2) * forward.choice)


def attended_share(config: Config) -> float:
    """The share of all (query, key) pairs that the masks inside a document allow, on average over the layers."""
    masks = layer_masks(config)
    masks += masks[-1:] * (config.model.mtp_num_layers or 0)
    counts = {mask: masks.count(mask) for mask in masks}
    return sum(count * _share(mask, config.data.seq_length) for mask, count in counts.items()) / len(masks)


def _share(mask: Mask, length: int) -> float:
    if isinstance(mask, Causal | MaskFunction):  # the share of a function is unknown
        return 0.5
    whole = (0, length)
    return sum(piece.pairs for band in mask.bands(whole, whole) for piece in band.clip(whole)) / length**2


def peak_flops(config: Config, device: torch.device) -> float:
    """Peak FLOP/s of one device: --peak-tflops, the GPU's data sheet, or the measured rate of matrix products."""
    if config.logging.peak_tflops:
        return config.logging.peak_tflops * 1e12
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, peak in GPU_PEAKS.items():
            if part.lower() in name.lower():
                return peak * 1e12
        return gemm_rate(device, torch.bfloat16, size=8192)
    dtype = torch.bfloat16 if config.optimizer.bf16 else torch.float32
    return gemm_rate(device, dtype)


def gemm_rate(device: torch.device, dtype: torch.dtype = torch.float32, size: int = 1024, windows: int = 3) -> float:
    """Measured FLOP/s of a square matrix product: the best of several windows of a quarter of a second.

    In one window each process that shares the cores gets its share of time; the best window excludes disturbances.
    """
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    torch.mm(a, b)
    best = 0.0
    for _ in range(windows):
        _wait(device)
        products, start = 0, time.perf_counter()
        while products == 0 or time.perf_counter() - start < 0.25:
            torch.mm(a, b)
            _wait(device)
            products += 1
        best = max(best, 2 * size**3 * products / (time.perf_counter() - start))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
