# SPDX-License-Identifier: Apache-2.0
"""Start a published recipe with stand-ins for its files: build tokenizer and data, then simulate one step.

Stand-ins are in a temporary folder under the recipe's names: a tokenizer of its type with about 300 ids,
`.bin` and `.idx` of 3,000 short documents, chats. While data are built, samples have 32 tokens, so that the short
documents make several. The simulated step has the recipe's lengths and widths. It is the step of the last rank, with
the fewest layers and micro-batches that the recipe's grid permits.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from megatron.training.arguments.data_paths import portion
from megatron.training.arguments.parser import parse
from megatron.training.data import index_files as data_files
from megatron.training.data.tokenizer import FIM_TOKENS, SENTENCEPIECE, Tokenizer, build_tokenizer, check_vocab
from megatron.training.settings.config import Config, DataConfig
from megatron.training.settings.models import LLAMA_DEFAULTS
from megatron.training.settings.training_settings import END_OF_TEXT
from tests.chats import make_tokenizer, write_chats

GPU = "H100-80G"  # attention is one call on it, which is simulated quickly
LENGTH, DOCUMENTS, TOKENS = 32, 3000, 40
LISTS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def start(recipe: dict[str, Any], folder: Path, stand_ins: Path, step: bool = True) -> None:
    """Prepare a recipe's run up to its first step, and simulate one step.

    Args:
        folder: empty; the recipe's working directory.
        stand_ins: made by :func:`make`.

    Raises:
        Refusal: the program does not start.
    """
    from megatron.simulator.dry_run.dry_run import run_job, stage_layers, with_layers
    from megatron.simulator.machines.machine_file import load
    from megatron.training.data.datasets import build_datasets

    words = [_inside(word) for word in shlex.split(recipe["flags"])]
    defaults, processes = LLAMA_DEFAULTS if recipe["program"] == "llama" else None, recipe["processes"]
    with chdir(folder):
        for name, content in recipe.get("files", {}).items():
            Path(name).write_text(json.dumps(content))
        with patch("megatron.training.arguments.validate.transformer_engine_installed", lambda: True):
            config = parse(words, defaults, processes)
        tokenizer = place(config, stand_ins)
        vocab_size = check_vocab(config.model.vocab_size, tokenizer)
        small = deepcopy(config)
        small.data.seq_length, small.data.num_dataset_builder_threads = LENGTH, 1
        held_out = 4 if config.run.eval_iters else 0
        for number in range(max(len(data_files.named_sets(config.data, split)) for split in ("valid", "test")) or 1):
            samples = 0 if number else 8
            datasets = build_datasets(small, tokenizer, (samples, held_out, held_out), number=number)
            for dataset in filter(None, datasets):
                sample = dataset[0]
                assert len(sample["tokens"]) == LENGTH and int(sample["tokens"].max()) < vocab_size
        if step:
            simulated = parse([*words, "--dry-run", "--gpu", GPU], defaults, processes)
            parallel = simulated.parallel
            if len(set(stage_layers(simulated))) == 1 and simulated.model.moe_layer_freq == 1:
                simulated = with_layers(simulated, parallel.num_virtual_stages_per_pipeline_rank or 1)
            ranks = processes // (parallel.tensor_model_parallel_size * (parallel.context_parallel_size or 1))
            batches = ranks // parallel.pipeline_model_parallel_size * simulated.data.micro_batch_size
            simulated.data.rampup_batch_size = None
            group = parallel.microbatch_group_size_per_virtual_pipeline_stage or 1
            simulated.data.global_batch_size = batches * max(parallel.pipeline_model_parallel_size, group)
            run_job((simulated, processes, processes - 1, vocab_size, load(GPU), False))


@contextmanager
def chdir(folder: Path) -> Iterator[None]:
    """Change the working directory within the context."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _inside(word: str) -> str:
    """A word with its absolute path moved into the working directory."""
    flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    return f"{flag}{equals}{value.lstrip('/')}" if value.startswith("/") and value != "/dev/null" else word


def make(folder: Path) -> Path:
    """Write the stand-ins of every kind into ``folder``; returns it."""
    import sentencepiece

    make_tokenizer(folder / "hf")
    text = folder / "text"
    text.write_text("a b c d e f g the ring sends keys and values on\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "sp"), vocab_size=300, byte_fallback=True, hard_vocab_limit=False,
        minloglevel=2,
    )  # fmt: skip
    alphabet = sorted(json.loads((folder / "hf" / "tokenizer.json").read_text())["model"]["vocab"])
    letters = [letter for letter in alphabet if len(letter) == 1]
    entries = [*letters, *FIM_TOKENS, END_OF_TEXT]
    (folder / "vocab.json").write_text(json.dumps({entry: number for number, entry in enumerate(entries)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    codes = [base64.b64encode(bytes([n])).decode() for n in range(256)]
    tokens = [{"rank": n, "token_bytes": code, "token_str": str(n)} for n, code in enumerate(codes)]
    (folder / "tiktoken.json").write_text(json.dumps(tokens))
    write_chats(folder / "chats.jsonl", 40)
    return folder


def place(config: Config, stand_ins: Path) -> Tokenizer:
    """Put the stand-ins where the configuration looks for its files; returns its tokenizer."""
    data, kind = config.data, config.data.tokenizer_type
    if kind in ("GPT2BPETokenizer", "QwenTokenizer"):
        _link(stand_ins / "vocab.json", data.vocab_file)
        _link(stand_ins / "merges.txt", data.merge_file)
    elif data.tokenizer_model:
        source = {"HuggingFaceTokenizer": "hf", "TikTokenizer": "tiktoken.json"}
        source |= dict.fromkeys(SENTENCEPIECE, "sp.model")
        _link(stand_ins / source.get(kind, "hf/tokenizer.json"), data.tokenizer_model)
    if kind == "TikTokenizer":
        data.tiktoken_num_special_tokens = 100
    tokenizer = build_tokenizer(data, config.model.vocab_size)
    if config.model.vocab_size and kind != "NullTokenizer":  # the recipe's tokenizer file has this many ids
        tokenizer = replace(tokenizer, vocab_size=config.model.vocab_size)
    if data.sft:
        for prefix in (word for name in LISTS for word in getattr(data, name) or ()):
            _link(stand_ins / "chats.jsonl", prefix)
        return tokenizer
    for path, text in _lists(data).items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    corpus = stand_ins / f"corpus-{tokenizer.eod}"
    if not corpus.with_suffix(".idx").exists():
        write_corpus(corpus, tokenizer.eod)
    for number in range(max(len(data_files.named_sets(data, split)) for split in ("valid", "test")) or 1):
        blend, blends = (None, None) if data.mock_data else data_files.parse_blends(data, number)
        for one in filter(None, [blend, *(blends or ())]):
            for prefix in one[0]:
                for end in ("bin", "idx"):
                    _link(corpus.with_suffix(f".{end}"), f"{portion(prefix)[0]}.{end}")
    return tokenizer


def _lists(data: DataConfig) -> dict[str, str]:
    """(path: text) of the files that list the data and do not exist yet."""
    result = {data.data_args_path: "1 listed", data.data_file_list: "1 listed corpus\n"}
    if data.per_split_data_args_path:
        words = {name: ["1", "listed"] for name in ("train", "valid", "test")}
        result[data.per_split_data_args_path] = json.dumps(words)
    for split, more in (("train", ""), ("valid", ' "B: 1 0.9:1 listed, 2 0:1 other"'), ("test", "")):
        result[getattr(data, f"{split}_weighted_split_paths_path")] = f'"A: 1 0:0.9 listed"{more}'
    return {path: text for path, text in result.items() if path and not os.path.exists(path)}


def write_corpus(prefix: Path, eod: int) -> None:
    """A .bin and an .idx of short documents that end with ``eod``."""
    ids = np.tile(np.arange(TOKENS) % 200, (DOCUMENTS, 1)).astype(np.int32)
    ids[:, -1] = eod
    prefix.with_suffix(".bin").write_bytes(ids.tobytes())
    head = data_files.HEADER.pack(data_files.MAGIC, 1, 4, DOCUMENTS, DOCUMENTS + 1)
    lengths, starts = np.full(DOCUMENTS, TOKENS, np.int32), np.arange(DOCUMENTS, dtype=np.int64) * TOKENS * 4
    ends = np.arange(DOCUMENTS + 1, dtype=np.int64)
    prefix.with_suffix(".idx").write_bytes(head + lengths.tobytes() + starts.tobytes() + ends.tobytes())


def _link(source: Path, path: str) -> None:
    """Put the stand-in under the recipe's name."""
    if not os.path.lexists(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).symlink_to(source)
