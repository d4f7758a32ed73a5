# SPDX-License-Identifier: Apache-2.0
"""Runs a program on one rank and records losses, gradients, norm and updates, on request also all modules' results."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron.certifying.of_torch.choices import Choice, Choices, Flip, same_choices
from megatron.certifying.of_torch.clipping import Clipped, clipping
from megatron.certifying.of_torch.whole import Models, compiles, modules, readable, uncompiled, whole, whole_tensors
from megatron.certifying.rounding import SAMPLES, Rounding, factor, tensors

Key = tuple  # (kind, name) or (kind, module, number of its call)
Numbers = dict[Key, "Tensor | None"]
LOSS, GRADIENT, NORM, UPDATE = "loss", "gradient", "norm", "update"
INPUT, OUTPUT, BACKWARD, WEIGHT = "input", "output", "gradient of output", "weight"


@dataclass
class Outcome:
    """What a program returns on each rank after one step.

    Attributes:
        model: the model, which may be wrapped by DDP, FSDP or torch.compile; if a rank holds only a part of it, a list
            of models with the names of the whole one, or modules by the names that they have on one process.
        losses: of the whole batch: one, or one for each step. None on a rank that has none, as in a pipeline. A text
            is a number that was rounded to its last digit.
        gradients: of the first step, of whole parameters, before clipping. Default: ``.grad`` of the parameters, read
            before the first step of an optimizer; without an optimizer, at the end.
        norm: gradient norm by which the gradients were clipped. Default: that of torch's clip_grad_norm_.
        updates: changes of whole parameters. Default: those made by the steps of an optimizer.
        positions: positions of this rank's tokens in the sequence, in local order; or such a tensor for each length
            that activations have. Default: derived from the activations of the first module.
        calls: (first, step): call n of a module on this rank has the samples of call ``first + step * n`` on one
            process.
    """

    model: Models
    losses: float | Tensor | Sequence[float | Tensor | str] | None = None
    gradients: Mapping[str, Tensor | None] | None = None
    norm: float | Tensor | None = None
    updates: Mapping[str, Tensor] | None = None
    positions: Tensor | Mapping[int, Tensor] | None = None
    calls: tuple[int, int] = (0, 1)


Program = Callable[..., Outcome]  # called with the sizes of the grid, for example ulysses=2, ring=1


@dataclass
class Recording:
    """The numbers of one rank.

    Attributes:
        numbers: by kind and name, in the order in which they were computed.
        exact: by key, changes that may be lost: of a parameter's update, the last bit of the parameter's largest entry;
            of a loss that is a text, half of its last digit.
        compiled: whether torch.compile compiled a part of the program.
        choices: those that were made, if they were recorded.
        flips: choices that were made otherwise than on one process, and replaced by those.
    """

    numbers: Numbers
    positions: dict[int, Tensor] = field(default_factory=dict)
    calls: tuple[int, int] = (0, 1)
    exact: dict[Key, float] = field(default_factory=dict)
    compiled: bool = False
    choices: list[Choice] = field(default_factory=list)
    flips: list[Flip] = field(default_factory=list)


@dataclass
class Reference:
    """The numbers of one process, and the largest error that rounding may cause in each of them.

    Attributes:
        tied: whether rounding changes choices among scores, so that the limits are those of other choices.
    """

    recording: Recording
    noise: dict[Key, float]
    samples: int
    tied: bool = False

    def limits(self, comparisons: int) -> dict[Key, float]:
        """The largest error to accept for each number, if ``comparisons`` errors are compared in all."""
        times = factor(self.samples, comparisons)
        return {key: times * noise for key, noise in self.noise.items()}

    def choices(self, ranks: int) -> list[Choice]:
        """The choices of one process with the largest error of their scores, for the ranks of a grid to replay."""
        times = factor(self.samples, len(self.recording.choices) * ranks)
        return [replace(choice, limit=times * choice.limit) for choice in self.recording.choices]


def record(
    program: Program, sizes: Mapping[str, int], watch: bool = False, nudge: Any = None,
    choices: Sequence[Choice] | None = None,
) -> Recording:  # fmt: skip
    """Run the program on this rank.

    Args:
        sizes: of the grid, passed to the program by name.
        watch: also keep inputs, outputs and gradients of all modules.
        nudge: a context in which one token is changed (:class:`sight.Nudge`).
        choices: record choices among scores, and replay these of one process where the scores are the same.
    """
    if groups := sys.modules.get("megatron.context_parallel.core.groups"):
        groups.forget_grid()  # of an earlier call, if the program uses this library
    with ExitStack() as stack:
        if watch:
            stack.enter_context(uncompiled())
        chosen = Choices(choices or ())
        clipped = stack.enter_context(clipping())
        before = stack.enter_context(_first_update(clipped))
        calls = stack.enter_context(_watched(chosen.inside, before)) if watch else []
        if nudge is not None:
            stack.enter_context(nudge)
        if choices is not None:
            stack.enter_context(chosen)
        outcome = program(**sizes)
    if outcome is None:
        raise ValueError("the program returned nothing: return (model, loss), or use --loss with a text that it prints")
    if not isinstance(outcome, Outcome):
        if not isinstance(outcome, tuple) or len(outcome) != 2:
            what = f"{len(outcome)} values" if isinstance(outcome, tuple) else f"a {type(outcome).__name__}"
            raise ValueError(f"the program returned {what}: return (model, loss), or an Outcome")
        outcome = Outcome(*outcome)
    if outcome.norm is None and len(clipped.norms) == 1:
        outcome.norm = whole(clipped.norms[0])
    result = Recording(
        _numbers(outcome, before, clipped, calls), calls=outcome.calls, compiled=compiles(), flips=chosen.flips
    )
    names = {id(m): name for name, m in modules(outcome.model)}
    for module, choice in chosen.made:
        result.choices.append(replace(choice, module=names.get(module, "")))
    if outcome.updates is None and not _holds_parts(outcome):
        for name, x in whole_tensors(outcome.model, lambda parameter: parameter).items():
            if x.numel():
                result.exact[UPDATE, name] = float(x.abs().max()) * torch.finfo(x.dtype).eps
    for number, loss in enumerate(outcome.losses if isinstance(outcome.losses, Sequence) else ()):
        if isinstance(loss, str) and math.isfinite(float(loss)):
            result.exact[LOSS, str(number)] = 0.5 * 10.0 ** Decimal(loss).as_tuple().exponent
    positions = outcome.positions
    if positions is not None:
        by_length = positions if isinstance(positions, Mapping) else {len(positions): positions}
        result.positions = {length: positions.cpu() for length, positions in by_length.items()}
    return result


def measure(program: Program, sizes: Mapping[str, int], watch: bool = False, samples: int = SAMPLES) -> Reference:
    """Run the program on one process, and again with changed last bits."""
    first = record(program, sizes, watch, choices=() if watch else None)
    noise = {key: _smallest(key, x, first) for key, x in first.numbers.items() if x is not None}
    before, tied = None, False
    for seed in range(samples):
        choices = Choices(first.choices, same_calls=True)
        with Rounding(seed, choices):
            again = record(program, sizes, watch)
        chosen = [choice for _, choice in choices.made]
        for one, other in zip(first.choices, chosen):
            one.limit = max(one.limit, one.difference(other))
        tied = tied or before is not None and not same_choices(before, chosen)
        before = chosen
        for key in noise:
            other = again.numbers.get(key)
            noise[key] = max(noise[key], float("inf") if other is None else error(key, other, first.numbers[key]))
    return Reference(first, noise, samples, tied)


def _smallest(key: Key, x: Tensor, recording: Recording) -> float:
    """The error of a result that is rounded once."""
    lost = recording.exact.get(key, 0.0) / max(float(x.abs().max()), 1e-300) if x.numel() else 0.0
    return max(torch.finfo(x.dtype).eps, lost)


def error(key: Key, x: Tensor, right: Tensor) -> float:
    """Error of ``x``: its largest deviation over the largest entry of ``right``; for an update, in the Euclidean norm.

    The largest deviation would say nothing about Adam's first update: all its entries have the same size, and their
    signs are random where a gradient is almost zero.
    """
    if x.shape != right.shape:
        return float("inf")
    if not right.numel():
        return 0.0
    x, right = x.double(), right.double()
    difference = x - right
    if key[0] == UPDATE:
        off, size = difference.norm(), right.norm()
    else:
        off, size = difference.abs().max(), right.abs().max()
    if not bool(off.isfinite()):
        return float("inf")
    return float(off / size) if float(size) else float("inf") if float(off) else 0.0


def _holds_parts(outcome: Outcome) -> bool:
    """Whether the program gives its gradients itself, with modules whose parameters are parts of the whole ones."""
    return outcome.gradients is not None and isinstance(outcome.model, Mapping)


def _numbers(
    outcome: Outcome, before: dict[int, tuple[Tensor, Tensor | None]], clipped: Clipped, calls: list[_Call]
) -> Numbers:
    numbers: Numbers = {}
    losses = outcome.losses if isinstance(outcome.losses, Sequence) else [outcome.losses]
    for number, loss in enumerate(loss for loss in losses if loss is not None):
        loss = float(loss) if isinstance(loss, str) else loss
        numbers[LOSS, str(number)] = torch.as_tensor(loss, dtype=_wide(loss)).detach().cpu().reshape(())
    names = {id(m): name for name, m in modules(outcome.model)}
    counts: dict[Key, int] = {}
    for call in calls:
        name = names.get(call.module)
        if name is None:
            continue
        kind = (name, call.records)  # with activation checkpointing, a module runs without and then with a graph
        number = counts[kind] = counts.get(kind, -1) + 1
        at = (name, number if call.records else -1 - number)
        numbers |= {(INPUT, *at): call.input, (OUTPUT, *at): call.output, (BACKWARD, *at): call.gradient}
        numbers |= {(WEIGHT, name, own): weight for own, weight in call.weights.items()}
    gradients, updates = outcome.gradients, outcome.updates
    if gradients is None:
        gradients = whole_tensors(
            outcome.model, lambda p: before[id(p)][1] if id(p) in before else clipped.unclipped(p)
        )
    if updates is None and not _holds_parts(outcome):
        after = whole_tensors(outcome.model, lambda p: p if id(p) in before else None)
        old = whole_tensors(outcome.model, lambda p: before[id(p)][0] if id(p) in before else None)
        updates = {name: x - old[name] for name, x in after.items() if x is not None}
    for name, gradient in gradients.items():
        numbers[GRADIENT, name] = None if gradient is None else whole(gradient.detach()).cpu().clone()
    if outcome.norm is not None:
        numbers[NORM, ""] = torch.as_tensor(outcome.norm, dtype=_wide(outcome.norm)).detach().cpu().reshape(())
    for name, update in (updates or {}).items():
        numbers[UPDATE, name] = update.detach().cpu().clone()
    return numbers


def _wide(value: Any) -> torch.dtype:
    """The dtype of a number; fp32 for a Python number, which may come from a tensor of any dtype."""
    return value.dtype if isinstance(value, Tensor) and value.is_floating_point() else torch.float32


@dataclass
class _Call:
    module: int
    records: bool  # whether a graph for the backward pass is made
    input: Tensor | None
    output: Tensor
    weights: dict[str, Tensor]  # the module's own, before its first call
    gradient: Tensor | None = None

    def keep_gradient(self, gradient: Tensor | None) -> None:
        self.gradient = None if gradient is None else _copy(gradient)


@contextmanager
def _watched(inside: list[int], stepped: Mapping[int, Any]) -> Iterator[list[_Call]]:
    """Record the modules' calls until an optimizer has ``stepped``, in the order in which they end: children first.

    ``inside`` is kept as the ids of the modules that run.
    """
    calls: list[_Call] = []
    inputs: dict[int, list[Tensor | None]] = {}
    weights: dict[int, dict[str, Tensor]] = {}

    def before(module: nn.Module, args: Any) -> None:
        inside.append(id(module))
        if id(module) not in weights:
            own = module.named_parameters(recurse=False)
            weights[id(module)] = {name: whole(weight.detach()).cpu().clone() for name, weight in own}
        inputs.setdefault(id(module), []).append(_first(args))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        while inside and inside.pop() != id(module):
            pass  # a module that recomputation left before its end
        given, x = inputs.get(id(module)), _activation(output)
        entered, out = given.pop() if given else None, _first(output)
        if x is None or out is None or stepped:
            return
        calls.append(_Call(id(module), x.requires_grad, entered, out, weights[id(module)]))
        weights[id(module)] = {}
        if x.requires_grad:
            x.register_hook(calls[-1].keep_gradient)

    hooks = [
        modules_of_torch.register_module_forward_pre_hook(before),
        modules_of_torch.register_module_forward_hook(after),
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _activation(value: Any) -> Tensor | None:
    """The first tensor of floating-point numbers that is not a single number: models may return their loss first."""
    return next((x for x in tensors(value) if x.is_floating_point() and x.dim()), None)


def _first(value: Any) -> Tensor | None:
    """A copy of the activation."""
    first = _activation(value)
    return None if first is None else _copy(first)


def _copy(x: Tensor) -> Tensor | None:
    x = readable(x)
    return None if x is None else x.cpu().clone()


@contextmanager
def _first_update(clipped: Clipped) -> Iterator[dict[int, tuple[Tensor, Tensor | None]]]:
    """Weights, and gradients without clipping, before the first step of each optimizer, by the parameter's id."""
    kept: dict[int, tuple[Tensor, Tensor | None]] = {}

    def before(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in kept:
                    kept[id(parameter)] = parameter.detach().clone(), clipped.unclipped(parameter)

    hook = register_optimizer_step_pre_hook(before)
    try:
        yield kept
    finally:
        hook.remove()
