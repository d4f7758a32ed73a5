# SPDX-License-Identifier: Apache-2.0
"""The programs of ``programs.py`` over ranks, by the public functions of ``megatron.context_parallel``."""

from __future__ import annotations

import functools
import re
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import megatron.context_parallel as cp
from megatron.context_parallel.fpdt.chunked_ffn import apply_in_chunks, even_spans
from megatron.context_parallel.fpdt.chunked_loss import chunked_linear_cross_entropy
from megatron.context_parallel.layout.grid import make_grid
from tests.programs import (
    MASKS,
    WIDTH,
    WITH_TOKENS_MIXED,
    WORDS,
    Program,
    differentiate,
    ends,
    mask_of,
    named,
    parameters,
    plain_loss,
    plain_step,
    project,
    sample_masks,
    targets,
    weight,
)

LINES = {  # by what it says: refusals of one line, and of which programs they are right
    r"a sequence of \d+ tokens cannot be cut over": lambda p, u, r: True,
    r"a sequence of \d+ tokens cannot be cut in \d+ chunks": lambda p, u, r: any(s.chunks > 1 for s in p.steps),
    r"q is .*: cast them to one dtype": lambda p, u, r: any(s.mixed for s in p.steps),
    r"a second backward pass through (a chunked layer|the chunked loss) is not supported": lambda p, u, r: (
        p.backward == "twice" and (p.loss == "cross entropy" or any(s.kind == "chunked" for s in p.steps))
    ),
}


def as_it_is(x: Tensor) -> Tensor:
    return x


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 1.5


def refusal(program: Program, error: Exception, ulysses: int, ring: int) -> str | None:
    """What a refusal of one line says, where it is right."""
    text = str(error)
    for line, right in LINES.items():
        if isinstance(error, (ValueError, RuntimeError)) and re.match(line, text) and right(program, ulysses, ring):
            return line if "\n" not in text else None
    return None


def run_on_ranks(programs: list[Program], ulysses: int, ring: int) -> list[dict[str, Tensor] | str]:
    """The whole results of each, or how it was refused.

    Raises:
        AssertionError: an error that is no refusal of one line.
    """
    grid, found = make_grid(ulysses=ulysses, ring=ring), []
    for program in programs:
        try:
            found.append(run(program, grid))
        except Exception as error:
            line = refusal(program, error, ulysses, ring)
            if line is None:
                raise AssertionError(f"Ulysses {ulysses} x Ring {ring}: {program}") from error
            found.append(line)
    forget()
    return found if dist.get_rank() == 0 else []


def forget() -> None:
    """Empty the caches, whose layouts hold this job's process groups, and gloo's threads with them."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.context_parallel"):
            for one in vars(module).values():
                if isinstance(one, functools._lru_cache_wrapper):
                    one.cache_clear()


def run(program: Program, grid: cp.Grid) -> dict[str, Tensor]:
    documents = ends(program.length) if program.balance == "documents" else ()
    layout = cp.SequenceLayout(program.length, grid, program.balance, document_ends=documents)
    params = parameters(program)
    mask = MASKS[program.mask](program.length) if program.mask else None
    with cp.context_parallel(layout, mask=mask, kernel=program.kernel):
        with torch.autocast("cpu", torch.bfloat16, enabled=program.dtype == "autocast"):
            y = layout.shard(params["x"])
            for i, step in enumerate(program.steps):
                function = partial(one_step, program, i, layout=layout, params=params)
                # PyTorch's reentrant one needs an input that wants a gradient, and .backward().
                reentrant_works = y.requires_grad and program.backward != "grad"
                if step.checkpoint == "not reentrant" or (step.checkpoint and reentrant_works):
                    y = checkpoint(function, y, use_reentrant=step.checkpoint == "reentrant")
                else:
                    y = function(y)
                y = _Wrong.apply(y) if program.wrong and i == len(program.steps) - 1 else y
            loss = loss_of(program, y, layout, params)
        found = differentiate(program, y, loss, params)
    for name, x in found.items():
        if name == "y":
            found[name] = layout.gather(x)
        elif grid.context.size > 1:  # that of x too: every rank cut its part of it
            dist.all_reduce(x, group=grid.context.group)
    return found


def one_step(program: Program, i: int, x: Tensor, *, layout: cp.SequenceLayout, params: dict[str, Tensor]) -> Tensor:
    step, p = program.steps[i], named(program, i, params)
    if step.kind not in WITH_TOKENS_MIXED and step.kind != "apply":
        here = {**params, **{f"{i}.{name}": layout.shard(t) if name == "place" else t for name, t in p.items()}}
        return plain_step(program, i, x, here, as_it_is)
    if step.kind == "apply":
        spans = even_spans(x.size(0), step.pieces)
        function = lambda part, _: torch.tanh(F.linear(part, p["first"])) @ weight(step, p)  # noqa: E731
        return apply_in_chunks(function, x, [*p.values(), p["out"]], spans)
    if step.kind == "chunked":
        return chunked(program, step, p, x, layout)
    if step.kind in ("mha", "encoder"):
        return layer_of_pytorch(program, step, p, x)
    q, k, v = project(x, p, step.kv_heads, as_it_is)
    if step.mixed:
        k = k.half()
    if step.kind == "operator":
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=not program.mask, enable_gqa=True).permute(2, 0, 1, 3)
    else:
        masks = [MASKS[name](program.length) for name in sample_masks(step.mask, x.size(1))]
        masks = masks if step.mask == "each" else masks[0]
        more = {"softcap": step.softcap, "sinks": p.get("sinks")}
        out = cp.attention(q, k, v, layout=layout, mask=masks, kernel=program.kernel, **more)
    out = F.linear(out.flatten(2), weight(step, p))
    return x + out if step.residual else out


def chunked(program: Program, step, p: dict[str, Tensor], x: Tensor, layout: cp.SequenceLayout) -> Tensor:
    """A layer in chunks, whose layout may deal tokens otherwise."""
    other = cp.SequenceLayout(
        program.length, layout.grid, program.balance, step.chunks, document_ends=layout.document_ends
    )
    mask = MASKS[mask_of(program, step)](program.length)
    layer = cp.ChunkedLayer(
        lambda x, _: (lambda q, k, v: (q, k.half() if step.mixed else k, v))(*project(x, p, step.kv_heads, as_it_is)),
        lambda out, x, _: (x if step.residual else 0) + F.linear(out.flatten(2), weight(step, p)),
        [*p.values(), p["out"]],
        other,
        cp.AttentionRule(mask, program.kernel, softcap=step.softcap, sinks=p.get("sinks")),
        ffn=lambda y: y + torch.tanh(F.linear(y, p["first"])),
        ffn_pieces=step.pieces,
        offload=cp.Offload(torch.device("cpu")) if step.host else None,
        streamed=step.host == "streamed",
        recompute=step.recompute,
    )
    if step.chunks == 1:
        return layer(x)
    return layout.shard(other.gather(layer(other.shard(layout.gather(x)))))


def layer_of_pytorch(program: Program, step, p: dict[str, Tensor], x: Tensor) -> Tensor:
    causal = not program.mask
    mask = nn.Transformer.generate_square_subsequent_mask(x.size(0), dtype=x.dtype) if causal else None
    attention = {"in_proj_weight": p["qkv"], "in_proj_bias": p["bias"], "out_proj.weight": p["out"]}
    attention["out_proj.bias"] = p["out_bias"]
    if step.kind == "mha":
        layer = nn.MultiheadAttention(WIDTH, 4, device="meta")
        given = {"need_weights": False, "attn_mask": mask, "is_causal": causal}
        return torch.func.functional_call(layer, attention, (x, x, x), given)[0]
    layer = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, 0.0, F.gelu, device="meta")
    both = {f"self_attn.{name}": value for name, value in attention.items()}
    for name in ("1", "2"):
        both |= {f"linear{name}.weight": p["first"], f"linear{name}.bias": p["out_bias"]}
        both |= {f"norm{name}.weight": p["norm"], f"norm{name}.bias": torch.zeros_like(p["norm"])}
    return torch.func.functional_call(layer, both, (x,), {"src_mask": mask, "is_causal": causal})


def loss_of(program: Program, y: Tensor, layout: cp.SequenceLayout, params: dict[str, Tensor]) -> Tensor:
    parts = tuple(layout.shard(part) for part in targets(program))
    if program.loss != "cross entropy":
        return plain_loss(program, y, params, as_it_is, parts)
    words = params[f"{len(program.steps)}.words"]
    weights = torch.ones_like(parts[1], dtype=y.dtype)
    return chunked_linear_cross_entropy(y, words, parts[1], weights, chunks=3, vocab_size=WORDS)
