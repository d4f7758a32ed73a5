# SPDX-License-Identifier: Apache-2.0
"""Which settings make a network: compared where a run resumes, taken from a checkpoint, exported or refused by name."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.arguments.parser import parse
from megatron.training.checkpoint.arguments_of import shape_of, unchecked, vocabulary
from megatron.training.checkpoint.checkpoint import check_model
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.families.architectures import Described, config_json, described, family_of
from megatron.training.refusal import Refusal
from megatron.training.settings.config import AttentionConfig
from megatron.training.settings.same_network import differences, of_run, roles
from tests.unit.test_checkpoint_args import CHECKPOINT_RUN, MEGATRON_ARGS, checkpoint_of
from tests.unit.test_hugging_face import MIXTRAL
from tests.unit.test_refusals import GOOD, MOCK

EXPERTS = "--num-experts 4 --moe-router-topk 2"
ROPE = "--position-embedding-type rope"
LATENTS = f"{ROPE} --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8"
INDEXER = "--dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8 --dsa-indexer-topk 4 --dsa-indexer-topk-freq 2"
SPARSE = "--attention-mask block-sparse --sparse-pattern"
NETWORKS = [
    f"{ROPE} --window-size 7,0",
    "--position-embedding-type yarn --rotary-scaling-factor 4",
    f"{ROPE} --use-rope-scaling",
    f"{EXPERTS} --group-query-attention --num-query-groups 2",
    LATENTS,
    f"{LATENTS} --experimental-attention-variant dsa {INDEXER} --attention-dropout 0",
    f"{ROPE} --experimental-attention-variant gated_delta_net --linear-attention-freq 2 --normalization RMSNorm",
    "--position-embedding-type none --is-hybrid-model --hybrid-override-pattern M* --mamba-num-groups 1",
    f"{SPARSE} bigbird",
    f"{SPARSE} strided",
    "--attention-mask function --mask-function a.py:mask",
]
# Settings of which another value is the same network unless another setting changes too.
OTHER_VALUES: dict[str, Any] = {
    "attention_mask": "full", "window_size": (9, 0), "window_attn_skip_freq": [0, 1], "no_rope_freq": [0, 1],
    "sparse_pattern": "longformer", "mask_function": "b.py:mask", "hybrid_override_pattern": "M-",
    "position_embedding_type": "none", "experimental_attention_variant": None, "linear_attention_freq": [0, 1],
    "mamba_num_heads": 7, "moe_layer_freq": [0, 1], "moe_router_score_function": "sigmoid", "softmax_type": "learnable",
    "moe_token_drop_policy": "position", "normalization": "RMSNorm", "kv_channels": 6, "num_query_groups": 1,
    "yarn_mscale_all_dim": 0.5, "num_attention_heads": 1,
}  # fmt: skip
PARTS = {"hybrid_attention_ratio", "hybrid_mlp_ratio"}  # of the pattern, which a flag gives here


def config_of(flags: str):
    return parse(f"{GOOD} {MOCK} {flags}".split(), world_size=1)


@pytest.mark.parametrize("name", sorted(roles().keys() - PARTS))
def test_every_setting_of_the_network_is_compared(name: str) -> None:
    """One of the networks reads it, and a checkpoint with another value is of another network."""
    for flags in NETWORKS:
        here = of_run(config_of(flags))
        value = here[name]
        usual = not value if isinstance(value, bool) else (value or 3) + 1 if isinstance(value, int | float) else 4
        other = OTHER_VALUES.get(name, usual)
        assert not any(differences(here, here)), flags
        with suppress(TypeError, ZeroDivisionError):  # of a network that cannot be
            if any(differences(here | {name: other}, here)):
                break
    else:
        raise AssertionError(f"no network reads {name}")


def test_a_run_resumes_only_with_its_mask() -> None:
    config = config_of(f"{ROPE} --window-size 7,0")
    check_model(of_run(config), config, Path("c"), changed=False)
    for flags, words in (
        (ROPE, "--window-size 7,0 in the checkpoint, None in this run"),
        (f"{ROPE} --window-size 8,0", "--window-size 7,0 in the checkpoint, 8,0 in this run"),
        (f"{ROPE} --attention-mask full", "--attention-mask window in the checkpoint, full in this run"),
        (f"{ROPE} --window-size 7,0 --window-attn-skip-freq 2", "--window-attn-skip-freq None in the checkpoint, 2"),
        (f"{ROPE} --window-size 7,0 --reset-attention-mask", "--reset-attention-mask False in the checkpoint"),
        ("--position-embedding-type alibi --window-size 7,0", "--position-embedding-type rope in the checkpoint"),
    ):
        changed = config_of(flags)
        with pytest.raises(Refusal, match=words) as caught:
            check_model(of_run(config), changed, Path("c"), changed=False)
        assert "pass --finetune" in str(caught.value) and "--use-checkpoint-args" in str(caught.value)
        check_model(of_run(config), changed, Path("c"), changed=True)
        assert any(words in note and "changes the network" in note for note in changed.notes)


def test_two_ways_to_write_a_network_are_equal() -> None:
    config = config_of(f"{ROPE} --window-size 7,0 --window-attn-skip-freq 2")
    same = of_run(config) | {"window_attn_skip_freq": [1, 0], "softmax_scale": config.model.kv_channels**-0.5}
    same |= {"attention_mask": None, "rotary_base_local": config.model.rotary_base, "yarn_mscale": 3.0}
    check_model(same, config, Path("c"), changed=False)
    moved = config_of("--attention-mask function --mask-function a.py:mask")
    check_model(of_run(moved) | {"mask_function": "/elsewhere/a.py:mask"}, moved, Path("c"), changed=False)


GEMMA = {
    "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": 10,
    "max_position_embeddings": 128, "query_pre_attn_scalar": 16, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip


def taken(folder: Path, flags: str = "") -> AttentionConfig:
    words = f"{CHECKPOINT_RUN} --seq-length 64 --finetune --load {folder} {flags}"
    return parse(words.split(), None, 1, shape_of).attention


@pytest.mark.parametrize("source", ["config.json", "ours", "Megatron-LM"])
def test_the_mask_comes_from_the_checkpoint(tmp_path: Path, source: str) -> None:
    skip: Any = [1, 0, 1]
    if source == "config.json":
        (tmp_path / "config.json").write_text(json.dumps(GEMMA))
        (tmp_path / "model.safetensors").write_bytes(b"")
    elif source == "ours":
        model = described(GEMMA, "")
        attention = AttentionConfig(**model.attention)
        checkpoint_of(tmp_path, {"config": {"model": asdict(model.settings), "attention": asdict(attention)}})
    else:
        skip = 3
        args = vars(MEGATRON_ARGS) | {"window_size": (7, 0), "window_attn_skip_freq": skip}
        checkpoint_of(tmp_path, {"args": Namespace(**args)})
    for flags, window, pattern, mask in (
        ("", (7, 0), skip, "window"),
        ("--window-size 9,0", (9, 0), skip, "window"),
        ("--attention-mask document", (7, 0), skip, "window"),
        ("--window-attn-skip-freq 2", (7, 0), 2, "window"),
    ):
        attention = taken(tmp_path, flags)
        assert attention.window_size == window and attention.attention_mask == mask
        assert attention.window_attn_skip_freq == pattern
    if source == "Megatron-LM":  # Gemma's other RoPE belongs to its windows
        assert taken(tmp_path, "--attention-mask causal").window_size is None


def test_a_checkpoint_chooses_no_code_to_run(tmp_path: Path) -> None:
    config = config_of(f"{ROPE} --attention-mask function --mask-function a.py:mask")
    checkpoint_of(tmp_path, {"config": {"model": asdict(config.model), "attention": asdict(config.attention)}})
    with pytest.raises(Refusal, match="the checkpoint's mask is a function, 'a.py:mask', and a checkpoint must not"):
        taken(tmp_path)
    assert taken(tmp_path, "--attention-mask causal").mask_function is None
    assert taken(tmp_path, "--attention-mask function --mask-function b.py:f").mask_function == "b.py:f"


def written(model: dict[str, Any], **attention: Any) -> dict[str, Any]:
    settings, size, *_ = described(model, "")
    return config_json(Described(settings, size, family_of(settings, attention), attention), torch.float32)


LLAMA = MIXTRAL | {"model_type": "llama", "num_local_experts": None}
QWEN = LLAMA | {"model_type": "qwen2"}


def test_a_window_is_written_as_a_class_that_has_it() -> None:
    assert written(LLAMA)["model_type"] == "llama" and "sliding_window" not in written(LLAMA)
    mistral = written(LLAMA, window_size=(15, 0))
    assert (mistral["architectures"], mistral["sliding_window"]) == (["MistralForCausalLM"], 16)
    qwen = written(QWEN, window_size=(15, 0), window_attn_skip_freq=[0, 1])
    assert qwen["use_sliding_window"] and qwen["layer_types"] == ["full_attention", "sliding_attention"]
    assert qwen["max_window_layers"] == 1 and not written(QWEN)["use_sliding_window"]
    assert written(MIXTRAL, window_size=(7, 0))["sliding_window"] == 8


@pytest.mark.parametrize(
    "attention, words",
    [
        ({"attention_mask": "full"}, "--attention-mask causal in Hugging Face's LlamaForCausalLM, full in the model"),
        ({"attention_mask": "block-sparse"}, "--attention-mask causal in"),
        ({"attention_mask": "function", "mask_function": "a.py:f"}, "--attention-mask causal in"),
        ({"window_size": (15, 0), "window_attn_skip_freq": 2}, r"--window-attn-skip-freq None in .*Mistral.*, 2 in"),
        ({"window_size": (15, 3)}, "--window-size 15,0 in Hugging Face's MistralForCausalLM, 15,3 in the model"),
        ({"window_size": (-1, 0)}, "sliding_window 0 is not a positive integer"),
        ({"window_size": (15, 0), "window_global_tokens": 2}, "--window-global-tokens 0 in"),
    ],
    ids=str,
)
def test_a_mask_that_no_class_has_is_not_exported(attention: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal, match=words):
        written(LLAMA, **attention)


@pytest.mark.parametrize(
    "kind, keys, attention",
    [
        ("mistral", {"sliding_window": 8}, {"window_size": (7, 0)}),
        ("mistral", {"sliding_window": None}, {}),
        ("phi3", {"sliding_window": 8}, {"window_size": (7, 0)}),
        ("qwen2", {"sliding_window": 8}, {}),  # switched off
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, {}),  # only from layer 28
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, {"window_size": (7, 0)}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, {"window_size": (7, 0),
         "window_attn_skip_freq": [0, 1]}),
    ],
    ids=str,
)  # fmt: skip
def test_windows_of_models_like_llama_are_read(kind: str, keys: dict[str, Any], attention: dict[str, Any]) -> None:
    wanted = {"attention_mask": "window"} | attention if attention else {}
    assert described(LLAMA | {"model_type": kind} | keys, "").attention == wanted


@pytest.mark.parametrize(
    "source, ids, kind, rows, words",
    [
        ("config.json", 67, "HuggingFaceTokenizer", 67, None),
        ("config.json", 60, "HuggingFaceTokenizer", 67, "the loss is over all 67 rows"),
        ("config.json", 70, "HuggingFaceTokenizer", 67, "has 70 ids, the model 67: data with larger ids are refused"),
        ("config.json", 66, "NullTokenizer", 67, "the loss is over all 67 rows"),
        ("config.json", 68, "NullTokenizer", None, "has a vocabulary of 67 tokens, this run's tokenizer has 68"),
        ("config.json", 5000, "HuggingFaceTokenizer", None, "has a vocabulary of 67 tokens"),
        ("converted", 60, "HuggingFaceTokenizer", 67, "the loss is over all 67 rows"),
        ("trained", 60, "HuggingFaceTokenizer", None, "has a vocabulary of 67 tokens, this run's tokenizer has 60"),
        ("trained with 60", 60, "HuggingFaceTokenizer", 67, "the loss is over all 67 rows"),
        ("trained with 60", 61, "HuggingFaceTokenizer", None, "has a vocabulary of 60 tokens"),
        ("Megatron-LM", 61, "HuggingFaceTokenizer", 61, None),
        (None, 61, "HuggingFaceTokenizer", 61, None),
    ],
)
def test_the_vocabulary_is_the_models(
    tmp_path: Path, source: str | None, ids: int, kind: str, rows: int | None, words: str | None
) -> None:
    config, path = config_of(ROPE), tmp_path / "iter_0000007"
    config.model.vocab_size = None
    if source == "config.json":
        path = tmp_path
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        (tmp_path / "model.safetensors").write_bytes(b"")
    elif source == "Megatron-LM":
        checkpoint_of(tmp_path, {"args": MEGATRON_ARGS})
    elif source:
        model = {"vocab_size": 60 if "60" in source else None}
        data = {"tokenizer_type": None if source == "converted" else "HuggingFaceTokenizer"}
        checkpoint_of(tmp_path, {"config": {"model": model, "data": data}, "vocab_size": 67})
    tokenizer = Tokenizer(kind, "T", ids, 0, list, str)
    if rows is None:
        with pytest.raises(Refusal, match=words):
            vocabulary(unchecked(path), tokenizer, config)
        return
    limited, size = vocabulary(unchecked(path) if source else None, tokenizer, config)
    assert (size, limited.vocab_size) == (rows, min(ids, rows))
    assert any(words in note for note in config.notes) if words else not any("ids" in note for note in config.notes)
