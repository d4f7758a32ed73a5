# SPDX-License-Identifier: Apache-2.0
"""The ModuleSpecs that put our attention into megatron-core's GPTModel."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

with warnings.catch_warnings():  # core reports at import that apex is missing
    warnings.simplefilter("ignore")
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    from megatron.context_parallel.core.lora import ColumnParallelLinearWithLora, Lora, RowParallelLinearWithLora
    from megatron.context_parallel.core.transformer_layer import (
        AttentionSettings,
        ChunkedTransformerLayer,
        ChunkSettings,
        LongContextLayer,
    )

from megatron.context_parallel.attention.usp import attention
from megatron.context_parallel.fpdt.chunked_ffn import apply_in_chunks, even_spans
from megatron.context_parallel.layout.samples import Samples, samples
from megatron.context_parallel.positions.dropout import Dropout

INPUTS_CUT = ("linear_proj", "linear_fc2")  # layers whose inputs TP cuts
__all__ = ["AttentionSettings", "ChunkSettings", "ChunkedNorm", "ContextParallelAttention", "Norm", "block_spec"]


class ContextParallelAttention(MegatronModule):
    """The ``core_attention`` of a layer: queries, keys and values of this rank's tokens in, their outputs out."""

    def __init__(
        self,
        config: TransformerConfig,
        settings: AttentionSettings,
        layer_number: int = 1,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError(
                f"attention_dropout={config.attention_dropout} of megatron-core depends on the grid: set it to 0, and "
                "give AttentionSettings a ModelDropout"
            )
        self.settings, self.scale, self.layer_number = settings, softmax_scale, layer_number
        tensor = settings.layout.grid.tensor
        self.heads = config.num_attention_heads // tensor.size
        self.first_head = tensor.rank * self.heads
        self.softmax_offset = None  # core's name, so that checkpoints are the same
        if config.softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.empty(self.heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, dim=0, stride=1)
            if config.perform_initialization:
                config.init_method(self.softmax_offset)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """q [s_local, b, heads, d], k and v [s_local, b, kv_heads, d] -> [s_local, b, heads * d].

        ``attention_mask``, which core hands through to here, is what layout/samples.py tells of the batch. Masks
        themselves are never tensors.
        """
        settings, rule, seen = self.settings, self.settings.rule, samples(attention_mask)
        layout, masks = settings.of_samples(seen)
        if settings.rotary is not None:
            query, key = settings.rotary.rotate(query, key, settings.rotary.angles(seen.ends))
        out = attention(
            query,
            key,
            value,
            layout=layout,
            mask=masks,
            kernel=rule.kernel,
            scale=self.scale,
            alibi_slopes=rule.alibi_slopes,
            mask_cpu_threshold=rule.mask_cpu_threshold,
            dropout=self.dropout_of(seen),
            gather_keys=rule.gather_keys,
            softcap=rule.softcap,
            sinks=self.sinks(query.device),
        )
        return out.flatten(2)

    def sinks(self, device: torch.device) -> Tensor | None:
        """One more score a head in each softmax: learned, or 0 (off-by-one)."""
        if self.config.softmax_type == "off-by-one":
            return torch.zeros(self.heads, device=device)
        return self.softmax_offset

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sinks, cut over TP, as core's own attention saves them."""
        state = {} if self.softmax_offset is None else {"softmax_offset": self.softmax_offset}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)

    def dropout_of(self, seen: Samples) -> Dropout | None:
        """Of this layer's attention weights, for the heads of this TP rank; none in evaluation."""
        if not self.training:
            return None
        return self.settings.dropout.of_weights(self.layer_number, seen, self.first_head)


class Norm(nn.Module):
    """LayerNorm or RMSNorm through PyTorch, usable under TP sequence parallelism.

    There every TP rank normalizes its own tokens, so the gradients of the weights are partial sums; core adds them up
    over TP where a parameter says ``sequence_parallel``.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.shape, self.eps = (hidden_size,), eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.bias is None:
            return functional.rms_norm(x, self.shape, weight, self.eps)
        return functional.layer_norm(x, self.shape, weight, self.bias, self.eps)


class ChunkedNorm(Norm):
    """The final norm in spans of tokens: keeps its input alone, which may be a host buffer."""

    def __init__(self, config: TransformerConfig, hidden_size: int, *, chunks: ChunkSettings, **kwargs: Any) -> None:
        super().__init__(config, hidden_size, **kwargs)
        self.chunks = chunks

    def forward(self, x: Tensor) -> Tensor:
        norm, chunks = super().forward, self.chunks
        offload = chunks.offload if chunks.streamed else None
        spans = even_spans(x.size(0), chunks.ffn_chunks)
        return apply_in_chunks(lambda part, _: norm(part), x, [*self.parameters()], spans, offload=offload)


def block_spec(
    config: TransformerConfig,
    settings: AttentionSettings,
    *,
    transformer_engine: bool,
    num_layers: int,
    chunks: ChunkSettings | None = None,
    recomputed: int = 0,
    lora: Lora | None = None,
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, with our attention core.

    Args:
        config: megatron-core's model configuration.
        settings: layout, mask and kernel.
        transformer_engine: linears, norms and FP8 from Transformer Engine through core's own spec; otherwise core's
            linears and PyTorch's norms.
        num_layers: layers of this stage.
        chunks: FPDT, the FFN in chunks, streamed hidden states; None for core's own layer.
        recomputed: so many layers, the first, recompute their attention chunk by chunk (FPDT).
        lora: adapters, not with ``transformer_engine``.
    """
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        final_norm = TENorm
    else:
        layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
        final_norm = Norm
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        if config.qk_layernorm:
            qkv = layer.submodules.self_attention.submodules
            qkv.q_layernorm = qkv.k_layernorm = Norm
    if lora is not None:
        _add_adapters(layer, lora, transformer_engine)
    layer.submodules.self_attention.submodules.core_attention = partial(ContextParallelAttention, settings=settings)
    layers = [replace(layer, module=LongContextLayer, params={**layer.params, "attention": settings})] * num_layers
    if chunks is not None:
        layers = [
            replace(layer, module=ChunkedTransformerLayer, params={**layer.params, **settings})
            for settings in ({"chunks": chunks, "recompute": index < recomputed} for index in range(num_layers))
        ]
        if chunks.fpdt:
            final_norm = ModuleSpec(ChunkedNorm, params={"chunks": chunks})
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm)


def _add_adapters(layer: ModuleSpec, lora: Lora, transformer_engine: bool) -> None:
    """Put linear layers with adapters in the places of core's."""
    if transformer_engine:
        raise ValueError("lora: Transformer Engine's layers hide what goes into their linear ones")
    for part in (layer.submodules.self_attention, layer.submodules.mlp):
        for name in vars(part.submodules):
            if name in lora.targets:
                kind = RowParallelLinearWithLora if name in INPUTS_CUT else ColumnParallelLinearWithLora
                setattr(part.submodules, name, ModuleSpec(kind, params={"lora": lora}))
