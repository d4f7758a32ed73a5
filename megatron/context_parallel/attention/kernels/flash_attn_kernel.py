# SPDX-License-Identifier: Apache-2.0
"""The flash-attn package: version 3 (``flash_attn_interface``) on Hopper if it is installed, else version 2.

The low-level functions are private, and their arguments change between releases. Therefore all arguments are passed by
name, and only those that the installed release has: see `_call`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.fused_kernel import FusedKernel


class FlashAttnKernel(FusedKernel):
    """The package's kernel for this GPU."""

    name = "flash_attn"

    def missing(self, device: torch.device, head_dim: int) -> str | None:
        library = _library(torch.cuda.get_device_capability(device) == (9, 0))
        return library if isinstance(library, str) else None

    def call(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        results = _call(
            _library_for(q)._flash_attn_forward,
            **{name: x.transpose(1, 2) for name, x in (("q", q), ("k", k), ("v", v))},
            **_options(causal, scale),
            return_softmax=False,
        )
        return results[0].transpose(1, 2), _find_lse(results, q)

    def call_grad(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        grads = [torch.empty_like(x.transpose(1, 2)) for x in (q, k, v)]  # [b, s, h, d], written in place
        inputs = {"dout": dout, "q": q, "k": k, "v": v, "out": out}
        _call(
            _library_for(q)._flash_attn_backward,
            **{name: x.transpose(1, 2) for name, x in inputs.items()},
            softmax_lse=lse,
            **dict(zip(("dq", "dk", "dv"), grads)),
            **_options(causal, scale),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return tuple(x.transpose(1, 2) for x in grads)


def _options(causal: bool, scale: float) -> dict[str, Any]:
    """The options of forward and backward, under all names that releases have used."""
    return {
        "softmax_scale": scale,
        "causal": causal,
        "is_causal": causal,
        "dropout_p": 0.0,
        "window_size": (-1, -1),
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


@functools.cache
def _library(hopper: bool) -> ModuleType | str:
    """The module with the low-level functions, or the reason why there is none."""
    reason = "the package flash-attn is not installed"
    for name in ["flash_attn_interface"] * hopper + ["flash_attn.flash_attn_interface"]:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except Exception as error:  # built for another PyTorch: ImportError, OSError or RuntimeError
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            reason = f"{name} cannot be imported: {why}"
            continue
        if hasattr(module, "_flash_attn_forward") and hasattr(module, "_flash_attn_backward"):
            return module
        reason = f"{name} lacks _flash_attn_forward and _flash_attn_backward"
    return reason


def installed_version(capability: tuple[int, int] | None) -> int | None:
    """The version of the package that would run on this GPU: 3 or 2; None without a GPU or a usable package."""
    if capability is None:
        return None
    hopper = capability == (9, 0)
    library = _library(hopper)
    if isinstance(library, str):
        return None
    return 3 if hopper and library is not _library(False) else 2


def _library_for(q: Tensor) -> ModuleType:
    library = _library(q.is_cuda and torch.cuda.get_device_capability(q.device) == (9, 0))
    if isinstance(library, str):
        raise ImportError(f'kernel="flash_attn": {library}')
    return library


@functools.cache
def _parameters(function: Callable[..., Any]) -> dict[str, bool]:
    """Name of each argument -> whether it must be given."""
    op = getattr(function, "_opoverload", None)  # torch.library.custom_op hides the signature of its function
    if op is not None:
        return {argument.name: not argument.has_default_value() for argument in op._schema.arguments}
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _call(function: Callable[..., Any], **values: Any) -> Any:
    """Call ``function`` with the ``values`` that it has as arguments, and None for other required arguments."""
    parameters = _parameters(function)
    return function(**{name: values.get(name) for name, needed in parameters.items() if name in values or needed})


def _find_lse(results: tuple[Tensor, ...], q: Tensor) -> Tensor:
    """lse [b, h, sq] fp32 among the results; its index differs between releases."""
    for x in results[1:]:
        if isinstance(x, Tensor) and x.dtype == torch.float32 and x.dim() == 3 and x.shape[:2] == q.shape[:2]:
            return x[:, :, : q.shape[2]]
    raise RuntimeError(f"flash-attn returned no lse of shape {list(q.shape[:3])}: this release is not supported")
