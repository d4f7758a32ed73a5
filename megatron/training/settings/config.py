# SPDX-License-Identifier: Apache-2.0
"""All settings of a training run. `parser.py` builds the command line from these classes, defined in settings/."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any

from megatron.training.settings.attention_settings import AttentionConfig, ChunkConfig
from megatron.training.settings.foreign_settings import ForeignConfig
from megatron.training.settings.job_settings import (
    CheckpointConfig,
    EvaluationConfig,
    FaultConfig,
    LoggingConfig,
    RunConfig,
    SimulationConfig,
)
from megatron.training.settings.model_settings import ModelConfig
from megatron.training.settings.parallel_settings import ParallelConfig
from megatron.training.settings.training_settings import DataConfig, OptimizerSettings


@dataclass(frozen=True)
class Stage:
    """One of the stages of --seq-length-schedule. A run has a configuration for each.

    Args:
        number: its place in the schedule; the first is 1.
        start, end: iterations that are finished when it begins and ends.
        lengths: (start, tokens per sample, samples per iteration) of every stage, this one included.
    """

    number: int
    start: int
    end: int
    lengths: tuple[tuple[int, int, int], ...]


@dataclass
class Config:
    """One training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    chunks: ChunkConfig = field(default_factory=ChunkConfig)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    run: RunConfig = field(default_factory=RunConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)
    foreign: ForeignConfig = field(default_factory=ForeignConfig)
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    stage: Stage | None = None  # not a flag; None without --seq-length-schedule
    notes: list[str] = field(default_factory=list)  # not a flag: lines that rank 0 prints once before training

    @property
    def pairs(self) -> bool:
        """Whether the data are pairs of answers."""
        return self.data.dpo or self.model.reward_model

    def settings(self) -> Iterator[tuple[str, Any, Field]]:
        """(name of its section, section, field) of every setting."""
        for section in fields(self):
            if section.name != "stage" and is_dataclass(part := getattr(self, section.name)):
                for setting in fields(part):
                    yield section.name, part, setting

    def part_with(self, name: str) -> Any:
        """The section with the setting ``name``, which is in one section only."""
        return next(part for part in vars(self).values() if name in getattr(part, "__dataclass_fields__", ()))
