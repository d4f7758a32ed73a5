# SPDX-License-Identifier: Apache-2.0
"""Initial weights that do not depend on the grid.

Every parameter is drawn from a generator of its own, seeded by (seed, canonical name); a TP rank draws the whole
parameter and keeps its part. A parameter's canonical name counts layers over the whole model, not over a stage.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron.training.config import Config

OUTPUT_LAYERS = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def canonical_parameters(chunk: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(canonical name, parameter) of a chunk: global layer numbers, tied output weights named as the embedding."""
    tied = getattr(chunk, "share_embeddings_and_output_weights", False)
    for name, parameter in chunk.named_parameters():
        match = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
        if match:
            layer = chunk.decoder.layers[int(match[1])]
            name = f"decoder.layers.{layer.layer_number - 1}.{match[2]}"
        elif tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        yield name, parameter


@torch.no_grad()
def initialize_weights(
    chunk: nn.Module, core: TransformerConfig, config: Config, vocab_size: int, device: torch.device
) -> None:
    """Move a model chunk to ``device`` and draw its weights: normal(0, std), output layers with std / sqrt(2 layers).

    Norms keep their ones and biases their zeros; rows that pad the vocabulary are zero.
    """
    chunk.to(device)
    for name, parameter in canonical_parameters(chunk):
        if parameter.dim() < 2:
            if name.endswith("bias") and "norm" not in name:
                parameter.zero_()
            continue
        whole_shape = list(parameter.shape)
        parallel = getattr(parameter, "tensor_model_parallel", False)
        if parallel:
            whole_shape[parameter.partition_dim] *= core.tensor_model_parallel_size
        if name in VOCABULARY:
            whole_shape[0] = vocab_size
        whole = draw(name, whole_shape, core, config, device)
        if name in VOCABULARY:
            part = _vocabulary_part(whole, parameter.size(0), core, chunk.pg_collection.tp.rank())
        elif parallel:
            stride = getattr(parameter, "partition_stride", 1)
            part = tensor_parallel_part(
                whole, parameter.partition_dim, stride, core.tensor_model_parallel_size, chunk.pg_collection.tp.rank()
            )
        else:
            part = whole
        parameter.copy_(part)


def draw(name: str, shape: list[int], core: TransformerConfig, config: Config, device: torch.device) -> Tensor:
    """The whole initial value of one parameter, fp32."""
    digest = hashlib.sha256(f"{config.run.seed}/{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
    whole = torch.empty(shape, dtype=torch.float32, device=device)
    if config.model.init_method_xavier_uniform:
        return nn.init.xavier_uniform_(whole, generator=generator)
    std = config.model.init_method_std
    if name.endswith(OUTPUT_LAYERS):
        std /= math.sqrt(2.0 * core.num_layers)
    return whole.normal_(0.0, std, generator=generator)


def tensor_parallel_part(whole: Tensor, dim: int, stride: int, size: int, rank: int) -> Tensor:
    """What TP rank ``rank`` holds of a parameter cut along ``dim``.

    With ``stride`` 2 (SwiGLU's first layer: gate above up) each half is cut on its own.
    """
    return torch.cat([half.chunk(size, dim)[rank] for half in whole.chunk(stride, dim)], dim)


def _vocabulary_part(whole: Tensor, rows: int, core: TransformerConfig, rank: int) -> Tensor:
    part = whole.new_zeros((rows, whole.size(1)))
    real = whole[rank * rows : (rank + 1) * rows]
    part[: real.size(0)] = real
    return part
