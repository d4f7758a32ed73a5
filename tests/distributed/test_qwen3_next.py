# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next is converted in both directions; hybrids of transformers over ranks are those of one process."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import megatron.context_parallel as cp
from megatron.context_parallel.huggingface import Fpdt, parallelize
from megatron.training.families.architectures import described
from tests.distributed import test_architectures as architectures
from tests.distributed.test_hugging_face import over_ranks
from tests.errors import worst
from tests.families import small_model
from tests.hugging_face import LENGTH, SIZES, draw_weights, errors, on_one_process, whole_batch
from tests.pairs import also_in_full
from tools.convert_hf import main as convert

HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
CONFIG = architectures.KINDS["qwen3_next"]


@pytest.mark.parametrize("changes", [{}, {"num_experts": 0}], ids=["experts", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_both_directions_keep_every_bit(tmp_path, changes, dtype):
    hf, ours, back = (str(tmp_path / name) for name in ("hf", "ours", "back"))
    architectures.random_model("qwen3_next", CONFIG | changes).to(dtype).save_pretrained(hf)
    assert convert(["--from-hf", hf, "--to", ours]) == 0
    assert convert(["--from", ours, "--to-hf", back]) == 0
    for file in Path(hf).iterdir():
        assert filecmp.cmp(file, Path(back) / file.name, shallow=False), file.name


KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16,
                   "shared_expert_intermediate_size": 16},
    "qwen3_5_text": {"head_dim": 16},
    "olmo_hybrid": {},
}  # fmt: skip
OF_OTHER_RULES = ("kimi_linear", "mamba2", "nemotron_h")
OVER = {"U2": (2, 1), "R2": (1, 2), "U2 x R2": (2, 2)}


def hybrid(kind: str) -> torch.nn.Module:
    torch.manual_seed(3)
    if kind in OF_OTHER_RULES:
        return draw_weights(small_model(kind).eval())
    layers = ["linear_attention", "full_attention", "linear_attention"]
    sizes = SIZES | HEADS | {"num_hidden_layers": 3, "layer_types": layers} | KINDS[kind]
    return draw_weights(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval())


def hybrid_over_ranks(kind: str, ulysses: int, ring: int, mistake: bool = False) -> dict[str, float]:
    from megatron.context_parallel.linear_attention import mixer

    grid, model, batch = cp.initialize_grid(ulysses=ulysses, ring=ring), hybrid(kind), whole_batch(packed=False)
    expected, right = on_one_process(model, batch), mixer.entry_states
    if mistake:
        mixer.entry_states = lambda *args: {name: 0 * state for name, state in right(*args).items()}
    try:
        with parallelize(model, grid, seq_length=LENGTH) as context:
            result = over_ranks(model, batch, context)
    finally:
        mixer.entry_states = right
    return errors(result, expected)


EVERY = [(kind, grid) for kind in (*KINDS, *OF_OTHER_RULES) for grid in OVER]
USUAL = [("qwen3_next", "U2 x R2"), ("qwen3_5_text", "R2"), ("olmo_hybrid", "U2"), ("kimi_linear", "U2 x R2"),
         ("mamba2", "U2 x R2"), ("nemotron_h", "R2")]  # fmt: skip


@pytest.mark.parametrize("kind, grid", [*USUAL, *also_in_full(*(one for one in EVERY if one not in USUAL))])
@pytest.mark.usual(1, 2, 5)
def test_layers_with_a_state_over_ranks(pool, kind, grid):
    results = pool.run(hybrid_over_ranks, OVER[grid][0] * OVER[grid][1], kind, *OVER[grid], timeout=120)
    assert worst(rank.values() for rank in results) < 1e-4, results[0]


@pytest.mark.parametrize("kind", ["qwen3_next", *OF_OTHER_RULES])
def test_without_states_it_is_another_model(pool, kind):
    (result, *_) = pool.run(hybrid_over_ranks, 2, kind, 1, 2, True, timeout=120)
    assert result["logits"] > 1e-2


def packed_documents(kind: str, ulysses: int, ring: int) -> float:
    """The largest difference between logits of packed documents and of each document alone."""
    grid, model, batch = cp.initialize_grid(ulysses=ulysses, ring=ring), hybrid(kind), whole_batch()
    row = {name: x[:1] for name, x in batch.items() if name != "labels"}
    starts = [*torch.nonzero(row["position_ids"][0] == 0).flatten().tolist(), LENGTH]
    with torch.no_grad():
        alone = [model(row["input_ids"][:, a:b], use_cache=False).logits for a, b in zip(starts, starts[1:])]
        with parallelize(model, grid, seq_length=LENGTH) as context:
            part = context.shard(row)
            logits = context.gather(model(**part).logits, part)
    whole = torch.cat(alone, dim=1)
    return float((logits - whole).abs().max() / whole.abs().max())


@pytest.mark.parametrize("kind", ["qwen3_next", *OF_OTHER_RULES])
@pytest.mark.usual(2, 3)
def test_states_end_with_their_document(pool, kind):
    assert max(pool.run(packed_documents, 4, kind, 2, 2, timeout=120)) < 1e-4


def test_mamba2_whose_language_model_passes_on_no_keyword_arguments():
    """Its base model is told how tokens are mixed, in a forward pass with and without labels."""
    model, batch = hybrid("mamba2"), whole_batch(packed=False)
    with torch.no_grad():
        expected = model(batch["input_ids"]).logits
        with parallelize(model, cp.Grid(), seq_length=LENGTH) as context:
            part = context.shard({"input_ids": batch["input_ids"]})
            logits = model(**part).logits
        again = model(batch["input_ids"]).logits
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-5 and torch.equal(again, expected)


def test_fpdt_is_refused():
    with pytest.raises(ValueError, match="Qwen3NextGatedDeltaNet hands on a state, which FPDT does not support"):
        parallelize(hybrid("qwen3_next"), cp.Grid(), seq_length=LENGTH, fpdt=Fpdt(16))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 of qwen3_next is not supported"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers \[1\] of qwen3_next is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob False of qwen3_next is not supported"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types has no layer of the kind linear_attention"),
        ({"layer_types": ["linear_attention"]}, "layer_types must name linear_attention or full_attention for each"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is not a multiple of linear_num_key_heads"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok 1 is not from 2 to num_experts 4"),
    ],
)
def test_a_config_that_is_refused(change, message):
    from megatron.training.refusal import Refusal

    config = AutoConfig.for_model("qwen3_next", **CONFIG).to_dict() | change
    with pytest.raises(Refusal, match=message):
        described(config, "config.json")


def test_a_norm_that_cannot_be_stored_minus_one_is_refused(tmp_path, capsys):
    model = architectures.random_model("qwen3_next", CONFIG | {"num_experts": 0}).to(torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].linear_attn.norm.weight.fill_(0.001)
    model.save_pretrained(tmp_path / "hf")
    assert convert(["--from-hf", str(tmp_path / "hf"), "--to", str(tmp_path / "ours")]) != 0
    assert "cannot be represented exactly in bfloat16: add --dtype fp32" in capsys.readouterr().err
