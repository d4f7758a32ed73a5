# SPDX-License-Identifier: Apache-2.0
"""Notes on settings that were given although the feature that reads them is switched off."""

from __future__ import annotations

from collections.abc import Callable

from megatron.training.arguments.data_paths import may_have_url
from megatron.training.settings.config import Config
from megatron.training.settings.models import ROTARY, is_gated

FILELESS = (
    "NullTokenizer", "GPT2BPETokenizer", "QwenTokenizer", "ByteLevelTokenizer", "NucleotideTokenizer", "CodonTokenizer",
)  # fmt: skip
# (what the note says, whether the settings are read, the settings)
READERS: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
    (
        "read only with RoPE: --position-embedding-type rope",
        lambda c: c.model.position_embedding_type in ROTARY,
        "rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling",
    ),
    ("read only with --use-rope-scaling", lambda c: c.model.use_rope_scaling, "rope_scaling_factor"),
    (
        "read only with GELU",
        lambda c: not (is_gated(c.model) or c.model.squared_relu),
        "bias_gelu_fusion",
    ),
    (
        "not read with --init-method-xavier-uniform",
        lambda c: not c.model.init_method_xavier_uniform,
        "init_method_std",
    ),
    (
        "--padded-vocab-size sets the number of rows",
        lambda c: c.model.padded_vocab_size is None,
        "make_vocab_size_divisible_by",
    ),
    ("read only with --fp8-format", lambda c: c.model.fp8_format is not None, "fp8_recipe"),
    (
        "read only with --fp8-format and --fp8-recipe delayed",
        lambda c: c.model.fp8_format is not None and c.model.fp8_recipe == "delayed",
        "fp8_amax_history_len fp8_amax_compute_algo",
    ),
    (
        "--zero-stage 2 and 3 always sum gradients layer by layer, overlapped with computation",
        lambda c: c.parallel.zero_stage < 2,
        "ddp_bucket_size overlap_grad_reduce",
    ),
    ("not read with --optimizer sgd", lambda c: c.optimizer.optimizer != "sgd", "adam_beta1 adam_beta2 adam_eps"),
    ("read only with --optimizer sgd", lambda c: c.optimizer.optimizer == "sgd", "sgd_momentum"),
    (
        "read only with --optimizer muon",
        lambda c: c.optimizer.optimizer == "muon",
        "muon_momentum muon_nesterov muon_split_qkv muon_scale_mode muon_extra_scale_factor muon_coefficient_type "
        "muon_num_ns_steps muon_fp32_matmul_prec muon_tp_mode",
    ),
    (
        "read only with --fp16 and without --loss-scale",
        lambda c: c.optimizer.fp16 and c.optimizer.loss_scale is None,
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    ),
    (
        "--fp16 always skips steps that are not finite",
        lambda c: not c.optimizer.fp16,
        "check_for_nan_in_loss_and_grad",
    ),
    (
        "read only with --check-for-spiky-loss or --check-for-large-grads",
        lambda c: c.faults.check_for_spiky_loss or c.faults.check_for_large_grads,
        "spike_factor",
    ),
    (
        "read only with --lr-decay-style WSD",
        lambda c: c.optimizer.lr_decay_style == "WSD",
        "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples",
    ),
    ("not read with --lr-decay-style constant", lambda c: c.optimizer.lr_decay_style != "constant", "min_lr"),
    (
        "read only with --load",
        lambda c: bool(c.checkpoint.load or c.checkpoint.pretrained_checkpoint),
        "load_optim load_rng override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
    ),
    (
        "read only with --non-persistent-save-interval",
        lambda c: c.checkpoint.non_persistent_save_interval is not None,
        "non_persistent_ckpt_type non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo replication",
    ),
    ("read only with --replication", lambda c: c.checkpoint.replication, "replication_jump replication_factor"),
    ("read only with --save", lambda c: bool(c.checkpoint.save), "save_optim save_rng"),
    (
        "not read with --mock-data",
        lambda c: not c.data.mock_data,
        "split data_cache_path num_dataset_builder_threads",
    ),
    ("read only with data that have a URL", lambda c: may_have_url(c.data), "object_storage_cache_path"),
    (
        "read only with --tokenizer-type GPT2BPETokenizer or QwenTokenizer",
        lambda c: c.data.tokenizer_type in ("GPT2BPETokenizer", "QwenTokenizer"),
        "vocab_file merge_file",
    ),
    (
        "read only with --fim-data",
        lambda c: c.data.fim_data,
        "fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token "
        "fim_suffix_token fim_pad_token fim_eod_token",
    ),
    (
        "read only with --packing best-fit or by-work",
        lambda c: c.data.packing != "greedy",
        "packing_window",
    ),
    ("read only with --sft", lambda c: c.data.sft, "sft_tokenizer_prompt_format sft_over_length"),
    (
        "read only with --dpo",
        lambda c: c.data.dpo,
        "dpo_loss dpo_beta dpo_label_smoothing dpo_margin dpo_reference",
    ),
    ("not read with --sft", lambda c: not c.data.sft, "num_dataset_builder_threads"),
    (
        "read only with --num-experts",
        lambda c: c.model.num_experts is not None,
        "moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk "
        "moe_router_score_function moe_router_pre_softmax moe_router_num_groups moe_router_group_topk "
        "moe_router_topk_scaling_factor moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate "
        "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_expert_capacity_factor "
        "moe_token_drop_policy moe_token_dispatcher_type expert_model_parallel_size expert_tensor_parallel_size",
    ),
    ("read only with --mtp-num-layers", lambda c: bool(c.model.mtp_num_layers), "mtp_loss_scaling_factor"),
    (
        "read only with --multi-latent-attention",
        lambda c: c.model.multi_latent_attention,
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type latent_exchange",
    ),
    (
        "read only with --experimental-attention-variant",
        lambda c: c.model.experimental_attention_variant is not None,
        "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
        "linear_num_value_heads",
    ),
    (
        "read only with --experimental-attention-variant or --is-hybrid-model",
        lambda c: c.model.experimental_attention_variant is not None or c.model.is_hybrid_model,
        "linear_attention_exchange linear_attention_kernel",
    ),
    (
        "read only with --is-hybrid-model",
        lambda c: c.model.is_hybrid_model,
        "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads mamba_dt_min",
    ),
    ("read only with --lora-rank", lambda c: c.model.lora_rank is not None, "lora_alpha lora_targets"),
    (
        "read only with --tokenizer-type TikTokenizer",
        lambda c: c.data.tokenizer_type == "TikTokenizer",
        "tiktoken_pattern tiktoken_num_special_tokens",
    ),
    ("this tokenizer reads no file", lambda c: c.data.tokenizer_type not in FILELESS, "tokenizer_model"),
    (
        "read only with --tensorboard-dir",
        lambda c: c.logging.tensorboard_dir is not None,
        "tensorboard_log_interval tensorboard_queue_size",
    ),
    (
        "read only with --wandb-project",
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
