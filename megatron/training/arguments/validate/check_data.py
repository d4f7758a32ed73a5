# SPDX-License-Identifier: Apache-2.0
"""Checks of data, tokenizer, fine-tuning and evaluation."""

from __future__ import annotations

import os

from megatron.training.arguments.data_paths import (
    FILES,
    PATHS,
    WEIGHTED,
    check_tokenizer,
    parse_blend,
    parse_split,
    weighted_groups,
)
from megatron.training.families.named import vocabulary
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal, nearest, refuse_combinations
from megatron.training.settings.config import Config, DataConfig
from megatron.training.settings.job_settings import GENERATED, TASKS, EvaluationConfig

REFERENCE_FREE = ("orpo", "simpo")  # as in context_parallel/losses.py, which needs torch


def complete_data(config: Config) -> None:
    """Complete where the data and the tokenizer come from."""
    data, model = config.data, config.model
    splits = any((data.train_data_path, data.valid_data_path, data.test_data_path))
    weighted = [name for name in WEIGHTED if getattr(data, name)]
    for split in ("train", "valid", "test"):
        if getattr(data, f"{split}_weighted_split_paths"):
            weighted_groups(data, split)
    if weighted and data.split is not None:
        raise Refusal(
            "--split", f"divides --data-path; with --{weighted[0].replace('_', '-')}, leave it out", LEAVE_OUT
        )
    files = [name for name in FILES if getattr(data, name)]
    if sum((bool(data.data_path), splits, data.mock_data, bool(weighted), *(True for _ in files))) != 1:
        raise Refusal(
            "give the data once: --data-path, or --train-data-path, --valid-data-path and --test-data-path, "
            "or --train-weighted-split-paths and the like, or a file with one of them, or --mock-data",
            about=" ".join("--" + name.replace("_", "-") for name in ("mock_data", *PATHS, *FILES, *WEIGHTED)),
        )
    splits = splits or bool(data.per_split_data_args_path)
    _check_fim(data)
    _check_packing(data)
    if splits and data.split is not None:
        raise Refusal("--split", "divides --data-path; with --train-data-path and the like, leave it out", LEAVE_OUT)
    if data.split is not None:
        data.split = data.split.strip("'\" ")  # published launch scripts pass the quotes on
        parse_split(data.split)
    for name in PATHS:
        if (words := getattr(data, name)) is not None:
            parse_blend(words, f"--{name.replace('_', '-')}")
    if data.tokenizer_type is None and data.vocab_file and data.merge_file:
        data.tokenizer_type = "GPT2BPETokenizer"  # as in Megatron's pretrain_gpt.py
    if data.tokenizer_type is None and data.mock_data and (model.vocab_size or model.model):
        data.tokenizer_type = "NullTokenizer"
    if data.tokenizer_type is None and data.tokenizer_model and not os.path.splitext(data.tokenizer_model)[1]:
        data.tokenizer_type = "HuggingFaceTokenizer"  # forks that have no other tokenizer leave its type out
        config.notes.append(
            f"--tokenizer-model {data.tokenizer_model} without --tokenizer-type: read by HuggingFaceTokenizer"
        )
    if data.tokenizer_type == "NullTokenizer" and model.vocab_size is None and model.model:
        model.vocab_size = vocabulary(model.model) - 1  # the tokenizer adds one id, the end of a document
    if not config.simulation.dry_run:
        check_tokenizer(data, model.vocab_size)


def _check_fim(data: DataConfig) -> None:
    if not data.fim_data:
        return
    if data.mock_data:
        raise Refusal("--fim-data", "cuts texts, and --mock-data has none: leave one out")
    if data.tokenizer_type == "NullTokenizer":
        raise Refusal(
            "--fim-data", "cuts texts between characters, and --tokenizer-type NullTokenizer has none: use another"
        )
    if (data.fim_split_sample is None) != (data.fim_fragment_rate is None):
        raise Refusal("--fim-split-sample and --fim-fragment-rate", "go together: give both, or none")


def _check_packing(data: DataConfig) -> None:
    """Refuse --packing where samples are not made of packed documents, or change from step to step."""
    if data.packing == "greedy":
        return
    others = {
        "--mock-data": (data.mock_data, "it makes samples, not documents"),
        "--sft": (data.sft, "conversations are packed whole already"),
        "--fim-data": (data.fim_data, "it cuts texts anew and pads samples"),
        "--dataloader-type cyclic": (data.dataloader_type == "cyclic", "it shuffles samples anew"),
    }
    if data.packing == "by-work":
        others["--rampup-batch-size"] = (data.rampup_batch_size, "its global batches have one size")
        others["--step-batch-size-schedule"] = (data.step_batch_size_schedule, "its global batches have one size")
    refuse_combinations(f"--packing {data.packing}", others)


def check_lengths(config: Config) -> None:
    """Refuse a --rampup-seq-length beyond --seq-length, or with a mask under which tokens see later ones."""
    data = config.data
    if data.rampup_seq_length is None:
        return
    start, increment, over = data.rampup_seq_length
    if not increment <= start <= data.seq_length:
        raise Refusal(
            f"--rampup-seq-length {start} {increment} {over}",
            f"needs a start from its increment to --seq-length {data.seq_length}: change the start or the increment",
        )
    if config.attention.sees_ahead:
        raise Refusal("--rampup-seq-length", "needs a mask under which no token sees a later one: leave one out")
    config.notes.append(
        f"--rampup-seq-length: over {over} iterations, the loss counts more and more tokens of each sample, {start} at "
        "first; every step computes all tokens, so early steps take as long as later ones"
    )


def complete_pairs(config: Config) -> None:
    """Complete --dpo and --reward-model: pairs of answers are chats, as those of --sft."""
    data, model = config.data, config.model
    if not config.pairs or (config.evaluation.eval_tasks and config.run.skip_train):  # the latter reads --eval-files
        return
    data.sft = True
    name = "--dpo" if data.dpo else "--reward-model"
    refused = {
        "--reward-model": (data.dpo and model.reward_model, "it has no logits: leave one out"),
        "--sft-over-length truncate": (data.sft_over_length == "truncate", "an answer would lose its end: use skip"),
        "--mtp-num-layers": (model.mtp_num_layers, "these layers have no loss of pairs: leave it out"),
        "--moe-aux-loss-coeff": (model.num_experts and any(model.moe_aux_loss_coeff), "it is a sum over "
                                 f"tokens, and {name} divides by pairs: use 0, with --moe-router-enable-expert-bias"),
        "--moe-z-loss-coeff": (model.num_experts and model.moe_z_loss_coeff, f"it is a sum over tokens, and {name} "
                               "divides by pairs: leave it out"),
    }  # fmt: skip
    refuse_combinations(name, refused)
    if data.dpo:
        _complete_dpo(data, bool(model.lora_rank))
    if model.position_embedding_type == "alibi" and not data.separate_prompts:
        data.separate_prompts = True
        config.notes.append("prompts are computed for each answer, because ALiBi's distances know no shared ones")


def _complete_dpo(data: DataConfig, lora: bool) -> None:
    kind = data.dpo_loss
    if not 0 <= data.dpo_label_smoothing < 0.5:
        raise Refusal(f"--dpo-label-smoothing {data.dpo_label_smoothing}", "is not a probability below 0.5")
    for flag, given, only in (("--dpo-label-smoothing", data.dpo_label_smoothing, "sigmoid"),
                              ("--dpo-margin", data.dpo_margin, "simpo")):  # fmt: skip
        if given and kind != only:
            raise Refusal(f"{flag} with --dpo-loss {kind}", f"has no meaning: leave it out, or use {only}")
    if kind in REFERENCE_FREE:
        if data.dpo_reference not in (None, "none"):
            raise Refusal(f"--dpo-reference {data.dpo_reference} with --dpo-loss {kind}", "has none: leave it out")
        data.dpo_reference = "none"
    elif data.dpo_reference is None:
        data.dpo_reference = "adapters-off" if lora else "copy"
    elif data.dpo_reference == "adapters-off" and not lora:
        raise Refusal("--dpo-reference adapters-off", "needs adapters: give --lora-rank, or use copy")


def complete_sft(config: Config) -> None:
    """Complete --sft: each conversation is a document, whose positions start at 0."""
    data = config.data
    if not data.sft:
        return
    refused = {
        "--mock-data": (data.mock_data, "it has no chats"),
        "--fim-data": (data.fim_data, "it cuts texts, not chats"),
        "--rampup-seq-length": (data.rampup_seq_length, "it would cut conversations off"),
        "--dataloader-type cyclic": (data.dataloader_type == "cyclic", "each epoch is shuffled anyway"),
        "--eod-mask-loss": (data.eod_mask_loss, "the loss includes the ends of the assistant's turns"),
        **{"--" + name.replace("_", "-"): (getattr(data, name), "give --data-path FILE") for name in WEIGHTED},
    }
    for flag, (given, reason) in refused.items():
        if given:
            raise Refusal(f"--sft with {flag}", f"is not supported ({reason}): leave one out")
    if data.tokenizer_type != "HuggingFaceTokenizer":
        raise Refusal(
            "--sft",
            f"needs a tokenizer with a chat template, not --tokenizer-type {data.tokenizer_type}: use "
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR",
        )
    if data.sft_tokenizer_prompt_format.startswith("nemotron"):
        raise Refusal(
            f"--sft-tokenizer-prompt-format {data.sft_tokenizer_prompt_format}",
            ": Megatron-LM's own formats are not included: give a file with a Jinja template, or leave it out "
            "for the tokenizer's template",
            LEAVE_OUT,
        )
    data.reset_position_ids = data.reset_attention_mask = True


# Evaluation; checks that need the tokenizer are made when samples are planned. READ_BY: which tasks read a setting.
READ_BY = {
    "eval_lengths": GENERATED,
    "eval_depths": GENERATED,
    "eval_samples": GENERATED,
    "eval_haystack": GENERATED,
    "eval_files": ("perplexity", "scores"),
    "eval_stride": ("perplexity",),
    "eval_output": TASKS,
}


def complete_evaluation(config: Config) -> None:
    """Complete --eval-tasks and its lengths; refuse flags that no task reads, and masks that show later tokens."""
    settings, length = config.evaluation, config.data.seq_length
    tasks = settings.eval_tasks or []
    for task in tasks:
        if task not in TASKS:
            hint = f"did you mean {nearest(task, TASKS)}? choose from {', '.join(TASKS)}"
            raise Refusal(f"--eval-tasks {task}", f": not a task; {hint}")
    for name, readers in READ_BY.items():
        given = getattr(settings, name) != getattr(EvaluationConfig, name)
        if given and not set(readers) & set(tasks):
            wanted = "" if readers == TASKS else f" {' or '.join(readers)}"
            raise Refusal(
                f"--{name.replace('_', '-')}",
                f"does nothing without --eval-tasks{wanted}: add it, or leave it out",
                LEAVE_OUT,
            )
    if not tasks:
        return
    if config.attention.sees_ahead:
        raise Refusal(
            "--eval-tasks",
            "scores each token by those before it, and under --attention-mask "
            f"{config.attention.attention_mask} tokens see later ones: leave one out",
        )
    settings.eval_tasks = list(dict.fromkeys(tasks))
    for task, what in (("perplexity", "text"), ("scores", "chats or pairs of answers")):
        if task in tasks and not settings.eval_files:
            lacks = f"needs {what}: add --eval-files FILE ..., or leave it out"
            if len(settings.eval_tasks) == 1:
                raise Refusal(f"--eval-tasks {task}", lacks, LEAVE_OUT)
            settings.eval_tasks.remove(task)
            config.notes.append(f"--eval-tasks {task} is left out: it {lacks}")
    tasks = settings.eval_tasks
    if settings.eval_files and {"perplexity", "scores"} <= {*tasks}:
        raise Refusal("--eval-tasks perplexity scores", "read different --eval-files: evaluate one after the other")
    if config.model.reward_model and set(tasks) != {"scores"}:
        raise Refusal(
            f"--reward-model with --eval-tasks {' '.join(tasks)}",
            "is not supported: it has no logits, only --eval-tasks scores",
        )
    if settings.eval_stride is not None and settings.eval_stride > length:
        raise Refusal(
            f"--eval-stride {settings.eval_stride}",
            f"is above --seq-length {length} and would leave tokens out: use at most {length}",
            Fix(f"--eval-stride {length}"),
        )
    if "loss-by-position" in tasks and not config.run.eval_iters:
        raise Refusal("--eval-tasks loss-by-position", "reads --eval-iters batches, which is 0: give 1 or more")
    for wanted in settings.eval_lengths or ():
        if wanted > length:
            raise Refusal(
                f"--eval-lengths {wanted}",
                f"is above --seq-length {length}: give --seq-length {wanted}, or the next length that the grid "
                "divides, or leave it out",
                Fix(f"--seq-length {wanted}"),
                LEAVE_OUT,
            )
    if settings.eval_lengths:
        settings.eval_lengths = sorted(set(settings.eval_lengths))
