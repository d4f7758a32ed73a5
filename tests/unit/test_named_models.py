# SPDX-License-Identifier: Apache-2.0
"""The shapes of --model are the published models."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from megatron.formulas.parameters import stage_parameters
from megatron.training.arguments.parser import parse
from megatron.training.families.architectures import described, family_of
from megatron.training.families.llama.llama_settings import command_line, window_flags
from megatron.training.families.named import preset, vocabulary
from megatron.training.json_file import MOST_BYTES
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config
from megatron.training.settings.models import LLAMA_DEFAULTS, MODELS, model_shape

# Parameters in millions as published: on the models' pages, or in their reports (Gemma's as embedding + the others).
PUBLISHED = {
    "gpt2": 124.4, "gpt2-medium": 354.8, "gpt2-large": 774.0, "gpt2-xl": 1557.6,
    "llama2-7b": 6738, "llama3-8b": 8030, "llama3-70b": 70554, "llama3-405b": 405853,
    "llama3.1-8b": 8030, "llama3.1-70b": 70554, "llama3.1-405b": 405853, "llama3.2-1b": 1236, "llama3.2-3b": 3213,
    "qwen2.5-0.5b": 494, "qwen2.5-1.5b": 1544, "qwen2.5-3b": 3086, "qwen2.5-7b": 7616, "qwen2.5-14b": 14770,
    "qwen2.5-32b": 32764, "qwen2.5-72b": 72706,
    "qwen3-0.6b": 596, "qwen3-1.7b": 1721, "qwen3-4b": 4022, "qwen3-8b": 8191, "qwen3-14b": 14768, "qwen3-32b": 32762,
    "qwen3-30b-a3b": 30532, "qwen3-235b-a22b": 235094, "qwen3-next-80b-a3b": 80000,
    "mistral-7b": 7248, "mixtral-8x7b": 46703, "mixtral-8x22b": 140621,
    "gemma-2-2b": 590 + 2024, "gemma-2-9b": 917 + 8324, "gemma-2-27b": 1180 + 26047,
    "gemma-3-1b": 302 + 698, "gemma-3-4b": 675 + 3209, "gemma-3-12b": 1012 + 10759, "gemma-3-27b": 1416 + 25600,
    "gpt-oss-20b": 20915, "gpt-oss-120b": 116829,
    "olmo-2-1b": 1485, "olmo-2-7b": 7299, "olmo-2-13b": 13716, "olmo-2-32b": 32234,
    "olmo-3-7b": 7298, "olmo-3-32b": 32234,
    "pythia-70m": 70.4, "pythia-160m": 162.3, "pythia-410m": 405.3, "pythia-1b": 1011.8, "pythia-1.4b": 1414.6,
    "pythia-2.8b": 2775.2, "pythia-6.9b": 6857.3, "pythia-12b": 11846.1, "gpt-neox-20b": 20554.6,
    "glm-4.5-air": 106000, "glm-4.5": 355000,
    "deepseek-v3.2": 671026 + 852, "glm-5": 744000,  # the indexers of V3.2: 61 x 13.96M
    "deepseek-v2-lite": 15706, "deepseek-v3": 671026, "phi-4": 14660, "nemotron-h-8b": 8100,
}  # fmt: skip
SCARCELY_PUBLISHED = ("gpt-2.7b", "gpt-6.7b", "gpt-13b", "gpt-30b", "genslm-25b", "genslm-33b")  # shapes of papers


def read(name: str) -> Config:
    flags = f"--model {name} --seq-length 1024 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --vocab-size 9"
    return parse(flags.split(), {}, 1)


def test_every_name_is_compared() -> None:
    assert {*PUBLISHED, *SCARCELY_PUBLISHED} == {*MODELS}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_as_published(name: str) -> None:
    shape = model_shape(read(name).model, vocabulary(name))
    numel = stage_parameters(shape, 1, 1, 0, padded=False).numel
    assert numel / 1e6 == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_flags_of_a_model_give_it(name: str) -> None:
    config = read(name)
    windows = {field: getattr(config.attention, field) for field in ("window_size", "window_attn_skip_freq")}
    ahead = {"mtp_num_layers": 2} if name in ("llama3-8b", "glm-4.5") else {}
    model = replace(config.model, model=None, **ahead)
    flags = [*command_line(model, torch.float32), *window_flags(windows if windows["window_size"] else {})]
    names = [word for word in flags if word.startswith("--")]
    assert len(names) == len({*names})
    again = parse([*flags, *RUN, "--vocab-size", "9"], {}, 1)
    if model.position_embedding_type == "none":  # then RoPE's base is not written
        model = replace(model, rotary_base=again.model.rotary_base)
    assert again.model == model and again.attention == config.attention


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "nemotron-h-8b"])
def test_transformers_has_the_same_model(name: str) -> None:
    """The config.json that we write gives the same settings and windows; transformers' model has as many parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = read(name)
    attention = {field: getattr(config.attention, field) for field in ("window_size", "window_attn_skip_freq")}
    written = family_of(config.model, attention).config_json(config.model, vocabulary(name), torch.bfloat16, attention)
    again, size, _, windows = described(written, name)
    not_in_it = {"model", "vocab_size", "moe_aux_loss_coeff", "moe_router_load_balancing_type"}
    not_in_it |= {"moe_ffn_hidden_size", "moe_router_topk_scaling_factor"}  # ours may be None, which means the same
    differing = {field for field, value in asdict(again).items() if getattr(config.model, field) != value}
    assert differing <= not_in_it and size == vocabulary(name)
    assert (windows.get("window_size") is None) == (config.attention.window_size is None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written))
    numel = stage_parameters(model_shape(config.model, size), 1, 1, 0, padded=False).numel
    assert sum(parameter.numel() for parameter in model.parameters()) == numel


def test_transformers_has_the_same_nemotron_h() -> None:
    """Models with Mamba2 have no config.json of ours: the sizes are given to transformers one by one."""
    from transformers import AutoModelForCausalLM, NemotronHConfig

    model = read("nemotron-h-8b").model
    config = NemotronHConfig(
        vocab_size=vocabulary("nemotron-h-8b"), hidden_size=model.hidden_size, intermediate_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads, num_key_value_heads=model.num_query_groups,
        head_dim=model.kv_channels, hybrid_override_pattern=model.hybrid_override_pattern,
        mamba_num_heads=model.mamba_num_heads, mamba_head_dim=model.mamba_head_dim, n_groups=model.mamba_num_groups,
        ssm_state_size=model.mamba_state_dim,
    )  # fmt: skip
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    numel = stage_parameters(model_shape(model, vocabulary("nemotron-h-8b")), 1, 1, 0, padded=False).numel
    assert sum(parameter.numel() for parameter in theirs.parameters()) == numel


def test_layers_with_a_window() -> None:
    """Gemma 2 and gpt-oss have one in every second layer, the first included; Gemma 3 in all but every sixth."""
    for name, size, every in (("gemma-2-9b", 4096, 2), ("gemma-3-1b", 512, 6), ("gpt-oss-20b", 128, 2)):
        attention = read(name).attention
        assert attention.attention_mask == "window" and attention.window_size == (size - 1, 0)
        assert attention.window_attn_skip_freq == every


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 301, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}  # fmt: skip
LAYERS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
FOLDERS = {
    "llama": SMALL,
    "mixtral": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": SMALL | LAYERS,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 301},
    "gpt_neox": SMALL | {"hidden_act": "gelu"},
}
RUN = "--seq-length 64 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --device cpu".split()


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_model_of_a_config_json(tmp_path: Path, kind: str) -> None:
    """``--model hf:DIR`` sets what the flags that tools/convert_hf.py prints set, and flags override it."""
    given = {"model_type": kind} | FOLDERS[kind]
    (tmp_path / "config.json").write_text(json.dumps(given))
    model, vocab_size, _, attention = described(given, "config.json")
    words = [*command_line(model, torch.float32), *window_flags(attention), "--vocab-size", "300"]
    named = parse(["--model", f"hf:{tmp_path}", *RUN], LLAMA_DEFAULTS, 1)
    flags = parse([*words, *RUN], {}, 1)
    assert replace(named.model, model=None) == flags.model and named.attention == flags.attention
    assert vocabulary(f"hf:{tmp_path}") == vocab_size == named.model.vocab_size + 1
    other = parse(["--model", f"hf:{tmp_path}", "--norm-epsilon", "0.5", *RUN], {}, 1)
    assert other.model == replace(named.model, norm_epsilon=0.5)


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "No such file"),
        ("[]", "not a JSON object"),
        ('{"model_type": "t5"}', "model_type 't5' is not supported: only llama, mistral"),
        (json.dumps({"model_type": "llama", "auto_map": {}}), "auto_map asks for code"),
        (" " * (MOST_BYTES + 1), "longer than 64 MiB"),
    ],
    ids=("missing", "list", "unknown", "code", "large"),
)
def test_a_config_json_that_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(Refusal) as caught:
        preset(f"hf:{tmp_path}")
    assert message in str(caught.value) and str(caught.value).startswith(f"--model hf:{tmp_path}: ")


@pytest.mark.parametrize(
    "name, ours",
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3.1-70b"),
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b"),
        ("allenai/OLMo-2-1124-7B", "olmo-2-7b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
    ],
)
def test_ids_of_the_hub_are_known(name: str, ours: str):
    assert preset(name) == preset(ours) and vocabulary(name) == vocabulary(ours)


@pytest.mark.parametrize("name", ["mistralai/Mistral-7B-v0.1", "mistral", "/data/Qwen3-8B", "Qwen/Qwen3-8B-2507"])
def test_an_unknown_model_is_answered_by_the_nearest_one(name: str):
    with pytest.raises(Refusal) as caught:
        preset(name)
    near = "qwen3-8b" if "Qwen" in name else "mistral-7b"
    assert f"not a known shape; did you mean {near}?" in str(caught.value) and len(str(caught.value)) < 200


def test_a_folder_is_named_with_its_prefix(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refusal, match=f"a folder is given as hf:{tmp_path}"):
        preset(str(tmp_path))
