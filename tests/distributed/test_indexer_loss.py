# SPDX-License-Identifier: Apache-2.0
"""Indexers of transformers' models that learn over ranks: the loss and every gradient against transformers' parts."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import megatron.context_parallel as cp
from megatron.context_parallel.huggingface import Fpdt, parallel, parallelize
from tests.errors import worst
from tests.hugging_face import LENGTH, Outcome, averaged, errors, take_grads, tiny_model, whole_batch
from tests.pairs import also_in_full

FACTOR = 0.7


class Scores(TorchFunctionMode):
    """Keeps what ``topk`` chooses from."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.topk:
            self.taken = args[0]
        return function(*args, **(kwargs or {}))


def with_loss(model, batch) -> tuple[Outcome, Tensor]:
    """The results of transformers on one process, and the mean of the indexers' losses by their formula."""
    counted = F.pad(batch["labels"][:, 1:], (0, 1), value=-100).ne(-100)
    taught: list[Tensor] = []

    def teach(module, args, kwargs, output) -> None:
        hidden, target = kwargs["hidden_states"].detach(), output[1].mean(1).detach()
        resid = module.q_a_layernorm(module.q_a_proj(hidden)).detach()
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(len(hidden), -1, -1)
        with Scores() as scores:
            forward = type(module.indexer).forward.__wrapped__.__wrapped__
            chosen = forward(module.indexer, hidden, resid, kwargs["position_embeddings"], causal, None)
        seen = torch.zeros_like(causal).scatter(-1, chosen.long(), True) & causal
        found = scores.taken.masked_fill(~seen, float("-inf")).log_softmax(-1)
        apart = torch.special.xlogy(target, target) - target * found
        taught.append(apart.masked_fill(~seen, 0).sum(-1)[counted].sum() / counted.sum())

    modules = [layer.self_attn for layer in model.model.layers if layer.self_attn.indexer is not None]
    hooks = [module.register_forward_hook(teach, with_kwargs=True) for module in modules]
    logits = model(input_ids=batch["input_ids"], output_attentions=True, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    loss = loss + FACTOR * sum(taught)
    loss.backward()
    return Outcome(logits.detach(), loss.detach(), take_grads(model)), sum(taught).detach()


def over_ranks(kind, grid, batch, dtype=torch.float32, checkpointing=False) -> tuple[Outcome, Tensor]:
    dense = {"mlp_layer_types": ["dense"] * 3} if dtype == torch.float64 else {}  # routers compute in fp32
    model = tiny_model(kind, dtype, num_hidden_layers=3, **dense)
    if checkpointing:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    with parallelize(model, grid, seq_length=LENGTH, indexer_loss=FACTOR) as context:
        loss = model(**context.shard(batch)).loss
        loss.backward()
        grads = averaged(take_grads(model), context.grid.context.group)
        return Outcome(torch.zeros(1), loss.detach(), grads), context.indexer_loss


def compare(kind: str, ulysses: int, ring: int) -> dict[str, float]:
    grid, batch = cp.initialize_grid(ulysses=ulysses, ring=ring), whole_batch(packed=False)
    expected, mean = with_loss(tiny_model(kind, num_hidden_layers=3), batch)
    result, ours = over_ranks(kind, grid, batch)
    result.logits = expected.logits
    return errors(result, expected) | {"mean": float((ours - mean).abs() / mean)}


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.usual(0)
def test_against_transformers(pool, kind):
    assert worst(rank.values() for rank in pool.run(compare, 2, kind, 1, 2)) < 1e-5


def compare_in_fp64(kind: str, ulysses: int, ring: int, packed: bool, checkpointing: bool) -> dict[str, float]:
    grid, batch = cp.initialize_grid(ulysses=ulysses, ring=ring), whole_batch(packed=packed)
    expected, mean = over_ranks(kind, cp.Grid(), batch, torch.float64)
    assert any("indexer" in name for name in expected.grads) and mean > 1e-2
    result, ours = over_ranks(kind, grid, batch, torch.float64, checkpointing)
    result.logits = expected.logits = torch.ones(1)
    return errors(result, expected) | {"mean": float((ours - mean).abs() / mean)}


CASES = [(kind, *grid, packed, checkpointing) for kind in ("deepseek_v32", "glm_moe_dsa")
         for grid in ((2, 1), (1, 2), (2, 2), (1, 4), (4, 1)) for packed in (False, True)
         for checkpointing in (False, True)]  # fmt: skip


@pytest.mark.parametrize("kind, ulysses, ring, packed, checkpointing", [CASES[11], *also_in_full(*CASES)])
def test_grids_in_fp64(pool, kind, ulysses, ring, packed, checkpointing):
    result = pool.run(compare_in_fp64, ulysses * ring, kind, ulysses, ring, packed, checkpointing)
    assert worst(rank.values() for rank in result) < 1e-10, result[0]


def compare_wrong(ulysses: int, ring: int) -> float:
    """The error if every rank takes the mean over its own tokens, and the mean of these is the loss."""
    grid, batch = cp.initialize_grid(ulysses=ulysses, ring=ring), whole_batch(packed=False)
    batch["labels"][:, :40] = -100  # mostly tokens of the second half count
    batch["labels"][:, 4] = 7
    expected, _ = over_ranks("deepseek_v32", cp.Grid(), batch, torch.float64)
    count = batch["labels"][:, 1:].ne(-100).sum()

    def wrong(losses: list[Tensor], targets: Tensor) -> Tensor:
        return sum(loss[targets.ne(-100)].mean() for loss in losses) * count / grid.context.size

    with mock.patch.object(parallel, "_sum_of_lessons", wrong):
        result, _ = over_ranks("deepseek_v32", grid, batch, torch.float64)
    return worst(errors(result, expected).values())


def test_mean_of_the_means_of_ranks_fails(pool):
    assert min(pool.run(compare_wrong, 2, 1, 2)) > 1e-3


def test_refusals():
    batch = whole_batch(packed=False)
    for kind, factor in (("llama", 1.0), ("deepseek_v32", -1.0)):
        with pytest.raises(ValueError, match="above 0, and a model whose layers choose keys"):
            parallelize(tiny_model(kind), cp.Grid(), seq_length=LENGTH, indexer_loss=factor)
    for kind, options, why in (
        ("glm_moe_dsa", {}, "GlmMoeDsaAttention hands on its choice of keys, which FPDT does not support"),
        (
            "deepseek_v32",
            {"indexer_loss": 1.0},
            "learns from indexer_loss, which FPDT does not support",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            parallelize(tiny_model(kind), cp.Grid(), seq_length=LENGTH, fpdt=Fpdt(16), **options)
    model = tiny_model("deepseek_v32").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with parallelize(model, cp.Grid(), seq_length=LENGTH, indexer_loss=1.0) as context:
        model.enable_input_require_grads()
        with pytest.raises(ValueError, match="use_reentrant=True: use False"):
            model(**context.shard(batch))
        model.gradient_checkpointing_disable()
        for layer in model.model.layers:
            layer.self_attn.indexer.requires_grad_(False)
        with pytest.raises(ValueError, match="no indexer has a parameter that is trained"):
            model(**context.shard(batch))
