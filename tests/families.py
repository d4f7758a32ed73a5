# SPDX-License-Identifier: Apache-2.0
"""A small random model of any family that transformers registers as a decoder, made from its configuration class alone.

Numbers of a configuration are made small by their names; fields that go with each other in another way are in OWN.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.hugging_face import VOCABULARY, draw_weights

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LARGEST = 8_000_000  # parameters; a model with more was not made small
# The first pattern that a field's name matches says its number.
SMALL: list[tuple[str, float | int]] = [
    (r"dropout|pdrop|layerdrop|jitter|drop_path", 0.0),
    (r"vocab", VOCABULARY),
    (r"^pad_(token_)?id|^pad_index", 0),
    (r"^bos_(token_)?id|^bos_index", 1),
    (r"^eos_(token_)?id|^eos_index", 2),
    (r"tokens?_(id|index)$|_start_id$", VOCABULARY - 1),
    (r"per_tok(en)?$|top_?k$|^moe_k$", 2),
    (r"shared_experts$|num_experts_shared", 1),
    (r"experts?$|num_experts|expert_num$", 4),
    (r"topk_group|nextn|hidden_layers_mtp", 1),
    (r"^n_group$|num_expert_group|kv_n?_?heads|key_value_heads|num_key_heads|kv_heads", 2),
    (r"^n?_?groups$|ngroups$|n_groups$|query_groups", 2),
    (r"lora_rank|_rank$|lowrank", 12),
    (r"qk_nope_head_dim|v_head_dim", 8),
    (r"qk_rope_head_dim", 4),
    (r"qk_head_dim", 12),
    (r"head_dim|d_head$|head_size$|kv_channels|headdim|dim_head|d_kv|rel$", 8),
    (r"heads?$|attention_heads$|n_head$|heads_per", 4),
    (r"rotary_dim", 4),
    (r"position|max_seq_len|context_length|n_ctx|model_max_length|rel_extent", 128),
    (r"sliding_window_pattern|attn_every|layer_interval|period|layer_group_size|sparse_step", 2),
    (r"sliding_window|attention_chunk_size|window_size|window_len|local_attention", 8),
    (r"index_block_size|index_n|block_size", 4),
    (r"chunk_size$", 8),
    (r"first_k_dense|num_dense_layers|layer_start_index|layer_offset|first_layer", 1),
    (r"layer_end_index", 1),
    (r"kv_shared_layers", 1),
    (r"ffn|intermediate|d_inner|dff|dim_ff|feed_forward|adapter_(in|out)|mlp_dim|n_inner", 48),
    (r"state_size|d_state|d_conv|conv_kernel|conv1d", 4),
    (r"hidden_size|d_model|embd?$|embed(ding)?_(dim|size)|emb_dim|_dim$|lru_width|n_embd|hidden_dim|embed_proj", 32),
    (r"layers?$|depth|num_blocks|_cycles", 2),
]  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
SWA = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 12, "head_dim": 12,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
QSA = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2
}  # fmt: skip
WIDE = 64  # numbers up to here that no pattern names stay
EXPERTS = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1}
UNSAID = EXPERTS | {"head_dim": 8, "num_key_value_heads": 2}  # None in some, by default
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64}
OWN: dict[str, dict[str, Any]] = {
    "bamba": MAMBA,
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note_text": {f"swa_{name}": small for name, small in SWA.items()},
    "falcon_h1": MAMBA,
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gemma4_unified_assistant": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": MAMBA,
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"head_dim": 16},
    "prophetnet": {"num_buckets": 32, "relative_max_distance": 128},
    "qwen4_exp": QSA,
    "qwen4_exp_text": QSA,
    "reformer": {"axial_pos_shape": [8, 6], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local", "lsh"]},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64},
    "zaya": {"num_experts_per_tok": 1},
}


def small_model(family: str) -> PreTrainedModel:
    """Random, every weight shows, in evaluation mode. ValueError: it cannot be made small."""
    torch.manual_seed(3)
    config = CONFIG_MAPPING[family](**small_config(CONFIG_MAPPING[family]))
    config._attn_implementation = "eager"
    with torch.device("meta"):
        size = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters are left after making it small")
    return draw_weights(AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval())


def small_config(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """What to call a configuration class with."""
    usual = kind()
    fields = {x.name: vars(usual).get(x.name) for x in dataclasses.fields(kind)}
    made: dict[str, Any] = {}
    for name, value in fields.items():
        if name in kind.sub_configs and isinstance(value, PreTrainedConfig):
            made[name] = small_config(type(value))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            made[name] = smaller(name, value)
    made |= fewer_layers(usual, fields)
    made |= {"use_cache": False, "tie_word_embeddings": False, "is_decoder": True}
    made |= {name: small for name, small in UNSAID.items() if name not in made}
    if "qk_rope_head_dim" in fields:
        made["num_key_value_heads"] = 4
    made = {name: value for name, value in made.items() if name in fields}
    return made | OWN.get(kind.model_type, {})


def smaller(name: str, value: float) -> float:
    if value in (0, None) and not re.search("drop|token_id", name):
        return value
    for pattern, small in SMALL:
        if re.search(pattern, name):
            return type(value)(small)
    return value if isinstance(value, float) or value <= WIDE else 16


def fewer_layers(usual: PreTrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, two or more, and the lists that say what each is."""
    count = getattr(usual, "num_hidden_layers", None)
    lists = {name: value for name, value in fields.items() if isinstance(value, (list, tuple)) and len(value) == count}
    if not lists or not isinstance(count, int):
        return {}
    kinds = list(zip(*lists.values()))
    chosen = sorted({kinds.index(kind) for kind in kinds})
    chosen = sorted({*chosen, 0, 1})[:6] if len(chosen) < 2 else chosen[:6]
    name = usual.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return {name: len(chosen)} | {key: [value[i] for i in chosen] for key, value in lists.items()}
