# SPDX-License-Identifier: Apache-2.0
"""Decoders of Hugging Face's transformers over Ulysses x Ring, by their public hooks alone.

    context = parallelize(model, grid, seq_length=S)
    loss = model(**context.shard(batch)).loss

rank_batch.py takes a rank's part of a batch, transformers_attention.py is the attention under a name of ours,
decoder_loss.py the loss in chunks, fpdt_layers.py the layers in chunks; parallel.py changes a model and gives it back,
probe.py asks first whether that is exact, and trainer.py is a mixin for ``transformers.Trainer``.
"""

from megatron.context_parallel.huggingface.fpdt_layers import Fpdt
from megatron.context_parallel.huggingface.parallel import ContextParallel, parallelize
from megatron.context_parallel.huggingface.trainer import ContextParallelMixin

__all__ = ["ContextParallel", "ContextParallelMixin", "Fpdt", "parallelize"]
