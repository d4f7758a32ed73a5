# SPDX-License-Identifier: Apache-2.0
"""megatron-core's configuration of the network and of the grid."""

from __future__ import annotations

from collections import ChainMap
from typing import Any

import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from torch.nn import functional

from megatron.context_parallel.core.expert_choice import RouterRule
from megatron.context_parallel.layout.grid import Grid
from megatron.training.arguments.stages import chunk_layers
from megatron.training.arguments.validate.check_memory import layers_recompute
from megatron.training.model.weight_gradients import products_add
from megatron.training.settings.config import Config, ModelConfig
from megatron.training.settings.flag import for_core
from megatron.training.settings.kinds import kinds_in
from megatron.training.settings.models import activation


def compute_dtype(config: Config) -> torch.dtype:
    """The dtype of activations."""
    return torch.bfloat16 if config.optimizer.bf16 else torch.float16 if config.optimizer.fp16 else torch.float32


def transformer_config(config: Config, grid: Grid, *, on_gpu: bool) -> TransformerConfig:
    """megatron-core's configuration of the network and of the grid."""
    model, parallel, attention, optimizer = config.model, config.parallel, config.attention, config.optimizer
    dtype = compute_dtype(config)
    gated, limit = model.gated, model.activation_func_clamp_value
    overlap_p2p = on_gpu and virtual_stages(config) is not None
    fp8: dict[str, Any] = {}
    if model.fp8_format:
        fp8 = {
            "fp8": model.fp8_format,
            "fp8_recipe": Fp8Recipe(model.fp8_recipe),
            "fp8_amax_history_len": model.fp8_amax_history_len,
            "fp8_amax_compute_algo": model.fp8_amax_compute_algo,
        }
    recompute: dict[str, Any] = {}
    if not layers_recompute(config):  # otherwise FPDT's layers recompute themselves, chunk by chunk
        recompute = {
            "recompute_granularity": attention.recompute_granularity,
            "recompute_method": attention.recompute_method,
            "recompute_num_layers": attention.recompute_num_layers,
        }
    kind = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    return kind(
        **ChainMap(*(one.core(config) for one in kinds_in(model)), for_core(model, config), for_core(parallel, config)),
        # Our dropout depends on the position: see ModelDropout.
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gated_linear_unit=gated,
        activation_func=ACTIVATIONS[activation(model)],
        # Weights are initialized after construction, see weights.py.
        init_method=no_initialization,
        output_layer_init_method=no_initialization,
        embedding_init_method=no_initialization,
        tensor_model_parallel_size=grid.tensor.size,
        sequence_parallel=parallel.sequence_parallel,
        pipeline_model_parallel_size=grid.pipeline.size,
        virtual_pipeline_model_parallel_size=virtual_stages(config),
        microbatch_group_size_per_vp_stage=parallel.microbatch_group_size_per_virtual_pipeline_stage,
        pipeline_model_parallel_layout=_layout(config),
        context_parallel_size=grid.context.size,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=optimizer.bf16,
        fp16=optimizer.fp16,
        attention_softmax_in_fp32=True,
        attention_backend=AttnBackend.auto,
        calculate_per_token_loss=True,
        recompute_modules=["core_attn"] if attention.recompute_granularity == "selective" else None,
        # Fused elementwise kernels are compiled by torch.compile: GPUs only.
        bias_activation_fusion=on_gpu and model.swiglu and not (limit or model.glu_linear_offset),
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,
        # Products add to DDP's buffers. FSDP has none, and bf16 buffers are too coarse for sums over chunks.
        gradient_accumulation_fusion=products_add(on_gpu, dtype)
        and not (in_chunks(config) and parallel.grad_reduce_in_bf16)
        and parallel.zero_stage < 2,
        # Layers that differ have their own names in checkpoints.
        hetereogenous_dist_checkpoint=any(kind.differs(model) for kind in kinds_in(model)),
        deterministic_mode=config.run.deterministic_mode,
        batch_p2p_comm=on_gpu and not overlap_p2p,
        overlap_p2p_comm=overlap_p2p,
        deallocate_pipeline_outputs=True,
        **fp8,
        **recompute,
    )


def router_rule(model: ModelConfig) -> RouterRule:
    """How tokens choose their experts."""
    coefficients = dict(zip(model.moe_router_load_balancing_type, model.moe_aux_loss_coeff))
    return RouterRule(
        topk=model.moe_router_topk,
        score_function=model.moe_router_score_function,
        pre_softmax=model.moe_router_pre_softmax,
        num_groups=model.moe_router_num_groups,
        group_topk=model.moe_router_group_topk,
        topk_scaling_factor=model.moe_router_topk_scaling_factor,
        expert_bias=model.moe_router_enable_expert_bias,
        sinkhorn="sinkhorn" in coefficients,
        aux_loss=coefficients.get("aux_loss", 0.0),
        seq_aux_loss=coefficients.get("seq_aux_loss", 0.0),
        z_loss=model.moe_z_loss_coeff or 0.0,
        capacity_factor=model.moe_expert_capacity_factor,
        drop_policy=model.moe_token_drop_policy,
        replay=model.moe_enable_routing_replay,
    )


def in_chunks(config: Config) -> bool:
    """Whether layers process the sequence in chunks."""
    return config.chunks.fpdt or bool(config.chunks.ffn_chunks)


def _layout(config: Config) -> list[list[str]] | None:
    """Core's list of what each stage holds, in the order in which a token passes them; None without pipeline."""
    size, counts = config.parallel.pipeline_model_parallel_size, chunk_layers(config)
    if size == 1:
        return None
    virtual = len(counts) // size
    stages = [["decoder"] * counts[rank * virtual + stage] for stage in range(virtual) for rank in range(size)]
    stages[0].insert(0, "embedding")
    stages[-1] += ["mtp"] * (config.model.mtp_num_layers or 0) + ["loss"]
    return stages


def virtual_stages(config: Config) -> int | None:
    """Virtual pipeline stages per rank (None without interleaving)."""
    return config.parallel.num_virtual_stages_per_pipeline_rank


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU by tanh: the same formula on every device."""
    return functional.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    return functional.relu(x).square()


ACTIVATIONS = {
    "silu": functional.silu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
    "tanh_gelu": tanh_gelu,
    "gelu": functional.gelu,
}


def no_initialization(weight: Tensor) -> Tensor:
    """An initialization that does nothing."""
    return weight
