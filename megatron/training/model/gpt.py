# SPDX-License-Identifier: Apache-2.0
"""megatron-core's GPTModel with our loss and dropout, and with hidden states that may be streamed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor, nn

from megatron.context_parallel.core.experts import router_positions
from megatron.context_parallel.core.gpt_dropout import EMBEDDING, HiddenDropout
from megatron.context_parallel.core.learned_positions import PartitionedEmbedding
from megatron.context_parallel.core.spec import AttentionSettings, ChunkSettings
from megatron.context_parallel.fpdt.chunked_ffn import apply_in_chunks, even_spans
from megatron.context_parallel.fpdt.chunked_loss import chunked_linear_cross_entropy
from megatron.context_parallel.fpdt.log_probs import log_probs
from megatron.context_parallel.layout.documents import Samples, passed_on, samples_of
from megatron.context_parallel.layout.grid import Axis
from megatron.training.model.reward_head import RewardHead


class LongContextGPT(GPTModel):
    """megatron-core's GPT with a loss that ignores the padding of the vocabulary, and with dropout by position.

    The padded size depends on TP. With the padding in the softmax, as in Megatron-LM, the loss would depend on TP too.
    """

    def __init__(
        self,
        *args: Any,
        real_vocab_size: int,
        tensor: Axis,
        loss_chunks: int | None,
        scoring: bool = False,
        rewards: bool = False,
        chunks: ChunkSettings | None,
        settings: AttentionSettings,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.settings, self._samples = settings, None
        self.real_vocab_size, self.tensor, self.loss_chunks = real_vocab_size, tensor, loss_chunks
        self.chunks = chunks
        self.scoring, self.score_options = scoring, {}  # see _postprocess
        self.softcap = softcap
        self.ahead: dict[str, Tensor] = {}
        self.ahead_sums: Tensor | None = None  # [layers, 2], see _predict_ahead
        self.shares = any(getattr(module, "shares", False) for module in self.modules())  # choices of keys
        if rewards and self.post_process:
            del self.output_layer
            self.reward_head = RewardHead(self.config.hidden_size, tensor, self.config.sequence_parallel)
        if self.mtp_process and self.share_embeddings_and_output_weights and not self.pre_process:
            self.output_layer.weight = None  # the embedding of this stage has it
            self.embedding.word_embeddings.weight.zero_out_wgrad = True  # two uses; core marks it only without PP
        if softcap is not None and hasattr(self, "output_layer"):
            self.output_layer.register_forward_hook(partial(_capped, softcap))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        ahead: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As core's; ``attention_mask`` is the batch's samples (layout/documents.py).

        ``ahead`` has the tokens, labels and loss masks for multi-token prediction (:func:`batches.shifted`).
        """
        if attention_mask is None and self.shares:
            attention_mask = passed_on(Samples(shares=True))
        self._samples, self.ahead = attention_mask, ahead or {}
        if self.config.num_moe_experts:
            kwargs["padding_mask"] = self._router_positions(kwargs.get("loss_mask"))
        return super().forward(input_ids, position_ids, attention_mask, **kwargs)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As core's; the final norm of a hybrid model has the name that it has in core's MambaModel."""
        last, self.post_process = self.post_process, self.post_process and not hasattr(self, "reward_head")
        state = super().sharded_state_dict(*args, **kwargs)  # on the last stage, core requires an output layer
        self.post_process = last
        if self.config.is_hybrid_model:
            apply_prefix_mapping(state, {"decoder.final_layernorm.": "decoder.final_norm."})
        return state

    def _router_positions(self, loss_mask: Tensor | None) -> Tensor | None:
        """:func:`experts.router_positions` [b, s] of this rank's tokens (a part under TP-sp); None without a mask.

        Core passes it to its mixtures of experts in the place of a padding mask.
        """
        if loss_mask is None:
            return None
        layout = self.settings.layout_of(samples_of(self._samples))
        result = router_positions(layout.positions.to(loss_mask.device), loss_mask)
        return result.chunk(self.tensor.size, dim=1)[self.tensor.rank] if self.config.sequence_parallel else result

    def _preprocess(
        self, input_ids: Tensor, position_ids: Tensor, padding_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple:
        """As core's, with our dropout; streamed hidden states are embedded chunk by chunk into host memory."""
        *whole, _ = self._embedded(input_ids, position_ids, **kwargs)
        return *whole, padding_mask  # already split over TP, which core would do on the first stage only

    def _embedded(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple:
        if not self.pre_process:
            return super()._preprocess(input_ids=input_ids, position_ids=position_ids, **kwargs)
        dropout = None
        if self.training and self.settings.dropout.hidden:
            batch = samples_of(self._samples)
            layout = self.settings.layout_of(batch)
            dropout = HiddenDropout(self.settings.dropout, batch, layout, self.config.sequence_parallel)
        streamed = self.chunks is not None and self.chunks.streamed
        if streamed:
            kwargs["decoder_input"] = self._embed_in_chunks(input_ids, position_ids, dropout)
        hidden, *others = super()._preprocess(input_ids=input_ids, position_ids=position_ids, **kwargs)
        if not self.embedding.word_embeddings.weight.requires_grad and self.config.recompute_granularity == "full":
            # Otherwise core skips the backward pass of recomputed layers.
            hidden.requires_grad_(torch.is_grad_enabled())
        return hidden if streamed or dropout is None else dropout(hidden, EMBEDDING), *others

    def _embed_in_chunks(self, input_ids: Tensor, position_ids: Tensor, dropout: HiddenDropout | None) -> Tensor:
        """Host buffer [s, b, h] of this TP rank's tokens, from the ids [b, s_local] of its TP group."""
        parts = self.tensor.size if self.config.sequence_parallel else 1
        ids, positions = (x.unflatten(1, (parts, -1)) for x in (input_ids, position_ids))
        rows, weight = ids.size(2), self.embedding.word_embeddings.weight
        partitioned = isinstance(self.embedding, PartitionedEmbedding)

        def embed(_: None, run: tuple[int, int]) -> Tensor:
            rows_of_run = {"rows": run} if partitioned else {}
            hidden = self.embedding(*(x[:, :, run[0] : run[1]].flatten(1) for x in (ids, positions)), **rows_of_run)
            return hidden if dropout is None else dropout(hidden, EMBEDDING, run)

        return apply_in_chunks(
            embed,
            None,
            [*self.embedding.parameters()],
            even_spans(rows, self.chunks.ffn_chunks),
            shape=(rows, ids.size(0), self.config.hidden_size),
            dtype=weight.dtype,
            device=weight.device,
            offload=self.chunks.offload,
        )

    def _postprocess(self, hidden_states: Tensor, labels: Tensor | None, **kwargs: Any) -> Tensor:
        """As core's; with ``loss_chunks`` the result is the sum of all losses, weighted by ``loss_mask``.

        With ``scoring`` the result is what :func:`log_probs` with ``score_options`` returns for the tokens that
        ``loss_mask`` keeps, as one tensor [1 to 3, b, s_local]. A reward model gives their rewards, in the same form.
        """
        if hasattr(self, "reward_head"):
            return self.reward_head(hidden_states, kwargs["loss_mask"].t()).t()[None]
        if self.mtp_process and self.post_process and not self.scoring:
            if labels is None:
                return self._logits(hidden_states).transpose(0, 1).contiguous()
            if self.training and self.ahead:
                hidden_states = self._predict_ahead(hidden_states)
            return self._losses(hidden_states, labels, kwargs["loss_mask"])
        kwargs["mtp_in_postprocess"] = False
        if not self.post_process or labels is None or not (self.loss_chunks or self.scoring):
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **kwargs)
        return self._losses(hidden_states, labels, kwargs["loss_mask"])

    def _predict_ahead(self, hidden: Tensor) -> Tensor:
        """``hidden``, which in the backward pass adds the gradients of the losses of multi-token prediction.

        As in core, the sum of a layer's losses is added with the factor --mtp-loss-scaling-factor / layers, and all is
        divided by the tokens of the main loss. Sums and tokens of each layer are added to ``ahead_sums``.
        """
        state, result, layers = hidden, hidden, self.mtp.layers
        if self.ahead_sums is None:
            self.ahead_sums = torch.zeros((len(layers), 2), dtype=torch.float64, device=hidden.device)
        for layer, tokens, labels, mask, sums in zip(layers, *self.ahead.values(), self.ahead_sums):
            positions = self._router_positions(mask) if self.config.num_moe_experts else None
            state = layer(tokens, state, self._samples, positions, self.embedding)
            losses = self._losses(state, labels, mask)
            loss = (losses * mask).sum() if losses.dim() else losses
            sums += torch.stack((loss.detach().double(), mask.sum(dtype=torch.float64)))
            result = MTPLossAutoScaler.apply(result, loss * (self.config.mtp_loss_scaling_factor / len(layers)))
        return result

    def _logits(self, hidden: Tensor) -> Tensor:
        """[s_local, b, padded vocab / TP]."""
        tied = self.share_embeddings_and_output_weights
        return self.output_layer(hidden, weight=self.shared_embedding_or_output_weight() if tied else None)[0]

    def _losses(self, hidden_states: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
        """See :meth:`_postprocess`; [b, s_local] without chunks."""
        if not (self.loss_chunks or self.scoring):
            return self.compute_language_model_loss(labels, self._logits(hidden_states))
        tied = self.share_embeddings_and_output_weights and hasattr(self, "embedding")
        weight = _ready_weight(self.embedding.word_embeddings if tied else self.output_layer)
        inputs = hidden_states, weight, labels.t(), loss_mask.t()
        settings: dict[str, Any] = {
            "chunks": self.loss_chunks,
            "vocab_size": self.real_vocab_size,
            "tensor": self.tensor,
            "sequence_parallel": self.config.sequence_parallel,
            "offload": self.chunks.offload if self.chunks is not None else None,
            "softcap": self.softcap,
        }
        if self.scoring:
            scores = log_probs(*inputs, **settings, **self.score_options)
            return torch.stack([x for x in scores if x is not None]).transpose(1, 2)
        return chunked_linear_cross_entropy(*inputs, **settings)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Loss of every token, fp32 [b, s_local]; labels [b, s_local], logits [s_local, b, padded vocab / TP]."""
        first = self.pg_collection.tp.rank() * logits.size(-1)
        real = max(min(self.real_vocab_size - first, logits.size(-1)), 0)
        if real < logits.size(-1):
            # Not recorded by autograd, which would copy the logits: the gradient of these columns is zero.
            logits.detach()[..., real:] = torch.finfo(logits.dtype).min
        return super().compute_language_model_loss(labels, logits)


def _capped(softcap: float, _: nn.Module, __: Any, output: tuple[Tensor, None]) -> tuple[Tensor, None]:
    """A hook of the output layer: its logits with a soft-cap."""
    return softcap * torch.tanh(output[0] / softcap), output[1]


def scale_embeddings(words: nn.Module, factor: float) -> None:
    """Multiply what ``words`` looks up by a factor, rounded to the weights' dtype."""
    words.register_forward_hook(partial(_scaled, float(torch.tensor(factor).to(words.weight.dtype))))


def _scaled(factor: float, _: nn.Module, __: Any, looked_up: Tensor) -> Tensor:
    return looked_up * factor


def _ready_weight(module: nn.Module) -> Tensor:
    """The weight of a module that is not called, after DDP has gathered it (--overlap-param-gather)."""
    for number, hook in module._forward_pre_hooks.items():
        if number not in module._forward_pre_hooks_with_kwargs:  # hooks with kwargs are fully_shard's, not DDP's
            hook(module, ())
    return module.weight
