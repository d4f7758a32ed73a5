# SPDX-License-Identifier: Apache-2.0
"""Checks of the model's shape, its positions, the attention mask and the balance of the ring."""

from __future__ import annotations

from dataclasses import fields
from math import gcd

from megatron.decisions.division import NARROW
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal, near, refuse_combinations
from megatron.training.settings.attention_settings import MASKS
from megatron.training.settings.config import AttentionConfig, Config, ModelConfig
from megatron.training.settings.flag import check_pattern
from megatron.training.settings.kinds import KINDS
from megatron.training.settings.models import derive_shape, rope_layers, window_layers
from megatron.training.settings.read_with import ROTARY


def complete_required(config: Config) -> None:
    """Refuse a model without its sizes; complete its longest sequence."""
    model, data = config.model, config.data
    relative = model.position_embedding_type != "learned_absolute"  # then no table depends on the length
    if (model.model or relative) and model.max_position_embeddings is None:
        model.max_position_embeddings = data.seq_length
    names = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    missing = [name for name in names if getattr(model, name) is None]
    missing += [name for name in ("seq_length", "micro_batch_size") if getattr(data, name) is None]
    if missing:
        flags = ["--" + name.replace("_", "-") for name in missing]
        shape = "" if model.model else "; --model sets a complete shape, for example --model llama3-8b"
        if shape and "--num-layers" in flags and config.checkpoint.load and not config.checkpoint.use_checkpoint_args:
            shape = "; --use-checkpoint-args takes the model from --load"
        raise Refusal(f"missing: {', '.join(flags)}{shape}", about=[*flags, "--seq-length-schedule"])


def complete_model(config: Config) -> None:
    """Complete the shape of the model; refuse sizes that contradict each other."""
    model, heads = config.model, config.model.num_attention_heads
    for kind in KINDS:
        kind.prepare(config)
    _norms_and_residual(config)
    if model.kv_channels is None and model.hidden_size % heads:
        raise Refusal(
            f"--hidden-size {model.hidden_size}",
            f"is not a multiple of --num-attention-heads {heads}: use {near(model.hidden_size, heads)}, or give "
            "--kv-channels",
        )
    groups = model.num_query_groups
    if not model.group_query_attention and groups not in (1, heads):
        raise Refusal(
            f"--num-query-groups {groups}",
            "needs --group-query-attention: add it, or leave both out",
            Fix("--group-query-attention"),
        )
    if model.group_query_attention and heads % groups:
        raise Refusal(
            f"--num-attention-heads {heads}",
            f"is not a multiple of --num-query-groups {groups}: use --num-query-groups {gcd(heads, groups)}",
            Fix(f"--num-query-groups {gcd(heads, groups)}"),
        )
    names = ("swiglu", "geglu", "quick_geglu", "squared_relu", "openai_gelu")
    chosen = {"--" + name.replace("_", "-"): getattr(model, name) for name in names}
    activations = [flag for flag, given in chosen.items() if given]
    if len(activations) > 1:
        raise Refusal(" and ".join(activations), f"are {len(activations)} activations: keep one")
    if (model.glu_linear_offset or model.activation_func_clamp_value is not None) and not model.gated:
        flag = "--glu-linear-offset" if model.glu_linear_offset else "--activation-func-clamp-value"
        raise Refusal(flag, "needs a gated MLP: add --swiglu, --geglu or --quick-geglu, or leave it out", LEAVE_OUT)
    model = derive_shape(model)
    if model.ffn_hidden_size < 1:
        raise Refusal(
            f"{activations[0]} with --hidden-size {model.hidden_size}",
            "gives an MLP of width 0: give --ffn-hidden-size",
        )
    _positions(model, config)
    config.model = model


def _norms_and_residual(config: Config) -> None:
    """Refuse what does not work with other places of norms and residuals."""
    model, chunks, tensor = config.model, config.chunks, config.parallel.tensor_model_parallel_size
    engine = {"--fp8-format": (model.fp8_format, "it needs Transformer Engine's layers")}
    fixes = {"--normalization": "--normalization RMSNorm"}
    if model.reordered_norm:
        both = {"--sandwich-norm": (model.sandwich_norm, "one of them places the norms")}
        refuse_combinations("--reordered-norm", both | engine, fixes)
    if model.scale_embeddings and model.embedding_multiplier:
        refuse_combinations("--scale-embeddings", {"--embedding-multiplier": (True, "keep one factor of embeddings")})
    if model.logits_scaling is not None:
        ahead = {"--mtp-num-layers": (model.mtp_num_layers, "its layers have a norm without this divisor")}
        refuse_combinations("--logits-scaling", ahead | engine)
    groups = model.num_query_groups if model.group_query_attention else model.num_attention_heads
    if model.qk_layernorm_all_heads:
        refused = {
            "--qk-layernorm": (model.qk_layernorm, "it is a norm of each head: keep one of them"),
            "--multi-latent-attention": (model.multi_latent_attention, "its norms are those of the latents"),
            "--normalization LayerNorm": (model.normalization != "RMSNorm", "use --normalization RMSNorm"),
            f"--tensor-model-parallel-size {tensor}": (
                groups % tensor,
                f"TP ranks would share some of the {groups} key/value heads: use TP {gcd(groups, tensor)}",
            ),
        }
        fixes["--tensor-model-parallel-size"] = f"--tensor-model-parallel-size {gcd(groups, tensor)}"
        refuse_combinations("--qk-layernorm-all-heads", refused | engine, fixes)
    if model.parallel_residual:
        refused = {
            "--fpdt": (chunks.fpdt, "a chunk's MLP follows its attention"),
            "--ffn-chunks": (chunks.ffn_chunks, "the MLP in chunks follows attention"),
        }
        refuse_combinations("--parallel-residual", refused)


def _positions(model: ModelConfig, config: Config) -> None:
    rotated, kind = int(model.kv_channels * model.rotary_percent), model.position_embedding_type
    if model.multi_latent_attention:
        rotated = model.qk_pos_emb_head_dim  # even
    if kind in ROTARY and (rotated < 2 or rotated % 2):
        raise Refusal(
            f"RoPE rotates pairs, but --rotary-percent {model.rotary_percent:g} of head size {model.kv_channels} is "
            f"{rotated}: use another --rotary-percent or --kv-channels",
            about="--rotary-percent",
        )
    if kind != "yarn":
        names = [field.name for field in fields(model) if field.name.startswith("yarn_")]
        given = [name for name in names if getattr(model, name) != getattr(ModelConfig, name)]
        if given:
            flags = ", ".join("--" + name.replace("_", "-").replace("yarn-corr", "no-yarn-corr") for name in given)
            kept = config.checkpoint.use_checkpoint_args and not config.checkpoint.finetune
            why = ": --use-checkpoint-args keeps the checkpoint's positions; add --finetune to change them, or leave"
            raise Refusal(
                f"{flags} without --position-embedding-type yarn", f"{why if kept else ': add it, or leave'} them out"
            )
        return
    for flag in ("rotary_seq_len_interpolation_factor", "use_rope_scaling"):
        if getattr(model, flag):
            raise Refusal(
                f"--{flag.replace('_', '-')} and --position-embedding-type yarn",
                "both lower frequencies: leave one out",
            )
    if model.yarn_rotary_scaling_factor <= 1:
        raise Refusal(
            f"--position-embedding-type yarn with --yarn-rotary-scaling-factor {model.yarn_rotary_scaling_factor:g}",
            "changes nothing: give a factor above 1, or use --position-embedding-type rope",
            Fix("--position-embedding-type rope"),
        )
    if model.yarn_beta_fast <= model.yarn_beta_slow:
        raise Refusal(
            f"--yarn-beta-fast {model.yarn_beta_fast:g}",
            f"must be above --yarn-beta-slow {model.yarn_beta_slow:g}: the defaults are 32 and 1",
        )
    if model.rotary_base < 2:
        raise Refusal(f"--rotary-base {model.rotary_base}", "leaves YaRN no slow pairs: use 2 or more")
    trained, length = model.yarn_original_max_position_embeddings, config.data.seq_length or 0
    if (reach := int(trained * model.yarn_rotary_scaling_factor)) < length:
        config.notes.append(
            f"--yarn-rotary-scaling-factor {model.yarn_rotary_scaling_factor:g} stretches {trained:,} positions to "
            f"{reach:,}, and --seq-length is {length:,}: {length / trained:g} would reach it"
        )


READ_BY = {  # settings that only some patterns read
    "sparse_window_blocks": ("longformer", "bigbird"),
    "sparse_global_blocks": ("longformer", "bigbird"),
    "sparse_random_blocks": ("bigbird",),
    "sparse_stride": ("strided",),
}


def complete_attention(config: Config) -> None:
    """Complete the mask within a document, whether documents are packed, and the balance of the ring."""
    attention, data = config.attention, config.data
    if attention.attention_mask == "document":
        data.reset_attention_mask = True
    if attention.attention_mask in (None, "document"):
        attention.attention_mask = "window" if attention.window_size else "causal"
    _refuse_unread(attention)
    if attention.attention_mask == "window" and attention.window_size is None:
        raise Refusal("--attention-mask window", "needs --window-size LEFT,RIGHT, for example --window-size 4095,0")
    if attention.attention_mask == "window" and min(attention.window_size) < -1:
        left, right = attention.window_size
        raise Refusal(f"--window-size {left},{right}", ": sizes are counts of tokens, 0 or more, or -1 for no bound")
    _window_layers(config)
    _rope_layers(config)
    if attention.attention_mask == "function" and attention.mask_function is None:
        raise Refusal("--attention-mask function", "needs --mask-function FILE.py:NAME")
    if attention.sparse_block_size < 1 or attention.sparse_stride < 1:
        raise Refusal("--sparse-block-size and --sparse-stride", "must be at least 1")
    if data.reset_position_ids and not data.reset_attention_mask and config.model.position_embedding_type == "alibi":
        raise Refusal(
            "--reset-position-ids with --position-embedding-type alibi",
            "needs --reset-attention-mask: distances between documents have no meaning once positions "
            "restart; add it, or leave --reset-position-ids out",
            Fix(drop="--reset-position-ids"),
        )
    streamed_batch = config.chunks.fpdt_stream_hidden and data.micro_batch_size > 1
    if data.reset_attention_mask and streamed_batch:
        raise Refusal(
            "--fpdt-stream-hidden",
            f"with packed documents and --micro-batch-size {data.micro_batch_size} is not supported, since "
            "each sample has tiles of its own: use --micro-batch-size 1",
            Fix("--micro-batch-size 1"),
        )
    narrow = attention.window_size is not None and sum(attention.window_size) < NARROW
    dense = attention.attention_mask == "function" or narrow
    if attention.mask_cpu_threshold != AttentionConfig.mask_cpu_threshold and not dense:
        config.notes.append(
            f"--mask-cpu-threshold has no effect: --attention-mask {attention.attention_mask} is computed in tiles, "
            "without a dense mask"
        )
    _balance(config)


def _window_layers(config: Config) -> None:
    """Check which layers have the window, and the separate base of RoPE in these layers."""
    attention, model = config.attention, config.model
    if attention.window_attn_skip_freq is None and model.rotary_base_local is None:
        return
    check_pattern("--window-attn-skip-freq", attention.window_attn_skip_freq, model.num_layers)
    windows = window_layers(attention, model.num_layers)
    if not any(windows):
        raise Refusal(
            "--window-attn-skip-freq",
            "leaves no layer with the window: leave it out, or --window-size too",
            Fix(drop="--window-attn-skip-freq --window-size"),
        )
    if all(windows):
        attention.window_attn_skip_freq = None
    if model.rotary_base_local is None:
        return
    if attention.window_attn_skip_freq is None:
        raise Refusal(
            "--rotary-base-local",
            "needs some layers with a window and some without: add --window-size and --window-attn-skip-freq, or use "
            "--rotary-base",
        )
    if not any(own and rotated for own, rotated in zip(windows, rope_layers(model))):
        raise Refusal(
            f"--rotary-base-local {model.rotary_base_local}",
            "has no effect, because no layer with the window has RoPE: leave it out",
            LEAVE_OUT,
        )


def _rope_layers(config: Config) -> None:
    model = config.model
    if model.no_rope_freq is None:
        return
    if model.position_embedding_type not in ROTARY:
        raise Refusal(
            f"--no-rope-freq with --position-embedding-type {model.position_embedding_type}",
            "has no RoPE to leave out: use --position-embedding-type rope, or leave --no-rope-freq out",
            Fix("--position-embedding-type rope"),
            Fix(drop="--no-rope-freq"),
        )
    frequency, layers = model.no_rope_freq, model.num_layers
    check_pattern("--no-rope-freq", frequency, layers)
    if isinstance(frequency, int) and layers % frequency:
        raise Refusal(
            f"--no-rope-freq {frequency}",
            f"does not divide --num-layers {layers}: give a list with 1 or 0 for each layer",
        )
    rotated = rope_layers(model)
    if not any(rotated):
        raise Refusal(
            "--no-rope-freq", "leaves no layer with RoPE: use --position-embedding-type none, and leave it out"
        )
    if all(rotated):
        model.no_rope_freq = None


def _refuse_unread(attention: AttentionConfig) -> None:
    default = AttentionConfig()
    for mask, kind in MASKS.items():
        given = [name for name in kind.flags if getattr(attention, name) != getattr(default, name)]
        if given and attention.attention_mask != mask:
            flag = "--" + given[0].replace("_", "-")
            raise Refusal(flag, f"is used only by --attention-mask {mask}: add that, or leave {flag} out", LEAVE_OUT)
    for name, patterns in READ_BY.items():
        if getattr(attention, name) != getattr(default, name) and attention.sparse_pattern not in patterns:
            flag = "--" + name.replace("_", "-")
            raise Refusal(
                flag,
                f"is used only by --sparse-pattern {' and '.join(patterns)}, not by {attention.sparse_pattern}: "
                "leave it out",
                LEAVE_OUT,
            )


def _balance(config: Config) -> None:
    parallel, data = config.parallel, config.data
    documents = data.reset_attention_mask
    if parallel.context_parallel_balance == "documents":
        if not documents:
            raise Refusal(
                "--context-parallel-balance documents",
                "distributes packed documents: add --attention-mask document, or use zigzag or contiguous",
                Fix("--attention-mask document"),
            )
        if data.micro_batch_size > 1:
            raise Refusal(
                f"--context-parallel-balance documents with --micro-batch-size {data.micro_batch_size}",
                "is not supported, because each sample would have a layout of its own: use --micro-batch-size 1, "
                "or zigzag",
                Fix("--micro-batch-size 1"),
            )
    if parallel.context_parallel_balance is not None:
        return
    one_order = data.micro_batch_size == 1 and not parallel.partition_position_embedding
    even = _even_rows(config)
    if documents and one_order and not even and config.attention.attention_mask in ("causal", "full", "window"):
        parallel.context_parallel_balance = "documents"
    elif even:
        parallel.context_parallel_balance = "contiguous"  # then only neighbours exchange keys
    else:
        parallel.context_parallel_balance = "zigzag"


# No zigzag is needed if layers whose later queries see more keys have at most this share of attention's work.
UNEVEN = 0.04


def _even_rows(config: Config) -> bool:
    """Whether queries attend to about the same number of keys, most of them near, so that no zigzag is needed.

    All layers count together: a model with a window in most layers still needs zigzag if the others have most of the
    work.
    """
    attention, length = config.attention, config.data.seq_length
    if attention.attention_mask != "window":
        return attention.attention_mask == "block-sparse" and attention.sparse_pattern in ("longformer", "bigbird")
    if attention.window_attn_skip_freq is None:
        return True
    windows = window_layers(attention, config.model.num_layers)
    near = sum(length if size < 0 else min(size, length) for size in attention.window_size)
    uneven = windows.count(0) * length / 2
    return uneven <= UNEVEN * (uneven + windows.count(1) * min(near + 1, length / 2))


def varies_by_batch(config: Config) -> bool:
    """Whether attention or positions depend on where a batch's documents end."""
    return config.data.reset_attention_mask or config.data.reset_position_ids


def complete_partitioned_positions(config: Config) -> None:
    """Complete --partition-position-embedding."""
    model, parallel = config.model, config.parallel
    if not parallel.partition_position_embedding:
        return
    if model.position_embedding_type != "learned_absolute":
        raise Refusal(
            f"--partition-position-embedding with --position-embedding-type {model.position_embedding_type}",
            "has no table to partition: use --position-embedding-type learned_absolute, or leave it out",
            Fix("--position-embedding-type learned_absolute"),
            Fix(drop="--partition-position-embedding"),
        )
    if config.data.reset_position_ids or parallel.context_parallel_balance == "documents":
        reset = config.data.reset_position_ids
        flag = "--reset-position-ids" if reset else "--context-parallel-balance documents"
        raise Refusal(
            f"--partition-position-embedding with {flag}",
            "is not supported, because a rank's positions would depend on the documents in the batch: leave one "
            f"out{'' if reset else ', or use --context-parallel-balance zigzag'}",
        )
    if config.optimizer.fp16:  # the table has a separate optimizer in core, which would scale the loss separately
        raise Refusal(
            "--partition-position-embedding with --fp16",
            "is not supported: use --bf16, or leave it out",
            Fix("--bf16"),
            Fix(drop="--partition-position-embedding"),
        )
    if parallel.context_parallel_size == 1 and not parallel.sequence_parallel:
        parallel.partition_position_embedding = False
        config.notes.append(
            "--partition-position-embedding has nothing to split without context or sequence parallelism: switched off"
        )
