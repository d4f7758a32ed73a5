# SPDX-License-Identifier: Apache-2.0
"""Decoders of Hugging Face's transformers over Ulysses x Ring, by their public hooks alone.

context = parallelize(model, grid, seq_length=S)
loss = model(**context.shard(batch)).loss

What a rank gets of a batch (batch.py), the attention under a name of ours (attention.py), the loss in chunks (loss.py),
decoder layers in chunks (layers.py), a RoPE that looks at the length (rotary.py), how a model is changed and given back
(parallel.py), and a mixin for ``transformers.Trainer`` (trainer.py).
"""

from megatron.context_parallel.huggingface.layers import Fpdt
from megatron.context_parallel.huggingface.parallel import ContextParallel, parallelize
from megatron.context_parallel.huggingface.trainer import ContextParallelMixin

__all__ = ["ContextParallel", "ContextParallelMixin", "Fpdt", "parallelize"]
