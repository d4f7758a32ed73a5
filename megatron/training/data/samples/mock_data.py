# SPDX-License-Identifier: Apache-2.0
"""Samples of --mock-data."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron.training.data.tokenizer import Tokenizer
from megatron.training.settings.config import Config


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
