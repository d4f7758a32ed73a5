# SPDX-License-Identifier: Apache-2.0
"""Token files as megatron-core writes them, and the micro-batches of a data set, for tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.training.data.batches import micro_batches


def write_documents(prefix: object, texts: Iterable[Any], dtype: Any = np.uint16) -> str:
    """Write the .bin and the .idx of documents; returns their prefix."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for text in texts:
        builder.add_document(np.asarray(text), [len(text)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def batches_of(dataset: Any, **options: Any) -> Any:
    """The micro-batches of one sample that the only rank reads, unless ``options`` say otherwise."""
    alone = {"consumed_samples": 0, "micro_batch_size": 1, "data_parallel_rank": 0, "data_parallel_size": 1}
    return micro_batches(dataset, **alone | options)
