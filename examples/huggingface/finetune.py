#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a model of Hugging Face's transformers over Ulysses x Ring in your own loop, and compare with one process.

    torchrun --nproc-per-node 4 examples/huggingface/finetune.py
    torchrun --nproc-per-node 4 examples/huggingface/finetune.py --ulysses 1 --fpdt-chunk-size 128
    torchrun --nproc-per-node 4 examples/huggingface/finetune.py --model DIR --seq-length 65536 --alone 0

Without --model, a tiny random Llama learns to repeat a text, on packed documents of different lengths. Then the first
process trains the same model alone, with transformers only, and the script prints both losses.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import megatron.context_parallel as cp
from megatron.context_parallel.huggingface import Fpdt, parallelize

VOCABULARY = 256


def main(argv: list[str] | None = None) -> int:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder with a checkpoint of transformers; default: a tiny random Llama")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ulysses", type=int, default=2 if world % 2 == 0 else 1, help="Ulysses degree; Ring the rest")
    parser.add_argument("--fpdt-chunk-size", type=int, help="run decoder layers in chunks of this many tokens")
    parser.add_argument("--alone", type=int, default=1, help="0: do not also train on one process")
    options = parser.parse_args(argv)

    grid = cp.initialize_grid(ulysses=options.ulysses, ring=world // options.ulysses)
    device = pick_device()
    model = make_model(options).to(device)
    model.config.use_cache = False  # with a cache, transformers' masks do not separate packed documents
    original = copy.deepcopy(model)

    fpdt = Fpdt(options.fpdt_chunk_size) if options.fpdt_chunk_size else None
    with parallelize(model, grid, seq_length=options.seq_length, fpdt=fpdt) as context:
        wrapped = DistributedDataParallel(model) if world > 1 else model  # averages gradients, as the loss requires
        losses = train(wrapped, options, device, context.shard)

    error = 0.0
    if dist.get_rank() == 0:
        print(f"{grid}; {options.seq_length} tokens, {context.layout.local_length} per process")
        expected = train(original, options, device, dict) if options.alone else losses
        for step, (mine, theirs) in enumerate(zip(losses, expected), 1):
            print(f"step {step:3}  loss {mine:.6f}  on one process {theirs:.6f}")
        error = max(abs(mine - theirs) / theirs for mine, theirs in zip(losses, expected))
        print(f"largest difference: {error:.1e} of the loss")
    dist.barrier()
    dist.destroy_process_group()
    return int(error > 1e-5)


def pick_device() -> torch.device:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def make_model(options: argparse.Namespace) -> PreTrainedModel:
    """A random model, the same on every process."""
    if options.model:
        return AutoModelForCausalLM.from_pretrained(options.model, trust_remote_code=False)
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=options.seq_length, **sizes, **heads)
    return LlamaForCausalLM(config)


def make_batch(options: argparse.Namespace, step: int, device: torch.device) -> dict[str, Tensor]:
    """A complete sample, equal on every process: two documents, each a repeated phrase."""
    generator = torch.Generator().manual_seed(step)
    lengths = [options.seq_length // 3, options.seq_length - options.seq_length // 3]
    phrases = [torch.randint(VOCABULARY, (16,), generator=generator) for _ in lengths]
    tokens = torch.cat([phrase.repeat(n // 16 + 1)[:n] for phrase, n in zip(phrases, lengths)])[None].to(device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions}


def train(model, options: argparse.Namespace, device: torch.device, shard) -> list[float]:
    """The loss of each step; ``shard`` takes this rank's part of a batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    losses = []
    for step in range(options.steps):
        loss = model(**shard(make_batch(options, step, device))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    sys.exit(main())
