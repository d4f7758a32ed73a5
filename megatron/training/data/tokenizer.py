# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of megatron-core behind one thin interface: ``vocab_size``, ``eod``, ``tokenize``, ``detokenize``.

Where megatron-core 0.16 would download, guess or lose text, we go to the library below it; each place says why. The two
tokenizers that need no file need no library either: importing core's takes longer than a small run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.training.arguments.config import DataConfig
from megatron.training.arguments.settings.training_settings import END_OF_TEXT
from megatron.training.data import genome
from megatron.training.json_file import read_json
from megatron.training.refusal import Refusal, one_line

SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
# Qwen 2's words: as GPT-2's, but digits one by one, and line breaks apart.
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LARGEST_VOCABULARY = 1 << 24  # sixty times the largest there are
MOST_BYTES = 1 << 28  # of a tiktoken vocabulary
FIM_TOKENS = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back. ``source`` names the type and the file, for messages."""

    kind: str
    source: str
    vocab_size: int
    eod: int
    encode: Callable[[str], Sequence[int] | np.ndarray]
    decode: Callable[[list[int]], str]
    piece: Callable[[str], int | None] | None = None  # where `encode` does not find a special token in its text
    transformers: Any = None  # the tokenizer of transformers, which renders chats

    pad = -1  # core masks and zeroes every token equal to `pad`, real or padding: no id of a document may be it

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text; nothing is prepended or appended."""
        return self.array(text).tolist()

    def array(self, text: str) -> np.ndarray:
        """The same as integers of any kind [n]: a byte a base for genomes, whose texts are long."""
        ids = _reading(lambda: self.encode(text), f"{self.source} cannot tokenize a text")
        return ids if isinstance(ids, np.ndarray) else np.array(list(ids), np.int64)

    def special(self, text: str) -> int | None:
        """The id of a token that stands for ``text`` as a whole; None where there is no such token."""
        if self.piece is not None:
            return self.piece(text)
        ids = self.tokenize(text)
        return ids[0] if len(ids) == 1 else None

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of some ids."""
        return _reading(lambda: self.decode([int(i) for i in ids]), f"{self.source} cannot turn ids into text")

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """What core's index cache needs to know of a tokenizer: nothing that moves with the folder."""
        return {"class": self.kind, "vocab_size": self.vocab_size}


def build_tokenizer(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    """The tokenizer that the flags ask for; every missing flag or file is refused in one line."""
    kind = data.tokenizer_type
    if kind is None:
        raise Refusal(
            "--tokenizer-type is missing; without text to tokenize: --tokenizer-type NullTokenizer --vocab-size N"
        )
    if kind in SENTENCEPIECE:
        return _sentencepiece(kind, _existing(data.tokenizer_model, "--tokenizer-model", kind))
    if kind == "HuggingFaceTokenizer":
        return _hugging_face(kind, _existing(data.tokenizer_model, "--tokenizer-model", kind, folder=True))
    if kind == "GPT2BPETokenizer":
        vocab_file = _existing(data.vocab_file, "--vocab-file", kind)
        return _gpt2_bpe(kind, vocab_file, _existing(data.merge_file, "--merge-file", kind))
    if kind == "QwenTokenizer":
        vocab_file = _existing(data.vocab_file, "--vocab-file", kind)
        return _gpt2_bpe(kind, vocab_file, _existing(data.merge_file, "--merge-file", kind), QWEN)
    if kind.startswith("TokenizerFromFile"):
        path = _existing(data.tokenizer_model, "--tokenizer-model", kind)
        return _from_file(kind, path, (END_OF_TEXT, *(FIM_TOKENS if kind.endswith("WithFIM") else ())))
    if kind == "TikTokenizer":
        path = _existing(data.tokenizer_model, "--tokenizer-model", kind)
        return _tiktoken(kind, path, data.tiktoken_pattern or "v2", data.tiktoken_num_special_tokens, vocab_size)
    if kind == "ByteLevelTokenizer":
        return _bytes(kind)
    if kind == "NucleotideTokenizer":
        return Tokenizer(kind, kind, genome.BASE_EOD + 1, genome.BASE_EOD, genome.nucleotide_ids, genome.nucleotides)
    if kind == "CodonTokenizer":
        return Tokenizer(kind, kind, genome.CODON_EOD + 1, genome.CODON_EOD, genome.codon_ids, genome.codons)
    if kind == "NullTokenizer":
        return _null(kind, vocab_size)
    raise Refusal(f"--tokenizer-type {kind} is not supported")


def check_vocab(vocab_size: int | None, tokenizer: Tokenizer) -> int:
    """The vocabulary to build the model with, unpadded. ``vocab_size`` is --vocab-size, None where it was not given."""
    if vocab_size is None or tokenizer.kind == "NullTokenizer":  # there --vocab-size N means N ids and the eod
        return tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise Refusal(
            f"--vocab-size {vocab_size} is smaller than the {tokenizer.vocab_size} ids of {tokenizer.source}; "
            "leave --vocab-size out"
        )
    if vocab_size > tokenizer.vocab_size:
        raise Refusal(
            f"--vocab-size {vocab_size} is larger than the {tokenizer.vocab_size} ids of {tokenizer.source}; "
            "leave --vocab-size out and pad with --make-vocab-size-divisible-by"
        )
    return vocab_size


def padded_vocab_size(vocab_size: int, make_divisible_by: int, tensor_parallel: int, rows: int | None = None) -> int:
    """Megatron's rule: the next multiple of ``make_divisible_by`` times the tensor-parallel size, or ``rows``.

    Raises:
        Refusal: so many rows do not hold the vocabulary, or cannot be split over TP.
    """
    if rows is not None and (rows < vocab_size or rows % tensor_parallel):
        least = -(-vocab_size // tensor_parallel) * tensor_parallel
        raise Refusal(
            f"--padded-vocab-size {rows} does not hold a vocabulary of {vocab_size} tokens, or is no multiple of "
            f"--tensor-model-parallel-size {tensor_parallel}: use at least {least}, a multiple, or leave it out"
        )
    if rows is not None:
        return rows
    multiple = make_divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def _existing(path: str | None, flag: str, kind: str, folder: bool = False) -> str:
    """The path, if it is there."""
    what = "folder" if folder else "file"
    if not path:
        raise Refusal(f"--tokenizer-type {kind} needs {flag}, a {what}")
    if not (os.path.isdir(path) if folder else os.path.isfile(path)):
        there = os.path.exists(path)
        hint = "; models are not downloaded, give a local folder" if folder and not there else ""
        raise Refusal(f"{flag} {path}: {f'not a {what}' if there else f'no such {what}'}{hint}")
    return path


def _core(library: str, path: str | None, kind: str, flag: str, **options: Any) -> Any:
    """A tokenizer of megatron-core, or one line on why not."""
    from megatron.core.tokenizers import MegatronTokenizer  # imports transformers: seconds

    metadata = {"library": library, "model_type": "gpt"}
    return _reading(
        lambda: MegatronTokenizer.from_pretrained(path, metadata_path=metadata, **options),
        f"{flag} {path}: cannot be read by {kind}",
    )


def _reading(read: Callable[[], Any], refused: str) -> Any:
    """What ``read`` returns; whatever a broken file makes its library raise becomes one line, ``refused`` and why."""
    try:
        return read()
    except (KeyboardInterrupt, SystemExit, Refusal):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        raise Refusal(f"{refused}: {one_line(error, 300)}") from error


def _size(ids: Iterable[int], source: str) -> int:
    """One more than the largest id, for which a model has a row each."""
    size = max(ids, default=-1) + 1
    if not 0 < size <= LARGEST_VOCABULARY:
        raise Refusal(
            f"{source} has ids up to {size - 1:,}, for each of which a model would have a row: give a tokenizer of at "
            f"most {LARGEST_VOCABULARY:,}"
        )
    return size


def _eod(value: int | None, kind: str, source: str, what: str) -> int:
    """An end-of-document id that exists: core hands out -1 or None where a model has none."""
    if value is None or value < 0:
        raise Refusal(f"{kind} {source} has no {what}, which ends a document: give a tokenizer that has one")
    return int(value)


def _sentencepiece(kind: str, path: str) -> Tokenizer:
    """A SentencePiece model; its eos piece ends a document, and no bos is prepended (as in core 0.16)."""
    core = _core("sentencepiece", path, kind, "--tokenizer-model")
    eod = _eod(core.eod, kind, path, "end-of-sequence piece (eos id)")
    return Tokenizer(kind, f"{kind} {path}", core.vocab_size, eod, core.tokenize, core.detokenize)


def _hugging_face(kind: str, path: str) -> Tokenizer:
    """A local Hugging Face folder; no network, no remote code."""
    core = _core("huggingface", path, kind, "--tokenizer-model", use_fast=True, trust_remote_code=False)
    eod = _eod(core.eod, kind, path, "eos_token")
    theirs = core._tokenizer.tokenizer
    size = _size([core.vocab_size - 1, *theirs.get_vocab().values()], f"{kind} {path}")  # ids may have holes
    return Tokenizer(kind, f"{kind} {path}", size, eod, core.tokenize, core.detokenize, transformers=theirs)


def _gpt2_bpe(kind: str, vocab_file: str, merge_file: str, words: str | None = None) -> Tokenizer:
    """GPT-2's byte-level BPE. Core's own fetches "gpt2" from the network and passes the vocabulary as the merges.

    Args:
        words: how text is cut into words before, where it is not as in GPT-2; the end of a document is added then.
    """
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Model

    model = _reading(
        lambda: Model(models.BPE.from_file(vocab_file, merge_file)),
        f"--vocab-file {vocab_file} --merge-file {merge_file}: not GPT-2 BPE files",
    )
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    if words is not None:
        cut = pre_tokenizers.Split(Regex(words), "isolated")
        model.pre_tokenizer = pre_tokenizers.Sequence([cut, model.pre_tokenizer])
        model.normalizer = normalizers.NFC()
        model.add_special_tokens([END_OF_TEXT])
    model.decoder = decoders.ByteLevel()
    eod = _eod(model.token_to_id(END_OF_TEXT), kind, vocab_file, f"{END_OF_TEXT} entry")
    source = f"{kind} {vocab_file}"
    size = _size(model.get_vocab().values(), source)
    return Tokenizer(kind, source, size, eod, lambda text: model.encode(text).ids, model.decode, model.token_to_id)


def _from_file(kind: str, path: str, special: Sequence[str]) -> Tokenizer:
    """A tokenizer.json, with these special tokens, at the end where it has them not, as BigCode's Megatron-LM."""
    from tokenizers import Tokenizer as Model

    model = _reading(lambda: Model.from_file(path), f"--tokenizer-model {path}: no file of the tokenizers library")
    model.add_special_tokens(list(special))
    size = _size(model.get_vocab().values(), f"{kind} {path}")
    eod = model.token_to_id(END_OF_TEXT)
    return Tokenizer(
        kind,
        f"{kind} {path}",
        size,
        eod,
        lambda text: model.encode(text).ids,
        lambda ids: model.decode(ids, skip_special_tokens=False),
    )


def _tiktoken(kind: str, path: str, pattern: str, num_special: int, vocab_size: int | None) -> Tokenizer:
    """A tiktoken vocabulary in JSON. A smaller --vocab-size cuts it, as in Megatron; core's default is 131072."""
    if pattern not in ("v1", "v2"):
        raise Refusal(f"--tiktoken-pattern {pattern}: must be v1 or v2")
    if not path.endswith(".json"):
        raise Refusal(f"--tokenizer-model {path}: TikTokenizer reads a .json file")
    entries = read_json(path, "--tokenizer-model", MOST_BYTES)
    if not isinstance(entries, list):
        raise Refusal(f"--tokenizer-model {path}: no list of tokens, as TikTokenizer reads it")
    size = min(vocab_size or 2**17, len(entries) + num_special)
    options = {"pattern": pattern, "num_special_tokens": num_special, "vocab_size": size}
    core = _core("tiktoken", path, kind, "--tokenizer-model", **options)
    decode = core._tokenizer.tokenizer.decode  # core decodes token by token and breaks characters split over tokens
    return Tokenizer(kind, f"{kind} {path}", core.vocab_size, core.eod, core.tokenize, decode)


def _bytes(kind: str) -> Tokenizer:
    """UTF-8 bytes and an end of document, 257 ids. Core's default eod is 0, the byte NUL, among 512 ids."""

    def decode(ids: list[int]) -> str:  # core strips white space at the end
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    return Tokenizer(kind, kind, 257, 256, lambda text: text.encode("utf-8"), decode)


def _null(kind: str, vocab_size: int | None) -> Tokenizer:
    """Numbers as text: ids below --vocab-size, and --vocab-size itself as the end of document."""
    if not vocab_size:
        raise Refusal("--tokenizer-type NullTokenizer needs --vocab-size")
    return Tokenizer(
        kind,
        f"{kind} --vocab-size {vocab_size}",
        vocab_size + 1,
        vocab_size,
        encode=lambda text: [int(word) for word in text.split(" ")],
        decode=lambda ids: " ".join(map(str, ids)),
    )
