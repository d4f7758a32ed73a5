# SPDX-License-Identifier: Apache-2.0
"""Run megatron-core on a CPU.

megatron-core is written for GPUs: it calls ``torch.cuda.current_device()``, makes tensors on ``"cuda"`` and compares
type names with ``"torch.cuda.FloatTensor"``. On a CPU these words are replaced in the code objects of the modules below
(``torch.cuda`` -> ``torch.cpu``, ``"cuda"`` -> ``"cpu"``, ``"torch.cuda.FloatTensor"`` -> ``"torch.FloatTensor"``).
Nothing outside megatron-core is changed, nothing is wrapped, and there is no cost at run time.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
import types
from typing import Any

import torch

# The modules, each with code that needs the replacement (megatron-core 0.16.1).
MODULES = (
    "tensor_parallel.layers",  # torch.empty(..., device=torch.cuda.current_device())
    "tensor_parallel.mappings",  # output buffers of the gathers
    "tensor_parallel.utils",  # gather_split_1d_tensor
    "tensor_parallel.data",  # device='cuda'
    "distributed.param_and_grad_buffer",  # gradient and parameter buffers
    "distributed.distributed_data_parallel",  # torch.cuda.synchronize()
    "distributed.finalize_model_grads",
    "optimizer.clip_grads",  # assert param.grad.type() == 'torch.cuda.FloatTensor'
    "optimizer.distrib_optimizer",  # type names; main parameters on the current device
    "optimizer.optimizer",  # found_inf = torch.tensor(..., device='cuda')
    "optimizer.grad_scaler",  # the loss scale
    "pipeline_parallel.p2p_communication",  # receive buffers, synchronize()
    "pipeline_parallel.schedules",  # total_num_tokens
    "models.common.language_module.language_module",  # weight.data.cuda()
    "models.common.embeddings.language_model_embedding",
    "transformer.moe.token_dispatcher",  # torch.cuda.Stream()
    "transformer.utils",
    "utils",  # local_multi_tensor_l2_norm
    "dist_checkpointing.exchange_utils",  # init_data("cuda")
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver",
)

WORDS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


def run_core_on_cpu() -> None:
    """Replace the words in megatron-core's modules. A second call has no further effect."""
    from megatron.core import jit

    jit.disable_jit_fuser()  # torch.compile needs a C++ compiler and pays off on GPUs only
    for name in MODULES:
        _exchange_in_module(importlib.import_module(f"megatron.core.{name}"))
    _use_cpu_random_state()
    _load_loss_scale_on_cpu()


def processor_name() -> str:
    """The processor's name, for logs."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _exchange_in_module(module: types.ModuleType) -> None:
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, type):
            for member in vars(value).values():
                _exchange_in_function(member)
        else:
            _exchange_in_function(value)


def _exchange_in_function(member: Any) -> None:
    """Replace the words in a function, also inside staticmethod, property and decorators."""
    for attribute in ("__func__", "fget", "fset", "__wrapped__"):
        inner = getattr(member, attribute, None)
        if inner is not None:
            _exchange_in_function(inner)
    if isinstance(member, types.FunctionType):
        member.__code__ = _exchange_in_code(member.__code__)


def _exchange_in_code(code: types.CodeType) -> types.CodeType:
    names = tuple("cpu" if name == "cuda" else name for name in code.co_names)
    constants = tuple(_exchange_constant(constant) for constant in code.co_consts)
    if names == code.co_names and constants == code.co_consts:
        return code
    return code.replace(co_names=names, co_consts=constants)


def _exchange_constant(constant: Any) -> Any:
    if isinstance(constant, str):
        return WORDS.get(constant, constant)
    if isinstance(constant, (tuple, frozenset)):
        return type(constant)(_exchange_constant(item) for item in constant)
    if isinstance(constant, types.CodeType):
        return _exchange_in_code(constant)
    return constant


def _use_cpu_random_state() -> None:
    """The random states that core keeps per region (dropout, recompute) become states of the CPU generator."""
    from megatron.core.tensor_parallel import random as core_random

    def get_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    def add(self: core_random.CudaRNGStatesTracker, name: str, seed: int) -> None:
        if name in self.states_ or seed in self.seeds_:
            raise ValueError(f"random state {name} (seed {seed}) already exists")
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()
        self._is_initialized = True

    core_random._get_cuda_rng_state = get_state
    core_random._set_cuda_rng_state = set_state
    core_random.CudaRNGStatesTracker.add = add
    # Core warns if the CPU's random state has changed within a fork of the state; here this is intended.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _load_loss_scale_on_cpu() -> None:
    """core loads the loss scale with ``.cuda(device)``; ``.cpu`` takes no device."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    def load_state_dict(self: DynamicGradScaler, state_dict: dict[str, Any]) -> None:
        self._scale = state_dict["scale"].to("cpu")
        self._growth_tracker = state_dict["growth_tracker"]
        self._hysteresis_tracker = state_dict["hysteresis_tracker"]

    DynamicGradScaler.load_state_dict = load_state_dict
