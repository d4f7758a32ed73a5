# SPDX-License-Identifier: Apache-2.0
"""Notes on settings that were given although the feature that reads them is switched off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from megatron.training.arguments.config import Config
from megatron.training.arguments.models import ROTARY

# (what the note says, whether the settings are read, the settings)
READERS: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
    (
        "RoPE reads it: --position-embedding-type rope",
        lambda c: c.model.position_embedding_type in ROTARY,
        "model.rotary_base model.rotary_percent model.rotary_interleaved model.rotary_seq_len_interpolation_factor "
        "model.use_rope_scaling",
    ),
    ("--use-rope-scaling reads it", lambda c: c.model.use_rope_scaling, "model.rope_scaling_factor"),
    (
        "only GELU reads it",
        lambda c: not (c.model.swiglu or c.model.squared_relu),
        "model.bias_gelu_fusion",
    ),
    (
        "--init-method-xavier-uniform does not read it",
        lambda c: not c.model.init_method_xavier_uniform,
        "model.init_method_std",
    ),
    (
        "--padded-vocab-size sets the number of rows",
        lambda c: c.model.padded_vocab_size is None,
        "model.make_vocab_size_divisible_by",
    ),
    ("--fp8-format reads it", lambda c: c.model.fp8_format is not None, "model.fp8_recipe"),
    (
        "--fp8-format with --fp8-recipe delayed reads it",
        lambda c: c.model.fp8_format is not None and c.model.fp8_recipe == "delayed",
        "model.fp8_amax_history_len model.fp8_amax_compute_algo",
    ),
    (
        "--zero-stage 2 and 3 always sum gradients layer by layer, overlapped with computation",
        lambda c: c.parallel.zero_stage < 2,
        "parallel.ddp_bucket_size parallel.overlap_grad_reduce",
    ),
    (
        "--optimizer adam reads it",
        lambda c: c.optimizer.optimizer == "adam",
        "optimizer.adam_beta1 optimizer.adam_beta2 optimizer.adam_eps",
    ),
    ("--optimizer sgd reads it", lambda c: c.optimizer.optimizer == "sgd", "optimizer.sgd_momentum"),
    (
        "--fp16 without --loss-scale reads it",
        lambda c: c.optimizer.fp16 and c.optimizer.loss_scale is None,
        "optimizer.initial_loss_scale optimizer.min_loss_scale optimizer.loss_scale_window optimizer.hysteresis",
    ),
    (
        "--fp16 skips the steps that are not finite, whatever it says",
        lambda c: not c.optimizer.fp16,
        "optimizer.check_for_nan_in_loss_and_grad",
    ),
    (
        "--check-for-spiky-loss and --check-for-large-grads read it",
        lambda c: c.faults.check_for_spiky_loss or c.faults.check_for_large_grads,
        "faults.spike_factor",
    ),
    (
        "--lr-decay-style WSD reads it",
        lambda c: c.optimizer.lr_decay_style == "WSD",
        "optimizer.lr_wsd_decay_style optimizer.lr_wsd_decay_iters optimizer.lr_wsd_decay_samples",
    ),
    (
        "--lr-decay-style constant never falls to it",
        lambda c: c.optimizer.lr_decay_style != "constant",
        "optimizer.min_lr",
    ),
    (
        "--load reads it",
        lambda c: bool(c.checkpoint.load or c.checkpoint.pretrained_checkpoint),
        "checkpoint.load_optim checkpoint.load_rng optimizer.override_opt_param_scheduler "
        "optimizer.use_checkpoint_opt_param_scheduler",
    ),
    (
        "--non-persistent-save-interval reads it",
        lambda c: c.checkpoint.non_persistent_save_interval is not None,
        "checkpoint.non_persistent_ckpt_type checkpoint.non_persistent_local_ckpt_dir "
        "checkpoint.non_persistent_local_ckpt_algo checkpoint.replication",
    ),
    (
        "--replication reads it",
        lambda c: c.checkpoint.replication,
        "checkpoint.replication_jump checkpoint.replication_factor",
    ),
    ("--save reads it", lambda c: bool(c.checkpoint.save), "checkpoint.save_optim checkpoint.save_rng"),
    (
        "--mock-data makes its tokens itself",
        lambda c: not c.data.mock_data,
        "data.split data.data_cache_path data.num_dataset_builder_threads",
    ),
    (
        "--tokenizer-type GPT2BPETokenizer or QwenTokenizer reads it",
        lambda c: c.data.tokenizer_type in ("GPT2BPETokenizer", "QwenTokenizer"),
        "data.vocab_file data.merge_file",
    ),
    (
        "--fim-data reads it",
        lambda c: c.data.fim_data,
        "data.fim_rate data.fim_spm_rate data.fim_split_sample data.fim_fragment_rate data.fim_no_prefix "
        "data.fim_prefix_token data.fim_middle_token data.fim_suffix_token data.fim_pad_token data.fim_eod_token",
    ),
    ("--sft reads it", lambda c: c.data.sft, "data.sft_tokenizer_prompt_format data.sft_over_length"),
    (
        "--sft keeps tokens in files of its own",
        lambda c: not c.data.sft,
        "data.num_dataset_builder_threads",
    ),
    ("--lora-rank reads it", lambda c: c.model.lora_rank is not None, "model.lora_alpha model.lora_targets"),
    (
        "--tokenizer-type TikTokenizer reads it",
        lambda c: c.data.tokenizer_type == "TikTokenizer",
        "data.tiktoken_pattern data.tiktoken_num_special_tokens",
    ),
    (
        "the tokenizer has no file",
        lambda c: c.data.tokenizer_type not in FILELESS,
        "data.tokenizer_model",
    ),
    (
        "--tensorboard-dir reads it",
        lambda c: c.logging.tensorboard_dir is not None,
        "logging.tensorboard_log_interval logging.tensorboard_queue_size",
    ),
    (
        "--wandb-project reads it",
        lambda c: c.logging.wandb_project is not None,
        "logging.wandb_exp_name logging.wandb_save_dir logging.wandb_entity",
    ),
)
FILELESS = (
    "NullTokenizer",
    "GPT2BPETokenizer",
    "QwenTokenizer",
    "ByteLevelTokenizer",
    "NucleotideTokenizer",
    "CodonTokenizer",
)


def note_unused(config: Config) -> None:
    """Add a note to ``config.notes`` for settings that are not at their defaults and that nothing reads."""
    default = Config()
    for reader, reads, names in READERS:
        if reads(config):
            continue
        unused = []
        for name in names.split():
            section, field = name.split(".")
            part = getattr(config, section)
            if getattr(part, field) != getattr(getattr(default, section), field):
                metadata = next(f.metadata for f in fields(part) if f.name == field)
                unused.append(metadata.get("flags", ["--" + field.replace("_", "-")])[0])
        if unused:
            config.notes.append(f"no effect here: {', '.join(unused)} ({reader})")
