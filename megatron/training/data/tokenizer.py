# SPDX-License-Identifier: Apache-2.0
"""megatron-core's tokenizers with a small interface: ``vocab_size``, ``eod``, ``tokenize``, ``detokenize``.

Where megatron-core 0.16 would download, guess or lose text, the library below it is called directly; each function
gives the reason. Only TikTokenizer is core's: importing core takes seconds, which every command that tokenizes would
need. Tokenizers without a file need no library.
"""

from __future__ import annotations

import base64
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.training.arguments.data_paths import check_tokenizer, files_of_tokenizer
from megatron.training.data import genome
from megatron.training.json_file import read_json
from megatron.training.refusal import Refusal, one_line
from megatron.training.settings.config import DataConfig
from megatron.training.settings.training_settings import END_OF_TEXT
from megatron.training.untrusted.links import check_files_in

SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
# How Qwen 2 splits words: as GPT-2, but with separate digits and line breaks.
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LARGEST_VOCABULARY = 1 << 24  # sixty times the largest known one
MOST_GROWTH = 100  # times, of a text in a normalizer: one character can stand for 18
MOST_BYTES = 1 << 28  # limit of a tiktoken vocabulary
FIM_TOKENS = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")


@dataclass(frozen=True)
class Tokenizer:
    """Converts text to ids and back.

    ``source`` is the type and the file, for messages. ``eod`` ends a document; it is -1, as in megatron-core, if the
    tokenizer has no such token: then :meth:`end_for` refuses what needs it.
    """

    kind: str
    source: str
    vocab_size: int
    eod: int
    encode: Callable[[str], Sequence[int] | np.ndarray]
    decode: Callable[[list[int]], str]
    piece: Callable[[str], int | None] | None = None  # the id of a special token, if `encode` does not recognize it
    transformers: Any = None  # transformers' tokenizer, which renders chats
    encode_many: Callable[[list[str]], list[Sequence[int]]] | None = None  # several texts at once, the same ids

    pad = -1  # core masks every token equal to `pad`, so it must not be an id of a document

    def end_for(self, need: str) -> int:
        """The token that ends a document. Raises Refusal, which says what needs it, if there is none."""
        if self.eod < 0:
            raise Refusal(
                f"{self.source} has no token that ends a document (eos), which {need} needs: give a tokenizer that "
                "has one"
            )
        return self.eod

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, without added special tokens."""
        return self.array(text).tolist()

    def array(self, text: str) -> np.ndarray:
        """The ids as integers [n] of any dtype: uint8 for genomes, whose texts are long."""
        ids = _reading(lambda: self.encode(text), f"{self.source} cannot tokenize a text")
        return ids if isinstance(ids, np.ndarray) else np.array(list(ids), np.int64)

    def arrays(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of several texts, as of :meth:`array`; faster where the library takes many texts at once."""
        if self.encode_many is None:
            return [self.array(text) for text in texts]
        many = _reading(lambda: self.encode_many(texts), f"{self.source} cannot tokenize a text")
        return [np.array(ids, np.int64) for ids in many]

    def special(self, text: str) -> int | None:
        """The id of the token for all of ``text``; None if there is no such token."""
        if self.piece is not None:
            return self.piece(text)
        ids = self.tokenize(text)
        return ids[0] if len(ids) == 1 else None

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of some ids. Those that only the model has, in a vocabulary larger than this one, have none."""
        known = [int(i) for i in ids if i < self.vocab_size]
        return _reading(lambda: self.decode(known), f"{self.source} cannot turn ids into text")

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """The key of a tokenizer in core's index cache, independent of its folder."""
        return {"class": self.kind, "vocab_size": self.vocab_size}


def build_tokenizer(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    """The tokenizer of the flags. Raises Refusal if a flag or a file is missing, or a file is invalid."""
    check_tokenizer(data, vocab_size)
    kind, path = data.tokenizer_type, data.tokenizer_model
    for name, what in files_of_tokenizer(kind).items():
        _check_exists(getattr(data, name), f"--{name.replace('_', '-')}", what == "a folder")
    if kind in SENTENCEPIECE:
        return _sentencepiece(kind, path)
    if kind == "HuggingFaceTokenizer":
        return _hugging_face(kind, path)
    if kind in ("GPT2BPETokenizer", "QwenTokenizer"):
        return _gpt2_bpe(kind, data.vocab_file, data.merge_file, QWEN if kind == "QwenTokenizer" else None)
    if kind.startswith("TokenizerFromFile"):
        return _from_file(kind, path, (END_OF_TEXT, *(FIM_TOKENS if kind.endswith("WithFIM") else ())))
    if kind == "TikTokenizer":
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
    """The unpadded vocabulary size of the model. ``vocab_size`` is --vocab-size, None if it is not set."""
    if vocab_size is None or tokenizer.kind == "NullTokenizer":  # for it, --vocab-size N means N ids and the eod
        return tokenizer.vocab_size
    if vocab_size != tokenizer.vocab_size:
        larger = vocab_size > tokenizer.vocab_size
        raise Refusal(
            f"--vocab-size {vocab_size} is {'larger' if larger else 'smaller'} than the {tokenizer.vocab_size} ids of "
            f"{tokenizer.source}; leave --vocab-size out"
            + (" and pad with --make-vocab-size-divisible-by" if larger else "")
        )
    return vocab_size


def padded_vocab_size(vocab_size: int, make_divisible_by: int, tensor_parallel: int, rows: int | None = None) -> int:
    """Megatron's rule: the next multiple of ``make_divisible_by`` times the tensor-parallel size, or ``rows``.

    Raises:
        Refusal: ``rows`` is too small for the vocabulary, or cannot be split over TP.
    """
    if rows is not None and (rows < vocab_size or rows % tensor_parallel):
        least = -(-vocab_size // tensor_parallel) * tensor_parallel
        raise Refusal(
            f"--padded-vocab-size {rows} is smaller than the vocabulary of {vocab_size} tokens, or not a multiple of "
            f"--tensor-model-parallel-size {tensor_parallel}: use a multiple, at least {least}, or leave it out"
        )
    if rows is not None:
        return rows
    multiple = make_divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def _check_exists(path: str, flag: str, folder: bool) -> None:
    if not (os.path.isdir(path) if folder else os.path.isfile(path)):
        exists, what = os.path.exists(path), "folder" if folder else "file"
        hint = "; models are not downloaded, give a local folder" if folder and not exists else ""
        raise Refusal(f"{flag} {path}: {'not a' if exists else 'no such'} {what}{hint}")


def _reading(read: Callable[[], Any], refused: str) -> Any:
    """Call ``read``; any exception of its library becomes a Refusal of one line: ``refused`` and the reason."""
    try:
        return read()
    except (KeyboardInterrupt, SystemExit, Refusal):
        raise
    except BaseException as error:  # a panic of Rust is not an Exception
        raise Refusal(f"{refused}: {one_line(error, 300)}") from error


def _size(ids: Iterable[int], source: str) -> int:
    """The number of rows of the embedding: one more than the largest id."""
    size = max(ids, default=-1) + 1
    if not 0 < size <= LARGEST_VOCABULARY:
        raise Refusal(
            f"{source} has ids up to {size - 1:,}, and a model would have a row for each: give a tokenizer with at "
            f"most {LARGEST_VOCABULARY:,} ids"
        )
    return size


def _many(model: Any, source: str, *, special: bool = True) -> Callable[[list[str]], list[Sequence[int]]]:
    """Encodes several texts with a model of the tokenizers library, without the offsets that nobody reads."""
    for part in (model.normalizer, model.decoder):
        if part is not None and (growth := _growth(json.loads(part.__getstate__()))) > MOST_GROWTH:
            raise Refusal(
                f"{source}: its replacements can make a text {growth:,.0f} times as long, for which memory would run "
                f"out: give a tokenizer that makes it at most {MOST_GROWTH} times as long"
            )
    model.no_padding()  # a file may ask for both: texts would be filled up to the longest, or cut off
    model.no_truncation()
    return lambda texts: [one.ids for one in model.encode_batch_fast(texts, add_special_tokens=special)]


def _growth(part: dict[str, Any]) -> float:
    """How many times as long a text can become in a normalizer or a decoder of the tokenizers library.

    If memory runs out in the library, it ends the process.
    """
    growth = math.prod(_growth(one) for one in part.get("normalizers") or part.get("decoders") or ())
    if part.get("type") == "Replace":
        text = part["pattern"].get("String")
        growth = max(growth, len(part["content"]) / len(text) if text else len(part["content"]) + 1)
    if part.get("type") == "Precompiled":  # a trie after its size, and the texts that replace others
        data = base64.b64decode(part["precompiled_charsmap"])
        growth = max(growth, *map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))
    return growth


def _sentencepiece(kind: str, path: str) -> Tokenizer:
    """A SentencePiece model. Its eos piece ends a document; as in core 0.16, no bos is prepended."""

    def load() -> Any:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor()
        model.Load(path)
        return model

    model = _reading(load, f"--tokenizer-model {path}: cannot be read by {kind}")
    eod, size = model.eos_id(), model.get_piece_size()
    return Tokenizer(kind, f"{kind} {path}", size, eod, model.encode_as_ids, model.decode_ids)


def _hugging_face(kind: str, path: str) -> Tokenizer:
    """A local Hugging Face folder, without network access or remote code. As in core, eos and sep stand in for
    each other, and so do bos and cls."""
    check_files_in(Path(path))

    def load() -> Any:
        from transformers import AutoTokenizer  # takes seconds

        model = AutoTokenizer.from_pretrained(path, use_fast=True, trust_remote_code=False)
        named = {"additional_special_tokens": []}
        for one, other in (("sep_token", "eos_token"), ("eos_token", "sep_token"), ("bos_token", "cls_token"),
                           ("cls_token", "bos_token")):  # fmt: skip
            if getattr(model, one, None) is None and getattr(model, other, None):
                named[one] = getattr(model, other)
        model.add_special_tokens(named)
        return model

    model = _reading(load, f"--tokenizer-model {path}: cannot be read by {kind}")
    eod = -1 if model.eos_token is None else model.convert_tokens_to_ids(model.eos_token)
    source = f"{kind} {path}"
    size = _size([len(model) - 1, *model.get_vocab().values()], source)  # ids may have gaps

    def encode(text: str) -> list[int]:
        return model.convert_tokens_to_ids(model.tokenize(text))

    def decode(ids: list[int]) -> str:
        unwritten = {*model.all_special_tokens, None}  # None: ids may have gaps
        return model.convert_tokens_to_string([one for one in model.convert_ids_to_tokens(ids) if one not in unwritten])

    many = _many(model.backend_tokenizer, source, special=False) if getattr(model, "is_fast", False) else None
    return Tokenizer(kind, source, size, -1 if eod is None else eod, encode, decode, None, model, many)


def _gpt2_bpe(kind: str, vocab_file: str, merge_file: str, words: str | None = None) -> Tokenizer:
    """GPT-2's byte-level BPE. core's tokenizer downloads "gpt2" and passes the vocabulary as the merges.

    Args:
        words: pattern that splits text into words; default GPT-2's. With it, the end of a document is added as a token.
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
    eod, source = model.token_to_id(END_OF_TEXT), f"{kind} {vocab_file}"
    size = _size(model.get_vocab().values(), source)
    one = lambda text: model.encode(text).ids  # noqa: E731
    many = _many(model, source)
    return Tokenizer(
        kind, source, size, -1 if eod is None else eod, one, model.decode, model.token_to_id, encode_many=many
    )


def _from_file(kind: str, path: str, special: Sequence[str]) -> Tokenizer:
    """A tokenizer.json. As in BigCode's Megatron-LM, missing ``special`` tokens are added at the end."""
    from tokenizers import Tokenizer as Model

    model = _reading(lambda: Model.from_file(path), f"--tokenizer-model {path}: not a file of the tokenizers library")
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
        encode_many=_many(model, f"{kind} {path}"),
    )


def _tiktoken(kind: str, path: str, pattern: str, num_special: int, vocab_size: int | None) -> Tokenizer:
    """A tiktoken vocabulary in JSON. As in Megatron-LM, a smaller --vocab-size cuts it; core's default is 131072."""
    if pattern not in ("v1", "v2"):
        raise Refusal(f"--tiktoken-pattern {pattern}: must be v1 or v2")
    if not path.endswith(".json"):
        raise Refusal(f"--tokenizer-model {path}: TikTokenizer reads a .json file")
    entries = read_json(path, "--tokenizer-model", MOST_BYTES)
    if not isinstance(entries, list):
        raise Refusal(f"--tokenizer-model {path}: not a list of tokens, which TikTokenizer reads")
    size = min(vocab_size or 2**17, len(entries) + num_special)
    options = {"pattern": pattern, "num_special_tokens": num_special, "vocab_size": size}

    def load() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # core warns at import about packages that are not installed
            from megatron.core.tokenizers import MegatronTokenizer  # imports transformers, which takes seconds

        metadata = {"library": "tiktoken", "model_type": "gpt"}
        return MegatronTokenizer.from_pretrained(path, metadata_path=metadata, **options)

    core = _reading(load, f"--tokenizer-model {path}: cannot be read by {kind}")
    decode = core._tokenizer.tokenizer.decode  # core decodes each token, which breaks a character of several tokens
    return Tokenizer(kind, f"{kind} {path}", core.vocab_size, core.eod, core.tokenize, decode)


def _bytes(kind: str) -> Tokenizer:
    """UTF-8 bytes and an end of document: 257 ids. core's tokenizer has 512, and its end of document is byte 0."""

    def decode(ids: list[int]) -> str:  # core's decoder removes white space at the end
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    return Tokenizer(kind, kind, 257, 256, lambda text: text.encode("utf-8"), decode)


def _null(kind: str, vocab_size: int | None) -> Tokenizer:
    """Numbers as text: ids below --vocab-size. The end of a document is --vocab-size itself."""
    return Tokenizer(
        kind,
        f"{kind} --vocab-size {vocab_size}",
        vocab_size + 1,
        vocab_size,
        encode=lambda text: [int(word) for word in text.split(" ")],
        decode=lambda ids: " ".join(map(str, ids)),
    )
