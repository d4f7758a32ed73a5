# SPDX-License-Identifier: Apache-2.0
"""Micro-batches in an order that does not depend on the grid, and this rank's part of a batch.

Data take three steps, each a function. `build_datasets` of datasets.py has a barrier, so every rank calls it.
`micro_batches` runs on the pipeline stages that read tokens or labels (the first and the last), on *every* rank of
their tensor- and context-parallel groups: each rank reads its data, and nothing is broadcast. `shard_batch` moves only
the tokens of this rank to its device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from torch.utils.data import DataLoader, Dataset

from megatron.context_parallel.layout.documents import document_ends, document_rows, restart
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Spans
from megatron.context_parallel.layout.tree import Tree
from megatron.training.data.read_tokens import DataError
from megatron.training.refusal import Refusal

KEYS = ("tokens", "labels", "loss_mask")
BY_TOKEN = (*KEYS, "groups", "margins")  # groups only in evaluations, and of pairs of answers
Batch = dict[str, torch.Tensor]


class Plans(Protocol):
    """Makes plans from a batch's ``document_ends`` in the loader's processes, and receives them in the trainer.

    Training uses ``BatchPlans`` (model/batch_plans.py). What it makes passes through the loader as it is.
    """

    def make(self, ends: torch.Tensor) -> list[Any]: ...

    def receive(self, ends: torch.Tensor, made: list[Any]) -> dict[Any, Any]: ...


def sample_order(
    total: int, start: int, micro_batch: int, rank: int, ranks: int, cyclic: bool, seed: int, drop_last: bool
) -> Iterator[list[tuple[int, bool, int]]]:
    """The samples of a data-parallel rank for each micro-batch: (sample, real, number in the run).

    The ranks share the next ``micro_batch * ranks`` samples of one order, and rank d takes the d-th part. So the n-th
    global batch of G samples has samples nG to (n+1)G - 1 on every grid. The order is that of the dataset, or endless
    and shuffled again in each epoch (``cyclic``). A sample that is not real fills a micro-batch and has no loss.
    """
    epoch, order = -1, torch.empty(0)
    while cyclic or start < total:
        if not cyclic and drop_last and start + micro_batch * ranks > total:
            return
        own = range(start + rank * micro_batch, start + (rank + 1) * micro_batch)
        if cyclic:
            batch = []
            for position in own:
                if position // total != epoch:
                    epoch = position // total
                    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed + epoch))
                batch.append((int(order[position % total]), True, position))
            yield batch
        else:
            yield [(min(i, total - 1), i < total, i) for i in own]
        start += micro_batch * ranks


class Later(Dataset):
    """Samples of a stage of --seq-length-schedule, under their numbers in the run; those of earlier stages are absent.

    Args:
        first: number of the first sample.
    """

    def __init__(self, samples: Dataset, first: int) -> None:
        self.samples, self.first = samples, first

    def __len__(self) -> int:
        return self.first + len(self.samples)

    def __getitem__(self, index: int) -> Batch:
        return self.part(index, None)

    def part(self, index: int, spans: Spans | None) -> Batch:
        """As :func:`part_of`."""
        if index < self.first:
            raise IndexError(f"sample {index} is of an earlier stage")
        return part_of(self.samples, index - self.first, spans)


def part_of(dataset: Dataset, index: int, spans: Spans | None) -> Batch:
    """A sample; if the dataset can, only the tokens at the positions of ``spans`` are read, and the others are 0."""
    if spans is None:
        return dataset[index]
    if isinstance(dataset, BlendedDataset):
        dataset, index = dataset.datasets[dataset.dataset_index[index]], int(dataset.dataset_sample_index[index])
    return dataset.part(index, spans) if hasattr(dataset, "part") else dataset[index]


class _Samples(Dataset):
    """A dataset indexed by (index, real, number in the run); a sample that is not real has no loss."""

    def __init__(self, dataset: Dataset, eod: int | None, numbers_only: bool, spans: Spans | None) -> None:
        self.dataset, self.eod, self.numbers_only, self.spans = dataset, eod, numbers_only, spans

    def __getitem__(self, item: tuple[int, bool, int]) -> Batch | DataError:
        """A sample, or an error in the data as a value, which a worker process can pass on without its traceback."""
        index, real, number = item
        if self.numbers_only:
            return {"numbers": torch.tensor(number)}
        try:
            sample = part_of(self.dataset, index, self.spans)
        except DataError as error:
            return DataError(str(error))
        loss_mask = sample["loss_mask"] if real else torch.zeros_like(sample["loss_mask"])
        item = {"tokens": sample["tokens"], "labels": sample["labels"], "loss_mask": loss_mask}
        item |= {key: sample[key] for key in BY_TOKEN[len(KEYS) :] if key in sample}
        item["numbers"] = torch.tensor(number)
        if self.eod is not None:
            ends = sample.get("document_ends")  # given for chats, whose turns end with the same token
            item["document_ends"] = torch.tensor(document_ends(sample["tokens"], self.eod)) if ends is None else ends
        return item


def _stack(plans: Plans | None, samples: list[Batch | DataError]) -> Batch | DataError:
    for sample in samples:
        if isinstance(sample, DataError):
            return sample
    keys = [key for key in (*BY_TOKEN, "numbers") if key in samples[0]]
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in keys}
    if "document_ends" in samples[0]:
        batch["document_ends"] = stacked_ends([sample["document_ends"] for sample in samples])
        if plans is not None:
            batch["plans"] = plans.make(batch["document_ends"])
    return batch


def stacked_ends(ends: Sequence[torch.Tensor]) -> torch.Tensor:
    """Ends of documents [b, n], or of trees [b, n, 2]: those of each sample, padded with their last value."""
    longest = max(map(len, ends))
    return torch.stack([torch.cat((one, one[-1:].expand(longest - len(one), *one.shape[1:]))) for one in ends])


class _Batches:
    """The batches of a loader. A batch that cannot be read raises an error; the iteration may continue after it.

    Attributes:
        waited: seconds in which this process waited for the loader, or read batches itself.
    """

    def __init__(self, loader: DataLoader, plans: Plans | None) -> None:
        self._batches, self._plans, self.waited = iter(loader), plans, 0.0
        self._ready: list[Batch | DataError | None] = []  # the next one, or None at the end

    def __iter__(self) -> _Batches:
        return self

    def prepare(self) -> None:
        """Read the next batch now if it has plans, so that they are on the device before its step."""
        if self._plans is not None and not self._ready:
            batch = self._read()
            if isinstance(batch, dict):
                batch["plans"] = self._plans.receive(batch["document_ends"], batch["plans"])
            self._ready.append(batch)

    def _read(self) -> Batch | DataError | None:
        """The loader's next batch; None at the end."""
        begin = time.perf_counter()
        try:
            return next(self._batches, None)
        finally:
            self.waited += time.perf_counter() - begin

    def __next__(self) -> Batch:
        self.prepare()
        batch = self._ready.pop() if self._ready else self._read()
        if batch is None:
            raise StopIteration
        if isinstance(batch, DataError):
            try:
                raise batch
            finally:  # otherwise the error's frame keeps the loader alive, and its workers end 10 s later
                del batch
        return batch


def take_waited(batches: Any) -> float:
    """Seconds of waiting of the batches of all virtual stages since the last call; 0 on a rank that reads no data."""
    waited = 0.0
    for one in batches if isinstance(batches, list) else [batches]:
        waited += getattr(one, "waited", 0.0)
        if hasattr(one, "waited"):
            one.waited = 0.0
    return waited


def _start_worker(_: int) -> None:
    """Leave the trainer's process group. A SIGTERM to the group must not end workers before the trainer's last step."""
    os.setpgid(0, 0)


def micro_batches(
    dataset: Dataset,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int = 0,
    dataloader_type: str = "single",
    seed: int = 0,
    drop_last: bool = True,
    eod: int | None = None,
    numbers_only: bool = False,
    plans: Plans | None = None,
    spans: Spans | None = None,
) -> Iterator[Batch]:
    """CPU tensors ``tokens``, ``labels``, ``loss_mask`` [b, s], from the first sample not yet consumed.

    ``numbers`` [b] are the numbers of the samples in the run, which seed dropout; with ``numbers_only`` nothing else is
    read. With ``eod``, the end-of-document token, ``document_ends`` [b, n] are added: the ends of the documents in each
    sample, from the dataset or from this token. With ``plans``, the loader's processes also make the batch's attention
    ``plans``, by mask. The iterator's ``prepare()`` reads the next batch before it is asked for. With
    ``spans`` of the ``s + 1`` tokens, only tokens at these positions are read, and the others are 0; not with ``eod``.

    Call it only on pipeline stages that need the data: the first and the last, and all with ``eod``. The global batch
    may grow; take as many micro-batches as a step needs. "single" ends with the data; "cyclic" never ends.

    Raises:
        DataError: by the iterator; a sample cannot be read or used.
    """
    total, cyclic = len(dataset), dataloader_type == "cyclic"
    if not cyclic and consumed_samples > total:
        raise Refusal(
            f"{consumed_samples} samples were consumed before, but the data hold {total}: give the same data as before"
        )
    order = sample_order(
        total, consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size, cyclic, seed, drop_last
    )
    loader = DataLoader(
        _Samples(dataset, eod, numbers_only, spans),
        batch_sampler=order,
        num_workers=num_workers,
        collate_fn=partial(_stack, plans),
        worker_init_fn=_start_worker,
        multiprocessing_context="fork" if num_workers else None,
        generator=torch.Generator(),  # otherwise the loader draws from the global one
    )
    return _Batches(loader, plans)


def shard_batch(
    batch: Batch,
    layout: SequenceLayout,
    device: torch.device | str,
    *,
    reset_positions: bool = False,
    ahead: int = 0,
) -> Batch:
    """This rank's part of a batch, on its device: ``layout.positions`` [s_local] of each [b, s] tensor.

    ``position_ids`` [b, s_local] are the global positions, or with ``reset_positions`` those within the documents, or
    along a tree's paths. ``document_ends`` [b, n], of trees [b, n, 2], and ``numbers`` [b] stay in host memory. Tensors
    that the batch lacks are left out.
    ``ahead`` has for multi-token prediction what :func:`shifted` gives by 1 to ``ahead`` tokens, [ahead, b, s_local].
    """
    device, ends = torch.device(device), batch.get("document_ends")
    rows = next(iter(batch.values())).shape[0]
    documents = [] if ends is None else document_rows(ends)
    if documents:
        layout = layout.of_documents(documents[0])  # if it depends on documents, the batch is one sample
    positions = layout.positions
    local = {key: batch[key].index_select(1, positions) for key in BY_TOKEN if key in batch}
    local["position_ids"] = positions[None]
    if reset_positions or any(isinstance(row, Tree) for row in documents):
        local["position_ids"] = torch.stack([restart(positions, row) for row in documents])
    if device.type == "cuda":
        local = {key: tensor.pin_memory() for key, tensor in local.items()}
    local = {key: tensor.to(device, non_blocking=True) for key, tensor in local.items()}
    local["position_ids"] = local["position_ids"].expand(rows, -1)
    if documents:
        local["document_ends"] = ends
    local |= {key: batch[key] for key in ("numbers", "plans") if key in batch}
    if ahead and all(key in batch for key in KEYS):
        further = [shifted(batch, positions, tokens) for tokens in range(1, ahead + 1)]
        local["ahead"] = {key: torch.stack([one[key] for one in further]).to(device) for key in KEYS}
    return local


def shifted(batch: Batch, positions: torch.Tensor, by: int) -> Batch:
    """Tokens, labels and loss mask [b, n] of the tokens that follow ``positions`` [n] after ``by`` tokens.

    Those beyond the sequence are 0. They have no loss, and neither have those in another document.
    """
    length = batch["tokens"].size(1)
    there = positions + by
    inside = there < length
    same = inside.expand(len(batch["tokens"]), -1)
    if "document_ends" in batch:
        ends = batch["document_ends"]
        here, then = (torch.searchsorted(ends, at.expand(len(ends), -1).contiguous(), right=True)
                      for at in (positions, there))  # fmt: skip
        same = same & (here == then)
    moved = {key: batch[key].index_select(1, there.clamp(max=length - 1)) * inside for key in KEYS}
    return moved | {"loss_mask": moved["loss_mask"] * same}
