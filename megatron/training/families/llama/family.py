# SPDX-License-Identifier: Apache-2.0
"""What a family of Hugging Face models is: all that loading, conversion and `--model hf:DIR` ask of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import Any

import torch

from megatron.training.families.llama.llama_weights import Piece
from megatron.training.settings.config import ModelConfig

CLASSIFIER = "ForSequenceClassification"


class Family(ABC):
    """A kind of model.

    Attributes:
        kind: model_type in config.json.
        title: the name in messages.
        architecture: the class of the language models in transformers.
        stem: of the class of reward models there; None: of the architecture; empty: there is no such class.
        differs: our settings that all its models have, and most others not.
        ignored: ends of names of tensors in the files that are not weights.
        predicts_ahead: the files may hold further layers for multi-token prediction.
    """

    kind: str
    title: str
    architecture: str
    stem: str | None = None
    differs: dict[str, Any] = {}
    ignored: tuple[str, ...] = ()
    predicts_ahead = False

    @property
    def classifier(self) -> str:
        """The class of reward models in transformers; empty if there is none."""
        stem = self.architecture.removesuffix("ForCausalLM") if self.stem is None else self.stem
        return stem and stem + CLASSIFIER

    def fits(self, model: ModelConfig, attention: dict[str, Any]) -> bool:
        """Whether a model may be of this family, by its most telling settings.

        Args:
            model: the settings.
            attention: those of :class:`AttentionConfig`, where they are known.
        """
        return all(getattr(model, name) == value for name, value in self.differs.items())

    @abstractmethod
    def settings(self, config: dict[str, Any], where: object) -> tuple[ModelConfig, int]:
        """Our settings and the vocabulary size of a config.json. Raises Refusal if it is not supported."""

    def attention(self, config: dict[str, Any], where: object) -> dict[str, Any]:
        """The settings of :class:`AttentionConfig` that a config.json determines: the window, and which layers have it.

        Raises:
            Refusal: the window is invalid, or layers have one that cannot.
        """
        return {}

    @abstractmethod
    def config_json(
        self, model: ModelConfig, vocab_size: int, dtype: torch.dtype, attention: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The config.json of a model with our settings. Raises Refusal if the model is of another family.

        Args:
            attention: settings of :class:`AttentionConfig`; read only by families whose layers may have a window.
        """

    @abstractmethod
    def pieces(self, model: ModelConfig, vocab_size: int, names: Collection[str]) -> Iterator[Piece]:
        """All weights; ``names``: the tensors in the files."""

    def copies(self, model: ModelConfig) -> dict[str, str]:
        """Tensors that the files may hold although they equal another one: for each, the name of the other."""
        return {}
