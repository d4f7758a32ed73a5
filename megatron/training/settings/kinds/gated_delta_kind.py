# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet (Qwen3-Next): some layers carry a state in place of keys and values."""

from __future__ import annotations

from typing import Any

from megatron.formulas.kinds.state_figures import LinearAttention
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal, refuse_combinations
from megatron.training.settings.flag import check_pattern, layer_pattern, size, weights
from megatron.training.settings.kinds.kind import Kind, Model, Run, settings_of
from megatron.training.settings.kinds.layer_patterns import linear_layers
from megatron.training.settings.read_with import of_kind

FLAG = "--experimental-attention-variant"
LINEAR = of_kind("experimental_attention_variant", "gated_delta_net")


@settings_of(LINEAR)
class LinearSettings:
    """Settings of linear-attention layers that --linear-attention-freq chooses."""

    linear_attention_freq: int | list[int] | None = weights(
        None,
        "linear-attention layers: all but every N-th; or 1 for each of them and 0 for the others, as in ([1]*3+[0])*4",
        type=layer_pattern,
        core=True,
    )
    linear_conv_kernel_dim: int = size(4, "linear attention: tokens that the short convolution sees")
    linear_key_head_dim: int = size(128, "linear attention: size of a query or key head")
    linear_value_head_dim: int = size(128, "linear attention: size of a value head")
    linear_num_key_heads: int = size(16, "linear attention: number of query and key heads")
    linear_num_value_heads: int = size(32, "linear attention: number of value heads, a multiple of the key heads")


def _check(config: Run, _: int) -> None:
    """Refuse linear-attention layers that the model, the grid or other settings do not allow."""
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    if not LINEAR.chosen(vars(model)):
        return
    if model.linear_attention_freq is None:
        raise Refusal(
            f"{FLAG} {model.experimental_attention_variant}",
            "needs --linear-attention-freq, which layers have a state: add --linear-attention-freq 4, as in Qwen3-Next",
            Fix("--linear-attention-freq 4"),
        )
    check_pattern("--linear-attention-freq", model.linear_attention_freq, model.num_layers)
    if not any(linear_layers(model)):
        raise Refusal(
            "--linear-attention-freq", f"leaves no linear-attention layer: leave it out, and {FLAG} too", LEAVE_OUT
        )
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if values % keys:
        raise Refusal(
            f"--linear-num-value-heads {values}", f"is not a multiple of --linear-num-key-heads {keys}: use one"
        )
    if keys % tensor:
        raise Refusal(
            f"--linear-num-key-heads {keys}", f"is not a multiple of --tensor-model-parallel-size {tensor}: use one"
        )
    refused = without_states(config) | {
        "--normalization LayerNorm": (
            model.normalization == "LayerNorm",
            "the output of a state is normalized without a mean: use --normalization RMSNorm",
        ),
    }
    fixes = {"--normalization": "--normalization RMSNorm"}
    refuse_combinations(f"{FLAG} {model.experimental_attention_variant}", refused, fixes)


def without_states(config: Run) -> dict[str, tuple[Any, str]]:
    """What linear-attention and SSM layers do not work with: by flag, whether it is given, and why."""
    model, parallel, chunks = config.model, config.parallel, config.chunks
    return {
        "--sequence-parallel --fpdt": (chunks.fpdt and parallel.sequence_parallel, "chunks are not split over TP"),
        "--multi-latent-attention": (model.multi_latent_attention, "the two are not built together"),
        "--mtp-num-layers": (model.mtp_num_layers, "which layer would predict ahead is not defined"),
        "--fp8-format": (model.fp8_format, "it needs Transformer Engine's layers"),
        "--attention-mask": (config.attention.sees_ahead, "a state holds earlier tokens alone: use a causal mask"),
    }


def _shape(model: Model) -> dict[str, Any]:
    heads = model.linear_num_key_heads, model.linear_num_value_heads
    sizes = model.linear_key_head_dim, model.linear_value_head_dim, model.linear_conv_kernel_dim
    return {"linear": LinearAttention(tuple(linear_layers(model)), *heads, *sizes)}


KIND = Kind(
    LINEAR,
    _shape,
    check=_check,
    mixer="gated_delta_net:gated_delta_net",
    layers=linear_layers,
    options=lambda config: {"exchange": config.parallel.linear_attention_exchange},
)
