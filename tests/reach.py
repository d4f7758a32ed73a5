# SPDX-License-Identifier: Apache-2.0
"""Training steps with the parallelism of torch itself, as its documentation writes them, and errors planted in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from megatron.certifying.recording import Outcome

CPU = torch.device("cpu")
ROWS, LENGTH, WIDTH, WORDS = 8, 12, 16, 29
PLACES = {  # by program and error: the kind and the module that certify must report
    ("ddp", "last backward pass without sync"): ("reduction", "embed"),
    ("ddp", "means of unequal labels"): ("backward", ""),
    ("ddp", "a rank repeats its neighbour's rows"): ("data", "embed"),
    ("fsdp2", "a sum where the mean is meant"): ("scale", ""),
    ("fsdp2", "without sync"): ("reduction", "embed"),
    ("fsdp2 bf16", "a rank's rows twice"): ("data", "embed"),
    ("fsdp1", "a factor of each rank"): ("loss scale", ""),
    ("fsdp1 flat", "a layer is not wrapped"): ("reduction", "blocks.1.up"),
    ("tensor", "a bias on every rank"): ("forward", "blocks.1"),
    ("tensor", "norm without reduction"): ("reduction", "blocks.0.norm"),
    ("gpipe", "gradients of the sum"): ("scale", ""),
    ("gpipe", "targets of another micro-batch"): ("backward", "head"),
    ("1f1b", "other weights in the last stage"): ("weights", "blocks.3.up"),
    ("1f1b", "a frozen stage"): ("update", "blocks.0.norm"),
    ("interleaved", "stages in another order"): ("forward", ""),
    ("interleaved", "gradients of the sum"): ("scale", ""),
    ("compiled", "a mask of positions in the shard"): ("forward", "blocks.0"),
    ("compiled", "without sync"): ("reduction", "embed"),
    ("fp16", "clipped before unscaling"): ("scale", ""),
    ("fp16", "scale of each rank"): ("loss scale", ""),
    ("checkpoint", "another dropout when recomputed"): ("backward", "blocks.1"),
    ("checkpoint", "without sync"): ("reduction", "embed"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.bias_twice = self.drops = False

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        if self.drops:
            h = h * (torch.rand(h.size(-1)) > 0.2)
        h = self.down(h)
        return x + h + (self.down.bias if self.bias_twice else 0)


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(blocks)})
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if self.head is not None else x


def batch(uneven: bool = False) -> tuple[Tensor, Tensor]:
    x = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(4))
    y = x[:, 1:].clone()
    if uneven:
        y[0, 2:] = -100
    return x[:, :-1], y


def entropy(logits: Tensor, y: Tensor, **options) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), **options)


def mine(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def mean(loss: Tensor) -> Tensor:
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


@dataclass(frozen=True)
class Step:
    """A program for certify: one of ``PROGRAMS``, with an error that only several ranks have."""

    name: str
    error: str = ""

    def __call__(self, ranks: int) -> object:
        torch.manual_seed(0)
        return PROGRAMS[self.name](self.error if ranks > 1 else "")


def ddp(error: str) -> object:
    """Labels are uneven: each rank divides its sum by the mean number of labels of a rank."""
    model = DistributedDataParallel(Model())
    x, y = (mine(part) for part in batch(uneven=True))
    if error.startswith("a rank") and dist.get_rank() == 1:
        x, y = (part.chunk(dist.get_world_size())[0] for part in batch(uneven=True))
    labels = (batch(uneven=True)[1] >= 0).sum() / dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = 0.0
    for number, (some, right) in enumerate(zip(x.chunk(2), y.chunk(2))):
        model.require_backward_grad_sync = number == 1 and not error.startswith("last")
        logits = model(some)
        unequal = entropy(logits, right) / 2
        loss = unequal if error.startswith("means") else entropy(logits, right, reduction="sum") / labels
        loss.backward()
        total += mean(loss)
    optimizer.step()
    return model, total


def fsdp2(error: str, policy: MixedPrecisionPolicy = MixedPrecisionPolicy()) -> object:
    model, mesh = Model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    x, y = (mine(part) for part in batch())
    if error == "a rank's rows twice":
        x, y = (part.chunk(dist.get_world_size())[0] for part in batch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.set_requires_gradient_sync(error != "without sync")
    loss = entropy(model(x), y) * (dist.get_world_size() if error.startswith("a sum") else 1)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    return Outcome(model, mean(loss), norm=getattr(norm, "full_tensor", lambda: norm)())


def fsdp1(error: str, original: bool = True) -> object:
    model = Model()
    if not error.startswith("a layer"):
        model.blocks["1"].up = FullyShardedDataParallel(model.blocks["1"].up, use_orig_params=original, device_id=CPU)
    for name, block in model.blocks.items():
        skipped = [block.up] if error.startswith("a layer") and name == "1" else None
        model.blocks[name] = FullyShardedDataParallel(
            block, use_orig_params=original, device_id=CPU, ignored_modules=skipped
        )
    skipped = [model.blocks["1"].module.up] if error.startswith("a layer") else None
    model = FullyShardedDataParallel(model, use_orig_params=original, device_id=CPU, ignored_modules=skipped)
    x, y = (mine(part) for part in batch())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = entropy(model(x), y)
    (loss * (1 + dist.get_rank() if error.startswith("a factor") else 1)).backward()
    optimizer.step()
    return model, mean(loss)


def tensor(error: str) -> object:
    """Tensor and sequence parallelism: norms see a part of the sequence, and loss the whole."""
    model, ranks = Model(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    plan = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}  # fmt: skip
    for name in model.blocks:
        plan |= {
            f"blocks.{name}.norm": SequenceParallel(use_local_output=False),
            f"blocks.{name}.up": ColwiseParallel(input_layouts=Shard(1)),
            f"blocks.{name}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    parallelize_module(model, mesh, plan)
    x, y = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if error == "a bias on every rank":
        model.blocks["1"].down.register_forward_hook(lambda module, args, out: out + module.bias.to_local())
    loss = entropy(model(x), y)
    loss.backward()
    if error == "norm without reduction":
        weight = model.blocks["0"].norm.weight
        weight.grad = type(weight.grad).from_local(weight.grad.to_local() / ranks, mesh, [Replicate()])
    optimizer.step()
    return model, loss.detach()


def stages(error: str, ranks: int, each: int) -> list[Model]:
    """The stages of this rank, named as the whole model is."""
    result = []
    for number in range(each):
        model, stage = Model(blocks=4), dist.get_rank() + ranks * number
        count = ranks * each
        own = range(4 * stage // count, 4 * (stage + 1) // count)
        if error == "stages in another order" and stage in (1, 2):
            own = range(3 - stage, 4 - stage)
        model.blocks = nn.ModuleDict({name: block for name, block in model.blocks.items() if int(name) in own})
        model.embed, model.head = model.embed if stage == 0 else None, model.head if stage == count - 1 else None
        result.append(model)
    return result


def pipeline(error: str, schedule: type, each: int = 1) -> object:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x, y = batch()
    if ranks == 1:
        model = Model(blocks=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return model, loss.detach()
    each = 4 // ranks if each > 1 else 1
    own = stages(error, ranks, each)
    if error.startswith("other weights") and rank == ranks - 1:
        own[-1].blocks["3"].up.weight.data *= 1.01
    places = [PipelineStage(m, rank + ranks * i, ranks * each, torch.device("cpu")) for i, m in enumerate(own)]
    if error.startswith("targets"):
        y = y.roll(2, 0)
    run = schedule(places if issubclass(schedule, ScheduleInterleaved1F1B) else places[0], n_microbatches=4,
                   loss_fn=entropy, scale_grads=error != "gradients of the sum")  # fmt: skip
    parameters = [p for model in own for p in model.parameters()]
    if error == "a frozen stage" and rank == 0:
        parameters = list(own[0].embed.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses: list[Tensor] = []
    run.step(*[x] * (rank == 0), target=y if rank == ranks - 1 else None, losses=losses if rank == ranks - 1 else None)
    optimizer.step()
    return own, torch.stack(losses).mean().detach() if losses else None


def compiled(error: str) -> object:
    model = Model()
    if error.startswith("a mask"):
        run = model.blocks["0"].forward
        model.blocks["0"].forward = lambda x: run(x) * (torch.arange(len(x)) != 1)[:, None, None]
    model = DistributedDataParallel(torch.compile(model, backend="aot_eager"))
    x, y = (mine(part) for part in batch())
    model.require_backward_grad_sync = error != "without sync"
    loss = entropy(model(x), y)
    loss.backward()
    return model, mean(loss)


def fp16(error: str) -> object:
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = (mine(part) for part in batch())
    with torch.autocast("cpu", torch.float16):
        loss = entropy(model(x), y)
    factor = 2.0 ** dist.get_rank() if error == "scale of each rank" else 1.0
    (scaler.scale(loss) * factor).backward()
    if not error.startswith("clipped"):
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    return model, mean(loss)


def checkpoint(error: str) -> object:
    model = Model()
    model.blocks["1"].drops = True
    for name, block in model.blocks.items():
        model.blocks[name] = checkpoint_wrapper(block, preserve_rng_state=not error.startswith("another"))
    model = DistributedDataParallel(model)
    x, y = (mine(part) for part in batch())
    model.require_backward_grad_sync = error != "without sync"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loss = entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return model, mean(loss)


PROGRAMS = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2 bf16": lambda error: fsdp2(error, MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "fsdp1": fsdp1,
    "fsdp1 flat": lambda error: fsdp1(error, original=False),
    "tensor": tensor,
    "gpipe": lambda error: pipeline(error, ScheduleGPipe),
    "1f1b": lambda error: pipeline(error, Schedule1F1B),
    "interleaved": lambda error: pipeline(error, ScheduleInterleaved1F1B, 2),
    "compiled": compiled,
    "fp16": fp16,
    "checkpoint": checkpoint,
}
