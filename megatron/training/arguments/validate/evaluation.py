# SPDX-License-Identifier: Apache-2.0
"""Checks of --eval-tasks. What needs the tokenizer is checked where samples are planned."""

from __future__ import annotations

from megatron.training.arguments.config import Config
from megatron.training.arguments.settings.evaluation import MADE, TASKS, EvaluationConfig
from megatron.training.arguments.validate.attention import sees_ahead
from megatron.training.refusal import Refusal

READ_BY = {
    "eval_lengths": MADE,
    "eval_depths": MADE,
    "eval_samples": MADE,
    "eval_haystack": MADE,
    "eval_files": ("perplexity",),
    "eval_stride": ("perplexity",),
    "eval_output": TASKS,
}


def check_evaluation(config: Config) -> None:
    """Settle --eval-tasks and its lengths; refuse flags that no task reads, and masks under which nothing is scored."""
    settings, length = config.evaluation, config.data.seq_length
    tasks = settings.eval_tasks or []
    for task in tasks:
        if task not in TASKS:
            raise Refusal(f"--eval-tasks {task}: not a task; choose from {', '.join(TASKS)}")
    for name, readers in READ_BY.items():
        given = getattr(settings, name) != getattr(EvaluationConfig, name)
        if given and not set(readers) & set(tasks):
            wanted = "" if readers == TASKS else f" {' or '.join(readers)}"
            raise Refusal(
                f"--{name.replace('_', '-')} does nothing without --eval-tasks{wanted}: add it, or leave it out"
            )
    if not tasks:
        return
    if sees_ahead(config.attention):
        raise Refusal(
            "--eval-tasks scores each token by those before it, and under --attention-mask "
            f"{config.attention.attention_mask} tokens see later ones: leave one out"
        )
    settings.eval_tasks = list(dict.fromkeys(tasks))
    if "perplexity" in tasks and not settings.eval_files:
        raise Refusal("--eval-tasks perplexity: of which text? Add --eval-files FILE ..., or leave it out")
    if settings.eval_stride is not None and settings.eval_stride > length:
        raise Refusal(
            f"--eval-stride {settings.eval_stride} is above --seq-length {length} and would leave tokens out: use at "
            f"most {length}"
        )
    if "loss-by-position" in tasks and not config.run.eval_iters:
        raise Refusal("--eval-tasks loss-by-position reads --eval-iters batches, which is 0: give 1 or more")
    for wanted in settings.eval_lengths or ():
        if wanted > length:
            raise Refusal(
                f"--eval-lengths {wanted} is above --seq-length {length}: give --seq-length {wanted}, or a multiple of "
                "what the grid cuts it in, or leave it out"
            )
    if settings.eval_lengths:
        settings.eval_lengths = sorted(set(settings.eval_lengths))
