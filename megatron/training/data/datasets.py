# SPDX-License-Identifier: Apache-2.0
"""The datasets of a run: checks of their files, the indices that one rank builds, and core's builder of blends.

Sample n depends on the data, the seed, the sequence length and the number of samples, but not on the grid.
"""

from __future__ import annotations

import copy
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from torch.utils.data import Dataset

from megatron.training.arguments.data_paths import Blend, parse_split, portion
from megatron.training.arguments.schedule import samples_after
from megatron.training.data import index_files as data_files
from megatron.training.data.batches import Later
from megatron.training.data.chat_dataset import build_chat_datasets
from megatron.training.data.packing.length_mixtures import read_mixture
from megatron.training.data.packing.packing_plans import Packing, stage_starts
from megatron.training.data.read_tokens import unmapped
from megatron.training.data.samples.fill_in_middle import fim_of
from megatron.training.data.samples.mock_data import MockDataset
from megatron.training.data.samples.token_dataset import Documents, FimDataset, LocalConfig, PackedDataset, TokenDataset
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.ownership.atomic import atomic_folder
from megatron.training.refusal import Refusal, refuse_together
from megatron.training.settings.config import Config

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
