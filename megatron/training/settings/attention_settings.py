# SPDX-License-Identifier: Apache-2.0
"""Settings of attention, its masks, recompute and chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron.decisions.kernel_order import KERNELS
from megatron.decisions.state_exchange import LINEAR_KERNELS
from megatron.training.settings.flag import NOT_NEGATIVE, count, flag, function, layer_pattern
from megatron.training.settings.kinds.hybrid_kind import STATES


class MaskKind(NamedTuple):
    """What a name of ``--attention-mask`` means.

    Attributes:
        make: "module:class" of a mask, which is made from the values of ``flags``, or "module:function" of an
            `AttentionConfig` and the length of the sequence.
        flags: settings that only this mask reads.
        sees_ahead: whether tokens attend to later ones.
    """

    make: str
    flags: tuple[str, ...] = ()
    sees_ahead: bool = False


LAYOUT, RULE = "megatron.context_parallel.layout", "megatron.training.model.attention_rule"
SPARSE = ("sparse_block_size", "sparse_pattern", "sparse_window_blocks", "sparse_global_blocks",
          "sparse_random_blocks", "sparse_stride")  # fmt: skip
# Every name of --attention-mask. To add a mask, write a class in context_parallel/layout/masks.py, and add a line here.
MASKS = {
    "causal": MaskKind(f"{LAYOUT}.masks:Causal"),
    "full": MaskKind(f"{LAYOUT}.masks:Full", sees_ahead=True),
    "window": MaskKind(f"{RULE}:window_mask", ("window_size", "window_global_tokens", "window_attn_skip_freq")),
    "document": MaskKind(f"{LAYOUT}.masks:Causal"),  # within a document; the documents come with each batch
    "block-sparse": MaskKind(f"{RULE}:block_sparse_mask", SPARSE),
    "function": MaskKind(f"{RULE}:function_mask", ("mask_function",)),
}


def window(text: str) -> tuple[int, int]:
    """The two numbers of ``LEFT,RIGHT``, with or without parentheses, as Megatron-LM writes it."""
    left, right = (int(part) for part in text.strip("() ").split(","))
    return left, right


@dataclass
class AttentionConfig:
    """The attention core, and recompute."""

    attention_kernel: str = flag(
        "auto", "kernel of one attention tile", choices=["auto", *KERNELS], stage=True, generation=True, computes=False
    )
    linear_attention_kernel: str = flag(
        "auto",
        "kernels of linear-attention and SSM layers: those of fla-core; triton: ours for Mamba2 on GPUs; blocks: these "
        "run anywhere; auto: fla where it can run, else blocks",
        choices=LINEAR_KERNELS,
        read_with=STATES,
        stage=True,
        computes=False,
    )
    attention_block_sizes: str | None = flag(
        None,
        "FILE of tools/measure_hardware.py --attention: block sizes of the kernel triton, as measured on this GPU",
        stage=True,
        computes=False,
    )
    attention_mask: str | None = function(
        None,
        "attention mask; default causal. document: causal, with --reset-attention-mask",
        choices=[*MASKS],
        generation=True,
    )
    window_size: tuple[int, int] | None = function(
        None,
        "LEFT,RIGHT: number of tokens before and after a query that it attends to; -1: no bound",
        type=window,
        generation=True,
    )
    window_attn_skip_freq: int | list[int] | None = function(
        None,
        "layers without the window, whose mask is causal (full, if the window looks ahead): every N-th; or 1 for each "
        "layer with the window and 0 for the others, as in ([1]*5+[0])*4",
        type=layer_pattern,
        generation=True,
    )
    window_global_tokens: int = function(
        0, "first tokens of the sequence, which attend and are attended to outside the window too", generation=True
    )
    sparse_block_size: int = function(128, "tokens of a block of --attention-mask block-sparse")
    sparse_pattern: str = function(
        "longformer",
        "blocks to keep: longformer, bigbird, strided, or a JSON file with a list of key blocks for each query block",
    )
    sparse_window_blocks: int = function(3, "longformer, bigbird: blocks before and after a query's own")
    sparse_global_blocks: int = function(1, "longformer, bigbird: first blocks, to which all queries attend")
    sparse_random_blocks: int = function(3, "bigbird: blocks drawn for each query block")
    sparse_stride: int = function(8, "strided: stride S; a query attends to the last S blocks and to every S-th block")
    mask_function: str | None = function(
        None,
        "FILE.py:NAME, for --attention-mask function: (query positions, key positions) -> boolean, within causal",
        generation=True,
    )
    mask_cpu_threshold: int = flag(
        16384,
        "dense masks (of functions and of windows below 32 tokens) are made in host memory, in blocks of rows, if the "
        "sequence is longer than this",
        range=NOT_NEGATIVE,
        generation=True,
    )
    recompute_granularity: str | None = flag(
        None, "recompute attention only, or whole layers", choices=["selective", "full"], stage=True
    )
    recompute_method: str | None = flag(
        None, "which layers --recompute-granularity full recomputes", choices=["uniform", "block"], stage=True
    )
    recompute_num_layers: int | None = count(
        None, "layers per recomputed unit (uniform), or per stage (block)", stage=True
    )
    keep_attention: bool = flag(
        False,
        "layers of --recompute-granularity full keep attention's output and lse, so that it is not recomputed",
        stage=True,
    )
    recompute_activations: bool = flag(False, "same as --recompute-granularity selective", stage=True)

    @property
    def sees_ahead(self) -> bool:
        """Whether the mask, when it is complete, lets tokens attend to later ones."""
        window = self.window_size
        return MASKS[self.attention_mask or "causal"].sees_ahead or (window is not None and window[1] != 0)


@dataclass
class ChunkConfig:
    """Long sequences in chunks that may be kept in host memory (FPDT)."""

    fpdt: bool = flag(
        False,
        "attention in pipelined chunks (FPDT)",
        aliases=["--ds-sequence-parallel-fpdt"],
        stage=True,
        generation="prompts are read through the ring at once, not in chunks",
    )
    fpdt_chunk_size: int = count(
        65536,
        "longest chunk, in tokens of the complete sequence",
        aliases=["--ds-sequence-parallel-fpdt-chunk-size"],
        needs=("fpdt",),
        stage=True,
    )
    fpdt_offload: bool = flag(
        True, "keep finished chunks on the device", flags=["--no-fpdt-offload"], needs=("fpdt",), stage=True
    )
    fpdt_stream_hidden: bool = flag(
        False,
        "keep hidden states in host memory too: device memory does not grow with the sequence",
        needs=("fpdt",),
        stage=True,
    )
    ffn_chunks: int | None = count(
        None,
        "compute the MLP in this many chunks of tokens; default with --fpdt: twice as many as attention",
        stage=True,
        generation="prompts are read at once, not in chunks",
    )
    loss_chunks: int | None = count(
        None,
        "compute output layer and loss in this many chunks of tokens, which saves the complete logits; default with "
        "--fpdt: 2 x vocabulary / hidden size, and logits no larger than an MLP chunk",
        stage=True,
    )
    offload_checkpoints: bool = flag(
        False, "keep the inputs of recomputed layers (or FPDT layers) in host memory", stage=True
    )
