# SPDX-License-Identifier: Apache-2.0
"""PyTorch's attention over ranks, without processes: which DTensors are taken, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.tensor as dtensors

from megatron.context_parallel import sdpa

HEADS, SAMPLES, TOKENS = (dtensors.Shard(dim) for dim in (1, 0, 2))


class Mesh:
    shape = (2,)


MESH, OTHER_MESH = Mesh(), Mesh()


@dataclass
class Sharded:
    """As much of a DTensor as the checks read."""

    placements: tuple[Any, ...]
    device_mesh: Any = None
    shape: tuple[int, ...] = (2, 4, 8, 16)

    def size(self, dim: int) -> int:
        return self.shape[dim]


@pytest.fixture(autouse=True)
def fakes(monkeypatch) -> None:
    monkeypatch.setattr(dtensors, "DTensor", Sharded)


def test_tensors_sharded_alike_over_samples_or_heads_are_taken() -> None:
    plain = [torch.empty(1)] * 3
    assert sdpa._as_sharded(*plain) is None
    for placement in (HEADS, SAMPLES, dtensors.Replicate()):
        query, *others = (Sharded((placement,), MESH) for _ in range(3))
        assert sdpa._as_sharded(query, *others) is query


@pytest.mark.parametrize(
    "one, other, message",
    [
        (Sharded((HEADS,), MESH), torch.empty(1), "must be DTensors of one mesh, or none of them"),
        (Sharded((HEADS,), MESH), Sharded((HEADS,), OTHER_MESH), "must be DTensors of one mesh, or none of them"),
        (Sharded((HEADS,), MESH), Sharded((SAMPLES,), MESH), "must all have the same sharding"),
        (Sharded((TOKENS,), MESH), Sharded((TOKENS,), MESH), "must all have the same sharding"),
        (Sharded((dtensors.Partial(),), MESH), Sharded((dtensors.Partial(),), MESH), "must all have the same sharding"),
    ],
)
def test_other_tensors_are_refused(one: Any, other: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sdpa._as_sharded(one, other, other)


def test_an_output_has_the_shape_and_strides_of_the_whole(monkeypatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(Sharded, "from_local", lambda local, mesh, placements, **more: seen.update(more), raising=False)
    sdpa._to_dtensor(torch.empty(2, 3, 5, 7), Sharded((HEADS,), MESH, (2, 6, 5, 11)))
    assert tuple(seen["shape"]) == (2, 6, 5, 7) and seen["stride"] == torch.empty(2, 6, 5, 7).stride()
