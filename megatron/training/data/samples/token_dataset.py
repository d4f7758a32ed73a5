# SPDX-License-Identifier: Apache-2.0
"""core's datasets on files that are not memory-mapped: a stream of documents, packed documents, fill in the middle."""

from __future__ import annotations

import copy
import functools
import logging
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from megatron.context_parallel.layout.spans import Spans
from megatron.platform.core_versions import sample_parts
from megatron.training.arguments.data_paths import portion
from megatron.training.data import index_files as data_files
from megatron.training.data.packing.length_mixtures import Source, repeated
from megatron.training.data.packing.packing_plans import Packing, cost_of, make_plan, stage_plan
from megatron.training.data.read_tokens import DataError, JoinedFiles, TokenFile, check_ids, first_outside, unmapped
from megatron.training.data.samples.fill_in_middle import Fim, fill_in
from megatron.training.refusal import Refusal

logger = logging.getLogger(__name__)


@dataclass
class LocalConfig(GPTDatasetConfig):
    """core's configuration and our settings."""

    fim: Fim | None = None
    packing: Packing | None = None
    mixture: dict[str, Source] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)  # of training data, with stages of different lengths
    # (path, documents, weight) of sources in one plan
    joined: list[tuple[str, int, float]] = field(default_factory=list)


class TokenDataset(GPTDataset):
    """core's samples, read from files that are not memory-mapped, with every id checked.

    A path may also name a portion of the file's documents, so that core distinguishes two datasets of one file.
    """

    _spans: Spans | None = None  # of the tokens to read; None: all

    def __init__(self, tokens: TokenFile, path: str, documents: np.ndarray, *args: Any) -> None:
        split, config = args[1:]
        super().__init__(tokens, path, _repeated(tokens, path, documents, split, config), *args)
        indices = self.document_index, self.sample_index, self.shuffle_index
        self.document_index, self.sample_index, self.shuffle_index = map(unmapped, indices)
        # core (GPTDataset.__getitem__) would keep the first sample's mask, with its padding, for all other samples
        self.masks_and_position_ids_are_cacheable = False

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: LocalConfig) -> TokenFile:
        prefix = portion(dataset_path)[0]
        return data_files.open_prefix(prefix, "--data-path", config.object_storage_cache_path).open()

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: TokenFile) -> int:
        return len(low_level_dataset)

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple:
        return sample_parts(*self.tokens_and_documents(idx), self.config)

    def tokens_and_documents(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 [seq_length + 1] of a sample, and their documents.

        Raises:
            DataError: an id is outside the vocabulary, or a file cannot be read.
        """
        number = int(self.shuffle_index[idx])
        bounds = self.sample_index[number : number + 2].tolist()
        if len(bounds) != 2 or bounds[0] > bounds[1]:
            raise self._damaged()
        (first, begin), (last, end) = bounds
        end += self.config.add_extra_token_to_sequence
        documents = self.document_index[first : last + 1]
        pieces = []
        for place, document in enumerate(documents.tolist(), first):
            offset = begin if place == first else 0
            pieces.append((document, offset, end - offset if place == last else None))
        return self._text(pieces), documents.astype(np.int64)

    def part(self, idx: int, spans: Spans) -> dict[str, torch.Tensor]:
        """A sample of which only the tokens at some positions are read; the others are 0.

        Args:
            spans: (begin, end) of the positions in the ``sequence_length + 1`` tokens, ascending.
        """
        self._spans = spans
        try:
            return self[idx]
        finally:
            self._spans = None

    def _text(self, pieces: list[tuple[int, int, int | None]]) -> np.ndarray:
        """Ids int64 [seq_length + 1] of a sample.

        Args:
            pieces: (document, its first token, number of tokens) of each; None: to the document's end.
        """
        length = self.config.sequence_length + self.config.add_extra_token_to_sequence
        wanted, places, at = [], [], 0
        for document, offset, size in pieces:
            size = self.dataset.size(document) - offset if size is None else size
            inside = [(0, size)]
            if self._spans is not None:
                inside = [(max(begin - at, 0), min(end - at, size)) for begin, end in self._spans]
                inside = [(begin, end) for begin, end in inside if begin < end]
            wanted += [(document, offset + begin, end - begin) for begin, end in inside]
            places += [at + begin for begin, _ in inside]
            at += size
        if not 0 < at <= length:
            raise self._damaged()
        parts = self.dataset.get_many(wanted)
        text = np.zeros(length, np.int64)
        for part, place in zip(parts, places):
            text[place : place + len(part)] = part
        text[at:] = self._pad_token_id
        if parts:
            self._check(np.concatenate(parts), parts, [document for document, *_ in wanted])
        return text

    def _damaged(self) -> DataError:
        return DataError(f"{self.dataset_path}: its index of samples is damaged: remove the index cache")

    def _check(self, tokens: np.ndarray, parts: list[np.ndarray], documents: list[int]) -> None:
        """Check all ids of a sample at once; the error names the first wrong one with its document."""
        tokenizer = self.config.tokenizer
        if first_outside(tokens, tokenizer.vocab_size) is not None:
            for part, document in zip(parts, documents):
                check_ids(part, tokenizer.vocab_size, tokenizer.source, functools.partial(self.dataset.where, document))


def _repeated(tokens: TokenFile, path: str, documents: np.ndarray, split: Split, config: LocalConfig) -> np.ndarray:
    """The documents that are read in an epoch: of training data, as often as --data-config says."""
    source = config.mixture.get(path)
    if source is None or split is not Split.train:
        return documents
    lengths = tokens.sequence_lengths[documents]
    documents = repeated(documents, lengths, source.repeat, config.random_seed)
    if not lengths.sum() or not len(documents):
        raise Refusal(f"--data-config: repeat leaves no document of {path}: raise its factors")
    return documents


class Documents:
    """One source of a blend whose documents are packed together. The arguments are those of core's datasets."""

    def __init__(self, tokens: TokenFile, path: str, documents: np.ndarray, *args: Any) -> None:
        _, self.index_split, config = args
        self.tokens, self.path = tokens, path
        self.numbers = _repeated(tokens, path, documents, self.index_split, config)
        self.samples = max(int(tokens.sequence_lengths[self.numbers].sum()) // config.sequence_length, 1)

    def __len__(self) -> int:
        """Samples of an epoch, the weight of a source that has none."""
        return self.samples


class PackedDataset(TokenDataset):
    """Samples of a plan, without parts of other samples' documents. Padding at their ends has no loss."""

    @classmethod
    def of(cls, sources: list[Documents], weights: list[float], samples: int, config: LocalConfig) -> PackedDataset:
        """Samples of the documents of several sources. Each window has the sources' shares of tokens."""
        files = JoinedFiles([source.tokens for source in sources])
        config = copy.copy(config)
        config.joined = [(source.path, len(source.numbers), weight) for source, weight in zip(sources, weights)]
        numbers = np.concatenate([source.numbers + begin for source, begin in zip(sources, files.begins)])
        paths = ", ".join(source.path for source in sources)
        return cls(files, paths, numbers, samples, sources[0].index_split, config)

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The plan's pieces [pieces, 3], the first piece of each sample [samples + 1], and no further shuffle."""
        config, names = self.config, ("document_index", "sample_index", "shuffle_index")
        base = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        paths = [os.path.join(config.path_to_cache, f"{base}-{name}.npy") for name in names]
        if config.path_to_cache and all(map(os.path.isfile, paths)):
            return tuple(data_files.load_numbers(path) for path in paths)
        lengths = self.dataset.sequence_lengths
        sources, make = config.joined or [(self.dataset_path, len(self.indices), 1.0)], make_plan
        if config.starts or config.packing.kind == "greedy":  # with a schedule of lengths
            starts = config.starts if self.index_split is Split.train else {}
            make = functools.partial(stage_plan, first=[starts.get(path, 0) for path, *_ in sources])
        plan = make(
            self.indices, lengths[self.indices], config.sequence_length, self.num_samples, config.packing,
            config.random_seed, blend=[source[1:] for source in sources],
        )  # fmt: skip
        cost = cost_of(plan, lengths, config.sequence_length, config.packing.batch)
        logger.info(
            "%s %s, --packing %s: %d samples, %.2f %% filled; %.2f %% of the documents that fit in a sample are cut; "
            "attention of the slowest sample of a global batch over its mean: %.3f", self.dataset_path,
            self.index_split.name, config.packing.kind, len(plan.first) - 1, 100 * cost.fill, 100 * cost.cut_short,
            cost.imbalance,
        )  # fmt: skip
        arrays = plan.pieces, plan.first, np.arange(len(plan.first) - 1)
        for path, array in zip(paths, arrays) if config.path_to_cache else ():
            np.save(path, array)
        return arrays

    def tokens_and_documents(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        first, last = self.sample_index[idx : idx + 2].tolist()
        if not 0 <= first < last <= len(self.document_index):
            raise self._damaged()
        pieces = self.document_index[first:last]
        return self._text(pieces.tolist()), pieces[:, 0]


class FimDataset(TokenDataset):
    """The samples of `TokenDataset` with fill in the middle; sample n still depends only on the data and the seed."""

    def part(self, idx: int, spans: Spans) -> dict[str, torch.Tensor]:
        """The whole sample, because its texts are cut anywhere."""
        return self[idx]

    def tokens_and_documents(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        text, documents = super().tokens_and_documents(idx)
        # The number of documents distinguishes the files of a blend, independent of their paths.
        key = (self.config.random_seed, self.index_split.value, len(self.dataset), idx)
        draw = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
        filled, tokenizer = fill_in(text, self.config.fim, draw), self.config.tokenizer
        check_ids(filled, tokenizer.vocab_size, tokenizer.source, lambda: f"sample {idx} of --fim-data")
        return filled, documents
