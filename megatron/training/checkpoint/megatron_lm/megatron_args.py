# SPDX-License-Identifier: Apache-2.0
"""The ``args`` in Megatron-LM's checkpoints: converted to our settings, and written for our checkpoints.

Names, defaults and meanings follow Megatron-LM's megatron/training/arguments.py, core 0.12 to 0.16. Our settings have
the same names, with the exceptions below.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_state import get_data_parallel_rank
from megatron.core.tensor_parallel import RowParallelLinear

from megatron.formulas.flops import forward_flops
from megatron.training.checkpoint.megatron_lm.checked import fitting
from megatron.training.data.tokenizer import padded_vocab_size
from megatron.training.refusal import Refusal
from megatron.training.settings.config import AttentionConfig, Config, ModelConfig
from megatron.training.settings.flag import NEVER, kinds_of
from megatron.training.settings.models import derive_shape, model_shape
from megatron.training.settings.read_with import ROTARY
from megatron.training.settings.same_network import OLDER, attention_settings

# Arguments of networks that are not supported: name, values without effect, and the feature's name.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_experts": ((None,), "experts"),
    "multi_latent_attention": ((None, False), "multi-latent attention"),
    "mtp_num_layers": ((None, 0), "multi-token prediction"),
    "is_hybrid_model": ((None, False), "Mamba layers"),
    "hybrid_override_pattern": ((None,), "Mamba layers"),
    "hybrid_layer_pattern": ((None,), "Mamba layers"),
    "heterogeneous_layers_config_path": ((None,), "layers that differ"),
    "heterogeneous_layers_config_encoded_json": ((None,), "layers that differ"),
    "linear_attention_freq": ((None,), "linear attention"),
    "experimental_attention_variant": ((None,), "another attention"),
    "qk_l2_norm": ((None, False), "queries and keys of length 1"),
    "apply_residual_connection_post_layernorm": ((None, False), "residuals after the norm"),
    "retro_add_retriever": ((None, False), "retrieval"),
    "use_retro": ((None, False), "retrieval"),
    "spec": ((None,), "layers from a file"),
    "use_mup": ((None, False), "another scaling"),
}
# Names in Megatron-DeepSpeed, and in Megatron-LM before core.
OLDER_NAMES = {
    "norm_epsilon": ("layernorm_epsilon",),
    "rotary_base": ("rope_theta", "rotary_position_embeddings_theta"),
}
NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
POSITIONS = ("learned_absolute", "rope", "yarn", "none")


def namespace(args: Any, where: object) -> dict[str, Any]:
    """A checkpoint's ``args`` by name. Raises Refusal if they are missing or not a namespace."""
    if not isinstance(args, (Namespace, SimpleNamespace)):
        raise Refusal(f"checkpoint {where} has no args that can be read: it does not describe its model")
    return vars(args)


def settings_of(args: dict[str, Any], where: object) -> dict[str, Any]:
    """The fields of :class:`ModelConfig` that ``args`` give; others are left out.

    Raises:
        Refusal: the model is not supported; the message names the arguments.
    """
    unsupported = [
        f"--{name.replace('_', '-')} ({what})"
        for name, (neutral, what) in UNSUPPORTED.items()
        if name in args and not _is_one_of(args[name], neutral)
    ]
    if unsupported:
        raise Refusal(f"checkpoint {where} is of a model that is not supported: {', '.join(unsupported)}")
    for size in ("num_layers", "hidden_size", "num_attention_heads"):
        if args.get(size) is None:
            raise Refusal(f"checkpoint {where}: its args give no --{size.replace('_', '-')}")
    known = {  # without the settings of layers that are refused: they have no meaning
        field.name: args[field.name]
        for field in fields(ModelConfig)
        if not (kinds_of(field) or field.name in OLDER) and field.metadata.get("loaded") != NEVER
        if args.get(field.name) is not None
    }
    for name, older in OLDER_NAMES.items():
        if name not in known and (value := next((args[old] for old in older if args.get(old) is not None), None)):
            known[name] = value
    if "add_bias_linear" not in known and isinstance(args.get("disable_bias_linear"), bool):
        known["add_bias_linear"] = not args["disable_bias_linear"]
    known["normalization"] = NORMS.get(str(known.get("normalization", "LayerNorm")).lower(), known.get("normalization"))
    if args.get("use_rotary_position_embeddings") is True:  # the older argument
        known["position_embedding_type"] = "rope"
    positions = known.get("position_embedding_type", "learned_absolute")
    if positions not in (*POSITIONS, "alibi"):
        raise Refusal(f"checkpoint {where}: --position-embedding-type {positions} is not supported")
    if (groups := args.get("num_key_value_heads")) is not None:
        known["num_query_groups"] = groups
        known["group_query_attention"] = groups != args.get("num_attention_heads")
    if known.get("normalization") not in (None, "LayerNorm", "RMSNorm"):
        raise Refusal(f"checkpoint {where}: --normalization {known['normalization']} is not supported")
    return dict(fitting(known, where))


def attention_of(args: dict[str, Any], where: object) -> dict[str, Any]:
    """The fields of :class:`AttentionConfig` that ``args`` give and that are part of the network: windows.

    Raises:
        Refusal: one of them has an invalid value.
    """
    known = {name: args[name] for name in attention_settings() if args.get(name) is not None}
    return dict(fitting(known, where, AttentionConfig))


def model_of(args: dict[str, Any], where: object) -> ModelConfig:
    """The complete model settings; missing ``args`` get Megatron-LM's defaults, which are also ours."""
    return derive_shape(ModelConfig(**settings_of(args, where)))


def model_described(args: dict[str, Any], where: object) -> dict[str, Any]:
    """The settings in ``args`` and the widths derived from them, for comparison with a run's settings."""
    settings, model = settings_of(args, where), model_of(args, where)
    derived = ("kv_channels", "ffn_hidden_size", "num_query_groups")
    return settings | {name: getattr(model, name) for name in derived}


def vocabulary_block(args: dict[str, Any]) -> int:
    """The number of rows of which Megatron-LM pads the vocabulary to a multiple, from a checkpoint's args."""
    return (args.get("make_vocab_size_divisible_by") or 128) * (args.get("tensor_model_parallel_size") or 1)


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    name = getattr(value, "name", value)  # enums are compared by name
    if isinstance(value, list):  # DeepSpeed's number of experts per layer: 1 means no experts
        return all(count in (1, *neutral) for count in value)
    return any(value is choice or name == choice for choice in neutral)


OTHER_MEANING = ("model", "transformer_impl", "padded_vocab_size")  # fields of ModelConfig that are written differently


def for_megatron(config: Config, vocab_size: int, iteration: int, consumed_samples: int) -> dict[str, Any]:
    """What Megatron-LM's program expects in a checkpoint in addition to weights, optimizer and schedule.

    The names are as in its megatron/training/checkpointing.py.
    """
    forward = forward_flops(model_shape(config.model, vocab_size), config.data.seq_length)
    # forward and backward, causal, without recompute
    sample = 3 * (forward.gemm + forward.attention / 2) + forward.choice / 2
    return {
        "args": args_of(config, vocab_size, iteration, consumed_samples, dist.get_world_size()),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": sample * consumed_samples,
    }


def args_of(config: Config, vocab_size: int, iteration: int, consumed: int, world_size: int) -> Namespace:
    """``args`` for our checkpoints: the model, and what Megatron-LM reads when it loads one.

    ``no_save_rng`` is true because our random states belong to tokens, not to TP x PP ranks as in Megatron-LM.
    """
    model, parallel, data, optimizer = config.model, config.parallel, config.data, config.optimizer
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = parallel.context_parallel_size or 1
    rotary = model.position_embedding_type in ROTARY
    settings = {name: value for name, value in asdict(model).items() if name not in OTHER_MEANING}
    settings |= {name: getattr(config.attention, name) for name in ("window_size", "window_attn_skip_freq")}
    settings["num_query_groups"] = model.num_query_groups if model.group_query_attention else 1
    return Namespace(
        **settings,
        transformer_impl="local" if model.transformer_impl == "auto" else model.transformer_impl,
        add_position_embedding=True,
        use_rotary_position_embeddings=rotary,
        seq_length=data.seq_length,
        padded_vocab_size=padded_vocab_size(
            vocab_size, model.make_vocab_size_divisible_by, tensor, model.padded_vocab_size
        ),
        tokenizer_type=data.tokenizer_type,
        tokenizer_model=data.tokenizer_model,
        micro_batch_size=data.micro_batch_size,
        global_batch_size=data.global_batch_size,
        iteration=iteration,
        consumed_train_samples=consumed,
        skipped_train_samples=0,
        consumed_valid_samples=0,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=context,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        world_size=world_size,
        data_parallel_size=max(world_size // (tensor * pipeline * context), 1),
        data_parallel_random_init=False,
        phase_transition_iterations=None,
        optimizer=optimizer.optimizer,
        bf16=optimizer.bf16,
        fp16=optimizer.fp16,
        params_dtype=torch.bfloat16 if optimizer.bf16 else torch.float16 if optimizer.fp16 else torch.float32,
        use_distributed_optimizer=True,
        dist_ckpt_optim_fully_reshardable=True,
        ckpt_format="torch_dist",
        ckpt_fully_parallel_save=True,
        no_save_optim=not config.checkpoint.save_optim,
        no_save_rng=True,
        seed=config.run.seed,
    )


def engine_states(chunk: GPTModel) -> list[ShardedObject]:
    """The empty extra states that Transformer Engine's layers expect in a checkpoint and that core does not write.

    They are those of attention and norms; core writes the (empty) extra states of its linear layers.
    """
    by_layer = {layer.layer_number: layer.self_attention for layer in chunk.decoder.layers}
    with_state = [number for number, mixer in by_layer.items() if hasattr(mixer, "inputs_of_rule")]
    attending = [mixer for mixer in by_layer.values() if hasattr(mixer, "core_attention")]
    if not with_state and attending and not isinstance(attending[0].linear_proj, RowParallelLinear):
        return []
    kinds, layers, hybrid = ["core_attention"], chunk.config.num_layers, chunk.config.is_hybrid_model
    if chunk.config.qk_layernorm:
        kinds += ["q_layernorm", "k_layernorm"]
    rank = (0, chunk.pg_collection.tp.rank(), get_data_parallel_rank(with_context_parallel=True))
    name = "decoder.layers.{}self_attention.{}._extra_state".format
    states = [
        ShardedObject(name(f"{number - 1}.", kind), None, (1,), (0,), rank)  # these layers differ
        if chunk.config.linear_attention_freq or hybrid
        else ShardedObject(name("", kind), None, (layers,), (number - 1,), rank)
        for number, mixer in by_layer.items()
        for kind in (kinds if mixer in attending else ["out_norm"] if number in with_state and not hybrid else [])
    ]
    if chunk.post_process:
        norm = "final_norm" if hybrid else "final_layernorm"
        states.append(ShardedObject(f"decoder.{norm}._extra_state", None, (1,), (0,), rank))
    return states
