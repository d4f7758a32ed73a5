# SPDX-License-Identifier: Apache-2.0
"""megatron-core's datasets, with checks of their files, indices that one rank builds, and fill in the middle.

Sample n depends on the data, the seed, the sequence length and the number of samples, but not on the grid.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split
from torch.utils.data import Dataset

from megatron.context_parallel.layout.spans import Spans
from megatron.platform.core_versions import sample_parts
from megatron.training.arguments.data_paths import Blend, parse_split, portion
from megatron.training.arguments.schedule import samples_after
from megatron.training.data import index_files as data_files
from megatron.training.data.batches import Later
from megatron.training.data.chat_dataset import build_chat_datasets
from megatron.training.data.packing.length_mixtures import Source, read_mixture, repeated
from megatron.training.data.packing.packing_plans import Packing, cost_of, make_plan, stage_plan, stage_starts
from megatron.training.data.read_tokens import DataError, JoinedFiles, TokenFile, check_ids, first_outside, unmapped
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.ownership.atomic import atomic_folder
from megatron.training.refusal import Refusal, refuse_together
from megatron.training.settings.config import Config, DataConfig


class MockDataset(Dataset):
    """--mock-data: random but learnable token sequences, a function of (seed, split, index).

    Consecutive ids follow each other in runs of 8 on average, and runs more often start at small ids. The average
    length of a document is an eighth of the sequence, but at most 1,024 tokens. core's mock data are always 1, 2, 3,
    ... up to 4095 for every seed and vocabulary.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, split: int, size: int) -> None:
        self.key, self.size, self.seq_length = (config.run.seed, split), size, config.data.seq_length
        self.vocab_size, self.mask_eod = tokenizer.vocab_size, config.data.eod_mask_loss
        self.eod = tokenizer.end_for("--mock-data")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = np.random.Generator(np.random.Philox(key=self.key, counter=[0, 0, 0, int(index)]))
        n = self.seq_length + 1
        position = np.arange(n)
        begin = random.integers(0, 8, n) == 0
        begin[0] = True
        octave = random.integers(0, self.vocab_size.bit_length() + 1, n)  # integers only: the same on every machine
        first = random.integers(0, 2**62, n) % (1 << octave)
        start = np.maximum.accumulate(np.where(begin, position, 0))
        ids = (first[start] + position - start) % self.vocab_size
        ids[random.integers(0, min(max(self.seq_length // 8, 1), 1024), n) == 0] = self.eod
        text = torch.from_numpy(ids)
        loss_mask = torch.ones(n - 1)
        if self.mask_eod:
            loss_mask[text[:-1] == self.eod] = 0.0
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": loss_mask}


# Fill in the middle: a text is cut in three parts, and the model learns to write the middle after the other two.
# As in Megatron-LM's GPTFIMDataset (megatron/training/datasets/fim_dataset.py), each text between ends of documents is
# cut with probability --fim-rate at two of its characters. It becomes `<prefix> a <suffix> c <middle> b`, or with
# probability --fim-spm-rate `<prefix> <suffix> c <middle> a b`. The sample is then cut or padded to its former length.
# The random numbers depend on the sample's number; in Megatron-LM, on the worker and on what it has read before.


@dataclass(frozen=True)
class Fim:
    """The settings of fill in the middle, with tokens as ids."""

    tokenizer: Tokenizer
    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None = None
    fragment_rate: float = 0.0
    no_prefix: str | None = None


def fim_of(data: DataConfig, tokenizer: Tokenizer) -> Fim | None:
    """The settings of the flags; None without --fim-data.

    Raises:
        Refusal: the tokenizer does not have the token that a flag names.
    """
    if not data.fim_data:
        return None
    ids: dict[str, int] = {}
    for name in ("prefix_token", "middle_token", "suffix_token", "pad_token", "eod_token", "split_sample"):
        text = getattr(data, f"fim_{name}")
        if text is None:
            continue
        token = tokenizer.special(text)
        if token is None:
            flag = f"--fim-{name.replace('_', '-')}"
            raise Refusal(f"{flag} {text} is not a token of {tokenizer.source}: name one that it has")
        ids[name.split("_")[0]] = token
    return Fim(tokenizer, data.fim_rate, data.fim_spm_rate, **ids, fragment_rate=data.fim_fragment_rate or 0.0,
               no_prefix=data.fim_no_prefix)  # fmt: skip


def fill_in(sample: np.ndarray, fim: Fim, draw: np.random.Generator) -> np.ndarray:
    """The sample [n] with its texts rearranged, in its former length."""
    parts = [part for text in _between(sample, fim.eod) for part in (_text(text, fim, draw), [fim.eod])]
    filled = np.concatenate(parts[:-1]).astype(np.int64)[: len(sample)]
    return np.pad(filled, (0, len(sample) - len(filled)), constant_values=fim.pad)


def _between(ids: np.ndarray, mark: int) -> Iterator[np.ndarray]:
    """The texts between marks. An empty text is dropped with the mark after it, except the last, as in Megatron-LM."""
    ends = [*np.flatnonzero(ids == mark), len(ids)]
    for start, end in zip([0, *(end + 1 for end in ends)], ends):
        if end > start or end == len(ids):
            yield ids[start:end]


def _text(ids: np.ndarray, fim: Fim, draw: np.random.Generator) -> np.ndarray:
    """Rearrange one text; if it has several parts, each part separately."""
    if fim.split is None or not (ids == fim.split).any():
        return _cut(ids, fim.rate, fim, draw)
    if draw.random() >= fim.rate:
        return ids
    parts = [
        part for text in _between(ids, fim.split) for part in (_cut(text, fim.fragment_rate, fim, draw), [fim.split])
    ]
    return np.concatenate(parts[:-1])


def _cut(ids: np.ndarray, rate: float, fim: Fim, draw: np.random.Generator) -> np.ndarray:
    if draw.random() >= rate:
        return ids
    special = (fim.prefix, fim.middle, fim.suffix, fim.pad, fim.eod)
    text = fim.tokenizer.detokenize(ids[~np.isin(ids, special)])
    if fim.no_prefix is not None and text.startswith(fim.no_prefix):
        return ids
    first, second = sorted(draw.integers(0, len(text) + 1, 2))
    before, middle, after = (fim.tokenizer.array(part) for part in (text[:first], text[first:second], text[second:]))
    if draw.random() < fim.spm_rate:
        return np.concatenate([[fim.prefix, fim.suffix], after, [fim.middle], before, middle])
    return np.concatenate([[fim.prefix], before, [fim.suffix], after, [fim.middle], middle])


def generator(*key: Any) -> np.random.Generator:
    """A random generator seeded by integers, which must not be negative."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([int(part) for part in key])))


logger = logging.getLogger(__name__)

SPLITS = ("train", "valid", "test")


def build_datasets(
    config: Config, tokenizer: Tokenizer, samples: tuple[int, int, int], *, needed: bool = True, number: int = 0
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """Train, valid and test datasets with at least ``samples`` samples each; None where that is 0.

    Valid and test are also None if the flags name no data for them: then there is no evaluation, as in Megatron-LM.
    Every rank calls it; a rank with ``needed=False`` (a middle pipeline stage) only takes part in the barrier.

    Args:
        number: the index among several sets of valid and test data.
    """
    data = config.data
    first = samples_after(config, config.stage.start) if config.stage else 0
    if data.mock_data:
        if any((data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)):
            raise Refusal("--mock-data and --data-path exclude each other: leave one out")
        sizes = [n and n + (first if i == 0 else 0) for i, n in enumerate(samples)]
        return tuple(MockDataset(config, tokenizer, i, n) if n else None for i, n in enumerate(sizes))
    if data.sft:
        return build_chat_datasets(config, tokenizer, samples)
    blend, blends = data_files.parse_blends(data, number)
    settings = {
        "random_seed": config.run.seed,
        "sequence_length": data.seq_length,
        "blend": blend,
        "blend_per_split": blends,
        "split": parse_split(data.split) if blend else None,
        "eod_mask_loss": data.eod_mask_loss,
    }
    packing = None  # Megatron-LM's stream in one length
    if data.packing != "greedy" or config.stage:
        packing = Packing(data.packing, data.packing_window, data.global_batch_size or 1)
    mixture = {source.path: source for source in read_mixture(data.data_config)} if data.data_config else {}
    ours: dict[str, Any] = {}  # empty without them, so that the names of caches stay those of earlier versions
    starts = stage_starts(_earlier(config), packing, *(blend or blends[0])) if config.stage and samples[0] else {}
    if packing or mixture:
        repeats = {path: source.repeat for path, source in mixture.items()}
        ours = {"packing": packing and vars(packing), "repeats": repeats} | ({"starts": starts} if starts else {})
    core = LocalConfig(
        **settings,
        packing=packing,
        mixture=mixture,
        starts=starts,
        fim=fim_of(data, tokenizer),
        path_to_cache="",
        num_dataset_builder_threads=data.num_dataset_builder_threads,
        object_storage_cache_path=data.object_storage_cache_path,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        create_attention_mask=False,
    )
    samples = list(samples)

    def check_files() -> list:
        if data.eod_mask_loss:
            tokenizer.end_for("--eod-mask-loss")
        packed = data.reset_attention_mask or data.reset_position_ids
        return _check_files(core, tokenizer, samples, default_split=data.split is None, packed=packed)

    files = refuse_together(check_files)
    if not any(samples):
        return None, None, None
    folder = data_files.cache_folder(data, files, {**settings, **ours, "samples": samples})
    _build_cache(core, samples, folder)
    refuse_together(lambda: data_files.check_cache(folder) if os.path.isdir(folder) else None)
    if not needed:
        return None, None, None
    datasets = _build(core, samples, folder if os.path.isdir(folder) else "")
    for name, dataset, n in zip(SPLITS, datasets, samples):
        if n and len(dataset) < n:  # a blend without weights is read only once
            fewer = 0 if name == "train" else config.run.eval_iters * len(dataset) // n
            raise TooFewSamples(
                fewer,
                f"the {name} data hold {len(dataset)} samples of {data.seq_length} tokens, {n} are needed: "
                f"{f'use --eval-iters {fewer}, or repeat the data' * (fewer > 0) or 'repeat the data'} as a blend with "
                "weights, --data-path 1 PREFIX 1 PREFIX",
            )
    if first:
        datasets[0] = Later(datasets[0], first)
    return tuple(datasets)


class TooFewSamples(Refusal):
    """The data are too few; ``fewer`` is a number of --eval-iters for which they are enough, or 0."""

    def __init__(self, fewer: int, text: str) -> None:
        super().__init__(text)
        self.fewer = fewer


@dataclass
class LocalConfig(GPTDatasetConfig):
    """core's configuration and our settings."""

    fim: Fim | None = None
    packing: Packing | None = None
    mixture: dict[str, Source] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)  # of training data, with stages of different lengths
    joined: list[tuple[str, int, float]] = field(
        default_factory=list
    )  # (path, documents, weight) of sources in one plan


def _earlier(config: Config) -> list[tuple[int, int]]:
    """(samples, tokens of each) of every earlier stage."""
    starts, lengths, _ = zip(*config.stage.lengths)
    counts = np.diff([samples_after(config, start) for start in starts]).tolist()
    return list(zip(counts, lengths))[: config.stage.number - 1]


def _sources(core: LocalConfig, split: int) -> tuple[Blend | None, tuple[float, float] | None, str]:
    """The blend of a split, the share of its documents that belongs to the split, and the flag."""
    if core.blend:
        return core.blend, core.split_matrix[split], "--data-path"
    prefixes = [prefix for blend in core.blend_per_split if blend for prefix in blend[0]]
    flag = "weighted-split-paths" if any(portion(prefix)[1] for prefix in prefixes) else "data-path"
    return core.blend_per_split[split], (0.0, 1.0), f"--{SPLITS[split]}-{flag}"


def _check_files(
    core: LocalConfig, tokenizer: Tokenizer, samples: list[int], default_split: bool, packed: bool
) -> list:
    """Check each file that will be read: it is complete, fits the vocabulary, and has data for each needed split.

    As in Megatron-LM, a run without validation or test data has no evaluation: ``samples`` becomes 0 for it.
    """
    files: dict[str, data_files.DataFile] = {}
    for i, name in enumerate(SPLITS):
        blend, of_split, flag = _sources(core, i)
        if samples[i] and (blend is None or of_split is None):
            if i == 0:
                raise Refusal(f"no training data: give {'train a share in --split' if core.blend else flag}")
            samples[i] = 0
        for given in blend[0] if samples[i] else ():
            prefix, part = portion(given)
            share = part or of_split
            if prefix not in files:
                files[prefix] = data_files.open_prefix(prefix, flag, core.object_storage_cache_path)
                if not (torch.distributed.is_initialized() and torch.distributed.get_rank() > 0):
                    data_files.check_order(files[prefix], flag)
                data_files.check_token_ids(files[prefix], tokenizer.vocab_size, tokenizer.source)
                if packed:
                    ends = tokenizer.end_for("--reset-attention-mask and --reset-position-ids")
                    data_files.check_document_ends(files[prefix], ends)
            if i and default_split and core.blend and not data_files.documents_of(files[prefix], share):
                logger.warning("%s has too few documents for a %s split: no %s data", prefix, name, name)
                samples[i] = 0
                break
            read_once = blend[1] is None and len(blend[0]) > 1
            data_files.check_share(files[prefix], share, core.sequence_length + 1 if read_once else 1, name, flag)
        if not samples[i]:
            (core.split_matrix if core.blend else core.blend_per_split)[i] = None  # core does not build it
    return list(files.values())


def _build_cache(core: LocalConfig, samples: list[int], folder: str) -> None:
    """Rank 0 builds the indices while the others wait. If no cache can be written, each rank builds in memory."""
    distributed = torch.distributed.is_initialized()
    try:
        if not (distributed and torch.distributed.get_rank() > 0) and not os.path.isdir(folder):
            with atomic_folder(folder) as temporary:
                _build(core, samples, temporary)
    except OSError as error:
        if not os.path.isdir(folder):  # otherwise another run was faster
            logger.warning("no index cache in %s (%s): every rank builds in memory", folder, error.strerror)
    finally:
        if distributed:
            torch.distributed.barrier()


def _build(core: LocalConfig, samples: list[int], cache: str) -> list[Dataset | None]:
    """Build on this rank.

    core draws slightly more from each part of a blend than it needs by its estimate. With few samples (long sequences)
    and unequal weights that is too little, and core fails. This function then tries again with larger draws. Only the
    first try has Megatron-LM's order.

    Args:
        cache: folder of the indices, "" for none.
    """
    config = copy.copy(core)
    config.path_to_cache = cache
    parts = max(len(blend[0]) for blend in [core.blend, *(core.blend_per_split or ())] if blend)
    for surplus in (core.mid_level_dataset_surplus, 0.5, parts + 1):
        config.mid_level_dataset_surplus = surplus
        try:
            kind = FimDataset if core.fim else PackedDataset if core.packing else TokenDataset
            return LocalBuilder(kind, samples, lambda: True, config).build()
        except (IndexError, FileNotFoundError):  # too little was drawn, and nothing was cached
            if surplus > parts:
                raise
    return []


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
        filled, tokenizer = fill_in(text, self.config.fim, generator(*key)), self.config.tokenizer
        check_ids(filled, tokenizer.vocab_size, tokenizer.source, lambda: f"sample {idx} of --fim-data")
        return filled, documents


class LocalBuilder(BlendedMegatronDatasetBuilder):
    """core's builder without its barriers and its rule that only rank 0 builds; `_build_cache` has both."""

    def build_generic_dataset(self, cls: type, is_built_on_rank: Any, synchronize_ranks: bool, *args: Any) -> Any:
        """Build on this rank. With a cache, core's BlendedDataset needs a process group."""
        config, split = args[-1], args[0][0].index_split if cls is BlendedDataset else args[-2]
        if config.packing and config.packing.kind != "greedy" and len(_sources(config, split.value)[0][0]) > 1:
            if cls is not BlendedDataset:
                return Documents(*args)
            sources, weights, samples, _ = args
            # core rounds up the samples of each source, but they are of one plan, and the next stage begins after it
            return PackedDataset.of(sources, weights, min(samples, self.sizes[split.value]), config)
        if cls is BlendedDataset and not torch.distributed.is_initialized():
            args = (*args[:-1], copy.copy(args[-1]))
            args[-1].path_to_cache = ""
        built = cls(*args)
        if cls is BlendedDataset:
            built.dataset_index = unmapped(built.dataset_index)
            built.dataset_sample_index = unmapped(built.dataset_sample_index)
        return built

    def _build_megatron_datasets_parallel(self, prefixes: list, split: list, sizes_per_dataset: list) -> list:
        """For each split, the datasets of all prefixes."""
        with ThreadPoolExecutor(self.config.num_dataset_builder_threads) as pool:
            build = self._build_megatron_dataset_splits
            built = list(pool.map(lambda job: build(job[0], split, job[1], False), zip(prefixes, sizes_per_dataset)))
        return [list(datasets) for datasets in zip(*built)]

    def _build_megatron_dataset_splits(self, path: str, split: list, *args: Any) -> list:
        """As core's; a portion in the path replaces the share of each split."""
        part = portion(path)[1]
        return super()._build_megatron_dataset_splits(
            path, [share and part for share in split] if part else split, *args
        )
