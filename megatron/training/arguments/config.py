# SPDX-License-Identifier: Apache-2.0
"""Every setting of a training run, as small dataclasses.

A field *is* its command-line flag: ``num_layers`` is ``--num-layers``. Names, defaults and meanings are
Megatron-LM's wherever Megatron-LM has the flag; the new ones are the contract of this project. `parser.py` builds
the parser from these classes, so a setting is written down once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def flag(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field that is a command-line flag.

    ``extra`` may hold ``choices``; ``nargs``; ``type`` (needed when the default is None); ``aliases``, other spellings
    of the flag; ``flags``, the spellings that replace the one made from the field's name; ``const``, the value a flag
    without argument stores (a bool field stores ``not default``).
    """
    metadata = {"help": help, **extra}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def window(text: str) -> tuple[int, int]:
    """``LEFT,RIGHT`` as Megatron-LM writes it, with or without parentheses."""
    left, right = (int(part) for part in text.strip("() ").split(","))
    return left, right


def normalization(text: str) -> str:
    """Megatron-DeepSpeed writes small letters."""
    return {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}.get(text.lower(), text)


def positions(text: str) -> str:
    """BigScience spells RoPE out."""
    return {"rotary": "rope", "absolute": "learned_absolute"}.get(text, text)


def tokenizer(text: str) -> str:
    """The name of Megatron-LM; BigScience, MindSpeed-LLM and Megatron-DeepSpeed have others for Hugging Face's."""
    return {"PretrainedFromHF": "HuggingFaceTokenizer", "HFTokenizer": "HuggingFaceTokenizer"}.get(text, text)


@dataclass
class ModelConfig:
    """The network. Shapes may come from a named model (``--model``), which single flags override."""

    model: str | None = flag(None, "named shape, for example llama3-8b; single flags override it", type=str)
    num_layers: int | None = flag(None, "number of transformer layers", type=int, aliases=["--encoder-num-layers"])
    hidden_size: int | None = flag(None, "width of the residual stream", type=int)
    ffn_hidden_size: int | None = flag(
        None, "width of the MLP; default 4h, or about 8h/3 in a multiple of 64 with --swiglu", type=int
    )
    num_attention_heads: int | None = flag(None, "number of query heads", type=int)
    group_query_attention: bool = flag(False, "grouped-query attention with --num-query-groups key/value heads")
    num_query_groups: int = flag(1, "key/value heads under --group-query-attention")
    kv_channels: int | None = flag(None, "size of a head; default hidden_size / num_attention_heads", type=int)
    max_position_embeddings: int | None = flag(None, "longest sequence the model is made for", type=int)
    position_embedding_type: str = flag(
        "learned_absolute",
        "how positions enter",
        type=positions,
        choices=["learned_absolute", "rope", "yarn", "alibi", "none"],
    )
    rotary_base: int = flag(10000, "base period of RoPE", aliases=["--rotary-position-embeddings-theta"])
    rotary_percent: float = flag(1.0, "share of a head that is rotated")
    rotary_interleaved: bool = flag(False, "rotate neighbouring pairs in place of halves")
    rotary_seq_len_interpolation_factor: float | None = flag(None, "linear interpolation of RoPE", type=float)
    use_rope_scaling: bool = flag(False, "RoPE scaling as in Llama 3.1")
    rope_scaling_factor: float = flag(8.0, "factor of --use-rope-scaling")
    yarn_rotary_scaling_factor: float = flag(1.0, "YaRN: how much longer than the original length")
    yarn_original_max_position_embeddings: int = flag(4096, "YaRN: original length")
    yarn_beta_fast: float = flag(32.0, "YaRN: pairs that turn more often in the original length are left alone")
    yarn_beta_slow: float = flag(1.0, "YaRN: pairs that turn less often in the original length are interpolated")
    yarn_mscale: float = flag(1.0, "YaRN: numerator of the attention factor, (0.1 ln(factor) x this + 1)")
    yarn_mscale_all_dim: float = flag(0.0, "YaRN: denominator of the attention factor, likewise")
    yarn_correction_range_round_to_int: bool = flag(
        True,
        "YaRN: bounds between pairs left alone and pairs interpolated are not rounded to whole pairs",
        flags=["--no-yarn-correction-range-round-to-int"],
    )
    normalization: str = flag("LayerNorm", "normalization layer", type=normalization, choices=["LayerNorm", "RMSNorm"])
    norm_epsilon: float = flag(1e-5, "epsilon of the normalization", aliases=["--layernorm-epsilon"])
    apply_layernorm_1p: bool = flag(False, "weights of the norm centred on zero")
    swiglu: bool = flag(False, "gated MLP with SiLU")
    squared_relu: bool = flag(False, "squared ReLU in place of GELU")
    bias_gelu_fusion: bool = flag(
        True,
        "GELU by erf, as Megatron-LM computes it without its fused kernel, which has tanh; so too with "
        "--disable-bias-linear",
        flags=["--no-bias-gelu-fusion"],
    )
    openai_gelu: bool = flag(False, "GELU by tanh, whatever else is given")
    add_bias_linear: bool = flag(True, "no bias in the linear layers", flags=["--disable-bias-linear"])
    add_qkv_bias: bool = flag(False, "bias in the QKV projection alone")
    qk_layernorm: bool = flag(False, "normalize queries and keys of each head")
    softmax_type: str = flag(
        "vanilla",
        "attention's softmax: off-by-one adds 1 to its sum, learnable a sink, one learned score a head",
        choices=["vanilla", "off-by-one", "learnable"],
    )
    untie_embeddings_and_output_weights: bool = flag(False, "output layer with weights of its own")
    hidden_dropout: float = flag(0.1, "dropout on the residual branches")
    attention_dropout: float = flag(0.1, "dropout on attention probabilities, by position: the same on every grid")
    init_method_std: float = flag(0.02, "standard deviation of the initial weights")
    init_method_xavier_uniform: bool = flag(False, "Xavier-uniform initial weights")
    make_vocab_size_divisible_by: int = flag(128, "pad the vocabulary to a multiple of this times TP")
    padded_vocab_size: int | None = flag(
        None,
        "rows of the embedding, in place of what --make-vocab-size-divisible-by gives",
        type=int,
        aliases=["--pad-vocab-size-to"],
    )
    vocab_size: int | None = flag(None, "vocabulary size; default the tokenizer's", type=int)
    transformer_impl: str = flag(
        "auto",
        "layers from megatron-core (local) or Transformer Engine; auto: the latter on GPUs where it is installed",
        choices=["auto", "local", "transformer_engine"],
    )
    fp8_format: str | None = flag(None, "FP8 through Transformer Engine", type=str, choices=["e4m3", "hybrid"])
    fp8_recipe: str = flag("delayed", "FP8 scaling recipe", choices=["tensorwise", "delayed", "mxfp8", "blockwise"])
    fp8_amax_history_len: int = flag(1, "length of the FP8 amax history")
    fp8_amax_compute_algo: str = flag("most_recent", "how FP8 reads that history", choices=["most_recent", "max"])


@dataclass
class ParallelConfig:
    """The grid TP x Ulysses x Ring x DP x PP, and how memory is shared over it."""

    tensor_model_parallel_size: int = flag(1, "tensor-parallel size (TP)", aliases=["--model-parallel-size"])
    sequence_parallel: bool = flag(False, "split activations over TP between the linear layers (TP-sp)")
    partition_position_embedding: bool = flag(
        False, "learned positions: a rank holds, trains and optimizes the rows of its own tokens only"
    )
    context_parallel_size: int | None = flag(
        None, "ranks a sequence is split over, U x R; alone, the split is chosen and logged", type=int
    )
    ulysses_parallel_size: int | None = flag(
        None,
        "Ulysses degree: all-to-all over heads",
        type=int,
        aliases=["--ds-sequence-parallel-size", "--ulysses-degree-in-cp"],
    )
    ring_parallel_size: int | None = flag(None, "Ring degree: keys and values rotate", type=int)
    hierarchical_context_parallel_sizes: list[int] | None = flag(
        None, "Megatron's spelling of the grid: Ulysses degree, then Ring degree", type=int, nargs="+"
    )
    cp_comm_type: list[str] | None = flag(
        None,
        "Megatron's spelling of the split: p2p is Ring, a2a Ulysses, a2a+p2p both, with "
        "--hierarchical-context-parallel-sizes; all_gather is Ring whose ranks gather all keys at once",
        type=str,
        nargs="+",
    )
    context_parallel_balance: str | None = flag(
        None,
        "how the ring shares the work: zigzag, for a causal mask, is the default; contiguous, for a window; documents, "
        "for packed documents",
        type=str,
        choices=["zigzag", "contiguous", "documents"],
    )
    pipeline_model_parallel_size: int = flag(1, "pipeline-parallel size (PP)", aliases=["--pipe-parallel-size"])
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, "interleaved 1F1B: layers a virtual stage", type=int)
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, "interleaved 1F1B: virtual stages a rank", type=int)
    decoder_first_pipeline_num_layers: int | None = flag(None, "layers of the first pipeline stage", type=int)
    decoder_last_pipeline_num_layers: int | None = flag(None, "layers of the last pipeline stage", type=int)
    account_for_embedding_in_pipeline_split: bool = flag(False, "the first stage has one layer less")
    account_for_loss_in_pipeline_split: bool = flag(False, "the last stage has one layer less")
    zero_stage: int | None = flag(
        None,
        "ZeRO splits over DP x CP: 1 optimizer states, 2 gradients too, 3 weights too",
        type=int,
        choices=[0, 1, 2, 3],
    )
    use_distributed_optimizer: bool = flag(False, "Megatron's spelling of --zero-stage 1")
    overlap_grad_reduce: bool = flag(False, "reduce gradients during the backward pass")
    overlap_param_gather: bool = flag(False, "gather parameters during the forward pass (ZeRO 1)")
    ddp_bucket_size: int | None = flag(None, "gradient bucket, in parameters", type=int)
    grad_reduce_in_bf16: bool = flag(False, "reduce gradients in bf16")
    distributed_backend: str | None = flag(
        None, "default: nccl on GPUs, gloo on a CPU", type=str, choices=["nccl", "gloo"]
    )
    distributed_timeout_minutes: int = flag(10, "time a collective may take")


@dataclass
class AttentionConfig:
    """The attention core."""

    attention_kernel: str = flag(
        "auto",
        "kernel of one attention tile",
        choices=["auto", "flash_attn", "cudnn", "flash", "cpu", "triton", "math"],
    )
    attention_mask: str | None = flag(
        None,
        "attention mask; default causal. document: causal, with --reset-attention-mask",
        type=str,
        choices=["causal", "full", "window", "document", "block-sparse", "function"],
    )
    window_size: tuple[int, int] | None = flag(
        None, "tokens before and after a query that it attends to, LEFT,RIGHT; -1 is no bound", type=window
    )
    window_global_tokens: int = flag(0, "first tokens, which see and are seen outside the window as well")
    sparse_block_size: int = flag(128, "tokens of a block of --attention-mask block-sparse")
    sparse_pattern: str = flag(
        "longformer",
        "blocks to keep: longformer, bigbird, strided, or a JSON file with a list of key blocks for each query block",
    )
    sparse_window_blocks: int = flag(3, "longformer, bigbird: blocks before and after a query's own")
    sparse_global_blocks: int = flag(1, "longformer, bigbird: first blocks, which everybody sees")
    sparse_random_blocks: int = flag(3, "bigbird: blocks drawn for each query block")
    sparse_stride: int = flag(8, "strided: the last so many blocks, and every so-manieth")
    mask_function: str | None = flag(
        None,
        "FILE.py:NAME, for --attention-mask function: (query positions, key positions) -> boolean, within causal",
        type=str,
    )
    mask_cpu_threshold: int = flag(
        16384,
        "masks of pairs (functions, windows below 32 tokens) are made in host memory, in row blocks, where a sequence "
        "is longer than this",
    )
    recompute_granularity: str | None = flag(
        None, "recompute attention only, or whole layers", type=str, choices=["selective", "full"]
    )
    recompute_method: str | None = flag(
        None, "which layers --recompute-granularity full recomputes", type=str, choices=["uniform", "block"]
    )
    recompute_num_layers: int | None = flag(None, "layers a recomputed unit (uniform), or a stage (block)", type=int)
    recompute_activations: bool = flag(False, "same as --recompute-granularity selective")


@dataclass
class ChunkConfig:
    """Long sequences in chunks, with host memory behind them (FPDT)."""

    fpdt: bool = flag(False, "attention in pipelined chunks (FPDT)", aliases=["--ds-sequence-parallel-fpdt"])
    fpdt_chunk_size: int = flag(
        65536, "longest chunk, in tokens of the whole sequence", aliases=["--ds-sequence-parallel-fpdt-chunk-size"]
    )
    fpdt_offload: bool = flag(True, "keep finished chunks on the device", flags=["--no-fpdt-offload"])
    fpdt_stream_hidden: bool = flag(
        False, "hidden states live in host memory too: device memory does not grow with the sequence"
    )
    ffn_chunks: int | None = flag(
        None, "MLP in this many chunks of tokens; default under --fpdt: twice attention's", type=int
    )
    loss_chunks: int | None = flag(
        None,
        "output layer and loss in this many chunks of tokens, so that logits are never whole; default under --fpdt: "
        "2 x vocabulary / hidden size, and logits no larger than an MLP chunk",
        type=int,
    )
    offload_checkpoints: bool = flag(False, "inputs of recomputed (or FPDT) layers go to host memory")


@dataclass
class OptimizerSettings:
    """Optimizer, learning-rate schedule and precision."""

    optimizer: str = flag("adam", "optimizer", choices=["adam", "sgd"])
    lr: float | None = flag(None, "learning rate", type=float)
    min_lr: float = flag(0.0, "lowest learning rate of the schedule")
    lr_decay_style: str = flag(
        "linear", "schedule", choices=["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    )
    lr_decay_iters: int | None = flag(None, "iterations to decay over; default --train-iters", type=int)
    lr_decay_samples: int | None = flag(None, "samples to decay over; default --train-samples", type=int)
    lr_decay_tokens: int | None = flag(None, "tokens to decay over; default --train-tokens", type=int)
    lr_warmup_fraction: float | None = flag(None, "warm-up, as a share of the decay", type=float, aliases=["--warmup"])
    lr_warmup_iters: int = flag(0, "warm-up iterations")
    lr_warmup_samples: int = flag(0, "warm-up samples")
    lr_warmup_tokens: int | None = flag(None, "warm-up tokens", type=int)
    lr_warmup_init: float = flag(0.0, "learning rate at the start of warm-up")
    lr_wsd_decay_style: str = flag(
        "exponential", "last phase of WSD", choices=["exponential", "linear", "cosine", "minus_sqrt"]
    )
    lr_wsd_decay_iters: int | None = flag(None, "iterations of the last phase of WSD", type=int)
    lr_wsd_decay_samples: int | None = flag(None, "samples of the last phase of WSD", type=int)
    decoupled_lr: float | None = flag(None, "learning rate of the embedding and the output layer", type=float)
    decoupled_min_lr: float | None = flag(None, "lowest learning rate of those", type=float)
    weight_decay: float = flag(0.01, "weight decay")
    start_weight_decay: float | None = flag(None, "weight decay at the start of its schedule", type=float)
    end_weight_decay: float | None = flag(None, "weight decay at the end of its schedule", type=float)
    weight_decay_incr_style: str = flag("constant", "weight-decay schedule", choices=["constant", "linear", "cosine"])
    override_opt_param_scheduler: bool = flag(
        False,
        "schedule from the flags, not from the checkpoint",
        flags=["--override-opt-param-scheduler", "--override-opt_param-scheduler"],
        aliases=["--override-lr-scheduler"],
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "schedule from the checkpoint, not from the flags",
        flags=["--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"],
        aliases=["--use-checkpoint-lr-scheduler"],
    )
    clip_grad: float = flag(1.0, "largest gradient norm; 0 switches clipping off")
    adam_beta1: float = flag(0.9, "Adam's first beta")
    adam_beta2: float = flag(0.999, "Adam's second beta")
    adam_eps: float = flag(1e-8, "Adam's epsilon")
    sgd_momentum: float = flag(0.9, "SGD's momentum")
    bf16: bool = flag(False, "bfloat16 with fp32 main weights")
    fp16: bool = flag(False, "float16 with fp32 main weights and loss scaling")
    loss_scale: float | None = flag(None, "fixed loss scale, in place of fp16's dynamic one", type=float)
    initial_loss_scale: float = flag(2.0**32, "first dynamic loss scale")
    min_loss_scale: float = flag(1.0, "smallest dynamic loss scale", aliases=["--min-scale"])
    loss_scale_window: float = flag(1000, "good steps before the loss scale grows")
    hysteresis: int = flag(2, "overflows before the loss scale shrinks")
    check_for_nan_in_loss_and_grad: bool = flag(
        True, "go on when the loss or a gradient is NaN", flags=["--no-check-for-nan-in-loss-and-grad"]
    )


@dataclass
class DataConfig:
    """What is read, and in which batches."""

    micro_batch_size: int | None = flag(
        None, "samples a micro-batch on each data-parallel rank", type=int, aliases=["--batch-size"]
    )
    gradient_accumulation_steps: int | None = flag(
        None, "micro-batches a step, in place of --global-batch-size", type=int, aliases=["--gas"]
    )
    global_batch_size: int | None = flag(None, "samples an optimizer step; default micro-batch x DP", type=int)
    rampup_batch_size: list[int] | None = flag(
        None, "grow the batch: start size, increment, samples to grow over", type=int, nargs=3
    )
    seq_length: int | None = flag(None, "tokens a sample", type=int, aliases=["--encoder-seq-length"])
    data_path: list[str] | None = flag(None, "prefix, or weights and prefixes of a blend", type=str, nargs="*")
    train_data_path: list[str] | None = flag(None, "training data, in place of --data-path", type=str, nargs="*")
    valid_data_path: list[str] | None = flag(None, "validation data, in place of --data-path", type=str, nargs="*")
    test_data_path: list[str] | None = flag(None, "test data, in place of --data-path", type=str, nargs="*")
    split: str | None = flag(None, "train,valid,test shares of --data-path, for example 969,30,1", type=str)
    data_cache_path: str | None = flag(None, "folder of the index caches", type=str)
    mock_data: bool = flag(False, "random tokens in place of a dataset")
    mmap_bin_files: bool = flag(True, "read .bin files without mmap", flags=["--no-mmap-bin-files"])
    num_workers: int = flag(2, "data-loader processes a rank")
    num_dataset_builder_threads: int = flag(1, "threads that build the datasets of a blend")
    dataloader_type: str = flag(
        "single", "single: in order; cyclic: reshuffled each epoch", choices=["single", "cyclic"]
    )
    reset_position_ids: bool = flag(False, "positions start anew after each end-of-document token")
    reset_attention_mask: bool = flag(False, "no attention across end-of-document tokens")
    eod_mask_loss: bool = flag(False, "no loss on end-of-document tokens")
    tokenizer_type: str | None = flag(
        None,
        "tokenizer",
        type=tokenizer,
        choices=[
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
            "GPT2BPETokenizer",
            "TikTokenizer",
            "ByteLevelTokenizer",
            "NucleotideTokenizer",
            "CodonTokenizer",
            "NullTokenizer",
        ],
    )
    tokenizer_model: str | None = flag(None, "tokenizer file or folder", type=str, aliases=["--tokenizer-name-or-path"])
    vocab_file: str | None = flag(None, "vocab.json of GPT2BPETokenizer", type=str)
    merge_file: str | None = flag(None, "merges.txt of GPT2BPETokenizer", type=str)
    tiktoken_pattern: str | None = flag(None, "pre-tokenizer pattern of TikTokenizer", type=str)
    tiktoken_num_special_tokens: int = flag(1000, "special tokens of TikTokenizer")


@dataclass
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = flag(None, "folder to save checkpoints in", type=str)
    save_interval: int | None = flag(
        None, "iterations between checkpoints", type=int, aliases=["--persistent-save-interval"]
    )
    save_retain_interval: int | None = flag(None, "keep older checkpoints only at multiples of this", type=int)
    load: str | None = flag(None, "folder to load a checkpoint from", type=str)
    ckpt_step: int | None = flag(None, "iteration to load; default the latest", type=int)
    finetune: bool = flag(False, "load the weights only and start at iteration 0")
    pretrained_checkpoint: str | None = flag(None, "weights to start from where --load has no checkpoint", type=str)
    use_checkpoint_args: bool = flag(
        False, "the model as the checkpoint describes it; sizes that flags give count all the same"
    )
    exit_on_missing_checkpoint: bool = flag(False, "stop where --load has no checkpoint")
    save_optim: bool = flag(True, "leave the optimizer out of checkpoints", flags=["--no-save-optim"])
    save_rng: bool = flag(True, "leave the random state out of checkpoints", flags=["--no-save-rng"])
    load_optim: bool = flag(True, "do not load the optimizer", flags=["--no-load-optim"])
    load_rng: bool = flag(True, "do not load the random state", flags=["--no-load-rng"])
    ckpt_format: str = flag(
        "torch_dist",
        "checkpoint format; torch_dist is what is written, whichever is named",
        choices=["torch_dist", "torch", "torch_dcp", "zarr", "fsdp_dtensor"],
    )


@dataclass
class LoggingConfig:
    """What is written where."""

    log_interval: int = flag(100, "iterations between console lines")
    log_jsonl: str | None = flag(None, "file for one JSON object a step", type=str)
    log_throughput: bool = flag(False, "TFLOP/s and MFU on the console line")
    log_params_norm: bool = flag(False, "norm of the parameters")
    log_num_zeros_in_grad: bool = flag(False, "count zeros in the gradients")
    log_progress: bool = flag(False, "append progress to progress.txt in --save")
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard", type=str)
    tensorboard_log_interval: int = flag(1, "iterations between TensorBoard points")
    tensorboard_queue_size: int = flag(1000, "TensorBoard events held in memory")
    wandb_project: str | None = flag(None, "Weights & Biases project", type=str, aliases=["--wandb-project-name"])
    wandb_exp_name: str | None = flag(None, "Weights & Biases run name", type=str)
    wandb_save_dir: str | None = flag(None, "folder for Weights & Biases", type=str)
    wandb_entity: str | None = flag(None, "Weights & Biases entity", type=str, aliases=["--wandb-entity-name"])
    peak_tflops: float | None = flag(
        None, "peak TFLOP/s of one device, for MFU; default by GPU name, or this CPU's measured GEMM rate", type=float
    )
    progress: bool = flag(True, "no progress bar", flags=["--no-progress"])
    profile_memory: str | None = flag(
        None, "folder for a timeline of memory by kind in one step, as JSON and as a picture, of each rank", type=str
    )
    profile_memory_step: int | None = flag(None, "which step of this run --profile-memory records; default 2", type=int)


@dataclass
class RunConfig:
    """The run itself."""

    device: str = flag("auto", "where to run", choices=["auto", "cpu", "cuda"])
    seed: int = flag(1234, "seed of weights, data order and dropout")
    deterministic_mode: bool = flag(False, "a run repeats bit for bit, on the same grid and kind of device")
    train_iters: int | None = flag(None, "iterations to train", type=int)
    train_samples: int | None = flag(None, "samples to train, in place of --train-iters", type=int)
    train_tokens: int | None = flag(
        None, "tokens to train; beside --train-iters or --train-samples, the run ends with what comes first", type=int
    )
    eval_interval: int | None = flag(None, "iterations between evaluations", type=int)
    eval_iters: int = flag(100, "iterations of an evaluation")
    skip_train: bool = flag(False, "evaluate only")
    exit_interval: int | None = flag(None, "stop at a multiple of this iteration", type=int)
    exit_duration_in_mins: int | None = flag(None, "save and stop after this many minutes", type=int)
    exit_signal_handler: bool = flag(True, "save and stop on SIGTERM; always on here")
    manual_gc: bool = flag(False, "collect garbage at fixed steps")
    manual_gc_interval: int = flag(0, "iterations between collections of --manual-gc")


@dataclass
class ElsewhereConfig:
    """What other programs call settings above; `elsewhere.py` reads these into them."""

    checkpoint_activations: bool = flag(
        False, "Megatron-DeepSpeed, Megatron-LM before 3: --recompute-granularity full --recompute-method uniform"
    )
    checkpoint_num_layers: int | None = flag(
        None, "layers a unit of --checkpoint-activations: --recompute-num-layers; default 1", type=int
    )
    deepspeed_activation_checkpointing: bool = flag(
        False, "DeepSpeed's own kind of --checkpoint-activations; recomputes nothing without that"
    )
    checkpoint_in_cpu: bool = flag(False, "--offload-checkpoints, where layers are recomputed")
    activations_checkpoint_granularity: str | None = flag(
        None, "NeMo: --recompute-granularity", type=str, choices=["selective", "full"]
    )
    activations_checkpoint_method: str | None = flag(
        None, "--recompute-granularity full --recompute-method", type=str, choices=["uniform", "block"]
    )
    activations_checkpoint_num_layers: int | None = flag(
        None, "--recompute-num-layers of --activations-checkpoint-method; default 1", type=int
    )
    recompute_modules: list[str] | None = flag(
        None, "what --recompute-granularity selective recomputes: core_attn", type=str, nargs="+"
    )
    use_megatron_fsdp: bool = flag(
        False, "--zero-stage, by --data-parallel-sharding-strategy", aliases=["--use-custom-fsdp"]
    )
    data_parallel_sharding_strategy: str = flag(
        "no_shard",
        "of --use-megatron-fsdp: --zero-stage 0, 1, 2 or 3",
        choices=["no_shard", "optim", "optim_grads", "optim_grads_params"],
    )
    use_torch_fsdp2: bool = flag(False, "--zero-stage 3")
    torch_fsdp2_reshard_after_forward: bool = flag(
        True, "with --use-torch-fsdp2: --zero-stage 2", flags=["--torch-fsdp2-no-reshard-after-forward"]
    )
    deepspeed: bool = flag(False, "read --deepspeed_config, as far as it can be expressed here")
    deepspeed_config: str | None = flag(
        None,
        "DeepSpeed's JSON file: ZeRO, precision, clipping, batch sizes",
        type=str,
        flags=["--deepspeed_config", "--deepspeed-config"],
    )
    deepspeed_mpi: bool = flag(False, "DeepSpeed: processes started by MPI", flags=["--deepspeed_mpi"])
    no_pipeline_parallel: bool = flag(False, "DeepSpeed: no pipeline, so --pipeline-model-parallel-size 1")
    num_key_value_heads: int | None = flag(
        None, "Megatron-DeepSpeed: --group-query-attention --num-query-groups", type=int
    )
    attention_head_type: str | None = flag(
        None, "BigCode: multiquery is --group-query-attention", type=str, choices=["multihead", "multiquery"]
    )
    glu_activation: str | None = flag(
        None, "BigScience: --swiglu, with an MLP of 4h unless --ffn-hidden-size is given", type=str, choices=["swiglu"]
    )
    spec: list[str] | None = flag(
        None, "a module with the layers; those that are the ones built here", nargs="*", type=str
    )
    context_parallel_algo: str | None = flag(
        None,
        "MindSpeed: --cp-comm-type a2a, p2p, a2a+p2p with --ulysses-degree-in-cp, or all_gather",
        type=str,
        choices=["ulysses_cp_algo", "megatron_cp_algo", "hybrid_cp_algo", "kvallgather_cp_algo"],
    )
    rope_scaling_type: str | None = flag(None, "MindSpeed: llama3 is --use-rope-scaling", type=str, choices=["llama3"])
    low_freq_factor: float | None = flag(None, "of --rope-scaling-type llama3: 1", type=float)
    high_freq_factor: float | None = flag(None, "of --rope-scaling-type llama3: 4", type=float)
    original_max_position_embeddings: int | None = flag(None, "of --rope-scaling-type llama3: 8192", type=int)


@dataclass
class SimulationConfig:
    """A simulated cluster in place of a run."""

    dry_run: bool = flag(False, "simulate one step: memory, communication, FLOPs and, with --gpu, time")
    world_size: int | None = flag(
        None, "--dry-run: number of simulated processes; default as many as were started", type=int
    )
    gpu: str | None = flag(
        None, "--dry-run: simulate this GPU, by name or as a file; default: processes on a CPU", type=str
    )
    dry_run_json: str | None = flag(None, "--dry-run: file for the result, with pictures beside it", type=str)
    dry_run_every_layer: bool = flag(False, "--dry-run: run all layers, in place of a few that stand for all")


@dataclass
class Config:
    """One training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    chunks: ChunkConfig = field(default_factory=ChunkConfig)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    run: RunConfig = field(default_factory=RunConfig)
    elsewhere: ElsewhereConfig = field(default_factory=ElsewhereConfig)
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    notes: list[str] = field(default_factory=list)  # not a flag: what rank 0 says once before training
