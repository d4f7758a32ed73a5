# SPDX-License-Identifier: Apache-2.0
"""Small random programs of the public functions, and their results by plain PyTorch on one process.

The ``repr`` of a :class:`Program` is Python code, so that a failing one can be pasted into a test. The first half
of this file computes it with only PyTorch; the second half runs it on ranks.
"""

from __future__ import annotations

import functools
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
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

WIDTH, WORDS = 8, 5
WITH_TOKENS_MIXED = ("attention", "operator", "mha", "encoder", "chunked")
BY_CONTEXT = ("operator", "mha", "encoder")  # attention within cp.context_parallel


class Short:
    """Its ``repr`` contains only fields that differ from the defaults."""

    def __repr__(self) -> str:
        output = (f"{field.name}={value!r}" for field in fields(self)
                if (value := getattr(self, field.name)) != field.default)  # fmt: skip
        return f"{type(self).__name__}({', '.join(output)})"


@dataclass(frozen=True, repr=False)
class Step(Short):
    """One operation on [s, b, WIDTH]; each kind ignores fields that it does not need."""

    kind: str = "linear"
    kv_heads: int = 4
    mask: str = "causal"
    checkpoint: str = ""  # or reentrant, not reentrant
    tied: bool = False  # shares the parameters of the first step
    alias: bool = False  # its weight is a sum of two parameters
    chunks: int = 1
    pieces: int = 1
    host: str = ""  # or offload, streamed
    recompute: bool = False
    residual: bool = True
    sinks: bool = False
    softcap: float | None = None
    mixed: bool = False  # keys in another dtype


@dataclass(frozen=True, repr=False)
class Program(Short):
    """Steps, then a loss, then a backward pass."""

    steps: tuple[Step, ...] = (Step(),)
    length: int = 8
    batch: int = 1
    balance: str = "zigzag"
    dtype: str = "float64"  # or float32; autocast: float32 under autocast to bfloat16
    mask: str = ""  # of cp.context_parallel; if empty, calls pass is_causal
    loss: str = "square"
    backward: str = "backward"
    frozen: tuple[int, ...] = ()  # steps whose parameters get no gradients; -1 for x
    seed: int = 0
    wrong: bool = False  # a gradient is falsified, which a check must detect

    @property
    def kernel(self) -> str:
        return ("auto", "math")[self.seed % 2]

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32


MASKS: dict[str, Callable[[int], cp.Causal]] = {
    "causal": lambda n: cp.Causal(),
    "full": lambda n: cp.Full(),
    "window": lambda n: cp.Window(2),
    "both sides": lambda n: cp.Window(1, 2),
    "documents": lambda n: cp.Documents(ends(n)),
    "documents, full": lambda n: cp.Documents(ends(n), cp.Full()),
    "documents, window": lambda n: cp.Documents(ends(n), cp.Window(2)),
    "function": lambda n: cp.MaskFunction(lambda q, k: (q + k) % 3 > 0, cp.Causal()),  # leaves queries without any key
}


def ends(n: int) -> tuple[int, ...]:
    return tuple(sorted({1 + n // 5, 1 + n // 2, n}))


def allowed(name: str, n: int) -> Tensor:
    at = torch.arange(n)
    return MASKS[name](n).allowed(at[:, None], at[None]).expand(n, n)


def heads_first_masks(step: Step, n: int, batch: int) -> Tensor:
    """The masks of all samples, [b, 1, s, s]."""
    return torch.stack([allowed(name, n) for name in sample_masks(step.mask, batch)])[:, None]


def mask_of(program: Program, step: Step) -> str:
    """The mask of an attention step; only cp.attention supports "each"."""
    if step.kind in BY_CONTEXT:
        return program.mask or "causal"
    return "causal" if step.kind == "chunked" and step.mask == "each" else step.mask


def sample_masks(mask: str, batch: int) -> list[str]:
    """The mask of each sample; they differ for "each"."""
    return [["documents", "window", "causal"][i] for i in range(batch)] if mask == "each" else [mask] * batch


def parameters(program: Program) -> dict[str, Tensor]:
    """All tensors of a program by name; names of step i begin with i."""
    dtype, made = program.torch_dtype, {}

    def draw(name: str, *shape: int) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{program.seed} {name}".encode()))
        x = (torch.rand(*shape, generator=generator, dtype=torch.float64) - 0.5).to(dtype)
        who = name.split(".")[0]
        made[name] = x.requires_grad_((-1 if who == "x" else int(who)) not in program.frozen)

    draw("x", program.length, program.batch, WIDTH)
    for i, step in enumerate(program.steps):
        if step.tied and i and step.kind == program.steps[0].kind and step.kv_heads == program.steps[0].kv_heads:
            continue
        wide = WIDTH if step.kind in ("mha", "encoder") else 2 * step.kv_heads
        shapes = {"qkv": (2 * wide + WIDTH, WIDTH), "bias": (2 * wide + WIDTH,), "out": (WIDTH, WIDTH)}
        shapes |= {"out_bias": (WIDTH,), "first": (WIDTH, WIDTH), "place": (program.length, 1, WIDTH), "sinks": (4,)}
        shapes |= {"norm": (WIDTH,), "more": (WIDTH, WIDTH)}
        for name, shape in shapes.items():
            if name in USED[step.kind] and (name != "sinks" or step.sinks) and (name != "more" or step.alias):
                draw(f"{i}.{name}", *shape)
    if program.loss == "cross entropy":
        draw(f"{len(program.steps)}.words", WORDS, WIDTH)
    return made


ATTENTION = ("qkv", "bias", "out", "sinks", "more")
USED = {
    "linear": ("out", "out_bias", "more"),
    "place": ("place",),
    "norm": ("norm",),
    "apply": ("out", "first", "more"),
    "attention": ATTENTION,
    "operator": ("qkv", "bias", "out", "more"),
    "mha": ("qkv", "bias", "out", "out_bias"),
    "encoder": ("qkv", "bias", "out", "out_bias", "first", "out_bias", "norm"),
    "chunked": (*ATTENTION, "first"),
}


def named(program: Program, i: int, params: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of step i by name, without its number; a tied step has those of step 0."""
    own = {name.split(".")[1]: x for name, x in params.items() if name.startswith(f"{i}.")}
    return own or named(program, 0, params)


def weight(step: Step, p: dict[str, Tensor]) -> Tensor:
    return p["out"] + p["more"] if step.alias and "more" in p else p["out"]


def project(x: Tensor, p: dict[str, Tensor], kv_heads: int, noise: Callable) -> tuple[Tensor, ...]:
    wide = [WIDTH, 2 * kv_heads, 2 * kv_heads]
    parts = noise(F.linear(x, p["qkv"], p["bias"])).split(wide, dim=-1)
    return tuple(part.unflatten(-1, (-1, 2)) for part in parts)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, noise: Callable, step: Step, sinks: Tensor | None) -> Tensor:
    """Attention of q, k, v [s, b, heads, 2] by the complete matrix of scores; the result has the shape of q."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = noise(q @ k.mT) * q.size(-1) ** -0.5
    if step.softcap:
        scores = step.softcap * torch.tanh(scores / step.softcap)
    scores = scores.masked_fill(~mask, -1e300)
    if sinks is not None:
        column = sinks[:, None, None].expand(q.size(0), -1, q.size(2), 1)
        scores = torch.cat([scores, column], -1)
    weights = noise(scores.softmax(-1)[..., : k.size(2)])
    return noise((weights * mask) @ v).permute(2, 0, 1, 3)


def plain_step(program: Program, i: int, x: Tensor, params: dict[str, Tensor], noise: Callable) -> Tensor:
    """The result of a step on the complete sequence, computed with only PyTorch."""
    step, p = program.steps[i], named(program, i, params)
    n, batch = x.size(0), x.size(1)
    if step.kind == "linear":
        return torch.tanh(noise(F.linear(x, weight(step, p), p["out_bias"])))
    if step.kind == "place":
        return x * p["place"]
    if step.kind == "norm":
        return F.layer_norm(x, (WIDTH,), p["norm"])
    if step.kind == "apply":
        return noise(torch.tanh(noise(F.linear(x, p["first"]))) @ weight(step, p))
    by_call = replace(step, mask=mask_of(program, step))
    kv_heads = 4 if step.kind in ("mha", "encoder") else step.kv_heads
    attended = dense(*project(x, p, kv_heads, noise), heads_first_masks(by_call, n, batch), noise,
                     step if step.kind in ("attention", "chunked") else Step(), p.get("sinks"))  # fmt: skip
    attended = noise(F.linear(attended.flatten(2), weight(step, p), p.get("out_bias")))
    if step.kind == "encoder":
        x = F.layer_norm(x + attended, (WIDTH,), p["norm"])
        more = noise(F.linear(F.gelu(noise(F.linear(x, p["first"], p["out_bias"]))), p["first"], p["out_bias"]))
        return F.layer_norm(x + more, (WIDTH,), p["norm"])
    y = x + attended if step.residual and step.kind != "mha" else attended
    return y + torch.tanh(noise(F.linear(y, p["first"]))) if step.kind == "chunked" else y


def targets(program: Program) -> tuple[Tensor, Tensor]:
    """Factors of the loss [s, b, WIDTH], and labels [s, b]."""
    at = torch.arange(program.length * program.batch * WIDTH, dtype=torch.float64)
    return torch.cos(at).view(program.length, program.batch, WIDTH), torch.arange(program.length * program.batch).view(
        program.length, program.batch
    ) % WORDS


def plain_loss(program: Program, y: Tensor, params: dict[str, Tensor], noise: Callable, parts: tuple) -> Tensor:
    """The loss of the given tokens; ``parts``: their targets."""
    factors, labels = parts
    if program.loss == "cross entropy":
        logits = noise(F.linear(y, params[f"{len(program.steps)}.words"]))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    y = y if y.dtype == torch.float64 else y.float()
    factors = factors.to(y.dtype)
    if program.loss == "transposed":  # its gradient has another memory order
        return (y.permute(2, 1, 0) * factors.permute(2, 1, 0)).sum()
    return y.sum() if program.loss == "sum" else (y * factors).sum() + y.square().sum() / 2


def differentiate(program: Program, y: Tensor, loss: Tensor, params: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output, the loss, and the gradients by name."""
    leaves = {name: x for name, x in params.items() if x.requires_grad}
    result = {"y": y.detach(), "loss": loss.detach()}
    if leaves and loss.requires_grad:
        if program.backward == "grad":
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        else:
            for _ in range(2 if program.backward == "twice" else 1):
                loss.backward(retain_graph=program.backward == "twice")
            grads = [x.grad for x in leaves.values()]
        result |= {name: torch.zeros_like(x) if g is None else g.clone() for (name, x), g in zip(leaves.items(), grads)}
    return result


class _Noise(torch.autograd.Function):
    """Changes each element of a value, and of its gradient, by ``eps`` of it, up or down at random."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float, draw: torch.Generator) -> Tensor:
        ctx.rounded = lambda x: x * (1 + eps * torch.empty_like(x).uniform_(-1, 1, generator=draw).sign())
        return ctx.rounded(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.rounded(grad), None, None


def run_plain(program: Program, noisy: int | None = None) -> dict[str, Tensor]:
    """All results in float64; with ``noisy``, every operation adds rounding noise of the program's precision."""
    # The rounding error of a sum of n products in float32 is at most n units. Under autocast both factors of a
    # product, the product and its gradient are rounded to bfloat16, each by half a unit at most.
    unit = max(WIDTH, program.length) * 2.0**-24 + (4 * 2.0**-9 if program.dtype == "autocast" else 0.0)
    draw = None if noisy is None else torch.Generator().manual_seed(noisy)

    def noise(x: Tensor) -> Tensor:
        return x if draw is None else _Noise.apply(x, unit, draw)

    leaves = {name: x.detach().double().requires_grad_(x.requires_grad) for name, x in parameters(program).items()}
    params = {name: noise(x) for name, x in leaves.items()}
    y = params["x"]
    for i in range(len(program.steps)):
        y = noise(plain_step(program, i, y, params, noise))
    loss = plain_loss(program, y, params, noise, targets(program))
    return differentiate(program, y, loss, leaves)


def bounds(program: Program, exact: dict[str, Tensor]) -> dict[str, float]:
    """The tolerance of each result: in float64, 1e-10 of its largest entry, or 1e-10 if that is larger.

    In other dtypes: four times the largest deviation (norm) of six results with random rounding of the program's
    precision.
    """
    if program.dtype == "float64":
        return {name: 1e-10 * max(1.0, float(x.abs().max())) for name, x in exact.items()}
    some = [run_plain(program, noisy) for noisy in range(6)]
    return {name: 4 * max(float((one[name] - x).norm()) for one in some) for name, x in exact.items()}


# The programs on ranks, with the public functions of ``megatron.context_parallel``.


LINES = {  # patterns of one-line refusals; whether each is correct for (program, Ulysses, Ring)
    r"a sequence of \d+ tokens cannot be divided by": lambda p, u, r: True,
    r"a sequence of \d+ tokens cannot be cut in \d+ chunks": lambda p, u, r: any(s.chunks > 1 for s in p.steps),
    r"q is .*: cast them to one dtype": lambda p, u, r: any(s.mixed for s in p.steps),
    r"a second backward pass through (a layer in chunks|the chunked loss) is not supported": lambda p, u, r: (
        p.backward == "twice" and (p.loss == "cross entropy" or any(s.kind == "chunked" for s in p.steps))
    ),
}


def identity(x: Tensor) -> Tensor:
    return x


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 1.5


def refusal(program: Program, error: Exception, ulysses: int, ring: int) -> str | None:
    """The pattern in LINES of a one-line refusal that is correct for the program; None for other errors."""
    text = str(error)
    for line, applies in LINES.items():
        if isinstance(error, (ValueError, RuntimeError)) and re.match(line, text) and applies(program, ulysses, ring):
            return line if "\n" not in text else None
    return None


def run_on_ranks(programs: list[Program], ulysses: int, ring: int) -> list[dict[str, Tensor] | str]:
    """The gathered results of each program, or the pattern of its refusal; empty on ranks other than 0.

    Raises:
        AssertionError: a program raised an error that is not a correct one-line refusal.
    """
    grid, result = make_grid(ulysses=ulysses, ring=ring), []
    for program in programs:
        try:
            result.append(run(program, grid))
        except Exception as error:
            line = refusal(program, error, ulysses, ring)
            if line is None:
                raise AssertionError(f"Ulysses {ulysses} x Ring {ring}: {program}") from error
            result.append(line)
    forget()
    return result if dist.get_rank() == 0 else []


def forget() -> None:
    """Empty the caches, whose layouts keep this job's process groups and gloo's threads alive."""
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
                # PyTorch's reentrant checkpoint needs an input that requires a gradient, and .backward().
                reentrant_works = y.requires_grad and program.backward != "grad"
                if step.checkpoint == "not reentrant" or (step.checkpoint and reentrant_works):
                    y = checkpoint(function, y, use_reentrant=step.checkpoint == "reentrant")
                else:
                    y = function(y)
                y = _Wrong.apply(y) if program.wrong and i == len(program.steps) - 1 else y
            loss = loss_of(program, y, layout, params)
        result = differentiate(program, y, loss, params)
    for name, x in result.items():
        if name == "y":
            result[name] = layout.gather(x)
        elif grid.context.size > 1:  # also the gradient of x, because every rank used its part
            dist.all_reduce(x, group=grid.context.group)
    return result


def one_step(program: Program, i: int, x: Tensor, *, layout: cp.SequenceLayout, params: dict[str, Tensor]) -> Tensor:
    step, p = program.steps[i], named(program, i, params)
    if step.kind not in WITH_TOKENS_MIXED and step.kind != "apply":
        local_params = {**params, **{f"{i}.{name}": layout.shard(t) if name == "place" else t for name, t in p.items()}}
        return plain_step(program, i, x, local_params, identity)
    if step.kind == "apply":
        spans = even_spans(x.size(0), step.pieces)
        function = lambda part, _: torch.tanh(F.linear(part, p["first"])) @ weight(step, p)  # noqa: E731
        return apply_in_chunks(function, x, [*p.values(), p["out"]], spans)
    if step.kind == "chunked":
        return chunked(program, step, p, x, layout)
    if step.kind in ("mha", "encoder"):
        return layer_of_pytorch(program, step, p, x)
    q, k, v = project(x, p, step.kv_heads, identity)
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
    """A layer in chunks, whose layout may distribute tokens differently."""
    other = cp.SequenceLayout(
        program.length, layout.grid, program.balance, step.chunks, document_ends=layout.document_ends
    )
    mask = MASKS[mask_of(program, step)](program.length)
    layer = cp.ChunkedLayer(
        lambda x, _: (lambda q, k, v: (q, k.half() if step.mixed else k, v))(*project(x, p, step.kv_heads, identity)),
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
        return plain_loss(program, y, params, identity, parts)
    words = params[f"{len(program.steps)}.words"]
    weights = torch.ones_like(parts[1], dtype=y.dtype)
    return chunked_linear_cross_entropy(y, words, parts[1], weights, chunks=3, vocab_size=WORDS)
