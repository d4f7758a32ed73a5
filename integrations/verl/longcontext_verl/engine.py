# SPDX-License-Identifier: Apache-2.0
"""verl's engine interface on models of transformers that :func:`parallelize` distributes over Ulysses x Ring.

A micro-batch of jagged samples becomes one packed sequence, of which each rank of a context-parallel group has a part.
Log-probabilities are computed in chunks and gathered, so that each rank has those of whole samples, at the offsets of
``input_ids``. Parameters are split over all ranks by fully_shard, which averages gradients as verl's losses expect.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.device import get_device_id, get_device_name
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.spec import ShardSpec
from verl.workers.engine.utils import (
    _hf_entry_identity,
    detach_tree,
    enable_full_determinism,
    hf_delta_export,
    postprocess_batch_func,
    prepare_micro_batches,
)

from longcontext_verl.config import LongContextEngineConfig, refuse
from megatron.context_parallel.huggingface import Fpdt, parallelize
from megatron.context_parallel.huggingface.packed_rows import PackedRows
from megatron.context_parallel.huggingface.parallel import PART
from megatron.context_parallel.huggingface.rank_batch import IGNORED
from megatron.context_parallel.layout.grid import make_grid

Named = Iterator[tuple[str, Tensor]]


@EngineRegistry.register(model_type="language_model", backend="longcontext", device=["cuda", "cpu"])
class LongContextEngine(BaseEngine):
    """An engine for actors, reference models and supervised fine-tuning.

    Raises:
        ValueError: a setting is not supported; it is named.
    """

    architecture: Any = AutoModelForCausalLM

    def __init__(
        self,
        model_config: Any,
        engine_config: LongContextEngineConfig,
        optimizer_config: Any,
        checkpoint_config: Any,
    ) -> None:
        super().__init__()
        refuse(model_config, engine_config)
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.grid = make_grid(ulysses=engine_config.ulysses_parallel_size, ring=engine_config.ring_parallel_size)
        self.mode: str | None = None
        self.module: Any = None
        self._saved: list[str] = []
        if engine_config.full_determinism:
            enable_full_determinism(seed=engine_config.seed)

    # ---- Model, optimizer, memory.

    def initialize(self) -> None:
        """Load the model, distribute it, and make optimizer and schedule."""
        settings, device = self.engine_config, get_device_name()
        if self.module is not None:
            self.context.remove()
        module = self.architecture.from_pretrained(
            self.model_config.local_path,
            config=self.model_config.hf_config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            trust_remote_code=self.model_config.trust_remote_code,
        ).to(get_device_id())
        if self.model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        chunk = settings.fpdt_chunk_size
        self.context = parallelize(
            module,
            self.grid,
            seq_length=chunk or 2 * self.grid.context.size,  # each micro-batch has its own length
            fpdt=None if chunk is None else Fpdt(chunk_size=chunk, offload=settings.fpdt_offload),
            balance=settings.balance,
            kernel=settings.attention_kernel,
        )
        self.module = module
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("all",))
        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, settings.dtype), reduce_dtype=torch.float32)
        blocks = set(module._no_split_modules or ())
        for layer in [one for one in module.modules() if type(one).__name__ in blocks]:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        self.optimizer = self.lr_scheduler = None
        if not settings.forward_only and self.optimizer_config is not None:
            self.optimizer = build_optimizer(module.parameters(), self.optimizer_config)
            self.lr_scheduler = self._schedule()
        self.to("cpu", self.is_param_offload_enabled, self.is_optimizer_offload_enabled, self.is_param_offload_enabled)

    def _schedule(self) -> Any:
        settings = self.optimizer_config
        warmup, total = settings.lr_warmup_steps, settings.total_training_steps
        if warmup is None or warmup <= 0:
            warmup = int(settings.lr_warmup_steps_ratio * total)
        if settings.lr_scheduler_type == "constant":
            return get_constant_schedule_with_warmup(self.optimizer, num_warmup_steps=warmup)
        return get_cosine_schedule_with_warmup(
            self.optimizer,
            num_warmup_steps=warmup,
            num_training_steps=total,
            min_lr_ratio=settings.min_lr_ratio,
            num_cycles=settings.num_cycles,
        )

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.engine_config.optimizer_offload

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parameters with their gradients, and states of the optimizer, to the device or to host memory."""
        super().to(device, model, optimizer, grad)
        place = torch.device("cpu") if device == "cpu" else torch.device(get_device_id())
        if model:
            self.module.to(place)
        for state in self.optimizer.state.values() if optimizer and self.optimizer is not None else ():
            state |= {key: value.to(place) for key, value in state.items() if isinstance(value, Tensor)}

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _Mode(self, "eval", **kwargs)

    # ---- Which ranks have what.

    def get_data_parallel_rank(self) -> int:
        return self.grid.data.rank

    def get_data_parallel_size(self) -> int:
        return self.grid.data.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.grid.data.group

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.grid.context.rank == 0

    # ---- Steps.

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> Any:
        group, ranks = self.get_data_parallel_group(), self.grid.context.size
        tokens = data["loss_mask"].sum().to(get_device_id())
        dist.all_reduce(tokens, group=group)
        tu.assign_non_tensor(data, sp_size=ranks, batch_num_tokens=tokens.item(), dp_size=self.grid.data.size)
        micro_batches, indices = prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        keeps = forward_only or tu.get_non_tensor_data(data=data, key="return_model_output", default=False)
        outputs = []
        for micro_batch in micro_batches:
            with torch.no_grad() if forward_only else nullcontext():
                loss, output = self.forward_step(micro_batch, loss_function, forward_only)
            if not forward_only:
                loss.backward()
            if not keeps:
                del output["model_output"]
            outputs.append(output)
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """(loss, what is reported) of a micro-batch."""
        micro_batch = micro_batch.to(get_device_id())
        scores = self.scores_of(micro_batch)
        loss, metrics = torch.ones((), device=get_device_id()), {}
        if loss_function is not None:
            loss, metrics = loss_function(
                model_output=scores, data=micro_batch, dp_group=self.get_data_parallel_group()
            )
        elif not forward_only:
            raise ValueError("a training step needs a loss function")
        return loss, {"model_output": detach_tree(scores), "loss": loss.detach().item(), "metrics": metrics}

    def packed(self, micro_batch: TensorDict) -> tuple[PackedRows, Tensor]:
        """The samples of a micro-batch in one sequence, and the offsets of the samples in it."""
        mode = tu.get_non_tensor_data(data=micro_batch, key="pad_mode", default=DatasetPadMode.NO_PADDING)
        if mode != DatasetPadMode.NO_PADDING:
            raise ValueError(f"pad_mode {mode} is not supported by the engine longcontext: use no_padding")
        ids, positions = micro_batch["input_ids"], micro_batch["position_ids"]
        if positions.dim() != 2 or "multi_modal_inputs" in micro_batch:
            raise ValueError("the engine longcontext is for texts: images and positions of several kinds are refused")
        batch = {"input_ids": ids.values()[None], "position_ids": positions.values()[None]}
        return PackedRows.of(self.context.layout, self.context.fpdt, batch, shared=False), ids.offsets()

    def scores_of(self, micro_batch: TensorDict) -> dict[str, Tensor]:
        """Jagged ``log_probs``, and ``entropy`` if it is wanted: entry i is of token i + 1, the last of a sample 0."""
        temperature = micro_batch["temperature"]
        if isinstance(temperature, Tensor):
            if temperature.numel() > 1 and bool((temperature != temperature.flatten()[0]).any()):
                raise ValueError("temperatures differ within a micro-batch: the engine longcontext needs one")
            temperature = float(temperature.flatten()[0])
        wanted = tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)
        packed, offsets = self.packed(micro_batch)
        following = packed.tokens.roll(-1)[None]
        own = packed.cut(shift_labels=(packed.same_sample(following), IGNORED))
        part = replace(packed.part, scoring={"temperature": temperature, "entropy": wanted})
        scores = self.module(**own, **{PART: part})
        names = ("log_probs", "entropy")[: 1 + wanted]
        return {name: self._jagged(packed, getattr(scores, name), offsets) for name in names}

    @staticmethod
    def _jagged(packed: PackedRows, own: Tensor, offsets: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(packed.unpacked(own)[0], offsets)

    def optimizer_zero_grad(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        """Clip and update; a step whose norm is not finite is left out. Returns the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.optimizer_config.clip_grad)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if norm.isfinite():
            self.optimizer.step()
        else:
            self.optimizer.zero_grad()
        return norm.item()

    def lr_scheduler_step(self) -> float:
        self.lr_scheduler.step()
        return self.lr_scheduler.get_last_lr()[0]

    # ---- Weights for rollouts.

    def get_per_tensor_param(self, **_: Any) -> tuple[Named, None]:
        """Whole parameters, one after another, under transformers' names; every rank calls it."""
        dtype, device = getattr(torch, self.engine_config.dtype), get_device_id()

        def whole() -> Named:
            for name, value in self.module.state_dict().items():
                value = value.to(device)
                value = value.full_tensor() if isinstance(value, DTensor) else value
                yield name, value.to(dtype) if value.is_floating_point() else value

        return whole(), None

    def get_per_tensor_param_shard(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor, ShardSpec]], None]:
        """This rank's part of each parameter, flat, and where it lies."""
        dtype, device = getattr(torch, self.engine_config.dtype), get_device_id()

        def parts() -> Iterator[tuple[str, Tensor, ShardSpec]]:
            for name, value in self.module.state_dict().items():
                local = (value.to_local() if isinstance(value, DTensor) else value).to(device)
                yield (
                    name,
                    (local.to(dtype) if local.is_floating_point() else local).flatten(),
                    ShardSpec.from_param(value),
                )

        return parts(), None

    def get_per_tensor_param_delta_shard(self, **_: Any) -> tuple[Iterator[Any], None]:
        """What has changed of this rank's parts since the last call, or since :meth:`prime_delta_snapshots`."""
        self._delta_shard_snap = getattr(self, "_delta_shard_snap", {})
        return hf_delta_export(self.get_per_tensor_param_shard()[0], self._delta_shard_snap, _hf_entry_identity), None

    # ---- Checkpoints, in PyTorch's distributed format: any number of ranks may read them.

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Write weights, optimizer and schedule; with ``hf_model`` also the weights in transformers' form."""
        if hdfs_path is not None:
            raise ValueError("hdfs_path is not supported by the engine longcontext: copy local_path yourself")
        self._with_device(lambda: checkpoint.save(self._state(), checkpoint_id=os.path.join(local_path, "state")))
        if "hf_model" in (getattr(self.checkpoint_config, "save_contents", None) or ()):
            weights = dict(self._with_device(lambda: list(self.get_per_tensor_param()[0])))
            if dist.get_rank() == 0:
                self.module.save_pretrained(os.path.join(local_path, "huggingface"), state_dict=weights)
        if dist.get_rank() == 0 and self.model_config.tokenizer is not None:
            self.model_config.tokenizer.save_pretrained(os.path.join(local_path, "huggingface"))
        self._saved = [path for path in self._saved if path != local_path] + [local_path]
        while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
            oldest = self._saved.pop(0)
            if dist.get_rank() == 0:
                shutil.rmtree(oldest, ignore_errors=True)
        dist.barrier()

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False, **_: Any
    ) -> None:
        """Read what :meth:`save_checkpoint` wrote."""

        def load() -> None:
            state = self._state()
            checkpoint.load(state, checkpoint_id=os.path.join(local_path, "state"))
            optimizers = [] if self.optimizer is None else [self.optimizer]
            set_state_dict(
                self.module, optimizers, model_state_dict=state["model"], optim_state_dict=state.get("optimizer", {})
            )
            if self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(state["schedule"])

        self._with_device(load)
        dist.barrier()

    def _state(self) -> dict[str, Any]:
        optimizers = [] if self.optimizer is None else [self.optimizer]
        model, optimizer = get_state_dict(self.module, optimizers, options=StateDictOptions(cpu_offload=False))
        if self.optimizer is None:
            return {"model": model}
        return {"model": model, "optimizer": optimizer, "schedule": self.lr_scheduler.state_dict()}

    def _with_device(self, work: Callable[[], Any]) -> Any:
        """``work`` with everything on the device, where it is moved for this time if it waits in host memory."""
        moved = self.is_param_offload_enabled, self.is_optimizer_offload_enabled
        self.to(get_device_name(), *moved, grad=False)
        try:
            return work()
        finally:
            self.to("cpu", *moved, grad=False)


@EngineRegistry.register(model_type="value_model", backend="longcontext", device=["cuda", "cpu"])
class LongContextValueEngine(LongContextEngine):
    """An engine for critics: the value of each token, from a head with one output."""

    architecture = AutoModelForSequenceClassification

    def initialize(self) -> None:
        self.model_config.hf_config.num_labels = 1
        super().initialize()

    def scores_of(self, micro_batch: TensorDict) -> dict[str, Tensor]:
        packed, offsets = self.packed(micro_batch)
        values = self.module(**packed.cut(), **{PART: packed.part}).logits.squeeze(-1)
        return {"values": self._jagged(packed, values, offsets)}


class _Mode(BaseEngineCtx):
    """Training or evaluation, with parameters and states on the device."""

    def __init__(self, engine: LongContextEngine, mode: str, **kwargs: Any) -> None:
        super().__init__(engine=engine, mode=mode, **kwargs)

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, trace)
