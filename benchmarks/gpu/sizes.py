# SPDX-License-Identifier: Apache-2.0
"""Problem sizes of the stages: for a GPU, and tiny ones that a CPU runs in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.formulas.strategy import Shape

KIB = 1024


@dataclass(frozen=True)
class Sizes:
    """Problem sizes.

    Attributes:
        model: the shape to train; ``layers`` is the largest number.
        gemm: sizes of square products. copy_bytes: of a copy. window: seconds to spend on one figure.
        rates: sequence lengths of attention in the machine file.
        lengths: sequence lengths of the kernels. masked: of the masks. blocks: of block-sparse masks.
        windows: of sliding windows. documents: packed ones.
        steps: (sequence length, recompute) of the training steps.
        fpdt_length, fpdt_layers, fpdt_chunks: of the chunk sweep. longest: first length of the search for the longest
            context, and its chunk.
        repeats: steps that count.
    """

    model: Shape
    gemm: tuple[int, ...]
    copy_bytes: int
    window: float
    rates: tuple[int, ...]
    lengths: tuple[int, ...]
    masked: tuple[int, ...]
    windows: tuple[int, ...]
    documents: int
    steps: tuple[tuple[int, str], ...]
    fpdt_length: int
    fpdt_layers: int
    fpdt_chunks: tuple[int, ...]
    longest: tuple[int, int]
    repeats: int


GPU = Sizes(
    model=Shape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256),
    gemm=(512, 1024, 2048, 4096, 8192, 16384),
    copy_bytes=2**30,
    window=0.4,
    rates=(512, 1024, 2048, 4096, 8192, 16384, 32768),
    lengths=tuple(n * KIB for n in (8, 16, 32, 64, 128, 256, 512)),
    masked=(32 * KIB, 128 * KIB),
    windows=(1023, 4095),
    documents=64,
    steps=((8 * KIB, "none"), (32 * KIB, "none"), (32 * KIB, "full"), (128 * KIB, "full")),
    fpdt_length=128 * KIB,
    fpdt_layers=4,
    fpdt_chunks=(128 * KIB, 64 * KIB, 32 * KIB, 16 * KIB, 8 * KIB),
    longest=(256 * KIB, 32 * KIB),
    repeats=3,
)
TINY = replace(
    GPU,
    model=Shape(layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=256),
    gemm=(64, 128),
    copy_bytes=2**18,
    window=0.005,
    rates=(64, 128),
    lengths=(128, 256),
    masked=(128,),
    windows=(15,),
    documents=4,
    steps=((128, "none"), (256, "full")),
    fpdt_length=256,
    fpdt_layers=1,
    fpdt_chunks=(256, 64),
    longest=(256, 64),
    repeats=1,
)
