# SPDX-License-Identifier: Apache-2.0
"""A small decoder in plain PyTorch whose sequence is split over ranks, and errors that can be planted in it.

Keys and values are gathered from all ranks. With one rank no error has an effect, so all errors share one reference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.certifying.recording import Outcome
from megatron.certifying.rows import contiguous, striped, zigzag

LENGTH, WORDS, WIDTH, HEADS = 48, 31, 16, 2
ENDS = (17, 30, LENGTH)

# By error: the kind and the module that certify must report; "" is the code after the model.
ERRORS: dict[str, tuple[str, str]] = {
    "dropped reduction": ("reduction", "blocks.0.norm1"),
    "doubled reduction": ("reduction", "blocks.1.mlp.up"),
    "sum in bf16": ("reduction", "head"),
    "leak across documents": ("forward", "blocks.0.attention"),
    "rope offset": ("forward", "blocks.1.attention"),
    "window off by one": ("forward", "blocks.0.attention"),
    "other weights": ("weights", "blocks.0.mlp.up"),
    "keys without gradient": ("backward", "blocks.1.attention"),
    "labels of the shard": ("backward", ""),
    "doubled loss scale": ("loss scale", ""),
    "mean of means": ("loss scale", ""),
    "clip over one axis": ("clipping norm", ""),
    "frozen on one rank": ("update", "blocks.1.mlp.down"),
    "reported loss": ("loss", ""),
}


@dataclass(frozen=True)
class Planted:
    """A program: a training step of the decoder, with one error or none."""

    error: str = ""
    layout: str = "zigzag"
    dtype: str = "float32"
    autocast: bool = False
    window: int = 8
    documents: bool = True
    tied: bool = False
    frozen: bool = False
    micro_batches: int = 1
    optimizer: str = "sgd"
    says_positions: bool = False
    rope: bool = True

    def __call__(self, ranks: int) -> Outcome:
        torch.manual_seed(5)
        model = Decoder(replace(self, error=self.error if ranks > 1 else ""), dist.get_rank(), ranks)
        model.to(getattr(torch, self.dtype))
        return step(model)


class Decoder(nn.Module):
    def __init__(self, program: Planted, rank: int, ranks: int) -> None:
        super().__init__()
        self.program, self.rank, self.ranks = program, rank, ranks
        layout = {"zigzag": zigzag, "contiguous": contiguous, "striped": striped}[program.layout]
        self.positions = layout(LENGTH, rank, ranks)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(self, number) for number in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if program.tied:
            self.head.weight = self.embed.weight
        if program.frozen:
            self.blocks[0].mlp.up.weight.requires_grad_(False)
        if self.has("other weights", 1):
            with torch.no_grad():
                self.blocks[0].mlp.up.weight.mul_(1.01)

    def has(self, error: str, rank: int | None = None) -> bool:
        return self.program.error == error and rank in (None, self.rank)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, model: Decoder, number: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(model, number), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, model: Decoder, number: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.of_model, self.number = [model], number  # a list, so that nn.Module does not register it

    def forward(self, x: Tensor) -> Tensor:
        model, second = self.of_model[0], self.number == 1
        own = model.positions
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)) for part in (self.q, self.k, self.v))
        at = own + 1 if second and model.has("rope offset", 1) else own
        if model.program.rope:
            q, k = rotated(q, at), rotated(k, at)
        whole = own
        if model.ranks > 1:
            whole = torch.cat(differentiable.all_gather(own.float())).long()
            k, v = (gathered(part, second and model.has("keys without gradient"), model.rank) for part in (k, v))
        allowed = visible(model.program, own[:, None], whole[None], model if not second else None)
        out = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), attn_mask=allowed)
        return self.o(out.transpose(1, 2).flatten(2))


def gathered(x: Tensor, without_gradient: bool, rank: int) -> Tensor:
    if not without_gradient:
        return torch.cat(differentiable.all_gather(x.contiguous()), 1)
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat([*parts[:rank], x, *parts[rank + 1 :]], 1)  # other ranks' use of x is not differentiated


def visible(program: Planted, q: Tensor, k: Tensor, model: Decoder | None = None) -> Tensor:
    """The mask, with an error of ``model``."""
    window = program.window - 1 if model is not None and model.has("window off by one") else program.window
    allowed = (k <= q) & (k > q - window)
    if program.documents and not (model is not None and model.has("leak across documents", 1)):
        ends = torch.tensor(ENDS)
        allowed = allowed & (torch.bucketize(q, ends, right=True) == torch.bucketize(k, ends, right=True))
    return allowed


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    half = x.size(-1) // 2
    angles = positions[:, None].double() * 50.0 ** -(torch.arange(half) / half).double()
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [1, LENGTH]; labels of -100 do not count, and their number differs between the halves."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(WORDS, (1, LENGTH), generator=generator)
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    labels[:, 3 + number : 3 + 6 * (number + 1)] = -100
    return ids, labels


def step(model: Decoder) -> Outcome:
    program, ranks = model.program, model.ranks
    batches = [batch(number) for number in range(program.micro_batches)]
    count = sum(int((labels != -100).sum()) for _, labels in batches)
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels in batches:
        own = labels[:, model.positions]
        if model.has("labels of the shard"):
            inside = torch.cat([ids[:, model.positions][:, 1:], own[:, -1:]], 1)
            own = torch.where(own == -100, own, inside)
        with torch.autocast("cpu", torch.bfloat16, enabled=program.autocast):
            logits = model(ids[:, model.positions]).flatten(0, 1).float()
        if program.dtype == "float64":
            logits = logits.double()
        mean = model.has("mean of means")
        loss = F.cross_entropy(logits, own.flatten(), reduction="mean" if mean else "sum") / (ranks if mean else count)
        (loss * (2 if model.has("doubled loss scale", 1) else 1)).backward()
        total += loss.detach().double()
    if not model.has("reported loss"):
        dist.all_reduce(total)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        narrow = model.has("sum in bf16") and name == "head.weight"
        gradient = parameter.grad.bfloat16() if narrow else parameter.grad
        if not (model.has("dropped reduction") and name == "blocks.0.norm1.weight"):
            dist.all_reduce(gradient)
        if model.has("doubled reduction") and name == "blocks.1.mlp.up.weight":
            dist.all_reduce(gradient)
        parameter.grad = gradient.to(parameter.dtype)
    gradients = {name: p.grad if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    norm = clip(model)
    trained = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not (model.has("frozen on one rank", 1) and name == "blocks.1.mlp.down.weight")
    ]
    optimizer = torch.optim.SGD(trained, 0.1) if program.optimizer == "sgd" else torch.optim.Adam(trained, 0.1)
    optimizer.step()
    return Outcome(
        model, total, gradients=gradients, norm=norm, positions=model.positions if program.says_positions else None
    )


def clip(model: Decoder) -> Tensor:
    """Clip to a norm of 0.5. Each rank adds up the squares of its share of the parameters."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    square = sum(grad.float().square().sum() for grad in grads[model.rank :: model.ranks])
    if not model.has("clip over one axis"):
        dist.all_reduce(square)
    norm = square.sqrt()
    for grad in grads:
        grad.mul_((0.5 / norm).clamp(max=1).to(grad.dtype))
    return norm
