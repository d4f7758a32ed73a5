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
        taught.append(apart.masked_fill(~seen, 0).sum(-1).mean())

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


def compare_padded(ulysses: int, ring: int) -> tuple[float, float, float]:
    """The error with padding; that of the mean against samples without it; and the error of a mean of ranks' means."""
    grid, batch, lengths = cp.initialize_grid(ulysses=ulysses, ring=ring), whole_batch(packed=False), (31, 9)
    kept = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    batch |= {"attention_mask": kept.long(), "labels": batch["labels"].masked_fill(~kept, -100)}
    expected, mean = over_ranks("deepseek_v32", cp.Grid(), batch, torch.float64)
    result, ours = over_ranks("deepseek_v32", grid, batch, torch.float64)
    alone = 0.0
    for sample, length in enumerate(lengths):
        model = tiny_model("deepseek_v32", torch.float64, num_hidden_layers=3, mlp_layer_types=["dense"] * 3)
        tokens = batch["input_ids"][sample : sample + 1, :length]
        with parallelize(model, cp.Grid(), seq_length=length, indexer_loss=FACTOR) as context:
            model(**context.shard({"input_ids": tokens, "labels": tokens}))
            alone += float(context.indexer_loss) * length / sum(lengths)

    def mean_of_rank(lessons: list[Tensor], part) -> Tensor:
        return sum(lessons)[part.layout.positions < torch.tensor(part.lengths)[:, None]].mean() / ring

    with mock.patch.object(parallel, "_mean_of_lessons", mean_of_rank):
        wrong, _ = over_ranks("deepseek_v32", grid, batch, torch.float64)
    for outcome in (result, expected, wrong):
        outcome.logits = torch.ones(1)
    same = worst([*errors(result, expected).values(), abs(float(ours - mean))])
    return same, abs(alone - float(ours)), worst(errors(wrong, expected).values())


def test_padding_does_not_count_and_a_mean_of_the_means_of_ranks_fails(pool):
    for same, alone, wrong in pool.run(compare_padded, 2, 1, 2):
        assert same < 1e-10 and alone < 1e-10 and wrong > 1e-3


def test_refusals():
    batch = whole_batch(packed=False)
    for kind, factor in (("llama", 1.0), ("deepseek_v32", -1.0), ("minimax_m3_vl_text", 1.0)):
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
        with pytest.raises(ValueError, match="log_probs with indexer_loss trains no indexer"):
            context.log_probs(batch)
        with pytest.raises(ValueError, match="use_reentrant=True: use False"):
            model(**context.shard(batch))
        model.gradient_checkpointing_disable()
        for layer in model.model.layers:
            layer.self_attn.indexer.requires_grad_(False)
        with pytest.raises(ValueError, match="no indexer has a parameter that is trained"):
            model(**context.shard(batch))
