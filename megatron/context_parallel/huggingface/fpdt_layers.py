# SPDX-License-Identifier: Apache-2.0
"""FPDT for decoder layers of the common form: norm, attention, norm, MLP, each half with a residual connection.

Only the layer's own sub-modules are used. Its attention module computes queries, keys and values; our attention
function then stops it by an exception that carries them. A test on a few tokens shows whether the sub-modules, put
together in this form, are equal to the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatron.context_parallel.fpdt.chunked_layer import ChunkedLayer
from megatron.context_parallel.fpdt.host_store import Offload
from megatron.context_parallel.fpdt.sparse.chunked_choice import ChunkedChoiceLayer
from megatron.context_parallel.huggingface.indexed_layers import (
    chooses_keys,
    gate_by_choice,
    project_by_choice,
    result_by_choice,
)
from megatron.context_parallel.huggingface.probe import run_alone
from megatron.context_parallel.huggingface.transformers_attention import Call, Shared
from megatron.context_parallel.layout.grid import Grid
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.sparse_attention.chosen_attention import Indexer
from megatron.context_parallel.sparse_attention.chosen_math import Form
from megatron.formulas import sizes as counts

PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


@dataclass(frozen=True)
class Fpdt:
    """Decoder layers in chunks.

    Attributes:
        chunk_size: tokens of a chunk, over all ranks.
        offload: keep finished chunks in host memory.
        ffn_chunks: number of spans for the MLP; default: twice the number of chunks.
        recompute: keep only a layer's input for the backward pass; use it without gradient checkpointing.

    Raises:
        ValueError: a size is below 1.
    """

    chunk_size: int = 65536
    offload: bool = True
    ffn_chunks: int | None = None
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.chunk_size < 1 or (self.ffn_chunks is not None and self.ffn_chunks < 1):
            raise ValueError(f"the sizes of fpdt must be 1 or more: {self}")

    def chunks(self, seq_length: int, grid: Grid) -> int:
        """Number of chunks of a ring rank's sequence. Raises ValueError if ``chunk_size`` is too large or too small."""
        ring, unit = grid.ring.size, counts.chunk_unit(grid.ulysses.size, 1, False)
        longest = counts.chunk_rows(self.chunk_size, ring, unit)
        if longest < 1 or self.chunk_size > seq_length:
            raise ValueError(f"fpdt cannot have chunk_size={self.chunk_size}: use {ring * unit} to {seq_length}")
        return counts.attention_chunks(seq_length // ring // unit, longest)


def chunked_layers(model: PreTrainedModel, fpdt: Fpdt) -> list[tuple[nn.Module, Callable[..., Tensor]]]:
    """The decoder layers of a model, each with a function of (layer, its forward, ...) that replaces its forward.

    Raises:
        ValueError: a layer has another form.
    """
    layers = list(getattr(model.base_model, "layers", ()))
    for layer in layers:
        named = {name for name, part in layer.named_children() if not isinstance(part, nn.Dropout)}
        if named != PARTS or not isinstance(getattr(layer.self_attn, "o_proj", None), nn.Module):
            raise _other_form(layer, f"it consists of {', '.join(sorted(named))}")
        if dropped := [name for name, part in layer.named_modules() if isinstance(part, nn.Dropout) and part.p]:
            raise _other_form(layer, f"it has dropout in {dropped[0]}")
    if not layers:
        raise ValueError(f"fpdt needs decoder layers in {type(model.base_model).__name__}.layers: leave fpdt out")
    _refuse_other_forms(model, layers)
    offloads: dict[torch.device, Offload] = {}
    return [(layer, partial(_forward, fpdt, offloads)) for layer in layers]


def _forward(
    fpdt: Fpdt,
    offloads: dict[torch.device, Offload],
    layer: nn.Module,
    own: Callable[..., Tensor],
    hidden_states: Tensor,
    *,
    attention_mask: Shared,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> Tensor:
    """[b, s_local, h] -> [b, s_local, h]."""
    device, x = hidden_states.device, hidden_states.transpose(0, 1)
    if fpdt.offload and device not in offloads:
        offloads[device] = Offload(device)
    masks = attention_mask.part.masks(attention_mask.window)
    if chooses_keys(layer.self_attn):
        chosen = _chunked_by_choice(fpdt, offloads.get(device), layer, attention_mask, masks, position_embeddings)
        return chosen(x.contiguous()).transpose(0, 1)
    run = partial(_chunked, fpdt, offloads.get(device), layer, attention_mask)
    if len(masks) == 1:
        return run(x, masks[0], position_embeddings).transpose(0, 1)
    done = []  # sample by sample, because each has its own tiles
    for sample, mask in enumerate(masks):
        embeddings = tuple(e if e.size(0) == 1 else e[sample : sample + 1] for e in position_embeddings)
        done.append(run(x[:, sample : sample + 1], mask, embeddings))
    return torch.cat(done, dim=1).transpose(0, 1)


def _chunked(
    fpdt: Fpdt,
    offload: Offload | None,
    layer: nn.Module,
    shared: Shared,
    x_SBH: Tensor,
    mask: Mask,
    position_embeddings: tuple[Tensor, Tensor],
) -> Tensor:
    layout = shared.part.layout

    def project(x: Tensor, chunk: int) -> tuple[Tensor, ...]:
        rows = slice(*layout.local_chunks[chunk])
        return _project(layer, x, tuple(e[:, rows] for e in position_embeddings), shared.window).qkv

    def output(out: Tensor, x: Tensor, chunk: int) -> Tensor:
        return _output(layer, out, x)

    with torch.no_grad():
        first = tuple(e[:, :1] for e in position_embeddings)
        call = _project(layer, x_SBH[:1], first, shared.window).call
    if call.dropout or call.sinks is not None:
        what = "dropout of attention weights" if call.dropout else "sinks"
        raise ValueError(f"fpdt with {what} of {type(layer).__name__} is not supported: leave fpdt out")
    rule = replace(shared.rule(call, x_SBH.size(1)), mask=mask)
    chunked = ChunkedLayer(project, output, rule=rule, **_common(fpdt, offload, layer, layout))
    return chunked(x_SBH.contiguous())


def _common(fpdt: Fpdt, offload: Offload | None, layer: nn.Module, layout: SequenceLayout) -> dict[str, Any]:
    """The fields that all layers in chunks have."""
    return {
        "ffn": partial(_ffn, layer),
        "ffn_pieces": ceil((fpdt.ffn_chunks or counts.ffn_chunks(layout.chunks)) / layout.chunks),
        "parameters": list(layer.parameters()),
        "layout": layout,
        "offload": offload,
        "recompute": fpdt.recompute and layer.training,
    }


def _chunked_by_choice(
    fpdt: Fpdt,
    offload: Offload | None,
    layer: nn.Module,
    shared: Shared,
    masks: Sequence[Mask],
    position_embeddings: tuple[Tensor, Tensor],
) -> ChunkedChoiceLayer:
    layout, attention = shared.part.layout, layer.self_attn
    if attention.training and attention.attention_dropout:
        who = type(attention).__name__
        raise ValueError(f"fpdt with dropout of attention weights of {who} is not supported: leave fpdt out")

    def project(x: Tensor, chunk: int) -> tuple[Tensor, Tensor, Indexer]:
        rows = slice(*layout.local_chunks[chunk])
        normed = layer.input_layernorm(x).transpose(0, 1)
        made = project_by_choice(attention, normed, tuple(e[:, rows] for e in position_embeddings))
        q, kv, *index = (part.transpose(0, 1) for part in (made.q, made.kv.unsqueeze(2), *made.indexer))
        return q, kv, Indexer(*index)

    return ChunkedChoiceLayer(
        project=project,
        output=lambda out, x, chunk: _output_by_choice(layer, out, x),
        top_k=attention.indexer.index_topk,
        form=Form(attention.scaling, attention.kv_lora_rank),
        masks=masks,
        **_common(fpdt, offload, layer, layout),
    )


def _output_by_choice(layer: nn.Module, out_SBHD: Tensor, x_SBH: Tensor) -> Tensor:
    gate = gate_by_choice(layer.self_attn, layer.input_layernorm(x_SBH).transpose(0, 1))
    return x_SBH + result_by_choice(layer.self_attn, out_SBHD.transpose(0, 1), gate).transpose(0, 1)


class _Projected(Exception):
    """Not an error: carries q, k and v [s, b, heads, d], and the options of the call of attention."""

    def __init__(self, qkv: tuple[Tensor, ...], call: Call) -> None:
        self.qkv, self.call = qkv, call


@dataclass(frozen=True)
class _StopLayer:
    """Attention that stops the layer."""

    window: int | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        raise _Projected(tuple(x.permute(2, 0, 1, 3) for x in (q, k, v)), call)


def _project(
    layer: nn.Module, x_SBH: Tensor, position_embeddings: tuple[Tensor, ...], window: int | None
) -> _Projected:
    normed = layer.input_layernorm(x_SBH).transpose(0, 1)
    try:
        layer.self_attn(
            hidden_states=normed, position_embeddings=position_embeddings, attention_mask=_StopLayer(window)
        )
    except _Projected as projected:
        return projected
    raise _other_form(layer, "its attention does not call the attention function")


def _output(layer: nn.Module, out_SBHD: Tensor, x_SBH: Tensor) -> Tensor:
    return x_SBH + layer.self_attn.o_proj(out_SBHD.flatten(2))


def _ffn(layer: nn.Module, x_SBH: Tensor) -> Tensor:
    return x_SBH + layer.mlp(layer.post_attention_layernorm(x_SBH))


def _refuse_other_forms(model: PreTrainedModel, layers: list[nn.Module]) -> None:
    """Refuse a layer whose result differs from that of its sub-modules put together in the common form."""
    seen: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]] = []
    hooks = [
        layer.register_forward_hook(
            lambda module, args, kwargs, y: seen.append((module, args, kwargs, y)), with_kwargs=True
        )
        for layer in layers
    ]

    def compare() -> None:
        for layer, args, kwargs, y in seen:
            x = (args[0] if args else kwargs["hidden_states"]).transpose(0, 1).contiguous()
            embeddings, window = kwargs["position_embeddings"], kwargs["attention_mask"].window
            if chooses_keys(layer.self_attn):
                made = project_by_choice(layer.self_attn, layer.input_layernorm(x).transpose(0, 1), embeddings)
                value = made.kv[:, :, None, -layer.self_attn.kv_lora_rank :].expand(-1, -1, made.q.size(2), -1)
                done = _output_by_choice(layer, value.transpose(0, 1), x)
            else:
                q, _, v = _project(layer, x, embeddings, window).qkv
                done = _output(layer, v.repeat_interleave(q.size(2) // v.size(2), dim=2), x)
            mine = _ffn(layer, done).transpose(0, 1)
            error = float((mine - y).abs().max() / y.abs().max())
            if not error < (1e-4 if y.dtype in (torch.float32, torch.float64) else 3e-2):
                raise _other_form(layer, "its parts are put together in another way")

    try:
        run_alone(model, then=compare)
    finally:
        for hook in hooks:
            hook.remove()


def _other_form(layer: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"fpdt needs decoder layers of norm, attention, norm and MLP; {type(layer).__name__} is different ({why}): "
        "leave fpdt out"
    )
