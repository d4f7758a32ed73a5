#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""``transformers.Trainer`` over Ulysses x Ring; needs accelerate: pip install accelerate

    torchrun --nproc-per-node 4 examples/huggingface/trainer.py --json out/four.json
    python examples/huggingface/trainer.py --json out/one.json

Both commands give the same losses. On one process, only transformers runs, and no code of this project.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import megatron.context_parallel as cp
from megatron.context_parallel.huggingface import ContextParallelMixin, parallelize


class LongTrainer(ContextParallelMixin, Trainer):
    """A Trainer that splits each sample over the ranks."""


def main(argv: list[str] | None = None) -> int:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ulysses", type=int, default=2 if world % 2 == 0 else 1, help="Ulysses degree")
    parser.add_argument("--ring", type=int, help="Ring degree; default: all other processes. The rest is DP")
    parser.add_argument("--batch", type=int, default=4, help="samples of a step, over all processes")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples at once")
    parser.add_argument("--json", help="a file for the losses of the steps and of an evaluation after them")
    options = parser.parse_args(argv)

    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=options.seq_length, **sizes, **heads)
    model = LlamaForCausalLM(config)
    # Trainer's evaluation is a mean over batches; with equal numbers of labels it does not depend on their size.
    data, held_out = samples(options.seq_length, 32, fewer=2), samples(options.seq_length, 8)
    if world == 1:
        trainer = Trainer(model=model, args=arguments(options, 1), train_dataset=data)
        trainer.train()
        after = trainer.evaluate(held_out)
    else:
        grid = cp.initialize_grid(ulysses=options.ulysses, ring=options.ring or world // options.ulysses)
        with parallelize(model, grid, seq_length=options.seq_length) as context:
            settings = arguments(options, grid.data.size)
            trainer = LongTrainer(context=context, model=model, args=settings, train_dataset=data)
            trainer.train()
            after = trainer.evaluate(held_out)

    losses = [*(row["loss"] for row in trainer.state.log_history if "loss" in row), after["eval_loss"]]
    if trainer.is_world_process_zero() and options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(losses))
    if dist.is_initialized():
        # Delete DDP before its process group: if DDP is the group's last owner, its destructor holds Python's lock
        # while it waits for gloo's threads, which may wait for the same lock (torch 2.13).
        del trainer
        gc.collect()
        dist.destroy_process_group()
    return 0


def arguments(options: argparse.Namespace, data: int) -> TrainingArguments:
    """Arguments of the Trainer, with ``data`` data-parallel groups."""
    return TrainingArguments(
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        per_device_eval_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.batch // options.micro_batch // data,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        ddp_find_unused_parameters=False,  # all parameters are used; Trainer's default searches for unused ones
    )


def samples(length: int, count: int, fewer: int = 0) -> list[dict[str, torch.Tensor]]:
    """``count`` samples, each a repeated phrase; each sample has ``fewer`` fewer labels than the one before."""
    result = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(256, (16,), generator=generator).repeat(length // 16)
        labels = tokens.clone()
        labels[: fewer * number] = -100
        result.append({"input_ids": tokens, "labels": labels})
    return result


if __name__ == "__main__":
    sys.exit(main())
