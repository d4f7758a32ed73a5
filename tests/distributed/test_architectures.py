# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 (dense and with experts), Phi-3, gpt-oss, Nemotron H ...: their logits, losses and gradients here."""

from __future__ import annotations

import io
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.families import architectures
from megatron.training.families.llama import llama_weights
from tests.distributed import test_gpt_oss
from tests.distributed.test_checkpoint import resume, train_and_save
from tests.distributed.test_gemma import described, in_model, ours, theirs
from tests.distributed.training_runs import compare_gradients, run_training
from tests.hugging_face import save_model
from tools.convert_hf import main as convert

WORDS = 301
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": WORDS, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MAMBA = {"hidden_size": 64, "vocab_size": WORDS, "n_groups": 4, "chunk_size": 16, "pad_token_id": None}
GPT = {"vocab_size": WORDS, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
OLMO3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": test_gpt_oss.CONFIG["rope_parameters"] | {"truncate": True},
}
# Many heads of the indexer: a score is seldom exactly 0, where transformers chooses some of the equal keys.
INDEXED = SIZES | {
    "num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "index_topk": 12, "index_head_dim": 16, "index_n_heads": 16, "rms_norm_eps": 1e-6,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v32": INDEXED | {"n_group": 4, "topk_group": 2},
    "glm_moe_dsa": INDEXED
    | {"num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "full"], "rms_norm_eps": 1e-3},
    "qwen3": SIZES | {"head_dim": 16},
    "qwen3_moe": SIZES
    | EXPERTS
    | {"head_dim": 16, "num_hidden_layers": 3, "norm_topk_prob": False, "mlp_only_layers": [1]},
    "phi3": SIZES,
    "gpt_oss": test_gpt_oss.CONFIG,
    "gpt2": GPT | {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64},
    "gpt_neox": SIZES | GPT | {"num_attention_heads": 8, "rotary_pct": 0.5},
    "glm4_moe": SIZES
    | {"num_hidden_layers": 3, "head_dim": 16, "attention_bias": True, "n_routed_experts": 4, "num_mtp_layers": 0}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5},
    "olmo2": SIZES,
    "nemotron_h": MAMBA
    | {"intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    | {"mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 6, "num_experts_per_tok": 2}
    | {"n_routed_experts": 4, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 24}
    | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"]}
    | {"routed_scaling_factor": 1.5, "time_step_min": 0.5},
    "mamba2": MAMBA
    | {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 6}
    | {"time_step_limit": [0.5, float("inf")]},
    "smollm3": SIZES
    | {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 12},
    "ernie4_5": SIZES | {"head_dim": 16, "use_bias": True},
    "granite": SIZES
    | {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 2.5, "attention_multiplier": 0.2}
    | {"tie_word_embeddings": True},
    "exaone4": SIZES | {"num_hidden_layers": 3, "sliding_window": 12, "sliding_window_pattern": 3},
    "olmo3": SIZES
    | {"num_hidden_layers": 3, "sliding_window": 12, "rope_parameters": OLMO3_ROPE}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}
EXPERTS_KINDS = ("qwen3_moe", "gpt_oss", "glm4_moe", "nemotron_h", "deepseek_v32", "glm_moe_dsa")
CP = "--ulysses-parallel-size 2 --ring-parallel-size 2"
T2 = "--tensor-model-parallel-size 2 --sequence-parallel"
GRIDS = {"one process": (1, ""), "TP 2 x U 2 x R 2": (8, f"{T2} {CP}")}
EP = (2, "--ulysses-parallel-size 2 --expert-model-parallel-size 2")
CASES = [(kind, *grid) for kind in KINDS for grid in GRIDS.values()] + [(kind, *EP) for kind in EXPERTS_KINDS]
USUAL_CASES = {("qwen3", 1), ("gpt2", 1), ("gpt_neox", 1), ("phi3", 1), ("gpt_oss", 8), ("glm4_moe", 2),
               ("nemotron_h", 8), ("deepseek_v32", 1), ("glm_moe_dsa", 2)}  # fmt: skip
CASES = [pytest.param(*case, marks=() if case[:2] in USUAL_CASES else pytest.mark.full) for case in CASES]


def converted(kind: str, folder: Path) -> tuple[Path, str]:
    """A random model of transformers, and the printed flags of its conversion."""
    source, out = save_model(folder / "hf", kind, KINDS[kind]), io.StringIO()
    with redirect_stdout(out):
        assert convert(["--from-hf", str(source), "--to", str(folder / "ours")]) == 0
    return source, " ".join(shlex.split(out.getvalue().splitlines()[-1])[1:])


def by_our_names(folder: Path, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of transformers by our names. In memory, but not in files, it has all experts in one tensor."""
    alone = {"embed_out.weight": grads["lm_head.weight"]} if "lm_head.weight" in grads else {}  # GPT-NeoX's name
    grads |= {name.replace("model.", "backbone.", 1): grad for name, grad in grads.items()}  # Nemotron H's name
    for name, grad in grads.items():
        stem, _, kind = name.rpartition(".experts.")
        for number, one in enumerate(grad) if stem else ():
            halves = zip(("gate_proj", "up_proj"), one.chunk(2)) if kind == "gate_up_proj" else [(kind, one)]
            alone |= {f"{stem}.experts.{number}.{part}.weight": half for part, half in halves}
    grads, model, rows = grads | alone, described(folder), {}
    for piece in architectures.pieces(model, ()):
        if piece.wide or ".indexer." in piece.key:  # a bias of experts, and what transformers does not train
            continue
        name = piece.key
        if piece.layer is not None and piece.stacked:
            name = name.replace("layers.", f"layers.{piece.layer}.")
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
@pytest.mark.usual(0, 1, 3, 4, 5)
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


def test_without_the_smallest_time_step_it_is_another_model(pool, tmp_path):
    source, flags = converted("mamba2", tmp_path)
    results = pool.run(ours, 1, f"{flags.replace('--mamba-dt-min 0.5', '')} --make-vocab-size-divisible-by 1")
    expected = theirs(source, results[0]["tokens"], results[0]["labels"])["logits"]
    error = (results[0]["logits"][..., :WORDS] - expected).abs().max() / expected.abs().max()
    assert float(error) > 1e-2


# ---- norms and residuals on every grid

PLACES = {
    "OLMo 2": "--reordered-norm --qk-layernorm-all-heads",
    "GPT-NeoX": "--parallel-residual --rotary-percent 0.5",
}
SMALL = "--num-layers 2 --group-query-attention --num-query-groups 4"
R2, P2 = "--ring-parallel-size 2", "--pipeline-model-parallel-size 2"
RULES = {
    "TP 2 x U 2": (4, f"{T2} --ulysses-parallel-size 2"),
    "TP 2, no sequence parallel": (2, "--tensor-model-parallel-size 2"),
    "TP 4, full recompute": (
        4,
        "--tensor-model-parallel-size 4 --sequence-parallel --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "PP 2 x R 2": (4, f"{P2} {R2}"),
    "ZeRO 3, R 2": (2, f"--zero-stage 3 {R2}"),
    "TP 2, dropout": (2, f"{T2} --hidden-dropout 0.1"),
    "FPDT, TP 2 x R 2": (4, f"{T2} {R2} --fpdt --fpdt-chunk-size 32"),
}
USUAL = {("OLMo 2", "FPDT, TP 2 x R 2"), ("GPT-NeoX", "TP 2, dropout"), ("OLMo 2", "TP 2, no sequence parallel")}


@pytest.mark.parametrize(
    "place, grid",
    [
        pytest.param(place, grid, marks=() if (place, grid) in USUAL else pytest.mark.full)
        for place in PLACES
        for grid in RULES
        if not (place == "GPT-NeoX" and grid.startswith("FPDT"))  # refused
    ],
)
@pytest.mark.usual(0)
def test_norms_and_residuals_do_not_depend_on_the_grid(pool, shared, place, grid):
    world, flags = RULES[grid]
    dropout = "--hidden-dropout 0.1" if "dropout" in flags else ""
    alone = f"{SMALL} {PLACES[place]} {dropout}"
    losses, _, wanted = shared(("places", alone), lambda: pool.run(run_training, 1, alone, True, 3)[0])
    results = pool.run(run_training, world, f"{SMALL} {PLACES[place]} {flags}", True, 3, timeout=120)
    for mine, _, _ in results:
        assert mine == pytest.approx(losses, rel=1e-5)
    compare_gradients([grads for _, _, grads in results], wanted, 1e-5)


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x and dout of 8 heads, and the weight of their norm."""
    generator = torch.Generator().manual_seed(1)
    x, dout = torch.randn(2, 5, 3, 8, 4, generator=generator, dtype=torch.float64)
    return x, dout, torch.rand(32, generator=generator, dtype=torch.float64)


def wide_norm(tensor: int, planted: bool, zero_centered: bool = False) -> dict[str, torch.Tensor]:
    """Result and gradients of a norm over 8 heads in fp64 on one TP group, complete on each rank."""
    from types import SimpleNamespace

    import torch.distributed as dist

    from megatron.context_parallel.core.spec import AllHeadsNorm
    from megatron.context_parallel.layout.grid import Axis

    x, dout, weight = drawn()
    weight = weight - 1 if zero_centered else weight
    config = SimpleNamespace(layernorm_zero_centered_gamma=zero_centered, params_dtype=torch.float64)
    axis = Axis.of(dist.group.WORLD) if tensor > 1 else Axis(1)
    norm = AllHeadsNorm(config, 4, 1e-5, heads=8, tensor=axis)
    if planted:
        norm.tensor = Axis(1)  # the squares of this rank's heads alone
    norm.weight.data.copy_(weight.chunk(tensor)[axis.rank])
    mine = x.chunk(tensor, dim=2)[axis.rank].clone().requires_grad_()
    # A gradient that is not contiguous
    out = norm(mine)
    out.backward(dout.transpose(0, 1).contiguous().transpose(0, 1).chunk(tensor, dim=2)[axis.rank])
    parts = {"out": (out.detach(), 2), "dx": (mine.grad, 2), "dw": (norm.weight.grad, 0)}
    whole = {}
    for name, (part, dim) in parts.items():
        every = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(tensor)]
        if tensor > 1:
            dist.all_gather(every, part.contiguous())
        whole[name] = torch.cat(every, dim) if tensor > 1 else part
    return whole


def test_a_norm_over_all_heads_sums_over_tp(pool):
    x, dout, weight = drawn()
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    out = torch.nn.functional.rms_norm(x.flatten(2), (32,), weight, eps=1e-5).view_as(x)
    dx, dw = torch.autograd.grad(out, leaves, dout)
    expected = {"out": out.detach(), "dx": dx, "dw": dw}
    for tensor, zero_centered in ((1, False), (1, True), (2, True), (4, False)):
        for mine in pool.run(wide_norm, tensor, tensor, False, zero_centered):
            for name, whole in expected.items():
                assert float((mine[name] - whole).abs().max()) < 1e-12
    wrong = pool.run(wide_norm, 2, 2, True)[0]
    assert all(float((wrong[name] - whole).abs().max()) > 1e-2 for name, whole in expected.items())


def test_norms_over_all_heads_are_saved_and_loaded_on_another_grid(pool, tmp_path):
    flags, folder = f"{SMALL} {PLACES['OLMo 2']}", str(tmp_path)
    before, after = pool.run(train_and_save, 4, f"{flags} {T2} {R2}", folder, 2, 2, timeout=120)[0]
    first, resumed = pool.run(resume, 1, flags, folder, 2, timeout=120)[0]
    assert first == 2 and resumed == pytest.approx(after, rel=1e-5) and before[0] != after[0]
