# SPDX-License-Identifier: Apache-2.0
"""The ModuleSpecs that put our attention into megatron-core's GPTModel."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional

with warnings.catch_warnings():  # core reports at import that apex is missing
    warnings.simplefilter("ignore")
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    from megatron.context_parallel.core.core_attention import ContextParallelAttention
    from megatron.context_parallel.core.expert_choice import RouterRule
    from megatron.context_parallel.core.lora import ColumnParallelLinearWithLora, Lora, RowParallelLinearWithLora
    from megatron.context_parallel.core.mixers.state_mixer import Mixer
    from megatron.context_parallel.core.transformer_layer import (
        AttentionSettings,
        ChunkedTransformerLayer,
        ChunkSettings,
        GatedSelfAttention,
        LayerRule,
        LongContextLayer,
    )

from megatron.context_parallel.fpdt.chunked_ffn import apply_in_chunks, even_spans
from megatron.context_parallel.layout.grid import Axis
from megatron.platform.core_versions import submodules_of

INPUTS_CUT = ("linear_proj", "linear_fc2", "out_proj")  # layers whose inputs are split over TP
__all__ = ["AttentionSettings", "ChunkSettings", "ChunkedNorm", "ContextParallelAttention", "LayerRule", "Norm",
           "StageLayers", "block_spec"]  # fmt: skip


class Norm(nn.Module):
    """PyTorch's LayerNorm or RMSNorm, usable under TP sequence parallelism.

    There every TP rank normalizes its own tokens, and the gradients of the weights are partial sums. Core sums the
    gradients of parameters with the attribute ``sequence_parallel`` over TP. ``scale`` is a factor of the result.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.shape, self.eps, self.scale = (hidden_size,), eps, scale
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
            result = functional.rms_norm(x, self.shape, weight, self.eps)
        else:
            result = functional.layer_norm(x, self.shape, weight, self.bias, self.eps)
        return result if self.scale is None else result * self.scale


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks of an axis. Each rank goes on with it, so the gradients of all ranks are summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis, total = axis, x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.apply(grad, ctx.axis), None


class AllHeadsNorm(nn.Module):
    """RMSNorm of the queries, or of the keys, of all heads together (OLMo 2); TP splits its weights with the heads.

    Args:
        hidden_size: size of a head.
        heads: of all TP ranks.
        tensor: TP; its ranks add up the squares of their heads.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int, tensor: Axis) -> None:
        super().__init__()
        self.width, self.eps, self.tensor = heads * hidden_size, eps, tensor
        self.zero_centered = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(start(self.width // tensor.size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, heads of this rank, d] -> the same; squares are summed in fp32, for fp64 in fp64."""
        wide = x.flatten(2).to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(dim=-1, keepdim=True)
        if self.tensor.size > 1:
            squares = _SumOverRanks.apply(squares, self.tensor)
        weight = self.weight + 1 if self.zero_centered else self.weight
        return (wide * torch.rsqrt(squares / self.width + self.eps) * weight).to(x.dtype).view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weights, split over TP."""
        return make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets)


class AllHeadsSelfAttention(GatedSelfAttention):
    """megatron-core's attention with norms over all heads (OLMo 2), which core 0.18 refuses in a ModuleSpec.

    It accepts norms only with ``qk_layernorm``, but then it would add up their gradients over TP.
    """

    def __init__(self, config: TransformerConfig, *args: Any, tensor: Axis, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        size, counts = config.kv_channels, (config.num_attention_heads, config.num_query_groups)
        self.q_layernorm, self.k_layernorm = (
            AllHeadsNorm(config, size, config.layernorm_epsilon, heads=heads, tensor=tensor) for heads in counts
        )


class ChunkedNorm(Norm):
    """The final norm in spans of tokens; it keeps only its input, which may be a host buffer."""

    def __init__(self, config: TransformerConfig, hidden_size: int, *, chunks: ChunkSettings, **kwargs: Any) -> None:
        super().__init__(config, hidden_size, **kwargs)
        self.chunks = chunks

    def forward(self, x: Tensor) -> Tensor:
        norm, chunks = super().forward, self.chunks
        offload = chunks.offload if chunks.streamed else None
        spans = even_spans(x.size(0), chunks.ffn_chunks)
        return apply_in_chunks(lambda part, _: norm(part), x, [*self.parameters()], spans, offload=offload)


@dataclass(frozen=True)
class StageLayers:
    """The layers of a pipeline stage.

    Attributes:
        num_layers: how many.
        transformer_engine: linears, norms and FP8 from Transformer Engine through core's own spec; otherwise core's
            linears and PyTorch's norms.
        recomputed: number of layers, from the first, that recompute their attention chunk by chunk (FPDT).
        lora: adapters, not with ``transformer_engine``.
        experts: the layers, from 0, whose FFN is a mixture of experts, and how tokens choose them; not with
            ``transformer_engine``. Experts get no adapters.
        input_norms: normalize the inputs of attention and FFN; without it not with ``transformer_engine``.
        output_norms: normalize the outputs of attention and FFN before they are added.
        mixers: the layers, from 0, that have something else in place of attention, from mixers/; not with
            ``transformer_engine``.
        pattern: for each layer what it consists of, as in core's MambaStack: M (Mamba2), * (attention), - (FFN) or E
            (FFN, in ``experts`` too); empty: attention and FFN. Not with ``transformer_engine``.
        all_heads_norms: normalize queries and keys over all heads together; not with ``transformer_engine``.
        parallel_residual: attention and FFN both read the layer's input; not in chunks.
        residual_multiplier: factor of the outputs of attention and FFN, before they are added.
        final_scale: factor of the output of the final norm; not with ``transformer_engine``.
    """

    num_layers: int
    transformer_engine: bool = False
    recomputed: int = 0
    lora: Lora | None = None
    experts: Mapping[int, RouterRule] | None = None
    input_norms: bool = True
    output_norms: bool = False
    mixers: Mapping[int, Mixer] | None = None
    pattern: str = ""
    all_heads_norms: bool = False
    parallel_residual: bool = False
    residual_multiplier: float | None = None
    final_scale: float | None = None

    def __post_init__(self) -> None:
        if self.transformer_engine and (self.mixers or self.pattern or self.experts):
            raise ValueError("mixers, patterns and experts need core's own layers: leave out transformer_engine")
        if self.transformer_engine and (self.all_heads_norms or not self.input_norms or self.final_scale is not None):
            raise ValueError("all_heads_norms, final_scale, no input_norms: each needs transformer_engine=False")


def block_spec(
    config: TransformerConfig, settings: AttentionSettings, stage: StageLayers, chunks: ChunkSettings | None = None
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, with our attention core.

    Args:
        config: megatron-core's model configuration.
        settings: layout, mask and kernel.
        chunks: FPDT, the FFN in chunks, streamed hidden states; None for core's own layer.
    """
    transformer_engine, lora = stage.transformer_engine, stage.lora
    if stage.parallel_residual and chunks is not None:
        raise ValueError("a layer in chunks has no parallel residual: leave chunks or parallel_residual out")
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        final_norm = TENorm
    else:
        layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
        final_norm = Norm
        norm = Norm if stage.input_norms else IdentityOp
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        qkv = layer.submodules.self_attention.submodules
        if config.qk_layernorm:
            qkv.q_layernorm = qkv.k_layernorm = Norm
        if stage.all_heads_norms:
            attention = layer.submodules.self_attention
            params = {**attention.params, "tensor": settings.layout.grid.tensor}
            layer.submodules.self_attention = replace(attention, module=AllHeadsSelfAttention, params=params)
    if lora is not None:
        _add_adapters(layer, lora, transformer_engine)
    if config.attention_output_gate and not stage.all_heads_norms:
        layer.submodules.self_attention = replace(layer.submodules.self_attention, module=GatedSelfAttention)
    layer.submodules.self_attention.submodules.core_attention = partial(ContextParallelAttention, settings=settings)
    params = {**layer.params, "attention": settings, "output_norm": final_norm if stage.output_norms else None}
    params |= {"parallel_residual": stage.parallel_residual, "residual_multiplier": stage.residual_multiplier}
    layers = [replace(layer, module=LongContextLayer, params=params)] * stage.num_layers
    if stage.pattern:
        kinds = zip(layers, stage.pattern, strict=True)
        layers = [replace(one, submodules=_half(one.submodules, kind)) for one, kind in kinds]
    for index, mixer in (stage.mixers or {}).items():
        made = mixer(settings, partial(_linear, lora=lora), Norm)
        names = {**layers[index].submodules.sharded_state_dict_keys_map, **made.names}
        own = replace(layers[index].submodules, self_attention=made.spec, sharded_state_dict_keys_map=names)
        layers[index] = replace(layers[index], submodules=own)
    for index, rule in (stage.experts or {}).items():
        # The norm before experts is not fused with them: in checkpoints it has its own name, as in Megatron-LM.
        names = dict(layers[index].submodules.sharded_state_dict_keys_map)
        names.pop("pre_mlp_layernorm.", None)
        without_ffn = replace(layers[index].submodules, mlp=IdentityOp, sharded_state_dict_keys_map=names)
        layers[index] = replace(layers[index], submodules=without_ffn, params={**layers[index].params, "experts": rule})
    if chunks is not None:
        layers = [
            replace(
                layer,
                module=ChunkedTransformerLayer,
                params={name: value for name, value in layer.params.items() if name != "attention"}
                | {"chunks": chunks, "recompute": index < stage.recomputed},
            )
            for index, layer in enumerate(layers)
        ]
        if chunks.fpdt:
            final_norm = ModuleSpec(ChunkedNorm, params={"chunks": chunks, "scale": stage.final_scale})
    if stage.final_scale is not None and final_norm is Norm:
        final_norm = ModuleSpec(Norm, params={"scale": stage.final_scale})
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm)


MIXERS = "M*"  # in a pattern: layers without an FFN


def _half(submodules: TransformerLayerSubmodules, kind: str) -> TransformerLayerSubmodules:
    """A layer that consists of its mixer alone or, depending on its kind in a pattern, of its FFN alone."""
    if kind in MIXERS:
        return replace(submodules, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
    return replace(submodules, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp)


def _add_adapters(layer: ModuleSpec, lora: Lora, transformer_engine: bool) -> None:
    """Replace core's linear layers by layers with adapters."""
    if transformer_engine:
        raise ValueError("lora does not support Transformer Engine's layers: use transformer_engine=False")
    for part in (layer.submodules.self_attention, layer.submodules.mlp):
        parts = submodules_of(part)
        for name in vars(parts):
            if name in lora.targets:
                setattr(parts, name, _linear(name, lora))


def _linear(name: str, lora: Lora | None) -> type | ModuleSpec:
    """The linear layer of this name, with an adapter if it gets one."""
    if lora is None or name not in lora.targets:
        return RowParallelLinear if name in INPUTS_CUT else ColumnParallelLinear
    kind = RowParallelLinearWithLora if name in INPUTS_CUT else ColumnParallelLinearWithLora
    return ModuleSpec(kind, params={"lora": lora})


EPSILON = 1e-5  # of the embedding's norm, independent of the layers' epsilon; BigScience's value


class NormedWords(VocabParallelEmbedding):
    """BLOOM's word embedding: a LayerNorm after the lookup, before positions are added. Takes over the table of
    ``words``.

    It is ``--embed-layernorm`` of BigScience's Megatron-DeepSpeed (megatron/mpu/layers.py, VocabParallelEmbedding), and
    ``word_embeddings_layernorm`` of transformers' BloomModel. The norm's weights are replicated over TP. If ``words``
    scatters its result over TP, each TP rank normalizes its own tokens and has a part of the norm's gradient; otherwise
    each has all tokens and the complete gradient.
    """

    def __init__(self, words: VocabParallelEmbedding, config: TransformerConfig) -> None:
        nn.Module.__init__(self)
        weight = words.weight
        vars(self).update({name: value for name, value in vars(words).items() if name not in vars(self)})
        self.weight = weight
        config = copy.copy(config)
        config.normalization, config.layernorm_zero_centered_gamma = "LayerNorm", False
        config.sequence_parallel = words.reduce_scatter_embeddings
        self.norm = Norm(config, words.embedding_dim, EPSILON)

    def forward(self, input_: Tensor) -> Tensor:
        """Like core's: [b, s] -> [b, s, h], or [s / TP, b, h] if it scatters."""
        return self.norm(super().forward(input_))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The table, and the norm's weights."""
        norm = make_sharded_tensors_for_checkpoint(
            self.norm.state_dict(prefix="", keep_vars=True),
            f"{prefix}norm.",
            {},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | norm
