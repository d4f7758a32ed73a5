# SPDX-License-Identifier: Apache-2.0
"""--data-path, --split, and BigScience's ``--train-weighted-split-paths "NAME: WEIGHT START:STOP PATH, ..."``.

A group of --train-weighted-split-paths is a blend that takes a portion of the documents of each prefix. Validation and
test data may have several groups, which are evaluated one by one. These rules are from parse_data_paths in
megatron/arguments.py and get_split_by_range_ in megatron/data/dataset_utils.py of
bigscience-workshop/Megatron-DeepSpeed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from megatron.training.json_file import read_text
from megatron.training.refusal import Refusal
from megatron.training.settings.config import DataConfig

Blend = tuple[list[str], list[float] | None]  # prefixes, and their weights


def parse_blend(values: Sequence[str], flag: str) -> Blend:
    """A blend from prefixes, or from weights and prefixes in turn; an odd number of words is read as prefixes only."""
    if not values:
        raise Refusal(flag, "is empty: give a prefix, or weights and prefixes")
    weights = [_number(word) for word in values[::2]] if len(values) % 2 == 0 else [None]
    if all(weight is None for weight in weights):
        return [word.strip() for word in values], None
    if any(weight is None for weight in weights):
        raise Refusal(flag, ": give only prefixes, or a weight before each prefix: 1 PREFIX 2.5 PREFIX")
    prefixes = [word.strip() for word in values[1::2]]
    for prefix, weight in zip(prefixes, weights):
        if not (math.isfinite(weight) and weight > 0):
            raise Refusal(flag, f": weight {weight:g} of {prefix} must be above 0")
    return prefixes, weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def parse_split(split: str | None) -> str:
    """The shares train,valid,test. Checked here because core reads "9,-1" as 9,1 and "0,0,0" as NaN."""
    if split is None:
        return "969,30,1"
    number = r"\s*(\d+\.?\d*|\.\d+)\s*"
    if not re.fullmatch(f"{number}(,{number}){{0,2}}", split) or not any(map(float, split.split(","))):
        raise Refusal(f"--split {split}", ": give up to three shares, for example 969,30,1")
    return split


# Settings that name the data: prefixes, files that have the prefixes, or groups.
PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
FILES = ("data_args_path", "data_file_list", "per_split_data_args_path", "data_config")
WEIGHTED = [f"{split}_weighted_split_paths{kind}" for kind in ("", "_path") for split in ("train", "valid", "test")]
FORM = '"NAME: WEIGHT START:STOP PATH, WEIGHT START:STOP PATH"'
NUMBER = r"(\d+\.?\d*|\.\d+)"
ENTRY = re.compile(rf"{NUMBER}\s+{NUMBER}:{NUMBER}\s+(\S+)")


class Group(NamedTuple):
    """One named blend: prefixes, each followed by a space and its portion, and their weights."""

    name: str
    prefixes: list[str]
    weights: list[float]


def weighted_groups(data: DataConfig, split: str) -> list[Group]:
    """The groups of ``train``, ``valid`` or ``test``; an empty list if no flag gives any.

    Raises:
        Refusal: a group does not have this form, two groups have the same name, or a file cannot be read.
    """
    flag = f"--{split}-weighted-split-paths"
    texts, file = getattr(data, f"{split}_weighted_split_paths"), getattr(data, f"{split}_weighted_split_paths_path")
    if texts and file:
        raise Refusal(f"{flag} and {flag}-path", "name the same data: leave one out")
    if file:
        flag += "-path"
        texts = _groups_in_file(file, flag)
    groups = [_group(text, flag) for text in texts or ()]
    if split == "train" and len(groups) > 1:
        raise Refusal(flag, f"names {len(groups)} groups: give one, since training data has only one")
    if len({group.name for group in groups}) < len(groups):
        raise Refusal(flag, "gives two groups the same name: use different names")
    return groups


def portion(prefix: str) -> tuple[str, tuple[float, float] | None]:
    """(prefix, (start, stop)) from a prefix of a group; the second is None without a portion."""
    match = re.fullmatch(rf"(.*) {NUMBER}:{NUMBER}", prefix)
    return (match[1], (float(match[2]), float(match[3]))) if match else (prefix, None)


def _group(text: str, flag: str) -> Group:
    name, colon, listed = text.partition(":")
    entries = [ENTRY.fullmatch(part.strip()) for part in listed.split(",")]
    if not colon or not name.strip() or not all(entries):
        raise Refusal(f"{flag} {text!r}", f"must have the form {FORM}")
    for entry in entries:
        start, stop = float(entry[2]), float(entry[3])
        if not 0 <= start < stop <= 1 or not float(entry[1]) > 0:
            raise Refusal(flag, f": {entry[0]!r} must have a weight above 0 and 0 <= START < STOP <= 1")
    return Group(
        name.strip(),
        [f"{entry[4]} {float(entry[2]):g}:{float(entry[3]):g}" for entry in entries],
        [float(entry[1]) for entry in entries],
    )


def _groups_in_file(file: str, flag: str) -> Sequence[str]:
    """The groups of a file: one line, each group in double quotes."""
    lines = read_text(file, flag).strip().splitlines()
    groups = re.findall(r'"([^"]*)"', lines[0]) if len(lines) == 1 else []
    if not groups or re.sub(r'"[^"]*"', "", lines[0]).strip():
        raise Refusal(f"{flag} {file}", f": not one line of groups in double quotes, each of the form {FORM}")
    return groups


# Which files a tokenizer reads.
BPE = {"vocab_file": "a file", "merge_file": "a file"}
READS = {"GPT2BPETokenizer": BPE, "QwenTokenizer": BPE, "HuggingFaceTokenizer": {"tokenizer_model": "a folder"}}
WITHOUT_FILES = ("NullTokenizer", "ByteLevelTokenizer", "NucleotideTokenizer", "CodonTokenizer")


def files_of_tokenizer(kind: str) -> dict[str, str]:
    """The settings that name the files of a tokenizer, and what each must be."""
    return READS.get(kind, {} if kind in WITHOUT_FILES else {"tokenizer_model": "a file"})


def check_tokenizer(data: DataConfig, vocab_size: int | None) -> None:
    """Refuse a tokenizer if a flag that names its files is missing; whether these files exist is checked later.

    Raises:
        Refusal: names the missing flag, and a given flag that this tokenizer does not read.
    """
    kind = data.tokenizer_type
    if kind is None:
        raise Refusal(
            "--tokenizer-type", "is missing; without text to tokenize: --tokenizer-type NullTokenizer --vocab-size N"
        )
    if kind == "NullTokenizer" and not vocab_size:
        raise Refusal("--tokenizer-type NullTokenizer", "needs --vocab-size")
    for name, what in files_of_tokenizer(kind).items():
        if not getattr(data, name):
            flag = f"--{name.replace('_', '-')}"
            other = next((n for n in ("vocab_file", "merge_file", "tokenizer_model") if getattr(data, n)), None)
            given = f", and reads no --{other.replace('_', '-')}" if other and other not in READS.get(kind, {}) else ""
            raise Refusal(f"--tokenizer-type {kind}", f"needs {flag}, {what}{given}: add {flag}")
