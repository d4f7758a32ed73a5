# SPDX-License-Identifier: Apache-2.0
"""Latent attention whose queries choose their keys (DSA of DeepSeek V3.2 and GLM-5).

The indexer's weights have the names of core's ``DSAIndexer`` (0.19). Core's Hadamard rotation of the indexer's queries
and keys is left out: it is orthogonal, so it changes scores only by rounding, and weights are the same without it.
Core's class is not used: it makes scores of s x s, and divides the indexer's loss by the tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron.context_parallel.core.core_attention import ContextParallelAttention, with_packed
from megatron.context_parallel.core.mixers.latent_attention import LatentAttention, latent_attention
from megatron.context_parallel.core.mixers.state_mixer import Linear, MixerSpec
from megatron.context_parallel.core.transformer_layer import AttentionSettings
from megatron.context_parallel.fpdt.host_store import ChunkStore
from megatron.context_parallel.fpdt.sparse.chunked_choice import ChunkedChoiceLayer, Lesson
from megatron.context_parallel.layout.documents import Samples, samples_of
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.sparse_attention.choice import choose_keys
from megatron.context_parallel.sparse_attention.chosen_attention import Indexer, sparse_attention
from megatron.context_parallel.sparse_attention.chosen_math import Form
from megatron.context_parallel.sparse_attention.dense_loss import dense_indexer_loss
from megatron.decisions.division import choosing_layer
from megatron.platform.autograd import once_differentiable

INDEXER = ".core_attention.indexer."  # part of the names of its parameters


@dataclass(frozen=True)
class SparseRule:
    """How queries choose their keys. The names are those of Megatron-LM's flags (``--dsa-indexer-...``).

    Attributes:
        n_heads, head_dim: of the indexer.
        topk: keys of a query.
        loss_coeff: factor of the indexer's loss; 0: the indexer is not trained.
        use_sparse_loss: the loss is over the chosen keys; otherwise over all.
        topk_freq, skip_topk_offset: of the layers after the first ``skip_topk_offset`` every ``topk_freq``-th chooses
            keys, and those between take its choice.
        rope_interleaved: pairs that RoPE rotates are neighbours (GLM-5), not entries of two halves (DeepSeek).
        k_norm_epsilon: of the norm of its keys.
        warm_up: attention reads all keys.
        kernel: of the choice and of attention, as in ``sparse_attention``.
    """

    n_heads: int
    head_dim: int
    topk: int
    loss_coeff: float = 0.0
    use_sparse_loss: bool = False
    topk_freq: int = 1
    skip_topk_offset: int = 0
    rope_interleaved: bool = False
    k_norm_epsilon: float = 1e-6
    warm_up: bool = False
    kernel: str = "auto"

    def source(self, layer: int) -> int:
        """The layer, from 1, whose choice a layer uses."""
        return choosing_layer(layer, self.topk_freq, self.skip_topk_offset)


class KeyIndexer(nn.Module):
    """Makes the indexer's queries, keys and weights of heads from inputs that get no gradient from it.

    Under TP sequence parallelism each rank projects its own tokens, then has those of all.
    """

    def __init__(self, config: MLATransformerConfig, rule: SparseRule, gather: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rule, self.gather = rule, gather
        hidden, queries, heads, dim = config.hidden_size, config.q_lora_rank, rule.n_heads, rule.head_dim
        linear = partial(nn.Linear, bias=False, dtype=config.params_dtype)
        self.linear_wq_b = linear(queries or hidden, heads * dim)
        self.linear_wk = linear(hidden, dim)
        self.k_norm = nn.LayerNorm(dim, rule.k_norm_epsilon, dtype=config.params_dtype)
        self.linear_weights_proj = linear(hidden, heads)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel
            parameter.requires_grad_(rule.loss_coeff > 0)  # without its loss an indexer has no gradient

    def forward(self, hidden_states: Tensor, latent: Tensor) -> Indexer:
        """[s, b, h] and the queries' latent [s, b, Q] -> queries and keys that are not rotated yet, and weights."""
        hidden_states, latent = hidden_states.detach(), latent.detach()
        q = self.linear_wq_b(latent).unflatten(-1, (self.rule.n_heads, -1))
        k = self.k_norm(self.linear_wk(hidden_states))
        weights = self.linear_weights_proj(hidden_states)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        factor = self.rule.n_heads**-0.5 * self.rule.head_dim**-0.5
        return Indexer(self.gather(q), self.gather(k), self.gather(weights * factor))


class SparseAttention(ContextParallelAttention):
    """A layer's ``core_attention`` with its indexer; attention itself is in :class:`SparseLatentAttention`.

    Attributes:
        source: the layer whose choice is used.
        indexer: None if it is another layer.
        shares: whether layers use the choice of others.
        layer_loss: the sum of the indexer's losses of counted tokens, and their number; None before the first step.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        settings: AttentionSettings,
        layer_number: int = 1,
        *,
        sparse: SparseRule,
        gather: Callable[[Tensor], Tensor],
        **others: Any,
    ) -> None:
        super().__init__(config, settings, layer_number, **others)
        self.sparse, self.layer_loss, self.shares = sparse, None, sparse.topk_freq > 1
        # Layers of multi-token prediction come after the model's; each has its own choice.
        self.source = layer_number if layer_number > config.num_layers else sparse.source(layer_number)
        self.indexer = KeyIndexer(config, sparse, gather) if self.source == layer_number else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The indexer's weights, which every TP rank has."""
        state = {} if self.indexer is None else self.indexer.state_dict(prefix="indexer.", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)

    def rotated(self, index: Indexer, angles: Tensor) -> Indexer:
        """The indexer's queries and keys, rotated."""
        rope = replace(self.settings.rotary.rope, interleaved=self.sparse.rope_interleaved)
        return Indexer(rope.rotate(index.q, angles), rope.rotate(index.k[:, :, None], angles)[:, :, 0], index.weights)

    @property
    def learns(self) -> bool:
        """Whether the indexer's loss is computed in this forward pass."""
        if self.indexer is None or not (self.training and torch.is_grad_enabled()):
            return False
        return self.sparse.loss_coeff > 0 and self.indexer.linear_wk.weight.requires_grad

    def note(self, total: Tensor, counted: Tensor) -> None:
        """Add a sum of losses, and the tokens that it counts, to what is in the log."""
        sums = torch.stack((total.detach().double(), counted.sum(dtype=torch.float64)))
        self.layer_loss = sums if self.layer_loss is None else self.layer_loss + sums

    def taught(self, out: Tensor, total: Tensor, counted: Tensor) -> Tensor:
        """``out``; in the backward pass the indexer gets the gradient of ``total``, the sum of losses of a batch."""
        self.note(total, counted)
        scale = self.config.grad_scale_func  # of fp16's gradients
        return _WithLoss.apply(out, total * self.sparse.loss_coeff, scale)


class SparseLatentAttention(LatentAttention):
    """Latent attention to chosen keys. All heads read the same latents: up-projections go to queries and results.

    A layer that chooses leaves its choice in ``Samples.handed_on`` for those that use it, too.
    """

    core_attention: SparseAttention

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
        attention_bias: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[s_local, b, h] -> [s_local, b, h]; with sequence parallelism both are [s_local / TP, b, h].

        Args:
            attention_mask: not a mask but the batch's samples (layout/documents.py).
            packed_seq_params: the ends of the documents in the complete sequence.

        Raises:
            ValueError: an option is not supported, or no layer before has chosen keys.
        """
        if inference_context is not None or attention_bias is not None:
            raise ValueError("sparse attention supports neither inference_context nor attention_bias")
        core = self.core_attention
        batch = with_packed(samples_of(attention_mask), packed_seq_params, core.rule.mask)
        if core.sparse.warm_up:
            output, bias = super().forward(hidden_states, attention_mask, packed_seq_params=packed_seq_params)
            return self._warmed_up(output, hidden_states, batch) if core.learns else output, bias
        latent = self.latent_of_queries(hidden_states)
        query, (k_rotated, latent_of_keys) = self.queries(latent), self.latent_of_keys(hidden_states)
        index = () if core.indexer is None else core.indexer(hidden_states, latent)
        inputs = query, k_rotated, self._all_tokens(latent_of_keys), *index
        if self.training and self.checkpoint_core_attention:
            mixed = checkpoint(lambda *x: self.mixed(*x, batch), False, *inputs)
        else:
            mixed = self.mixed(*inputs, batch)
        return self.linear_proj(mixed)

    def mixed(self, query: Tensor, k_rotated: Tensor, latent: Tensor, *index_and_batch: Any) -> Tensor:
        """Choice and attention, [s_local, b, heads * V]."""
        *index, batch = index_and_batch
        core, layout, masks, angles = self.core_attention, *self._where(batch)
        if index:
            index = core.rotated(Indexer(*index), angles)
            how = {"top_k": core.sparse.topk, "kernel": core.sparse.kernel, "group": self.pg_collection.tp}
            chosen = choose_keys(*index, layout=layout, mask=masks, **how)
            batch.handed_on[self.layer_number] = chosen
        elif core.source in batch.handed_on:
            chosen = batch.handed_on[core.source]
        else:
            raise self._no_choice()
        q, kv = self.rotated(query, k_rotated, latent, angles)
        out, losses = sparse_attention(
            q,
            kv,
            chosen,
            layout=layout,
            value_size=latent.size(-1),
            scale=core.scale,
            indexer=index if core.learns and core.sparse.use_sparse_loss else None,
            heads_group=self.pg_collection.tp,
            kernel=core.sparse.kernel,
        )
        out = self.raised(out).flatten(2)
        if not core.learns:
            return out
        counted = self._counted(batch, index.weights[:, :, 0])
        total = self._dense_loss(q, kv, index, counted, layout, masks) if losses is None else (losses * counted).sum()
        return core.taught(out, total, counted)

    def choice_in_chunks(
        self, norm: nn.Module, batch: Samples, samples: int, *, layout: SequenceLayout, **common: Any
    ) -> ChunkedChoiceLayer:
        """The layer in chunks (FPDT), after its ``norm``; ``samples``: of the batch. ``common``: its other fields."""
        core, rotary = self.core_attention, self.core_attention.settings.rotary

        def project(x: Tensor, chunk: int) -> tuple[Tensor, Tensor, Indexer | None]:
            spans = layout.local_chunk_spans(chunk)
            angles = torch.cat([rotary.of_spans(spans, ends) for ends in batch.ends or (None,)], dim=1)
            hidden = norm(x)
            latent = self.latent_of_queries(hidden)
            k_rotated, latent_of_keys = self.latent_of_keys(hidden)
            q, kv = self.rotated(self.queries(latent), k_rotated, self._all_tokens(latent_of_keys), angles)
            return q, kv, None if core.indexer is None else core.rotated(core.indexer(hidden, latent), angles)

        choices = batch.handed_on.get(core.source)
        if core.indexer is not None and core.shares:
            choices = batch.handed_on[self.layer_number] = ChunkStore(common["offload"])
        elif core.indexer is None and choices is None:
            raise self._no_choice()
        return ChunkedChoiceLayer(
            project=project,
            top_k=core.sparse.topk,
            form=Form(core.scale, self.config.kv_lora_rank),
            masks=core.settings.masks_of(batch, core.rule.mask),
            lesson=self._lesson(batch, samples, layout) if core.learns else None,
            kernel=core.sparse.kernel,
            choosers=self.pg_collection.tp,
            chooses=core.indexer is not None,
            choices=choices,
            layout=layout,
            **common,
        )

    def _lesson(self, batch: Samples, samples: int, layout: SequenceLayout) -> Lesson:
        core, weight = self.core_attention, self.linear_proj.weight
        like = weight.new_empty((layout.local_length, samples), dtype=torch.promote_types(weight.dtype, torch.float32))
        # [TP ranks that have parts of a chunk, tokens of one, b]
        counted = self._counted(batch, like).unflatten(0, (layout.tensor_parts, -1))

        def of_chunk(chunk: int) -> Tensor:
            return counted[:, slice(*layout.local_chunks[chunk])].flatten(0, 1)

        def report(losses: Tensor, chunk: int) -> None:
            core.note((losses * of_chunk(chunk)).sum(), of_chunk(chunk))

        def factor(chunk: int) -> Tensor:
            scale, of_loss = self.config.grad_scale_func, of_chunk(chunk) * core.sparse.loss_coeff
            return of_loss if scale is None else scale(of_loss)

        return Lesson(report, factor, self.pg_collection.tp)

    def _no_choice(self) -> ValueError:
        return ValueError(
            f"layer {self.layer_number} uses the keys that layer {self.core_attention.source} chose, which did not run "
            "before it with the same batch: pass layers layout.documents.passed_on(Samples(...)), and keep both in one "
            "stage"
        )

    def _warmed_up(self, output: Tensor, hidden_states: Tensor, batch: Samples) -> Tensor:
        """``output``, with the loss of an indexer that learns while attention reads all keys."""
        core, layout, masks, angles = self.core_attention, *self._where(batch)
        with torch.no_grad():
            latent = self.latent_of_queries(hidden_states)
            k_rotated, latent_of_keys = self.latent_of_keys(hidden_states)
            q, kv = self.rotated(self.queries(latent), k_rotated, self._all_tokens(latent_of_keys), angles)
        index = core.rotated(core.indexer(hidden_states, latent), angles)
        counted = self._counted(batch, index.weights[:, :, 0])
        return core.taught(output, self._dense_loss(q, kv, index, counted, layout, masks), counted)

    def _dense_loss(
        self, q: Tensor, kv: Tensor, index: Indexer, counted: Tensor, layout: SequenceLayout, masks: list[Mask]
    ) -> Tensor:
        """The sum of the indexer's losses over all keys."""
        how = {"layout": layout, "mask": masks, "scale": self.core_attention.scale}
        return dense_indexer_loss(q, kv[:, :, 0], index, counted, **how, heads_group=self.pg_collection.tp)

    def _where(self, batch: Samples) -> tuple[SequenceLayout, list[Mask], Tensor]:
        """Layout, masks and RoPE's angles of a batch."""
        settings = self.core_attention.settings
        masks = settings.masks_of(batch, self.core_attention.rule.mask)
        return settings.layout_of(batch), masks, settings.rotary.angles(batch.ends)

    def rotated(self, query: Tensor, k_rotated: Tensor, latent: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [s_local, b, heads, R + C] and what they read [s_local, b, 1, R + C], rotated."""
        query, k_rotated = self.core_attention.settings.rotary.rotate(query, k_rotated[:, :, None], angles)
        return self.absorbed(query), torch.cat((k_rotated, latent[:, :, None]), dim=-1)

    def _counted(self, batch: Samples, like: Tensor) -> Tensor:
        """Which of this rank's tokens count [s_local, b], in the dtype of ``like``."""
        return torch.ones_like(like) if batch.counted is None else batch.counted.to(like.dtype)


class _WithLoss(torch.autograd.Function):
    """The first input; a loss gets the gradient 1, scaled as that of the model's output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Callable[[Tensor], Tensor] | None) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(loss.detach())
        return x.view_as(x)

    @staticmethod
    @once_differentiable("the loss of an indexer")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        one = torch.ones_like(*ctx.saved_tensors)
        return grad, one if ctx.scale is None else ctx.scale(one), None


def train_indexers_alone(model: nn.Module) -> None:
    """Freeze every parameter that does not belong to an indexer."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(INDEXER in name)


def sparse_latent_attention(
    settings: AttentionSettings, linear: Linear, norm: type, *, sparse: SparseRule, **latent: Any
) -> MixerSpec:
    """Latent attention to chosen keys; ``latent``: as of :func:`latent_attention`."""
    made = latent_attention(settings, linear, norm, **latent)
    parts = replace(made.spec.submodules, core_attention=partial(_core, settings=settings, sparse=sparse))
    return made._replace(spec=replace(made.spec, module=SparseLatentAttention, submodules=parts))


def _core(config: MLATransformerConfig, pg_collection: Any, **others: Any) -> SparseAttention:
    def gather(x: Tensor) -> Tensor:
        if not config.sequence_parallel:
            return x
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=pg_collection.tp)

    return SparseAttention(config, pg_collection=pg_collection, gather=gather, **others)
