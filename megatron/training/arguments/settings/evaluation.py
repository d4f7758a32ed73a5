# SPDX-License-Identifier: Apache-2.0
"""Tasks by which a model is evaluated, beside the loss on held-out data."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.arguments.settings.flag import flag

MADE = ("needle", "ruler-multi-key", "ruler-variable-tracking", "ruler-common-words")  # of samples made here
TASKS = ("loss-by-position", *MADE, "perplexity")


@dataclass
class EvaluationConfig:
    """What tools/evaluate.py does, and training at each --eval-interval."""

    eval_tasks: list[str] | None = flag(None, f"tasks: {', '.join(TASKS)}", type=str, nargs="+")
    eval_lengths: list[int] | None = flag(
        None,
        "needle and ruler-*: tokens of their samples; default --seq-length and its halves, four at most, from 512 on, "
        "that hold the task",
        type=int,
        nargs="+",
    )
    eval_depths: int = flag(11, "needle: depths in the haystack, evenly from its begin to its end")
    eval_samples: int = flag(4, "needle: samples of a length and depth; ruler-*: so many times --eval-depths a length")
    eval_haystack: str | None = flag(
        None, "needle and ruler-*: text file to hide in; default a dozen plain sentences, in random order", type=str
    )
    eval_files: list[str] | None = flag(None, "perplexity: text files", type=str, nargs="+")
    eval_stride: int | None = flag(
        None, "perplexity: tokens from one window to the next; default --seq-length, windows side by side", type=int
    )
    eval_output: str | None = flag(
        None, "folder for evaluation.json and pictures; default of tools/evaluate.py: out/evaluation", type=str
    )
