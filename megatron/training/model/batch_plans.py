# SPDX-License-Identifier: Apache-2.0
"""Attention plans of batches of documents: what is computed and sent depends on where a batch's documents end.

The processes that read data make the plans' numbers, so that nothing is derived when layers run. The trainer receives
arrays, and copies them to its device at once, before the batch's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import TritonKernel
from megatron.context_parallel.attention.kernels.triton_kernels.triton_tiles import (
    Sizes,
    Walk,
    chosen,
    walk_numbers,
    walk_sizes,
)
from megatron.context_parallel.attention.ring import key_source
from megatron.context_parallel.attention.ring_plan import AttentionPlan
from megatron.context_parallel.layout.documents import document_rows
from megatron.context_parallel.layout.masks import Documents, Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import count
from megatron.context_parallel.layout.tiles import Tiles
from megatron.decisions.block_sizes import BlockTable, passes
from megatron.decisions.key_exchange import PASSED_ON
from megatron.platform.streams import to_device


@dataclass(frozen=True)
class PlanTables:
    """What a loader's process sends of a plan; a class of its own, so that the loader does not look inside.

    Attributes:
        balanced_spans: the positions of each ring rank; empty unless the layout's balance is "documents".
        memo: ``AttentionPlan.memo``, the results of its methods.
        shared: ``AttentionPlan.shared``.
    """

    balanced_spans: tuple
    memo: dict[tuple, Any]
    shared: dict[tuple, Any]


class TritonCalls(NamedTuple):
    """What the block sizes of Triton's kernels depend on in all calls of a run, masks apart.

    Attributes:
        itemsize, head, capability, features, measured: as for `decisions.block_sizes.blocks`.
        deterministic: as for `decisions.block_sizes.passes`.
    """

    itemsize: int
    head: int
    capability: int | None
    features: Sequence[str] = ()
    measured: BlockTable | None = None
    deterministic: bool = False


@dataclass(frozen=True)
class BatchPlans:
    """Makes and receives the plans of batches.

    Attributes:
        layout: which rank holds which tokens.
        masks: the masks inside a document of the model's layers. A layer with another mask derives its own plan.
        device: of the kernels.
        exchange: how keys travel on the ring.
        triton: the calls of Triton's kernels; None: layers use others.
    """

    layout: SequenceLayout
    masks: tuple[Mask, ...]
    device: torch.device
    exchange: str = PASSED_ON
    triton: TritonCalls | None = None

    def make(self, ends: Tensor) -> list[PlanTables]:
        """The numbers of a batch's plans, from its ``document_ends`` [b, n]; needs no GPU and no process group."""
        rows = document_rows(ends)
        # The layout depends on documents only with one sample in a micro-batch (check_model.py).
        layout = self.layout.without_groups().of_documents(rows[0])
        return [self._made(layout, mask) for mask in self._masks(rows)]

    def _made(self, layout: SequenceLayout, mask: Mask) -> PlanTables:
        plan = AttentionPlan(layout, mask)
        for tiles in complete(plan, self.exchange):
            for sizes in walks(tiles, self.triton) if tiles and self.triton else ():
                walk_numbers(tiles, sizes)
        balanced_spans = layout.balanced_spans if layout.balance == "documents" else ()
        memo = {key: value for key, value in plan.memo.items() if not key[0].startswith("_")}
        return PlanTables(balanced_spans, memo, plan.shared)

    def receive(self, ends: Tensor, made: list[PlanTables]) -> dict[Mask, AttentionPlan]:
        """The batch's plans by mask, for the layers, with their tables on the device."""
        rows, plans = document_rows(ends), {}
        for mask, tables in zip(self._masks(rows), made, strict=True):
            layout = self.layout.of_documents(rows[0], tables.balanced_spans).without_groups()
            plan = plans[mask] = AttentionPlan(layout, mask)
            plan.memo = tables.memo
            plan.shared = tables.shared | _copied(tables.shared, self.device)
        return plans

    def _masks(self, rows: list[tuple[int, ...]]) -> Iterator[Mask]:
        return (Documents(row, mask) for row in dict.fromkeys(rows) for mask in self.masks)


def complete(plan: AttentionPlan, exchange: str = PASSED_ON) -> list[Tiles]:
    """Make all parts of a plan that a layer asks for; returns their tiles."""
    layout, found = plan.layout, []
    chunks, ring = range(layout.chunks), range(layout.grid.ring.size)
    if len(chunks) == 1:
        return [hop.tiles for hop in key_source(exchange, plan, layout.grid.ring).hops]
    plan.last_keys()
    for query in chunks:
        for key in plan.keys_of(query):
            found += [hop.tiles for hop in plan.ring(chunk=key, query_chunk=query).hops]
    for key in chunks:
        for rank in ring:
            found += [plan.tiles_in_ring_rows(query, key, rank) for query in plan.queries_of(key, rank)]
    return found


def _copied(walks: dict[tuple, tuple[np.ndarray, np.ndarray, int]], device: torch.device) -> dict[tuple, Walk]:
    """The walks on the device, by one copy on the current stream, which is the one that runs the kernels."""
    if not walks:
        return {}
    parts = [part for blocks, ranges, _ in walks.values() for part in (blocks, ranges)]
    copied = to_device(torch.from_numpy(np.concatenate([part.ravel() for part in parts])), device)
    views = [view.view(part.shape) for view, part in zip(copied.split([part.size for part in parts]), parts)]
    return {(*key, device): Walk(*views[2 * i : 2 * i + 2], walks[key][2]) for i, key in enumerate(walks)}


def walks(tiles: Tiles, calls: TritonCalls) -> set[Sizes]:
    """How each kernel walks over these tiles."""
    kernels = passes(calls.itemsize, calls.head, calls.measured, deterministic=calls.deterministic)
    each = ((which, chosen(which, tiles, *calls[:-1])) for which in kernels)
    return {walk_sizes(*one, count(tiles.q_spans), count(tiles.k_spans)) for one in each}


def triton_calls(
    device: torch.device, dtype: torch.dtype, head_dim: int, features: list[str], measured: BlockTable | None
) -> TritonCalls | None:
    """Calls with these ``features`` of decisions/block_sizes.py; None if Triton's kernels cannot run."""
    if TritonKernel().why_not(device=device, dtype=dtype, head_dim=head_dim) is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    deterministic = torch.are_deterministic_algorithms_enabled()
    return TritonCalls(dtype.itemsize, head_dim, 10 * major + minor or None, tuple(features), measured, deterministic)
