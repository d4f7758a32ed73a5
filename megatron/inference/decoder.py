# SPDX-License-Identifier: Apache-2.0
"""One pass of a model over the grid: the prompts at once, or one token of each sample; logits of the next come out.

Prompts go through as a batch does in training: Ulysses and Ring, by the layout. Then each token's hidden state is on
all context-parallel ranks alike, which share its attention (kv_cache.py); linear layers are split by TP alone.
Pipeline stages hand hidden states on one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.attention.kv_cache import CachePlan
from megatron.context_parallel.core.cached_attention import Generation, keep_keys
from megatron.context_parallel.layout.grid import Grid
from megatron.context_parallel.layout.sequence_layout import SequenceLayout, length_unit
from megatron.training.model.gpt import LongContextGPT


class Decoder:
    """A model that remembers, on this rank.

    Args:
        model: this rank's pipeline stage, with its weights; it is this decoder's from now on.
        grid: where it lies; TP without sequence parallelism.
        balance: how prompts are dealt over the ring, zigzag or contiguous.
    """

    def __init__(self, model: LongContextGPT, grid: Grid, balance: str) -> None:
        self.model, self.grid, self.balance = model.eval(), grid, balance
        self.attentions = keep_keys(model)
        self.is_last = model.post_process
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, model.config.params_dtype
        # GPTModel._postprocess then returns hidden states: logits are made of those alone that are asked about.
        model.post_process = False
        self.generation: Generation | None = None

    @property
    def cache_bytes(self) -> int:
        """Keys and values on this rank."""
        return sum(attention.cache.nbytes for attention in self.attentions)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], decoded: int) -> Tensor | None:
        """Forget what was, and read prompts, equally long ones side by side.

        Args:
            prompts: token ids, alike on every rank of a replica.
            decoded: calls of :meth:`decode` that follow at most.

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
        # A table of learned positions need not reach as far as the padding, which nobody looks at.
        positions = layout.positions.clamp(max=max(lengths) - 1).expand(len(prompts), -1)
        hidden = self._pass(layout.shard(tokens, dim=1), positions)
        return self._logits(self._rows(hidden, layout, lengths)) if self.is_last else None

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor | None:
        """Read one more token a sample, int64 [b]; the logits of the one after it, as :meth:`prefill`."""
        self.generation.advance()
        hidden = self._pass(tokens.cpu()[:, None], self.generation.positions.T)
        return self._logits(hidden) if self.is_last else None

    def _pass(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [s, b, h] behind this stage's layers, of ids and positions [b, s]."""
        model, pipeline = self.model, self.grid.pipeline
        if pipeline.rank > 0:
            shape = (tokens.size(1), tokens.size(0), model.config.hidden_size)
            arrived = torch.empty(shape, dtype=self.dtype, device=self.device)
            dist.recv(arrived, pipeline.global_rank(pipeline.rank - 1), group=pipeline.group)
            model.set_input_tensor(arrived)
        hidden = model(tokens.to(self.device), positions.to(self.device), None)
        if pipeline.rank < pipeline.size - 1:
            dist.send(hidden.contiguous(), pipeline.global_rank(pipeline.rank + 1), group=pipeline.group)
        return hidden

    def _rows(self, hidden: Tensor, layout: SequenceLayout, lengths: tuple[int, ...]) -> Tensor:
        """Hidden states [1, b, h] of the last token of each prompt, on every rank, from [s_local, b, h] of the rank."""
        wanted = layout.positions[None] == torch.tensor(lengths)[:, None] - 1  # [b, s_local]
        here, row = (x.to(hidden.device) for x in (wanted.any(1), wanted.int().argmax(1)))
        found = hidden[row, torch.arange(len(lengths), device=hidden.device)]
        found = torch.where(here[:, None], found, torch.zeros_like(found))
        if self.grid.context.size > 1:
            dist.all_reduce(found, group=self.grid.context.group)
        return found[None]

    def _logits(self, hidden: Tensor) -> Tensor:
        """[b, vocabulary] in fp32, whole on each TP rank, of hidden states [1, b, h]."""
        model = self.model
        weight = model.embedding.word_embeddings.weight if self._tied() else None
        logits, _ = model.output_layer(hidden, weight=weight, runtime_gather_output=True)
        return logits[0, :, : model.real_vocab_size].float()

    def _tied(self) -> bool:
        """Whether the table of words is the output layer's; on another stage than the first it has a copy of it."""
        return self.model.share_embeddings_and_output_weights and self.model.pre_process
