# SPDX-License-Identifier: Apache-2.0
"""BLOOM's word embedding: a LayerNorm after the lookup, before positions are added.

``--embed-layernorm`` of BigScience's Megatron-DeepSpeed (megatron/mpu/layers.py, VocabParallelEmbedding), and
``word_embeddings_layernorm`` of transformers' BloomModel. Its weights are whole on every TP rank of the first stage.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron.context_parallel.core.spec import Norm

EPSILON = 1e-5  # BigScience's, whatever the epsilon of the layers


class NormedWords(VocabParallelEmbedding):
    """Takes the place of megatron-core's word embedding ``words``, whose table it takes over.

    Where that scatters over TP what it looks up, each TP rank normalizes its own tokens and has a part of the norm's
    gradient; else all have all tokens, and the whole gradient.
    """

    def __init__(self, words: VocabParallelEmbedding, config: TransformerConfig) -> None:
        nn.Module.__init__(self)
        weight = words.weight
        vars(self).update({name: value for name, value in vars(words).items() if name not in vars(self)})
        self.weight = weight
        config = copy.copy(config)
        config.normalization, config.layernorm_zero_centered_gamma = "LayerNorm", False
        config.sequence_parallel = words.reduce_scatter_embeddings
        self.norm = Norm(config, words.embedding_dim, EPSILON)

    def forward(self, input_: Tensor) -> Tensor:
        """As core's: [b, s] -> [b, s, h], or [s / TP, b, h] where it scatters."""
        return self.norm(super().forward(input_))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The table, and the norm's weights."""
        norm = make_sharded_tensors_for_checkpoint(
            self.norm.state_dict(prefix="", keep_vars=True),
            f"{prefix}norm.",
            {},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | norm
