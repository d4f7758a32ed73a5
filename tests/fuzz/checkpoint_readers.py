# SPDX-License-Identifier: Apache-2.0
"""The readers of what lies in a checkpoint's folder, each with valid files and what happens to them."""

from __future__ import annotations

import pickle
import tarfile
from functools import cache
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.training.checkpoint.megatron_lm import unpickle
from tests.fuzz import mutations
from tests.fuzz.harness import Reader

OLD = Path(__file__).parents[1] / "distributed" / "data"


@cache
def old_files(archive: str, name: str) -> list[bytes]:
    """Files with a name from a checkpoint that an earlier version, or megatron-core, has written."""
    with tarfile.open(OLD / archive) as tar:
        return [tar.extractfile(one).read() for one in tar if one.isfile() and one.name.endswith(f"/{name}")]


def small_metadata() -> bytes:
    size, half = torch.Size([4, 3]), torch.Size([2, 3])
    tensors = {
        name: TensorStorageMetadata(
            TensorProperties(dtype), size, [ChunkStorageMetadata(torch.Size([at, 0]), half) for at in (0, 2)]
        )
        for name, dtype in (("weight", torch.float32), ("optimizer.state.exp_avg.weight", torch.bfloat16))
    }
    places = {
        MetadataIndex(name, torch.Size([at, 0]), number): _StorageInfo("__0_0.distcp", 1000 * number, 900)
        for name in tensors
        for number, at in enumerate((0, 2))
    }
    places[MetadataIndex("rng/shard_0_1")] = _StorageInfo("__0_1.distcp", 0, 77)
    entries = {**tensors, "rng/shard_0_1": BytesStorageMetadata()}
    return pickle.dumps(Metadata(entries, None, places, StorageMeta("/somewhere", "a", "b")))


READERS = [
    Reader(
        name="metadata",
        file=".metadata",
        seeds=lambda: [small_metadata(), *old_files("megatron_core_0.12.tgz", ".metadata")],
        change=mutations.pickled,
        read=lambda folder: unpickle.read_metadata(folder / ".metadata"),
    ),
]
