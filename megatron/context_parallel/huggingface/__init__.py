# SPDX-License-Identifier: Apache-2.0
"""Decoders of Hugging Face's transformers over Ulysses x Ring, through public interfaces only.

    context = parallelize(model, grid, seq_length=S)
    loss = model(**context.shard(batch)).loss

rank_batch.py takes a rank's part of a batch, transformers_attention.py registers our attention, decoder_loss.py is the
loss in chunks, fpdt_layers.py the layers in chunks. parallel.py changes a model and restores it, probe.py first tests
whether the result would be exact. trainer.py is a mixin for ``transformers.Trainer``, trl_trainers.py one for TRL.
"""

from megatron.context_parallel.huggingface.fpdt_layers import Fpdt
from megatron.context_parallel.huggingface.parallel import ContextParallel, parallelize
from megatron.context_parallel.huggingface.trainer import ContextParallelMixin
from megatron.context_parallel.huggingface.trl_trainers import TrlMixin

__all__ = ["ContextParallel", "ContextParallelMixin", "Fpdt", "TrlMixin", "parallelize"]
