# SPDX-License-Identifier: Apache-2.0
"""The ``core_attention`` of a megatron-core layer; options of core that are not supported are refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from megatron.context_parallel.attention.attend import Kept
from megatron.context_parallel.attention.usp import attention_by_rule
from megatron.context_parallel.core.transformer_layer import AttentionSettings
from megatron.context_parallel.layout.documents import Samples, samples_of
from megatron.context_parallel.layout.masks import Causal, Full, Mask, Window
from megatron.context_parallel.positions.position_dropout import Dropout

PADDED = (AttnMaskType.padding, AttnMaskType.padding_causal)
CAUSAL = (AttnMaskType.causal, AttnMaskType.causal_bottom_right)  # equal if there are as many queries as keys


# Arguments of core that the tensors and the layout determine.
DETERMINED = {"k_channels", "v_channels", "cp_comm_type", "pg_collection"}


class ContextParallelAttention(MegatronModule):
    """Attention of this rank's tokens over the complete sequence.

    The arguments are those that core passes to its own ``DotProductAttention`` and ``TEDotProductAttention``.

    Args:
        config: its ``window_size`` and ``window_attn_skip_freq`` choose this layer's window.
        settings: of all layers. If the mask of this layer's rule is not ``Causal()``, it replaces core's causal mask.
        layer_number: from 1, in the complete model.
        attn_mask_type: causal, none, or one of these with padding, which ``packed_seq_params`` describes.
        others: those in ``DETERMINED`` are ignored; ``num_splits`` may be 1.

    Attributes:
        rule: the attention rule of this layer.
        up: gives the up-projection of latents, if keys and values are sent as latents: see ``AttentionRule``.
        kept: results of micro-batches whose layers will be recomputed; None: they are computed again.

    Raises:
        ValueError: an option is not supported.
    """

    def __init__(
        self,
        config: TransformerConfig,
        settings: AttentionSettings,
        layer_number: int = 1,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **others: object,
    ) -> None:
        super().__init__(config=config)
        num_splits = others.pop("num_splits", None)
        if unknown := others.keys() - DETERMINED:
            raise TypeError(f"ContextParallelAttention does not know {', '.join(sorted(unknown))}")
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(
                f"attention_dropout={dropout} of megatron-core depends on the grid: set it to 0 and give "
                "AttentionSettings a ModelDropout"
            )
        if attention_type != "self":
            raise ValueError(f'attention_type="{attention_type}" is not supported: call cp.attention in your layer')
        if num_splits not in (None, 1):
            raise ValueError(f"num_splits={num_splits} is not supported: leave it out")
        if getattr(config, "qk_clip", False):
            raise ValueError("qk_clip=True is not supported (it needs the largest score of each head): set it to False")
        settings = settings.of_layer(layer_number)
        if config.no_rope_freq and config.no_rope_freq[layer_number - 1]:
            settings = replace(settings, rotary=None)
        self.settings, self.scale, self.layer_number = settings, softmax_scale, layer_number
        self.mask_type = attn_mask_type
        self.window = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size
        self.rule = replace(settings.rule, mask=self._mask(attn_mask_type), scale=softmax_scale)
        self.up: Callable[[], Tensor] | None = None
        self.kept: Kept | None = deque() if settings.keep else None
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
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """q [s_local, b, heads, d], k and v [s_local, b, kv_heads, d] -> [s_local, b, heads * d].

        Args:
            attention_mask: not a mask but the batch's samples (layout/documents.py).
            attn_mask_type: of this call; default: the layer's.
            packed_seq_params: the ends of the documents in the complete sequence; then q, k and v may have no
                dimension b.

        Raises:
            ValueError: an option is not supported.
        """
        if attention_bias is not None:
            raise ValueError("attention_bias, a tensor over all pairs, is not supported: use ALiBi of AttentionRule")
        if num_splits not in (None, 1):
            raise ValueError(f"num_splits={num_splits} is not supported: leave it out")
        # In a recomputed layer core passes the type as a tensor. In a dry run this tensor is fake and has no value, so
        # the layer's own type is used.
        kind = self.mask_type if attn_mask_type is None or is_fake(query) else attn_mask_type
        rule = self.rule if kind == self.mask_type else replace(self.rule, mask=self._mask(kind))
        if query.dim() == 3:  # as core passes packed sequences
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        if packed_seq_params is not None and not self.settings.separate:
            raise ValueError("packed_seq_params separates documents: use AttentionSettings(separate=True)")
        batch = with_packed(samples_of(attention_mask), packed_seq_params, rule.mask)
        if kind in PADDED and not batch.ends:
            raise ValueError(f"attn_mask_type={kind.name} needs packed_seq_params, which say which tokens are padding")
        if batch.ends and query.size(1) != len(batch.ends):
            raise ValueError(
                f"document ends of {len(batch.ends)} samples are given, but the batch has {query.size(1)} samples: "
                "give the ends for each sample"
            )
        rotary = self.settings.rotary
        if rotary is not None:
            query, key = rotary.rotate(query, key, rotary.angles(batch.ends))
        up = None if self.up is None else self.up()
        out = attention_by_rule(
            query,
            key,
            value,
            layout=self.settings.layout_of(batch),
            rule=replace(rule, dropout=self.dropout_of(batch), sinks=self.sinks(query.device), up=up),
            masks=self.settings.masks_of(batch, rule.mask),
            plans=batch.plans,
            kept=self.kept if random.is_checkpointing() else None,
        )
        return out.flatten(2)

    def _mask(self, kind: AttnMaskType) -> Mask:
        """The mask inside a document.

        Raises:
            ValueError: core's mask type is not supported, or core and the rule have different masks.
        """
        ours, theirs = self.settings.rule.mask, self._mask_of_core(kind)
        if theirs == Causal() or theirs == ours:
            return ours
        if ours != Causal():
            raise ValueError(f"megatron-core asks for {theirs}, but AttentionRule for {ours}: choose one of them")
        return theirs

    def _mask_of_core(self, kind: AttnMaskType) -> Mask:
        if kind not in (*CAUSAL, *PADDED, AttnMaskType.no_mask):
            raise ValueError(f"attn_mask_type={kind.name} is not supported: give AttentionRule a MaskFunction instead")
        causal = kind in (*CAUSAL, AttnMaskType.padding_causal)
        if self.window is None:
            return Causal() if causal else Full()
        left, right = self.window
        length = self.settings.layout.seq_length
        if causal and right > 0:
            raise ValueError(
                f"window_size={self.window} looks ahead, but attn_mask_type={kind.name} is causal: change one of them"
            )
        if left < 0 and (causal or right < 0):
            return Causal() if causal else Full()
        return Window(length if left < 0 else left, 0 if causal else length if right < 0 else right)

    def sinks(self, device: torch.device) -> Tensor | None:
        """One additional score in each softmax of a head: learned, or 0 (softmax_type off-by-one)."""
        if self.config.softmax_type == "off-by-one":
            return torch.zeros(self.heads, device=device)
        return self.softmax_offset

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sinks, sharded over TP, as core's own attention saves them."""
        state = {} if self.softmax_offset is None else {"softmax_offset": self.softmax_offset}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)

    def dropout_of(self, batch: Samples) -> Dropout | None:
        """Dropout of this layer's attention weights, for the heads of this TP rank; None in evaluation."""
        if not self.training:
            return None
        return self.settings.dropout.of_weights(self.layer_number, batch, self.first_head)


def forget_kept(model: nn.Module) -> None:
    """Drop what attention and routers keep for recompute. A step that failed may have left some."""
    for module in model.modules():
        if isinstance(kept := getattr(module, "kept", None), deque):
            kept.clear()


def with_packed(batch: Samples, packed: PackedSeqParams | None, mask: Mask) -> Samples:
    """The samples of a batch, with the documents that ``packed`` describes.

    Padding becomes part of the document before it. Under a causal mask it does not change that document's tokens.

    Args:
        mask: the mask inside a document.

    Raises:
        ValueError: an option of ``packed`` is not supported.
    """
    if packed is None:
        return batch
    if packed.qkv_format != "thd" or packed.cu_seqlens_q is None:
        raise ValueError(
            f'packed_seq_params must have qkv_format="thd" and cu_seqlens_q, not qkv_format="{packed.qkv_format}"'
        )
    if packed.local_cp_size is not None or packed.cp_group is not None:
        raise ValueError("packed_seq_params: leave local_cp_size and cp_group out, the layout chooses the ranks")
    ends = []
    for name in ("q", "kv"):
        real, padded = getattr(packed, f"cu_seqlens_{name}"), getattr(packed, f"cu_seqlens_{name}_padded")
        if real is not None and padded is not None and not padded.equal(real) and mask != Causal():
            raise ValueError(f"packed_seq_params: padding inside documents needs a causal mask, not {mask}")
        real = real if padded is None else padded
        ends.append(None if real is None else tuple(dict.fromkeys(real.tolist()[1:])))
    if ends[1] not in (None, ends[0]):
        raise ValueError("packed_seq_params: cu_seqlens_kv differs from cu_seqlens_q, but must be equal")
    if batch.ends not in ((), (ends[0],)):
        raise ValueError("packed_seq_params and attention_mask describe different documents: pass one of them")
    return replace(batch, ends=(ends[0],), plans={})
