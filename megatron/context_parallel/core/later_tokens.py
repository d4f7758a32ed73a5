# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction (DeepSeek V3): megatron-core's layers, given tokens that are shifted before they are sharded.

Core shifts what a rank holds, in the order in which its own zigzag holds it. Here a batch is shifted while it is whole
(training/data/batches.py), so it is right on every layout, at shard ends and at the ends of documents.
"""

from __future__ import annotations

import warnings
from typing import Any

from megatron.core import tensor_parallel
from torch import Tensor, nn

with warnings.catch_warnings():  # core reports at import that apex is missing
    warnings.simplefilter("ignore")
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron.platform.core_versions import inner_layer, inner_layer_name


class LaterTokenLayer(MultiTokenPredictionLayer):
    """One more transformer layer, from hidden states and the embeddings of tokens further on."""

    def forward(
        self, tokens: Tensor, hidden: Tensor, samples: Tensor | None, positions: Tensor | None, embedding: nn.Module
    ) -> Tensor:
        """Normalized hidden states [s_local, b, h].

        Args:
            tokens: [b, s_local], shifted.
            hidden: [s_local, b, h] (TP-sp: [s_local / TP, b, h]), of the model or of the previous such layer.
            samples: the batch's tensor of samples and documents.
            positions: see :func:`~megatron.context_parallel.core.experts.router_positions`; of the tokens that this
                layer's loss counts. Only experts read it.
        """
        inputs: tuple[Any, ...] = (hidden, embedding(input_ids=tokens, position_ids=None), samples, positions)
        if self.config.recompute_granularity == "full" and self.training:
            return tensor_parallel.checkpoint(self._layer, False, *inputs)
        return self._layer(*inputs)

    def _layer(self, hidden: Tensor, embedded: Tensor, samples: Tensor | None, positions: Tensor | None) -> Tensor:
        """As core's, which has no argument for ``positions``."""
        with_experts = {} if positions is None else {"padding_mask": positions}
        hidden, _ = inner_layer(self)(self._concat_embeddings(hidden, embedded), samples, **with_experts)
        return self._postprocess(hidden)


def later_token_layers(number: int, block: TransformerBlockSubmodules) -> MultiTokenPredictionBlockSubmodules:
    """``number`` layers that are built like the last one of ``block``."""
    layer, norm = block.layer_specs[-1], block.layer_norm
    inner = {inner_layer_name(MultiTokenPredictionLayerSubmodules.__annotations__): layer}
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=ColumnParallelLinear, layer_norm=norm, **inner
    )
    spec = ModuleSpec(module=LaterTokenLayer, submodules=parts)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * number)
