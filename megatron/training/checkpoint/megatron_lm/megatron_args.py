# SPDX-License-Identifier: Apache-2.0
"""The ``args`` of Megatron-LM's checkpoints: the model that they describe, as our settings.

Names, defaults and meanings as in Megatron-LM's megatron/training/arguments.py, core 0.12 to 0.16. A setting of ours
has the same name there, with the exceptions below.
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
from megatron.core.tensor_parallel import ColumnParallelLinear

from megatron.formulas.flops import forward_flops
from megatron.training.arguments.config import Config, ModelConfig
from megatron.training.arguments.models import ROTARY, derive_shape, model_shape
from megatron.training.checkpoint.megatron_lm.checked import fitting
from megatron.training.data.tokenizer import padded_vocab_size
from megatron.training.refusal import Refusal

# Settings that are of the model and say nothing of its weights or formulas.
ELSEWHERE = ("model", "transformer_impl", "vocab_size", "init_method_std", "init_method_xavier_uniform")
# What other networks have: name of the argument, values without effect, and what it would be.
OTHERS: dict[str, tuple[tuple[Any, ...], str]] = {
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
    "attention_output_gate": ((None, False), "gated attention"),
    "no_rope_freq": ((None,), "layers without RoPE"),
    "window_attn_skip_freq": ((None,), "layers without a window"),
    "qk_l2_norm": ((None, False), "queries and keys of length 1"),
    "quick_geglu": ((None, False), "another activation"),
    "glu_linear_offset": ((None, 0, 0.0), "another activation"),
    "activation_func_clamp_value": ((None,), "another activation"),
    "apply_residual_connection_post_layernorm": ((None, False), "residuals after the norm"),
    "retro_add_retriever": ((None, False), "retrieval"),
    "use_retro": ((None, False), "retrieval"),
    "spec": ((None,), "layers from a file"),
    "use_mup": ((None, False), "another scaling"),
}
# Names of Megatron-DeepSpeed's, and of Megatron-LM before core.
OLDER = {
    "norm_epsilon": ("layernorm_epsilon",),
    "rotary_base": ("rope_theta", "rotary_position_embeddings_theta"),
}
NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
POSITIONS = ("learned_absolute", "rope", "yarn", "none")


def namespace(args: Any, where: object) -> dict[str, Any]:
    """What a checkpoint's ``args`` hold, by name. Raises Refusal where they are nothing of the kind."""
    if not isinstance(args, (Namespace, SimpleNamespace)):
        raise Refusal(f"checkpoint {where} has no args that can be read: it does not say of which model it is")
    return vars(args)


def settings_of(args: dict[str, Any], where: object) -> dict[str, Any]:
    """The settings of :class:`ModelConfig` that ``args`` give; those they do not know are left out.

    Raises:
        Refusal: a model of another kind, named.
    """
    found = [
        f"--{name.replace('_', '-')} ({what})"
        for name, (neutral, what) in OTHERS.items()
        if name in args and not _is_one_of(args[name], neutral)
    ]
    if found:
        raise Refusal(f"checkpoint {where} is of a model that is not built here: {', '.join(found)}")
    for size in ("num_layers", "hidden_size", "num_attention_heads"):
        if args.get(size) is None:
            raise Refusal(f"checkpoint {where}: its args give no --{size.replace('_', '-')}")
    known = {
        field.name: args[field.name]
        for field in fields(ModelConfig)
        if field.name not in ELSEWHERE and args.get(field.name) is not None
    }
    for name, older in OLDER.items():
        if name not in known and (value := next((args[one] for one in older if args.get(one) is not None), None)):
            known[name] = value
    if "add_bias_linear" not in known and isinstance(args.get("disable_bias_linear"), bool):
        known["add_bias_linear"] = not args["disable_bias_linear"]
    known["normalization"] = NORMS.get(str(known.get("normalization", "LayerNorm")).lower(), known.get("normalization"))
    if args.get("use_rotary_position_embeddings") is True:  # the older spelling
        known["position_embedding_type"] = "rope"
    positions = known.get("position_embedding_type", "learned_absolute")
    if positions not in (*POSITIONS, "alibi"):
        raise Refusal(f"checkpoint {where}: --position-embedding-type {positions} is not built here")
    if (groups := args.get("num_key_value_heads")) is not None:
        known["num_query_groups"] = groups
        known["group_query_attention"] = groups != args.get("num_attention_heads")
    if known.get("normalization") not in (None, "LayerNorm", "RMSNorm"):
        raise Refusal(f"checkpoint {where}: --normalization {known['normalization']} is not built here")
    return dict(fitting(known, where))


def model_of(args: dict[str, Any], where: object) -> ModelConfig:
    """The whole model: where ``args`` say nothing, Megatron-LM's defaults, which are ours."""
    return derive_shape(ModelConfig(**settings_of(args, where)))


def model_described(args: dict[str, Any], where: object) -> dict[str, Any]:
    """What ``args`` say of the model, widths that follow from others filled in: to be compared with a run's."""
    said, model = settings_of(args, where), model_of(args, where)
    derived = ("kv_channels", "ffn_hidden_size", "num_query_groups")
    return said | {name: getattr(model, name) for name in derived}


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    name = getattr(value, "name", value)  # of an enum
    if isinstance(value, list):  # DeepSpeed's number of experts by layer: 1 is none
        return all(one in (1, *neutral) for one in value)
    return any(value is one or name == one for one in neutral)


# What Megatron-LM's training program looks for in a checkpoint beside weights, optimizer and schedule.
#
# Names as in its megatron/training/checkpointing.py. Weights and optimizer are core's already:
# ``fully_reshardable``, which its distributed optimizer reads on any TP x PP.


LAYER = "decoder.layers"
OWN_WORDS = ("model", "transformer_impl", "padded_vocab_size")  # of ModelConfig, said otherwise


def for_megatron(config: Config, vocab_size: int, iteration: int, consumed_samples: int) -> dict[str, Any]:
    """To be saved beside the rest."""
    return {
        "args": args_of(config, vocab_size, iteration, consumed_samples, dist.get_world_size()),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": flops_of_sample(config, vocab_size) * consumed_samples,
    }


def flops_of_sample(config: Config, vocab_size: int) -> float:
    """Forward and backward, attention under a causal mask, no recompute."""
    forward = forward_flops(model_shape(config.model, vocab_size), config.data.seq_length)
    return 3 * (forward.gemm + forward.attention / 2)


def args_of(config: Config, vocab_size: int, iteration: int, consumed: int, world_size: int) -> Namespace:
    """``args`` for a checkpoint of ours: what Megatron-LM looks at when it loads one, and the model.

    ``no_save_rng`` is true, for random states here belong to tokens and not to TP x PP as there.
    """
    model, parallel, data, optimizer = config.model, config.parallel, config.data, config.optimizer
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = parallel.context_parallel_size or 1
    rotary = model.position_embedding_type in ROTARY
    said = {name: value for name, value in asdict(model).items() if name not in OWN_WORDS}
    said["num_query_groups"] = model.num_query_groups if model.group_query_attention else 1
    return Namespace(
        **said,
        transformer_impl="local" if model.transformer_impl == "auto" else model.transformer_impl,
        add_position_embedding=True,
        use_rotary_position_embeddings=rotary,
        num_experts=None,
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
        expert_model_parallel_size=1,
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
    """Empty states of modules that only Transformer Engine's layers have, and ask for when they load.

    core writes those of its linear layers itself, empty as well.
    """
    if not isinstance(chunk.decoder.layers[0].self_attention.linear_qkv, ColumnParallelLinear):
        return []
    kinds, layers = ["core_attention"], chunk.config.num_layers
    if chunk.config.qk_layernorm:
        kinds += ["q_layernorm", "k_layernorm"]
    rank = (0, chunk.pg_collection.tp.rank(), get_data_parallel_rank(with_context_parallel=True))
    states = [
        ShardedObject(f"{LAYER}.self_attention.{kind}._extra_state", None, (layers,), (layer.layer_number - 1,), rank)
        for layer in chunk.decoder.layers
        for kind in kinds
    ]
    if chunk.post_process:
        states.append(ShardedObject("decoder.final_layernorm._extra_state", None, (1,), (0,), rank))
    return states
