# SPDX-License-Identifier: Apache-2.0
"""What a family of Hugging Face models is: all that loading, conversion and `--model hf:DIR` ask of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from megatron.training.families.llama import llama_settings
from megatron.training.families.llama.llama_weights import EMBEDDING, LM_HEAD, Piece
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.read_with import ROTARY

# Keys that a config.json must have, because their defaults differ between families.
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "rms_norm_eps", "vocab_size", "max_position_embeddings")  # fmt: skip
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

    def check_keys(self, config: dict[str, Any], where: object, *names: str, sizes: Iterable[str] = SIZES) -> None:
        """Refuse a config.json without one of these keys."""
        if missing := [name for name in (*sizes, *names) if config.get(name) is None]:
            raise Refusal(f"{where}: {', '.join(missing)} of {self.kind} is missing")

    def check_values(self, config: dict[str, Any], where: object, only: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse a config.json with other values of some keys; a missing one has the first value."""
        for name, values in only.items():
            if config.get(name, values[0]) not in values:
                raise Refusal(f"{where}: {name} {config[name]!r} of {self.kind} is not supported: only {values[0]!r}")

    def integers(self, config: dict[str, Any], where: object) -> Callable[..., int]:
        """Reads a whole number by its key, and the least that it may be: 1 if it is not given."""
        return lambda name, least=1: llama_settings.whole(config.get(name), f"{name} of {self.kind}", where, least)

    def refuse(self, model: ModelConfig, wrong: list[str]) -> None:
        """Refuse a model if the class in transformers does not have settings like its ``wrong`` ones."""
        if wrong:
            given = ", ".join(f"--{name.replace('_', '-')} {getattr(model, name)}" for name in wrong)
            raise Refusal(f"the model is not a {self.title}, as Hugging Face's {self.architecture} requires: {given}")

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


class WithLlamaNames(Family):
    """A family whose config.json has a Llama's keys, and whose weights outside of the layers have a Llama's names."""

    def llama_json(
        self, model: ModelConfig, vocab_size: int, dtype: torch.dtype, fixed: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The config.json of a model, with a Llama's keys that both transformers 4 and 5 read.

        Args:
            fixed: settings that every model of the family has.

        Raises:
            Refusal: it has others; the message names them.
        """
        wrong = [name for name in fixed if getattr(model, name) != fixed[name]]
        if model.position_embedding_type not in ROTARY:
            wrong.insert(0, "position_embedding_type")
        self.refuse(model, wrong)
        return {
            "architectures": [self.architecture],
            "model_type": self.kind,
            "vocab_size": vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_query_groups,
            "head_dim": model.kv_channels,
            "hidden_act": "silu",
            "max_position_embeddings": model.max_position_embeddings,
            "rms_norm_eps": model.norm_epsilon,
            "rope_theta": float(model.rotary_base),
            "rope_scaling": llama_settings.scaling_json(model),
            "attention_bias": model.add_bias_linear,
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }

    def pieces(self, model: ModelConfig, vocab_size: int, names: Collection[str]) -> Iterator[Piece]:
        width = model.hidden_size
        yield Piece("embedding.word_embeddings.weight", (EMBEDDING,), ((vocab_size, width),))
        yield from self.layer_pieces(model)
        yield Piece("decoder.final_layernorm.weight", ("model.norm.weight",), ((width,),))
        if model.untie_embeddings_and_output_weights:
            yield Piece("output_layer.weight", (LM_HEAD,), ((vocab_size, width),))

    @abstractmethod
    def layer_pieces(self, model: ModelConfig) -> Iterator[Piece]:
        """The weights of all layers."""
