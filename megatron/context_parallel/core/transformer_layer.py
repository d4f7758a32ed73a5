# SPDX-License-Identifier: Apache-2.0
"""megatron-core's TransformerLayer with dropout by position, optionally in chunks: the layer (FPDT) or only the FFN.

The sub-modules, the parameters' names and the checkpoints are core's. Only the dropout, and the order in which tokens
pass through the sub-modules, are different.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import BoundArguments, signature
from math import ceil
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron.context_parallel.attention.rule import AttentionRule
from megatron.context_parallel.core.expert_choice import RouterRule
from megatron.context_parallel.core.experts import Experts, Statistics
from megatron.context_parallel.core.gpt_dropout import ATTENTION, FFN, HiddenDropout, ModelDropout, stream_of
from megatron.context_parallel.fpdt.chunked_ffn import apply_in_chunks, even_spans
from megatron.context_parallel.fpdt.chunked_layer import ChunkedLayer
from megatron.context_parallel.fpdt.chunked_mixer import ChunkedLinearLayer
from megatron.context_parallel.fpdt.host_store import HiddenStates, Offload
from megatron.context_parallel.layout.documents import Samples, samples_of
from megatron.context_parallel.layout.masks import Documents, Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span
from megatron.context_parallel.positions.rope import LayoutRotaryEmbedding
from megatron.platform.core_versions import numbered_after_model


@dataclass(frozen=True)
class LayerRule:
    """What the attention of one layer computes.

    Attributes:
        rule: its mask applies inside a document.
        rotary: RoPE; None if the layer has none.
    """

    rule: AttentionRule
    rotary: LayoutRotaryEmbedding | None = None


@dataclass(frozen=True)
class AttentionSettings:
    """Settings of the attention of all layers.

    Attributes:
        layout: which rank holds which tokens.
        rule: what attention computes; its mask applies inside a document.
        separate: whether packed documents are separated.
        rotary: RoPE; None if positions are encoded otherwise.
        dropout: probabilities; core's own dropout is 0.
        latents: multi-latent attention sends latents, not keys and values.
        keep: layers that core recomputes keep attention's result, so that it is computed once.
        layers: rule and RoPE of each layer of the complete model, in place of ``rule`` and ``rotary``; empty: all have
            these.
        linear_kernel: kernels of linear-attention and SSM layers, as in ``linear_attention``.
    """

    layout: SequenceLayout
    rule: AttentionRule = AttentionRule()
    separate: bool = True
    rotary: LayoutRotaryEmbedding | None = None
    dropout: ModelDropout = ModelDropout()
    latents: bool = False
    keep: bool = False
    layers: tuple[LayerRule, ...] = ()
    linear_kernel: str = "auto"

    def of_layer(self, number: int) -> AttentionSettings:
        """The settings of one layer, by its number in the complete model, from 1; further layers are like the last."""
        if not self.layers:
            return self
        own = self.layers[min(number, len(self.layers)) - 1]
        return replace(self, rule=own.rule, rotary=own.rotary, layers=())

    def layout_of(self, batch: Samples) -> SequenceLayout:
        """Which rank holds which tokens of a batch.

        It is the same for all samples: with a balance by documents, a batch has one sample (check_model.py).
        """
        return self.layout.of_documents(batch.ends[0]) if batch.ends else self.layout

    def masks_of(self, batch: Samples, mask: Mask) -> list[Mask]:
        """One mask, or one for each sample of a batch; ``mask`` applies inside a document."""
        return [Documents(row, mask) for row in batch.ends] if batch.ends and self.separate else [mask]


@dataclass
class ChunkSettings:
    """How a layer is computed in chunks.

    Attributes:
        attention: settings of the attention.
        fpdt: compute the layer in the layout's chunks; otherwise core's attention is unchanged.
        ffn_chunks: compute the FFN in at least this many spans; None (only without FPDT): in one span.
        offload: host memory for FPDT's chunks and for streamed hidden states; None: everything stays on the device.
        streamed: hidden states are host buffers.
    """

    attention: AttentionSettings
    fpdt: bool = False
    ffn_chunks: int | None = None
    offload: Offload | None = None
    streamed: bool = False


class GatedSelfAttention(SelfAttention):
    """megatron-core's attention with a gate on its output (Qwen3-Next), without core's compilation of the gate."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated(x, gate)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """``x * sigmoid(gate)`` in x's shape and dtype; the sigmoid is in fp32, for fp64 in fp64.

    The gate may have another shape with as many elements.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x * torch.sigmoid(gate.reshape(x.shape).to(wide))).to(x.dtype)


class LongContextLayer(TransformerLayer):
    """A transformer layer with dropout of hidden states by position. It may have a mixer alone or an FFN alone.

    Args:
        attention: settings of the attention.
        experts: the layer has a mixture of experts that are chosen by this rule, in place of ``submodules.mlp``.
        output_norm: class of norms of the outputs of attention and FFN, before they are added; None: no such norms.
        parallel_residual: the FFN reads the layer's input, not the result of attention; both outputs are added to it.
        residual_multiplier: factor of the outputs of attention and FFN, before they are added.
    """

    def __init__(
        self,
        *args: Any,
        attention: AttentionSettings,
        experts: RouterRule | None = None,
        output_norm: type | None = None,
        parallel_residual: bool = False,
        residual_multiplier: float | None = None,
        **kwargs: Any,
    ) -> None:
        config = args[0] if args else kwargs["config"]
        super().__init__(*args, **numbered_after_model(kwargs, config.num_layers))
        self.parallel_residual, self.attended = parallel_residual, None
        self.residual_multiplier = residual_multiplier
        self.post_self_attn_layernorm = self.post_mlp_layernorm = None
        if output_norm is not None:
            sizes = self.config, self.config.hidden_size, self.config.layernorm_epsilon
            self.post_self_attn_layernorm, self.post_mlp_layernorm = output_norm(*sizes), output_norm(*sizes)
        if experts is not None:
            # Not through the ModuleSpec, because core's layer logs a warning for classes that it does not know.
            self.mlp = Experts(self.config, experts, self.layer_number)
            self.is_moe_layer = True
        self.attention_settings, self.dropout = attention, None
        made = vars(self) | self._modules  # the methods below hide these modules
        self.core_add = {ATTENTION: made["self_attn_bda"], FFN: made["mlp_bda"]}
        del self.self_attn_bda, self.mlp_bda  # replaced by the methods below

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[s_local, b, h] -> [s_local, b, h] and None. ``attention_mask`` has the samples (layout/documents.py)."""
        self.dropout = self._hidden_dropout(samples_of(attention_mask))
        if not self.parallel_residual:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        self.attended, context = self._forward_attention(hidden_states, attention_mask, *args, **kwargs)
        output = self._forward_mlp(hidden_states, padding_mask=kwargs.get("padding_mask"))
        self.attended = None
        return output, context

    def _hidden_dropout(self, batch: Samples) -> HiddenDropout | None:
        """The dropout of hidden states for a batch; None without dropout."""
        settings = self.attention_settings
        if not (self.training and settings.dropout.hidden):
            return None
        return HiddenDropout(settings.dropout, batch, settings.layout_of(batch), self.config.sequence_parallel)

    def self_attn_bda(self, training: bool, fused: bool) -> Callable:
        """(output of attention with its bias, residual, _) -> their sum, after dropout."""
        return self.dropout_add(self.dropout, ATTENTION)

    def mlp_bda(self, training: bool, fused: bool) -> Callable:
        """(output of the FFN with its bias, residual, _) -> their sum, after dropout."""
        add = self.dropout_add(self.dropout, FFN)
        if not self.parallel_residual:
            return add
        return lambda output_with_bias, _, probability: add(output_with_bias, self.attended, probability)

    def dropout_add(self, dropout: HiddenDropout | None, which: int, rows: Span | None = None) -> Callable:
        """The function that both methods above return, for ``rows`` of this rank's tokens; without dropout, core's."""
        add = self._add(dropout, which, rows)
        norm = self.post_self_attn_layernorm if which == ATTENTION else self.post_mlp_layernorm
        factor = self.residual_multiplier
        if norm is None and factor is None:
            return add

        def change_and_add(
            output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
        ) -> Tensor:
            x, bias = output_with_bias
            x = x if bias is None else x + bias
            x = x if norm is None else norm(x)
            return add((x if factor is None else x * factor, None), residual, probability)

        return change_and_add

    def _add(self, dropout: HiddenDropout | None, which: int, rows: Span | None) -> Callable:
        if dropout is None or isinstance(self.core_add[which], IdentityFuncOp):
            return self.core_add[which](self.training, self.config.bias_dropout_fusion)

        def add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, _: float) -> Tensor:
            x, bias = output_with_bias
            x = x if bias is None else x + bias
            return residual.to(x.dtype) + dropout(x, stream_of(self.layer_number, which), rows)

        return add


class ChunkedTransformerLayer(LongContextLayer):
    """A transformer layer that holds the intermediate results of only one chunk at a time.

    Args:
        chunks: how the layer is computed.
        recompute: under FPDT, keep only the layer's input and compute attention again in the backward pass.
    """

    def __init__(self, *args: Any, chunks: ChunkSettings, recompute: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, attention=chunks.attention, **kwargs)
        self.has_state = hasattr(self.self_attention, "inputs_of_rule")  # then it is a StateMixer
        self.chooses = hasattr(self.self_attention, "choice_in_chunks")  # then it is a SparseLatentAttention
        self.has_mixer = not isinstance(self.self_attention, IdentityOp)
        self.has_ffn = self.is_moe_layer or not isinstance(self.mlp, IdentityOp)
        self.chunks = chunks
        if self.has_mixer and not self.has_state:
            self.chunks = replace(chunks, attention=self.self_attention.core_attention.settings)
        self.recompute = recompute

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[s_local, b, h] -> [s_local, b, h] and None. ``attention_mask`` has the samples (layout/documents.py)."""
        if not self.chunks.fpdt:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        self._refuse(signature(super()._forward_attention).bind(hidden_states, attention_mask, *args, **kwargs))
        batch = samples_of(attention_mask)
        if not self.has_mixer:
            output = hidden_states
        elif len(batch.ends) <= 1 or self.chooses:
            output = self._chunked(hidden_states, batch)
        else:
            parts = zip(hidden_states.split(1, dim=1), batch.each(), strict=True)  # each sample has its own tiles
            output = torch.cat([self._chunked(part, sample) for part, sample in parts], dim=1)
        if self.is_moe_layer or not self.has_mixer:
            offload = self.chunks.offload if self.chunks.streamed else None
            output = self._ffn_in_chunks(output, self._hidden_dropout(batch), kwargs.get("padding_mask"), offload)
        return output, None

    def _refuse(self, call: BoundArguments) -> None:
        """Raises ValueError for arguments that a chunked layer does not support."""
        asked = {name for name, value in call.arguments.items() if value is not None}
        asked -= {"hidden_states", "attention_mask", "padding_mask"}
        if self.attention_settings.rotary is not None:
            asked -= {"rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin"}
        if asked:
            raise ValueError(f"a layer in chunks does not support {', '.join(sorted(asked))}: see AttentionSettings")

    def _chunked(self, hidden_states: Tensor, batch: Samples) -> Tensor:
        settings, mixer, dropout = self.chunks, self.self_attention, self._hidden_dropout(batch)
        layout = settings.attention.layout_of(batch)
        parameters, ffn = list(self.parameters()), {}
        if self.is_moe_layer:  # experts follow when all chunks are there: see _ffn_in_chunks
            others = {id(parameter) for parameter in self._ffn_parameters()}
            parameters = [parameter for parameter in parameters if id(parameter) not in others]
        elif self.has_ffn:
            pieces = ceil(settings.ffn_chunks / layout.chunks)
            ffn = {"ffn": partial(self._ffn, dropout, None), "ffn_by_rows": True, "ffn_pieces": pieces}
        common: dict[str, Any] = {
            **ffn,
            "output": partial(self._output, layout, dropout),
            "parameters": parameters,
            "layout": layout,
            "offload": settings.offload,
            "streamed": settings.streamed,
            "recompute": self.recompute and self.training,
        }
        if self.has_state:
            layer = ChunkedLinearLayer(
                project=lambda x, _: mixer.projected(self.input_layernorm(x))[:-1],
                linear=mixer.rule,
                heads=mixer.inputs_of_rule,
                weight=mixer.conv1d.weight.squeeze(1),
                bias=mixer.conv1d.bias,
                activation="silu",
                documents=batch.ends if settings.attention.separate else (),
                exchange=mixer.exchange,
                kernel=settings.attention.linear_kernel,
                **common,
            )
            return layer(hidden_states)
        if self.chooses:
            layer = mixer.choice_in_chunks(self.input_layernorm, batch, hidden_states.size(1), **common)
            return layer(hidden_states)
        core = mixer.core_attention
        (mask,) = settings.attention.masks_of(batch, core.rule.mask)
        sinks = core.sinks(next(self.parameters()).device)
        rule = replace(core.rule, mask=mask, dropout=core.dropout_of(batch), sinks=sinks)
        project = partial(self._project, layout, batch.ends[0] if batch.ends else None)
        return ChunkedLayer(project=project, rule=rule, plan=batch.plans.get(mask), **common)(hidden_states)

    def _project(
        self, layout: SequenceLayout, ends: tuple[int, ...] | None, x: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[c, b, h] -> q, k, v [c, b, heads, d], rotated; under TP sequence parallelism c grows by a factor of TP."""
        query, key, value, *_ = self._projected(x)
        rotary = self.chunks.attention.rotary
        if rotary is not None:
            query, key = rotary.rotate(query, key, rotary.of_spans(layout.local_chunk_spans(chunk), ends))
        return query, key, value

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, and the gate if there is one."""
        gate = self.config.attention_output_gate
        return self.self_attention.get_query_key_value_tensors(self.input_layernorm(x), None, output_gate=gate)

    def _output(
        self, layout: SequenceLayout, dropout: HiddenDropout | None, out: Tensor, x: Tensor, chunk: int
    ) -> Tensor:
        """Output projection of [c, b, heads, d], bias, dropout and the residual x.

        The gate is computed again, with q, k and v: otherwise it would have to be kept during attention.
        """
        mixer = self.self_attention
        if self.has_state:
            projected = mixer.out_proj(mixer.gated_norm(out, mixer.projected(self.input_layernorm(x))[-1]))
            return self.dropout_add(dropout, ATTENTION, layout.local_chunks[chunk])(projected, x, 0.0)
        if self.config.attention_output_gate:
            out = gated(out, self._projected(x)[3])
        if self.chooses:
            out = mixer.raised(out)
        add = self.dropout_add(dropout, ATTENTION, layout.local_chunks[chunk])
        return add(self.self_attention.linear_proj(out.flatten(2)), x, 0.0)

    def _forward_mlp(
        self, hidden_states: Tensor, inference_context: None = None, padding_mask: Tensor | None = None, **rest: Any
    ) -> Tensor:
        if not self.chunks.ffn_chunks or not self.has_ffn:
            return super()._forward_mlp(hidden_states, inference_context, padding_mask, **rest)
        return self._ffn_in_chunks(hidden_states, self.dropout, padding_mask)

    def _ffn_in_chunks(
        self, x: Tensor, dropout: HiddenDropout | None, positions: Tensor | None, offload: Offload | None = None
    ) -> Tensor:
        """The FFN in spans of rows. Experts first get the statistics of all rows, so x is read twice.

        Args:
            positions: of the tokens [b, s], see :func:`~megatron.context_parallel.core.experts.router_positions`.
        """
        spans, statistics = even_spans(x.size(0), self.chunks.ffn_chunks), None
        if self.is_moe_layer:
            positions = None if positions is None else positions.t()
            statistics = self.mlp.router.count(self._logits(x, spans, offload), positions)
        ffn = partial(self._ffn, dropout, statistics)
        return apply_in_chunks(ffn, x, self._ffn_parameters(), spans, offload=offload)

    @torch.no_grad()
    def _logits(self, x: Tensor, spans: Sequence[Span], offload: Offload | None) -> Tensor:
        """The router's logits [s, b, E] on the device."""
        gating, norm = self.mlp.router.gating, self.pre_mlp_layernorm
        return torch.cat([gating(norm(part)) for part in HiddenStates(x, offload).walk(spans)])

    def _ffn_parameters(self) -> list[Tensor]:
        parts = self.pre_mlp_layernorm, self.mlp, self.post_mlp_layernorm
        return [parameter for part in parts if part is not None for parameter in part.parameters()]

    def _ffn(self, dropout: HiddenDropout | None, statistics: Statistics | None, x: Tensor, rows: Span) -> Tensor:
        add = self.dropout_add(dropout, FFN, rows)
        of_rows = {} if statistics is None else {"statistics": statistics.rows(rows)}
        return add(self.mlp(self.pre_mlp_layernorm(x), **of_rows), x, 0.0)
