# SPDX-License-Identifier: Apache-2.0
"""Checks of masks, packed documents, the balance that suits them, and partitioned positions."""

from __future__ import annotations

from megatron.decisions.lengths import NARROW
from megatron.training.arguments.config import AttentionConfig, Config
from megatron.training.refusal import Refusal

OWN_FLAGS = {  # settings that only one mask reads
    "window": ("window_size", "window_global_tokens"),
    "block-sparse": (
        "sparse_block_size",
        "sparse_pattern",
        "sparse_window_blocks",
        "sparse_global_blocks",
        "sparse_random_blocks",
        "sparse_stride",
    ),
    "function": ("mask_function",),
}
READ_BY = {  # settings that only some patterns read
    "sparse_window_blocks": ("longformer", "bigbird"),
    "sparse_global_blocks": ("longformer", "bigbird"),
    "sparse_random_blocks": ("bigbird",),
    "sparse_stride": ("strided",),
}


def check_attention(config: Config) -> None:
    """Settle the mask inside a document, whether documents are packed, and the ring's balance."""
    attention, data = config.attention, config.data
    if attention.attention_mask == "document":
        data.reset_attention_mask = True
    if attention.attention_mask in (None, "document"):
        attention.attention_mask = "window" if attention.window_size else "causal"
    _own_flags(attention)
    if attention.attention_mask == "window" and attention.window_size is None:
        raise Refusal("--attention-mask window needs --window-size LEFT,RIGHT, for example --window-size 4095,0")
    if attention.attention_mask == "window" and min(attention.window_size) < -1:
        left, right = attention.window_size
        raise Refusal(f"--window-size {left},{right}: sizes are counts of tokens, 0 or more, or -1 for no bound")
    if attention.attention_mask == "function" and attention.mask_function is None:
        raise Refusal("--attention-mask function needs --mask-function FILE.py:NAME")
    if attention.sparse_block_size < 1 or attention.sparse_stride < 1:
        raise Refusal("--sparse-block-size and --sparse-stride are 1 or more")
    if data.reset_position_ids and not data.reset_attention_mask and config.model.position_embedding_type == "alibi":
        raise Refusal(
            "--reset-position-ids with --position-embedding-type alibi needs --reset-attention-mask: distances between "
            "documents have no meaning once positions restart; add it, or leave --reset-position-ids out"
        )
    streamed_batch = config.chunks.fpdt_stream_hidden and data.micro_batch_size > 1
    if data.reset_attention_mask and streamed_batch:
        raise Refusal(
            f"--fpdt-stream-hidden with packed documents and --micro-batch-size {data.micro_batch_size} is not "
            "supported, since each sample has tiles of its own: use --micro-batch-size 1"
        )
    if attention.mask_cpu_threshold != AttentionConfig.mask_cpu_threshold and not _masks_pairs(attention):
        config.notes.append(
            f"--mask-cpu-threshold has nothing to decide: --attention-mask {attention.attention_mask} is cut in tiles, "
            "and makes no mask of pairs"
        )
    _balance(config)


def _masks_pairs(attention: AttentionConfig) -> bool:
    narrow = attention.window_size is not None and sum(attention.window_size) < NARROW
    return attention.attention_mask == "function" or narrow


def _own_flags(attention: AttentionConfig) -> None:
    default = AttentionConfig()
    for mask, names in OWN_FLAGS.items():
        given = [name for name in names if getattr(attention, name) != getattr(default, name)]
        if given and attention.attention_mask != mask:
            flag = "--" + given[0].replace("_", "-")
            raise Refusal(f"{flag} is read by --attention-mask {mask} alone: add that, or leave {flag} out")
    for name, patterns in READ_BY.items():
        if getattr(attention, name) != getattr(default, name) and attention.sparse_pattern not in patterns:
            flag = "--" + name.replace("_", "-")
            raise Refusal(
                f"{flag} is read by --sparse-pattern {' and '.join(patterns)} alone, not by "
                f"{attention.sparse_pattern}: leave it out"
            )


def _balance(config: Config) -> None:
    parallel, data = config.parallel, config.data
    documents = data.reset_attention_mask
    if parallel.context_parallel_balance == "documents":
        if not documents:
            raise Refusal(
                "--context-parallel-balance documents deals packed documents: add --attention-mask document, or use "
                "zigzag or contiguous"
            )
        if data.micro_batch_size > 1:
            raise Refusal(
                f"--context-parallel-balance documents with --micro-batch-size {data.micro_batch_size} is not "
                "supported, since each sample would be dealt in its own way: use --micro-batch-size 1, or zigzag"
            )
    if parallel.context_parallel_balance is not None:
        return
    dealt = data.micro_batch_size == 1 and not parallel.partition_position_embedding
    if documents and dealt and config.attention.attention_mask in ("causal", "full"):
        parallel.context_parallel_balance = "documents"
    elif _even_rows(config.attention):
        parallel.context_parallel_balance = "contiguous"  # neighbours exchange, the others have little to say
    else:
        parallel.context_parallel_balance = "zigzag"


def _even_rows(attention: AttentionConfig) -> bool:
    """Whether each query attends to about as many keys, most of them near: then there is nothing to balance."""
    sparse = attention.attention_mask == "block-sparse" and attention.sparse_pattern in ("longformer", "bigbird")
    return attention.attention_mask == "window" or sparse


def varies_by_batch(config: Config) -> bool:
    """Whether attention or positions depend on where a batch's documents end."""
    return config.data.reset_attention_mask or config.data.reset_position_ids


def sees_ahead(attention: AttentionConfig) -> bool:
    """Whether a mask, settled by :func:`check_attention`, lets tokens attend to later ones."""
    return attention.attention_mask == "full" or (attention.window_size is not None and attention.window_size[1] != 0)


def check_partitioned_positions(config: Config) -> None:
    """Settle --partition-position-embedding."""
    model, parallel = config.model, config.parallel
    if not parallel.partition_position_embedding:
        return
    if model.position_embedding_type != "learned_absolute":
        raise Refusal(
            f"--partition-position-embedding with --position-embedding-type {model.position_embedding_type} has no "
            "table to partition: use --position-embedding-type learned_absolute, or leave it out"
        )
    if config.data.reset_position_ids or parallel.context_parallel_balance == "documents":
        reset = config.data.reset_position_ids
        flag = "--reset-position-ids" if reset else "--context-parallel-balance documents"
        raise Refusal(
            f"--partition-position-embedding with {flag} is not supported, since a rank's positions would hang on the "
            f"documents in the batch: leave one out{'' if reset else ', or use --context-parallel-balance zigzag'}"
        )
    if config.optimizer.fp16:  # the table has an optimizer of its own in core, which would scale its loss on its own
        raise Refusal("--partition-position-embedding with --fp16 is not supported: use --bf16, or leave it out")
    if parallel.context_parallel_size == 1 and not parallel.sequence_parallel:
        parallel.partition_position_embedding = False
        config.notes.append(
            "--partition-position-embedding has nothing to split without context or sequence parallelism: switched off"
        )
