#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Evaluate a checkpoint by teacher forcing, on any grid: loss by position, needles, tasks like RULER's, perplexity,
and scores of answers (rewards of a reward model, or log-probabilities).

    torchrun --nproc-per-node 4 tools/evaluate.py --load checkpoints --ulysses-parallel-size 2 --ring-parallel-size 2 \\
        --seq-length 16384 --eval-tasks needle loss-by-position --valid-data-path my/valid_text_document \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model my/tokenizer

Flags are those of the training program. The model's shape comes from the checkpoint (ours, Megatron-LM's or a Hugging
Face folder). So do the mask, the length, the tokenizer and the validation data, unless flags give them.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.training.arguments.argv import flat, options
from megatron.training.pretrain import CORE, EXIT_REFUSED, print_refusal
from megatron.training.pretrain import main as program
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config

DEFAULTS = {"checkpoint.use_checkpoint_args": True, "data.micro_batch_size": 1, "run.skip_train": True}
LOADS = ("--load", "--pretrained-checkpoint")
TOKENIZER = {"--tokenizer-type", "--tokenizer-model", "--tokenizer-name-or-path", "--tokenizer-file", "--vocab-file",
             "--merge-file", "--vocab-size"}  # fmt: skip
DATA = {"--data-path", "--mock-data", "--data-config", "--data-args-path", "--data-file-list",
        "--per-split-data-args-path"} | {
    f"--{split}-{source}"
    for split in ("train", "valid", "test")
    for source in ("data-path", "weighted-split-paths", "weighted-split-paths-path")
}  # fmt: skip
TOKENIZER_SETTINGS = {f"data.{name[2:].replace('-', '_')}" for name in TOKENIZER} | {
    "data.tiktoken_pattern", "data.tiktoken_num_special_tokens", "model.vocab_size",
}  # fmt: skip


READS_DATA = "loss-by-position"


def without_data(argv: Sequence[str], taken: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The command line without a task that has no data, if there are other tasks; and a line about it.

    Args:
        taken: settings from the checkpoint.

    Raises:
        Refusal: this is the only task.
    """
    given = options(argv)
    tasks = [word for flag, *values in given if flag == "--eval-tasks" for word in values]
    fields = {f"data.{name[2:].replace('-', '_')}" for name in DATA}
    has_data = {flag for flag, *_ in given} & DATA or taken.keys() & fields
    if READS_DATA not in tasks or has_data:
        return list(argv), []
    needs = "needs data, which neither a flag nor the checkpoint gives: --valid-data-path PREFIX, or --mock-data"
    if {*tasks} == {READS_DATA}:
        raise Refusal(f"--eval-tasks {READS_DATA} {needs}")
    kept = [[word for word in option if option[0] != "--eval-tasks" or word != READS_DATA] for option in given]
    return flat(kept), [f"{READS_DATA} is left out: it {needs}"]


def defaults(argv: Sequence[str]) -> dict[str, Any]:
    """Settings whose defaults differ from training's. Tasks that read no data need no data flags."""
    reads = READS_DATA in argv or any(word.split("=")[0] in DATA for word in argv)
    packed = {"data.reset_position_ids": True, "data.reset_attention_mask": True} if "scores" in argv else {}
    return DEFAULTS | ({} if reads else {"data.mock_data": True}) | packed


def settings_from_checkpoint(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(settings from the checkpoint that no flag gives, a line about each).

    Raises:
        Refusal: the checkpoint has settings that no flags could have given.
    """
    from megatron.inference.load import read_saved
    from megatron.training.checkpoint.arguments_of import held_out_data, length_of
    from megatron.training.checkpoint.megatron_lm.places import checkpoint_path

    given = {flag: values for flag, *values in options(argv)}
    folder = next((given[name] for name in LOADS if given.get(name)), [""])[0]
    step = given.get("--ckpt-step", [""])
    number = int(step[0]) if step and step[0].isdecimal() else None
    path = checkpoint_path(Path(folder), number)
    if not folder or path is None:  # refused later
        return {}, []
    taken, lines = {}, []
    if "--seq-length" not in given and (length := length_of(folder, number)):
        taken["data.seq_length"] = length
        lines.append(f"--seq-length {length}, the longest of the checkpoint")
    saved = read_saved(path, Path(folder)).settings
    if not given.keys() & TOKENIZER:
        tokenizer = {name: value for name, value in saved.items() if name in TOKENIZER_SETTINGS}
        if tokenizer.get("data.tokenizer_type"):
            taken |= tokenizer
            lines.append(f"--tokenizer-type {tokenizer['data.tokenizer_type']}, the checkpoint's")
    if READS_DATA in argv and not given.keys() & DATA:
        if data := held_out_data(path):
            taken |= data
            lines.append("data: " + ", ".join(f"--{name[5:].replace('_', '-')} {data[name]}" for name in data))
    return taken, lines


def evaluate(config: Config, runtime: Any, beats: Any, notes: Sequence[str] = ()) -> int:
    """Load, evaluate, write; returns the exit code. ``notes``: lines about settings from the checkpoint."""
    from megatron.training.evaluation.eval_report import FILE
    from megatron.training.ownership.own_files import one_job_of_ranks

    folder = Path(config.evaluation.eval_output or "out/evaluation")
    with one_job_of_ranks(folder / FILE, runtime.is_rank_zero):
        return _evaluate(config, runtime, folder, notes)


def _evaluate(config: Config, runtime: Any, folder: Path, notes: Sequence[str]) -> int:
    from megatron.training.evaluation.eval_report import lines, tables, write
    from megatron.training.evaluation.evaluated_model import prepare_evaluation
    from megatron.training.evaluation.tasks import Subject, evaluate_tasks
    from megatron.training.refusal import refuse_together

    begin = time.perf_counter()
    plan, chunks, dataset = prepare_evaluation(config, runtime)
    if runtime.is_rank_zero:
        for note in (*notes, *config.notes, f"{runtime.grid}, {config.data.seq_length} tokens a row"):
            print(f" > {note}", flush=True)
    results = evaluate_tasks(plan, Subject(config, runtime, chunks, bar if runtime.is_rank_zero else None), dataset)
    about = {
        "checkpoint": config.checkpoint.load or config.checkpoint.pretrained_checkpoint,
        "seq_length": config.data.seq_length,
        "tokenizer": config.data.tokenizer_type,
        "seed": config.run.seed,
        "grid": str(runtime.grid),
    }
    written = refuse_together(lambda: write(str(folder), about, results) if runtime.is_rank_zero else [])
    if runtime.is_rank_zero:
        from rich.console import Console

        for table in tables(results):
            Console().print(table)
        for line in lines(results):
            print(line)
        print(f"{', '.join(written)}; {time.perf_counter() - begin:.1f} s", flush=True)
    return 0


def bar(total: int, name: str) -> Callable[[int], Any]:
    """A progress bar, if the output is a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc=name, unit=" micro-batches", disable=None).update


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit code, as pretrain_gpt.py does."""
    given = list(sys.argv[1:] if argv is None else argv)
    names = {word.split("=")[0] for word in given}
    if not names & {*LOADS, "--help", "-h"}:  # checked first, because without it the model's shape is missing too
        if os.environ.get("RANK", "0") == "0":
            print("error: missing: --load DIR, the checkpoint or the Hugging Face folder to evaluate", file=sys.stderr)
        return 2
    taken, notes = {}, []
    warnings.filterwarnings("ignore", module=CORE)
    try:
        if not names & {"--help", "-h"}:
            taken, notes = settings_from_checkpoint(given)
            given, left_out = without_data(given, taken)
            notes += left_out
    except Refusal as refusal:
        print_refusal(refusal)
        return EXIT_REFUSED
    return program(given, defaults(given) | taken, work=partial(evaluate, notes=notes))


if __name__ == "__main__":
    sys.exit(main())
