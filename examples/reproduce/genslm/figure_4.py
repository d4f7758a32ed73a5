#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 4 of DeepSpeed4Science's page: device memory of an attention mask, by the place and method of its creation.

    python examples/reproduce/genslm/figure_4.py [OUT_DIR]

Dense masks of the complete sequence are made with fake tensors as in Megatron's code, and every byte is counted. Our
masks (--attention-mask function) are never complete: a part of the largest tile is really made and used, with
the mask on the device and in blocks of rows in host memory (--mask-cpu-threshold), and measured. On a CPU both are the
same memory, and the measured bytes include the tile's scores.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.report import Row, run_figure  # noqa: E402

LENGTHS = (16384, 32768, 51200, 65536, 131072)
MASK_GB, SAVED_GB, PUBLISHED_AT = 10.0, 54.0 - 39.0, 51200
PLACES = {"device": 2**62, "host, by rows": 0}  # the threshold with which all of our masks are made in this place


def dense_bytes(length: int) -> tuple[int, int, int]:
    """Bytes of a dense fp32 mask [length, length], of its creation on the device, and of only its booleans, which
    are on the device if it is made in host memory.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megatron.training.report.tensor_memory import TensorMeter

    gc.collect()  # otherwise memory of earlier objects would count when it is freed
    with FakeTensorMode(), TensorMeter("cpu") as meter:
        before = meter.now
        mask = torch.tril(torch.ones(1, length, length))
        finished = meter.now - before
        mask = mask < 0.5
        return finished, meter.peak - before, meter.now - before


def part_bytes(length: int, threshold: int) -> int:
    """Bytes at the peak of forward and backward of a part of the largest tile, without q, k, v and their gradients."""
    import megatron.context_parallel as cp
    from megatron.context_parallel.attention.kernels.tile_by_tile import tile_parts, tile_scores
    from megatron.context_parallel.attention.ring_plan import attention_plan
    from megatron.training.report.tensor_memory import TensorMeter

    layout = cp.SequenceLayout(length, cp.abstract_grid())
    rule = cp.AttentionRule(cp.MaskFunction(every_third, cp.Causal()), mask_cpu_threshold=threshold)
    tiles = attention_plan(layout, rule.mask).ring().hops[0].tiles
    q = torch.randn(length, 1, 1, 8)
    kernel = rule.tile_kernel(q, layout.grid.ulysses, length)
    part = max(tile_parts(tiles, kernel.scores), key=lambda part: part.pairs)
    rows, keys = (q[slice(*span)].permute(1, 2, 0, 3) for span in (part.q, part.k))
    out, lse = torch.zeros_like(rows), torch.zeros(rows.shape[:3])
    how = tile_scores(tiles, part, q, kernel.scores)
    gc.collect()
    with TensorMeter("cpu") as meter:
        before = meter.now
        kernel.kernel.forward(rows, keys, keys, how)
        kernel.kernel.backward(out, rows, keys, keys, out, lse, how)
        return meter.peak - before


def every_third(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q - k) % 3 == 0


def rows_of(lengths: tuple[int, ...] = LENGTHS) -> list[Row]:
    rows = []
    for length in lengths:
        finished, peak, moved = dense_bytes(length)
        compared = length == PUBLISHED_AT
        counted = {
            "dense mask, fp32": (finished, MASK_GB, "the page: over 10 GB beyond 50K tokens"),
            "dense, made on the device": (peak, 2 * MASK_GB, "the page: at least twice the mask while it is made"),
            "dense, made in host memory": (moved, None, ""),
            "saved by the host": (peak - moved, SAVED_GB,
                                  "the page: peak 54 to 39 GB, for an unknown model and length"),
        }  # fmt: skip
        for mask, (size, printed, note) in counted.items():
            label, value = {"mask": mask, "seq_length": length}, printed if compared else None
            rows.append(Row(label, value, size / 1e9, "simulated", "GB", note if compared else ""))
        for place, threshold in PLACES.items():
            label = {"mask": f"ours, made in parts ({place})", "seq_length": length}
            rows.append(Row(label, None, part_bytes(length, threshold) / 1e9, "measured", "GB"))
    return rows


if __name__ == "__main__":
    title = "DeepSpeed4Science, figure 4: device memory of a mask"
    run_figure(__file__, __doc__, title, rows_of, over="seq_length", log=True)
