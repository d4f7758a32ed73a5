# SPDX-License-Identifier: Apache-2.0
"""Settings of the engine, and what of verl's settings it does not support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.workers.config.engine import EngineConfig


@dataclass
class LongContextEngineConfig(EngineConfig):
    """verl's settings of an engine, and those of :func:`megatron.context_parallel.huggingface.parallelize`.

    Attributes:
        ulysses_parallel_size, ring_parallel_size: of each sequence; the other processes are data parallel.
        balance, attention_kernel: see ``cp.SequenceLayout`` and ``cp.attention``.
        fpdt_chunk_size: tokens of a chunk; None: without chunks.
        fpdt_offload: chunks wait in host memory.
    """

    strategy: str = "longcontext"
    ulysses_parallel_size: int = 1
    ring_parallel_size: int = 1
    balance: str = "zigzag"
    attention_kernel: str = "auto"
    fpdt_chunk_size: int | None = None
    fpdt_offload: bool = True


def refuse(model: Any, engine: Any) -> None:
    """Refuse settings of verl that this engine would ignore.

    Raises:
        ValueError: names the setting.
    """
    replay = engine.router_replay.mode
    for given, name, why in (
        (model.lora_rank, "lora_rank", "adapters are not exported: set it to 0"),
        (model.mtp.enable, "mtp.enable", "its layers are not trained: set it to False"),
        (model.use_liger, "use_liger", "replaces functions that are replaced here: set it to False"),
        (model.use_fused_kernels, "use_fused_kernels", "log-probabilities are computed in chunks anyway: False"),
        (model.enable_activation_offload, "enable_activation_offload", "use fpdt_chunk_size"),
        (model.tiled_mlp.get("enabled"), "tiled_mlp", "use fpdt_chunk_size"),
        (replay != "disabled", f"router_replay.mode {replay}", "verl hands routes to its own engines only: disabled"),
        (engine.dtype not in PRECISIONS, f"dtype {engine.dtype}", f"use {', '.join(PRECISIONS)}"),
    ):
        if given:
            raise ValueError(f"{name} is not supported by the engine longcontext: {why}")


PRECISIONS = ("bfloat16", "float32")
