# SPDX-License-Identifier: Apache-2.0
"""The attention that the flags describe: mask, ALiBi, kernel."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from megatron.context_parallel.attention.rule import AttentionRule
from megatron.context_parallel.layout.block_sparse import (
    BigBirdBlocks,
    BlockList,
    BlockSparse,
    LongformerBlocks,
    Pattern,
    StridedBlocks,
)
from megatron.context_parallel.layout.grid import Grid
from megatron.context_parallel.layout.masks import Causal, Full, Mask, MaskFunction, Window
from megatron.context_parallel.positions.alibi import alibi_slopes
from megatron.decisions.block_sizes import BlockTable, measured_of
from megatron.system.user_function import user_function
from megatron.training.json_file import parse_json, read_bytes, read_json
from megatron.training.refusal import Refusal
from megatron.training.settings.attention_settings import MASKS
from megatron.training.settings.config import AttentionConfig, Config
from megatron.training.settings.models import window_layers


def attention_rule(config: Config, grid: Grid) -> AttentionRule:
    """The rule of a completed configuration, with the mask of the flags; :func:`layer_masks` has each layer's mask.

    Documents are not part of it: they come with each batch.

    Raises:
        Refusal: a file that a flag names cannot be read, or has the wrong content.
    """
    attention, model = config.attention, config.model
    slopes = None
    if model.position_embedding_type == "alibi":
        local = model.num_attention_heads // grid.tensor.size
        slopes = alibi_slopes(model.num_attention_heads)[grid.tensor.rank * local : (grid.tensor.rank + 1) * local]
    return AttentionRule(
        attention_mask(config),
        attention.attention_kernel,
        alibi_slopes=slopes,
        mask_cpu_threshold=attention.mask_cpu_threshold,
        exchange=config.parallel.key_exchange,
        softcap=model.attn_logit_softcapping,
        measured=measured_blocks(attention.attention_block_sizes)[0],
    )


def measured_blocks(file: str | None) -> tuple[BlockTable | None, tuple[int, int] | None]:
    """The block sizes in the machine file of ``--attention-block-sizes``, and the capability of their GPU."""
    if file is None:
        return None, None
    raw, flag = read_json(file, "--attention-block-sizes"), f"--attention-block-sizes {file}"
    if not isinstance(raw, dict) or "attention_blocks" not in raw:
        raise Refusal(f"{flag}: has no attention_blocks: write it with tools/measure_hardware.py --attention")
    capability = raw.get("capability")
    if not isinstance(capability, list) or len(capability) != 2 or any(type(part) is not int for part in capability):
        raise Refusal(f"{flag}: capability: must be [major, minor] of the GPU that was measured, such as [9, 0]")
    try:
        return measured_of(raw["attention_blocks"]), (capability[0], capability[1])
    except ValueError as error:
        raise Refusal(f"{flag}: {error}") from None


def attention_mask(config: Config) -> Mask:
    """The mask inside a document, by the table in settings/attention_settings.py."""
    attention = config.attention
    kind = MASKS[attention.attention_mask or "causal"]
    module, _, name = kind.make.partition(":")
    make = getattr(import_module(module), name)
    if isinstance(make, type):
        return make(*(getattr(attention, setting) for setting in kind.flags))
    return make(attention, config.data.seq_length)


def layer_masks(config: Config) -> list[Mask]:
    """The mask inside a document of each layer of the model."""
    mask, other = attention_mask(config), Full() if config.attention.sees_ahead else Causal()
    return [mask if own else other for own in window_layers(config.attention, config.model.num_layers)]


def window_mask(attention: AttentionConfig, length: int) -> Mask:
    left, right = attention.window_size
    return Window(length if left < 0 else left, length if right < 0 else right, attention.window_global_tokens)


def block_sparse_mask(attention: AttentionConfig, length: int) -> Mask:
    return BlockSparse(attention.sparse_block_size, sparse_pattern(attention, length), length)


def function_mask(attention: AttentionConfig, length: int) -> Mask:
    return MaskFunction(mask_function(attention.mask_function), Causal())


def sparse_pattern(attention: AttentionConfig, length: int) -> Pattern:
    """The pattern that ``--sparse-pattern`` names, or the list of blocks in the file it names."""
    window, start = attention.sparse_window_blocks, attention.sparse_global_blocks
    if attention.sparse_pattern == "longformer":
        return LongformerBlocks(window, start)
    if attention.sparse_pattern == "bigbird":
        return BigBirdBlocks(window, start, attention.sparse_random_blocks)
    if attention.sparse_pattern == "strided":
        return StridedBlocks(attention.sparse_stride)
    name, blocks = attention.sparse_pattern, -(-length // attention.sparse_block_size)
    try:
        rows = parse_json(read_bytes(name))
        pattern = BlockList(tuple(tuple(int(block) for block in row) for row in rows))
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise Refusal(
            f"--sparse-pattern {name}: {getattr(error, 'strerror', None) or error}; use longformer, bigbird, strided, "
            "or a JSON file with a list of key blocks for each query block"
        ) from None
    if len(pattern.rows) != blocks or any(not 0 <= block < blocks for row in pattern.rows for block in row):
        raise Refusal(
            f"--sparse-pattern {name} must have {blocks} rows (--seq-length {length} in --sparse-block-size "
            f"{attention.sparse_block_size}) of block numbers from 0 to {blocks - 1}; it has {len(pattern.rows)} rows"
        )
    if (later := pattern.later) is not None:
        raise Refusal(
            f"--sparse-pattern {name} keeps key block {later[1]} for query block {later[0]}, but "
            "--attention-mask block-sparse is causal: list no later blocks"
        )
    return pattern


def mask_function(spec: str) -> Callable:
    """The function that ``--mask-function FILE.py:NAME`` names."""
    try:
        return user_function(f"--mask-function {spec}", spec)
    except ValueError as error:
        raise Refusal(str(error)) from error
