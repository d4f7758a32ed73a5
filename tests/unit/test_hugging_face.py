# SPDX-License-Identifier: Apache-2.0
"""tools/convert_hf.py restores every file of a model bit for bit; unsupported models are refused in one line."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from megatron.training.arguments.parser import parse
from megatron.training.checkpoint.checksums import list_files
from megatron.training.checkpoint.converting import lazy_save, to_hugging_face
from megatron.training.checkpoint.converting.quantized import from_fp8, quantization
from megatron.training.checkpoint.hugging_face import safetensors_folder
from megatron.training.checkpoint.hugging_face.load_folder import open_folder
from megatron.training.checkpoint.hugging_face.safetensors_folder import HEADERS, cast
from megatron.training.checkpoint.megatron_lm.checked import Checked, examine
from megatron.training.checkpoint.megatron_lm.stored_tensors import StoredTensors
from megatron.training.families import architectures, gemma
from megatron.training.families.architectures import (
    FAMILIES,
    Described,
    config_json,
    described,
    family_of,
)
from megatron.training.families.llama import llama_settings, llama_weights
from megatron.training.families.llama.llama_settings import LLAMA3 as FIXED
from megatron.training.families.older_gpts import BLOOM
from megatron.training.model.build import rope
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.models import LLAMA_DEFAULTS
from tests.hugging_face import save_model, save_with_later_tokens
from tools import check_checkpoint
from tools.convert_hf import main

RUN = ["--seq-length", "64", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", "--mock-data"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def save_llama(folder: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB", **settings: Any) -> Path:
    """A random Llama as transformers saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    given = {
        "vocab_size": 67,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**(given | settings))).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text('{"not": "read"}')
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One Llama for the tests that change it in a copy."""
    return save_llama(tmp_path_factory.mktemp("llama"), shard="10KB")


@pytest.fixture(scope="module")
def ours(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That Llama as our checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint") / "ours"
    assert main(["--from-hf", str(small), "--to", str(folder)]) == 0
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of a model's files by name, without our list of checksums."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "checksums.json"}


def there_and_back(source: Path, tmp_path: Path) -> Path:
    assert main(["--from-hf", str(source), "--to", str(tmp_path / "ours")]) == 0
    assert main(["--from", str(tmp_path / "ours"), "--to-hf", str(tmp_path / "back")]) == 0
    return tmp_path / "back"


def refused(capsys: pytest.CaptureFixture, tmp_path: Path, *argv: object) -> str:
    """The error line of a failed conversion, which must leave no output."""
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert main([str(word) for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    assert sorted(tmp_path.rglob("*")) == before
    return err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shard", ["1GB", "6KB"])
@pytest.mark.parametrize("kv_heads, tied", [(4, False), (2, True), (2, False), (1, False)])
def test_round_trip(tmp_path: Path, dtype: torch.dtype, shard: str, kv_heads: int, tied: bool) -> None:
    source = save_llama(tmp_path / "in", dtype, shard, num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    assert (len(list(source.glob("*.safetensors"))) > 1) == (shard == "6KB")
    assert contents(there_and_back(source, tmp_path)) == contents(source)


SIZES = {"vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
NEMOTRON = {
    "vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "mamba_num_heads": 4, "mamba_head_dim": 6, "ssm_state_size": 6,
    "n_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20, "time_step_min": 0.5, "routed_scaling_factor": 1.5, "n_group": 1,
    "topk_group": 1,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
}  # fmt: skip
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 128}
KINDS = {
    "qwen2": SIZES | {"tie_word_embeddings": True},
    "qwen3": SIZES | {"head_dim": 8},
    "bloom": {"vocab_size": 67, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "gpt2": {"vocab_size": 67, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 24},
    "gpt_neox": SIZES | {"intermediate_size": 24, "hidden_act": "gelu", "rotary_pct": 0.5},
    "olmo2": SIZES,
    "olmo3": SIZES | {"num_hidden_layers": 4, "sliding_window": 8, "rope_scaling": YARN, "rope_theta": 500000.0},
    "glm4_moe": SIZES
    | {"attention_bias": True, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    | {"num_mtp_layers": 0, "num_hidden_layers": 3},
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 3},
    "mistral": SIZES | {"sliding_window": None},
    "phi3": SIZES | {"pad_token_id": 0},
    "qwen3_moe": SIZES
    | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": True},
    "smollm3": SIZES | {"num_hidden_layers": 4, "pad_token_id": None},
    "ernie4_5": SIZES | {"head_dim": 8, "use_bias": True},
    "granite": SIZES | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25},
    "exaone4": SIZES | {"sliding_window": 4, "sliding_window_pattern": 2},
    "nemotron_h": NEMOTRON,
    "mamba2": {"vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8}
    | {"state_size": 6, "n_groups": 2, "tie_word_embeddings": True, "time_step_limit": [0.5, float("inf")]},
    "gpt_oss": SIZES | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 8},
}


def test_reward_models_have_classes_in_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

    assert {kind: family.classifier for kind, family in FAMILIES.items()} == {
        kind: NAMES.get(kind, "") for kind in FAMILIES
    }


@pytest.mark.lab
@pytest.mark.parametrize("kind", [kind for kind in KINDS if FAMILIES[kind].classifier])
def test_reward_models_are_converted(tmp_path: Path, kind: str) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(kind, **KINDS[kind], num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "in")
    assert contents(there_and_back(tmp_path / "in", tmp_path)) == contents(tmp_path / "in")


MIXTRAL = {"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 67,
           "max_position_embeddings": 64, "num_local_experts": 4, "num_experts_per_tok": 2}  # fmt: skip


NEOX = SIZES | {"model_type": "gpt_neox", "intermediate_size": 24, "hidden_act": "gelu"}
GLM = KINDS["glm4_moe"] | {
    "model_type": "glm4_moe",
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
QWEN3_NEXT = KINDS["qwen3"] | {"model_type": "qwen3_next", "rms_norm_eps": 1e-6, "linear_num_key_heads": 2,
                               "linear_num_value_heads": 4,
                               "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
                               "decoder_sparse_step": 1, "norm_topk_prob": True, "num_experts": 4,
                               "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                               "shared_expert_intermediate_size": 12, "partial_rotary_factor": 0.5}  # fmt: skip


@pytest.mark.parametrize("config, name", [(NEOX, "rotary_pct"), (GLM, "partial_rotary_factor")])
def test_all_entries_of_a_head_may_rotate(config: dict[str, Any], name: str) -> None:
    assert described(config | {name: 1.0}, "config.json").settings.rotary_percent == 1.0


@pytest.mark.parametrize("every", [1, 2, None])
def test_how_often_qwen3_next_has_attention(every: int | None) -> None:
    settings = described(QWEN3_NEXT | {"full_attention_interval": every}, "config.json").settings
    assert settings.linear_attention_freq == (every or 4)


def test_the_number_of_experts_by_its_older_name() -> None:
    given = KINDS["qwen3_moe"] | {"model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "decoder_sparse_step": 1}
    assert described(given | {"num_local_experts": 8}, "config.json").settings.num_experts == 4
    assert described(given | {"num_experts": None, "num_local_experts": 8}, "").settings.num_experts == 8
    with pytest.raises(Refusal, match="num_experts None"):
        described(given | {"num_experts": None}, "config.json")


def test_what_a_family_needs_is_not_left_out() -> None:
    gpt_oss = described({"model_type": "gpt_oss", "layer_types": ["full_attention", "sliding_attention"],
                         "swiglu_limit": 7.0, "rope_scaling": {"rope_type": "default"}, "rms_norm_eps": 1e-5}
                        | KINDS["gpt_oss"], "").settings  # fmt: skip
    with pytest.raises(Refusal, match="--activation-func-clamp-value"):
        FAMILIES["gpt_oss"].config_json(replace(gpt_oss, activation_func_clamp_value=None), 67, torch.float32)
    assert FAMILIES["gpt_oss"].config_json(gpt_oss, 67, torch.float32)["intermediate_size"] == 24
    qwen = described(QWEN3_NEXT, "").settings
    with pytest.raises(Refusal, match="--moe-shared-expert-gate"):
        FAMILIES["qwen3_next"].config_json(replace(qwen, moe_shared_expert_gate=False), 67, torch.float32)
    for windows in ({"window_size": (7, 0)}, {"window_size": (7, 0), "window_attn_skip_freq": 2}):
        with pytest.raises(Refusal, match="--window-size None in Hugging Face's Qwen3NextForCausalLM, 7,0 in the mod"):
            config_json(Described(qwen, 67, FAMILIES["qwen3_next"], windows), torch.float32)
    assert FAMILIES["qwen3_next"].config_json(qwen, 67, torch.float32, {"window_size": None})["num_experts"] == 4


def test_limits_of_families_include_their_ends() -> None:
    assert described(MIXTRAL | {"intermediate_size": 1}, "").settings.moe_ffn_hidden_size == 1
    scaled = {"model_type": "llama", "max_position_embeddings": 4096, "rope_theta": 10000.0,
              "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 1024}}  # fmt: skip
    assert described(MIXTRAL | scaled, "").settings.yarn_rotary_scaling_factor == 4
    qwen2 = described(MIXTRAL | scaled | {"model_type": "qwen2"}, "").settings
    assert FAMILIES["qwen2"].config_json(qwen2, 67, torch.float32)["rope_scaling"]["factor"] == 4


def test_a_glm_may_have_no_experts_and_one_form_of_rope() -> None:
    rope = {"rope_theta": 500000, "partial_rotary_factor": 0.25, "rope_type": "default"}
    model = described(GLM | {"rope_parameters": rope}, "").settings
    assert (model.rotary_base, model.rotary_percent) == (500000, 0.25)
    for dense in (2, 3):  # of three layers
        model = described(GLM | {"first_k_dense_replace": dense}, "").settings
        assert model.num_experts == (4 if dense == 2 else None)
        assert FAMILIES["glm4_moe"].config_json(model, 67, torch.float32)["first_k_dense_replace"] == dense


@pytest.mark.parametrize("width, written", [(None, 24), (12, 12)])
def test_the_width_of_experts_is_that_of_an_mlp_unless_it_is_given(width: int | None, written: int) -> None:
    config = {"model_type": "gpt_oss", "layer_types": ["full_attention"] * 2, "swiglu_limit": 7.0,
              "rope_scaling": {"rope_type": "default"}, "rms_norm_eps": 1e-5} | KINDS["gpt_oss"]  # fmt: skip
    model = replace(described(config, "").settings, moe_ffn_hidden_size=width)
    assert FAMILIES["gpt_oss"].config_json(model, 67, torch.float32)["intermediate_size"] == written
    pieces = FAMILIES["gpt_oss"].pieces(model, 67, ())
    (down,) = {shape for piece in pieces for name, shape in zip(piece.names, piece.shapes)
               if name.endswith("experts.down_proj")}  # fmt: skip
    assert down == (4, written, 16)


OLMO3 = KINDS["olmo3"] | {"model_type": "olmo3", "rms_norm_eps": 1e-6, "layer_types": ["sliding_attention"] * 4}


@pytest.mark.parametrize("some, scaled, base", [(True, True, 500000), (True, False, None), (False, True, None)])
def test_layers_with_a_window_have_a_base_of_their_own_if_the_others_differ(some: bool, scaled: bool, base) -> None:
    """In OLMo 3 RoPE is scaled in the layers without a window; layers of one kind need one base."""
    kinds = ["sliding_attention", "full_attention"] * 2 if some else ["sliding_attention"] * 4
    model = described(OLMO3 | {"layer_types": kinds, "rope_scaling": YARN if scaled else None}, "").settings
    assert model.rotary_base_local == base
    for local, theta in ((base, 500000.0), (10000, 10000.0)):
        written = FAMILIES["olmo3"].config_json(replace(model, rotary_base_local=local), 67, torch.float32)
        assert written["rope_parameters"]["sliding_attention"]["rope_theta"] == theta


def test_a_window_has_at_least_one_token() -> None:
    assert described(OLMO3 | {"sliding_window": 1}, "").attention["window_size"] == (0, 0)
    with pytest.raises(Refusal, match="sliding_window 0 is not a positive integer"):
        described(OLMO3 | {"sliding_window": 0}, "")


def test_a_step_of_nemotron_h_may_be_zero_and_not_negative() -> None:
    config = {"model_type": "nemotron_h"} | NEMOTRON
    described(config | {"time_step_min": 0}, "")
    with pytest.raises(Refusal, match="time_step_min"):
        described(config | {"time_step_min": -0.5}, "")


def test_adapters_for_peft_are_in_fp32(monkeypatch) -> None:
    a, b = torch.randn(2, 16).bfloat16(), torch.randn(24, 2).bfloat16()
    monkeypatch.setattr(to_hugging_face, "load_adapter", lambda *_: (a, b))
    piece = llama_weights.Piece("w", ("model.up.weight",), ((24, 16),))
    written = dict(to_hugging_face._for_peft(None, piece, SimpleNamespace(num_query_groups=1), torch.bfloat16))
    assert {name.removeprefix("base_model.model.model.up."): x.dtype for name, x in written.items()} == {
        "lora_A.weight": torch.float32, "lora_B.weight": torch.float32,
    }  # fmt: skip


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_dropout_that_is_not_used_here_has_a_note(tmp_path: Path, capsys, dropout: float) -> None:
    source = save_llama(tmp_path / "in", attention_dropout=dropout, num_hidden_layers=1)
    assert main(["--from-hf", str(source), "--to", str(tmp_path / "ours")]) == 0
    note = "note: attention_dropout 0.25 of config.json is not used in training here"
    assert (note in capsys.readouterr().out) is (dropout > 0)


F32 = {"a": ("F32", (2, 3)), "b": ("F32", (4,))}


@pytest.mark.parametrize(
    "tensors, fits",
    [
        (F32, torch.float32),
        ({name: ("BF16", shape) for name, (_, shape) in F32.items()}, torch.bfloat16),
        ({"a": F32["a"]}, None),
        (F32 | {"a": ("F32", (3, 2))}, None),
        (F32 | {"a": ("BF16", (2, 3))}, None),
        ({name: ("I8", shape) for name, (_, shape) in F32.items()}, None),
        (F32 | {"other": ("F32", (1,))}, None),
        (F32 | {"lm_head.weight": ("F32", (4,))}, torch.float32),
        (F32 | {"ignored": ("F32", (1,))}, torch.float32),
        (F32 | {"ignored, lost": ("F32", (1,))}, None),
        (F32 | {"wide": ("F32", (4,))}, torch.float32),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_when_the_original_files_are_written_again(monkeypatch, tensors, fits, dtype) -> None:
    header = safetensors_folder.make_header(tensors, {"note": "x"})
    monkeypatch.setattr(to_hugging_face, "_original_headers", lambda _: {"x.safetensors": header})
    monkeypatch.setattr(to_hugging_face, "_is_kept", lambda _, name, entry: "lost" not in name)
    pieces = [SimpleNamespace(names=("a",), shapes=((2, 3),), wide=False),
              SimpleNamespace(names=("b",), shapes=((4,),), wide=False)]  # fmt: skip
    if "wide" in tensors:
        pieces.append(SimpleNamespace(names=("wide",), shapes=((4,),), wide=True))
    copies = {"lm_head.weight": "b"}  # tied
    headers, original = to_hugging_face._headers(None, pieces, dtype, copies, lambda name: "ignored" in name)
    assert original == fits
    ((name, written),) = headers.items()
    assert (name == "x.safetensors") is (fits is not None)
    code, kept = safetensors_folder.NAMES[dtype], ("wide", "ignored")
    expected = tensors if fits is not None else ("a", "b")
    assert {key: entry.dtype for key, entry in written.entries.items()} == {
        key: "F32" if key in kept else code for key in expected
    }
    if fits is not None:
        assert written.metadata == {"note": "x"} and (written is header) is (fits == dtype)


def test_settings_that_follow_from_others_are_not_written() -> None:
    gpt2 = described({"model_type": "gpt2"} | KINDS["gpt2"] | {"n_inner": None}, "config.json").settings
    assert gpt2.ffn_hidden_size == 4 * 16 and "n_inner" not in family_of(gpt2).config_json(gpt2, 67, torch.float32)
    wider = replace(gpt2, ffn_hidden_size=80)
    assert family_of(wider).config_json(wider, 67, torch.float32)["n_inner"] == 80


def test_the_script_that_trains_a_model() -> None:
    llama, gpt2 = (
        described(MIXTRAL | {"model_type": "llama"}, "").settings,
        described({"model_type": "gpt2"} | KINDS["gpt2"], "").settings,
    )
    scripts = [
        llama_settings.program(model)
        for model in (llama, replace(llama, untie_embeddings_and_output_weights=False), gpt2,
                      replace(llama, add_bias_linear=True))
    ]  # fmt: skip
    assert scripts == ["pretrain_llama.py"] + 3 * ["pretrain_gpt.py"]


def test_scales_are_integers_up_to_rounding() -> None:
    assert [gemma._whole(value) for value in (3.0, 144**0.5, 1e6 + 1e-4, 1e6 + 1e-2)] == [3, 12, 10**6, 1e6 + 1e-2]
    assert isinstance(gemma._whole(2.0**0.5 * 2.0**0.5), int)


def test_a_phi3_without_rope_scaling() -> None:
    """transformers' Phi-3 reads yarn as longrope."""
    phi3 = MIXTRAL | {"model_type": "phi3"}
    model, vocab_size, family, _ = described(phi3, "config.json")
    with pytest.raises(Refusal, match="RoPE scaling yarn is not known to Hugging Face's Phi3ForCausalLM"):
        yarn = replace(model, position_embedding_type="yarn", yarn_rotary_scaling_factor=2.0)
        family.config_json(yarn, vocab_size, torch.float32)


def test_settings_that_a_family_does_not_have_are_refused(tmp_path: Path, capsys) -> None:
    source = save_model(tmp_path / "in", "bloom", KINDS["bloom"])
    assert main(["--from-hf", str(source), "--to", str(tmp_path / "ours")]) == 0
    edit_common(tmp_path / "ours", lambda common: common["config"]["model"].update(norm_epsilon=1e-6, swiglu=True))
    line = refused(capsys, tmp_path, "--from", tmp_path / "ours", "--to-hf", tmp_path / "back")
    assert "not a BLOOM, as Hugging Face's BloomForCausalLM requires: --norm-epsilon 1e-06, --swiglu True" in line
    with pytest.raises(Refusal, match="not a Qwen 2, as .* requires: --add-qkv-bias False, --add-bias-linear True"):
        FAMILIES["qwen2"].config_json(ModelConfig(**LLAMA_SHAPE), 67, torch.float32)


def test_round_trip_with_tensors_that_transformers_ignores(tmp_path: Path, capsys) -> None:
    """Old checkpoints contain RoPE's frequencies, and tied ones a copy of the embedding as output layer."""
    source = save_llama(tmp_path / "in", torch.bfloat16, tie_word_embeddings=True)
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.rand(2)
    save_file(weights, source / "model.safetensors", {"format": "pt", "note": "é"})
    assert contents(there_and_back(source, tmp_path)) == contents(source)
    assert "note:" not in capsys.readouterr().out

    assert main(["--from", str(tmp_path / "ours"), "--to-hf", str(tmp_path / "fp32"), "--dtype", "fp32"]) == 0
    wide = load_file(tmp_path / "fp32" / "model.safetensors")
    assert wide.keys() == weights.keys()
    assert all(torch.equal(wide[name], weights[name].float()) for name in weights)


def test_layers_for_multi_token_prediction_are_kept(tmp_path: Path, capsys) -> None:
    """transformers ignores them, and so does training here."""
    source = save_model(tmp_path / "in", "glm4_moe", KINDS["glm4_moe"])
    assert "multi-token" not in capsys.readouterr().out
    weights = {name: tensor for path in source.glob("*.safetensors") for name, tensor in load_file(path).items()}
    weights |= {"model.layers.3.eh_proj.weight": torch.randn(16, 32), "model.layers.3.enorm.weight": torch.rand(16)}
    for path in [*source.glob("*.safetensors"), *source.glob("*.index.json")]:
        path.unlink()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    assert contents(there_and_back(source, tmp_path)) == contents(source)
    assert "note: 2 tensors of layers for multi-token prediction are kept" in capsys.readouterr().out
    weights["model.layers.2.eh_proj.weight"] = weights.pop("model.layers.3.eh_proj.weight")
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    assert "1 tensors do not belong to the model" in refused(
        capsys, tmp_path, "--from-hf", source, "--to", tmp_path / "no"
    )


def test_our_layout(ours: Path, small: Path) -> None:
    """Rows are ordered by query group (queries, key, value); the gate comes before the up projection; no padding."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    theirs = {}
    for path in small.glob("*.safetensors"):
        theirs |= load_file(path)
    q, k, v = (theirs[f"model.layers.2.self_attn.{name}_proj.weight"] for name in "qkv")
    gate, up = (theirs[f"model.layers.2.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mine = dist_checkpointing.load_plain_tensors(str(ours / "release"))
    finally:
        dist.destroy_process_group()
    qkv = mine["decoder.layers.self_attention.linear_qkv.weight"]
    assert qkv.shape == (3, 32, 16)  # heads of 4: 2 queries, 1 key, 1 value, twice
    assert torch.equal(qkv[2], torch.cat([q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]]))
    assert torch.equal(mine["decoder.layers.mlp.linear_fc1.weight"][2], torch.cat([gate, up]))
    assert torch.equal(mine["output_layer.weight"], theirs["lm_head.weight"])


@pytest.mark.parametrize("groups, heads", [(1, 4), (2, 4), (4, 4), (3, 12)])
def test_queries_and_gates_are_split_by_head(groups: int, heads: int) -> None:
    """Rows of a head: its query, then its gate; ours are by group: queries, gates, keys, values."""
    shapes = ((heads * 2 * 6, 5), (groups * 6, 5), (groups * 6, 5))
    parts = [torch.randn(shape) for shape in shapes]
    piece = llama_weights.Piece("q", ("q", "k", "v"), shapes, gate_heads=heads)
    rows = llama_weights.fuse(piece, parts, groups)
    by_group = rows.view(groups, -1, 6, 5)
    assert torch.equal(by_group[:, : heads // groups].flatten(0, 2), parts[0].view(heads, 2, 6, 5)[:, 0].flatten(0, 1))
    assert all(torch.equal(x, y) for x, y in zip(parts, llama_weights.split(piece, rows, groups)))


@pytest.mark.parametrize("groups, heads", [(1, 4), (2, 4), (4, 4), (3, 12)])
def test_fuse_and_split(groups: int, heads: int) -> None:
    shapes = tuple((n * 6, 5) for n in (heads, groups, groups))
    parts = [torch.randn(shape) for shape in shapes]
    piece = llama_weights.Piece("key", ("q", "k", "v"), shapes)
    back = llama_weights.split(piece, llama_weights.fuse(piece, parts, groups), groups)
    assert all(torch.equal(x, y) for x, y in zip(parts, back))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_key_value_heads": 4, "head_dim": 6},
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-6},
        {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}},
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.5}},
        {"rope_parameters": {"rope_theta": 10000.0, **YARN, "truncate": False, "beta_fast": 16.0}},
    ],
    ids=str,
)
def test_variants_and_their_printed_flags(tmp_path: Path, capsys, settings: dict[str, Any]) -> None:
    source = save_llama(tmp_path / "in", torch.bfloat16, **settings)
    assert contents(there_and_back(source, tmp_path)) == contents(source)
    program, *flags = shlex.split(re.search("^pretrain_.*", capsys.readouterr().out, re.M)[0])
    defaults = LLAMA_DEFAULTS if program == "pretrain_llama.py" else {}
    config = parse([*flags, *RUN], defaults, world_size=1)
    wanted, _ = llama_settings.settings(llama_settings.read_config(source / "config.json"), "")
    assert config.model == wanted
    assert config.optimizer.bf16 and not config.optimizer.fp16
    assert config.checkpoint.load == str(tmp_path / "ours") and config.checkpoint.finetune
    assert config.data.tokenizer_model == str(tmp_path / "ours" / "hf")


def test_a_new_config_and_new_files(tmp_path: Path, ours: Path, small: Path) -> None:
    """A checkpoint of a training run has no hf/; the result has the same weights and equivalent settings."""
    from transformers import LlamaForCausalLM

    trained = shutil.copytree(ours, tmp_path / "trained", ignore=lambda *_: ["hf"])
    assert main(["--from", str(trained), "--to-hf", str(tmp_path / "back")]) == 0
    assert sorted(contents(tmp_path / "back")) == ["config.json", "model.safetensors"]
    models = [LlamaForCausalLM.from_pretrained(path) for path in (small, tmp_path / "back")]
    assert all(torch.equal(x, y) for x, y in zip(*(model.parameters() for model in models)))
    tokens = torch.arange(20)[None]
    assert torch.equal(*(model(tokens).logits for model in models))


def test_several_files_and_their_index(tmp_path: Path, ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(safetensors_folder.plan_files, "__defaults__", (8000,))
    trained = shutil.copytree(ours, tmp_path / "trained", ignore=lambda *_: ["hf"])
    assert main(["--from", str(trained), "--to-hf", str(tmp_path / "back"), "--dtype", "bf16"]) == 0
    index = json.loads((tmp_path / "back" / safetensors_folder.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 1 and len(index["weight_map"]) == 30
    _, loading = LlamaForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(loading.values())


def test_config_json_has_the_settings_that_training_changed(tmp_path: Path, ours: Path, small: Path, capsys) -> None:
    """The original's config.json is kept, except changed settings."""
    trained = shutil.copytree(ours, tmp_path / "trained")
    common = torch.load(trained / "release" / "common.pt", weights_only=False)
    common["config"]["model"] |= {"max_position_embeddings": 4096, "use_rope_scaling": True, "rope_scaling_factor": 8.0}
    torch.save(common, trained / "release" / "common.pt")
    list_files(trained / "release")
    assert main(["--from", str(trained), "--to-hf", str(tmp_path / "back"), "--dtype", "bf16"]) == 0
    assert "note: max_position_embeddings 128 of the original config.json is now 4096" in capsys.readouterr().out
    before, after = (json.loads((path / "config.json").read_text()) for path in (small, tmp_path / "back"))
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    rope = {"rope_parameters", "rope_theta", "rope_scaling"}
    assert changed == {"max_position_embeddings", "dtype"} | rope
    assert (after["max_position_embeddings"], after["dtype"]) == (4096, "bfloat16")
    assert llama_settings.settings(after, "")[0].rope_scaling_factor == 8.0


def test_rows_outside_of_the_softmax_are_not_exported(tmp_path: Path, ours: Path, capsys) -> None:
    """Older runs computed the loss over their tokenizer's ids alone: the other rows would keep some probability."""
    trained = shutil.copytree(ours, tmp_path / "trained")
    edit_common(trained, lambda common: common.update(vocab_size=60))
    assert main(["--from", str(trained), "--to-hf", str(tmp_path / "new")]) == 0
    assert "vocab_size 67 of the original config.json is now 60" in capsys.readouterr().out
    assert json.loads((tmp_path / "new" / "config.json").read_text())["vocab_size"] == 60
    assert load_file(tmp_path / "new" / safetensors_folder.SINGLE)["lm_head.weight"].shape == (60, 16)


def test_dtype(tmp_path: Path, small: Path, ours: Path) -> None:
    assert main(["--from-hf", str(small), "--to", str(tmp_path / "bf16"), "--dtype", "bf16"]) == 0
    assert main(["--from", str(tmp_path / "bf16"), "--to-hf", str(tmp_path / "back")]) == 0
    for path in small.glob("*.safetensors"):
        before, after = load_file(path), load_file(tmp_path / "back" / path.name)
        assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    index = json.loads((tmp_path / "back" / safetensors_folder.INDEX).read_text())
    before = json.loads((small / safetensors_folder.INDEX).read_text())
    assert index["metadata"]["total_size"] * 2 == before["metadata"]["total_size"]
    assert index["weight_map"] == before["weight_map"]


@pytest.mark.parametrize("new", [True, False])
def test_rope_of_transformers_4_and_5(new: bool) -> None:
    scaling = {"factor": 32.0, **FIXED}
    if new:
        config = {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **scaling}}
    else:
        config = {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **scaling}}
    model, _ = llama_settings.settings({"model_type": "llama", **config}, "")
    assert (model.rotary_base, model.use_rope_scaling, model.rope_scaling_factor) == (500000, True, 32.0)
    again, _ = llama_settings.settings(architectures.FAMILIES["llama"].config_json(model, 32000, torch.float32), "")
    assert again == model


@pytest.mark.parametrize(
    "scaling",
    [
        {},
        {"factor": None},  # 128 / 32
        {"truncate": False, "beta_fast": 16, "beta_slow": 2},
        {"mscale": 0.7},  # transformers uses both or neither
        {"mscale": 0.707, "mscale_all_dim": 0.5},
        {"attention_factor": 1.25},
        {"attention_factor": 1},
        {"attention_factor": 1.25, "mscale": 0.707, "mscale_all_dim": 0.5},
    ],
    ids=str,
)
def test_yarn_is_that_of_transformers(scaling: dict[str, Any]) -> None:
    """Frequencies and attention factor equal those of transformers, read from config.json and written back."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = {"model_type": "llama", "max_position_embeddings": 128, "hidden_size": 64, "num_attention_heads": 4}
    given["rope_parameters"] = {"rope_theta": 10000.0, **YARN, **scaling}
    model, _ = llama_settings.settings(given, "")
    mine = rope(model)
    written = architectures.FAMILIES["llama"].config_json(model, 32000, torch.float32)
    for config in (given, written):
        inv_freq, factor = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(**deepcopy(config)), torch.device("cpu"))
        torch.testing.assert_close(mine.inverse_frequencies().float(), inv_freq, rtol=1e-6, atol=0)
        assert mine.attention_factor == pytest.approx(factor, rel=1e-12)
    again, _ = llama_settings.settings(written, "")
    assert rope(again).attention_factor == pytest.approx(mine.attention_factor, rel=1e-12)
    words = parse([*llama_settings.command_line(again, torch.float32), *RUN]).model
    assert rope(words) == rope(again)


def test_a_bloom_of_one_layer_and_one_head_is_read():
    model, vocab_size = BLOOM.settings({"vocab_size": 1, "hidden_size": 8, "n_layer": 1, "n_head": 1}, "")
    assert (model.num_layers, model.num_attention_heads, vocab_size) == (1, 1, 1)
    with pytest.raises(Refusal, match="n_layer 0 is not a positive whole number"):
        BLOOM.settings({"vocab_size": 1, "hidden_size": 8, "n_layer": 0, "n_head": 1}, "")


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_flags_of_a_model_give_its_kv_heads(kv_heads):
    given = {"model_type": "llama", "max_position_embeddings": 128, "hidden_size": 64, "num_attention_heads": 4}
    model, _ = llama_settings.settings(given | {"num_key_value_heads": kv_heads}, "")
    words = parse([*llama_settings.command_line(model, torch.float32), *RUN]).model
    assert (words.num_query_groups, words.group_query_attention) == (kv_heads, True)


CONFIGS = [
    ({"model_type": "falcon"}, "model_type 'falcon' is not supported: only llama"),
    ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map asks for code from the checkpoint"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"quantization_config": {"bits": 4}}, "quantization_config with quant_method None is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act gelu is not supported: only silu"),
    ({"attention_bias": True}, "attention_bias True with mlp_bias False is not supported"),
    ({"mlp_bias": True}, "attention_bias False with mlp_bias True is not supported"),
    ({"rope_scaling": YARN | {"factor": 1.0}}, "yarn with factor 1 has no effect"),
    ({"rope_scaling": YARN | {"attention_factor": 0.9}}, "attention_factor 0.9 must be at least 1"),
    ({"rope_scaling": YARN | {"original_max_position_embeddings": 32.5}}, "32.5 is not an integer"),
    ({"rope_scaling": YARN | {"beta_slow": -1}}, "beta_slow of rope_scaling -1 is not a positive number"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of type dynamic is not supported"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor 2.0 is not supported: only 1"),
    ({"rope_scaling": LLAMA3 | {"high_freq_factor": 8.0}}, "high_freq_factor 8.0 is not supported: only 4"),
    ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 4096}}, "is not supported: only 8192"),
    ({"rope_scaling": LLAMA3 | {"factor": "8"}}, "factor of rope_scaling '8' is not a positive number"),
    ({"rope_parameters": {"full": {"rope_theta": 1e4}}}, "by layer type"),
    ({"rope_parameters": {"rope_theta": 10000.5}}, "rope_theta 10000.5 is not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ({"num_hidden_layers": 4}, "9 tensors that config.json requires are missing: model.layers.3.input_"),
    ({"num_hidden_layers": 2}, "9 tensors do not belong to the model in config.json: model.layers.2.input_"),
    ({"num_hidden_layers": "3"}, "num_hidden_layers '3' is not a positive integer"),
    ({"hidden_size": 0}, "hidden_size 0 is not a positive integer"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ({"head_dim": 5}, "head_dim 5 is odd"),
    ({"head_dim": None, "num_attention_heads": 6}, "hidden_size 16 is not a multiple of num_attention_heads 6"),
    ({"vocab_size": 68}, "model.embed_tokens.weight is [67, 16], but config.json requires [68, 16]"),
    ({"intermediate_size": 32}, "but config.json requires"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps 'x' is not a positive number"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is true, but lm_head.weight differs"),
]


@pytest.mark.parametrize("change, message", CONFIGS, ids=[str(change) for change, _ in CONFIGS])
def test_refuses_config(tmp_path: Path, small: Path, capsys, change: dict[str, Any], message: str) -> None:
    source = shutil.copytree(small, tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    error = refused(capsys, tmp_path, "--from-hf", source, "--to", tmp_path / "ours")
    assert message in error and str(source) in error


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a folder; afterwards they are all in one file."""
    weights: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
        path.unlink()
    (folder / safetensors_folder.INDEX).unlink()
    change(weights)
    save_file(weights, folder / safetensors_folder.SINGLE)


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / safetensors_folder.INDEX).read_text())
    change(index["weight_map"])
    (folder / safetensors_folder.INDEX).write_text(json.dumps(index))


def second(folder: Path) -> Path:
    """The second file of weights."""
    return sorted(folder.glob("*.safetensors"))[1]


NORM = "model.norm.weight"
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (shutil.rmtree, "config.json: No such file"),
    (lambda f: (f / "config.json").unlink(), "config.json: No such file"),
    (lambda f: (f / "config.json").write_text("{"), "config.json: "),
    (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
    (lambda f: second(f).unlink(), "safetensors: no such file"),
    (lambda f: truncate(second(f), 5), "truncated, or not a safetensors file (5 bytes)"),
    (lambda f: truncate(second(f), 300), "truncated"),
    (lambda f: truncate(second(f), second(f).stat().st_size - 1), "it is truncated: "),
    (lambda f: second(f).write_bytes(second(f).read_bytes() + b"x"), "it is too long: "),
    (lambda f: second(f).write_bytes(b"\3\0\0\0\0\0\0\0abc"), "its header cannot be read"),
    (lambda f: (f / safetensors_folder.INDEX).unlink(), "neither model.safetensors nor model.safetensors.index.json"),
    (lambda f: (f / safetensors_folder.INDEX).write_text("{}"), "no weight_map can be read"),
    (lambda f: rewrite_index(f, lambda m: m.pop(NORM)), f"it contradicts the files about {NORM}"),
    (lambda f: rewrite_index(f, lambda m: m.update(more=second(f).name)), "contradicts the files about more"),
    (lambda f: rewrite_index(f, lambda m: m.update({NORM: "../x"})), "names files outside of its folder"),
    (lambda f: edit(f, lambda w: w.pop(NORM)), f"1 tensors that config.json requires are missing: {NORM}"),
    (lambda f: edit(f, lambda w: w.update(odd=torch.ones(1))), "model in config.json: odd"),
    (lambda f: edit(f, lambda w: w.update({NORM: torch.ones(15)})), f"{NORM} is [15], but config.json requires [16]"),
    (lambda f: edit(f, lambda w: w.update({NORM: w[NORM].half()})), "weights in F16, F32 are not supported"),
    (lambda f: edit(f, lambda w: w.update({n: t.double() for n, t in w.items()})), "weights in F64 are not supported"),
]


@pytest.mark.parametrize("damage, message", DAMAGES, ids=[message for _, message in DAMAGES])
def test_refuses_damage(tmp_path: Path, small: Path, capsys, damage: Callable[[Path], object], message: str) -> None:
    source = shutil.copytree(small, tmp_path / "in")
    damage(source)
    assert message in refused(capsys, tmp_path, "--from-hf", source, "--to", tmp_path / "ours")


def test_the_tokenizer_of_the_training_is_exported(tmp_path: Path, ours: Path, monkeypatch, capsys) -> None:
    trained, named = shutil.copytree(ours, tmp_path / "trained"), tmp_path / "tokenizer"
    shutil.rmtree(trained / "hf")
    named.mkdir()
    for name in ("tokenizer.json", "merges.txt", "generation_config.json", "id_rsa", "config.json"):
        (named / name).write_text(name)
    common, data = Checked.common, {}
    changed = lambda self: common(self) | {"config": common(self)["config"] | {"data": data}}  # noqa: E731
    monkeypatch.setattr(Checked, "common", changed)

    def exported(kind: str | None, model: str | None, number: int) -> tuple[set[str], str]:
        data.update(tokenizer_type=kind, tokenizer_model=model)
        capsys.readouterr()
        assert main(["--from", str(trained), "--to-hf", str(tmp_path / f"to{number}")]) == 0
        names = {path.name for path in (tmp_path / f"to{number}").iterdir()}
        return names - {"config.json", "model.safetensors", "checksums.json"}, capsys.readouterr().out

    names, text = exported("HuggingFaceTokenizer", str(named), 1)
    assert names == {"tokenizer.json", "merges.txt", "generation_config.json"}
    assert f"the tokenizer is that of the training, from {named}: tokenizer.json, merges.txt" in text
    assert json.loads((tmp_path / "to1" / "config.json").read_text())["model_type"] == "llama"
    (named / "tokenizer.json").unlink()
    names, text = exported("HuggingFaceTokenizer", str(named), 2)
    assert not names and f"no tokenizer was written: {named} of the training has none now; give --hf-files" in text
    (named / "generation_config.json").unlink()
    (named / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 7, "content": "<end>"}]}))
    (named / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    names, text = exported("HuggingFaceTokenizer", str(named), 6)
    assert "put chat_template.jinja next to the tokenizer" in text and "generation_config.json is new" in text
    assert json.loads((tmp_path / "to6" / "generation_config.json").read_text()) == {"eos_token_id": 7}
    (named / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    names, text = exported("HuggingFaceTokenizer", str(named), 7)
    assert "chat template" not in text and "there is no generation_config.json" in text
    (named / "tokenizer.json").unlink()
    (named / "tokenizer_config.json").unlink()
    names, text = exported("SentencePieceTokenizer", "a.model", 3)
    assert not names and "'SentencePieceTokenizer' is not in Hugging Face's form" in text
    assert "no tokenizer was" not in exported("NullTokenizer", None, 4)[1]
    (named / "tokenizer.json").symlink_to("../trained/release/common.pt")
    data.update(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(named))
    message = refused(capsys, tmp_path, "--from", trained, "--to-hf", tmp_path / "to5")
    assert "tokenizer.json is a link that leads out of its folder" in message


def test_refuses_outputs_and_flags(tmp_path: Path, small: Path, ours: Path, capsys) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for there in (tmp_path / "full", tmp_path / "full" / "file"):
        assert "not empty" in refused(capsys, tmp_path, "--from-hf", small, "--to", there)
        assert "not empty" in refused(capsys, tmp_path, "--from", ours, "--to-hf", there)
    assert "cannot be listed and written to" in refused(
        capsys, tmp_path, "--from", ours, "--to-hf", tmp_path / "full" / "file" / "x"
    )
    for argv in (
        [],
        ["--from-hf", small],
        ["--from", ours, "--to", tmp_path],
        ["--from-hf", small, "--to-hf", tmp_path],
    ):
        assert "give --from-hf DIR --to DIR, or --from DIR --to-hf DIR" in refused(capsys, tmp_path, *argv)
    new = tmp_path / "new"
    assert "go with --from" in refused(capsys, tmp_path, "--from-hf", small, "--to", new, "--ckpt-step", 3)
    assert "no config.json" in refused(capsys, tmp_path, "--from", ours, "--to-hf", new, "--hf-files", tmp_path)
    assert "--dtype" in refused(capsys, tmp_path, "--from", ours, "--to-hf", new, "--dtype", "int4")


def test_an_empty_output_folder_is_taken(tmp_path: Path, small: Path, ours: Path) -> None:
    (tmp_path / "new").mkdir()
    assert main(["--from", str(ours), "--to-hf", str(tmp_path / "new")]) == 0
    assert contents(tmp_path / "new") == contents(small)


def edit_common(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    common = torch.load(folder / "release" / "common.pt", weights_only=False)
    change(common)
    torch.save(common, folder / "release" / "common.pt")
    list_files(folder / "release")


def change_headers(folder: Path, text: str) -> None:
    (folder / "hf" / HEADERS).write_text(text)
    list_files(folder / "hf")


def flip(path: Path, at: int = -1) -> None:
    """Flip an exponent bit of the fp32 number that ends at this byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << 6
    path.write_bytes(data)


def flip_a_weight(folder: Path) -> None:
    """Flip a bit of a weight in our checkpoint, outside of torch's headers: only the list of checksums detects it."""
    weight = StoredTensors(examine(folder / "release")).read("output_layer.weight", (0, 0), (67, 16))
    path = folder / "release" / "__0_0.distcp"
    flip(path, path.read_bytes().index(weight.numpy().tobytes()) + 3)


LOST: list[tuple[Callable[[Path], object], str]] = [
    (shutil.rmtree, "no checkpoint there (latest_checkpointed_iteration.txt is missing)"),
    (lambda f: (f / "release" / "metadata.json").unlink(), "is missing or incomplete"),
    (lambda f: (f / "release" / "common.pt").write_bytes(b"x"), "common.pt has 1 bytes"),
    (lambda f: (f / "release" / "common.pt").unlink(), "common.pt is missing"),
    (lambda f: (f / "release" / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    (lambda f: truncate(f / "release" / "__0_0.distcp", 9000), "__0_0.distcp has 9000 bytes"),
    (lambda f: truncate(f / "release" / ".metadata", 200), ".metadata has 200 bytes"),
    (lambda f: (f / "hf" / HEADERS).write_text('{"a": "b"}'), f"{HEADERS} has 10 bytes"),
    (lambda f: change_headers(f, '{"a.safetensors": "b"}'), "its header cannot be read"),
    (flip_a_weight, "__0_0.distcp is not what was written"),
    (lambda f: (f / "release" / "checksums.json").unlink(), "checksums.json is missing"),
    (lambda f: (f / "release" / "checksums.json").write_text("{}"), "checksums.json names no files"),
    (lambda f: edit_common(f, lambda c: c.pop("config")), "was written neither by this program"),
    (
        lambda f: edit_common(f, lambda c: c["config"]["model"].update(num_layers=4)),
        "is [3, 16], but its settings require [4, 16]",
    ),
    (
        lambda f: edit_common(f, lambda c: c["config"]["model"].update(add_bias_linear=True)),
        "tensors are missing or unexpected for a Llama",
    ),
    (lambda f: edit_common(f, lambda c: c["config"]["model"].update(swiglu=False)), "not a Llama"),
    (lambda f: edit_common(f, lambda c: c.update(vocab_size=68)), "is [67, 16], but its settings require [68, 16]"),
]


@pytest.mark.parametrize("damage, message", LOST, ids=[f"{n}: {message}" for n, (_, message) in enumerate(LOST)])
def test_refuses_checkpoints(tmp_path: Path, ours: Path, capsys, damage: Callable[[Path], Any], message: str) -> None:
    source = shutil.copytree(ours, tmp_path / "in")
    damage(source)
    assert message in refused(capsys, tmp_path, "--from", source, "--to-hf", tmp_path / "back")


def test_checksums_of_a_hugging_face_folder_are_checked_but_not_the_tokenizers(
    tmp_path: Path, ours: Path, small: Path, capsys
) -> None:
    folder, again = tmp_path / "folder", ("--to", tmp_path / "again")
    assert main(["--from", str(ours), "--to-hf", str(folder)]) == 0
    listed = json.loads((folder / "checksums.json").read_text())["files"].keys()
    assert listed == {"config.json", safetensors_folder.INDEX, *(path.name for path in folder.glob("*.safetensors"))}
    assert "not checked" not in capsys.readouterr().out
    assert main(["--from-hf", str(small), "--to", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.count(f"not checked: {small} has no checksums\n") == 1
    (folder / "tokenizer.json").write_text('{"another": "one"}')
    assert main(["--from-hf", str(folder), "--to", str(tmp_path / "compared")]) == 0
    assert "not checked" not in capsys.readouterr().out
    assert not (tmp_path / "compared" / "hf" / "tokenizer.json").read_text() == (small / "tokenizer.json").read_text()

    flip(second(folder))
    line = refused(capsys, tmp_path, "--from-hf", folder, *again)
    assert f"{second(folder)} is not what was written" in line and f"check_checkpoint.py {folder} --write-list" in line
    flip(second(folder))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace(" 128", " 256"))
    assert "config.json is not what was written" in refused(capsys, tmp_path, "--from-hf", folder, *again)
    assert check_checkpoint.main([str(folder)]) == 2
    assert check_checkpoint.main([str(folder), "--write-list"]) == 0
    assert check_checkpoint.main([str(folder)]) == 0
    assert main(["--from-hf", str(folder), "--to", str(tmp_path / "again")]) == 0
    assert "--max-position-embeddings 256" in capsys.readouterr().out


def test_checksums_of_a_checkpoint_are_checked_without_loading_it(tmp_path: Path, ours: Path, capsys) -> None:
    source = shutil.copytree(ours, tmp_path / "in")
    for folder in (source, source / "release", source / "hf"):
        assert check_checkpoint.main([str(folder)]) == 0
        assert " files are as they were written\n" in capsys.readouterr().out
    flip_a_weight(source)
    assert check_checkpoint.main([str(source)]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: checkpoint ") and "__0_0.distcp is not what was written" in line
    assert line.count("\n") == 1
    shutil.rmtree(source / "release")
    for folder in (source, tmp_path, tmp_path / "nothing"):
        assert check_checkpoint.main([str(folder)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_no_such_iteration(tmp_path: Path, ours: Path, capsys) -> None:
    error = refused(capsys, tmp_path, "--from", ours, "--to-hf", tmp_path / "back", "--ckpt-step", 7)
    assert "iter_0000007 is missing or incomplete" in error


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"normalization": "LayerNorm"}, "--normalization LayerNorm"),
        ({"position_embedding_type": "learned_absolute"}, "--position-embedding-type learned_absolute"),
        ({"add_qkv_bias": True}, "--add-qkv-bias True"),
        ({"qk_layernorm": True, "rotary_percent": 0.5}, "--rotary-percent 0.5, --qk-layernorm True"),
        ({"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2.0}, "can name only one"),
    ],
    ids=str,
)
def test_refuses_other_models(settings: dict[str, Any], message: str) -> None:
    shape = ModelConfig(**LLAMA_SHAPE | settings)
    with pytest.raises(Refusal, match=message):
        architectures.FAMILIES["llama"].config_json(shape, 67, torch.float32)


LLAMA_SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "swiglu": True} | {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}


def test_a_full_disk_leaves_nothing(tmp_path: Path, small: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(llama_weights, "fuse", full)
    error = refused(capsys, tmp_path, "--from-hf", small, "--to", tmp_path / "ours")
    assert "No space left on device" in error


def test_the_cause_of_an_error_of_torch() -> None:
    """Torch's exception holds the error of closing a file, in whose context the first error is."""

    def failure(first: BaseException) -> CheckpointException:
        closing = RuntimeError("the file is incomplete")
        closing.__context__ = first
        return CheckpointException("save", {0: _wrap_exception(closing)})

    full, other = OSError(28, "No space left on device"), ValueError("another")
    assert lazy_save.cause(failure(full)) is full
    assert str(lazy_save.cause(failure(other))) == "the file is incomplete"
    with pytest.raises(KeyboardInterrupt):
        lazy_save.cause(failure(KeyboardInterrupt()))


LATENT = SIZES | {"num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
                  "v_head_dim": 8, "n_routed_experts": 8, "moe_intermediate_size": 20, "num_experts_per_tok": 4,
                  "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6}  # fmt: skip
DEEPSEEK_YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                 "mscale": 0.8, "mscale_all_dim": 1.2, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
DEEPSEEKS = {
    "v3": LATENT | {"q_lora_rank": 10, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
    | {"n_shared_experts": 1},
    "v3, yarn": LATENT | {"q_lora_rank": 10, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
    | {"n_shared_experts": 2, "rope_parameters": DEEPSEEK_YARN},
    "v3, dense": LATENT | {"q_lora_rank": None, "first_k_dense_replace": 2, "rope_parameters": DEEPSEEK_YARN},
    "v2, lite": LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1, "n_shared_experts": 2},
    "v2, groups": LATENT | {"q_lora_rank": 10, "first_k_dense_replace": 0, "n_shared_experts": 1, "n_group": 4,
                            "topk_method": "group_limited_greedy", "topk_group": 4},
}  # fmt: skip
INDEXED = LATENT | {"q_lora_rank": 10, "index_n_heads": 3, "index_head_dim": 12, "index_topk": 7, "n_shared_experts": 1}
INDEXERS = {
    "deepseek_v32": INDEXED | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    "glm_moe_dsa": INDEXED | {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
                              "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
}  # fmt: skip


LATER = {
    "v3": ("deepseek_v3", DEEPSEEKS["v3"]),
    "v3, yarn": ("deepseek_v3", DEEPSEEKS["v3, yarn"]),
    "glm": ("glm4_moe", KINDS["glm4_moe"]),
}


@pytest.mark.parametrize("name", LATER)
def test_layers_for_multi_token_prediction_are_converted(tmp_path: Path, capsys, name: str) -> None:
    """There and back: the same files, also if all files are written anew; the layers are in the checkpoint."""
    kind, sizes = LATER[name]
    source, ours = save_with_later_tokens(tmp_path / "in", kind, sizes, 2), tmp_path / "ours"
    for number in (1, 2):
        assert main(["--from-hf", str(source), "--to", str(ours), "--mtp-num-layers", str(number)]) == 0
        printed = capsys.readouterr().out
        assert f"--mtp-num-layers {number} " in printed and ("are kept for converting back" in printed) == (number == 1)
        assert main(["--from", str(ours), "--to-hf", str(tmp_path / "back")]) == 0
        back = contents(tmp_path / "back")
        assert {name for name, text in contents(source).items() if back[name] != text} <= {"config.json"} and (
            json.loads(back["config.json"])["num_nextn_predict_layers"] == number
        )
        shutil.rmtree(tmp_path / "back")
        shutil.rmtree(ours if number == 1 else ours / "hf")
    assert main(["--from", str(ours), "--to-hf", str(tmp_path / "new")]) == 0
    assert json.loads((tmp_path / "new" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "new" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    before[f"model.layers.{sizes['num_hidden_layers']}.shared_head.head.weight"][0, 0] += 1
    save_file(before, source / "model.safetensors", {"format": "pt"})
    flags = ("--from-hf", source, "--to", tmp_path / "no", "--mtp-num-layers")
    assert "shared_head.head.weight differs from lm_head.weight" in refused(capsys, tmp_path, *flags, 2)
    assert "describes 2 such layers: give at most this number" in refused(capsys, tmp_path, *flags, 3)
    assert "N is at least 1" in refused(capsys, tmp_path, *flags, 0)


def test_other_families_leave_multi_token_prediction_out(tmp_path: Path, ours: Path, small: Path, capsys) -> None:
    trained = shutil.copytree(ours, tmp_path / "trained")
    edit_common(trained, lambda common: common["config"]["model"].update(mtp_num_layers=1))
    assert main(["--from", str(trained), "--to-hf", str(tmp_path / "back")]) == 0
    assert "note: its 1 layers of multi-token prediction are left out" in capsys.readouterr().out
    assert contents(tmp_path / "back") == contents(small)
    line = refused(capsys, tmp_path, "--from-hf", small, "--to", tmp_path / "no", "--mtp-num-layers", 1)
    assert "describes 0 such layers" in line


FAMILIES_CONVERTED = {
    **{kind: (kind, sizes) for kind, sizes in KINDS.items()},
    **{name: (f"deepseek_{name[:2]}", sizes) for name, sizes in DEEPSEEKS.items()},
    **{kind: (kind, sizes) for kind, sizes in INDEXERS.items()},  # models whose queries choose their keys
}
LABORATORY = ("v3, yarn", "v2, lite", "v2, groups")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.lab] * (name in LABORATORY)) for name in FAMILIES_CONVERTED]
)
def test_families(tmp_path: Path, name: str, capsys) -> None:
    """Conversion is exact with the original's files, and without them transformers computes the same.

    Without the original's config.json, Mistral and Phi-3 become Llamas.
    """
    from transformers import AutoModelForCausalLM

    kind, sizes = FAMILIES_CONVERTED[name]
    source = save_model(tmp_path / "in", kind, sizes)
    assert contents(there_and_back(source, tmp_path)) == contents(source)
    printed = capsys.readouterr().out
    flags = shlex.split(printed.split("\npretrain_")[1].splitlines()[0])[1:]
    wanted, _, family, windows = described(llama_settings.read_config(source / "config.json"), "")
    assert family is FAMILIES[kind] and "multi-token prediction are left out" not in printed
    assert wanted.multi_latent_attention == (name not in KINDS)
    length = [] if wanted.max_position_embeddings else ["--max-position-embeddings", "64"]
    config = parse([*flags, *length, *RUN], world_size=1)
    assert config.model == replace(wanted, max_position_embeddings=wanted.max_position_embeddings or 64, vocab_size=66)
    assert all(getattr(config.attention, name) == value for name, value in windows.items())

    shutil.rmtree(tmp_path / "ours" / "hf")
    assert main(["--from", str(tmp_path / "ours"), "--to-hf", str(tmp_path / "new")]) == 0
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (source, tmp_path / "new")]
    expected, got = (model(torch.arange(20)[None]).logits for model in models)
    exact = {"rtol": 0, "atol": 0} if kind in INDEXERS else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got, expected, **exact)
    assert expected.std() > 0.1


def test_a_deepseek_in_bf16_has_its_bias_in_fp32(tmp_path: Path) -> None:
    """As in the published files: one dtype, except for the bias of the experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **DEEPSEEKS["v3"])).bfloat16()
    gate = model.model.layers[1].mlp.gate
    gate.e_score_correction_bias = torch.linspace(-1, 1, 8)  # not exact in bf16
    model.save_pretrained(tmp_path / "in")
    assert contents(there_and_back(tmp_path / "in", tmp_path)) == contents(tmp_path / "in")
    words = ["--from", str(tmp_path / "ours"), "--to-hf", str(tmp_path / "wide"), "--dtype", "fp32"]
    assert main(words) == 0
    shutil.rmtree(tmp_path / "ours" / "hf")
    assert main(["--from", str(tmp_path / "ours"), "--to-hf", str(tmp_path / "new")]) == 0
    for folder in ("wide", "new"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype="auto")
        assert torch.equal(again.model.layers[1].mlp.gate.e_score_correction_bias, gate.e_score_correction_bias)


V3 = {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
      "q_lora_rank": 10} | LATENT  # fmt: skip
V2 = LATENT | {"model_type": "deepseek_v2", "n_shared_experts": 1, "first_k_dense_replace": 0}


def test_factors_of_yarn_are_written_where_transformers_needs_them() -> None:
    """transformers computes attention_factor from two others, if both are there."""
    llama = replace(described(MIXTRAL | {"model_type": "llama"}, "").settings, position_embedding_type="yarn")
    deepseek = replace(described(V3 | {"rope_parameters": DEEPSEEK_YARN}, "").settings)
    for all_dim in (0.0, 1.0):
        scaling = [
            family_of(model).config_json(model, 67, torch.float32)["rope_scaling"]
            for model in (replace(model, yarn_mscale=1.0, yarn_mscale_all_dim=all_dim) for model in (llama, deepseek))
        ]
        assert [("mscale" in one, "attention_factor" in one) for one in scaling] == [
            (all_dim > 0, True), (all_dim > 0, all_dim == 0)
        ]  # fmt: skip


@pytest.mark.parametrize("config", [MIXTRAL, V3, QWEN3_NEXT | {"num_experts": 0}, MIXTRAL | {"model_type": "llama"}])
def test_which_models_are_loaded_without_conversion(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    llama = config["model_type"] == "llama"
    with pytest.raises(Refusal, match="neither model.safetensors nor" if llama else "convert it with"):
        open_folder(examine(tmp_path))


# ---- weights in MXFP4 and FP8


def with_quantized(source: Path, quantize: Callable[[str, torch.Tensor], dict[str, torch.Tensor]], how: dict) -> Path:
    """A copy of a folder in bf16 with quantized weights; ``quantize`` may change the weights of the source too."""
    target = shutil.copytree(source, source.with_name("quantized"))
    plain, quantized = {}, {}
    for path in sorted(source.glob("*.safetensors")):
        plain |= load_file(path)
    for name, tensor in [*plain.items()]:
        made = quantize(name, tensor)
        quantized |= made or {name: tensor}
        plain[name] = made.pop("plain", tensor) if made else tensor
        quantized.pop("plain", None)
    for folder, tensors in ((source, plain), (target, quantized)):
        for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
            path.unlink()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    return target


def mxfp4(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random blocks in place of the experts' matrices, and what transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {}
    experts, into, out = tensor.shape
    blocks = torch.randint(0, 256, (experts, out, into // 32, 16), dtype=torch.uint8)
    scales = torch.randint(118, 126, (experts, out, into // 32), dtype=torch.uint8)
    plain = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales, "plain": plain.contiguous()}


BLOCK = (8, 4)


def fp8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random FP8 numbers and factors; the last blocks of a matrix may be smaller."""
    if not name.endswith("proj.weight") and "kv_a_proj" not in name:
        return {}
    rows, columns = tensor.shape
    numbers = (torch.randn(rows, columns) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    factors = torch.rand(-(-rows // BLOCK[0]), -(-columns // BLOCK[1])) / 100
    wide = factors.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]
    return {name: numbers, f"{name}_scale_inv": factors, "plain": (numbers.float() * wide).bfloat16()}


QUANTIZED = {
    "mxfp4": ("gpt_oss", KINDS["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 32}, mxfp4),
    "fp8": ("deepseek_v3", DEEPSEEKS["v3"], fp8),
}
HOW = {"mxfp4": {"quant_method": "mxfp4"}, "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [*BLOCK]}}


@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_weights_are_dequantized(tmp_path: Path, method: str, capsys) -> None:
    """Conversion gives the weights, to the last bit, that it gives for the folder dequantized before."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes, quantize = QUANTIZED[method]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).bfloat16()
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = torch.linspace(-1, 1, 8)  # in fp32, as in the published files
    model.save_pretrained(tmp_path / "plain")
    quantized = with_quantized(tmp_path / "plain", quantize, HOW[method])
    for name in ("plain", "quantized"):
        assert main(["--from-hf", str(tmp_path / name), "--to", str(tmp_path / f"{name}-ours")]) == 0
        assert main(["--from", str(tmp_path / f"{name}-ours"), "--to-hf", str(tmp_path / f"{name}-back")]) == 0
    assert f"weights in {method} were dequantized" in capsys.readouterr().out
    expected, got = (load_file(tmp_path / f"{name}-back" / "model.safetensors") for name in ("plain", "quantized"))
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) and got[name].dtype == expected[name].dtype for name in got)
    assert "quantization_config" not in json.loads((tmp_path / "quantized-back" / "config.json").read_text())
    assert parse(["--model", f"hf:{quantized}", *RUN], world_size=1).model.num_layers == 2

    weights = load_file(quantized / "model.safetensors")
    scale = next(name for name in weights if name.endswith(("_scales", "_scale_inv")))
    not_finite = torch.full_like(weights[scale], 255 if method == "mxfp4" else torch.nan)  # 255 is NaN by the standard
    for wrong, message in (
        (None, "with " + scale),
        (weights[scale][..., :-1].contiguous(), f"{scale} is ["),
        (not_finite, f"{quantized}: {scale} with its weight gives NaN or infinity in bf16"),
    ):
        changed = {name: tensor for name, tensor in (weights | {scale: wrong}).items() if tensor is not None}
        save_file(changed, quantized / "model.safetensors", {"format": "pt"})
        assert message in refused(capsys, tmp_path, "--from-hf", quantized, "--to", tmp_path / "no")


def test_fp8_is_that_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    numbers, factors = (torch.randn(256, 384) * 100).clamp(-448, 448).to(torch.float8_e4m3fn), torch.rand(2, 3) / 100
    expected = Fp8Dequantize(None)._dequantize_one(numbers, factors, torch.bfloat16)
    assert torch.equal(from_fp8(numbers, factors, (128, 128), torch.bfloat16), expected)
    assert not torch.equal(from_fp8(numbers, factors.roll(1, 1), (128, 128), torch.bfloat16), expected)


def test_fp8_blocks_may_be_larger_than_a_matrix() -> None:
    """The memory for factors follows the matrix, not weight_block_size, which a stranger wrote."""
    numbers = torch.ones(3, 5).to(torch.float8_e4m3fn)
    assert from_fp8(numbers, torch.full((1, 1), 2.0), (2**40, 2**40), torch.float32).tolist() == [[2.0] * 5] * 3


def test_a_number_that_a_dtype_cannot_hold_is_refused() -> None:
    wide = torch.tensor([1.0, 1e5, torch.inf])
    assert cast(wide, torch.bfloat16, "w").isinf().tolist() == [False, False, True]  # infinite before, too
    assert cast(wide, torch.float32, "w") is wide
    with pytest.raises(Refusal, match="w has numbers that are too large for fp16"):
        cast(wide, torch.float16, "w")


@pytest.mark.parametrize(
    "key, value",
    [
        ("num_hidden_layers", 10**8),
        ("num_hidden_layers", 10**30),
        ("vocab_size", 10**18),
        ("rope_theta", 1e308),
        ("hidden_size", -(2**41)),
        ("rms_norm_eps", float("nan")),
        ("rope_scaling", {"rope_type": "linear", "factor": float("inf")}),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 2**33]}),
        ("num_experts", 2**33),
    ],
)
def test_numbers_that_no_model_has_are_refused_by_key_and_file(tmp_path: Path, key: str, value: Any, capsys) -> None:
    name = next(reversed(value)) if isinstance(value, dict) else key
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "time_step_limit": [0.0, 1e400], key: value})
    )
    message = refused(capsys, tmp_path, "--from-hf", tmp_path, "--to", tmp_path / "no")
    assert f"{tmp_path}/config.json: '{name}' " in message and "is not a number from" in message
    with pytest.raises(Refusal, match=f"'{name}' "):
        parse(["--model", f"hf:{tmp_path}", *RUN], world_size=1)


@pytest.mark.lab
def test_a_model_with_more_weights_than_any_is_refused_before_they_are_listed() -> None:
    given = KINDS["qwen3_moe"] | {"model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "decoder_sparse_step": 1}
    model = described(given | {"num_hidden_layers": 9999, "num_experts": 9999}, "")
    with pytest.raises(Refusal, match="Qwen 3 with experts require more than 500,000 weights"):
        architectures.pieces(model, ())


def test_other_quantization_is_refused() -> None:
    for given in ({"quant_method": "gptq"}, {"quant_method": "fp8"}, {"bits": 4}, [1],
                  {"quant_method": "fp8", "weight_block_size": [128, 0]}):  # fmt: skip
        with pytest.raises(Refusal, match="quantization_config"):
            quantization({"quantization_config": given}, Path("config.json"))
    assert quantization({"quantization_config": None}, Path()) is None


def like(kind: str) -> dict[str, Any]:
    """A config.json of this kind, which lacks what the kind alone needs."""
    own: dict[str, Any] = {"head_dim": 8, "decoder_sparse_step": 1, "moe_intermediate_size": 12}
    if kind == "gpt_oss":
        own = {"head_dim": 8, "sliding_window": 4, "layer_types": ["full_attention"] * 2, "swiglu_limit": 7.0}
        own |= {"rope_scaling": {"rope_type": "default"}}
    return MIXTRAL | {"model_type": kind} | own


HYBRID, MAMBA2 = ({"model_type": kind} | KINDS[kind] for kind in ("nemotron_h", "mamba2"))


@pytest.mark.parametrize(
    "config, change, message",
    [
        (MIXTRAL, {"num_local_experts": None}, "num_local_experts"),
        (MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        (MIXTRAL, {"sliding_window": 0}, "sliding_window"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        (like("mistral"), {"sliding_window": 0}, "sliding_window 0 is not a positive integer"),
        (like("mistral"), {}, "sliding_window of mistral is missing"),
        (like("phi3"), {"rope_scaling": {"type": "longrope"}}, "type longrope of phi3 is not supported: only default"),
        (like("phi3"), {"partial_rotary_factor": 0.75}, "partial_rotary_factor 0.75"),
        (like("qwen2"), {"layer_types": ["sliding_attention"]}, "layer_types names other layers than full_attention"),
        (like("qwen3"), {"attention_bias": True}, "attention_bias of qwen3 is not supported"),
        (like("qwen3_moe"), {"mlp_only_layers": [0, 1]}, "mlp_only_layers leave no layer with experts"),
        (like("qwen3_moe"), {"mlp_only_layers": 1}, "mlp_only_layers 1 is not a list of layers"),
        (like("smollm3"), {"no_rope_layers": [1]}, "no_rope_layers must have a 0 or a 1 for each of 2 layers"),
        (like("smollm3"), {"no_rope_layers": [0, 0]}, "no_rope_layers leaves no layer with RoPE"),
        (like("granite"), {"residual_multiplier": 0}, "residual_multiplier 0 is not a positive number"),
        (like("exaone4"), {"layer_types": ["full_attention"] * 2, "sliding_window": 4}, "no layer has RoPE"),
        (like("qwen3_moe"), {"norm_topk_prob": True, "moe_intermediate_size": None}, "moe_intermediate_size None"),
        (
            like("gpt_oss"),
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantization_config is not supported: save",
        ),
        (like("gpt_oss"), {"swiglu_alpha": 2.0}, "swiglu_alpha 2.0 of gpt_oss is not supported: only 1.702"),
        (like("gpt_oss"), {"num_experts_per_tok": 1}, "num_experts_per_tok 1 is not from 2 to num_local_experts 4"),
        (like("gpt_oss"), {"rope_scaling": None}, "rope_scaling of gpt_oss is missing"),
        (like("gpt_oss"), {"layer_types": None}, "layer_types of gpt_oss is missing"),
        (NEOX, {"rotary_pct": 1.5}, "rotary_pct"),
        (NEOX, {"rotary_emb_base": 10000.5}, "rotary_emb_base"),
        (GLM, {"partial_rotary_factor": 1.25}, "partial_rotary_factor"),
        (QWEN3_NEXT, {"full_attention_interval": 0}, "full_attention_interval"),
        (QWEN3_NEXT, {"full_attention_interval": True}, "full_attention_interval"),
        (QWEN3_NEXT, {"full_attention_interval": "4"}, "full_attention_interval"),
        (QWEN3_NEXT, {"layer_types": "all"}, "layer_types"),
        (QWEN3_NEXT, {"layer_types": ["full_attention"]}, "layer_types"),
        (QWEN3_NEXT, {"layer_types": ["full_attention", "windowed"]}, "layer_types"),
        (QWEN3_NEXT, {"layer_types": ["full_attention", "full_attention"]}, "layer_types"),
        (NEOX, {"auto_map": {}}, "auto_map and quantization_config are not supported"),
        (NEOX, {"quantization_config": {"bits": 4}}, "auto_map and quantization_config are not supported"),
        (V3, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (V3, {"attention_bias": True}, "attention_bias True"),
        (V3, {"rope_interleave": False}, "rope_interleave False"),
        (V3, {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05"),
        (V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (V3, {"num_key_value_heads": 2}, "num_key_value_heads"),
        (V3, {"kv_lora_rank": None}, "kv_lora_rank of deepseek_v3 None"),
        (V3, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "only rope_scaling of type yarn"),
        (V3, {"rope_scaling": DEEPSEEK_YARN | {"mscale": None}}, "mscale_all_dim"),
        (V3, {"topk_group": 1}, "num_experts_per_tok 4 is not 2 times topk_group 1"),
        (V3, {"norm_topk_prob": False}, "do not describe the router of DeepSeek V3"),
        (V3, {"scoring_func": "softmax"}, "do not describe the router of DeepSeek V3"),
        (V3, {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}, "do not describe the router"),
        (V2, {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}, "is not 1 times topk_group 2"),
        (V2, {"topk_method": "noaux_tc"}, "do not describe the router of DeepSeek V2"),
        (HYBRID, {"ssm_state_size": None}, "ssm_state_size of nemotron_h is missing"),
        (HYBRID, {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' of nemotron_h is not supported"),
        (HYBRID, {"moe_latent_size": 8}, "moe_latent_size 8 of nemotron_h is not supported: only None"),
        (HYBRID, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06 of nemotron_h is not supported"),
        (HYBRID, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1 of nemotron_h is not supported"),
        (HYBRID, {"tie_word_embeddings": True}, "tie_word_embeddings True of nemotron_h is not supported"),
        (HYBRID, {"layers_block_type": ["mamba", "lstm"]}, "do not say for each layer whether it is mamba"),
        (HYBRID, {"num_hidden_layers": 7}, "num_hidden_layers 7 is not the number of layers"),
        (HYBRID, {"mamba_d_conv": 4}, "mamba_d_conv is an older name of conv_kernel: rename it"),
        (HYBRID, {"time_step_limit": [0.1, float("inf")]}, "time_step_limit .* of nemotron_h is not supported"),
        (HYBRID, {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        (HYBRID, {"norm_topk_prob": False}, "do not describe the router"),
        (HYBRID, {"n_groups": 3}, "n_groups 3 of nemotron_h does not divide the 4 heads of Mamba2"),
        (MAMBA2, {"use_conv_bias": False}, "use_conv_bias False of mamba2 is not supported: only True"),
        (MAMBA2, {"conv_kernel": 3}, "conv_kernel 3 of mamba2 is not supported: only 4"),
        (MAMBA2, {"time_step_limit": [0.0, 1.0]}, "time_step_limit .* of mamba2 is not supported"),
        (MAMBA2, {"expand": 3}, "num_heads x head_dim 32 of mamba2 is not expand x hidden_size 48"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_models_that_are_refused(config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        described(config | change, "config.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config", [MIXTRAL, NEOX | {"quantization_config": None}, GLM, QWEN3_NEXT, V3, V2, HYBRID, MAMBA2]
)
def test_models_that_are_refused_only_with_a_change(config: dict[str, Any]) -> None:
    described(config, "config.json")


@pytest.mark.parametrize(
    "config, change, message",
    [
        (V3, {"qk_layernorm": False}, "not a DeepSeek V3.*--qk-layernorm"),
        (V3, {"norm_epsilon": 1e-5}, "not a DeepSeek V3.*--norm-epsilon"),
        (V3, {"add_bias_linear": True}, "--add-bias-linear"),
        (V3, {"position_embedding_type": "none"}, "--position-embedding-type"),
        (V3, {"moe_router_score_function": "softmax"}, "--moe-router-score-function"),
        (V3, {"moe_router_enable_expert_bias": False}, "--moe-router-enable-expert-bias"),
        (V3, {"moe_router_topk": 2}, "--moe-router-topk"),
        (V3, {"moe_layer_freq": [1, 0]}, "--moe-layer-freq"),
        (V3, {"moe_shared_expert_intermediate_size": 30}, "--moe-shared-expert-intermediate-size"),
        (V3, {"moe_shared_expert_intermediate_size": None}, "--moe-shared-expert-intermediate-size"),
        (V3, {"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor"),
        (V3, {"position_embedding_type": "yarn", "yarn_mscale": 0.0, "yarn_mscale_all_dim": 1.0}, "--yarn-mscale"),
        (MIXTRAL, {"moe_router_score_function": "sigmoid"}, "not a Mixtral.*--moe-router-score-function"),
        (MIXTRAL, {"moe_shared_expert_intermediate_size": 8}, "not a Mixtral.*--moe-shared-expert-intermediate-size"),
        (HYBRID, {"squared_relu": False}, "--squared-relu False"),
        (HYBRID, {"position_embedding_type": "rope"}, "--position-embedding-type rope"),
        (HYBRID, {"norm_epsilon": 1e-6}, "--norm-epsilon 1e-06"),
        (HYBRID, {"untie_embeddings_and_output_weights": False}, "--untie-embeddings-and-output-weights False"),
        (HYBRID, {"moe_router_score_function": "softmax"}, "--moe-router-score-function softmax"),
        (HYBRID, {"moe_expert_capacity_factor": 1.5}, "--moe-expert-capacity-factor 1.5"),
        (HYBRID, {"moe_router_topk": 1}, "--moe-router-topk 1"),
        (HYBRID, {"moe_router_num_groups": 4, "moe_router_group_topk": 1}, "--moe-router-topk 3"),
        (HYBRID, {"moe_shared_expert_intermediate_size": None}, "--moe-shared-expert-intermediate-size None"),
        (HYBRID, {"hybrid_override_pattern": "MMMM", "num_experts": None, "mamba_head_dim": 5}, "--mamba-head-dim 5"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_models_that_transformers_does_not_have(config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    model = described(config, "config.json").settings
    assert family_of(model).config_json(model, 67, torch.float32)["vocab_size"] == 67
    changed = replace(model, **change)
    family = family_of(changed if config is HYBRID else model)
    with pytest.raises(Refusal, match=message):
        family.config_json(changed, 67, torch.float32)


def test_older_files_of_nemotron_h_have_letters() -> None:
    """They have hybrid_override_pattern, older names of the kinds, or the prefix of transformers' own model."""
    config = HYBRID
    letters = {name: value for name, value in config.items() if name != "layers_block_type"}
    older = config | {"layers_block_type": ["mamba", "mlp", "attention", "moe"]}
    expected = described(config, "config.json")
    for one in (letters | {"hybrid_override_pattern": "M-*E"}, older):
        assert described(one, "config.json").settings == expected.settings
    names = [piece.names[0] for piece in architectures.pieces(expected, {"model.embeddings.weight"})]
    assert all(name.startswith(("model.", "lm_head.")) for name in names)
