# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention: losses and all gradients do not depend on the grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.flags import P2, SELECTIVE, SP, T2, cp, fpdt
from tests.distributed.training_runs import compare_runs, make_job, train_job

SIZES = "--kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"
TWO = "--num-layers 2 --multi-latent-attention --norm-epsilon 1e-6 --init-method-std 0.1"
MLA = f"{TWO} --q-lora-rank 24 {SIZES} --qk-layernorm"
YARN = f"{MLA} --rotary-scaling-factor 4 --mscale 0.7 --mscale-all-dim 1.0 --yarn-original-max-position-embeddings 16"
PLAIN = f"{TWO} {SIZES}"  # queries from the hidden states, latents without norms
DROPOUT = f"{MLA} --hidden-dropout 0.1 --attention-dropout 0.1"
DOCUMENTS = f"{YARN} --attention-mask document --reset-position-ids --micro-batch-size 1 --global-batch-size 2"
WINDOW = f"{MLA} --attention-mask window --window-size 9 0"
EXPERTS = (
    f"{MLA} --num-experts 8 --moe-ffn-hidden-size 48 --moe-layer-freq [0]+[1] --moe-router-score-function sigmoid "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-router-topk 4 "
    "--moe-router-enable-expert-bias --moe-router-dtype fp32 --moe-shared-expert-intermediate-size 48"
)

SENT = "--latent-exchange latents"
FPDT = fpdt(16)

# (processes, model, grid)
CASES = [
    (4, MLA, f"{SP} {cp(1, 2)} --zero-stage 1"),
    (2, YARN, f"{cp(1, 2)} --zero-stage 3"),
    (2, DROPOUT, f"{T2} {FPDT}"),
    (2, DOCUMENTS, "--ring-parallel-size 2"),
    (4, EXPERTS, f"{SP} {cp(1, 2)} --expert-model-parallel-size 2"),
    (4, WINDOW, f"{P2} {cp(1, 2)} {SENT} --cp-comm-type all_gather"),
    (4, EXPERTS, f"{cp(2, 2)} {SENT} --expert-model-parallel-size 4"),
    (2, PLAIN, f"{cp(1, 2)} {SELECTIVE} --zero-stage 2 --cp-comm-type all_gather"),
]


def run(flags: str, mistake: Any = None) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and gradient norms of two steps, and the gradients of the first."""
    job = make_job(flags)
    undo = mistake(job) if mistake is not None else None
    try:
        return train_job(job, 2)
    finally:
        if undo is not None:
            undo()


def attentions(job: Any) -> list[Any]:
    return [layer.self_attention for chunk in job.model_chunks for layer in chunk.module.decoder.layers]


def own_positions(job: Any) -> None:
    """A mistake: each rank's positions begin at 0."""
    from megatron.context_parallel.positions.rope import rotary_angles

    rotary, length = attentions(job)[0].core_attention.settings.rotary, len(job.runtime.layout.positions)
    rotary._known = (), rotary_angles(torch.arange(length)[:, None], rotary.inv_freq)[:, :, None]


def as_core_sums(job: Any) -> None:
    """A mistake: core sums the gradient of the queries' norm over TP, although it is complete on each rank."""
    attentions(job)[0].config.qk_layernorm = True


def own_heads(job: Any) -> Callable[[], None]:
    """A mistake: the rotated part of a key has the gradient of this TP rank's heads alone, as in core without SP."""
    from megatron.context_parallel.core.mixers import latent_attention

    right = latent_attention.copy_to_tensor_model_parallel_region
    latent_attention.copy_to_tensor_model_parallel_region = lambda x, group: x
    return lambda: setattr(latent_attention, right.__name__, right)


def first_block_alone(job: Any) -> Callable[[], None]:
    """A mistake: received latents do not add to the gradient of the up-projection."""
    from megatron.context_parallel.attention.latent_blocks import LatentSource

    right = LatentSource._add_grads

    def wrong(source: LatentSource, *block: Any) -> None:
        before = None if source._up_sum is None else source._up_sum.clone()
        right(source, *block)
        source._up_sum = source._up_sum if before is None else before

    LatentSource._add_grads = wrong
    return lambda: setattr(LatentSource, "_add_grads", right)


@pytest.mark.parametrize("world, model, grid", CASES)
@pytest.mark.usual(0, 2, 5, 6, 7)
def test_latents_do_not_depend_on_the_grid(pool, reference, world, model, grid):
    compare_runs(pool.run(run, world, f"{model} {grid}", timeout=180), reference(run, model))


def over_a_group(sequence_parallel: bool) -> None:
    """The parts of a latent, its entries or its tokens, where the group is not TP's."""
    from types import SimpleNamespace

    from megatron.context_parallel import initialize_grid
    from megatron.context_parallel.core.mixers.latent_attention import LatentAttention
    from megatron.platform.cpu import run_core_on_cpu

    run_core_on_cpu()
    group = initialize_grid(ring=2).context.group
    layer = SimpleNamespace(
        pg_collection=SimpleNamespace(tp=group), config=SimpleNamespace(sequence_parallel=sequence_parallel)
    )
    whole = torch.arange(24.0).view(4, 1, 6).requires_grad_()
    entries, tokens = (whole.detach().chunk(2, dim)[group.rank()] for dim in (2, 0))
    assert torch.equal(LatentAttention._whole(layer, entries.contiguous()), whole)
    own = LatentAttention._own_tokens(layer, whole)
    assert torch.equal(own, tokens if sequence_parallel else whole)
    (LatentAttention._all_tokens(layer, own) * (1 + group.rank())).sum().backward()
    assert whole.grad.eq(3).all()  # of both ranks


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_layers_group_is_used(pool, sequence_parallel):
    pool.run(over_a_group, 2, sequence_parallel)


def ring_bytes(flags: str) -> int:
    """Bytes that this rank sends over the ring in the forward pass of the first layer's attention."""
    sent, batch = [], dist.batch_isend_irecv

    def count(operations: list[dist.P2POp]) -> Any:
        sent.extend(one.tensor.nbytes for one in operations if one.op is dist.isend)
        return batch(operations)

    attention = attentions(make_job(flags))[0]
    dist.batch_isend_irecv = count
    try:
        with torch.no_grad():
            attention(torch.randn(16, 2, 64), None)
    finally:
        dist.batch_isend_irecv = batch
    return sum(sent)


def test_what_the_ring_sends(pool):
    """Contiguous on Ring 4: six times 16 tokens of 2 samples, in fp32; 8 heads of 24 and 16, or latents of 32 + 8."""
    for exchange, numbers in (("keys", 8 * 40), ("latents", 40)):
        flags = f"{MLA} {cp(1, 4)} --context-parallel-balance contiguous --latent-exchange {exchange}"
        assert sum(pool.run(ring_bytes, 4, flags, timeout=120)) == 6 * 16 * 2 * 4 * numbers
