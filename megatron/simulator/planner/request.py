# SPDX-License-Identifier: Apache-2.0
"""The planner's input: a model by name or by flags of the training program, sequence lengths, packed documents."""

from __future__ import annotations

import math
import random
import re
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from megatron.decisions.state_exchange import LARGEST_KEYS
from megatron.formulas.strategy import Shape, Workload
from megatron.training.arguments.parser import parse
from megatron.training.json_file import read_bytes
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config
from megatron.training.settings.flag import tokens as tokens_of
from megatron.training.settings.models import LLAMA_DEFAULTS, model_shape

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def tokens(text: str, flag: str) -> int:
    """A number of tokens such as ``120K`` (K = 1024, M = 1024 K).

    Raises:
        Refusal: ``text`` is not a whole number above 0.
    """
    try:
        size = tokens_of(text.replace(",", ""))
    except ValueError:
        size = 0
    if not 1 <= size <= 2**40:
        raise Refusal(f"{flag} {text}: give a whole number above 0, such as 122880 or 120K")
    return size


def big_number(text: str, flag: str) -> float:
    """A run's number of tokens such as ``1.5T`` (K, M, B or G, T are powers of 1000).

    Raises:
        Refusal: ``text`` is not such a number, or less than 1.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmbgt]?)", text.strip().lower().replace(",", ""))
    size = float(match[1]) * 10.0 ** {"": 0, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12}[match[2]] if match else 0.0
    if not 1 <= size < 1e18:
        raise Refusal(f"{flag} {text}: give a number above 0, such as 300B or 1.5T (powers of 1000)")
    return size


def seconds(text: str, flag: str) -> float:
    """A time such as ``36h``, ``30d``, ``2w``, in seconds.

    Raises:
        Refusal: ``text`` is not a time above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    if not match or not float(match[1]):
        raise Refusal(f"{flag} {text}: give a time above 0, such as 90m, 36h, 30d or 2w")
    return float(match[1]) * SECONDS[match[2]]


def share_of_memory(text: str, whole: float, flag: str) -> float:
    """Bytes from a text such as ``2GiB`` or, as a share of ``whole`` bytes, ``3%``.

    Raises:
        Refusal: ``text`` is neither of these, or its size is ``whole`` or more.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|gib|g)", text.strip().lower())
    size = float(match[1]) * (whole / 100 if match[2] == "%" else 2**30) if match else -1.0
    if not 0 <= size < whole:
        raise Refusal(f"{flag} {text}: give a part of the GPU's memory, such as 2GiB or 3%")
    return size


# --- packed documents ---
#
# A sample is a sequence of documents, cut where the sample ends, as in Megatron-LM's GPT datasets. Attention stays in a
# document, so its work grows with the square of their lengths: a sample with one long document has many times the
# work of a sample with short documents, and other ranks wait for the ranks that have it (WLB-LLM, arXiv:2503.17924).

INDEX = b"MMIDIDX\x00\x00"  # first bytes of an index of Megatron-LM's datasets
MOST_LENGTHS, MOST_TEXT = 1 << 22, 16 << 20  # limits: lengths that are read from a dataset; bytes of a text file
LONGEST = 2**53  # tokens of a document
DRAWS = 100_000  # about how many documents to draw; the number of samples stays between FEWEST and MOST
FEWEST, MOST = 16, 512  # samples
RINGS = (2, 4, 8, 16, 32, 64)
MICRO_BATCHES = (1, 2, 4, 8, 16)
PARTS = 2 * RINGS[-1]  # parts of a sample whose pairs are counted: two for each rank of the longest ring


@dataclass(frozen=True)
class Packed:
    """Attention work of packed samples."""

    keys: float  # average number of keys that a token sees
    spread: float  # standard deviation of that average among samples, divided by its mean
    uneven: tuple[tuple[float, ...], ...] = ()  # busiest ring rank's work over the mean, by RINGS and MICRO_BATCHES


@lru_cache(maxsize=64)
def packed(documents: str, seq_length: int, window: int = 0) -> Packed:
    """Statistics of samples that are packed from drawn documents.

    Args:
        documents: distribution of lengths: ``mean:8K`` (exponential), ``mean:8K,sigma:1.2`` (log-normal), or a file:
            lengths in tokens, one per line, or the .idx of a dataset; ``prompt:24K,answers:8,answer:8K``: trees of
            answers that share a prompt; empty: a sample is one document.
        window: maximum number of keys that a query sees; 0: no limit.

    Raises:
        Refusal: ``documents`` is none of these.
    """
    if not documents:
        return Packed(_keys(seq_length, window) / seq_length, 0.0)
    if documents.startswith("prompt:"):
        return _trees(documents, seq_length, window)
    draw, mean = _lengths(documents)
    count = max(FEWEST, min(MOST, int(DRAWS * mean / seq_length)))
    bounds = [seq_length * part // PARTS for part in range(1, PARTS + 1)]
    remaining, samples = 0, []  # tokens of the last document that are not in a sample yet
    for _ in range(count):
        start, total, before, parts = 0, 0.0, 0.0, []
        while start < seq_length:
            remaining = remaining or draw()
            end = min(start + remaining, seq_length)
            while len(parts) < PARTS and bounds[len(parts)] <= end:
                so_far = total + _keys(bounds[len(parts)] - start, window)
                parts.append(so_far - before)
                before = so_far
            total += _keys(end - start, window)
            remaining, start = remaining - (end - start), end
        samples.append(parts)
    pairs = [sum(parts) / seq_length for parts in samples]
    keys = fmean(pairs)
    return Packed(keys, pstdev(pairs) / keys, _uneven(samples, zigzag=not window))


def _trees(text: str, seq_length: int, window: int) -> Packed:
    """A sample of equal trees, each a prompt that is computed once and its answers (layout/tree.py)."""
    given = dict(part.partition(":")[::2] for part in text.split(","))
    if given.keys() != {"prompt", "answers", "answer"}:
        raise Refusal(f"--documents {text}: give prompt:N,answers:N,answer:N")
    prompt, answers, answer = (tokens(given[name], f"--documents {name}:") for name in ("prompt", "answers", "answer"))
    size = prompt + answers * answer
    if size > seq_length:
        raise Refusal(f"--documents {text}: a tree has {size:,} tokens, more than a sequence of {seq_length:,}")
    shared = _keys(prompt, window)
    pairs = shared + answers * (_keys(prompt + answer, window) - shared)
    return Packed(pairs / size, 0.0)


def _uneven(samples: list[list[float]], *, zigzag: bool) -> tuple[tuple[float, ...], ...]:
    """The work of a ring's busiest rank, divided by the mean of all ranks: an average over micro-batches.

    Work is the number of (query, key) pairs. A micro-batch takes as long as its busiest rank.
    The documents of a micro-batch of one sample are divided so that all ranks have the same work (layout/documents.py).
    The samples of a larger micro-batch would need different divisions, so it uses zigzag. With a window, the parts are
    contiguous.
    """
    table = []
    for ring in RINGS:
        wide = PARTS // (2 * ring)
        ranks = [  # pairs of each rank, of each sample
            [
                sum(parts[rank * wide : (rank + 1) * wide])
                + sum(parts[(2 * ring - 1 - rank) * wide : (2 * ring - rank) * wide])
                if zigzag
                else sum(parts[2 * rank * wide : 2 * (rank + 1) * wide])
                for rank in range(ring)
            ]
            for parts in samples
        ]
        row = []
        for batch in MICRO_BATCHES:
            if batch == 1 and zigzag:
                row.append(1.0)
                continue
            together = [  # consecutive samples; the first follows the last
                [sum(of_rank) for of_rank in zip(*(ranks[(first + i) % len(ranks)] for i in range(batch)))]
                for first in range(len(ranks))
            ]
            row.append(sum(map(max, together)) * ring / sum(map(sum, together)))
        table.append(tuple(row))
    return tuple(table)


def _keys(length: int, window: int) -> float:
    """(Query, key) pairs of a document of ``length`` tokens."""
    if not window or window >= length:
        return length * (length + 1) / 2
    return window * (window + 1) / 2 + (length - window) * window


def _lengths(text: str) -> tuple[Callable[[], int], float]:
    """(a function that draws a document's length, with a fixed seed; the mean length)."""
    generator = random.Random(0)
    if text.startswith("mean:"):
        given = dict(part.partition(":")[::2] for part in text.split(","))
        if not {"mean", "sigma"} >= set(given):
            raise Refusal(f"--documents {text}: give mean:N, mean:N,sigma:S, or a file")
        mean = tokens(given["mean"], "--documents mean:")
        if "sigma" not in given:
            return lambda: max(1, round(generator.expovariate(1 / mean))), float(mean)
        try:
            sigma = float(given["sigma"])
        except ValueError:
            sigma = math.nan
        if not 0 < sigma <= 5:
            raise Refusal(f"--documents {text}: sigma, of the lengths' logarithm, must be above 0 and at most 5")
        middle = math.log(mean) - sigma * sigma / 2
        return lambda: max(1, round(generator.lognormvariate(middle, sigma))), float(mean)
    lengths = read_lengths(Path(text))
    return lambda: generator.choice(lengths), fmean(lengths)


def read_lengths(path: Path) -> list[int]:
    """Lengths of a file's documents. Raises Refusal if the file cannot be read, is truncated, or has no lengths."""
    try:
        with path.open("rb") as file:
            if file.read(len(INDEX)) == INDEX:
                _, _, sequences, _ = struct.unpack("<QBQQ", file.read(25))
                most = (path.stat().st_size - file.tell()) // 4
                if sequences > most:
                    raise Refusal(
                        f"--documents {path}: its header gives {sequences:,} lengths, but the file has at most "
                        f"{most:,}: it is truncated or damaged, write it again"
                    )
                lengths, start, runs = array("i"), file.tell(), -(-sequences // MOST_LENGTHS)
                for run in range(runs):  # runs of lengths from all over the file, MOST_LENGTHS in all
                    file.seek(start + 4 * (sequences * run // runs))
                    lengths.frombytes(file.read(4 * (min(sequences, MOST_LENGTHS) // runs)))
            else:
                lengths = [int(line) for line in read_bytes(path, MOST_TEXT).split()]
    except OSError as error:
        raise Refusal(f"--documents {path}: cannot be read: {error.strerror or error}") from None
    except Refusal:
        raise  # a Refusal is a ValueError, too
    except (ValueError, struct.error):
        raise Refusal(f"--documents {path}: give lengths in tokens, one per line, or the .idx of a dataset") from None
    lengths = [length for length in lengths if 0 < length <= LONGEST]
    if not lengths:
        raise Refusal(f"--documents {path}: has no lengths above 0; give lengths in tokens, one per line")
    return lengths


JOB = "--micro-batch-size 1 --train-iters 1000 --lr 3e-4 --mock-data".split()


@dataclass(frozen=True)
class Request:
    """A model, as flags of the training program, and its data."""

    flags: tuple[str, ...]  # `--model NAME`, or sizes; other sizes are a Llama's
    global_batch: int = 1
    documents: str = ""  # lengths of packed documents (see `packed`); empty: a sample is one document
    window: int = 0  # tokens that a query sees, including itself; 0: all before it
    window_skip: int = 0  # every n-th layer has no window; 0: all layers have it
    imbalance: float = 1.0  # tokens of the busiest rank's experts, over the mean
    reference: bool = False  # a frozen copy computes each sample first

    @property
    def entry(self) -> str:
        """The program that trains it: ``pretrain_llama.py`` or ``pretrain_gpt.py``."""
        name = _config(self.flags, 1024).model.model
        return "pretrain_llama.py" if name is None or "llama" in name.lower() else "pretrain_gpt.py"

    def workload(self, seq_length: int) -> Workload:
        """The workload with sequences of ``seq_length`` tokens.

        Raises:
            Refusal: a flag is wrong, does not describe a model, or is not supported by the planner.
        """
        config = _config(self.flags, seq_length)
        # One more than --vocab-size: without a tokenizer, a run adds a token for the end of a document.
        shape = model_shape(config.model, config.model.vocab_size + 1)
        _check_imbalance(shape, self.imbalance)
        if shape.pattern and self.window and self.window_skip:
            raise Refusal("--window-attn-skip-freq with --is-hybrid-model: the planner has one window: leave it out")
        counted: dict[str, Any] = {"imbalance": self.imbalance, "reference": self.reference}
        if not self.documents and not 0 < self.window < seq_length:
            return Workload(shape, seq_length, self.global_batch, **counted)
        work = packed(self.documents, seq_length, self.window)
        counted |= {"keys": work.keys, "spread": work.spread, "uneven": work.uneven}
        whole = config.model.num_layers // self.window_skip if self.window_skip else 0
        if whole and self.window:
            counted |= {"whole": whole / config.model.num_layers, "uneven": packed(self.documents, seq_length).uneven}
            counted |= {"whole_keys": packed(self.documents, seq_length).keys} if self.documents else {}
        return Workload(shape, seq_length, self.global_batch, **counted)

    def beyond_words(self, seq_length: int) -> str:
        """A sentence if the model was made for shorter sequences; otherwise empty."""
        made_for = _config(self.flags, seq_length).model.max_position_embeddings
        if seq_length <= made_for:
            return ""
        return f"--seq-length {seq_length} is above the {made_for} tokens that the model is made for"

    def program_flags(self, seq_length: int) -> list[str]:
        """The model's flags for a command."""
        named = _config(self.flags, seq_length).model.model
        given = any(flag.partition("=")[0] == "--max-position-embeddings" for flag in self.flags)
        flags = [*self.flags, *([] if named or given else ["--max-position-embeddings", str(seq_length)])]
        flags += ["--window-size", f"{self.window - 1},0"] if self.window else []
        flags += ["--window-attn-skip-freq", str(self.window_skip)] if self.window_skip else []
        if self.reference:
            return [*flags, "--dpo"]  # which separates documents itself
        return flags + (["--reset-position-ids", "--reset-attention-mask"] if self.documents else [])


def _check_imbalance(shape: Shape, imbalance: float) -> None:
    """Refuse an imbalance without experts, or with which a token would go to an expert twice."""
    mixture, flag = shape.mixture, f"--expert-imbalance {imbalance:g}"
    if mixture is None:
        if imbalance != 1:
            raise Refusal(f"{flag}: the model has no experts: leave it out")
    elif not 1 <= imbalance <= mixture.experts / mixture.topk:
        raise Refusal(f"{flag}: give a factor from 1 to {mixture.experts / mixture.topk:g}")


@lru_cache(maxsize=256)
def _config(flags: tuple[str, ...], seq_length: int) -> Config:
    if any(flag.partition("=")[0] == "--fp8-format" for flag in flags):
        raise Refusal(
            "--fp8-format: the planner does not know its memory: plan without it, then start a dry run of that plan "
            "with --fp8-format for time and memory"
        )
    read = parse(list(flags), LLAMA_DEFAULTS)
    plain = Config()
    for section in fields(Config):
        if section.name in ("model", "stage", "notes"):
            continue
        given, usual = getattr(read, section.name), getattr(plain, section.name)
        for setting in fields(given):
            if getattr(given, setting.name) != getattr(usual, setting.name):
                flag = "--" + setting.name.replace("_", "-")
                raise Refusal(f"{flag} does not describe the model; the planner chooses it: see --help for its options")
    words = [*flags, "--seq-length", str(seq_length), *JOB]
    if read.model.model is None and read.model.max_position_embeddings is None:
        words += ["--max-position-embeddings", str(seq_length)]
    if read.model.model is None and read.model.vocab_size is None:
        raise Refusal("missing: --vocab-size; --model sets a complete shape, for example --model llama3-8b")
    config = parse(words, LLAMA_DEFAULTS, world_size=1)
    refuse_unplannable(config)
    return config


def refuse_unplannable(config: Config) -> None:
    """Refuse models whose memory and time the planner does not know."""
    model = config.model
    wrong = {
        "--position-embedding-type alibi": model.position_embedding_type == "alibi",
        "--hidden-dropout": model.hidden_dropout > 0,
        f"--softmax-type {model.softmax_type}": model.softmax_type != "vanilla",
        "--embed-layernorm": model.embed_layernorm,
        "--qk-layernorm-all-heads": model.qk_layernorm_all_heads,
        "--sandwich-norm": model.sandwich_norm,
        "--reordered-norm": model.reordered_norm,
        "--parallel-residual": model.parallel_residual,
        "--embedding-multiplier": model.embedding_multiplier,
        "--residual-multiplier": model.residual_multiplier,
        "--logits-scaling": model.logits_scaling,
        "--attn-logit-softcapping": model.attn_logit_softcapping,
        "--final-logit-softcapping": model.final_logit_softcapping,
        f"--mtp-num-layers {model.mtp_num_layers}": model.mtp_num_layers,
        f"--mamba-state-dim {model.mamba_state_dim}": model.is_hybrid_model and model.mamba_state_dim > LARGEST_KEYS,
        f"--linear-key-head-dim {model.linear_key_head_dim}": (
            model.experimental_attention_variant and model.linear_key_head_dim > LARGEST_KEYS
        ),
        "--num-experts with linear layers that have a bias": model.num_experts and model.add_bias_linear,
    }
    for flag in (flag for flag, given in wrong.items() if given):
        raise Refusal(f"{flag}: the planner does not know its time and memory: plan without it")
