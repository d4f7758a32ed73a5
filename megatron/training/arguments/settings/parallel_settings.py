# SPDX-License-Identifier: Apache-2.0
"""Settings of the grid, of attention, and of chunks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.decisions.kernels import KERNELS
from megatron.training.arguments.settings.flag import flag


def window(text: str) -> tuple[int, int]:
    """The two numbers of ``LEFT,RIGHT``, with or without parentheses, as Megatron-LM writes it."""
    left, right = (int(part) for part in text.strip("() ").split(","))
    return left, right


@dataclass
class ParallelConfig:
    """The grid TP x Ulysses x Ring x DP x PP, and how memory is split over it."""

    tensor_model_parallel_size: int = flag(1, "tensor-parallel size (TP)", aliases=["--model-parallel-size"])
    sequence_parallel: bool = flag(False, "split activations over TP between the linear layers (TP-sp)")
    partition_position_embedding: bool = flag(
        False, "learned positions: each rank holds and trains only the rows of its own tokens"
    )
    context_parallel_size: int | None = flag(
        None,
        "ranks that a sequence is split over: Ulysses x Ring; without the two sizes, the split is chosen and logged",
        type=int,
    )
    ulysses_parallel_size: int | None = flag(
        None,
        "Ulysses degree: all-to-all over heads",
        type=int,
        aliases=["--ds-sequence-parallel-size", "--ulysses-degree-in-cp"],
    )
    ring_parallel_size: int | None = flag(None, "Ring degree: keys and values travel around the ranks", type=int)
    hierarchical_context_parallel_sizes: list[int] | None = flag(
        None, "Megatron-LM's name for the two sizes: Ulysses degree, then Ring degree", type=int, nargs="+"
    )
    cp_comm_type: list[str] | None = flag(
        None,
        "Megatron-LM's name for the split: p2p is Ring, a2a is Ulysses, a2a+p2p is both (with "
        "--hierarchical-context-parallel-sizes); all_gather is Ring that gathers all keys at once",
        type=str,
        nargs="+",
    )
    context_parallel_balance: str | None = flag(
        None,
        "how the work is split over the ring: zigzag for causal masks, contiguous for windows, documents for packed "
        "documents; default: the one that suits the mask",
        type=str,
        choices=["zigzag", "contiguous", "documents"],
    )
    pipeline_model_parallel_size: int = flag(1, "pipeline-parallel size (PP)", aliases=["--pipe-parallel-size"])
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "interleaved 1F1B: layers per virtual stage", type=int
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, "interleaved 1F1B: virtual stages per rank", type=int)
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None, "interleaved 1F1B: consecutive micro-batches on a virtual stage; default: the number of stages", type=int
    )
    decoder_first_pipeline_num_layers: int | None = flag(None, "layers of the first pipeline stage", type=int)
    decoder_last_pipeline_num_layers: int | None = flag(None, "layers of the last pipeline stage", type=int)
    account_for_embedding_in_pipeline_split: bool = flag(False, "the first stage has one layer less")
    account_for_loss_in_pipeline_split: bool = flag(False, "the last stage has one layer less")
    elastic: bool = flag(
        False,
        "choose the grid at each start for the processes that there are: TP and PP as given, the largest CP that fits; "
        "for torchrun --nnodes MIN:MAX --max-restarts N",
    )
    elastic_grids: str | None = flag(
        None,
        'grids of --elastic by number of processes, "8: tp2 u2 r2; 4: u2 r2"; the remaining ranks are DP',
        type=str,
    )
    zero_stage: int | None = flag(
        None,
        "ZeRO, over DP x CP: 1 splits optimizer states, 2 also gradients, 3 also weights",
        type=int,
        choices=[0, 1, 2, 3],
    )
    use_distributed_optimizer: bool = flag(False, "Megatron-LM's name for --zero-stage 1")
    overlap_grad_reduce: bool = flag(False, "reduce gradients during the backward pass")
    overlap_param_gather: bool = flag(False, "gather parameters during the forward pass (ZeRO 1)")
    ddp_bucket_size: int | None = flag(None, "gradient bucket, in parameters", type=int)
    grad_reduce_in_bf16: bool = flag(False, "reduce gradients in bf16")
    distributed_backend: str | None = flag(
        None, "default: nccl on GPUs, gloo on a CPU", type=str, choices=["nccl", "gloo"]
    )
    distributed_timeout_minutes: int = flag(10, "longest time of one collective")
    network_interface: str | None = flag(
        None,
        "network interface of gloo and NCCL on every node, such as eth0; default GLOO_SOCKET_IFNAME, else the one on "
        "the route to MASTER_ADDR",
        type=str,
    )


@dataclass
class AttentionConfig:
    """The attention core, and recompute."""

    attention_kernel: str = flag("auto", "kernel of one attention tile", choices=["auto", *KERNELS])
    attention_mask: str | None = flag(
        None,
        "attention mask; default causal. document: causal, with --reset-attention-mask",
        type=str,
        choices=["causal", "full", "window", "document", "block-sparse", "function"],
    )
    window_size: tuple[int, int] | None = flag(
        None, "LEFT,RIGHT: number of tokens before and after a query that it attends to; -1: no bound", type=window
    )
    window_global_tokens: int = flag(
        0, "first tokens of the sequence, which attend and are attended to outside the window too"
    )
    sparse_block_size: int = flag(128, "tokens of a block of --attention-mask block-sparse")
    sparse_pattern: str = flag(
        "longformer",
        "blocks to keep: longformer, bigbird, strided, or a JSON file with a list of key blocks for each query block",
    )
    sparse_window_blocks: int = flag(3, "longformer, bigbird: blocks before and after a query's own")
    sparse_global_blocks: int = flag(1, "longformer, bigbird: first blocks, to which all queries attend")
    sparse_random_blocks: int = flag(3, "bigbird: blocks drawn for each query block")
    sparse_stride: int = flag(8, "strided: stride S; a query attends to the last S blocks and to every S-th block")
    mask_function: str | None = flag(
        None,
        "FILE.py:NAME, for --attention-mask function: (query positions, key positions) -> boolean, within causal",
        type=str,
    )
    mask_cpu_threshold: int = flag(
        16384,
        "dense masks (of functions and of windows below 32 tokens) are made in host memory, in blocks of rows, if the "
        "sequence is longer than this",
    )
    recompute_granularity: str | None = flag(
        None, "recompute attention only, or complete layers", type=str, choices=["selective", "full"]
    )
    recompute_method: str | None = flag(
        None, "which layers --recompute-granularity full recomputes", type=str, choices=["uniform", "block"]
    )
    recompute_num_layers: int | None = flag(
        None, "layers per recomputed unit (uniform), or per stage (block)", type=int
    )
    recompute_activations: bool = flag(False, "same as --recompute-granularity selective")


@dataclass
class ChunkConfig:
    """Long sequences in chunks that may be kept in host memory (FPDT)."""

    fpdt: bool = flag(False, "attention in pipelined chunks (FPDT)", aliases=["--ds-sequence-parallel-fpdt"])
    fpdt_chunk_size: int = flag(
        65536, "longest chunk, in tokens of the complete sequence", aliases=["--ds-sequence-parallel-fpdt-chunk-size"]
    )
    fpdt_offload: bool = flag(True, "keep finished chunks on the device", flags=["--no-fpdt-offload"])
    fpdt_stream_hidden: bool = flag(
        False, "keep hidden states in host memory too: device memory does not grow with the sequence"
    )
    ffn_chunks: int | None = flag(
        None, "compute the MLP in this many chunks of tokens; default with --fpdt: twice as many as attention", type=int
    )
    loss_chunks: int | None = flag(
        None,
        "compute output layer and loss in this many chunks of tokens, which saves the complete logits; default with "
        "--fpdt: 2 x vocabulary / hidden size, and logits no larger than an MLP chunk",
        type=int,
    )
    offload_checkpoints: bool = flag(False, "keep the inputs of recomputed layers (or FPDT layers) in host memory")
