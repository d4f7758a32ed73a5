# SPDX-License-Identifier: Apache-2.0
"""A model's modules and parameters as they would be without wrappers and shards: DDP, FSDP, DTensor, torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

Models = nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module]

WRAPPED = {  # by the class of a wrapper: the name under which it holds the module
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


def whole(x: Tensor) -> Tensor:
    """A DTensor as the complete tensor, and one that still arrives when it is there; all its ranks call this."""
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return x.wait() if hasattr(x, "wait") else x


def readable(x: Tensor) -> Tensor | None:
    """An activation as a whole tensor; None for rows of a split embedding, whose sum over ranks uses up its mask."""
    if any(p.is_partial() and type(p).__name__ != "Partial" for p in getattr(x, "placements", ())):
        return None
    return whole(x.detach())


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, which has no storage of its own."""
    return getattr(x, "_local_tensor", x)


def modules(models: Models) -> Iterator[tuple[str, nn.Module]]:
    """(name without wrappers, module) of all modules that are not wrappers, and not themselves parts in a list."""
    if isinstance(models, Mapping):
        for name, module in models.items():
            yield from ((_joined(name, within), inner) for within, inner in _inner(module))
    else:
        whole_model = isinstance(models, nn.Module)
        for model in [models] if whole_model else models:
            yield from ((name, module) for name, module in _inner(model) if name or whole_model)


def _inner(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    held = wrapped(module)
    if held is None:
        yield name, module
    for child_name, child in module.named_children():
        yield from _inner(child, name if child is held else _joined(name, child_name))


def wrapped(module: nn.Module) -> nn.Module | None:
    """The module that a wrapper holds; None if this is no wrapper."""
    for kind in type(module).__mro__:
        if kind.__name__ in WRAPPED and kind.__module__.startswith("torch."):
            return getattr(module, WRAPPED[kind.__name__])
    return None


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def parameters(models: Models) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter), each parameter once; a flat parameter of FSDP 1 has the name of its module."""
    seen: set[int] = set()
    parts = [("", model) for model in models] if isinstance(models, Sequence) else []
    for name, module in [*modules(models), *parts]:
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield _joined(name, own), parameter


def whole_tensors(models: Models, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor | None]:
    """By parameter's name, the whole tensor of what ``tensor_of`` gives for the parameter on this rank."""
    flat = {id(p): handle for handle in _flat_handles(models) for p in _parameters_of(handle)}
    result: dict[str, Tensor | None] = {}
    for name, parameter in parameters(models):
        own = tensor_of(parameter)
        if id(parameter) in flat:
            result |= _of_flat(name, parameter, own, flat[id(parameter)])
        else:
            result[name] = None if own is None else whole(own.detach())
    return result


def _flat_handles(models: Models) -> Iterator:
    """Handles of the flat parameters of FSDP 1."""
    roots = models.values() if isinstance(models, Mapping) else models
    for root in [models] if isinstance(models, nn.Module) else roots:
        for module in root.modules():
            if getattr(module, "_handle", None) is not None and hasattr(module._handle, "flat_param"):
                yield module._handle


def _parameters_of(handle) -> list[nn.Parameter]:
    return handle.flat_param._params if handle._use_orig_params else [handle.flat_param]


def _of_flat(name: str, parameter: nn.Parameter, own: Tensor | None, handle) -> dict[str, Tensor | None]:
    """The whole tensors of one parameter of FSDP 1, from the ranks that hold parts of it."""
    flat, group = handle.flat_param, handle.process_group
    split = handle.uses_sharded_strategy
    parts = [None if own is None else own.detach()]
    if split:
        parts = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, None if own is None else own.detach().flatten().cpu(), group=group)
    parts = [part for part in parts if part is not None]
    if handle._use_orig_params:
        shape = flat._shapes[next(i for i, one in enumerate(flat._params) if one is parameter)]
        return {name: torch.cat([part.flatten() for part in parts]).view(shape) if parts else None}
    within = name.rpartition(".")[0]
    names = [_joined(within, *_plain(fqn)) for fqn in flat._fqns]
    if not parts:
        return dict.fromkeys(names)
    together, result, at = torch.cat([part.flatten() for part in parts]), {}, 0
    sizes = flat._numels_with_padding if split else flat._numels
    padding = getattr(flat, "_is_padding_mask", [False] * len(sizes))
    shapes = iter(zip(names, flat._shapes))
    for size, is_padding in zip(sizes, padding):
        if not is_padding:
            one, shape = next(shapes)
            result[one] = together[at : at + size].view(shape)
        at += size
    return result


def _plain(fqn: str) -> list[str]:
    return [part for part in fqn.split(".") if part not in WRAPPED.values() or part == "module"]


def uncompiled() -> AbstractContextManager:
    """In this context compiled functions run as they are written, so that their modules and results can be seen."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def compiles() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["frames"].get("ok", 0) > 0
