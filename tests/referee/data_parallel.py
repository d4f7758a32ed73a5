# SPDX-License-Identifier: Apache-2.0
"""The batch is split over ranks, also with shards of weights and optimizer. Each docstring says why it is right."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

from megatron.certifying.recording import Outcome
from tests.referee.pieces import (
    ROWS,
    WIDTH,
    WORDS,
    Decoder,
    averaged,
    gather,
    gradients,
    losses,
    mine,
    story,
    summed,
)


def digits(ranks: int) -> tuple[nn.Module, Tensor]:
    """A convnet: all shards have as many images, so the mean of their means is the mean."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10))
    images, labels = torch.randn(8, 1, 8, 8), torch.randint(10, (8,))
    net = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(mine(images)), mine(labels))
    loss.backward()
    optimizer.step()
    return net.module, averaged(loss)


def all_reduce_by_hand(ranks: int) -> tuple[nn.Module, Tensor]:
    """Weights come from rank 0; gradients of equal shards are averaged after the backward pass."""
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.LayerNorm(20), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    for tensor in net.state_dict().values():
        dist.broadcast(tensor, src=0)
    torch.manual_seed(7)
    x = torch.randn(12, 6)
    y = x.sin().sum(1, keepdim=True)
    loss = F.mse_loss(net(mine(x)), mine(y))
    loss.backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    return net, averaged(loss)


def nano(ranks: int) -> Outcome:
    """Two micro-steps whose rows have equally many labels; gradients are sent in the last one; embeddings are tied.

    The output of the table of positions has no rows: its gradient on a rank is the part of this rank's rows.
    """
    raw = Decoder(tied=True, learned_positions=True)
    model, micro_steps = DDP(raw), 2
    decay = [p for p in raw.parameters() if p.dim() > 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": [p for p in raw.parameters() if p.dim() < 2]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    total = torch.zeros(())
    for step in range(micro_steps):
        data = torch.randint(WORDS, (ROWS, 17), generator=torch.Generator().manual_seed(step))
        x, y = mine(data)[:, :-1], mine(data)[:, 1:]
        with model.no_sync() if step < micro_steps - 1 else nullcontext():
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / micro_steps
            loss.backward()
        total += loss.detach()
    whole = gradients(raw)
    norm = clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return Outcome(raw, averaged(total), gradients=whole, norm=norm)


class Reader(nn.Module):
    """An encoder with learned positions, a bias for padded keys and a head for masked words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Embedding(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.size(1)))
        return self.decoder(self.encoder(x, src_key_padding_mask=ids == 0))


def masked_words(ranks: int) -> tuple[nn.Module, Tensor]:
    """Rows have different numbers of labels: sums are divided by all ranks' labels, and DDP's mean is undone."""
    ids, labels = story()
    ids = torch.where(labels == -100, 0, ids + 1) % WORDS
    ids[:, 0] = 1
    model = DDP(Reader())
    ids, labels = mine(ids), mine(labels)
    count = summed((labels != -100).sum())
    loss = losses(model(ids), labels) / count * ranks
    loss.backward()
    return model.module, averaged(loss)


class BatchNorm(nn.Module):
    """Batch normalization with the statistics of all ranks' rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        dims = [0, *range(2, x.dim())]
        sums = torch.stack([x.sum(dims), x.square().sum(dims), torch.full((x.size(1),), x.numel() / x.size(1))])
        total, squares, count = differentiable.all_reduce(sums)
        mean = total / count
        shape = (1, -1) + (1,) * (x.dim() - 2)
        scale = self.weight * (squares / count - mean.square() + 1e-5).rsqrt()
        return (x - mean.view(shape)) * scale.view(shape) + self.bias.view(shape)


def batch_norm(ranks: int) -> tuple[nn.Module, Tensor]:
    """Statistics are of all rows, and their gradients come back from all ranks."""
    net = nn.Sequential(nn.Conv2d(3, 6, 3), BatchNorm(6), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                        nn.Linear(24, 8), BatchNorm(8), nn.Tanh(), nn.Linear(8, 5))  # fmt: skip
    images, labels = torch.randn(8, 3, 6, 6), torch.randint(5, (8,))
    loss = F.cross_entropy(net(mine(images)), mine(labels), reduction="sum") / len(labels)
    loss.backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
    return net, summed(loss)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(12, 8), nn.Linear(10, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)


def contrastive(ranks: int) -> tuple[nn.Module, Tensor]:
    """Each rank compares its rows with all rows, whose gradients come back through the gather; DDP averages."""
    model = DDP(Pairs())
    image, text = model(mine(torch.randn(8, 12)), mine(torch.randn(8, 10)))
    images, texts = (torch.cat(differentiable.all_gather(x)) for x in (image, text))
    scale, target = model.module.scale.exp(), mine(torch.arange(8))
    loss = F.cross_entropy(scale * image @ texts.T, target) + F.cross_entropy(scale * text @ images.T, target)
    loss.backward()
    return model.module, averaged(loss)


def preferences(ranks: int) -> tuple[nn.Module, Tensor]:
    """Pairs of answers with a frozen reference; chosen and rejected of a pair are on one rank."""
    policy, reference = Decoder(), Decoder()
    reference.requires_grad_(False)
    model = DDP(policy)
    chosen, rejected = story(seed=2), story(seed=3)
    ids, labels = (torch.cat([mine(a), mine(b)]) for a, b in zip(chosen, rejected))

    def score(net: nn.Module) -> Tensor:
        each = F.cross_entropy(net(ids).transpose(1, 2), labels, reduction="none")
        return -each.sum(1)

    with torch.no_grad():
        before = score(reference)
    better, worse = (score(model) - before).chunk(2)
    loss = -F.logsigmoid(0.3 * (better - worse)).mean()
    loss.backward()
    return policy, averaged(loss)


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


def low_rank(ranks: int) -> tuple[nn.Module, Tensor]:
    """Only adapters are trained; the frozen weights have no gradients and no updates on any rank."""
    model = Decoder().requires_grad_(False)
    for block in model.blocks:
        block.attention.q, block.attention.v = LowRank(block.attention.q), LowRank(block.attention.v)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    ids, labels = story()
    loss = losses(model(mine(ids)), mine(labels)) / (labels != -100).sum()
    loss.backward()
    for parameter in trained:
        dist.all_reduce(parameter.grad)
    optimizer.step()
    return model, summed(loss)


class Speller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(WORDS, 12), nn.LSTM(12, 10, 2)
        self.decoder = nn.Linear(10, WORDS)

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, state = self.rnn(self.encoder(ids), state)
        return self.decoder(out), state


def truncated(ranks: int) -> Outcome:
    """An LSTM on [time, rows]: two spans of time with one state, which is detached between them; then clipping."""
    model = Speller()
    text = torch.randint(WORDS, (13, 6))
    ids, labels = mine(text[:-1], 1), mine(text[1:], 1)
    state = torch.zeros(2, ids.size(1), 10), torch.zeros(2, ids.size(1), 10)
    total = torch.zeros(())
    for start in (0, 6):
        state = tuple(x.detach() for x in state)
        logits, state = model(ids[start : start + 6], state)
        loss = F.cross_entropy(logits.flatten(0, 1), labels[start : start + 6].flatten())
        (loss / ranks).backward()
        total += loss.detach() / ranks
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    whole = gradients(model)
    norm = clip_grad_norm_(model.parameters(), 0.05)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return Outcome(model, summed(total), gradients=whole, norm=norm)


def sharded(ranks: int) -> Outcome:
    """FSDP2 averages sums that were divided by the mean number of labels of a rank."""
    model = Decoder()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, labels = story()
    loss = losses(model(mine(ids)), mine(labels)) * ranks / (labels != -100).sum()
    loss.backward()
    whole = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    norm = clip_grad_norm_(model.parameters(), 0.5).full_tensor()
    optimizer.step()
    return Outcome(model, averaged(loss), gradients=whole, norm=norm)


def sharded_in_bf16(ranks: int) -> tuple[nn.Module, Tensor]:
    """FSDP2 computes in bf16 and sums in fp32."""
    model = Decoder(layers=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.blocks[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    ids, labels = story()
    loss = losses(model(mine(ids)), mine(labels)) * ranks / (labels != -100).sum()
    loss.backward()
    return model, averaged(loss)


def optimizer_shards(ranks: int) -> tuple[nn.Module, Tensor]:
    """PyTorch's ZeRO 1: each rank updates some parameters and sends them to the others."""
    model = DDP(Decoder(layers=1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)
    ids = torch.randint(WORDS, (ROWS, 17))
    loss = F.cross_entropy(model(mine(ids)[:, :-1]).flatten(0, 1), mine(ids)[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return model.module, averaged(loss)


def flat_shards(ranks: int) -> Outcome:
    """ZeRO 1 by hand: a shard of the flat gradient is reduced, its weights are updated and gathered."""
    model = Decoder(layers=1)
    parameters, rank = list(model.parameters()), dist.get_rank()
    padding = -sum(p.numel() for p in parameters) % ranks
    flat = F.pad(nn.utils.parameters_to_vector(parameters).detach(), (0, padding))
    shard = flat.chunk(ranks)[rank].clone().requires_grad_()
    optimizer = torch.optim.Adam([shard], lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids, labels = story()
    loss = losses(model(mine(ids)), mine(labels)) / (labels != -100).sum()
    loss.backward()
    flat_gradient = F.pad(torch.cat([p.grad.flatten() for p in parameters]), (0, padding))
    shard.grad = torch.empty_like(shard)
    dist.reduce_scatter_tensor(shard.grad, flat_gradient)
    whole = gather(shard.grad, 0)
    norm = summed(shard.grad.square().sum()).sqrt()
    shard.grad *= (0.5 / norm).clamp(max=1.0)
    optimizer.step()
    nn.utils.vector_to_parameters(gather(shard, 0)[: flat.numel() - padding], parameters)
    pieces = whole[: flat.numel() - padding].split([p.numel() for p in parameters])
    named = {name: piece.view_as(p) for (name, p), piece in zip(model.named_parameters(), pieces)}
    changes = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    return Outcome(model, summed(loss), gradients=named, norm=norm, updates=changes)


def autocast(ranks: int) -> tuple[nn.Module, Tensor]:
    """bf16 in the forward pass, fp32 weights and sums."""
    model = DDP(Decoder())
    ids, labels = story()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(mine(ids))
    loss = losses(logits, mine(labels)) * ranks / (labels != -100).sum()
    loss.backward()
    optimizer.step()
    return model.module, averaged(loss)


def scaled(ranks: int) -> tuple[nn.Module, Tensor]:
    """fp16 with a loss scale, which is divided out before the update."""
    model = DDP(nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 4)))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 10), torch.randint(4, (8,))
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(mine(x)), mine(y))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return model.module, averaged(loss)


def main_gradients(ranks: int) -> Outcome:
    """Weights in bf16; micro-batches and ranks are added up in fp32 copies of the gradients."""
    model = Decoder(layers=1).bfloat16()
    main = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    total, batches = torch.zeros(()), [story(seed=seed) for seed in (4, 5)]
    count = sum((labels != -100).sum() for _, labels in batches)
    for ids, labels in batches:
        loss = losses(model(mine(ids)), mine(labels)) / count
        loss.backward()
        total += loss.detach()
        for name, parameter in model.named_parameters():
            main[name] += parameter.grad.float()
            parameter.grad = None
    for gradient in main.values():
        dist.all_reduce(gradient)
    return Outcome(model, summed(total), gradients=main)


def advantages(ranks: int) -> tuple[nn.Module, Tensor]:
    """A policy's loss; advantages have mean 0 and deviation 1 over the tokens of all ranks."""
    model = Decoder(layers=1)
    ids, labels = story()
    rewards = torch.randn(labels.shape) * (1 + torch.arange(ROWS))[:, None]
    ids, labels, rewards = (mine(x) for x in (ids, labels, rewards))
    counts = labels != -100
    own = rewards[counts]
    count, total, squares = summed(torch.stack([torch.tensor(float(own.numel())), own.sum(), own.square().sum()]))
    mean = total / count
    advantage = (rewards - mean) * (squares / count - mean.square()).rsqrt()
    likely = -F.cross_entropy(model(ids).transpose(1, 2), labels, reduction="none")
    ratio = (likely - likely.detach()).exp()
    each = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    loss = (each * counts).sum() / count
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return model, summed(loss)


class Painter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 8), nn.Sequential(nn.Linear(4, 16), nn.ELU(), nn.Linear(16, 12))

    def forward(self, x: Tensor, noise: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x * keep).chunk(2, -1)
        return self.decode(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


def noise(ranks: int) -> tuple[nn.Module, Tensor]:
    """A variational autoencoder with dropout: noise is drawn for all rows, and each rank takes its rows' part."""
    model = Painter()
    x = torch.rand(8, 12)
    draws = torch.Generator().manual_seed(5)
    drawn, keep = torch.randn(8, 4, generator=draws), (torch.rand(8, 12, generator=draws) > 0.2) / 0.8
    x, drawn, keep = mine(x), mine(drawn), mine(keep)
    painted, mean, log_variance = model(x, drawn, keep)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    loss = (F.binary_cross_entropy_with_logits(painted, x, reduction="sum") + divergence) / 8
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return model, summed(loss)


def teacher(ranks: int) -> tuple[nn.Module, Tensor]:
    """Self-distillation: the teacher is a moving average, and its outputs are centred by the mean of all rows."""
    student, other = (nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 6)) for _ in range(2))
    other.load_state_dict(student.state_dict())
    model = nn.ModuleDict({"student": DDP(student), "teacher": other.requires_grad_(False)})
    one, two = mine(torch.randn(8, 10)), mine(torch.randn(8, 10))
    with torch.no_grad():
        target = model["teacher"](one)
        target = ((target - averaged(target.mean(0))) / 0.1).softmax(-1)
    loss = -(target * model["student"](two).log_softmax(-1)).sum(-1).mean()
    loss.backward()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(other.parameters(), student.parameters()):
            slow.lerp_(fast, 0.01)
    return model, averaged(loss)
