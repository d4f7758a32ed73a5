# SPDX-License-Identifier: Apache-2.0
"""What Megatron-LM's training program looks for in a checkpoint beside weights, optimizer and schedule.

Names as in its megatron/training/checkpointing.py. Weights and optimizer are core's already:
``fully_reshardable``, which its distributed optimizer reads on any TP x PP.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_state import get_data_parallel_rank
from megatron.core.tensor_parallel import ColumnParallelLinear

from megatron.formulas.flops import forward_flops
from megatron.training.arguments.config import Config
from megatron.training.arguments.models import ROTARY, model_shape
from megatron.training.data.tokenizer import padded_vocab_size

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
