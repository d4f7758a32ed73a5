# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention: its settings, what is refused, and closed forms against published numbers."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.formulas.flops import forward_flops
from megatron.formulas.parameters import stage_parameters
from megatron.training.arguments.parser import parse
from megatron.training.families.architectures import family_of
from megatron.training.families.named import vocabulary
from megatron.training.model.build import rope
from megatron.training.refusal import Refusal
from megatron.training.report.layer_traffic import layer_traffic
from megatron.training.settings.config import Config
from megatron.training.settings.kinds import latent_kind
from megatron.training.settings.models import LLAMA_DEFAULTS, model_shape

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --micro-batch-size 1 --train-iters 4 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 301 --device cpu"
)
MLA = "--multi-latent-attention"
YARN = "--rotary-scaling-factor 40 --mscale 0.8 --mscale-all-dim 1.2"


def read(flags: str, world: int = 1) -> Config:
    return parse(f"{BASE} {flags}".split(), LLAMA_DEFAULTS, world)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--group-query-attention --num-query-groups 4", "--multi-latent-attention with --group-query-attention"),
        (
            "--lora-rank 4 --lora-targets linear_q_up_proj",
            "--lora-targets linear_q_up_proj is no layer of this model",
        ),
        ("--fp8-format hybrid", "--multi-latent-attention with --fp8-format"),
        ("--rotary-percent 0.5", "with --rotary-percent is not supported"),
        ("--rotary-interleaved", "with --rotary-interleaved is not supported"),
        ("--rotary-base-local 5000", "with --rotary-base-local is not supported"),
        ("--softmax-scale 0.1", "with --softmax-scale is not supported"),
        ("--attention-output-gate", "with --attention-output-gate is not supported"),
        ("--use-rope-scaling", "with --use-rope-scaling is not supported: use --rotary-scaling-factor"),
        ("--rotary-seq-len-interpolation-factor 2", "use --rotary-scaling-factor"),
        ("--position-embedding-type none", "use --position-embedding-type rope"),
        ("--position-embedding-type alibi", "use --position-embedding-type rope"),
        ("--position-embedding-type yarn --rotary-scaling-factor 2 --rope-type rope", "are two kinds"),
        (
            "--elastic --gpu H100-80G --save out/a --load out/a --global-batch-size 2",
            "the planner does not know its time",
        ),
        ("--qk-pos-emb-head-dim 7", "is odd, but RoPE rotates pairs"),
        ("--q-lora-rank 0", "--q-lora-rank"),
        ("--latent-exchange latents --fpdt --fpdt-chunk-size 16", "--latent-exchange latents with --fpdt"),
        ("--q-lora-rank 3 --tensor-model-parallel-size 2", "--q-lora-rank 3 is not a multiple of"),
        ("--kv-lora-rank 31 --tensor-model-parallel-size 2", "--kv-lora-rank plus --qk-pos-emb-head-dim 95"),
    ],
)
def test_refused(flags: str, message: str) -> None:
    with pytest.raises(Refusal) as caught:
        read(f"{MLA} {flags}", 2)
    assert message in str(caught.value) and "\n" not in str(caught.value)


DSA = "--experimental-attention-variant dsa --attention-dropout 0"
INDEXER = f"{DSA} --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 64 --dsa-indexer-topk 8"


@pytest.mark.parametrize(
    "flags, message",
    [
        (DSA, "needs --multi-latent-attention: add it"),
        (f"{MLA} {DSA}", "needs --dsa-indexer-n-heads: add it"),
        (
            f"{MLA} {INDEXER} --qk-pos-emb-head-dim 66",
            "--dsa-indexer-head-dim 64 is less than",
        ),
        (
            f"{MLA} {INDEXER} --fpdt --fpdt-chunk-size 16 --dsa-indexer-loss-coeff 1",
            "dsa with --fpdt is not supported: the loss over all keys is not computed in chunks: add --dsa-indexer-use",
        ),
        (f"{MLA} {INDEXER} --attention-kernel cpu", "dsa with --attention-kernel cpu is not supported"),
        (f"{MLA} {INDEXER} --attention-dropout 0.1", "use --attention-dropout 0"),
        (f"{MLA} {INDEXER} --latent-exchange latents", "dsa with --latent-exchange is not supported"),
        (f"{MLA} {INDEXER} --dsa-indexer-loss-coeff 1 --lora-rank 4", "dsa with --lora-rank is not supported"),
        (f"{MLA} {INDEXER} --dsa-warm-up", "--dsa-warm-up trains nothing without --dsa-indexer-loss-coeff"),
        (
            f"{MLA} {INDEXER} --dsa-warm-up --dsa-indexer-loss-coeff 1 --dsa-indexer-use-sparse-loss",
            "--dsa-warm-up with --dsa-indexer-use-sparse-loss",
        ),
        (
            f"{MLA} {INDEXER} --dsa-indexer-topk-freq 3 --num-layers 4 --pipeline-model-parallel-size 2",
            "lets layer 3, the first of a pipeline stage, use what a layer before it hands on",
        ),
    ],
)
def test_sparsity_that_is_refused(flags: str, message: str) -> None:
    with pytest.raises(Refusal) as caught:
        read(flags, 2)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_note_says_that_ulysses_ranks_have_unequal_work() -> None:
    def notes(flags: str) -> str:
        return " ".join(read(f"{MLA} {INDEXER} {flags}", 4).notes)

    assert "up to 1.75 times the mean work" in notes("--ulysses-parallel-size 2 --ring-parallel-size 2")
    assert "times the mean" not in notes("--ring-parallel-size 4")


def test_without_latents() -> None:
    with pytest.raises(Refusal, match="--rope-type yarn is read with --multi-latent-attention"):
        read("--rope-type yarn")
    assert not read("--rope-type rope").model.multi_latent_attention


def test_what_layers_send_is_that_of_latents() -> None:
    """The latent of a token and the rotated part of its key, for both kinds of layers."""
    flags = f"{MLA} --attention-mask window --window-size 9 0 --window-attn-skip-freq 2 --ring-parallel-size 2"
    keys, sent = (layer_traffic(read(f"{flags} --latent-exchange {exchange}", 2)) for exchange in ("keys", "latents"))
    model = read(MLA).model
    heads = model.num_attention_heads * (model.kv_channels + model.v_head_dim)
    assert len(sent) == 2
    assert [kind.sent / (model.kv_lora_rank + model.qk_pos_emb_head_dim) for kind in sent] == [
        kind.sent / heads for kind in keys
    ]


def test_sizes_and_scale() -> None:
    """Heads are those of keys; YaRN's attention factor is squared into the scale, as in core."""
    model = read(f"{MLA} --kv-channels 5").model
    assert model.kv_channels == 192 and rope(model).dim == 64 and rope(model).interleaved and not rope(model).yarn
    assert latent_kind.KIND.core(Config(model=model))["softmax_scale"] == pytest.approx(192**-0.5)
    model = read(f"{MLA} {YARN}").model
    assert model.position_embedding_type == "yarn" and rope(model).yarn.factor == 40
    plain = read(f"{MLA} {YARN} --rope-type rope")
    assert plain.model.position_embedding_type == "rope" and "--rotary-scaling-factor" in " ".join(plain.notes)
    scale = latent_kind.KIND.core(Config(model=model))["softmax_scale"]
    assert scale == pytest.approx((0.12 * math.log(40) + 1) ** 2 / 192**0.5)
    assert rope(model).attention_factor == pytest.approx((0.08 * math.log(40) + 1) / (0.12 * math.log(40) + 1))


def test_a_note_says_what_the_ring_sends() -> None:
    """16 heads of keys 192 and values 128 are 5120 numbers; their latents are 576."""
    flags = f"{MLA} --hidden-size 128 --num-attention-heads 16 --kv-lora-rank 512"
    notes = read(f"{flags} --ring-parallel-size 2", 2).notes
    assert any("5120 numbers a token and rank; with --latent-exchange latents it sends 576" in note for note in notes)
    latents_sent = read(f"{flags} --ring-parallel-size 2 --latent-exchange latents", 2).notes
    assert not any("numbers a token" in note for note in latents_sent)
    assert not any("numbers a token" in note for note in read(f"{flags} --ulysses-parallel-size 2", 2).notes)
    assert not any("numbers a token" in note for note in read(f"{flags} --ulysses-parallel-size 16 "
                                                              "--ring-parallel-size 2", 32).notes)  # fmt: skip


@pytest.mark.parametrize("name, billions", [("deepseek-v2-lite", 15.7), ("deepseek-v3", 671.0)])
def test_published_sizes(name: str, billions: float) -> None:
    """Parameters as published, and as transformers counts them by the config.json that we write."""
    from transformers import AutoConfig, AutoModelForCausalLM

    words = f"--model {name} --seq-length 4096 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --vocab-size 9"
    config = parse(words.split(), LLAMA_DEFAULTS, 1)
    shape = model_shape(config.model, vocabulary(name))
    numel = stage_parameters(shape, 1, 1, 0, padded=False).numel
    assert numel / 1e9 == pytest.approx(billions, rel=2e-3)
    written = family_of(config.model).config_json(config.model, vocabulary(name), torch.bfloat16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written))
    assert sum(parameter.numel() for parameter in model.parameters()) == numel


def test_flops_are_those_of_the_products() -> None:
    """Counted by PyTorch on the products of one layer's attention: heads of 24 for keys and 16 for values."""
    from torch.utils.flop_counter import FlopCounterMode

    flags = f"{MLA} --q-lora-rank 24 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"
    shape, s = model_shape(read(flags).model, 301), 64
    x, heads = torch.randn(s, 64), 8
    with FlopCounterMode(display=False) as counter:
        q = (x @ torch.randn(64, 24)) @ torch.randn(24, heads * 24)
        kv = (x @ torch.randn(64, 40))[:, :32] @ torch.randn(32, heads * 32)
        qkv = counter.get_total_flops()
        k, v = q.view(s, heads, 24).transpose(0, 1), kv.view(s, heads, 32)[..., :16].transpose(0, 1)
        out = (k @ k.mT) @ v
        attention = counter.get_total_flops() - qkv
        out.transpose(0, 1).reshape(s, -1) @ torch.randn(heads * 16, 64)
        total = counter.get_total_flops()
    one = forward_flops(shape, s)
    assert (one.qkv, one.attention, one.out) == (2 * qkv, 2 * attention, 2 * (total - qkv - attention))
