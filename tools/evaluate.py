#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Evaluate a checkpoint by teacher forcing, on any grid: loss by position, needles, tasks of RULER's kind, perplexity.

    torchrun --nproc-per-node 4 tools/evaluate.py --load checkpoints --ulysses-parallel-size 2 --ring-parallel-size 2 \\
        --seq-length 16384 --eval-tasks needle loss-by-position --valid-data-path my/valid_text_document \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model my/tokenizer

Flags are those of the training program; the model's shape comes from the checkpoint, ours or a Hugging Face folder.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron.training.arguments.config import Config
from megatron.training.pretrain import main as program

DEFAULTS = {
    "checkpoint.use_checkpoint_args": True,
    "data.micro_batch_size": 1,
    "run.skip_train": True,
}
DATA = {"--data-path", "--mock-data", "--data-args-path", "--data-file-list", "--per-split-data-args-path"} | {
    f"--{split}-{source}"
    for split in ("train", "valid", "test")
    for source in ("data-path", "weighted-split-paths", "weighted-split-paths-path")
}


def defaults(argv: Sequence[str]) -> dict[str, Any]:
    """Settings that differ from training's. Tasks that read no data ask for none."""
    reads = "loss-by-position" in argv or any(word.split("=")[0] in DATA for word in argv)
    return DEFAULTS | ({} if reads else {"data.mock_data": True})


def evaluate(config: Config, runtime: Any, beats: Any) -> int:
    """Load, evaluate, write; returns the exit code."""
    from megatron.training.evaluation.model import prepare_evaluation
    from megatron.training.evaluation.report import lines, tables, write
    from megatron.training.evaluation.score import Subject
    from megatron.training.evaluation.tasks import evaluate_tasks
    from megatron.training.refusal import together

    begin = time.perf_counter()
    plan, chunks, dataset = prepare_evaluation(config, runtime)
    tell: Callable[..., None] = print if runtime.is_rank_zero else lambda *_, **__: None
    for note in (*config.notes, f"{runtime.grid}, {config.data.seq_length} tokens a row"):
        tell(f" > {note}", flush=True)
    found = evaluate_tasks(plan, Subject(config, runtime, chunks, bar if runtime.is_rank_zero else None), dataset)
    about = {
        "checkpoint": config.checkpoint.load or config.checkpoint.pretrained_checkpoint,
        "seq_length": config.data.seq_length,
        "tokenizer": config.data.tokenizer_type,
        "seed": config.run.seed,
        "grid": str(runtime.grid),
    }
    folder = config.evaluation.eval_output or "out/evaluation"
    written = together(lambda: write(folder, about, found) if runtime.is_rank_zero else [])
    if runtime.is_rank_zero:
        from rich.console import Console

        for table in tables(found):
            Console().print(table)
        for line in lines(found):
            print(line)
        print(f"{', '.join(written)}; {time.perf_counter() - begin:.1f} s", flush=True)
    return 0


def bar(total: int, name: str) -> Callable[[int], Any]:
    """A progress bar, where there is a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc=name, unit=" micro-batches", disable=None).update


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit code, as pretrain_gpt.py does."""
    given = list(sys.argv[1:] if argv is None else argv)
    names = {word.split("=")[0] for word in given}
    if not names & {"--load", "--pretrained-checkpoint", "--help", "-h"}:  # before the shape is missed, which it brings
        if os.environ.get("RANK", "0") == "0":
            print("error: missing: --load DIR, the checkpoint or the Hugging Face folder to evaluate", file=sys.stderr)
        return 2
    return program(given, defaults(given), work=evaluate)


if __name__ == "__main__":
    sys.exit(main())
