# SPDX-License-Identifier: Apache-2.0
"""The reference model of --dpo: the model at the start of the run.

It is a frozen copy or, with LoRA, the model without its adapters. It runs first on all micro-batches of a step, in the
same schedule, so that pipelines need nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from megatron.training.checkpoint import checkpoint
from megatron.training.checkpoint.checkpoint import unwrap
from megatron.training.checkpoint.checksums import check
from megatron.training.evaluation.evaluated_model import build_untrained
from megatron.training.loss import PairObjective
from megatron.training.refusal import Refusal, refuse_together
from megatron.training.settings.config import Config
from megatron.training.setup import Runtime


def pair_objective(
    config: Config, runtime: Runtime, chunks: Sequence[nn.Module], vocab_size: int, iteration: int
) -> PairObjective | None:
    """The objective of a run with pairs of answers, whose weights are loaded; None without pairs.

    Args:
        iteration: that of the loaded weights.
    """
    if not config.pairs:
        return None
    kind = config.data.dpo_reference
    if kind == "none" or config.model.reward_model:
        return PairObjective(config, runtime, None)
    if kind == "adapters-off":
        return PairObjective(config, runtime, without_adapters)
    model = frozen_copy(config, runtime, chunks, vocab_size)
    settings = config.checkpoint
    if iteration:
        if not settings.pretrained_checkpoint:
            raise Refusal(
                f"--dpo continues after iteration {iteration}, whose weights are not those of the reference: name the "
                "weights of the start, --pretrained-checkpoint DIR, or use --dpo-reference none"
            )
        path = refuse_together(lambda: checkpoint.find(replace(settings, load=None)))
        alone = replace(config, checkpoint=replace(settings, finetune=True))
        checkpoint.load(check(path, config.notes), model, None, None, alone)

    @contextmanager
    def reference(_: Sequence[nn.Module]) -> Iterator[Sequence[nn.Module]]:
        yield model

    return PairObjective(config, runtime, reference, model)


def frozen_copy(config: Config, runtime: Runtime, chunks: Sequence[nn.Module], vocab_size: int) -> list[nn.Module]:
    """A model with the weights of ``chunks``, in evaluation mode, without gradients."""
    checkpoint.gather_parameters(chunks, config)
    model = build_untrained(config, runtime, vocab_size)
    with torch.no_grad():
        for chunk, trained in zip(model, chunks):
            chunk.eval().requires_grad_(False)
            mine, given = unwrap(chunk), unwrap(trained)  # core's DDP has a list named buffers
            for own, other in zip((*mine.parameters(), *mine.buffers()), (*given.parameters(), *given.buffers())):
                own.copy_(other)
    return model


@contextmanager
def without_adapters(chunks: Sequence[nn.Module]) -> Iterator[Sequence[nn.Module]]:
    """The model without what its adapters add, in evaluation mode."""
    adapted = [module for chunk in chunks for module in chunk.modules() if getattr(module, "lora", None) is not None]
    adapters, was_training = [module.lora for module in adapted], [chunk.training for chunk in chunks]
    for module in adapted:
        module.lora = replace(module.lora, alpha=0.0)
    for chunk in chunks:
        chunk.eval()
    try:
        yield chunks
    finally:
        for module, lora in zip(adapted, adapters):
            module.lora = lora
        for chunk, training in zip(chunks, was_training):
            chunk.train(training)
