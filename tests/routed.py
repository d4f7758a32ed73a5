# SPDX-License-Identifier: Apache-2.0
"""A small model with experts in plain PyTorch, whose router has ties, and errors that can be planted in it.

The sequence is split over ranks, and sums have another order there than on one process: rounding decides ties.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from megatron.certifying.recording import Outcome

LENGTH, WORDS, WIDTH, EXPERTS, TIES = 96, 97, 32, 4, 24
ERRORS: dict[str, tuple[str, str]] = {  # by error: the kind and the module that certify must report
    "other weights of the router": ("weights", "layers.0.router"),
    "experts of the shard": ("forward", "layers.0"),
    "ids off by one": ("forward", "layers.0"),
    "scores in bf16": ("forward", "layers.0"),
    "an output after the ties": ("forward", "layers.1"),
    "no reduction after the ties": ("reduction", "head"),
}


class Experts(nn.Module):
    """Adds the mean of all tokens to each, and what its two best experts make of that."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.error, self.by = "", "topk"

    def forward(self, x: Tensor) -> Tensor:
        total = self.mix(x).sum(0)
        if dist.is_initialized() and dist.get_world_size() > 1:
            x = (LENGTH * x + differentiable.all_reduce(total)) / LENGTH
        else:
            x = x + total / LENGTH
        scores = self.router(x).softmax(-1)
        if self.error == "scores in bf16":
            scores = scores.bfloat16().float()
        if self.error == "experts of the shard":
            scores = scores.masked_fill(torch.arange(EXPERTS) < EXPERTS // 2, 0.0)
        if self.by == "DTensor":
            scores = DTensor.from_local(scores, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
        best = scores.sort(descending=True) if self.by == "sort" else scores.topk(2)
        weights, chosen = ((x.to_local() if self.by == "DTensor" else x)[:, :2] for x in best)
        if self.error == "ids off by one":
            chosen = (chosen + 1) % EXPERTS
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slot = (chosen == number).nonzero(as_tuple=True)
            y = y.index_add(0, rows, torch.tanh(expert(x[rows])) * weights[rows, slot, None])
        return x + y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Routed:
    """The program.

    Attributes:
        error: planted on the last of several ranks.
        gap: difference of the scores of the second and third expert of some tokens, before the softmax.
        seed: of weights and data.
        by: how experts are chosen: topk, sort, or DTensor, by topk of one.
    """

    error: str = ""
    gap: float = 0.0
    seed: int = 0
    by: str = "topk"

    def __call__(self, ranks: int) -> Outcome:
        torch.manual_seed(self.seed)
        model, labels = Model(), torch.randint(WORDS, (LENGTH,))
        ids = torch.randperm(WORDS)[:LENGTH]
        plant_ties(model.layers[0], model.embed(ids), self.gap)
        rank = dist.get_rank() if ranks > 1 else 0
        bad = self.error if ranks > 1 and rank == ranks - 1 else ""
        model.layers[0].error, model.layers[0].by = bad, self.by
        if bad == "other weights of the router":
            model.layers[0].router.weight.data[3] *= 1.01
        if bad == "an output after the ties":
            model.layers[1].experts[2].register_forward_hook(lambda module, args, out: out * 1.001)
        own = slice(rank * LENGTH // ranks, (rank + 1) * LENGTH // ranks)
        loss = nn.functional.cross_entropy(model(ids[own]), labels[own], reduction="sum") / LENGTH
        loss.backward()
        loss = loss.detach()
        for name, parameter in model.named_parameters() if ranks > 1 else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if self.error != "no reduction after the ties" or not name.startswith("head"):
                dist.all_reduce(parameter.grad)
        if ranks > 1:
            dist.all_reduce(loss)
        return Outcome(model, loss)


@torch.no_grad()
def plant_ties(layer: Experts, x: Tensor, gap: float) -> None:
    """Router weights that give every fourth token scores of about 2, then 1, 1 + gap and -1: a tie for the second."""
    linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    linear.load_state_dict(layer.mix.state_dict())
    x = x.double()
    ties = (x + linear(x).mean(0))[:: LENGTH // TIES]
    free = torch.randn(EXPERTS, WIDTH, dtype=torch.float64)
    free = free - free @ torch.linalg.pinv(ties) @ ties  # scores 0 for each
    one = torch.ones(TIES, dtype=torch.float64)
    scores = torch.stack([2 + torch.arange(TIES) / 10, one, one + gap, -one], 1)
    layer.router.weight.copy_(torch.linalg.lstsq(ties, scores).solution.T + free)
