# SPDX-License-Identifier: Apache-2.0
"""Settings of the optimizer, the schedule, the precision and the data."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.settings.flag import (
    ABOVE_ZERO,
    BELOW_1,
    NOT_NEGATIVE,
    SHARE,
    count,
    flag,
    function,
    tokens,
)
from megatron.training.settings.read_with import (
    BPE,
    DECAY,
    DPO,
    DYNAMIC_LOSS_SCALE,
    FIM,
    LOAD,
    MUON,
    PAIRS,
    PLANNED_PACKING,
    REAL_DATA,
    SFT,
    SGD,
    TIKTOKEN,
    TOKENIZER_FILE,
    URL,
    WITHOUT_FP16,
    WITHOUT_SFT,
    WITHOUT_SGD,
    WSD,
)


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

    optimizer: str = flag("adam", "optimizer", type=optimizer, choices=["adam", "sgd", "muon"], core=True)
    lr: float | None = flag(None, "learning rate", range=ABOVE_ZERO, core=True)
    min_lr: float = flag(0.0, "lowest learning rate of the schedule", read_with=DECAY, range=NOT_NEGATIVE, core=True)
    lr_decay_style: str = flag(
        "linear", "schedule", choices=["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    )
    lr_decay_iters: int | None = count(None, "iterations to decay over; default --train-iters")
    lr_decay_samples: int | None = count(None, "samples to decay over; default --train-samples")
    lr_decay_tokens: int | None = count(None, "tokens to decay over; default --train-tokens")
    lr_warmup_fraction: float | None = flag(
        None, "warm-up, as a share of the decay", aliases=["--warmup"], range=BELOW_1
    )
    lr_warmup_iters: int = flag(0, "warm-up iterations", range=NOT_NEGATIVE)
    lr_warmup_samples: int = flag(0, "warm-up samples", range=NOT_NEGATIVE)
    lr_warmup_tokens: int | None = flag(None, "warm-up tokens", range=NOT_NEGATIVE)
    lr_warmup_init: float = flag(0.0, "learning rate at the start of warm-up", range=NOT_NEGATIVE)
    lr_wsd_decay_style: str = flag(
        "exponential", "last phase of WSD", choices=["exponential", "linear", "cosine", "minus_sqrt"], read_with=WSD
    )
    lr_wsd_decay_iters: int | None = count(None, "iterations of the last phase of WSD", read_with=WSD)
    lr_wsd_decay_samples: int | None = count(None, "samples of the last phase of WSD", read_with=WSD)
    decoupled_lr: float | None = flag(
        None, "learning rate of the embedding and the output layer", range=ABOVE_ZERO, core=True
    )
    decoupled_min_lr: float | None = flag(
        None, "lowest learning rate of embedding and output layer", range=NOT_NEGATIVE, core=True
    )
    weight_decay: float = flag(0.01, "weight decay", range=NOT_NEGATIVE, core=True)
    start_weight_decay: float | None = flag(None, "weight decay at the start of its schedule")
    end_weight_decay: float | None = flag(None, "weight decay at the end of its schedule")
    weight_decay_incr_style: str = flag("constant", "weight-decay schedule", choices=["constant", "linear", "cosine"])
    override_opt_param_scheduler: bool = flag(
        False,
        "schedule from the flags, not from the checkpoint",
        flags=["--override-opt-param-scheduler", "--override-opt_param-scheduler"],
        aliases=["--override-lr-scheduler"],
        read_with=LOAD,
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "schedule from the checkpoint, not from the flags",
        flags=["--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"],
        aliases=["--use-checkpoint-lr-scheduler"],
        read_with=LOAD,
    )
    apply_wd_to_qk_layernorm: bool = flag(False, "weight decay for the norms of --qk-layernorm, too", core=True)
    clip_grad: float = flag(1.0, "largest gradient norm; 0 switches clipping off", range=NOT_NEGATIVE, core=True)
    adam_beta1: float = flag(0.9, "Adam's first beta", read_with=WITHOUT_SGD, range=BELOW_1, core=True)
    adam_beta2: float = flag(0.999, "Adam's second beta", read_with=WITHOUT_SGD, range=BELOW_1, core=True)
    adam_eps: float = flag(1e-8, "Adam's epsilon", read_with=WITHOUT_SGD, range=NOT_NEGATIVE, core=True)
    sgd_momentum: float = flag(0.9, "SGD's momentum", read_with=SGD, range=NOT_NEGATIVE, core=True)
    muon_momentum: float = flag(0.9, "Muon's momentum", read_with=MUON, range=BELOW_1)
    muon_nesterov: bool = flag(False, "Muon with Nesterov's momentum", aliases=["--muon-use-nesterov"], read_with=MUON)
    muon_split_qkv: bool = flag(
        True, "Muon: queries, keys and values are one matrix", flags=["--muon-no-split-qkv"], read_with=MUON
    )
    muon_scale_mode: str = flag(
        "spectral",
        "how Muon's update grows with the size of a matrix",
        choices=["spectral", "unit_rms_norm", "shape_scaling"],
        read_with=MUON,
    )
    muon_extra_scale_factor: float = flag(
        1.0, "factor of Muon's update; 0.2 is about the size of AdamW's", read_with=MUON, range=ABOVE_ZERO
    )
    muon_coefficient_type: str = flag(
        "quintic",
        "Muon: coefficients of Newton-Schulz",
        choices=["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"],
        read_with=MUON,
    )
    muon_num_ns_steps: int = count(5, "Muon: Newton-Schulz steps", read_with=MUON)
    muon_fp32_matmul_prec: str | None = flag(
        None,
        "Muon: precision of Newton-Schulz; default medium (bf16) with --bf16 or --fp16, else highest",
        choices=["medium", "high", "highest"],
        read_with=MUON,
    )
    muon_tp_mode: str = flag(
        "duplicated",
        "Muon with TP: each rank computes the whole update; distributed: its part of it; blockwise, Megatron-LM's "
        "default: of its part of the weight, so that results depend on TP",
        choices=["duplicated", "distributed", "blockwise"],
        read_with=MUON,
    )
    bf16: bool = flag(False, "bfloat16 with fp32 main weights", generation="use --dtype bf16")
    fp16: bool = flag(False, "float16 with fp32 main weights and loss scaling", generation="use --dtype fp16")
    loss_scale: float | None = flag(
        None, "fixed loss scale, instead of the dynamic one of fp16", range=ABOVE_ZERO, core=True
    )
    initial_loss_scale: float = flag(
        2.0**32, "first dynamic loss scale", read_with=DYNAMIC_LOSS_SCALE, range=ABOVE_ZERO, core=True
    )
    min_loss_scale: float = flag(
        1.0,
        "smallest dynamic loss scale",
        aliases=["--min-scale"],
        read_with=DYNAMIC_LOSS_SCALE,
        range=ABOVE_ZERO,
        core=True,
    )
    loss_scale_window: float = flag(
        1000, "good steps before the loss scale grows", read_with=DYNAMIC_LOSS_SCALE, range=ABOVE_ZERO, core=True
    )
    hysteresis: int = count(2, "overflows before the loss scale shrinks", read_with=DYNAMIC_LOSS_SCALE, core=True)
    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        "continue when the loss or a gradient is NaN",
        flags=["--no-check-for-nan-in-loss-and-grad"],
        read_with=WITHOUT_FP16,
    )


END_OF_TEXT = "<|endoftext|>"


@dataclass
class DataConfig:
    """Data, tokenizer and batches."""

    micro_batch_size: int | None = count(
        None,
        "samples per micro-batch on each data-parallel rank",
        aliases=["--batch-size"],
        stage=True,
        generation=True,
    )
    gradient_accumulation_steps: int | None = count(
        None, "micro-batches per step, instead of --global-batch-size", aliases=["--gas"], stage=True
    )
    global_batch_size: int | None = count(None, "samples per optimizer step; default micro-batch x DP", stage=True)
    rampup_batch_size: list[int] | None = flag(
        None, "grow the batch: start size, increment, samples to grow over", nargs=3, range=NOT_NEGATIVE
    )
    step_batch_size_schedule: list[str] | None = flag(
        None,
        'global batch sizes by consumed tokens, instead of --global-batch-size: "0:768 250B:1536 500B:3072"',
        nargs="+",
    )
    rampup_seq_length: list[int] | None = count(
        None,
        "grow the part of each sample that the loss counts: start length, increment, iterations to grow over",
        nargs=3,
    )
    seq_length_schedule: str | None = flag(
        None, 'stages of several lengths, by finished iterations: "0:8K 1000:64K"; flags may follow a length'
    )
    seq_length: int | None = count(None, "tokens per sample", type=tokens, aliases=["--encoder-seq-length"])
    data_path: list[str] | None = flag(None, "prefix, or weights and prefixes of a blend", nargs="*")
    train_data_path: list[str] | None = flag(None, "training data, instead of --data-path", nargs="*")
    valid_data_path: list[str] | None = flag(None, "validation data, instead of --data-path", nargs="*")
    test_data_path: list[str] | None = flag(None, "test data, instead of --data-path", nargs="*")
    data_args_path: str | None = flag(None, "file with the words of --data-path")
    per_split_data_args_path: str | None = flag(
        None, "JSON file with the words of --train-data-path, --valid-data-path, --test-data-path"
    )
    data_file_list: str | None = flag(None, "ALCF: file with a line WEIGHT PREFIX CORPUS for each part of --data-path")
    data_config: str | None = flag(
        None, "YAML file with sources, their weights, and how often documents of a length are repeated"
    )
    train_weighted_split_paths: list[str] | None = flag(
        None, 'BigScience: train data as "NAME: WEIGHT START:STOP PATH, ..."', nargs="*"
    )
    train_weighted_split_paths_path: str | None = flag(None, "file with such train data, in one line")
    valid_weighted_split_paths: list[str] | None = flag(
        None,
        'BigScience: valid data as "NAME: WEIGHT START:STOP PATH, ..."; several groups are evaluated one by one',
        nargs="*",
    )
    valid_weighted_split_paths_path: str | None = flag(None, "file with such valid data, in one line")
    test_weighted_split_paths: list[str] | None = flag(
        None, 'BigScience: test data as "NAME: WEIGHT START:STOP PATH, ..."', nargs="*"
    )
    test_weighted_split_paths_path: str | None = flag(None, "file with such test data, in one line")
    split: str | None = flag(None, "train,valid,test shares of --data-path, for example 969,30,1", read_with=REAL_DATA)
    data_cache_path: str | None = flag(None, "folder of the index caches", read_with=REAL_DATA)
    object_storage_cache_path: str | None = flag(
        None, "folder for copies of the indices of data with a URL (s3://, gs://, hf://)", read_with=URL
    )
    mock_data: bool = flag(False, "random tokens instead of a dataset")
    num_workers: int = flag(2, "data-loader processes per rank", range=NOT_NEGATIVE, stage=True)
    num_dataset_builder_threads: int = count(
        1, "threads that build the datasets of a blend", read_with=(REAL_DATA, WITHOUT_SFT)
    )
    dataloader_type: str = flag(
        "single", "single: in order; cyclic: reshuffled each epoch", choices=["single", "cyclic"]
    )
    reset_position_ids: bool = function(False, "positions restart after each end-of-document token", computes=True)
    reset_attention_mask: bool = function(False, "no attention across end-of-document tokens", computes=True)
    eod_mask_loss: bool = flag(False, "no loss on end-of-document tokens", computes=True)
    packing: str = flag(
        "greedy",
        "how documents share samples; greedy: Megatron-LM's stream; best-fit: none is cut that fits in a sample; "
        "by-work: the samples of a global batch have similar attention work",
        choices=["greedy", "best-fit", "by-work"],
    )
    packing_window: int = count(
        1024, "samples that --packing plans together, in which a document may move", read_with=PLANNED_PACKING
    )
    sft: bool = flag(
        False, "fine-tune on chats: data are JSON lines with messages, and only the assistant's words count in the loss"
    )
    sft_tokenizer_prompt_format: str = flag(
        "default",
        "--sft: default is the tokenizer's own chat template; else a file with a Jinja template",
        read_with=SFT,
    )
    sft_over_length: str = flag(
        "refuse",
        "--sft: what to do with conversations longer than a sample",
        choices=["refuse", "truncate", "skip"],
        read_with=SFT,
    )
    dpo: bool = flag(False, "train on pairs of answers: data are JSON lines with prompt, chosen and rejected")
    dpo_loss: str = flag(
        "sigmoid",
        "--dpo: the loss of a pair; sigmoid: DPO; hinge: as in SLiC; orpo and simpo have no reference",
        choices=["sigmoid", "hinge", "ipo", "orpo", "simpo"],
        read_with=DPO,
    )
    dpo_beta: float = flag(
        0.1,
        "--dpo: how strongly the model is held to the reference; of orpo, the ratio's weight",
        range=ABOVE_ZERO,
        read_with=DPO,
    )
    dpo_label_smoothing: float = flag(
        0.0, "--dpo-loss sigmoid: probability that a pair is in the wrong order", read_with=DPO
    )
    dpo_margin: float = flag(0.0, "--dpo-loss simpo: margin between the rewards", read_with=DPO)
    dpo_reference: str | None = flag(
        None,
        "--dpo: the model to compare with; copy: of the weights at the start; adapters-off: the model without LoRA's "
        "adapters; default: adapters-off with LoRA, else copy",
        choices=["copy", "adapters-off", "none"],
        read_with=DPO,
    )
    separate_prompts: bool = flag(
        False, "compute the prompt of a pair of answers for each of them; default: once, for both", read_with=PAIRS
    )
    fim_data: bool = flag(False, "fill in the middle: texts are cut in three, and the middle comes last")
    fim_rate: float = flag(0.5, "--fim-data: share of the texts that are cut", range=SHARE, read_with=FIM)
    fim_spm_rate: float = flag(
        0.5, "--fim-data: share of the cut texts whose suffix comes before the prefix", range=SHARE, read_with=FIM
    )
    fim_split_sample: str | None = flag(
        None, "token between the parts of a text, each of which is cut separately", read_with=FIM
    )
    fim_fragment_rate: float | None = flag(
        None, "share of such parts that are cut, in the texts that --fim-rate selects", range=SHARE, read_with=FIM
    )
    fim_no_prefix: str | None = flag(None, "texts that begin with this are not cut", read_with=FIM)
    fim_prefix_token: str = flag("<fim_prefix>", "token before the prefix", read_with=FIM)
    fim_middle_token: str = flag("<fim_middle>", "token before the middle", read_with=FIM)
    fim_suffix_token: str = flag("<fim_suffix>", "token before the suffix", read_with=FIM)
    fim_pad_token: str = flag("<fim_pad>", "token that fills a sample that cutting has made shorter", read_with=FIM)
    fim_eod_token: str = flag(END_OF_TEXT, "token between texts", read_with=FIM)
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
        generation=True,
    )
    tokenizer_model: str | None = flag(
        None,
        "tokenizer file or folder",
        aliases=["--tokenizer-name-or-path", "--tokenizer-file"],
        read_with=TOKENIZER_FILE,
        generation=True,
    )
    vocab_file: str | None = flag(None, "vocab.json of GPT2BPETokenizer, QwenTokenizer", read_with=BPE, generation=True)
    merge_file: str | None = flag(None, "merges.txt of GPT2BPETokenizer, QwenTokenizer", read_with=BPE, generation=True)
    tiktoken_pattern: str | None = flag(
        None, "pre-tokenizer pattern of TikTokenizer", read_with=TIKTOKEN, generation=True
    )
    tiktoken_num_special_tokens: int = flag(
        1000, "special tokens of TikTokenizer", read_with=TIKTOKEN, range=NOT_NEGATIVE, generation=True
    )

    @property
    def may_have_url(self) -> bool:
        """Whether a flag of data names a URL, or a file that may have some."""
        if self.data_args_path or self.data_file_list or self.per_split_data_args_path or self.data_config:
            return True
        weighted = [value for name, value in vars(self).items() if "_weighted_split_paths" in name]
        given = self.data_path, self.train_data_path, self.valid_data_path, self.test_data_path, *weighted
        return any("://" in word for words in given for word in ([words] if isinstance(words, str) else words or ()))
