#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 6 of DeepSpeed4Science's page: memory of a learned position embedding on a rank, complete and split.

    python examples/reproduce/genslm/figure_6.py [OUT_DIR]

Bytes of the weights, gradients and optimizer states of GenSLM's table (width 5,760) that one rank of a
simulated world makes with the real code, for TP with --sequence-parallel. In fp32 with Adam: 16 bytes per number, as
many as for bf16 weights and gradients with fp32 main weights and states. The tensors are fake, so any length works.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.report import Row, run_figure  # noqa: E402

MODEL, RANKS = "genslm-25b", (16, 32, 64)
LENGTHS = (16384, 32768, 65536, 102400, 131072, 262144, 524288)
PUBLISHED_AT, PUBLISHED_GB = 102400, 10.0  # "approximately 10 GB per GPU when sequences are longer than 100K"


def table_bytes(length: int, ranks: int, partitioned: bool, rank: int = 0) -> Counter[str]:
    """Bytes of a rank's part of the table, by kind: parameters, gradients, optimizer."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megatron import platform
    from megatron.context_parallel.core.groups import initialize_grid
    from megatron.context_parallel.layout.sequence_layout import SequenceLayout
    from megatron.platform.simulated_cluster import simulated_world
    from megatron.training.arguments.parser import parse
    from megatron.training.families.named import shape
    from megatron.training.model.build import build_model
    from megatron.training.model.optimizer import build_optimizer, wrap_for_data_parallelism

    size = shape(MODEL)
    # One layer with as many heads as ranks and a narrow FFN: the table does not depend on them.
    words = (
        f"--num-layers 1 --hidden-size {size['hidden_size']} --num-attention-heads {ranks} --ffn-hidden-size {ranks} "
        f"--kv-channels 16 --seq-length {length} --max-position-embeddings {length} --position-embedding-type "
        f"learned_absolute --tensor-model-parallel-size {ranks} --sequence-parallel --attention-dropout 0 "
        "--hidden-dropout 0 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data "
        f"--tokenizer-type NullTokenizer --vocab-size 67 {'--partition-position-embedding' if partitioned else ''}"
    )
    config, device = parse(words.split(), None, ranks), platform.select("cpu", 0, None).device
    with simulated_world(ranks, rank), ExitStack() as stack:
        grid = initialize_grid(tensor=ranks, core_options={"expert_model_parallel_size": 1} if partitioned else None)
        # Fake tensors have no contents: reading random states, moving tensors and sending lengths is replaced.
        stack.enter_context(patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()))
        stack.enter_context(patch.object(torch.nn.Module, "to", lambda module, *_: module))
        stack.enter_context(patch.object(torch.distributed, "all_gather_object", _gather_equal))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        chunks = wrap_for_data_parallelism(build_model(config, grid, SequenceLayout(length, grid), 68, device), config)
        optimizer = build_optimizer(chunks, config)
        return _of_the_table(chunks[0], optimizer)


def _gather_equal(result: list, mine: object, group: object = None) -> None:
    result[:] = [mine] * len(result)


def _of_the_table(chunk: torch.nn.Module, optimizer: object) -> Counter[str]:
    table = next(p for name, p in chunk.named_parameters() if "position_embeddings" in name)
    result = Counter(parameters=_size(table), gradients=_size(table.main_grad))
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        result["optimizer"] += sum(
            _size(state) for state in part.optimizer.state.get(table, {}).values() if state.dim()
        )
    return result


def _size(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def rows_of(lengths: tuple[int, ...] = LENGTHS, ranks: tuple[int, ...] = RANKS) -> list[Row]:
    rows = []
    for length in lengths:
        for held, size in (("complete on each rank", 0), *((f"split over {size} ranks", size) for size in ranks)):
            ours = sum(table_bytes(length, size or ranks[0], bool(size)).values()) / 1e9
            printed = PUBLISHED_GB if length == PUBLISHED_AT and not size else None  # the page has one number
            note = "the page: about 10 beyond 100K; width and optimizer are not given" if printed else ""
            rows.append(Row({"table": held, "seq_length": length}, printed, ours, "simulated", "GB per rank", note))
    return rows


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    title = "DeepSpeed4Science, figure 6: a learned position embedding, trained"
    run_figure(__file__, __doc__, title, rows_of, over="seq_length", log=True)
