# SPDX-License-Identifier: Apache-2.0
"""Settings of the optimizer, the schedule, the precision and the data."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.settings.flag import FUNCTION, flag


def tokenizer(text: str) -> str:
    """Megatron-LM's name of a tokenizer; some forks have other names for Hugging Face's."""
    others = ("PretrainedFromHF", "HFTokenizer", "AutoTokenizer", "SFTTokenizer")
    return "HuggingFaceTokenizer" if text in others else text


def optimizer(text: str) -> str:
    """Megatron-LM's name of an optimizer; its adam is AdamW, as some forks call it."""
    return {"adamw": "adam", "fusedadam": "adam", "fusedadamw": "adam", "dist_muon": "muon"}.get(text.lower(), text)


@dataclass
class OptimizerSettings:
    """Optimizer, learning-rate schedule and precision."""

    optimizer: str = flag("adam", "optimizer", type=optimizer, choices=["adam", "sgd", "muon"])
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
    decoupled_min_lr: float | None = flag(None, "lowest learning rate of embedding and output layer", type=float)
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
    apply_wd_to_qk_layernorm: bool = flag(False, "weight decay for the norms of --qk-layernorm, too")
    clip_grad: float = flag(1.0, "largest gradient norm; 0 switches clipping off")
    adam_beta1: float = flag(0.9, "Adam's first beta")
    adam_beta2: float = flag(0.999, "Adam's second beta")
    adam_eps: float = flag(1e-8, "Adam's epsilon")
    sgd_momentum: float = flag(0.9, "SGD's momentum")
    muon_momentum: float = flag(0.9, "Muon's momentum")
    muon_nesterov: bool = flag(False, "Muon with Nesterov's momentum", aliases=["--muon-use-nesterov"])
    muon_split_qkv: bool = flag(True, "Muon: queries, keys and values are one matrix", flags=["--muon-no-split-qkv"])
    muon_scale_mode: str = flag(
        "spectral",
        "how Muon's update grows with the size of a matrix",
        choices=["spectral", "unit_rms_norm", "shape_scaling"],
    )
    muon_extra_scale_factor: float = flag(1.0, "factor of Muon's update; 0.2 is about the size of AdamW's")
    muon_coefficient_type: str = flag(
        "quintic",
        "Muon: coefficients of Newton-Schulz",
        choices=["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"],
    )
    muon_num_ns_steps: int = flag(5, "Muon: Newton-Schulz steps")
    muon_fp32_matmul_prec: str | None = flag(
        None,
        "Muon: precision of Newton-Schulz; default medium (bf16) with --bf16 or --fp16, else highest",
        type=str,
        choices=["medium", "high", "highest"],
    )
    muon_tp_mode: str = flag(
        "duplicated",
        "Muon with TP: each rank computes the whole update; distributed: its part of it; blockwise, Megatron-LM's "
        "default: of its part of the weight, so that results depend on TP",
        choices=["duplicated", "distributed", "blockwise"],
    )
    bf16: bool = flag(False, "bfloat16 with fp32 main weights")
    fp16: bool = flag(False, "float16 with fp32 main weights and loss scaling")
    loss_scale: float | None = flag(None, "fixed loss scale, instead of the dynamic one of fp16", type=float)
    initial_loss_scale: float = flag(2.0**32, "first dynamic loss scale")
    min_loss_scale: float = flag(1.0, "smallest dynamic loss scale", aliases=["--min-scale"])
    loss_scale_window: float = flag(1000, "good steps before the loss scale grows")
    hysteresis: int = flag(2, "overflows before the loss scale shrinks")
    check_for_nan_in_loss_and_grad: bool = flag(
        True, "continue when the loss or a gradient is NaN", flags=["--no-check-for-nan-in-loss-and-grad"]
    )


END_OF_TEXT = "<|endoftext|>"


@dataclass
class DataConfig:
    """Data, tokenizer and batches."""

    micro_batch_size: int | None = flag(
        None, "samples per micro-batch on each data-parallel rank", type=int, aliases=["--batch-size"]
    )
    gradient_accumulation_steps: int | None = flag(
        None, "micro-batches per step, instead of --global-batch-size", type=int, aliases=["--gas"]
    )
    global_batch_size: int | None = flag(None, "samples per optimizer step; default micro-batch x DP", type=int)
    rampup_batch_size: list[int] | None = flag(
        None, "grow the batch: start size, increment, samples to grow over", type=int, nargs=3
    )
    step_batch_size_schedule: list[str] | None = flag(
        None,
        'global batch sizes by consumed tokens, instead of --global-batch-size: "0:768 250B:1536 500B:3072"',
        type=str,
        nargs="+",
    )
    rampup_seq_length: list[int] | None = flag(
        None,
        "grow the part of each sample that the loss counts: start length, increment, iterations to grow over",
        type=int,
        nargs=3,
    )
    seq_length_schedule: str | None = flag(
        None,
        'stages of several lengths, by finished iterations: "0:8K 1000:64K"; flags may follow a length',
        type=str,
    )
    seq_length: int | None = flag(None, "tokens per sample", type=int, aliases=["--encoder-seq-length"])
    data_path: list[str] | None = flag(None, "prefix, or weights and prefixes of a blend", type=str, nargs="*")
    train_data_path: list[str] | None = flag(None, "training data, instead of --data-path", type=str, nargs="*")
    valid_data_path: list[str] | None = flag(None, "validation data, instead of --data-path", type=str, nargs="*")
    test_data_path: list[str] | None = flag(None, "test data, instead of --data-path", type=str, nargs="*")
    data_args_path: str | None = flag(None, "file with the words of --data-path", type=str)
    per_split_data_args_path: str | None = flag(
        None, "JSON file with the words of --train-data-path, --valid-data-path, --test-data-path", type=str
    )
    data_file_list: str | None = flag(
        None, "ALCF: file with a line WEIGHT PREFIX CORPUS for each part of --data-path", type=str
    )
    data_config: str | None = flag(
        None, "YAML file with sources, their weights, and how often documents of a length are repeated", type=str
    )
    train_weighted_split_paths: list[str] | None = flag(
        None, 'BigScience: train data as "NAME: WEIGHT START:STOP PATH, ..."', type=str, nargs="*"
    )
    train_weighted_split_paths_path: str | None = flag(None, "file with such train data, in one line", type=str)
    valid_weighted_split_paths: list[str] | None = flag(
        None,
        'BigScience: valid data as "NAME: WEIGHT START:STOP PATH, ..."; several groups are evaluated one by one',
        type=str,
        nargs="*",
    )
    valid_weighted_split_paths_path: str | None = flag(None, "file with such valid data, in one line", type=str)
    test_weighted_split_paths: list[str] | None = flag(
        None, 'BigScience: test data as "NAME: WEIGHT START:STOP PATH, ..."', type=str, nargs="*"
    )
    test_weighted_split_paths_path: str | None = flag(None, "file with such test data, in one line", type=str)
    split: str | None = flag(None, "train,valid,test shares of --data-path, for example 969,30,1", type=str)
    data_cache_path: str | None = flag(None, "folder of the index caches", type=str)
    object_storage_cache_path: str | None = flag(
        None, "folder for copies of the indices of data with a URL (s3://, gs://, hf://)", type=str
    )
    mock_data: bool = flag(False, "random tokens instead of a dataset")
    num_workers: int = flag(2, "data-loader processes per rank")
    num_dataset_builder_threads: int = flag(1, "threads that build the datasets of a blend")
    dataloader_type: str = flag(
        "single", "single: in order; cyclic: reshuffled each epoch", choices=["single", "cyclic"]
    )
    reset_position_ids: bool = flag(False, "positions restart after each end-of-document token", network=FUNCTION)
    reset_attention_mask: bool = flag(False, "no attention across end-of-document tokens", network=FUNCTION)
    eod_mask_loss: bool = flag(False, "no loss on end-of-document tokens")
    packing: str = flag(
        "greedy",
        "how documents share samples; greedy: Megatron-LM's stream; best-fit: none is cut that fits in a sample; "
        "by-work: the samples of a global batch have similar attention work",
        choices=["greedy", "best-fit", "by-work"],
    )
    packing_window: int = flag(1024, "samples that --packing plans together, in which a document may move")
    sft: bool = flag(
        False, "fine-tune on chats: data are JSON lines with messages, and only the assistant's words count in the loss"
    )
    sft_tokenizer_prompt_format: str = flag(
        "default", "--sft: default is the tokenizer's own chat template; else a file with a Jinja template"
    )
    sft_over_length: str = flag(
        "refuse",
        "--sft: what to do with conversations longer than a sample",
        choices=["refuse", "truncate", "skip"],
    )
    dpo: bool = flag(False, "train on pairs of answers: data are JSON lines with prompt, chosen and rejected")
    dpo_loss: str = flag(
        "sigmoid",
        "--dpo: the loss of a pair; sigmoid: DPO; hinge: as in SLiC; orpo and simpo have no reference",
        choices=["sigmoid", "hinge", "ipo", "orpo", "simpo"],
    )
    dpo_beta: float = flag(0.1, "--dpo: how strongly the model is held to the reference; of orpo, the ratio's weight")
    dpo_label_smoothing: float = flag(0.0, "--dpo-loss sigmoid: probability that a pair is in the wrong order")
    dpo_margin: float = flag(0.0, "--dpo-loss simpo: margin between the rewards")
    dpo_reference: str | None = flag(
        None,
        "--dpo: the model to compare with; copy: of the weights at the start; adapters-off: the model without LoRA's "
        "adapters; default: adapters-off with LoRA, else copy",
        type=str,
        choices=["copy", "adapters-off", "none"],
    )
    fim_data: bool = flag(False, "fill in the middle: texts are cut in three, and the middle comes last")
    fim_rate: float = flag(0.5, "--fim-data: share of the texts that are cut")
    fim_spm_rate: float = flag(0.5, "--fim-data: share of the cut texts whose suffix comes before the prefix")
    fim_split_sample: str | None = flag(
        None, "token between the parts of a text, each of which is cut separately", type=str
    )
    fim_fragment_rate: float | None = flag(
        None, "share of such parts that are cut, in the texts that --fim-rate selects", type=float
    )
    fim_no_prefix: str | None = flag(None, "texts that begin with this are not cut", type=str)
    fim_prefix_token: str = flag("<fim_prefix>", "token before the prefix")
    fim_middle_token: str = flag("<fim_middle>", "token before the middle")
    fim_suffix_token: str = flag("<fim_suffix>", "token before the suffix")
    fim_pad_token: str = flag("<fim_pad>", "token that fills a sample that cutting has made shorter")
    fim_eod_token: str = flag(END_OF_TEXT, "token between texts")
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
            "QwenTokenizer",
            "TikTokenizer",
            "TokenizerFromFile",
            "TokenizerFromFileWithFIM",
            "ByteLevelTokenizer",
            "NucleotideTokenizer",
            "CodonTokenizer",
            "NullTokenizer",
        ],
    )
    tokenizer_model: str | None = flag(
        None, "tokenizer file or folder", type=str, aliases=["--tokenizer-name-or-path", "--tokenizer-file"]
    )
    vocab_file: str | None = flag(None, "vocab.json of GPT2BPETokenizer, QwenTokenizer", type=str)
    merge_file: str | None = flag(None, "merges.txt of GPT2BPETokenizer, QwenTokenizer", type=str)
    tiktoken_pattern: str | None = flag(None, "pre-tokenizer pattern of TikTokenizer", type=str)
    tiktoken_num_special_tokens: int = flag(1000, "special tokens of TikTokenizer")

    @property
    def pairs(self) -> bool:
        """Whether the data are pairs of answers."""
        return self.dpo
