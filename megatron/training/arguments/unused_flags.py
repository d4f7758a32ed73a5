# SPDX-License-Identifier: Apache-2.0
"""Notes on settings that were given although the feature that reads them is switched off."""

from __future__ import annotations

from collections.abc import Callable

from megatron.training.arguments.config import Config
from megatron.training.arguments.models import ROTARY, is_gated

FILELESS = (
    "NullTokenizer", "GPT2BPETokenizer", "QwenTokenizer", "ByteLevelTokenizer", "NucleotideTokenizer", "CodonTokenizer",
)  # fmt: skip
# (what the note says, whether the settings are read, the settings)
READERS: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
    (
        "RoPE reads it: --position-embedding-type rope",
        lambda c: c.model.position_embedding_type in ROTARY,
        "rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling",
    ),
    ("--use-rope-scaling reads it", lambda c: c.model.use_rope_scaling, "rope_scaling_factor"),
    (
        "only GELU reads it",
        lambda c: not (is_gated(c.model) or c.model.squared_relu),
        "bias_gelu_fusion",
    ),
    (
        "--init-method-xavier-uniform does not read it",
        lambda c: not c.model.init_method_xavier_uniform,
        "init_method_std",
    ),
    (
        "--padded-vocab-size sets the number of rows",
        lambda c: c.model.padded_vocab_size is None,
        "make_vocab_size_divisible_by",
    ),
    ("--fp8-format reads it", lambda c: c.model.fp8_format is not None, "fp8_recipe"),
    (
        "--fp8-format with --fp8-recipe delayed reads it",
        lambda c: c.model.fp8_format is not None and c.model.fp8_recipe == "delayed",
        "fp8_amax_history_len fp8_amax_compute_algo",
    ),
    (
        "--zero-stage 2 and 3 always sum gradients layer by layer, overlapped with computation",
        lambda c: c.parallel.zero_stage < 2,
        "ddp_bucket_size overlap_grad_reduce",
    ),
    ("--optimizer adam reads it", lambda c: c.optimizer.optimizer == "adam", "adam_beta1 adam_beta2 adam_eps"),
    ("--optimizer sgd reads it", lambda c: c.optimizer.optimizer == "sgd", "sgd_momentum"),
    (
        "--fp16 without --loss-scale reads it",
        lambda c: c.optimizer.fp16 and c.optimizer.loss_scale is None,
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    ),
    (
        "--fp16 skips the steps that are not finite, whatever it says",
        lambda c: not c.optimizer.fp16,
        "check_for_nan_in_loss_and_grad",
    ),
    (
        "--check-for-spiky-loss and --check-for-large-grads read it",
        lambda c: c.faults.check_for_spiky_loss or c.faults.check_for_large_grads,
        "spike_factor",
    ),
    (
        "--lr-decay-style WSD reads it",
        lambda c: c.optimizer.lr_decay_style == "WSD",
        "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples",
    ),
    ("--lr-decay-style constant never falls to it", lambda c: c.optimizer.lr_decay_style != "constant", "min_lr"),
    (
        "--load reads it",
        lambda c: bool(c.checkpoint.load or c.checkpoint.pretrained_checkpoint),
        "load_optim load_rng override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
    ),
    (
        "--non-persistent-save-interval reads it",
        lambda c: c.checkpoint.non_persistent_save_interval is not None,
        "non_persistent_ckpt_type non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo replication",
    ),
    ("--replication reads it", lambda c: c.checkpoint.replication, "replication_jump replication_factor"),
    ("--save reads it", lambda c: bool(c.checkpoint.save), "save_optim save_rng"),
    (
        "--mock-data makes its tokens itself",
        lambda c: not c.data.mock_data,
        "split data_cache_path num_dataset_builder_threads",
    ),
    (
        "--tokenizer-type GPT2BPETokenizer or QwenTokenizer reads it",
        lambda c: c.data.tokenizer_type in ("GPT2BPETokenizer", "QwenTokenizer"),
        "vocab_file merge_file",
    ),
    (
        "--fim-data reads it",
        lambda c: c.data.fim_data,
        "fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token "
        "fim_suffix_token fim_pad_token fim_eod_token",
    ),
    ("--sft reads it", lambda c: c.data.sft, "sft_tokenizer_prompt_format sft_over_length"),
    ("--sft keeps tokens in files of its own", lambda c: not c.data.sft, "num_dataset_builder_threads"),
    (
        "--num-experts reads it",
        lambda c: c.model.num_experts is not None,
        "moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk "
        "moe_router_score_function moe_router_pre_softmax moe_router_num_groups moe_router_group_topk "
        "moe_router_topk_scaling_factor moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate "
        "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_expert_capacity_factor "
        "moe_token_drop_policy moe_token_dispatcher_type expert_model_parallel_size expert_tensor_parallel_size",
    ),
    ("--lora-rank reads it", lambda c: c.model.lora_rank is not None, "lora_alpha lora_targets"),
    (
        "--tokenizer-type TikTokenizer reads it",
        lambda c: c.data.tokenizer_type == "TikTokenizer",
        "tiktoken_pattern tiktoken_num_special_tokens",
    ),
    ("the tokenizer has no file", lambda c: c.data.tokenizer_type not in FILELESS, "tokenizer_model"),
    (
        "--tensorboard-dir reads it",
        lambda c: c.logging.tensorboard_dir is not None,
        "tensorboard_log_interval tensorboard_queue_size",
    ),
    (
        "--wandb-project reads it",
        lambda c: c.logging.wandb_project is not None,
        "wandb_exp_name wandb_save_dir wandb_entity",
    ),
)


def note_unused(config: Config) -> None:
    """Add a note to ``config.notes`` for settings that are not at their defaults and that nothing reads."""
    default = Config()
    for reader, reads, names in READERS:
        if reads(config):
            continue
        unused = []
        for name in names.split():
            part = config.part_with(name)
            if getattr(part, name) != getattr(default.part_with(name), name):
                unused.append(part.__dataclass_fields__[name].metadata.get("flags", ["--" + name.replace("_", "-")])[0])
        if unused:
            config.notes.append(f"no effect here: {', '.join(unused)} ({reader})")
