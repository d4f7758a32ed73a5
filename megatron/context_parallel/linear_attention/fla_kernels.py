# SPDX-License-Identifier: Apache-2.0
"""The kernels of fla-core (flash-linear-attention) for a span of tokens, instead of those of span_maps.py.

Only its three public functions are used, which are differentiable: each takes the states before pieces of a sequence
and returns those after them. Documents are such pieces, because a log-decay of -inf gives NaN there. The map of a
span and what its tokens read of the state before it need no other function: the columns of M are columns of the state
that no value changes, so that the same call returns R, the outputs, M and N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.context_parallel.attention.kernels.base import gpu_reason, package_reason
from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.layout.spans import Span, split
from megatron.context_parallel.linear_attention.rules import LinearRule
from megatron.decisions.state_exchange import FLA_SEGMENT
from megatron.platform.autograd import without_autocast
from megatron.platform.streams import to_device

LARGEST_KEYS, LARGEST_VALUES = 256, 512  # of a head
WANTED = "fla-core>=0.6,<0.7"
SMALLEST_DECAY = -100.0  # of a logarithm: its exp is 0 in fp32, and differences of two are 0, not NaN
PLACES = {
    "gated_delta": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda"),
    "mamba2": ("fla.ops.simple_gla", "chunk_simple_gla"),
    "decay": ("fla.ops.simple_gla", "chunk_simple_gla"),
}


def why_not(rule: LinearRule, *, device: torch.device, dtype: torch.dtype, keys: int, values: int) -> str | None:
    """None if fla's kernel can run on these tensors, else a short reason."""
    if rule.name not in PLACES:
        return f"has no kernel for the rule {rule.name}"
    if dtype == torch.float64:
        return "needs bf16, fp16 or fp32"
    if keys > LARGEST_KEYS or values > LARGEST_VALUES:
        return f"needs heads of at most {LARGEST_KEYS} keys and {LARGEST_VALUES} values"
    return gpu_reason(device) or missing()


@cache
def missing() -> str | None:
    """Why the package cannot be used, or None."""

    def fits(version: str) -> bool:
        return version.split(".")[:2] == ["0", "6"]

    return package_reason("fla-core", WANTED, fits, lambda: [_of(*place) for place in set(PLACES.values())])


def _of(module: str, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return getattr(import_module(module), name)


def _function(rule: LinearRule) -> Callable[..., tuple[Tensor, Tensor]]:
    return _of(*PLACES[rule.name])


@dataclass(frozen=True)
class FlaSpans:
    """Spans of some rows by fla; the methods are those of :class:`~.span_maps.BlockSpans`.

    Attributes:
        starts: bool [rows, samples or 1], on the CPU: whether a document begins at a row; None: nowhere.
    """

    rule: LinearRule
    starts: Tensor | None = None

    @without_autocast
    def outputs(
        self, inputs: Sequence[Tensor], rows: Span, state: Tensor, out: Tensor, reads: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor]:
        entries = []
        for part in self._segments(inputs, rows):
            entries.append(state)
            own = part[0] - rows[0], part[1] - rows[0]
            sliced = [x[slice(*part)] for x in inputs]
            out[slice(*part)], read, state = self._segment(sliced, part, state, reads is not None)
            if reads is not None:
                reads[slice(*own)] = read
        return entries, state

    def differentiable(self, inputs: Sequence[Tensor], rows: Span, state: Tensor) -> Tensor:
        """The outputs alone, for autograd: a call for each segment."""
        results = []
        for part in self._segments(inputs, rows):
            out, _, state = self._segment([x[slice(*part)] for x in inputs], part, state)
            results.append(out)
        return torch.cat(results)

    @without_autocast
    def grads(
        self, inputs: Sequence[Tensor], rows: Span, entries: Sequence[Tensor], dout: Tensor, dstate: Tensor,
        grads: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        for part, state in reversed(list(zip(self._segments(inputs, rows), entries))):
            leaves = [x[slice(*part)].detach().requires_grad_() for x in inputs]
            leaves.append(state.detach().requires_grad_())
            with torch.enable_grad():
                out, _, after = self._segment(leaves[:-1], part, leaves[-1])
            *results, dstate = torch.autograd.grad([out, after], leaves, [dout[slice(*part)], dstate])
            for grad, result in zip(grads, results):
                grad[slice(*part)] = result
        return dstate

    def _segments(self, inputs: Sequence[Tensor], rows: Span) -> list[Span]:
        b, heads, size = inputs[2].shape[1:]
        return split(rows, max(FLA_SEGMENT // (b * heads * (2 * inputs[0].size(3) + size)), 64))

    def _segment(
        self, inputs: Sequence[Tensor], rows: Span, state: Tensor, reads: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Outputs, R and the state after some rows. Differentiable. ``reads``: ``state`` is a packed map."""
        q, k, v, g, beta, *skip = inputs
        keys, values, matrix = q.size(3), v.size(3), None
        pieces = Pieces.of(self.starts, rows, v.size(1))
        if self.rule.delta:
            written = F.pad(v, (keys, 0)) if reads else v
            out, after = self._call((q, k, written, g, beta), state, pieces)
            return (out[..., keys:], out[..., :keys], after) if reads else (out, None, after)
        shared = v.size(2) // q.size(2)
        q, k = (x.repeat_interleave(shared, dim=2) for x in (q, k))
        if reads:  # M is a number for each head
            matrix, state = state.split((1, values), dim=-1)
        out, after = self._call((q, k, (v * beta.unsqueeze(-1)).to(v.dtype), g), state, pieces)
        out = out + (skip[0].unsqueeze(-1) * v).to(out.dtype) if skip else out
        if matrix is None:
            return out, None, after
        decay = g.to(state.dtype).cumsum(0).exp()
        if pieces is not None:
            decay = decay.masked_fill(to_device(pieces.after_start, g.device).unsqueeze(-1), 0.0)
        read = (q * (decay.unsqueeze(-1) * matrix.squeeze(-1))).to(q.dtype)
        return out, read, torch.cat((matrix * decay[-1][..., None, None], after), dim=-1)

    def _call(self, inputs: Sequence[Tensor], state: Tensor, pieces: Pieces | None) -> tuple[Tensor, Tensor]:
        """fla's function on [s, b, heads, ..]: the outputs, and the state after all of it."""
        q, k, v, g, *beta = (x.transpose(0, 1) for x in inputs)
        b, s = v.shape[:2]
        g = g.to(accumulation_dtype(v.dtype)).clamp(min=SMALLEST_DECAY)
        names = {"q": q, "k": k, "v": v, "g": g, **dict(zip(["beta"], beta))}
        how = {"scale": 1.0, "output_final_state": True}
        if pieces is None:
            out, after = _function(self.rule)(**names, **how, initial_state=state.contiguous())
            return out.transpose(0, 1), after
        sample, fresh, last, ends = (to_device(x, v.device) for x in (pieces[:4]))
        before = state[sample].masked_fill(fresh[:, None, None, None], 0.0)
        out, after = _function(self.rule)(
            **{name: x.reshape(1, b * s, *x.shape[2:]) for name, x in names.items()}, **how,
            initial_state=before, cu_seqlens=ends, cu_seqlens_cpu=pieces.ends,
        )  # fmt: skip
        return out.view(b, s, *out.shape[2:]).transpose(0, 1), after[last]


class Pieces(NamedTuple):
    """The pieces of some rows of all samples, one sample after the other; a document or a sample begins with each.

    Attributes:
        sample: of each piece; ``fresh``: whether a document begins with it.
        last: the number of each sample's last piece.
        ends: 0 and the end of each piece, int64, in rows of all samples.
        after_start: bool [rows, samples]: whether a document begins at this row or before it.
    """

    sample: Tensor
    fresh: Tensor
    last: Tensor
    ends: Tensor
    after_start: Tensor

    @classmethod
    def of(cls, starts: Tensor | None, rows: Span, samples: int) -> Pieces | None:
        """None if no document begins in the rows."""
        if starts is None or not starts[slice(*rows)].any():
            return None
        starts = starts[slice(*rows)].expand(-1, samples)
        length = len(starts)
        begins = starts.clone()
        begins[0] = True
        first = begins.T.flatten().nonzero().squeeze(1)
        sample = first // length
        last = torch.searchsorted(sample, torch.arange(samples), right=True) - 1
        ends = torch.cat((first, first.new_tensor([samples * length])))
        return cls(sample, starts.T.flatten()[first], last, ends, starts.cumsum(0) > 0)
