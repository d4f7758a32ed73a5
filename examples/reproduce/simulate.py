# SPDX-License-Identifier: Apache-2.0
"""The papers' clusters, models and ways to count FLOPs, for tables made by simulation."""

from __future__ import annotations

from pathlib import Path

from megatron.simulator.hardware import Machine, load
from megatron.simulator.strategy import Shape, Workload
from megatron.training.config import ModelConfig
from megatron.training.models import shape, vocabulary

CLUSTERS = Path(__file__).parent / "clusters"


def cluster(name: str) -> Machine:
    """A paper's machines: a shipped machine and the constants that fit.py found for them."""
    return load(CLUSTERS / f"{name}.json")


def shape_of(model: str, **sizes: int) -> Shape:
    """A named model (training/models.py) with the vocabulary it was published with; ``sizes`` replace its own."""
    return Shape.of(ModelConfig(**(shape(model) | sizes)), vocabulary(model))


def usp_tflops(workload: Workload, seconds: float, gpus: int) -> float:
    """TFLOPS per GPU as Megatron-LM of April 2024 and with it USP's tables 5 to 7 count.

    The full mask, no recompute, and an MLP of two matrices although Llama's has three: only so does the last version's
    152.51 TFLOPS at 120K follow from the first one's 266.
    """
    s, h = workload.shape, workload.shape.hidden
    per_token = 1 + s.kv_heads / s.heads + workload.seq_length / h + s.ffn / h + s.vocab / (2 * s.layers * h)
    return 12 * workload.global_batch * workload.seq_length * s.layers * h**2 * per_token / seconds / gpus / 1e12


def deepspeed_tflops(workload: Workload, seconds: float, gpus: int) -> float:
    """TFLOPS per GPU as Megatron-DeepSpeed counts: 96 B S L h^2 (1 + S/6h + V/16Lh), full mask and recompute."""
    s, h = workload.shape, workload.shape.hidden
    per_token = 1 + workload.seq_length / (6 * h) + s.vocab / (16 * s.layers * h)
    return 96 * workload.global_batch * workload.seq_length * s.layers * h**2 * per_token / seconds / gpus / 1e12
