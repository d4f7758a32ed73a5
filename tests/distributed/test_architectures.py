# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 (dense and with experts), Phi-3 and gpt-oss are the models of transformers: logits, loss, gradients."""

from __future__ import annotations

import io
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.families import architectures, llama_weights
from tests.distributed import test_gpt_oss
from tests.distributed.test_gemma import described, in_model, ours, theirs
from tests.distributed.training_runs import compare_gradients
from tests.hugging_face import save_model
from tools.convert_hf import main as convert

WORDS = 301
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": WORDS, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
GPT = {"vocab_size": WORDS, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
OLMO3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": test_gpt_oss.CONFIG["rope_parameters"] | {"truncate": True},
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": SIZES | {"head_dim": 16},
    "qwen3_moe": SIZES | EXPERTS | {"head_dim": 16},
    "phi3": SIZES,
    "gpt_oss": test_gpt_oss.CONFIG,
    "gpt2": GPT | {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64},
    "gpt_neox": SIZES | GPT | {"num_attention_heads": 8, "rotary_pct": 0.5},
    "glm4_moe": SIZES
    | {"num_hidden_layers": 3, "head_dim": 16, "attention_bias": True, "n_routed_experts": 4, "num_mtp_layers": 0}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5},
    "olmo2": SIZES,
    "olmo3": SIZES
    | {"num_hidden_layers": 3, "sliding_window": 12, "rope_parameters": OLMO3_ROPE}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}
EXPERTS_KINDS = ("qwen3_moe", "gpt_oss", "glm4_moe")
CP = "--ulysses-parallel-size 2 --ring-parallel-size 2"
T2 = "--tensor-model-parallel-size 2 --sequence-parallel"
GRIDS = {"one process": (1, ""), "TP 2 x U 2 x R 2": (8, f"{T2} {CP}")}
CASES = [(kind, *grid) for kind in KINDS for grid in GRIDS.values()]
CASES += [(kind, 2, "--ulysses-parallel-size 2 --expert-model-parallel-size 2") for kind in EXPERTS_KINDS]


def converted(kind: str, folder: Path) -> tuple[Path, str]:
    """A random model of transformers, and the printed flags of its conversion."""
    source, out = save_model(folder / "hf", kind, KINDS[kind]), io.StringIO()
    with redirect_stdout(out):
        assert convert(["--from-hf", str(source), "--to", str(folder / "ours")]) == 0
    return source, " ".join(shlex.split(out.getvalue().splitlines()[-1])[1:])


def by_our_names(folder: Path, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of transformers by our names. In memory, but not in files, it has all experts in one tensor."""
    alone = {"embed_out.weight": grads["lm_head.weight"]} if "lm_head.weight" in grads else {}  # GPT-NeoX's name
    for name, grad in grads.items():
        stem, _, kind = name.rpartition(".experts.")
        for number, one in enumerate(grad) if stem else ():
            halves = zip(("gate_proj", "up_proj"), one.chunk(2)) if kind == "gate_up_proj" else [(kind, one)]
            alone |= {f"{stem}.experts.{number}.{part}.weight": half for part, half in halves}
    grads, model, rows = grads | alone, described(folder), {}
    for piece in architectures.pieces(model, ()):
        if piece.wide:  # a bias of experts, which gradients do not train
            continue
        name = piece.key.replace("layers.", f"layers.{piece.layer}.") if piece.layer is not None else piece.key
        if piece.expert is not None:
            name = name.replace("experts.experts", f"experts.local_experts.{piece.expert}")
        part = llama_weights.fuse(piece, [grads[one] for one in piece.names], model.settings.num_query_groups)
        if "experts.experts" in name:  # of all experts
            for number, one in enumerate(part):
                rows[name.replace("experts.experts", f"experts.local_experts.{number}")] = [one]
            continue
        rows.setdefault(in_model(name), []).append(part)
    return {name: torch.cat(parts) for name, parts in rows.items()}


@pytest.mark.parametrize("kind, world, grid", CASES)
def test_it_is_the_model_of_transformers(pool, tmp_path, kind, world, grid):
    source, flags = converted(kind, tmp_path)
    whole_experts = "--expert-tensor-parallel-size 1" if kind in EXPERTS_KINDS and "tensor" in grid else ""
    own = f"{flags} --make-vocab-size-divisible-by 1 {grid} {whole_experts}"
    results = pool.run(ours, world, own, timeout=120)
    expected = theirs(source, results[0]["tokens"], results[0]["labels"])
    wanted = by_our_names(source, expected["grads"])
    for mine in results:
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        error = (mine["logits"][..., :WORDS] - expected["logits"]).abs().max() / expected["logits"].abs().max()
        assert float(error) < 1e-4
    compare_gradients([mine["grads"] for mine in results], wanted, 1e-4, padded=True)


def test_queries_in_another_order_are_another_model(pool, tmp_path):
    """A control: Phi-3's rows of q, k and v taken as if they were ours."""
    source, flags = converted("phi3", tmp_path)
    results = pool.run(ours, 1, f"{flags} --make-vocab-size-divisible-by 1", timeout=120)
    model = described(source)
    piece = next(piece for piece in architectures.pieces(model, ()) if piece.joined)
    grads = theirs(source, results[0]["tokens"], results[0]["labels"])["grads"][piece.names[0]]
    mine = results[0]["grads"][in_model(piece.key.replace("layers.", "layers.0."))]
    assert torch.allclose(mine, llama_weights.fuse(piece, [grads], 4), atol=1e-4 * float(grads.abs().max()))
    assert float((mine - grads).abs().max()) > 0.1 * float(grads.abs().max())
