# SPDX-License-Identifier: Apache-2.0
"""Named model shapes for ``--model``."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace
from typing import Any

from megatron.formulas.strategy import Shape
from megatron.training.settings.config import AttentionConfig, ModelConfig
from megatron.training.settings.kinds import kinds_in
from megatron.training.settings.read_with import ROTARY

# Settings of every Llama, whatever its size: for named models, pretrain_llama.py and the planner.
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "norm_epsilon": 1e-5, "swiglu": True,
    "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip
LLAMA_DEFAULTS = {f"model.{name}": value for name, value in LLAMA.items()}  # as `parser.parse` takes them

# GPT models learn --seq-length positions, unless --max-position-embeddings is given.
GPT: dict[str, Any] = {"position_embedding_type": "learned_absolute", "hidden_dropout": 0.0, "attention_dropout": 0.0}


TIED: dict[str, Any] = {"untie_embeddings_and_output_weights": False}
GPT2: dict[str, Any] = GPT | {"max_position_embeddings": 1024}


GQA8: dict[str, Any] = {"group_query_attention": True, "num_query_groups": 8}
# Its MLP's GELU is by erf; the vocabularies of Pythia are padded.
PYTHIA: dict[str, Any] = {
    "position_embedding_type": "rope", "rotary_percent": 0.25, "parallel_residual": True, "bias_gelu_fusion": False,
    "untie_embeddings_and_output_weights": True, "max_position_embeddings": 2048, "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip


LLAMA3: dict[str, Any] = (
    LLAMA
    | GQA8
    | {
        "rotary_base": 500000,
        "max_position_embeddings": 8192,
    }
)
LONG_LLAMA3: dict[str, Any] = LLAMA3 | {"max_position_embeddings": 131072, "use_rope_scaling": True}  # 3.1
SMALL_LLAMA3: dict[str, Any] = LONG_LLAMA3 | TIED | {"rope_scaling_factor": 32.0}  # 3.2


MISTRAL: dict[str, Any] = LLAMA3 | {"rotary_base": 1000000, "max_position_embeddings": 32768}
MIXTRAL: dict[str, Any] = MISTRAL | {"num_experts": 8, "moe_router_topk": 2}


OLMO2: dict[str, Any] = LLAMA | {
    "norm_epsilon": 1e-6, "max_position_embeddings": 4096, "rotary_base": 500000, "reordered_norm": True,
    "qk_layernorm_all_heads": True,
}  # fmt: skip
# RoPE is scaled only in layers without a window: in every fourth one.
OLMO3: dict[str, Any] = OLMO2 | {
    "max_position_embeddings": 65536, "rotary_base_local": 500000, "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 8.0, "yarn_original_max_position_embeddings": 8192,
    "attention.window_size": (4095, 0), "attention.window_attn_skip_freq": 4,
}  # fmt: skip


PHI4: dict[str, Any] = LLAMA3 | {"rotary_base": 250000, "max_position_embeddings": 16384}


LONG: dict[str, Any] = {"max_position_embeddings": 131072}
QWEN2: dict[str, Any] = MISTRAL | {"norm_epsilon": 1e-6, "add_qkv_bias": True}
QWEN3: dict[str, Any] = MISTRAL | {
    "norm_epsilon": 1e-6, "max_position_embeddings": 40960, "kv_channels": 128, "qk_layernorm": True,
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = QWEN3 | {
    "num_query_groups": 4, "moe_router_topk": 8, "moe_aux_loss_coeff": [0.001],
}  # fmt: skip


# In Gemma 2 every second layer sees the whole sequence, in Gemma 3 every sixth; the others have a window.
GEMMA: dict[str, Any] = LLAMA3 | TIED | {
    "norm_epsilon": 1e-6, "rotary_base": 10000, "swiglu": False, "geglu": True, "sandwich_norm": True,
    "scale_embeddings": True, "apply_layernorm_1p": True, "kv_channels": 256, "softmax_scale": 256**-0.5,
}  # fmt: skip
GEMMA2: dict[str, Any] = GEMMA | {
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "attention.window_size": (4095, 0), "attention.window_attn_skip_freq": 2,
}  # fmt: skip
GEMMA3_1B: dict[str, Any] = GEMMA | {
    "max_position_embeddings": 32768, "qk_layernorm": True, "rotary_base": 1000000, "rotary_base_local": 10000,
    "attention.window_size": (511, 0), "attention.window_attn_skip_freq": 6,
}  # fmt: skip
GEMMA3: dict[str, Any] = GEMMA3_1B | {
    "max_position_embeddings": 131072, "rotary_seq_len_interpolation_factor": 8.0, "attention.window_size": (1023, 0),
}  # fmt: skip


# Three layers of four have a state; all have experts. Without its layer for multi-token prediction.
QWEN3_NEXT: dict[str, Any] = QWEN3_MOE | {
    "max_position_embeddings": 262144, "num_query_groups": 2, "kv_channels": 256, "rotary_base": 10000000,
    "rotary_percent": 0.25, "attention_output_gate": True, "apply_layernorm_1p": True, "moe_router_topk": 10,
    "moe_shared_expert_intermediate_size": 512, "moe_shared_expert_gate": True, "linear_attention_freq": 4,
    "experimental_attention_variant": "gated_delta_net",
}  # fmt: skip


# 24 layers of Mamba2, 24 MLPs and 4 layers with attention, which has no positions.
NEMOTRON_H: dict[str, Any] = LLAMA3 | {
    "position_embedding_type": "none", "swiglu": False, "squared_relu": True, "kv_channels": 128,
    "is_hybrid_model": True, "hybrid_override_pattern": "M-M-M-M" + "*-M-M-M-M-M" * 4 + "-", "mamba_num_heads": 128,
}  # fmt: skip


GPT_OSS: dict[str, Any] = LLAMA3 | {
    "max_position_embeddings": 131072, "kv_channels": 64, "add_bias_linear": True, "softmax_type": "learnable",
    "position_embedding_type": "yarn", "rotary_base": 150000, "yarn_rotary_scaling_factor": 32.0,
    "yarn_correction_range_round_to_int": False, "swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0, "moe_router_topk": 4,
    "attention.window_size": (127, 0), "attention.window_attn_skip_freq": 2,
}  # fmt: skip


# As in the published config.json, without the layers for multi-token prediction of V3 and GLM.
DEEPSEEK: dict[str, Any] = LLAMA | {
    "norm_epsilon": 1e-6, "max_position_embeddings": 163840, "multi_latent_attention": True, "qk_layernorm": True,
    "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
    "yarn_rotary_scaling_factor": 40.0, "moe_router_dtype": "fp32", "moe_router_load_balancing_type": ["seq_aux_loss"],
}  # fmt: skip
V2_LITE: dict[str, Any] = DEEPSEEK | {
    "yarn_mscale": 0.707, "yarn_mscale_all_dim": 0.707, "num_experts": 64, "moe_layer_freq": [0] + [1] * 26,
    "moe_ffn_hidden_size": 1408, "moe_shared_expert_intermediate_size": 2816, "moe_router_topk": 6,
    "moe_router_pre_softmax": True, "moe_aux_loss_coeff": [0.001],
}  # fmt: skip
V3: dict[str, Any] = DEEPSEEK | {
    "q_lora_rank": 1536, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 1.0, "num_experts": 256,
    "moe_layer_freq": [0] * 3 + [1] * 58, "moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048,
    "moe_router_topk": 8, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 8, "moe_router_group_topk": 4, "moe_router_topk_scaling_factor": 2.5,
    "moe_aux_loss_coeff": [0.0001],
}  # fmt: skip
# Queries choose their keys. GLM-5's positions are plain RoPE.
DSA: dict[str, Any] = {
    "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 64, "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 2048, "dsa_indexer_k_norm_epsilon": 1e-6,
}  # fmt: skip
GLM5: dict[str, Any] = V3 | DSA | {
    "norm_epsilon": 1e-5, "latent_norm_epsilon": 1e-6, "max_position_embeddings": 202752, "rotary_base": 1000000,
    "q_lora_rank": 2048, "qk_head_dim": 192, "v_head_dim": 256, "yarn_rotary_scaling_factor": 1.0,
    "moe_layer_freq": [0] * 3 + [1] * 75, "moe_router_num_groups": None, "moe_router_group_topk": None,
    "dsa_indexer_n_heads": 32, "dsa_indexer_rope_interleaved": True,
}  # fmt: skip


GLM: dict[str, Any] = LLAMA3 | {
    "max_position_embeddings": 131072, "kv_channels": 128, "rotary_base": 1000000, "rotary_percent": 0.5,
    "add_qkv_bias": True, "moe_router_topk": 8, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32",
}  # fmt: skip
GLM_AIR: dict[str, Any] = GLM | {
    "num_experts": 128, "moe_layer_freq": [0] + [1] * 45, "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 1408, "moe_router_topk_scaling_factor": 1.0,
}  # fmt: skip
GLM_LARGE: dict[str, Any] = GLM | {
    "num_experts": 160, "moe_layer_freq": [0] * 3 + [1] * 89, "moe_ffn_hidden_size": 1536, "qk_layernorm": True,
    "moe_shared_expert_intermediate_size": 1536, "moe_router_topk_scaling_factor": 2.5,
}  # fmt: skip


def _size(layers: int, width: int, heads: int, ffn: int | None = None, groups: int | None = None) -> dict[str, Any]:
    sizes = {"num_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    sizes |= {"num_query_groups": groups} if groups else {}  # default: those of the family
    return sizes | ({"ffn_hidden_size": ffn} if ffn else {})  # default: 4 x --hidden-size, even if a flag sets it


def _experts(number: int, width: int) -> dict[str, Any]:
    return {"num_experts": number, "moe_ffn_hidden_size": width}


def _scale(divisor: int) -> dict[str, Any]:
    """Gemma's attention scores are divided by the square root of a number that is not always the size of a head."""
    return {"softmax_scale": divisor**-0.5}


# Every name of --model: the size of the vocabulary that it was published with (a run uses its tokenizer's), and its
# settings; a name without a section is one of :class:`ModelConfig`. To add a model, add a line here.
#
# The numbers are those of each base model's published config.json; Mistral's is version 0.3, Gemma 3's the text model.
#
# The GPT shapes are GPT-3's (13B as 40 heads of 128) and, for 30B, OPT's. Dropout is 0 everywhere: no long-context
# model is trained with it.
#
# The GenSLM page gives sizes (25B, 33B) and a learned position embedding, but no shapes. The shapes here have width
# 5760 with 64 and 80 layers, as in Argonne's public launch scripts. That gives 25.8B and 32.1B parameters and, at 16
# bytes per parameter, 9.2 GB for 100K positions (the page: 10 GB). They have 80 heads of 72, since flash kernels need
# head sizes in multiples of 8; add ``--num-attention-heads 64`` for the page's runs on TP 32.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt-2.7b": (50257, GPT | _size(32, 2560, 32)),
    "gpt-6.7b": (50257, GPT | _size(32, 4096, 32)),
    "gpt-13b": (50257, GPT | _size(40, 5120, 40)),
    "gpt-30b": (50257, GPT | _size(48, 7168, 56)),
    "llama2-7b": (32000, LLAMA | _size(32, 4096, 32, 11008) | {"max_position_embeddings": 4096}),
    "llama3-8b": (128256, LLAMA3 | _size(32, 4096, 32, 14336)),
    "llama3-70b": (128256, LLAMA3 | _size(80, 8192, 64, 28672)),
    "llama3-405b": (128256, LLAMA3 | _size(126, 16384, 128, 53248)),
    "llama3.1-8b": (128256, LONG_LLAMA3 | _size(32, 4096, 32, 14336)),
    "llama3.1-70b": (128256, LONG_LLAMA3 | _size(80, 8192, 64, 28672)),
    "llama3.1-405b": (128256, LONG_LLAMA3 | _size(126, 16384, 128, 53248)),
    "llama3.2-1b": (128256, SMALL_LLAMA3 | _size(16, 2048, 32, 8192)),
    "llama3.2-3b": (128256, SMALL_LLAMA3 | _size(28, 3072, 24, 8192)),
    "qwen2.5-0.5b": (151936, QWEN2 | TIED | _size(24, 896, 14, 4864, groups=2)),
    "qwen2.5-1.5b": (151936, QWEN2 | TIED | _size(28, 1536, 12, 8960, groups=2) | LONG),
    "qwen2.5-3b": (151936, QWEN2 | TIED | _size(36, 2048, 16, 11008, groups=2)),
    "qwen2.5-7b": (152064, QWEN2 | _size(28, 3584, 28, 18944, groups=4) | LONG),
    "qwen2.5-14b": (152064, QWEN2 | _size(48, 5120, 40, 13824) | LONG | {"norm_epsilon": 1e-5}),
    "qwen2.5-32b": (152064, QWEN2 | _size(64, 5120, 40, 27648) | LONG | {"norm_epsilon": 1e-5}),
    "qwen2.5-72b": (152064, QWEN2 | _size(80, 8192, 64, 29568) | LONG | {"norm_epsilon": 1e-5}),
    "qwen3-0.6b": (151936, QWEN3 | TIED | _size(28, 1024, 16, 3072)),
    "qwen3-1.7b": (151936, QWEN3 | TIED | _size(28, 2048, 16, 6144)),
    "qwen3-4b": (151936, QWEN3 | TIED | _size(36, 2560, 32, 9728)),
    "qwen3-8b": (151936, QWEN3 | _size(36, 4096, 32, 12288)),
    "qwen3-14b": (151936, QWEN3 | _size(40, 5120, 40, 17408)),
    "qwen3-32b": (151936, QWEN3 | _size(64, 5120, 64, 25600)),
    "qwen3-30b-a3b": (151936, QWEN3_MOE | _size(48, 2048, 32, 6144) | _experts(128, 768)),
    "qwen3-235b-a22b": (151936, QWEN3_MOE | _size(94, 4096, 64, 12288) | _experts(128, 1536)),
    "qwen3-next-80b-a3b": (151936, QWEN3_NEXT | _size(48, 2048, 16, 5120) | _experts(512, 512)),
    "nemotron-h-8b": (131072, NEMOTRON_H | _size(52, 4096, 32, 21504)),
    "mistral-7b": (32768, MISTRAL | _size(32, 4096, 32, 14336)),
    "mixtral-8x7b": (32000, MIXTRAL | _size(32, 4096, 32, 14336)),
    "mixtral-8x22b": (32000, MIXTRAL | _size(56, 6144, 48, 16384) | {"max_position_embeddings": 65536}),
    "gemma-2-2b": (256000, GEMMA2 | _size(26, 2304, 8, 9216, groups=4)),
    "gemma-2-9b": (256000, GEMMA2 | _size(42, 3584, 16, 14336)),
    "gemma-2-27b": (256000, GEMMA2 | _size(46, 4608, 32, 36864, groups=16) | {"kv_channels": 128} | _scale(144)),
    "gemma-3-1b": (262144, GEMMA3_1B | _size(26, 1152, 4, 6912, groups=1)),
    "gemma-3-4b": (262208, GEMMA3 | _size(34, 2560, 8, 10240, groups=4)),
    "gemma-3-12b": (262208, GEMMA3 | _size(48, 3840, 16, 15360)),
    "gemma-3-27b": (262208, GEMMA3 | _size(62, 5376, 32, 21504, groups=16) | {"kv_channels": 128} | _scale(168)),
    "gpt-oss-20b": (201088, GPT_OSS | _size(24, 2880, 64, 2880) | _experts(32, 2880)),
    "gpt-oss-120b": (201088, GPT_OSS | _size(36, 2880, 64, 2880) | _experts(128, 2880)),
    "phi-4": (100352, PHI4 | _size(40, 5120, 40, 17920, groups=10)),
    "olmo-2-1b": (100352, OLMO2 | _size(16, 2048, 16, 8192)),
    "olmo-2-7b": (100352, OLMO2 | _size(32, 4096, 32, 11008)),
    "olmo-2-13b": (100352, OLMO2 | _size(40, 5120, 40, 13824)),
    "olmo-2-32b": (100352, OLMO2 | GQA8 | _size(64, 5120, 40, 27648)),
    "olmo-3-7b": (100278, OLMO3 | _size(32, 4096, 32, 11008)),
    "olmo-3-32b": (100278, OLMO3 | GQA8 | _size(64, 5120, 40, 27648)),
    "glm-4.5-air": (151552, GLM_AIR | _size(46, 4096, 96, 10944)),
    "glm-4.5": (151552, GLM_LARGE | _size(92, 5120, 96, 12288)),
    "deepseek-v2-lite": (102400, V2_LITE | _size(27, 2048, 16, 10944)),
    "deepseek-v3": (129280, V3 | _size(61, 7168, 128, 18432)),
    "deepseek-v3.2": (129280, V3 | DSA | _size(61, 7168, 128, 18432)),
    "glm-5": (154880, GLM5 | _size(78, 6144, 64, 12288)),
    "gpt2": (50257, GPT2 | _size(12, 768, 12)),
    "gpt2-medium": (50257, GPT2 | _size(24, 1024, 16)),
    "gpt2-large": (50257, GPT2 | _size(36, 1280, 20)),
    "gpt2-xl": (50257, GPT2 | _size(48, 1600, 25)),
    "pythia-70m": (50304, PYTHIA | _size(6, 512, 8)),
    "pythia-160m": (50304, PYTHIA | _size(12, 768, 12)),
    "pythia-410m": (50304, PYTHIA | _size(24, 1024, 16)),
    "pythia-1b": (50304, PYTHIA | _size(16, 2048, 8)),
    "pythia-1.4b": (50304, PYTHIA | _size(24, 2048, 16)),
    "pythia-2.8b": (50304, PYTHIA | _size(32, 2560, 32)),
    "pythia-6.9b": (50432, PYTHIA | _size(32, 4096, 32)),
    "pythia-12b": (50688, PYTHIA | _size(36, 5120, 40)),
    "gpt-neox-20b": (50432, PYTHIA | _size(44, 6144, 64) | {"bias_gelu_fusion": True}),
    "genslm-25b": (50257, GPT | _size(64, 5760, 80)),
    "genslm-33b": (50257, GPT | _size(80, 5760, 80)),
}


def derive_shape(model: ModelConfig) -> ModelConfig:
    """A copy with Megatron-LM's defaults for head size, MLP width and key/value heads."""
    width = model.hidden_size
    ffn = int(4 * width * 2 / 3 / 64) * 64 if model.gated else 4 * width
    keys = model.qk_head_dim + model.qk_pos_emb_head_dim if model.multi_latent_attention else None
    return replace(
        model,
        kv_channels=keys or model.kv_channels or width // model.num_attention_heads,
        ffn_hidden_size=model.ffn_hidden_size or ffn,
        num_query_groups=model.num_query_groups if model.group_query_attention else model.num_attention_heads,
        mamba_num_heads=model.mamba_num_heads or (2 * width // model.mamba_head_dim if model.is_hybrid_model else None),
    )


def activation(model: ModelConfig) -> str:
    """Activation of the MLP, as Megatron-LM chooses it: ``silu``, ``squared_relu``, ``tanh_gelu`` (GELU by tanh, in the
    fused kernel that also adds the bias) or ``gelu`` (GELU by erf, without that kernel)."""
    if model.gated:
        return "silu" if model.swiglu else "tanh_gelu" if model.geglu else "quick_gelu"
    if model.squared_relu:
        return "squared_relu"
    return "tanh_gelu" if model.openai_gelu or (model.bias_gelu_fusion and model.add_bias_linear) else "gelu"


def model_shape(model: ModelConfig, vocab_size: int) -> Shape:
    """The shape that the closed forms count; learned positions have ``max_position_embeddings`` rows."""
    model = derive_shape(model)
    learned = model.position_embedding_type == "learned_absolute"
    kinds = dict(ChainMap(*(kind.shape(model) for kind in reversed(kinds_in(model)))))
    return Shape(
        layers=model.num_layers,
        hidden=model.hidden_size,
        ffn=model.ffn_hidden_size,
        heads=model.num_attention_heads,
        kv_heads=model.num_query_groups,
        head_dim=model.kv_channels,
        vocab=vocab_size,
        gated=model.gated,
        bias=model.add_bias_linear,
        layer_norm=model.normalization == "LayerNorm",
        tied=not model.untie_embeddings_and_output_weights,
        positions=(model.max_position_embeddings or 0) if learned else 0,
        qkv_bias=model.add_qkv_bias,
        qk_norm=model.qk_layernorm,
        wide_qk_norm=model.qk_layernorm_all_heads,
        sinks=model.softmax_type == "learnable",
        embed_norm=model.embed_layernorm,
        sandwich_norm=model.sandwich_norm,
        output_gate=model.attention_output_gate,
        **kinds,
    )


def outside_engine(model: ModelConfig) -> str | None:
    """A flag of the model whose layers consist of core's own modules, and not of Transformer Engine's; or None."""
    names = [kind.condition.switch for kind in kinds_in(model)]
    names += [name for name in ("reordered_norm", "logits_scaling", "qk_layernorm_all_heads") if getattr(model, name)]
    return next((f"--{name.replace('_', '-')}" for name in names), None)


def window_layers(attention: AttentionConfig, layers: int) -> list[int]:
    """1 for each of a model's ``layers`` with the mask of ``--attention-mask``, 0 for those without its window."""
    return [1 - skipped for skipped in _every(attention.window_attn_skip_freq, layers, ones=0)]


def rope_layers(model: ModelConfig) -> list[int]:
    """1 for each layer that rotates queries and keys, 0 for the others."""
    if model.position_embedding_type not in ROTARY:
        return [0] * model.num_layers
    return [1 - skipped for skipped in _every(model.no_rope_freq, model.num_layers)]


def _every(frequency: int | list[int] | None, layers: int, ones: int = 1) -> list[int]:
    """1 for each layer that a frequency names: every N-th, or those with ``ones`` in a list; None names none."""
    if isinstance(frequency, list):
        return [int(one == ones) for one in frequency]
    return [int(frequency is not None and number % frequency == 0) for number in range(1, layers + 1)]
