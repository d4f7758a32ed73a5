#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""GRPO with a reward by a rule, on a ring of processes: a random model learns to use all vowels. Needs TRL.

    python examples/sft/make_model.py --model out/dpo/model --chats out/dpo/chats.jsonl
    torchrun --standalone --nproc-per-node 2 examples/preferences/grpo.py --model out/dpo/model \\
        --chats out/dpo/chats.jsonl --picture out/dpo/grpo.png

TRL's GRPOTrainer draws the answers and computes their loss; our mixin distributes each sequence over the ring.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any


def vowels(completions: list[Any], **_: Any) -> list[float]:
    """The share of the five vowels that each answer has."""
    return [len(set("aeiou") & set(one[0]["content"])) / 5 for one in completions]


def draw(log: list[dict[str, float]], path: Path) -> None:
    """The mean reward of each step, and its mean over ten steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rewards = [row["reward"] for row in log]
    smooth = [sum(part) / len(part) for part in (rewards[max(0, at - 9) : at + 1] for at in range(len(rewards)))]
    figure, axes = pyplot.subplots(figsize=(7, 3.5), dpi=120)
    axes.plot(range(1, len(rewards) + 1), rewards, color="0.75", label="step")
    axes.plot(range(1, len(rewards) + 1), smooth, linewidth=2, label="mean of ten steps")
    axes.set(xlabel="step", ylabel="reward: vowels used, of five", title="GRPO on a ring of processes", ylim=(0, 1.02))
    axes.legend(frameon=False, loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face folder")
    parser.add_argument("--chats", type=Path, required=True, metavar="FILE", help="JSON lines; questions are prompts")
    parser.add_argument("--steps", type=int, default=80, help="(default: %(default)s)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG to draw")
    args = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    import megatron.context_parallel as cp
    from megatron.context_parallel.huggingface import TrlMixin, parallelize

    class LongGRPO(TrlMixin, GRPOTrainer): ...

    lines = map(json.loads, args.chats.read_text(encoding="utf-8").splitlines())
    questions = sorted({one["content"] for line in lines for one in line["messages"] if one["role"] == "user"})
    model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=False)
    settings = GRPOConfig(
        output_dir=str(Path(args.model).parent / "grpo"),
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        max_steps=args.steps,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        per_device_train_batch_size=32,
        num_generations=16,
        max_completion_length=8,
        beta=0.0,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    grid = cp.initialize_grid(ring=int(os.environ.get("WORLD_SIZE", "1")))
    trainer = LongGRPO(
        context=parallelize(model, grid, seq_length=256),
        model=model,
        args=settings,
        reward_funcs=vowels,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": one}]} for one in questions]),
        processing_class=AutoTokenizer.from_pretrained(args.model, trust_remote_code=False),
    )
    trainer.train()
    log = [row for row in trainer.state.log_history if "reward" in row]
    if grid.context.rank == 0:
        first, last = (sum(row["reward"] for row in part) / len(part) for part in (log[:10], log[-10:]))
        print(f"mean reward of the first ten steps {first:.3f}, of the last ten {last:.3f}")
        if args.picture:
            draw(log, args.picture)
            print(args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
