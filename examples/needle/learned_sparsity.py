#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a small DeepSeek V3.2 that learns which keys to read, beside the same model that reads all of them.

    torchrun --nproc-per-node 2 examples/needle/learned_sparsity.py --output out/learned

A text hides facts ("name, number" in one token) among other tokens. Later it asks for names, and the next token is the
number; one answer in five is drawn at random, so that the loss has a floor. First the model reads all keys, and its
indexers learn from attention. Then two copies go on with equal data: one reads all keys, in the other each query reads
the few that its indexer chooses. The script draws the losses of both, and how often each finds a fact, by depth.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, PreTrainedModel

import megatron.context_parallel as cp
from megatron.context_parallel.huggingface import parallelize

NAMES, NUMBERS, OTHERS = 16, 16, 32
QUESTION = NAMES * NUMBERS  # the first token that asks for a name; before it are the facts
ANSWER = QUESTION + NAMES
FIRST_OTHER = ANSWER + NUMBERS
FACTS, QUESTIONS, NOISE = 8, 24, 0.2
DEPTHS = 8


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a folder for losses.json and picture.png")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8, help="keys that a query reads in the sparse stage")
    parser.add_argument("--dense-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=150, help="of the sparse stage")
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args(argv)
    grid = cp.initialize_grid(ring=int(os.environ.get("WORLD_SIZE", "1")))

    model, every = make_model(options.seq_length), options.seq_length
    start = train(model, grid, options, range(options.dense_steps), every, 4e-3)
    copies = {"all keys": (model, every), f"{options.top_k} chosen keys": (copy.deepcopy(model), options.top_k)}
    steps = range(options.dense_steps, options.dense_steps + options.steps)
    losses = {name: train(one, grid, options, steps, top_k, 1e-3) for name, (one, top_k) in copies.items()}
    found = {name: needles(one, grid, options, top_k) for name, (one, top_k) in copies.items()}
    never = copy.deepcopy(model)  # the control: as before the training, indexers know nothing
    for layer, new in zip(never.model.layers, make_model(options.seq_length).model.layers):
        layer.self_attn.indexer.load_state_dict(new.self_attn.indexer.state_dict())
    found["untrained indexers"] = needles(never, grid, options, options.top_k)

    if dist.get_rank() == 0:
        results = {"start": start, "losses": losses, "found": found}
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "losses.json").write_text(json.dumps(results))
        draw(results, options)
        last = {name: sum(x["loss"] for x in steps[-50:]) / len(steps[-50:]) for name, steps in losses.items()}
        dense, sparse = last.values()
        print(f"loss, mean of the last 50 steps: {dense:.4f} and {sparse:.4f}, {sparse / dense - 1:+.2%}")
        for name, by_depth in found.items():
            print(f"{name:20} answers {sum(by_depth) / len(by_depth):.1%}; by depth", *(f"{x:.0%}" for x in by_depth))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def make_model(length: int) -> PreTrainedModel:
    """A random model, the same on every process."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "mlp_layer_types": ["dense"] * 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
    latents = {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16}
    index = {"index_n_heads": 4, "index_head_dim": 32}
    tokens = {"vocab_size": FIRST_OTHER + OTHERS, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    others = {"max_position_embeddings": length, "initializer_range": 0.06, "use_cache": False}
    return DeepseekV32ForCausalLM(DeepseekV32Config(**sizes, **heads, **latents, **index, **tokens, **others))


def make_batch(options: argparse.Namespace, step: int, depth: float | None = None) -> dict[str, Tensor]:
    """A complete batch, equal on every process; with ``depth`` one fact lies there, and the last token answers it."""
    draw, half = torch.Generator().manual_seed(step), options.seq_length // 2
    tokens = FIRST_OTHER + torch.randint(OTHERS, (options.batch, options.seq_length), generator=draw)
    labels = torch.full_like(tokens, -100)
    for row, marks in zip(tokens, labels):
        names = torch.randperm(NAMES, generator=draw)[:FACTS]
        numbers = torch.randint(NUMBERS, (FACTS,), generator=draw)
        places = torch.randperm(half, generator=draw)[:FACTS]
        asked = torch.randint(FACTS, (QUESTIONS,), generator=draw)
        at = half + 2 * torch.randperm(half // 2, generator=draw)[:QUESTIONS]
        answers = numbers[asked]
        if depth is None:
            random = torch.rand(QUESTIONS, generator=draw) < NOISE
            answers = torch.where(random, torch.randint(NUMBERS, (QUESTIONS,), generator=draw), answers)
        else:
            place = round(depth * (options.seq_length - 3))
            places, names, numbers = torch.tensor([place]), names[:1], numbers[:1]
            at, asked, answers = torch.tensor([options.seq_length - 2]), torch.zeros(1, dtype=torch.long), numbers
        row[places] = names * NUMBERS + numbers
        row[at], row[at + 1] = QUESTION + names[asked], ANSWER + answers
        marks[at + 1] = row[at + 1]
    return {"input_ids": tokens, "labels": labels}


def read(model: PreTrainedModel, top_k: int) -> None:
    """Let each query read ``top_k`` keys."""
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = top_k


def train(
    model: PreTrainedModel, grid: cp.Grid, options: argparse.Namespace, steps: range, top_k: int, rate: float
) -> list[dict[str, float]]:
    """The losses of the answers and of the indexers, step by step."""
    read(model, top_k)
    optimizer, record = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98)), []
    with parallelize(model, grid, seq_length=options.seq_length, indexer_loss=1.0) as context:
        for number, step in enumerate(steps):
            optimizer.param_groups[0]["lr"] = rate * min(1, (number + 1) / 20, (len(steps) - number) / 50)
            loss = model(**context.shard(make_batch(options, step))).loss
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= grid.world_size
            optimizer.step()
            optimizer.zero_grad()
            taught = context.indexer_loss.item()
            record.append({"loss": loss.item() - taught, "indexer": taught})
            if dist.get_rank() == 0 and step % 50 == 49:
                mine = record[-1]["loss"]
                print(f"step {step + 1}, {top_k} keys: loss {mine:.4f}, indexers {taught:.4f}", flush=True)
    return record


@torch.no_grad()
def needles(model: PreTrainedModel, grid: cp.Grid, options: argparse.Namespace, top_k: int) -> list[float]:
    """The share of answers that are right, by the depth of the fact."""
    read(model, top_k)
    right = []
    with parallelize(model, grid, seq_length=options.seq_length) as context:
        for n in range(DEPTHS):
            hits = []
            for part in range(4):
                batch = make_batch(options, 10**6 + DEPTHS * part + n, n / (DEPTHS - 1))
                own = context.shard({"input_ids": batch["input_ids"]})
                logits = context.gather(model(**own).logits, own)
                hits.append(logits[:, -2].argmax(-1) == batch["input_ids"][:, -1])
            right.append(torch.cat(hits).float().mean().item())
    return right


def draw(results: dict, options: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), dpi=120, layout="constrained")
    first = options.dense_steps

    def smooth(steps: list[dict[str, float]], key: str) -> list[float]:
        values = torch.tensor([step[key] for step in steps])
        return [values[max(0, i - 9) : i + 1].mean().item() for i in range(len(values))]

    left.plot(range(first), smooth(results["start"], "loss"), color="grey", label="all keys, first stage")
    for name, steps in results["losses"].items():
        left.plot(range(first, first + len(steps)), smooth(steps, "loss"), label=name)
    sparse = list(results["losses"].values())[-1]
    learnt = smooth([*results["start"], *sparse], "indexer")
    left.plot(range(len(learnt)), learnt, color="tab:green", linestyle=":", label="indexers' KL")
    left.set(xlabel="step", ylabel="nats", title="Loss of answers, mean of 10 steps", ylim=(0, 3))
    depths = [n / (DEPTHS - 1) * 100 for n in range(DEPTHS)]
    for (name, by_depth), style in zip(results["found"].items(), ("o-", "s--", "x:")):
        right.plot(depths, [share * 100 for share in by_depth], style, label=name)
    right.axhline(100 / NUMBERS, color="grey", linewidth=0.8, label="guessing")
    right.set(xlabel="depth of the fact, % of the text", ylabel="answers right, %", ylim=(0, 104))
    right.set_title(f"One fact in {options.seq_length} tokens")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(options.output / "picture.png")


if __name__ == "__main__":
    sys.exit(main())
