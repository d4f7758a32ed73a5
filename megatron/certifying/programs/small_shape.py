# SPDX-License-Identifier: Apache-2.0
"""A small model of the same kind: the settings of a training command, with small sizes and made-up data."""

from __future__ import annotations

from dataclasses import Field
from itertools import combinations
from typing import Any

from megatron.training.arguments.parser import settings, spellings
from megatron.training.settings.config import Config
from megatron.training.settings.kinds.dsa_kind import DSA
from megatron.training.settings.kinds.gated_delta_kind import LINEAR

LENGTH, HEAD_SIZE, VOCABULARY = 64, 16, 301
AXES = ("tensor", "ulysses", "ring", "pipeline", "data")
# Sections whose settings say what is computed, except where their fields deny it.
WHOLE = ("model", "attention", "chunks", "optimizer")


def small_flags(config: Config) -> list[str]:
    """The flags of a small program of the same kind, without a grid.

    Args:
        config: completed settings of the command.
    """
    made = _small(config)
    given = {**_settings_of(config), **made}
    by_name = {f"{section}.{field.name}": field for section, _, field in settings()}
    words = []
    for name, value in given.items():
        words += _flag(by_name[name], value)
    return words


def left_out(config: Config) -> list[str]:
    """Settings of the command that the small program does not have although they change what is computed."""
    notes = []
    if config.stage is not None:
        notes.append(f"--seq-length-schedule: checked with the flags of stage {config.stage.number}, the last one")
    if config.model.fp8_format:
        notes.append(f"--fp8-format {config.model.fp8_format}: FP8 needs a GPU; checked in bf16")
    if config.attention.attention_kernel not in ("auto", "cpu", "math"):
        notes.append(f"--attention-kernel {config.attention.attention_kernel}: checked with the CPU's kernel")
    if (kernel := config.attention.linear_attention_kernel) in ("fla", "triton"):
        notes.append(f"--linear-attention-kernel {kernel}: checked with the kernel blocks")
    if config.attention.mask_function or config.attention.sparse_pattern.endswith(".json"):
        notes.append(f"--seq-length {config.data.seq_length}: checked with the mask for {LENGTH} tokens")
    if config.model.num_experts and config.parallel.expert_model_parallel_size > 1:
        size = config.parallel.expert_model_parallel_size
        notes.append(f"--expert-model-parallel-size {size}: checked with all experts on each rank")
    return notes


def grids_of(config: Config, world_size: int, processes: int = 4) -> list[dict[str, int]]:
    """Grids of the command's axes, each of size 2: every axis alone, and every two together."""
    parallel = config.parallel
    sizes = {
        "tensor": parallel.tensor_model_parallel_size,
        "ulysses": parallel.ulysses_parallel_size or 1,
        "ring": parallel.ring_parallel_size or 1,
        "pipeline": parallel.pipeline_model_parallel_size,
    }
    model = 1
    for size in sizes.values():
        model *= size
    sizes["data"] = world_size // model
    used = [axis for axis in AXES if sizes[axis] > 1]
    return [dict.fromkeys(axes, 2) for count in (1, 2) for axes in combinations(used, count) if 2**count <= processes]


def flags_of_grid(flags: list[str], sizes: dict[str, int]) -> list[str]:
    """The flags with a grid; settings that need an axis are left out if its size is 1."""
    tensor, pipeline = sizes.get("tensor", 1), sizes.get("pipeline", 1)
    context = sizes.get("ulysses", 1) * sizes.get("ring", 1)
    unneeded = {"--sequence-parallel": tensor == 1, "--partition-position-embedding": context == 1}
    return [
        *(flag for flag in flags if not unneeded.get(flag)),
        *("--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(pipeline)),
        *("--ulysses-parallel-size", str(sizes.get("ulysses", 1)), "--ring-parallel-size", str(sizes.get("ring", 1))),
    ]


def _settings_of(config: Config) -> dict[str, Any]:
    """Settings that differ from the defaults and say what is computed."""
    default, result = Config(), {}
    for section, part, field in config.settings():
        value = getattr(part, field.name)
        usual = section in WHOLE and not field.name.startswith(("lr_", "fp8"))
        if field.metadata.get("computes", usual) and value != getattr(getattr(default, section), field.name):
            result[f"{section}.{field.name}"] = value
    return result


def _small(config: Config) -> dict[str, Any]:
    model, attention, parallel, data = config.model, config.attention, config.parallel, config.data
    groups = model.num_query_groups if model.group_query_attention else model.num_attention_heads
    small_groups = 4 if groups % 4 == 0 else 1
    queries = min(model.num_attention_heads // groups, 2)
    heads = small_groups * queries if small_groups * queries % 4 == 0 else 4 * small_groups
    hidden = heads * HEAD_SIZE
    share = LENGTH / data.seq_length
    ffn = max(2 * round(model.ffn_hidden_size / model.hidden_size * hidden / 4), 8) // 8 * 8
    micro = min(data.micro_batch_size, 2)
    layers = 4 if parallel.pipeline_model_parallel_size > 1 else 2
    result: dict[str, Any] = {
        "model.num_layers": layers,
        "model.hidden_size": hidden, "model.num_attention_heads": heads, "model.kv_channels": HEAD_SIZE,
        "model.ffn_hidden_size": ffn, "model.max_position_embeddings": LENGTH, "model.vocab_size": VOCABULARY,
        "data.seq_length": LENGTH, "data.micro_batch_size": micro, "data.global_batch_size": 4 * micro,
        "data.mock_data": True, "data.tokenizer_type": "NullTokenizer", "data.num_workers": 0,
        "run.train_iters": 4, "run.eval_iters": 0, "run.device": "cpu", "optimizer.lr_decay_style": "constant",
    }  # fmt: skip
    result["model.num_query_groups"] = small_groups if model.group_query_attention else 1  # 1 is the default
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):  # there may be 256 experts
        if getattr(model, name):
            result[f"model.{name}"] = min(getattr(model, name), 32)
    if attention.window_size:
        result["attention.window_size"] = tuple(
            n if n < 0 else min(max(round(n * share), 1 if n else 0), LENGTH) for n in attention.window_size
        )
    # Half of the layers are of each kind.
    if attention.window_attn_skip_freq:
        result["attention.window_attn_skip_freq"] = 2
    if model.no_rope_freq:
        result["model.no_rope_freq"] = [0, 1, 1, 0][:layers]
    if attention.attention_mask == "block-sparse":
        result["attention.sparse_block_size"] = max(round(attention.sparse_block_size * share), 4)
    if config.chunks.fpdt:
        result["chunks.fpdt_chunk_size"] = LENGTH // 4
    if model.position_embedding_type == "yarn":
        result["model.yarn_original_max_position_embeddings"] = LENGTH // 4
    if model.multi_latent_attention:
        small = {"kv_lora_rank": 16, "qk_head_dim": HEAD_SIZE // 2, "qk_pos_emb_head_dim": HEAD_SIZE // 2}
        small |= {"v_head_dim": HEAD_SIZE, "q_lora_rank": 16 if model.q_lora_rank else None}
        result |= {f"model.{name}": value for name, value in small.items()}
    if DSA.chosen(vars(model)):  # a query chooses few of the keys
        small = {"dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": HEAD_SIZE, "dsa_indexer_topk": LENGTH // 8}
        result |= {f"model.{name}": value for name, value in small.items()}
    if LINEAR.chosen(vars(model)):  # half of the layers have a state
        small = {"linear_attention_freq": 2, "linear_key_head_dim": HEAD_SIZE, "linear_value_head_dim": HEAD_SIZE}
        small |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
        result |= {f"model.{name}": value for name, value in small.items()}
    if isinstance(model.moe_layer_freq, list):  # one layer without experts, as in DeepSeek
        result["model.moe_layer_freq"] = [0] + [1] * (result["model.num_layers"] - 1)
    if attention.recompute_num_layers:
        result["attention.recompute_num_layers"] = 1
    if parallel.ddp_bucket_size:
        result["parallel.ddp_bucket_size"] = 10_000
    return result


def _flag(field: Field, value: Any) -> list[str]:
    name = spellings(field)[0]
    if field.type == "bool":
        switched = bool(value) != bool(field.default) if "flags" in field.metadata or not field.default else False
        return [name] if switched else []
    if isinstance(value, tuple):
        return [f"{name}={','.join(map(str, value))}"]
    if isinstance(value, list):
        return [name, *map(str, value)] if "nargs" in field.metadata else [name, str(value).replace(" ", "")]
    if value is None:
        return []
    return [f"{name}={value}"] if str(value).startswith("-") else [name, str(value)]
