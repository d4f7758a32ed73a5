# SPDX-License-Identifier: Apache-2.0
"""Weights are split over ranks: tensor parallel, experts, stages, tables. Each docstring says why it is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from megatron.certifying.recording import Outcome
from tests.referee.pieces import (
    HEAD,
    LENGTH,
    WIDTH,
    WORDS,
    AllGather,
    Decoder,
    attention,
    gather,
    gradients,
    losses,
    mine,
    rotated,
    story,
    summed,
)

Group = dist.ProcessGroup | None


class CopyToRanks(torch.autograd.Function):
    """The same tensor on all ranks, whose gradients are partial."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient.contiguous(), ctx.group), None


class SumOfRanks(torch.autograd.Function):
    """The sum of partial tensors, whose gradient is the same for all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return summed(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ScatterSum(torch.autograd.Function):
    """This rank's part, along dim 1, of the sum of partial tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return mine(summed(x.contiguous()), 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gather(gradient, 1)


class Columns(nn.Linear):
    """This rank's outputs of a linear layer; the weight is a part of the one that a single process makes."""

    def __init__(self, inputs: int, outputs: int, group: Group = None, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias)
        for name, whole in list(self.named_parameters()):
            setattr(self, name, part(whole, 0, group))


class Rows(nn.Linear):
    """A linear layer of this rank's inputs, without the sum over ranks."""

    def __init__(self, inputs: int, outputs: int, group: Group = None) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.weight = part(self.weight, 1, group)


def part(whole: Tensor, dim: int, group: Group = None) -> nn.Parameter:
    own = nn.Parameter(mine(whole.detach(), dim, group))
    own.cut_along = dim
    return own


def whole_gradients(model: nn.Module, group: Group = None) -> dict[str, Tensor]:
    return {
        name: gather(p.grad, p.cut_along, group) if hasattr(p, "cut_along") else p.grad.clone()
        for name, p in model.named_parameters()
    }


def norm_of_parts(model: nn.Module, group: Group = None) -> Tensor:
    """Squares of split gradients are added up over the ranks, those of whole ones are counted once."""
    split = sum(p.grad.square().sum() for p in model.parameters() if hasattr(p, "cut_along"))
    whole = sum(p.grad.square().sum() for p in model.parameters() if not hasattr(p, "cut_along"))
    return (summed(split, group) + whole).sqrt()


class Words(nn.Module):
    """This rank's rows of the embedding; words of other ranks give zeros."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, self.weight = group, part(nn.Embedding(WORDS, WIDTH).weight, 0, group)
        self.first = len(self.weight) * dist.get_rank(group)

    def forward(self, ids: Tensor) -> Tensor:
        own = ids - self.first
        elsewhere = (own < 0) | (own >= len(self.weight))
        x = F.embedding(own.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[..., None], 0.0)
        return SumOfRanks.apply(x, self.group)


class SplitBlock(nn.Module):
    """Heads and hidden units are split. With ``cut`` the tokens between the products are split, too."""

    def __init__(self, group: Group, cut: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (Columns(WIDTH, WIDTH, group) for _ in range(3))
        self.o, self.up, self.down = Rows(WIDTH, WIDTH, group), Columns(WIDTH, 32, group, True), Rows(32, WIDTH, group)
        self.enter = (lambda x: GatherTokens.apply(x)) if cut else lambda x: CopyToRanks.apply(x, group)
        self.leave = ScatterSum.apply if cut else lambda x: SumOfRanks.apply(x, group)

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(self.norm1(x))
        q, k, v = (layer(y).unflatten(-1, (-1, HEAD)) for layer in (self.q, self.k, self.v))
        at = torch.arange(y.size(1))
        x = x + self.leave(self.o(attention(rotated(q, at), rotated(k, at), v).flatten(2)))
        return x + self.leave(self.down(F.gelu(self.up(self.enter(self.norm2(x))))))


class GatherTokens(torch.autograd.Function):
    """All tokens; each rank's gradient is partial, so that they are summed and cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return mine(summed(gradient.contiguous()), 1)


class SplitLoss(torch.autograd.Function):
    """The cross-entropy of each token, from logits of this rank's words."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Group) -> Tensor:
        top = logits.max(-1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - top[..., None]
        own = labels - logits.size(-1) * dist.get_rank(group)
        elsewhere = (own < 0) | (own >= logits.size(-1))
        own = own.masked_fill(elsewhere, 0)
        right = shifted.gather(-1, own[..., None]).squeeze(-1).masked_fill(elsewhere, 0.0)
        total = summed(shifted.exp().sum(-1), group)
        counts = labels != -100
        ctx.save_for_backward(shifted.exp() / total[..., None], own, elsewhere, counts)
        return (total.log() - summed(right, group)) * counts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        p, own, elsewhere, counts = ctx.saved_tensors
        hit = torch.zeros_like(p).scatter_(-1, own[..., None], (~elsewhere)[..., None].to(p.dtype))
        return (p - hit) * (gradient * counts)[..., None], None, None


class SplitDecoder(nn.Module):
    def __init__(self, group: Group = None, cut: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.group, self.cut, self.embed = group, cut, Words(group)
        self.blocks = nn.ModuleList(SplitBlock(group, cut) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), Columns(WIDTH, WORDS, group)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = CutTokens.apply(x) if self.cut else x
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(GatherTokens.apply(x) if self.cut else CopyToRanks.apply(x, self.group))


class CutTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return mine(x, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gather(gradient, 1)


def tensor_parallel(ranks: int) -> Outcome:
    """All ranks have all tokens; partial gradients are summed where the whole input is copied to split layers."""
    model = SplitDecoder(tied=True)
    ids, labels = story(rows=2)
    loss = SplitLoss.apply(model(ids), labels, None).sum() / (labels != -100).sum()
    loss.backward()
    whole, norm = whole_gradients(model), norm_of_parts(model)
    for parameter in model.parameters():
        parameter.grad *= (0.5 / norm).clamp(max=1.0)
    return Outcome(model, loss, gradients=whole, norm=norm)


def split_tokens(ranks: int) -> Outcome:
    """Norms see a rank's tokens, so that their gradients are summed over the ranks; products see all tokens."""
    model = SplitDecoder(cut=True)
    ids, labels = story(rows=2)
    loss = SplitLoss.apply(model(ids), labels, None).sum() / (labels != -100).sum()
    loss.backward()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            dist.all_reduce(parameter.grad)
    return Outcome(model, loss, gradients=whole_gradients(model), norm=norm_of_parts(model))


def tensor_and_data(data: int, model: int) -> Outcome:
    """Two axes: products are summed over one, gradients over the other; rows have different numbers of labels."""
    rank = dist.get_rank()
    tensor = [dist.new_group(list(range(first, first + model))) for first in range(0, data * model, model)][
        rank // model
    ]
    copies = [dist.new_group(list(range(first, data * model, model))) for first in range(model)][rank % model]
    net = SplitDecoder(tensor)
    ids, labels = story()
    count = (labels != -100).sum()
    ids, labels = mine(ids, 0, copies), mine(labels, 0, copies)
    loss = SplitLoss.apply(net(ids), labels, tensor).sum() / count
    loss.backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad, group=copies)
    return Outcome(net, summed(loss, copies), gradients=whole_gradients(net, tensor), norm=norm_of_parts(net, tensor))


class Llama(nn.Module):
    """A decoder with flat names, as in tutorials; heads are counted from the products' sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.attention_norm, self.ffn_norm, self.norm = (nn.RMSNorm(WIDTH) for _ in range(3))
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))
        self.w2, self.output = nn.Linear(24, WIDTH, bias=False), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tok_embeddings(ids)
        x = self.attention_norm(h)
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)) for layer in (self.wq, self.wk, self.wv))
        at = torch.arange(ids.size(1))
        h = h + self.wo(attention(rotated(q, at), rotated(k, at), v).flatten(2))
        x = self.ffn_norm(h)
        return self.output(self.norm(h + self.w2(F.silu(self.w1(x)) * self.w3(x))))


PLAN = {"wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel(), "wo": RowwiseParallel(),
        "w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}  # fmt: skip


def tutorial(ranks: int) -> Outcome:
    """PyTorch's tensor parallelism of linear layers; DTensor knows which gradients are partial."""
    model = parallelize_module(Llama(), init_device_mesh("cpu", (ranks,)), PLAN)
    ids, labels = story(rows=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    loss = losses(model(ids), labels) / (labels != -100).sum()
    loss.backward()
    optimizer.step()
    return Outcome(model, loss)


def tutorial_loss(ranks: int) -> Outcome:
    """Embedding and output are split as well, and the loss is computed from split logits."""
    plan = {**PLAN, "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
            "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}  # fmt: skip
    model = parallelize_module(Llama(), init_device_mesh("cpu", (ranks,)), plan)
    ids, labels = story(rows=2)
    if ranks == 1:
        loss = F.cross_entropy(model(ids).full_tensor().flatten(0, 1), labels.flatten())
        loss.backward()
        return Outcome(model, loss)
    with loss_parallel():
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
    return Outcome(model, loss.full_tensor())


def tutorial_tokens(ranks: int) -> Outcome:
    """A feed-forward network whose norms see a part of the tokens, with PyTorch's SequenceParallel."""
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(),
                          nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))  # fmt: skip
    plan = {"0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "1": SequenceParallel(),
            "2": ColwiseParallel(input_layouts=Shard(1)), "4": RowwiseParallel(output_layouts=Shard(1)),
            "5": SequenceParallel(),
            "6": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}  # fmt: skip
    model = parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    ids, labels = story(rows=2)
    loss = losses(model(ids), labels) / (labels != -100).sum()
    loss.backward()
    return Outcome(model, loss)


def shards_of_shards(data: int, model: int) -> Outcome:
    """FSDP2 over one axis of tensor parallel weights over the other; FSDP averages, so the sum is scaled."""
    mesh = init_device_mesh("cpu", (data, model), mesh_dim_names=("data", "model"))
    net = parallelize_module(Llama(), mesh["model"], PLAN)
    fully_shard(net, mesh=mesh["data"])
    ids, labels = story()
    group = mesh["data"].get_group()
    loss = losses(net(mine(ids, 0, group)), mine(labels, 0, group)) * data / (labels != -100).sum()
    loss.backward()
    return Outcome(net, summed(loss, group) / data)


class Experts(nn.Module):
    """Each rank has some experts; tokens go to their experts and back by all-to-all."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        ranks, self.count = dist.get_world_size(), experts
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up, self.down = (part(torch.randn(experts, *shape) / 4, 0) for shape in ((WIDTH, 24), (24, WIDTH)))
        self.per_rank = experts // ranks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        p = self.router(flat).softmax(-1)
        weight, expert = p.topk(2)
        weight = weight / weight.sum(-1, keepdim=True)
        order = expert.flatten().argsort(stable=True)
        sent = flat[order // 2]
        counts = expert.flatten().bincount(minlength=self.count)
        total = summed(counts)
        received_counts = torch.empty_like(counts)
        dist.all_to_all_single(received_counts, counts)
        splits = [c.view(-1, self.per_rank).sum(1).tolist() for c in (counts, received_counts)]
        received = Exchange.apply(sent, splits[0], splits[1])
        own = torch.arange(self.per_rank).repeat(dist.get_world_size()).repeat_interleave(received_counts)
        out = torch.zeros_like(received)
        for number in range(self.per_rank):
            rows = (own == number).nonzero().flatten()
            out = out.index_add(0, rows, F.silu(received[rows] @ self.up[number]) @ self.down[number])
        back = Exchange.apply(out, splits[1], splits[0])
        y = torch.zeros_like(flat).index_add(0, order // 2, back * weight.flatten()[order, None])
        tokens = summed(torch.tensor(float(len(flat))))
        balance = self.count * (total / tokens * p.sum(0) / tokens).sum()  # this rank's share of all tokens' loss
        return y.view_as(x), balance


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.splits = sent, received
        out = x.new_empty(sum(received), x.size(1))
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.splits
        return Exchange.apply(gradient, received, sent), None, None


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.experts = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), Experts()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        y, balance = self.experts(self.norm(x))
        return self.head(x + y), balance


def experts(ranks: int) -> Outcome:
    """Loads are of all ranks' tokens; experts get all tokens' gradients, so only the rest is summed."""
    model = Sparse()
    ids, labels = story()
    logits, balance = model(mine(ids))
    loss = losses(logits, mine(labels)) / (labels != -100).sum() + 0.1 * balance
    loss.backward()
    for parameter in model.parameters():
        if not hasattr(parameter, "cut_along"):
            dist.all_reduce(parameter.grad)
    return Outcome(model, summed(loss), gradients=whole_gradients(model))


class Stage(nn.Module):
    """Some layers of a decoder, by the names of the whole one; the first stage embeds, the last has the head."""

    def __init__(self, number: int, stages: int) -> None:
        super().__init__()
        whole, own = Decoder(tied=True), range(number, number + 1) if stages > 1 else range(2)
        self.blocks = nn.ModuleDict({str(layer): whole.blocks[layer] for layer in own})
        if number == 0:
            self.embed = whole.embed
        if number == stages - 1:
            self.norm, self.head = whole.norm, whole.head
            if stages > 1:
                self.head.weight = nn.Parameter(whole.embed.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if hasattr(self, "embed") else x
        for block in self.blocks.values():
            x = block(x, torch.arange(x.size(1)))
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def by_stage(stage: nn.Module) -> dict[str, Tensor]:
    """Gradients by the names of the whole model: the tied embedding has its sum on both stages."""
    result = gradients(stage)
    if "head.weight" in result:
        result["embed.weight"] = result.pop("head.weight")
    return result


def stages(ranks: int) -> Outcome:
    """Activations go to the next stage, gradients come back; the two copies of the embedding sum theirs."""
    rank, last = dist.get_rank(), ranks - 1
    stage = Stage(rank, ranks)
    batches = [story(rows=2, seed=seed) for seed in (6, 7)]
    count, total = sum((labels != -100).sum() for _, labels in batches), torch.zeros(())
    for ids, labels in batches:
        x = ids
        if rank > 0:
            x = torch.empty(2, LENGTH, WIDTH)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        out = stage(x)
        if rank < last:
            dist.send(out.detach(), rank + 1)
            gradient = torch.empty_like(out)
            dist.recv(gradient, rank + 1)
            out.backward(gradient)
        else:
            loss = losses(out, labels) / count
            loss.backward()
            total += loss.detach()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    if ranks > 1:
        tied = stage.embed.weight if rank == 0 else stage.head.weight
        dist.all_reduce(tied.grad)
    dist.broadcast(total, last)
    modules = {name: module for name, module in stage.named_modules() if name}
    return Outcome(modules, total, gradients=by_stage(stage))


class Layers(nn.Module):
    """Layers of a network as tutorials of pipelines have it: a name for each, without those of other stages."""

    def __init__(self, own: range, layers: int) -> None:
        super().__init__()
        made = [nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.LayerNorm(12)) for _ in range(layers)]
        self.layers = nn.ModuleDict({str(number): made[number] for number in own})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = x + layer(x)
        return x


def scheduled(ranks: int, schedule: Callable[..., Any] = ScheduleGPipe) -> Outcome:
    """PyTorch's schedules divide gradients by the number of micro-batches, whose losses are means of equal sizes."""
    rank, per = dist.get_rank(), 4 // ranks
    own = Layers(range(rank * per, rank * per + per), 4)
    x, y = torch.randn(8, 12), torch.randn(8, 12)
    stage = PipelineStage(own, rank, ranks, torch.device("cpu"))
    run, each = schedule(stage, 4, loss_fn=F.mse_loss), []
    run.step(*([x] if rank == 0 else []), **({"target": y, "losses": each} if rank == ranks - 1 else {}))
    loss = torch.stack(each).mean().detach() if each else torch.zeros(())
    dist.broadcast(loss, ranks - 1)
    return Outcome({name: module for name, module in own.named_modules() if name}, loss, gradients=gradients(own))


def scheduled_1f1b(ranks: int) -> Outcome:
    """Another order of the same micro-batches."""
    return scheduled(ranks, Schedule1F1B)


def stages_and_data(data: int, model: int) -> Outcome:
    """Two pipelines with different rows: each stage's gradients are summed with its copy's."""
    rank = dist.get_rank()
    copies = [dist.new_group(list(range(first, data * model, model))) for first in range(model)][rank % model]
    number, last = rank % model, model - 1
    per = 4 // model
    own = Layers(range(number * per, number * per + per), 4)
    x, y = mine(torch.randn(8, 12), 0, copies), mine(torch.randn(8, 12), 0, copies)
    if number > 0:
        x = torch.empty(x.shape)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    out, loss = own(x), torch.zeros(())
    if number < last:
        dist.send(out.detach(), rank + 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, rank + 1)
        out.backward(gradient)
    else:
        loss = F.mse_loss(out, y) / data
        loss.backward()
    if number > 0:
        dist.send(x.grad, rank - 1)
    for parameter in own.parameters():
        dist.all_reduce(parameter.grad, group=copies)
    return Outcome({n: m for n, m in own.named_modules() if n}, summed(loss), gradients=gradients(own))


class Tables(nn.Module):
    """Recommendation: a rank has some tables for all rows, and the dense layers for its rows."""

    def __init__(self, tables: int = 4) -> None:
        super().__init__()
        made = [nn.EmbeddingBag(20, 6, mode="sum") for _ in range(tables)]
        own = mine(torch.arange(tables)).tolist()
        self.tables = nn.ModuleDict({str(number): made[number] for number in own})
        self.bottom, self.top = nn.Linear(5, 6), nn.Sequential(nn.Linear(6 + 10, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        looked_up = torch.stack([table(ids[:, int(number)]) for number, table in self.tables.items()], 1)
        vectors = TablesToRows.apply(looked_up)
        x = self.bottom(dense)
        every = torch.cat([x[:, None], vectors], 1)
        pairs = (every @ every.mT)[(slice(None), *torch.tril_indices(5, 5, -1))]
        return self.top(torch.cat([x, pairs], 1)).squeeze(1)


class TablesToRows(torch.autograd.Function):
    """[all rows, own tables, dim] to [own rows, all tables, dim]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return torch.cat(out.chunk(dist.get_world_size()), 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        sent = torch.cat(gradient.chunk(dist.get_world_size(), 1))
        out = torch.empty_like(sent)
        dist.all_to_all_single(out, sent)
        return out


def tables(ranks: int) -> Outcome:
    """A table gets the gradients of all rows through the exchange; only dense layers are summed."""
    model = Tables()
    dense, ids, clicks = torch.randn(8, 5), torch.randint(20, (8, 4, 3)), torch.randint(2, (8,)).float()
    loss = F.binary_cross_entropy_with_logits(model(mine(dense), ids), mine(clicks), reduction="sum") / 8
    loss.backward()
    for name, parameter in model.named_parameters():
        if not name.startswith("tables"):
            dist.all_reduce(parameter.grad)
    return Outcome({n: m for n, m in model.named_modules() if n}, summed(loss), gradients=gradients(model))


class Faces(nn.Module):
    """Rows are split, and so are the classes of the last layer; both are normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 16), nn.PReLU(), nn.Linear(16, 8))
        self.classes = Columns(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = AllGather.apply(F.normalize(self.body(x), dim=-1), 0)
        return 8.0 * F.linear(x, F.normalize(self.classes.weight, dim=-1))


def faces(ranks: int) -> Outcome:
    """All ranks have the same loss of all rows; gradients of rows are summed in the gather, and then over ranks."""
    model = Faces()
    x, labels = torch.randn(8, 10), torch.randint(24, (8,))
    loss = SplitLoss.apply(model(mine(x)), labels, None).mean()
    loss.backward()
    for parameter in model.body.parameters():
        dist.all_reduce(parameter.grad)
    return Outcome(model, loss, gradients=whole_gradients(model))
