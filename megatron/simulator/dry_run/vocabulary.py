# SPDX-License-Identifier: Apache-2.0
"""How many tokens a dry run's vocabulary has: from the flags, from the tokenizer where its files are, else by name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from megatron.training.arguments.config import Config
from megatron.training.arguments.models import vocabulary
from megatron.training.arguments.validate.data import WITHOUT_FILES
from megatron.training.data.tokenizer import SENTENCEPIECE, build_tokenizer, check_vocab
from megatron.training.refusal import Refusal

# Ids of published tokenizers, added ones included, by a part of the name; the first that fits counts.
BY_NAME: tuple[tuple[str, int], ...] = (
    (r"llama-?3", 128256),
    (r"llama-?2|llama-?1|llama-\d+b|llama$|tinyllama|vicuna|alpaca", 32000),
    (r"mistral-nemo", 131072),
    (r"mi[sx]tral", 32000),
    (r"qwen-?3", 151669),
    (r"qwen-?2\.5", 151665),
    (r"qwen-?2", 151646),
    (r"gpt-?neox|pythia|mpt-", 50277),
    (r"gpt-?2|gpt-?j", 50257),
    (r"opt-\d", 50265),
    (r"falcon", 65024),
    (r"starcoder(?!2)", 49152),
    (r"bloom", 250680),
    (r"nemotron", 256000),
)
BY_TYPE = {"GPT2BPETokenizer": 50257, **dict.fromkeys(SENTENCEPIECE, 32000)}
LONGEST_TIKTOKEN = 2**17  # what core takes of a tiktoken vocabulary unless told otherwise


def vocabulary_of(config: Config) -> tuple[int, str | None]:
    """The real vocabulary size of a dry run, and what was assumed for it, in one line.

    A run takes its tokenizer's. So does a dry run where the files are there; else the size is --vocab-size, or
    --padded-vocab-size, or goes by the name of the tokenizer's model, of --model, or of --tokenizer-type.

    Raises:
        Refusal: none of them says it; or what the run would refuse of a tokenizer that is there.
    """
    model, kind = config.model, config.data.tokenizer_type
    if kind in WITHOUT_FILES or (kind and _files_are_there(config)):
        return check_vocab(model.vocab_size, build_tokenizer(config.data, model.vocab_size)), None
    absent = f"the files of --tokenizer-type {kind} are not here" if kind else "no --tokenizer-type was given"
    if model.vocab_size:
        return model.vocab_size, f"{absent}: {model.vocab_size} tokens, by --vocab-size"
    if padded := model.padded_vocab_size:
        return padded, f"{absent}: {padded} tokens, by --padded-vocab-size"
    for name, size in _named(config):
        return size, f"{absent}: {size} tokens assumed, as {name} has; --vocab-size N decides otherwise"
    where = f" ({config.data.tokenizer_model})" if config.data.tokenizer_model else ""
    raise Refusal(f"--dry-run: {absent}{where}, and nothing says how many tokens it has: add --vocab-size N")


def _files_are_there(config: Config) -> bool:
    data = config.data
    if data.tokenizer_type == "GPT2BPETokenizer":
        return all(path and os.path.isfile(path) for path in (data.vocab_file, data.merge_file))
    there = os.path.isdir if data.tokenizer_type == "HuggingFaceTokenizer" else os.path.isfile
    return bool(data.tokenizer_model) and there(data.tokenizer_model)


def _named(config: Config) -> Iterator[tuple[str, int]]:
    """(name, size) of what the flags name, the surest first."""
    model, data = config.model.model, config.data
    text = re.sub(r"[\s_]", "-", (data.tokenizer_model or "").lower())
    for pattern, size in BY_NAME:
        for part in reversed(text.removesuffix(".model").removesuffix(".json").split("/")):
            if re.search(pattern, part):
                yield data.tokenizer_model, size
    if model:
        yield f"--model {model}", vocabulary(model)
    if data.tokenizer_type == "TikTokenizer":
        yield "TikTokenizer at most", LONGEST_TIKTOKEN
    if data.tokenizer_type in BY_TYPE:
        yield ("GPT-2" if data.tokenizer_type == "GPT2BPETokenizer" else "Llama-2"), BY_TYPE[data.tokenizer_type]
