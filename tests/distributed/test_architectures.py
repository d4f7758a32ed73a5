# SPDX-License-Identifier: Apache-2.0
"""Each family of transformers: its logits, loss and gradients here, on one process and on grids.

The steps are a user's: save_pretrained, tools/convert_hf.py, the printed flags.
"""

from __future__ import annotations

import io
import shlex
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatron.training.families import architectures
from megatron.training.families.llama import llama_settings, llama_weights
from tests.distributed.flags import A2A, ETP1, FULL, P2, R2, SP, T2, U2, ep, fpdt
from tests.distributed.pool import RankError
from tests.distributed.training_runs import (
    compare_gradients,
    compare_runs,
    make_job,
    resume,
    run_training,
    train_and_save,
    train_job,
)
from tests.hugging_face import draw_weights
from tests.pairs import also_in_full
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
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
OLMO3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
}
GEMMA = SIZES | {
    "num_hidden_layers": 3, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 12,
    "tie_word_embeddings": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
GEMMA3_ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
               "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0}}  # fmt: skip
LATENTS = SIZES | {
    "num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "rms_norm_eps": 1e-6,
}  # fmt: skip
DEEPSEEK = LATENTS | {
    "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2,
    "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2, "beta_fast": 32, "beta_slow": 1},
}  # fmt: skip
# Many heads of the indexer: a score is seldom exactly 0, where transformers chooses some of the equal keys.
INDEXED = LATENTS | {"index_topk": 12, "index_head_dim": 16, "index_n_heads": 16}
FAR = SIZES | {"head_dim": 32, "max_position_embeddings": 16384}
# By model_type; what follows a comma tells variants apart.
KINDS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"num_key_value_heads": 2},
    "llama, llama3": FAR | {"rope_parameters": LLAMA3},
    "llama, yarn": FAR | {"rope_parameters": YARN},
    "llama, yarn with mscale": FAR
    | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.2, "truncate": False}},
    "llama, yarn without a factor": FAR | {"rope_parameters": YARN | {"attention_factor": 1.0}},
    "llama, linear and MQA": SIZES
    | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, "num_key_value_heads": 1},
    "llama, tied": SIZES | {"tie_word_embeddings": True, "num_key_value_heads": 8},
    "llama, biases": SIZES | {"attention_bias": True, "mlp_bias": True},
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, dense": DEEPSEEK | {"first_k_dense_replace": 2},
    "deepseek_v2": DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    "deepseek_v32": INDEXED | {"n_group": 4, "topk_group": 2},
    "glm_moe_dsa": INDEXED
    | {"num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "full"], "rms_norm_eps": 1e-3},
    "gemma2": GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": GEMMA | {"rope_parameters": GEMMA3_ROPE},
    "qwen3": SIZES | {"head_dim": 16},
    "qwen3_moe": SIZES
    | EXPERTS
    | {"head_dim": 16, "num_hidden_layers": 3, "norm_topk_prob": False, "mlp_only_layers": [1]},
    "qwen3_next": SIZES
    | {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 24}
    | {"rms_norm_eps": 1e-6},
    "phi3": SIZES,
    "gpt_oss": SIZES
    | {"intermediate_size": 32, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12}
    | {"layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 0.7}  # so low that it matters
    | {"rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
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
EXPERTS_KINDS = ("qwen3_moe", "qwen3_next", "gpt_oss", "glm4_moe", "nemotron_h", "deepseek_v3", "deepseek_v2",
                 "deepseek_v32", "glm_moe_dsa", "mixtral")  # fmt: skip
ONE, TP_CP, EP2 = "one process", "TP 2 x U 2 x R 2", "EP 2 x U 2"
GRIDS = {ONE: (1, ""), TP_CP: (8, f"{SP} {U2} {R2}"), EP2: (2, f"{U2} {ep(2)} {A2A}")}
MORE = {  # grids of single kinds
    "R 2, FPDT": (2, f"{R2} {fpdt(32)}"),
    "PP 2, uneven": (2, f"{P2} --decoder-first-pipeline-num-layers 1 --loss-chunks 3"),
    "PP 2": (2, P2),
    "TP 2": (2, T2),
    "U 2, FPDT": (2, f"{U2} {fpdt(22)}"),
    "U 2 x R 2, contiguous": (4, f"{U2} {R2} --context-parallel-balance contiguous"),
    "TP 2 x EP 2, experts over TP": (4, f"{SP} {ep(2)} {A2A}"),
    "TP 2 x R 2, experts over TP": (4, f"{SP} {R2}"),
    "TP 2 x R 2, experts over TP, FPDT": (4, f"{SP} {R2} {fpdt(32)}"),
    "TP 2 x EP 2 x R 2": (4, f"{SP} {ETP1} {ep(2)} {R2}"),
    "TP 2 x EP 2 x R 2, PP 2": (8, f"{SP} {ETP1} {ep(2)} {R2} {P2}"),
    "TP 2 x EP 2 x CP 4": (8, f"{SP} {ep(2)} {U2} {R2}"),
    "EP 4": (4, f"{U2} {R2} {ep(4)} {A2A}"),
}
USUAL = [
    ("llama", ONE), ("llama", "U 2 x R 2, contiguous"), ("llama, llama3", ONE), ("llama, yarn", "U 2, FPDT"),
    ("llama, yarn with mscale", ONE), ("llama, yarn without a factor", ONE), ("llama, linear and MQA", ONE),
    ("llama, tied", "TP 2"), ("llama, biases", "TP 2"), ("gemma2", "PP 2, uneven"), ("gemma3_text", ONE),
    ("gemma3_text", "R 2, FPDT"), ("qwen3", ONE), ("gpt2", ONE), ("gpt_neox", ONE), ("phi3", ONE), ("gpt_oss", ONE),
    ("gpt_oss", EP2), ("gpt_oss", "TP 2 x EP 2, experts over TP"), ("gpt_oss", "TP 2 x R 2, experts over TP, FPDT"),
    ("glm4_moe", EP2), ("qwen3_next", ONE), ("nemotron_h", TP_CP), ("glm_moe_dsa", EP2),
]  # fmt: skip
LAB = [
    ("llama", TP_CP), ("gemma2", TP_CP), ("gpt_oss", TP_CP), ("gpt_oss", "TP 2 x EP 2 x R 2, PP 2"),
    ("deepseek_v32", ONE), ("qwen3_next", "TP 2 x EP 2 x R 2"), ("mixtral", ONE), ("mixtral", "EP 4"),
    ("mixtral", "TP 2 x R 2, experts over TP"), ("deepseek_v3", ONE), ("deepseek_v3", "TP 2 x EP 2 x CP 4"),
]  # fmt: skip
OF_FULL = [
    *((kind, grid) for kind in KINDS for grid in (ONE, TP_CP)), *((kind, EP2) for kind in EXPERTS_KINDS),
    ("gemma2", "R 2, FPDT"), ("gemma3_text", "PP 2, uneven"), ("deepseek_v2", "TP 2 x EP 2 x CP 4"),
]  # fmt: skip
CASES = [
    *USUAL,
    *(pytest.param(*case, marks=pytest.mark.lab) for case in LAB),
    *also_in_full(*(case for case in OF_FULL if case not in USUAL + LAB)),
]


def random_model(kind: str, sizes: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind.partition(",")[0], **sizes)
    model = draw_weights(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())
    if kind == "qwen3_next":  # its norms add 1 to their weights, except for those of linear attention
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm.weight" in name and "linear_attn" not in name:
                    parameter.sub_(1)
    return model


def converted(kind: str, folder: Path) -> tuple[Path, str]:
    """A random model of transformers, and the printed flags of its conversion."""
    source, out = folder / "hf", io.StringIO()
    random_model(kind, KINDS[kind]).save_pretrained(source, max_shard_size="100KB")
    with redirect_stdout(out):
        assert convert(["--from-hf", str(source), "--to", str(folder / "ours")]) == 0
    flags = " ".join(shlex.split(out.getvalue().splitlines()[-1])[1:])
    return source, f"{flags} --make-vocab-size-divisible-by 1"


def ours(flags: str) -> dict[str, Any]:
    """Logits [b, s, vocabulary] of the first batch on all ranks, the first loss, the norm and the gradients."""
    from megatron.platform.collectives import gathered

    job = make_job(flags, llama=False)
    grid, layout, sets = job.runtime.grid, job.runtime.layout, job.datasets[0]
    whole = [sets[index] for index in range(job.config.data.global_batch_size)]
    tokens, labels = (torch.stack([torch.as_tensor(one[name]) for one in whole]) for name in ("tokens", "labels"))
    logits = None
    if grid.pipeline.size == 1:
        local = [layout.shard(x, dim=1) for x in (tokens, torch.arange(tokens.size(1)).expand_as(tokens))]
        with torch.no_grad():
            mine = job.model_chunks[0].module.eval()(*local, None)
        job.model_chunks[0].module.train()
        mine = mine.permute(2, 0, 1).contiguous()  # [vocabulary / TP, b, s_local]
        if grid.tensor.size > 1:
            mine = gathered(mine, grid.tensor.group)
        logits = layout.gather(mine, dim=2).permute(1, 2, 0)
    losses, norms, grads = train_job(job, 1)
    return {"loss": losses[0], "norm": norms[0], "grads": grads, "logits": logits, "tokens": tokens, "labels": labels}


def theirs(folder: Path, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return {"loss": loss.item(), "logits": logits.detach(), "grads": {n: p.grad for n, p in model.named_parameters()}}


# In the layers the norms have their own names; in checkpoints those of Transformer Engine's fused layers, and hybrids
# have core's names.
NAMES = {
    "linear_q_up_proj.layer_norm_": "q_layernorm.",
    "linear_kv_up_proj.layer_norm_": "kv_layernorm.",
    "mixer.in_proj.layer_norm_": "input_layernorm.",
    "mixer.": "self_attention.",
    "final_norm.": "final_layernorm.",
    "self_attention.in_proj.layer_norm_": "input_layernorm.",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def in_model(name: str) -> str:
    for saved, own in NAMES.items():
        name = name.replace(saved, own)
    return name


def described(folder: Path) -> architectures.Described:
    return architectures.described(llama_settings.read_config(folder / "config.json"), folder)


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
    for there, here in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"), ("mlp.", "block_sparse_moe.")):
        grads |= {name.replace(there, here): grad for name, grad in grads.items()}  # Mixtral's names
    for piece in architectures.pieces(model, ()):
        if piece.wide or ".indexer." in piece.key:  # a bias of experts, and what transformers does not train
            continue
        name = piece.key
        if piece.layer is not None and piece.stacked:
            name = name.replace("layers.", f"layers.{piece.layer}.")
        if piece.expert is not None:
            name = name.replace("experts.experts", f"experts.local_experts.{piece.expert}")
        part = [grads[one] for one in piece.names]
        part = llama_weights.fuse(replace(piece, minus_one=False), part, model.settings.num_query_groups)
        if "experts.experts" in name:  # of all experts
            for number, one in enumerate(part):
                rows[name.replace("experts.experts", f"experts.local_experts.{number}")] = [one]
            continue
        rows.setdefault(in_model(name), []).append(part)
    return {name: torch.cat(parts) for name, parts in rows.items()}


@pytest.mark.parametrize("kind, grid", CASES)
def test_it_is_the_model_of_transformers(pool, tmp_path, kind, grid):
    source, flags = converted(kind, tmp_path)
    world, words = (GRIDS | MORE)[grid]
    whole_experts = ETP1 if grid == TP_CP and kind in EXPERTS_KINDS else ""
    results = pool.run(ours, world, f"{flags} {words} {whole_experts}", timeout=120)
    expected = theirs(source, results[0]["tokens"], results[0]["labels"])
    wanted = by_our_names(source, expected["grads"])
    norm = sum(float(grad.double().square().sum()) for grad in wanted.values()) ** 0.5
    for mine in results:
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        # Linear attention's gates add up what cancels, so its gradients err more.
        assert mine["norm"] == pytest.approx(norm, rel=1e-4 if kind == "qwen3_next" else 1e-5)
        if mine["logits"] is not None:
            error = (mine["logits"][..., :WORDS] - expected["logits"]).abs().max() / expected["logits"].abs().max()
            assert float(error) < 1e-4
    compare_gradients([mine["grads"] for mine in results], wanted, 1e-4, padded=True)


def test_queries_in_another_order_are_another_model(pool, tmp_path):
    """A control: Phi-3's rows of q, k and v taken as if they were ours."""
    source, flags = converted("phi3", tmp_path)
    results = pool.run(ours, 1, flags, timeout=120)
    model = described(source)
    piece = next(piece for piece in architectures.pieces(model, ()) if piece.joined)
    grads = theirs(source, results[0]["tokens"], results[0]["labels"])["grads"][piece.names[0]]
    mine = results[0]["grads"][in_model(piece.key.replace("layers.", "layers.0."))]
    assert torch.allclose(mine, llama_weights.fuse(piece, [grads], 4), atol=1e-4 * float(grads.abs().max()))
    assert float((mine - grads).abs().max()) > 0.1 * float(grads.abs().max())


def test_without_the_smallest_time_step_it_is_another_model(pool, tmp_path):
    source, flags = converted("mamba2", tmp_path)
    results = pool.run(ours, 1, flags.replace("--mamba-dt-min 0.5", ""))
    expected = theirs(source, results[0]["tokens"], results[0]["labels"])["logits"]
    error = (results[0]["logits"][..., :WORDS] - expected).abs().max() / expected.abs().max()
    assert float(error) > 1e-2


PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "kind, change",
    [
        ("llama, llama3", {"rope_parameters": PLAIN | {"rope_theta": 500000.0}}),
        ("llama, yarn without a factor", {"rope_parameters": PLAIN}),  # frequencies alone
        *((kind, {"rope_parameters": KINDS[kind]["rope_parameters"] | {"attention_factor": 1.0}})  # the factor alone
          for kind in ("llama, yarn", "llama, yarn with mscale")),
        ("gpt_oss", {"swiglu_limit": 7.0}),
        ("gpt_oss", {"sliding_window": 64}),
    ],
)  # fmt: skip
def test_each_part_matters(kind, change):
    """A control: without it the logits of transformers are others, so the comparison would notice if we left it out."""

    with torch.no_grad():
        right, wrong = (random_model(kind, KINDS[kind] | more)(torch.arange(64)[None]).logits for more in ({}, change))
    assert (right - wrong).abs().max() > 1e-2


def with_whole_biases(flags: str) -> dict[str, Any]:
    """A mistake: each rank of expert TP adds the bias, as core does."""
    from megatron.context_parallel.core import experts

    with patch.object(experts, "_share_of_bias", lambda module, args, result, group: result):
        return ours(flags)


def test_a_bias_that_each_rank_adds_is_noticed(pool, tmp_path):
    _, flags = converted("gpt_oss", tmp_path)
    right, wrong = (pool.run(run, 2, f"{flags} {SP}", timeout=120)[0]["loss"] for run in (ours, with_whole_biases))
    assert wrong != pytest.approx(right, rel=1e-4)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_conversion_there_and_back(tmp_path, kind):
    source, (there, back, alone) = converted(kind, tmp_path)[0], (tmp_path / name for name in ("ours", "back", "alone"))
    assert convert(["--from", str(there), "--to-hf", str(back)]) == 0
    for path in source.iterdir():
        if path.name != "checksums.json":
            assert path.read_bytes() == (back / path.name).read_bytes(), path.name
    shutil.rmtree(there / "hf")  # without the original's files, transformers reads the same network
    assert convert(["--from", str(there), "--to-hf", str(alone)]) == 0
    eager = {"attn_implementation": "eager"}  # others leave out Gemma 2's soft-cap of scores
    first, second = (AutoModelForCausalLM.from_pretrained(folder, **eager).eval() for folder in (source, alone))
    with torch.no_grad():
        assert torch.equal(first(torch.arange(40)[None]).logits, second(torch.arange(40)[None]).logits)
    assert set(load_file(next(alone.glob("*.safetensors")))) <= set(first.state_dict())


def test_a_run_without_the_window_is_refused(pool, tmp_path):
    """The window is not a setting of the network here, but a Gemma without it is another model."""
    source, flags = converted("gemma2", tmp_path)
    right = flags.replace(f"{tmp_path / 'ours'} --finetune", str(source))
    for wrong in ("", " --window-size 11,0"):
        flags = right.replace(" --window-size 11,0 --window-attn-skip-freq [1,0,1]", wrong)
        assert flags != right
        with pytest.raises(RankError, match=r"--window-attn-skip-freq \[1,0,1\] in the checkpoint, None in this run"):
            pool.run(ours, 1, flags)


# ---- norms and residuals on every grid

PLACES = {
    "OLMo 2": "--reordered-norm --qk-layernorm-all-heads",
    "GPT-NeoX": "--parallel-residual --rotary-percent 0.5",
}
SMALL = "--num-layers 2 --group-query-attention --num-query-groups 4"
RULES = {
    "TP 2 x U 2": (4, f"{SP} {U2}"),
    "TP 2, no sequence parallel": (2, T2),
    "TP 4, full recompute": (4, f"--tensor-model-parallel-size 4 --sequence-parallel {FULL}"),
    "PP 2 x R 2": (4, f"{P2} {R2}"),
    "ZeRO 3, R 2": (2, f"--zero-stage 3 {R2}"),
    "TP 2, dropout": (2, f"{SP} --hidden-dropout 0.1"),
    "FPDT, TP 2 x R 2": (4, f"{SP} {R2} {fpdt(32)}"),
}
USUAL_RULES = [("OLMo 2", "TP 2, no sequence parallel"), ("OLMo 2", "FPDT, TP 2 x R 2"), ("GPT-NeoX", "TP 2, dropout")]
OTHER_RULES = [(place, grid) for place in PLACES for grid in RULES if (place, grid) not in USUAL_RULES]
OTHER_RULES.remove(("GPT-NeoX", "FPDT, TP 2 x R 2"))  # refused


@pytest.mark.parametrize("place, grid", [*USUAL_RULES, *also_in_full(*OTHER_RULES)])
@pytest.mark.usual(0)
def test_norms_and_residuals_do_not_depend_on_the_grid(pool, reference, place, grid):
    world, flags = RULES[grid]
    dropout = "--hidden-dropout 0.1" if "dropout" in flags else ""
    alone = f"{SMALL} {PLACES[place]} {dropout}"
    results = pool.run(run_training, world, f"{SMALL} {PLACES[place]} {flags}", True, 3, timeout=120)
    compare_runs(results, reference(run_training, alone, True, 3))


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
    before, after = pool.run(train_and_save, 4, f"{flags} {SP} {R2}", folder, 2, 2, timeout=120)[0]
    first, resumed = pool.run(resume, 1, flags, folder, 2, timeout=120)[0]
    assert first == 2 and resumed == pytest.approx(after, rel=1e-5) and before[0] != after[0]
