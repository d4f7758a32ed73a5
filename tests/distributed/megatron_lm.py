# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's model, optimizer and checkpoints, made by calls of megatron-core.

Layout and names are those of megatron/training/checkpointing.py of NVIDIA/Megatron-LM, core 0.16; nothing here goes
through our saver or loader. Data and the training step are ours, so that losses can be compared.
"""

from __future__ import annotations

import importlib
import random
from argparse import Namespace
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.platform.core_versions import submodules_of
from tests.distributed.training_runs import make_job

# megatron-core's attention and RoPE, which our models do not use.
ON_CPU = (
    "models.common.embeddings.rotary_pos_embedding",
    "models.common.embeddings.rope_utils",
    "fusions.fused_softmax",
)


@dataclass
class Megatron:
    """A run of Megatron-LM."""

    job: Any  # ours: configuration, data and grid
    chunks: list
    optimizer: Any
    schedule: Any
    args: Namespace


def engine_spec(normalization: str) -> Any:
    """A layer whose modules, parameters and extra states have Transformer Engine's names and order, computed by torch.

    In Transformer Engine the norm before a linear layer is part of that layer, the norm's weight comes first, and every
    module pickles an extra state.
    """
    import io

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
    from torch import nn
    from torch.nn import functional

    class WithBytes:
        loaded: Any = "never"

        def get_extra_state(self) -> Any:
            return io.BytesIO(b"a history that only its own program can read")

        def set_extra_state(self, state: Any) -> None:
            self.loaded = state

    class NormAndLinear(WithBytes, ColumnParallelLinear):
        def __init__(self, size: int, *args: Any, config: Any, **kwargs: Any) -> None:
            super().__init__(size, *args, config=config, **kwargs)
            linear = dict(self._parameters)
            self._parameters.clear()
            self.layer_norm_weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype))
            if normalization == "LayerNorm":
                self.layer_norm_bias = nn.Parameter(torch.zeros(size, dtype=config.params_dtype))
            self._parameters.update(linear)

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            shape, weight = (x.size(-1),), self.layer_norm_weight
            if normalization == "LayerNorm":
                return super().forward(functional.layer_norm(x, shape, weight, self.layer_norm_bias), *args, **kwargs)
            return super().forward(functional.rms_norm(x, shape, weight, 1e-5), *args, **kwargs)

    class Attention(WithBytes, DotProductAttention):
        def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict:
            return make_sharded_tensors_for_checkpoint(
                self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets
            )

    spec = get_gpt_layer_local_spec(normalization=normalization)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    layer.sharded_state_dict_keys_map = {}
    layer.self_attention.submodules.linear_qkv = NormAndLinear
    layer.self_attention.submodules.core_attention = Attention
    submodules_of(layer.mlp).linear_fc1 = NormAndLinear
    return spec


def build(flags: str, llama: bool = True, *, distributed: bool = True, engine: bool = False) -> Megatron:
    """core's GPTModel with local layers, DDP and optimizer of core, in the shape that our flags give.

    ``engine``: with layers that look like Transformer Engine's instead.
    """
    from functools import partial

    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec as local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.nn import functional

    from megatron.platform import cpu
    from megatron.training.model.optimizer import build_schedule, fill_states

    job = make_job(flags, llama)
    for name in ON_CPU:
        cpu._exchange_in_module(importlib.import_module(f"megatron.core.{name}"))
    ours, grid = job.config, job.runtime.grid
    model, optim = ours.model, ours.optimizer
    dtype = torch.bfloat16 if optim.bf16 else torch.float32
    torch.manual_seed(4)
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization=model.normalization,
        add_bias_linear=model.add_bias_linear,
        gated_linear_unit=model.swiglu,
        activation_func=functional.silu if model.swiglu else partial(functional.gelu, approximate="tanh"),
        tensor_model_parallel_size=grid.tensor.size,
        pipeline_model_parallel_size=grid.pipeline.size,
        virtual_pipeline_model_parallel_size=ours.parallel.num_virtual_stages_per_pipeline_rank,
        sequence_parallel=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=optim.bf16,
        calculate_per_token_loss=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        batch_p2p_comm=False,
        use_cpu_initialization=True,
        deallocate_pipeline_outputs=True,
    )
    stages = ours.parallel.num_virtual_stages_per_pipeline_rank
    rows = -(-job.vocab_size // (model.make_vocab_size_divisible_by * grid.tensor.size))
    rows *= model.make_vocab_size_divisible_by * grid.tensor.size
    chunks = []
    for stage in range(stages or 1):
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=(engine_spec if engine else local_spec)(normalization=model.normalization),
            vocab_size=rows,
            max_sequence_length=model.max_position_embeddings,
            pre_process=grid.pipeline.rank == 0 and stage == 0,
            post_process=grid.pipeline.rank == grid.pipeline.size - 1 and stage == (stages or 1) - 1,
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type=model.position_embedding_type,
            vp_stage=stage if stages else None,
        )
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        inner = Float16Module(config, chunk) if optim.bf16 else chunk
        chunks.append(DistributedDataParallel(config, settings, inner, disable_bucketing=stage > 0))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=0.0,
            weight_decay=0.01,
            bf16=optim.bf16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            clip_grad=1.0,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        fill_states(part)  # PyTorch's Adam, which core loads wrongly; Megatron-LM has Transformer Engine's
        if hasattr(part, "_set_main_param_and_optimizer_states"):
            _let_steps_load(part)
    config.finalize_model_grads_func = finalize_model_grads
    schedule = build_schedule(optimizer, ours)
    args = Namespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        group_query_attention=model.group_query_attention,
        num_query_groups=model.num_query_groups if model.group_query_attention else 1,
        kv_channels=model.kv_channels,
        max_position_embeddings=model.max_position_embeddings,
        position_embedding_type=model.position_embedding_type,
        add_position_embedding=True,
        use_rotary_position_embeddings=False,
        rotary_base=10000,
        rotary_percent=1.0,
        rotary_interleaved=False,
        rotary_seq_len_interpolation_factor=None,
        normalization=model.normalization,
        norm_epsilon=1e-5,
        swiglu=model.swiglu,
        squared_relu=False,
        openai_gelu=False,
        bias_gelu_fusion=True,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=False,
        qk_layernorm=False,
        apply_layernorm_1p=False,
        untie_embeddings_and_output_weights=model.untie_embeddings_and_output_weights,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_experts=None,
        multi_latent_attention=False,
        mtp_num_layers=None,
        spec=None,
        transformer_impl="transformer_engine" if engine else "local",
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
        padded_vocab_size=rows,
        optimizer="adam",
        params_dtype=dtype,
        tensor_model_parallel_size=grid.tensor.size,
        pipeline_model_parallel_size=grid.pipeline.size,
        virtual_pipeline_model_parallel_size=stages,
        world_size=dist.get_world_size(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        use_distributed_optimizer=distributed,
        consumed_train_samples=0,
        skipped_train_samples=0,
        no_save_optim=False,
        no_save_rng=False,
        rank=dist.get_rank(),  # differs between ranks, as in Megatron-LM
    )
    return Megatron(job, chunks, optimizer, schedule, args)


def _let_steps_load(optimizer):
    """Work around two faults of core 0.16.1 with PyTorch's Adam: ``step`` is missing where it copies loaded states, and
    after loading all parameters share one ``step`` tensor, which each of them then counts up."""
    copy_states = optimizer._set_main_param_and_optimizer_states

    def copy_states_with_step(model_param, tensors):
        group, index = optimizer.model_param_group_index_map[model_param]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][index]]
        state["step"] = state["step"].clone()
        copy_states(model_param, {"step": state["step"], **tensors})

    optimizer._set_main_param_and_optimizer_states = copy_states_with_step


def train(run: Megatron, steps: int) -> list[float]:
    """Losses of some steps on the data of our run."""
    from megatron.training.job import batches_for
    from megatron.training.step import train_step

    job = run.job
    batches = batches_for(job, job.datasets[0], run.args.consumed_train_samples, 0)
    losses = []
    for _ in range(steps):
        sizes = job.batch_sizes.get()
        result = train_step(job.runtime, run.chunks, run.optimizer, run.schedule, batches, job.config, sizes)
        run.args.consumed_train_samples += job.config.data.global_batch_size
        losses.append(result.lm_loss)
    return losses


def unwrapped(run: Megatron) -> list:
    from megatron.core.utils import unwrap_model

    return unwrap_model(run.chunks)


def state_of(run: Megatron, metadata: dict, *, loading: bool, rng: bool = True, iteration: int | None = None) -> dict:
    """The sharded state that Megatron-LM's program makes for saving and for loading."""
    from megatron.core import mpu, tensor_parallel
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    metadata = {**metadata, "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {"args": run.args, "checkpoint_version": 3.0}
    if iteration is not None:
        state["iteration"] = iteration
    models = unwrapped(run)
    for index, model in enumerate(models):
        state["model" if len(models) == 1 else f"model{index}"] = model.sharded_state_dict(metadata=metadata)
    state["optimizer"] = run.optimizer.sharded_state_dict(state, metadata=metadata, is_loading=loading)
    state["opt_param_scheduler"] = run.schedule.state_dict()
    if rng:
        drawn = {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
        }
        grid = run.job.runtime.grid
        state["rng_state"] = ShardedObject(
            "rng_state",
            [drawn],
            (grid.pipeline.size, grid.tensor.size),
            (grid.pipeline.rank, grid.tensor.rank),
            replica_id=mpu.get_data_parallel_rank(with_context_parallel=True),
        )
    return state


def save(run: Megatron, folder: str, iteration: int, kind: str | None, *, core_writer: bool = False) -> None:
    """Write ``folder/iter_NNNNNNN`` and the tracker, with the distributed optimizer in the form ``kind``."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.dist_checkpointing.utils import _clean_metadata_for_serialization

    from megatron.training.checkpoint.save_job import Save

    metadata: dict[str, Any] = {"distrib_optim_sharding_type": kind} if kind else {}
    metadata |= {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    path = Path(folder) / f"iter_{iteration:07d}"
    state = state_of(run, metadata, loading=False, iteration=iteration)
    state["num_floating_point_operations_so_far"] = 1e9
    content = _clean_metadata_for_serialization(metadata)
    if core_writer:
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        has_sums = "verify_integrity" in signature(dist_checkpointing.save).parameters  # since 0.19
        more = {"verify_integrity": True} if has_sums else {}
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
        dist_checkpointing.save(state, str(path), strategy, content_metadata=content, **more)
    else:  # core's writer would start processes; its files are the same (test_checkpoint.py)
        state["content_metadata"] = content
        going = Save(path, lambda: state, lambda: (path / "checksums.json").unlink())
        going.write()
        going.finish()
    if dist.get_rank() == 0:
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    dist.barrier()


def load(run: Megatron, folder: str) -> int:
    """Load as Megatron-LM's program does; returns the iteration."""
    from megatron.core import dist_checkpointing

    path = str(Path(folder) / f"iter_{int((Path(folder) / 'latest_checkpointed_iteration.txt').read_text()):07d}")
    common = dist_checkpointing.load_common_state_dict(path)
    saved, grid = common["args"], run.job.runtime.grid
    same = (saved.tensor_model_parallel_size, saved.pipeline_model_parallel_size) == (
        grid.tensor.size,
        grid.pipeline.size,
    )
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    rng = same and not saved.no_save_rng
    loaded = dist_checkpointing.load(state_of(run, metadata, loading=True, rng=rng), path)
    for name in ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding"):
        assert getattr(loaded["args"], name) == getattr(run.args, name), name
    assert loaded["checkpoint_version"] == 3.0 and loaded["num_floating_point_operations_so_far"] > 0
    run.args.consumed_train_samples = loaded["args"].consumed_train_samples
    for index, chunk in enumerate(run.chunks):
        chunk.load_state_dict(loaded["model" if len(run.chunks) == 1 else f"model{index}"])
    run.optimizer.load_state_dict(loaded["optimizer"])
    run.schedule.load_state_dict(loaded["opt_param_scheduler"])
    return loaded["iteration"]
