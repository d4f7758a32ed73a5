# SPDX-License-Identifier: Apache-2.0
"""Learned sparsity in megatron-core's model, in float64 with planted ties: on every grid the same chosen keys, logits,
losses and gradients as on one process."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import megatron.context_parallel as layouts
from tests.distributed.flags import DEVICE, FULL, P2, SELECTIVE, SP, STREAM, T2, V2, cp, ep, fpdt
from tests.distributed.test_sparse_layers import DOCUMENTS, DSA, EXPERTS, PACKED, SHARED, SPARSE, UNEVEN, WARM_UP
from tests.distributed.training_runs import first_gradients, make_job, take_steps, train_job
from tests.pairs import also_in_full

WIDE = "--loss-chunks 2"  # core's own cross entropy is computed in fp32
MIXTURE = f"{SPARSE} {EXPERTS} --moe-router-dtype fp64"
AHEAD = f"{SPARSE} {UNEVEN} --mtp-num-layers 1"


class Run(NamedTuple):
    """What the first step of a run computed; logits and choices are those of its first micro-batches.

    Attributes:
        losses: of the model, and of the indexers.
        logits: by position.
        keys: by position, the choices of all layers, micro-batches and samples.
        tied: of each query of the first samples that may read more keys than it chooses, whether the last one that it
            chose has the same score as one that it did not.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    logits: dict[int, Tensor]
    keys: dict[int, set[tuple[int, ...]]]
    tied: list[bool]


def planted(x: Tensor, scale: float = 1.0) -> Tensor:
    """Whole numbers with the gradient of x: scores of these are exact, and many are equal."""
    return x + ((x * scale).round().clamp(-1, 1) - x).detach()


def run(flags: str, wrong: str = "") -> Run:
    from megatron.context_parallel.core.mixers import sparse_attention
    from megatron.context_parallel.fpdt.sparse import chunked_choice
    from megatron.context_parallel.sparse_attention import choice
    from megatron.context_parallel.sparse_attention.chosen_attention import Indexer
    from megatron.training.model import core_config, optimizer

    keys: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    tied: list[bool] = []
    rotated, among, every = sparse_attention.SparseAttention.rotated, choice.choose_among, sparse_attention.choose_keys
    settings = optimizer.DistributedDataParallelConfig

    def with_ties(self: Any, index: Indexer, angles: Tensor) -> Indexer:
        q, k, weights = rotated(self, index, angles)
        return Indexer(planted(q, 2), planted(k), planted(weights, 30))

    def recorded(*args: Any, spans: Any, **options: Any) -> Tensor:
        chosen = among(*args, spans=spans, **options)
        for position, rows in zip((at for span in spans for at in range(*span)), chosen.tolist(), strict=True):
            keys[position] |= {(sample, *row) for sample, row in enumerate(rows)}
        if not wrong and torch.distributed.get_world_size() == 1 and "--fpdt" not in flags:
            q, k, weights = (x[:, 0].float() for x in args)
            scores = choice._scores(q, weights, k)
            for own, row, at in zip(scores, chosen[:, 0].long(), range(len(q))):
                if at >= len(row):
                    tied.append(int((own[: at + 1] >= own[row].min()).sum()) > len(row))
        return chosen

    def of_own_shard(*args: Any, layout: Any, mask: Any, **options: Any) -> Tensor:
        own = layouts.MaskFunction(lambda _, k: torch.isin(k, layout.positions), layouts.Causal())
        return every(*args, layout=layout, mask=own, **options)

    with (
        mock.patch.object(core_config, "compute_dtype", lambda _: torch.float64),
        mock.patch.object(
            optimizer, "DistributedDataParallelConfig", lambda **x: settings(**x | {"grad_reduce_in_fp32": False})
        ),
        mock.patch.object(sparse_attention.SparseAttention, "rotated", with_ties),
        mock.patch.object(choice, "choose_among", recorded),
        mock.patch.object(chunked_choice, "choose_among", recorded),
        mock.patch.object(sparse_attention, "choose_keys", of_own_shard if wrong == "shard" else every),
    ):
        job = make_job(f"{flags} {WIDE}")
        logits: dict[int, Tensor] = {}
        keep_logits(job, logits)
        with first_gradients(job) as gradients:
            (result,) = take_steps(job)
    losses = [result.lm_loss, result.further["indexer loss"]]
    return Run(losses, {name: grad.clone() for name, grad in gradients.items()}, logits, dict(keys), tied)


def keep_logits(job: Any, logits: dict[int, Tensor]) -> None:
    """Compute the logits of the first micro-batch, by position, from the final norm's results: losses need no whole
    logits."""
    from megatron.certifying.programs.whole_gradients import gather_over_tensor_parallel
    from megatron.context_parallel.layout.documents import samples_of
    from megatron.training.model.weights import sections

    chunk, tensor = job.model_chunks[-1].module, job.runtime.grid.tensor
    if not chunk.post_process:
        return
    table = chunk.output_layer.weight
    whole = gather_over_tensor_parallel(table.detach().clone(), 0, sections(table), tensor)[: job.vocab_size]

    def keep(_: Any, __: Any, hidden: Tensor) -> None:
        if not logits:
            split = job.config.parallel.sequence_parallel
            places = chunk.settings.layout_of(samples_of(chunk._samples)).positions
            places = places.chunk(tensor.size)[tensor.rank] if split else places
            logits.update(zip(places.tolist(), hidden.detach() @ whole.T))

    chunk.decoder.final_layernorm.register_forward_hook(keep)


def difference(results: list[Run], expected: Run) -> dict[str, float]:
    """The largest errors, each relative to the largest entry, and the number of positions with other keys."""
    keys: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    logits: dict[int, Tensor] = {}
    found = {"losses": 0.0}
    for result in results:
        logits |= result.logits
        for position, chosen in result.keys.items():
            keys[position] |= chosen
        for ours, theirs in zip(result.losses, expected.losses):
            found["losses"] = max(found["losses"], abs(ours / theirs - 1))
        for name, grad in result.gradients.items():
            right = expected.gradients[name]
            error = float((grad - right).abs().max() / right.abs().max())
            found[name] = max(found.get(name, 0.0), error)
    assert found.keys() == {"losses", *expected.gradients} and sorted(logits) == sorted(expected.logits)
    mine, right = (torch.stack([run[at] for at in sorted(run)]) for run in (logits, expected.logits))
    return found | {
        "logits": float((mine - right).abs().max() / right.abs().max()),
        "keys": float(
            sum(keys[at] != chosen for at, chosen in expected.keys.items()) + (len(keys) != len(expected.keys))
        ),
    }


# (processes, model, grid)
CASES = [
    (4, f"{SPARSE} {UNEVEN}", f"{SP} {cp(1, 2)}"),
    (4, f"{SPARSE} {PACKED}", f"{cp(2, 2)} {fpdt(24)}"),
]
MORE = [
    *((ulysses * ring, f"{DSA} {UNEVEN}", cp(ulysses, ring))
      for ulysses, ring in ((2, 1), (1, 2), (2, 2), (4, 1), (1, 4))),
    (4, f"{SPARSE} {UNEVEN}", cp(1, 4, "contiguous")),
    (2, f"{SPARSE} {UNEVEN}", T2),
    (2, f"{DSA} {UNEVEN}", SP),
    (4, f"{DSA} {UNEVEN}", f"{T2} {cp(1, 2)}"),
    (4, f"{SPARSE} {UNEVEN}", f"{SP} {cp(2, 1)}"),
    (8, f"{SPARSE} {UNEVEN}", f"{SP} {cp(2, 2)}"),
    (4, SHARED, f"{P2} {cp(1, 2)}"),
    (4, f"{SPARSE} --num-layers 4 {UNEVEN}", f"{P2} {V2} {cp(2, 1)}"),
    (2, SHARED, f"{cp(1, 2)} {FULL}"),
    (2, f"{DSA} {UNEVEN}", f"{cp(2, 1)} {SELECTIVE}"),
    (2, MIXTURE, f"{cp(2, 1)} {ep(2)}"),
    (4, MIXTURE, f"{cp(2, 2)} {ep(2)}"),
    (4, f"{SPARSE} {DOCUMENTS}", cp(1, 4, "documents")),
    (4, f"{SPARSE} {PACKED}", cp(2, 2)),
    (2, f"{WARM_UP} {UNEVEN}", cp(1, 2)),
    (2, f"{SPARSE} --attention-mask window --window-size 20 0", cp(1, 2)),
    (2, f"{SPARSE} {UNEVEN}", f"{cp(2, 1)} {fpdt(16)}"),
    (2, f"{SPARSE} {UNEVEN}", f"{cp(1, 2)} {fpdt(24, FULL, STREAM)}"),
    (4, f"{SPARSE} {UNEVEN}", f"{cp(1, 4)} {fpdt(24, DEVICE)}"),
    (4, f"{SPARSE} {UNEVEN}", f"{SP} {cp(1, 2)} {fpdt(24)}"),
    (4, SHARED, f"{P2} {cp(1, 2)} {fpdt(24, FULL)}"),
    (4, MIXTURE, f"{cp(2, 2)} {ep(2)} {fpdt(16)}"),
    (4, AHEAD, f"{SP} {cp(1, 2)}"),
    (4, AHEAD, f"{P2} {cp(1, 2)} {fpdt(24)}"),
]  # fmt: skip


@pytest.mark.parametrize("world, model, grid", [*CASES, *also_in_full(*MORE)])
def test_equals_one_process(pool, reference, world, model, grid):
    found = difference(pool.run(run, world, f"{model} {grid}", timeout=180), reference(run, model))
    assert found.pop("keys") == 0
    assert max(found.values()) < 1e-10, max(found.items(), key=lambda item: item[1])


def test_a_choice_within_each_shard_fails(pool, reference):
    model = f"{SPARSE} {UNEVEN}"
    found = difference(pool.run(run, 2, f"{model} {cp(1, 2)}", "shard", timeout=180), reference(run, model))
    assert found["keys"] > 20 and found["logits"] > 1e-3


def counted_by_layer(flags: str) -> tuple[dict[int, float], set[str]]:
    """The tokens that the indexer's loss of each layer counts in a step, and the kernels that choose."""
    from megatron.context_parallel.core.mixers import sparse_attention

    counted: dict[int, float] = defaultdict(float)
    kernels, every, note = set(), sparse_attention.choose_keys, sparse_attention.SparseAttention.note

    def seen(self: Any, total: Tensor, of: Tensor) -> None:
        counted[self.layer_number] += float(of.sum())
        note(self, total, of)

    def choose(*args: Any, **options: Any) -> Tensor:
        kernels.add(options["kernel"])
        return every(*args, **options)

    with (
        mock.patch.object(sparse_attention.SparseAttention, "note", seen),
        mock.patch.object(sparse_attention, "choose_keys", choose),
    ):
        train_job(make_job(flags), 1)
    return dict(counted), kernels


def test_a_layer_that_predicts_ahead_counts_the_tokens_of_the_others(pool):
    """As in megatron-core 0.19, whose mask of rows (real_token_mask_q) is the same in all layers, not shifted."""
    counted, kernels = pool.run(counted_by_layer, 1, f"{AHEAD} --attention-kernel math")[0]
    assert set(counted) == {1, 2, 3} and len(set(counted.values())) == 1 and kernels == {"math"}
    assert 0 < counted[1] < 4 * 64  # some tokens are masked


def test_many_scores_are_equal(reference):
    tied = reference(run, f"{SPARSE} {UNEVEN}").tied
    assert sum(tied) > len(tied) / 2
