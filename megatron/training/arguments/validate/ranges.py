# SPDX-License-Identifier: Apache-2.0
"""Checks of plain ranges of single numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megatron.training.arguments.config import Config
from megatron.training.refusal import Gather, Refusal

# Settings that count something and must be at least 1 where they are given; the rest of the numbers, at least 0.
POSITIVE = {
    "model": "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
    "max_position_embeddings rotary_base make_vocab_size_divisible_by vocab_size padded_vocab_size "
    "fp8_amax_history_len yarn_original_max_position_embeddings lora_rank",
    "parallel": "tensor_model_parallel_size context_parallel_size ulysses_parallel_size ring_parallel_size "
    "hierarchical_context_parallel_sizes pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage "
    "num_virtual_stages_per_pipeline_rank microbatch_group_size_per_virtual_pipeline_stage "
    "ddp_bucket_size distributed_timeout_minutes",
    "attention": "recompute_num_layers",
    "chunks": "fpdt_chunk_size ffn_chunks loss_chunks",
    "optimizer": "lr_decay_iters lr_decay_samples lr_decay_tokens lr_wsd_decay_iters lr_wsd_decay_samples hysteresis",
    "data": "micro_batch_size global_batch_size gradient_accumulation_steps seq_length rampup_seq_length "
    "num_dataset_builder_threads",
    "checkpoint": "save_interval save_retain_interval keep_last_checkpoints keep_best_checkpoints "
    "non_persistent_save_interval replication_jump replication_factor",
    "logging": "log_interval tensorboard_log_interval tensorboard_queue_size profile_memory_step",
    "run": "train_iters train_samples train_tokens eval_interval exit_interval exit_duration_in_mins",
    "faults": "check_weight_hash_across_dp_replicas_interval",
    "evaluation": "eval_lengths eval_depths eval_samples eval_stride",
}
NOT_NEGATIVE = {
    "model": "init_method_std norm_epsilon yarn_mscale yarn_mscale_all_dim",
    "optimizer": "min_lr lr_warmup_iters lr_warmup_samples lr_warmup_tokens lr_warmup_init weight_decay clip_grad "
    "adam_eps sgd_momentum decoupled_min_lr",
    "data": "num_workers rampup_batch_size tiktoken_num_special_tokens",
    "checkpoint": "ckpt_step",
    "attention": "mask_cpu_threshold",
    "run": "seed manual_gc_interval",
    "faults": "skip_bad_batches iterations_to_skip",
}
ABOVE_ZERO = {
    "model": "rotary_percent rotary_seq_len_interpolation_factor rope_scaling_factor yarn_rotary_scaling_factor "
    "yarn_beta_fast yarn_beta_slow lora_alpha",
    "optimizer": "lr decoupled_lr loss_scale initial_loss_scale min_loss_scale loss_scale_window",
    "logging": "peak_tflops",
}
BELOW_ONE = {"model": "hidden_dropout attention_dropout", "optimizer": "adam_beta1 adam_beta2 lr_warmup_fraction"}
DROPOUT = {"model": "hidden_dropout attention_dropout"}


def check_ranges(config: Config) -> None:
    """Refuse single numbers that make no sense."""
    rules = (
        (POSITIVE, lambda value: value >= 1, "must be at least 1"),
        (NOT_NEGATIVE, lambda value: value >= 0, "must not be negative"),
        (ABOVE_ZERO, lambda value: value > 0, "must be above 0"),
        (BELOW_ONE, lambda value: 0 <= value < 1, "must be from 0 up to, not including, 1"),
        (
            DROPOUT,
            lambda value: value == 0 or value >= 2**-15,
            "is too small to tell from 0: use 0, or 3.1e-05 and more",
        ),
    )
    gather = Gather()
    config.run.exit_interval = config.run.exit_interval or None  # 0 is never, as in Megatron-LM
    config.checkpoint.save_interval = config.checkpoint.save_interval or None
    config.run.eval_iters = max(config.run.eval_iters, 0)  # -1 evaluates nothing, likewise

    def check(field: str, number: float | None, holds: Callable[[float], bool], text: str) -> None:
        if number is not None and not holds(number):
            raise Refusal(f"--{field.replace('_', '-')} {number:g} {text}")

    for names, holds, text in rules:
        for section, fields in names.items():
            for field in fields.split():
                value = getattr(getattr(config, section), field)
                for number in value if isinstance(value, list) else [value]:
                    gather.check(field, partial(check, field, number, holds, text))
    minutes = config.parallel.distributed_timeout_minutes
    year = 366 * 24 * 60
    gather.check(
        "timeout", lambda: check("distributed_timeout_minutes", minutes, lambda x: x <= year, f"is more than {year}")
    )
    gather.check(
        "percent", lambda: check("rotary_percent", config.model.rotary_percent, lambda x: x <= 1, "must be at most 1")
    )
    gather.finish()
