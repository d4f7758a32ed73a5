# SPDX-License-Identifier: Apache-2.0
"""Initial weights that do not depend on the grid.

Each parameter has a random generator, seeded by (seed, canonical name); a TP rank draws the complete parameter and
keeps its part. Canonical names count layers over the complete model, not over a pipeline stage. A table of learned
positions may be as long as the sequence, so it is drawn in blocks of rows, each with a separate generator.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence

import torch
from megatron.core.parallel_state import get_expert_tensor_parallel_group
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron.context_parallel.core.experts import EXPERT
from megatron.context_parallel.core.lora import is_adapter
from megatron.context_parallel.core.mixers.state_mixer import Initial
from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.spans import Span
from megatron.platform.core_versions import inner_layer
from megatron.training.settings.config import Config

# megatron-core's names of the weights that are split over TP ranks, by the dim of the split.
SINKS = "softmax_offset"
BY_ROWS = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias", SINKS)
BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # by rows, padded

ROWS_DRAWN = 4096
OUTPUT_LAYERS = ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")
POSITIONS = "embedding.position_embeddings.weight"


def unwrap(chunk: nn.Module) -> nn.Module:
    """The model inside data-parallel and half-precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def canonical_parameters(chunk: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(canonical name, parameter) of a chunk: layers and experts by their number in the model.

    Tied output weights are named as the embedding.
    """
    tied = getattr(chunk, "share_embeddings_and_output_weights", False)
    for name, parameter in chunk.named_parameters():
        match = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
        later = re.match(r"(mtp\.layers\.(\d+)\.)(?:transformer|mtp_model)_layer\.(.*)", name)
        if match:
            layer = chunk.decoder.layers[int(match[1])]
            name = f"decoder.layers.{layer.layer_number - 1}.{_with_number_of_expert(match[2], layer)}"
        elif later:
            layer = inner_layer(chunk.mtp.layers[int(later[2])])
            name = f"{later[1]}transformer_layer.{_with_number_of_expert(later[3], layer)}"
        elif tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        yield name, parameter


def _with_number_of_expert(name: str, layer: nn.Module) -> str:
    """The name of a layer's parameter; an expert has its number in the model, not on this rank."""
    own = re.search(rf"{EXPERT}\.(\d+)\.", name)
    if own is None:
        return name
    return f"{name[: own.start(1)]}{layer.mlp.local_expert_indices[int(own[1])]}{name[own.end(1) :]}"


@torch.no_grad()
def initialize_weights(
    chunk: nn.Module, core: TransformerConfig, config: Config, vocab_size: int, device: torch.device
) -> None:
    """Move a model chunk to ``device`` and draw its weights: normal(0, std), output layers with std / sqrt(2 layers).

    A hybrid model's output layers have std / sqrt(layers), as in core.

    Norms stay one and biases zero; sinks are drawn like weights; rows that pad the vocabulary are zero.
    """
    chunk.to(device)
    for name, parameter in canonical_parameters(chunk):
        own = getattr(parameter, "initial", None)
        if parameter.dim() < 2 and not (own or name.endswith(SINKS)):
            if name.endswith("bias") and "norm" not in name:
                parameter.zero_()
            continue
        if name == POSITIONS:
            shape = (config.model.max_position_embeddings, parameter.size(1))
            draw_rows(parameter, getattr(parameter, "spans", ((0, shape[0]),)), name, shape, core, config)
            continue
        shape = list(parameter.shape)
        parallel = getattr(parameter, "tensor_model_parallel", False)
        axis = Axis.of(get_expert_tensor_parallel_group() if EXPERT in name else chunk.pg_collection.tp)
        if parallel:
            shape[parameter.partition_dim] *= axis.size
        if name in VOCABULARY:
            shape[0] = vocab_size
        if is_adapter(name):
            values = draw_adapter(name, shape, config, device)
        else:
            values = draw(name, shape, core, config, device, own=own)
        if name in VOCABULARY:
            rows, rank = parameter.size(0), chunk.pg_collection.tp.rank()
            real = values[rank * rows : (rank + 1) * rows]
            part = torch.cat([real, values.new_zeros((rows - real.size(0), values.size(1)))])
        elif parallel:
            part = tensor_parallel_part(values, parameter.partition_dim, sections(parameter), axis.size, axis.rank)
        else:
            part = values
        parameter.copy_(part)


def draw(
    name: str,
    shape: Sequence[int],
    core: TransformerConfig,
    config: Config,
    device: torch.device,
    rows: Span | None = None,
    own: Initial | None = None,
) -> Tensor:
    """The initial value of a parameter of ``shape`` [n, m], or of sinks [n], in fp32: all of it, or a block of rows.

    A mixer's parameters may have their ``own`` initial values.

    A block that does not start at 0 has a separate generator, so the values depend on where the blocks start.
    """
    start, stop = rows or (0, shape[0])
    generator = generator_of(f"{config.run.seed}/{name}/{start}" if start else f"{config.run.seed}/{name}", device)
    values = torch.empty((stop - start, *shape[1:]), dtype=torch.float32, device=device)
    if own is not None:
        return own(values, generator)
    if config.model.init_method_xavier_uniform and not name.endswith(SINKS):  # sinks have no fan-in
        bound = math.sqrt(3.0) * math.sqrt(2.0 / (shape[0] + shape[1]))
        return values.uniform_(-bound, bound, generator=generator)
    std = config.model.init_method_std
    if name.endswith(OUTPUT_LAYERS):
        std /= math.sqrt((1.0 if core.is_hybrid_model else 2.0) * core.num_layers)
    return values.normal_(0.0, std, generator=generator)


def draw_adapter(name: str, shape: Sequence[int], config: Config, device: torch.device) -> Tensor:
    """The initial value of an adapter, fp32: A [rank, n] uniform within 1 / sqrt(n), as in PEFT; B zero."""
    values = torch.zeros(tuple(shape), dtype=torch.float32, device=device)
    if name.endswith("lora_a"):
        bound = 1 / math.sqrt(shape[1])
        values.uniform_(-bound, bound, generator=generator_of(f"{config.run.seed}/{name}", device))
    return values


def generator_of(seed: str, device: torch.device) -> torch.Generator:
    """A generator of random numbers, seeded by a text."""
    digest = hashlib.sha256(seed.encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))


def draw_rows(
    part: Tensor,
    spans: Sequence[Span],
    name: str,
    shape: Sequence[int],
    core: TransformerConfig,
    config: Config,
    at_once: int = ROWS_DRAWN,
) -> None:
    """Draw the rows ``spans`` of a parameter of ``shape`` [n, m] into ``part``, without allocating all n rows.

    The parameter is drawn in blocks of ``at_once`` rows; a rank that needs one row of a block draws the block.
    """
    row, drawn, values = 0, None, None
    for start, stop in spans:
        while start < stop:
            first = start // at_once * at_once
            if first != drawn:
                values = draw(name, shape, core, config, part.device, (first, min(first + at_once, shape[0])))
                drawn = first
            end = min(stop, first + at_once)
            part[row : row + end - start] = values[start - first : end - first]
            row, start = row + end - start, end


def sections(parameter: Tensor) -> tuple[int, ...]:
    """Shares of a parameter along the dim that TP splits; each section is split separately.

    SwiGLU's first layer has two equal ones (gate above up), the first projection of a Gated DeltaNet six.
    """
    return getattr(parameter, "partition_sections", (1,) * getattr(parameter, "partition_stride", 1))


def in_sections(x: Tensor, dim: int, shares: Sequence[int]) -> tuple[Tensor, ...]:
    """The :func:`sections` of a whole parameter, or of a TP rank's part of it."""
    return x.split([x.size(dim) * share // sum(shares) for share in shares], dim)


def tensor_parallel_part(whole: Tensor, dim: int, shares: Sequence[int], size: int, rank: int) -> Tensor:
    """The part of TP rank ``rank`` of a parameter that is split along ``dim``, in :func:`sections`."""
    return torch.cat([section.chunk(size, dim)[rank] for section in in_sections(whole, dim, shares)], dim)
