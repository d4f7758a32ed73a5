# SPDX-License-Identifier: Apache-2.0
"""megatron-core's gradient buckets, optimizer and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_state import get_expert_tensor_parallel_group
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor, nn

from megatron.training.arguments.schedule import spans
from megatron.training.model.core_config import compute_dtype
from megatron.training.model.fsdp import FullySharded
from megatron.training.model.updates.muon import Muon, use_muon
from megatron.training.model.updates.update import parts, use_fused_adam, use_multi_tensor_calls
from megatron.training.model.weights import unwrap
from megatron.training.settings.config import Config, OptimizerSettings
from megatron.training.settings.flag import for_core

# megatron-core scales fp16 losses only in its optimizers of 16-bit weights. Under FSDP (ZeRO 2 and 3) the weights are
# fp32 shards, whose optimizer has no loss scale, so `scale_losses` gives it core's scaler.


class ScaledFP32Optimizer(FP32Optimizer):
    """core's optimizer of fp32 weights, with gradients of a scaled loss."""

    grad_scaler: ConstantGradScaler | DynamicGradScaler

    def get_loss_scale(self) -> Tensor:
        return self.grad_scaler.scale

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Divide the gradients by the scale; returns True (skip the step) if any rank has one that is not finite."""
        super().prepare_grads()
        grads = [
            to_local_if_dtensor(parameter.grad)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        not_finite = torch.zeros(1, dtype=torch.float32, device=self.grad_scaler.scale.device)
        filled = [grad for grad in grads if grad.numel()]  # a small parameter leaves some ranks without a row
        if filled:
            torch._amp_foreach_non_finite_check_and_unscale_(filled, not_finite, self.grad_scaler.inv_scale)
        dist.all_reduce(not_finite, op=dist.ReduceOp.MAX)  # each rank has other shards
        skipped = not_finite.item() > 0
        self.grad_scaler.update(skipped)
        return skipped


def scale_losses(optimizer: FP32Optimizer, settings: OptimizerSettings) -> None:
    """Add a loss scale to core's fp32 optimizer, with the scaler that core chooses for the same settings."""
    if settings.loss_scale:
        optimizer.grad_scaler = ConstantGradScaler(settings.loss_scale)
    else:
        optimizer.grad_scaler = DynamicGradScaler(
            initial_scale=settings.initial_loss_scale,
            min_scale=settings.min_loss_scale,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=settings.loss_scale_window,
            hysteresis=settings.hysteresis,
        )
    # core has made the optimizer and set its groups; the class only adds two methods.
    optimizer.__class__ = ScaledFP32Optimizer


def wrap_for_data_parallelism(
    chunks: Sequence[nn.Module], config: Config
) -> list[DistributedDataParallel | FullySharded]:
    """Wrap each model chunk in core's DDP, or in FSDP with ZeRO 2 and 3. Both sum gradients over DP x CP."""
    parallel = config.parallel
    if parallel.zero_stage >= 2:
        return [FullySharded(chunk, config) for chunk in chunks]
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not parallel.grad_reduce_in_bf16,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.zero_stage == 1,
        bucket_size=parallel.ddp_bucket_size,
        check_for_nan_in_grad=False,  # training/watch.py checks the loss and the gradient norm
    )
    return [
        DistributedDataParallel(chunk.config, settings, in_compute_dtype(chunk, config), disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def in_compute_dtype(chunk: nn.Module, config: Config) -> nn.Module:
    """The model in Float16Module, which casts parameters, inputs and outputs; an fp32 model is returned unchanged."""
    if compute_dtype(config) == torch.float32:
        return chunk
    from megatron.core.transformer.module import Float16Module

    return Float16Module(chunk.config, chunk)


def build_optimizer(chunks: Sequence[DistributedDataParallel | FullySharded], config: Config) -> MegatronOptimizer:
    """Adam, SGD or Muon; with ZeRO 1 its states are split over DP x CP, with ZeRO 2 and 3 they follow the weights."""
    settings, parallel = config.optimizer, config.parallel
    fsdp = parallel.zero_stage >= 2  # the optimizer sees fp32 weights, in any compute dtype
    same = for_core(settings, config)
    core_settings = OptimizerConfig(
        **same | ({"optimizer": "adam"} if settings.optimizer == "muon" else {}),
        fp16=settings.fp16 and not fsdp,
        bf16=settings.bf16 and not fsdp,
        params_dtype=torch.float32 if fsdp else compute_dtype(config),
        use_distributed_optimizer=parallel.zero_stage == 1,
        overlap_param_gather=parallel.overlap_param_gather,
        log_num_zeros_in_grad=config.logging.log_num_zeros_in_grad,
    )
    use_multi_tensor_calls()
    optimizer = get_megatron_optimizer(
        core_settings,
        list(chunks),
        config_overrides=get_standard_config_overrides(core_settings),
        use_gloo_process_groups=dist.get_backend() != "gloo",
    )
    if fsdp:
        for chunk in chunks:  # core then sums shards of norms over TP; otherwise it would gather each norm's gradient
            chunk.ddp_config.use_megatron_fsdp = True
    for part in parts(optimizer):
        if settings.optimizer == "muon":
            use_muon(part, [unwrap(chunk) for chunk in chunks], settings)
        fill_states(part)
        if any(group["is_expert_parallel"] for group in part.param_groups):
            part.tp_group = get_expert_tensor_parallel_group()  # core counts a bias on the first rank of TP
        if fsdp and settings.fp16:
            scale_losses(part, settings)
    core = chunks[0].module.config
    if settings.fp16:
        core.grad_scale_func = optimizer.scale_loss
    elif (scale := float(optimizer.get_loss_scale())) != 1:
        # A function of the optimizer would make a reference cycle with ZeRO 1 in fp32, through views that hold the
        # weights in C++, which garbage collection cannot free.
        core.grad_scale_func = lambda loss: loss * scale
    core.finalize_model_grads_func = finalize_model_grads
    if parallel.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        core.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync  # as core's pipeline schedules expect
    return optimizer


def fill_states(optimizer: MegatronOptimizer) -> None:
    """Give PyTorch's Adam or SGD, or Muon, the states that it would make in its first step.

    core's checkpoints expect these states, and core cannot make them for SGD. A step from zeros equals a first step
    without states.
    """
    inner = optimizer.optimizer
    adam = isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))
    matrices = inner.matrices if isinstance(inner, Muon) else ()
    if not adam and not isinstance(inner, torch.optim.SGD):
        return
    for group in inner.param_groups:
        for parameter in group["params"]:
            if adam and parameter not in matrices:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state = {"step": step, "exp_avg": torch.zeros_like(parameter)}
                inner.state[parameter] = {**state, "exp_avg_sq": torch.zeros_like(parameter)}
            else:
                inner.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    if adam:
        use_fused_adam(optimizer)
    optimizer.init_state_fn = lambda *_: None


def build_schedule(optimizer: MegatronOptimizer, config: Config) -> OptimizerParamScheduler:
    """Learning rate and weight decay as functions of consumed samples or tokens."""
    settings, phases = config.optimizer, spans(config)
    start = settings.weight_decay if settings.start_weight_decay is None else settings.start_weight_decay
    end = settings.weight_decay if settings.end_weight_decay is None else settings.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=phases.warmup,
        lr_decay_steps=phases.decay,
        lr_decay_style=settings.lr_decay_style,
        start_wd=start,
        end_wd=end,
        wd_incr_steps=phases.total,
        wd_incr_style=settings.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=settings.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=settings.override_opt_param_scheduler,
        wsd_decay_steps=phases.last,
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )
