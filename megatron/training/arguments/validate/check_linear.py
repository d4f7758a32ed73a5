# SPDX-License-Identifier: Apache-2.0
"""Checks of layers with a state (Gated DeltaNet): which layers, their sizes, what they do not work with yet."""

from __future__ import annotations

from megatron.training.arguments.config import Config
from megatron.training.arguments.models import linear_layers
from megatron.training.arguments.validate.check_model import check_pattern, sees_ahead
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal, refuse_combinations

FLAG = "--experimental-attention-variant"


def check_linear(config: Config) -> None:
    """Refuse layers with a state that the model, the grid or other settings do not allow."""
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    if model.experimental_attention_variant is None:
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
            "--linear-attention-freq", f"leaves no layer with a state: leave it out, and {FLAG} too", LEAVE_OUT
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
    _combinations(config)


def _combinations(config: Config) -> None:
    model, parallel, chunks = config.model, config.parallel, config.chunks
    refused = {
        "--sequence-parallel --fpdt": (chunks.fpdt and parallel.sequence_parallel, "chunks are not split over TP"),
        "--multi-latent-attention": (model.multi_latent_attention, "the two are not built together"),
        "--mtp-num-layers": (model.mtp_num_layers, "which layer would predict ahead is not defined"),
        "--fp8-format": (model.fp8_format, "it needs Transformer Engine's layers"),
        "--normalization LayerNorm": (
            model.normalization == "LayerNorm",
            "the output of a state is normalized without a mean: use --normalization RMSNorm",
        ),
        "--attention-mask": (sees_ahead(config.attention), "a state holds earlier tokens alone: use a causal mask"),
    }
    fixes = {"--normalization": "--normalization RMSNorm"}
    refuse_combinations(f"{FLAG} {model.experimental_attention_variant}", refused, fixes)
