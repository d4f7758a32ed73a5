# SPDX-License-Identifier: Apache-2.0
"""Named shapes and parameter counts."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from megatron.training.arguments.config import ModelConfig
from megatron.training.arguments.models import count_parameters, derive_shape, shape, vocabulary
from megatron.training.refusal import Refusal

PUBLISHED = {
    "gpt-2.7b": 2.7e9,
    "gpt-6.7b": 6.7e9,
    "gpt-13b": 13e9,
    "gpt-30b": 30e9,
    "llama2-7b": 6.738e9,
    "llama3-8b": 8.030e9,
    "llama3-70b": 70.55e9,
    "llama3-405b": 405.85e9,
    "genslm-25b": 25e9,
    "genslm-33b": 33e9,
}


@pytest.mark.parametrize(("name", "size"), PUBLISHED.items())
def test_published_sizes(name: str, size: float):
    model = ModelConfig(**shape(name))
    near = 0.001 if name.startswith("llama") else 0.05
    assert count_parameters(model, vocabulary(name)) == pytest.approx(size, rel=near)


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_are_settings_that_fit(name: str):
    settings = shape(name)
    assert set(settings) <= {field.name for field in fields(ModelConfig)}
    model = derive_shape(ModelConfig(**settings))
    assert model.hidden_size == model.num_attention_heads * model.kv_channels
    assert model.kv_channels % 8 == 0 and model.num_attention_heads % model.num_query_groups == 0
    assert model.attention_dropout == 0


def test_llama3_8b_to_the_last_parameter():
    assert count_parameters(ModelConfig(**shape("llama3-8b")), 128256) == 8030261248


def test_unknown_names_are_refused():
    with pytest.raises(Refusal, match="--model gpt-4.*llama3-8b.*genslm-33b"):
        shape("gpt-4")


SMALL = ModelConfig(num_layers=3, hidden_size=64, num_attention_heads=4, max_position_embeddings=32)
LLAMA = {
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [  # what megatron-core's GPTModel with these settings and 128 rows of vocabulary holds
        ({}, 160320),
        (LLAMA, 127424),
        (
            {"add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": True, "kv_channels": 24, "swiglu": True},
            159744,
        ),
        ({"swiglu": True}, 135744),
        ({"embed_layernorm": True}, 160320 + 2 * 64),
    ],
)
def test_counts_agree_with_megatron_core(changes: dict, parameters: int):
    assert count_parameters(replace(SMALL, **changes), 128) == parameters


@pytest.mark.parametrize(
    ("changes", "derived"),
    [
        ({}, (16, 256, 4)),
        ({"swiglu": True}, (16, 128, 4)),  # 8 * 64 / 3 = 170.7, down to a multiple of 64
        ({"hidden_size": 4096, "swiglu": True, "num_attention_heads": 32}, (128, 10880, 32)),
        ({"ffn_hidden_size": 100, "kv_channels": 8}, (8, 100, 4)),
        ({"group_query_attention": True, "num_query_groups": 2}, (16, 256, 2)),
        ({"group_query_attention": True}, (16, 256, 1)),
    ],
)
def test_derived_shapes(changes: dict, derived: tuple[int, int, int]):
    model = derive_shape(replace(SMALL, **changes))
    assert (model.kv_channels, model.ffn_hidden_size, model.num_query_groups) == derived
