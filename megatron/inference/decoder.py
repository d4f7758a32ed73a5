# SPDX-License-Identifier: Apache-2.0
"""One pass of a model over the grid: complete prompts, or one token of each sample. It returns the next logits.

Prompts are processed like a batch in training, by Ulysses and Ring. After that, all context-parallel ranks have the
hidden state of each new token and share its attention (kv_cache.py); linear layers are split only by TP. Pipeline
stages work one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.layout.grid import Grid
from megatron.context_parallel.layout.sequence_layout import SequenceLayout, length_unit
from megatron.inference.cached_attention import Generation, keep_all
from megatron.inference.kv_cache import CachePlan
from megatron.training.model.gpt import LongContextGPT


class Decoder:
    """This rank's part of a model with a cache of keys and values.

    Args:
        model: this rank's pipeline stage with its weights; the decoder changes it.
        grid: the model's grid; TP must be without sequence parallelism.
        balance: how prompts are split over the ring, zigzag or contiguous.
    """

    def __init__(self, model: LongContextGPT, grid: Grid, balance: str) -> None:
        self.model, self.grid, self.balance = model.eval(), grid, balance
        # Not of layers for multi-token prediction.
        self.attentions = keep_all(model.decoder)
        self.is_last = model.post_process
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, model.config.params_dtype
        # GPTModel._postprocess then returns hidden states, and logits are computed only for the last tokens.
        model.post_process = False
        self.generation: Generation | None = None

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys, values and states on this rank."""
        return sum(attention.cache.nbytes for attention in self.attentions)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], decoded: int) -> Tensor | None:
        """Clear the cache and read a batch of prompts.

        Args:
            prompts: token ids, the same on every rank of a replica.
            decoded: largest number of calls of :meth:`decode` that follow.

        Returns:
            Logits of the token after each prompt, [b, vocabulary] in fp32, on the ranks of the last pipeline stage.
        """
        lengths = tuple(len(prompt) for prompt in prompts)
        unit = length_unit(self.grid.ulysses.size, self.grid.ring.size, self.balance)
        layout = SequenceLayout(-(-max(lengths) // unit) * unit, self.grid, self.balance)
        self.generation = Generation(CachePlan(layout, lengths, decoded))
        for attention in self.attentions:
            attention.begin(self.generation)
        tokens = torch.zeros(len(prompts), layout.seq_length, dtype=torch.int64)
        for row, prompt in zip(tokens, prompts):
            row[: len(prompt)] = torch.tensor(prompt)
        # A table of learned positions may be shorter than the padded batch; the padding has no effect.
        positions = layout.positions.clamp(max=max(lengths) - 1).expand(len(prompts), -1)
        hidden = self._pass(layout.shard(tokens, dim=1), positions)
        return self._logits(self._rows(hidden, layout, lengths)) if self.is_last else None

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor | None:
        """Read one more token of each sample, int64 [b]; returns the next logits as :meth:`prefill`."""
        self.generation.advance()
        hidden = self._pass(tokens.cpu()[:, None], self.generation.positions.T)
        return self._logits(hidden) if self.is_last else None

    def _pass(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [s, b, h] after this stage's layers, from ids and positions [b, s]."""
        model, pipeline = self.model, self.grid.pipeline
        if pipeline.rank > 0:
            shape = (tokens.size(1), tokens.size(0), model.config.hidden_size)
            received = torch.empty(shape, dtype=self.dtype, device=self.device)
            dist.recv(received, pipeline.global_rank(pipeline.rank - 1), group=pipeline.group)
            model.set_input_tensor(received)
        hidden = model(tokens.to(self.device), positions.to(self.device), None)
        if pipeline.rank < pipeline.size - 1:
            dist.send(hidden.contiguous(), pipeline.global_rank(pipeline.rank + 1), group=pipeline.group)
        return hidden

    def _rows(self, hidden: Tensor, layout: SequenceLayout, lengths: tuple[int, ...]) -> Tensor:
        """Hidden states [1, b, h] of the last token of each prompt, on every rank, from [s_local, b, h] of the rank."""
        is_last = layout.positions[None] == torch.tensor(lengths)[:, None] - 1  # [b, s_local]
        held, row = (x.to(hidden.device) for x in (is_last.any(1), is_last.int().argmax(1)))
        rows = hidden[row, torch.arange(len(lengths), device=hidden.device)]
        rows = torch.where(held[:, None], rows, torch.zeros_like(rows))
        if self.grid.context.size > 1:
            dist.all_reduce(rows, group=self.grid.context.group)
        return rows[None]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits [b, vocabulary] in fp32, complete on each TP rank, from hidden states [1, b, h]."""
        model = self.model
        # On a later stage the output layer may have a copy of the embedding's weight.
        tied = model.share_embeddings_and_output_weights and hasattr(model, "embedding")
        weight = model.embedding.word_embeddings.weight if tied else None
        logits, _ = model.output_layer(hidden, weight=weight, runtime_gather_output=True)
        return logits[0, :, : model.real_vocab_size].float()
