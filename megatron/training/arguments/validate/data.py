# SPDX-License-Identifier: Apache-2.0
"""Checks of data and tokenizer, texts to fill in, and lengths that grow."""

from __future__ import annotations

import os

from megatron.training.arguments.blends import parse_blend, parse_split
from megatron.training.arguments.config import Config, DataConfig
from megatron.training.arguments.models import vocabulary
from megatron.training.arguments.validate.attention import sees_ahead
from megatron.training.arguments.weighted_paths import WEIGHTED, weighted_groups
from megatron.training.refusal import Refusal

BPE = {"vocab_file": "a file", "merge_file": "a file"}
READS = {"GPT2BPETokenizer": BPE, "QwenTokenizer": BPE, "HuggingFaceTokenizer": {"tokenizer_model": "a folder"}}
WITHOUT_FILES = ("NullTokenizer", "ByteLevelTokenizer", "NucleotideTokenizer", "CodonTokenizer")


def check_data(config: Config) -> None:
    """Settle where the data and the tokenizer come from."""
    data, model = config.data, config.model
    splits = any((data.train_data_path, data.valid_data_path, data.test_data_path))
    weighted = [name for name in WEIGHTED if getattr(data, name)]
    for split in ("train", "valid", "test"):
        if getattr(data, f"{split}_weighted_split_paths"):
            weighted_groups(data, split)
    if weighted and data.split is not None:
        raise Refusal(f"--split shares out --data-path; with --{weighted[0].replace('_', '-')}, leave it out")
    files = [name for name in ("data_args_path", "data_file_list", "per_split_data_args_path") if getattr(data, name)]
    if sum((bool(data.data_path), splits, data.mock_data, bool(weighted), *(True for _ in files))) != 1:
        raise Refusal(
            "give the data once: --data-path, or --train-data-path, --valid-data-path and --test-data-path, "
            "or --train-weighted-split-paths and the like, or a file with one of them, or --mock-data"
        )
    splits = splits or bool(data.per_split_data_args_path)
    _check_fim(data)
    if splits and data.split is not None:
        raise Refusal("--split shares out --data-path; with --train-data-path and the like, leave it out")
    if data.split is not None:
        data.split = data.split.strip("'\" ")  # published launch scripts pass the quotes on
        parse_split(data.split)
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
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


def check_tokenizer(data: DataConfig, vocab_size: int | None) -> None:
    """Refuse a tokenizer that lacks what it is read from, before anyone looks whether the files are there.

    Raises:
        Refusal: it names the flag that is missing, and one that gives a file to a tokenizer that reads another.
    """
    kind = data.tokenizer_type
    if kind is None:
        raise Refusal(
            "--tokenizer-type is missing; without text to tokenize: --tokenizer-type NullTokenizer --vocab-size N"
        )
    if kind == "NullTokenizer" and not vocab_size:
        raise Refusal("--tokenizer-type NullTokenizer needs --vocab-size")
    for name, what in READS.get(kind, {} if kind in WITHOUT_FILES else {"tokenizer_model": "a file"}).items():
        if not getattr(data, name):
            flag = f"--{name.replace('_', '-')}"
            other = next((n for n in ("vocab_file", "merge_file", "tokenizer_model") if getattr(data, n)), None)
            given = f", and reads no --{other.replace('_', '-')}" if other and other not in READS.get(kind, {}) else ""
            raise Refusal(f"--tokenizer-type {kind} needs {flag}, {what}{given}: add it")


def _check_fim(data: DataConfig) -> None:
    for flag, rate in (("--fim-rate", data.fim_rate), ("--fim-spm-rate", data.fim_spm_rate),
                       ("--fim-fragment-rate", data.fim_fragment_rate)):  # fmt: skip
        if rate is not None and not 0 <= rate <= 1:
            raise Refusal(f"{flag} {rate:g} must be from 0 to 1")
    if not data.fim_data:
        return
    if data.mock_data:
        raise Refusal("--fim-data cuts texts, and --mock-data has none: leave one out")
    if data.tokenizer_type == "NullTokenizer":
        raise Refusal("--fim-data cuts texts between characters, and --tokenizer-type NullTokenizer has none")
    if (data.fim_split_sample is None) != (data.fim_fragment_rate is None):
        raise Refusal("--fim-split-sample and --fim-fragment-rate go together: give both, or none")


def check_lengths(config: Config) -> None:
    """Refuse a --rampup-seq-length that grows to no length, or whose tokens see those that do not count."""
    data = config.data
    if data.rampup_seq_length is None:
        return
    start, increment, over = data.rampup_seq_length
    if not increment <= start <= data.seq_length:
        raise Refusal(
            f"--rampup-seq-length {start} {increment} {over} needs a start from its increment to --seq-length "
            f"{data.seq_length}: use such a one"
        )
    if sees_ahead(config.attention):
        raise Refusal("--rampup-seq-length needs a mask by which no token sees a later one: leave one out")
    config.notes.append(
        f"--rampup-seq-length: of each sample, tokens from {start} on begin to count over {over} iterations; all are "
        "computed, so short steps take no less time"
    )
