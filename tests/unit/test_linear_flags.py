# SPDX-License-Identifier: Apache-2.0
"""Linear-attention and SSM layers: their settings, what is refused, and closed forms."""

from __future__ import annotations

import pytest

from megatron.formulas.flops import forward_flops, passes_of
from megatron.formulas.parameters import numel, stage_parameters
from megatron.formulas.strategy import Strategy, Workload
from megatron.training.arguments.parser import parse
from megatron.training.families.named import vocabulary
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config
from megatron.training.settings.kinds.layer_patterns import hybrid_pattern, linear_layers
from megatron.training.settings.models import LLAMA_DEFAULTS, model_shape

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --micro-batch-size 1 --train-iters 4 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 301 --device cpu"
)
VARIANT = "--experimental-attention-variant gated_delta_net"
GDN = f"{VARIANT} --linear-attention-freq 4"
MAMBA = "--is-hybrid-model --mamba-head-dim 8"
HYBRID = f"{MAMBA} --hybrid-override-pattern"


def read(flags: str, world: int = 1) -> Config:
    return parse(f"{BASE} {flags}".split(), LLAMA_DEFAULTS, world)


@pytest.mark.parametrize(
    "flags, message",
    [
        (VARIANT, "needs --linear-attention-freq"),
        (f"{VARIANT} --linear-attention-freq 1", "leaves no linear-attention layer"),
        (f"{VARIANT} --linear-attention-freq 0", "--linear-attention-freq 0 must be at least 1"),
        (f"{VARIANT} --linear-attention-freq [1,0]", "--linear-attention-freq with 2 layers does not fit"),
        (f"{GDN} --linear-num-value-heads 24", "--linear-num-value-heads 24 is not a multiple of"),
        (f"{GDN} --linear-num-key-heads 0", "--linear-num-key-heads"),
        (f"{GDN} --linear-num-key-heads 1 --tensor-model-parallel-size 2",
         "--linear-num-key-heads 1 is not a multiple of --tensor-model-parallel-size 2"),
        (f"{GDN} --fpdt --fpdt-chunk-size 32 --sequence-parallel --tensor-model-parallel-size 2",
         "with --sequence-parallel --fpdt is not supported"),
        (f"{GDN} --multi-latent-attention", "with --multi-latent-attention is not supported"),
        (f"{GDN} --mtp-num-layers 1", "with --mtp-num-layers is not supported"),
        (f"{GDN} --fp8-format hybrid", "with --fp8-format is not supported"),
        (f"{GDN} --normalization LayerNorm", "use --normalization RMSNorm"),
        (f"{GDN} --attention-mask full", "a state holds earlier tokens alone"),
        ("--num-experts 4 --moe-shared-expert-gate", "--moe-shared-expert-gate needs an expert that all tokens go to"),
        ("--experimental-attention-variant dsa", "--experimental-attention-variant"),
        (f"{HYBRID} M*", "--hybrid-override-pattern with 2 layers does not fit --num-layers 4"),
        (f"{HYBRID} M*x-", "has 'x': a layer is one of"),
        (f"{HYBRID} M*E-", "--is-hybrid-model with E needs --num-experts"),
        (f"{HYBRID} M*M- --num-experts 4", "--is-hybrid-model with --num-experts needs E for layers with experts"),
        ("--hybrid-override-pattern M*M-", "--hybrid-override-pattern needs --is-hybrid-model"),
        ("--hybrid-mlp-ratio 0.5", "needs --is-hybrid-model"),
        (f"{MAMBA} --hybrid-attention-ratio 0.6 --hybrid-mlp-ratio 0.6", "are shares of all layers"),
        (f"{HYBRID} M*M- --hybrid-attention-ratio 0.5", "does not have the numbers of layers that the ratios give"),
        ("--is-hybrid-model --mamba-head-dim 8 --mamba-num-heads 9", "--mamba-num-heads 9 is not a multiple of"),
        ("--is-hybrid-model --mamba-head-dim 7", "--mamba-head-dim 7 does not divide 2 x --hidden-size"),
        (f"{MAMBA} --mamba-num-groups 1 --tensor-model-parallel-size 2",
         "--mamba-num-groups 1 is not a multiple of --tensor-model-parallel-size 2"),
        (f"{MAMBA} {GDN}", "--is-hybrid-model with --experimental-attention-variant"),
        (f"{MAMBA} --sandwich-norm", "with --sandwich-norm is not supported"),
        (f"{MAMBA} --attention-mask full", "a state holds earlier tokens alone"),
        (f"{MAMBA} --mtp-num-layers 1", "with --mtp-num-layers is not supported"),
        ("--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec", "needs --is-hybrid-model"),
        ("--lora-rank 4 --lora-targets in_proj", "--lora-targets in_proj is no layer of this model: choose from"),
        (f"{GDN} --lora-rank 4 --lora-targets in", "--lora-targets in: not supported; did you mean in_proj? Layers"),
        (f"{HYBRID} MMMM --lora-rank 4 --lora-targets linear_qkv",
         "--lora-targets linear_qkv is no layer of this model: choose from in_proj"),
        (f"{HYBRID} M-M* --lora-rank 4 --lora-targets in_proj out_proj",
         "--lora-targets out_proj is not supported for Mamba2, as in PEFT"),
        (f"{HYBRID} MEM* --num-experts 4 --lora-rank 4 --lora-targets in_proj linear_fc1",
         "experts have no adapters: use --lora-targets linear_qkv linear_proj in_proj"),
        (f"{HYBRID} E-E- --num-experts 4 --lora-rank 4", "with --lora-rank is not supported: experts have no adapters"),
    ],
)  # fmt: skip
def test_what_is_refused(flags: str, message: str) -> None:
    with pytest.raises((Refusal, SystemExit)) as error:
        read(flags, 2 if "model-parallel" in flags else 1)
    if error.type is Refusal:
        assert message in str(error.value)


@pytest.mark.parametrize(
    "flags, targets",
    [
        (f"{GDN} --lora-rank 4", "linear_qkv linear_proj in_proj out_proj linear_fc1 linear_fc2"),
        (f"{VARIANT} --linear-attention-freq [1]*4 --lora-rank 4", "in_proj out_proj linear_fc1 linear_fc2"),
        (f"{HYBRID} M*M- --lora-rank 4", "linear_qkv linear_proj in_proj linear_fc1 linear_fc2"),
        (f"{HYBRID} MMMM --lora-rank 4", "in_proj"),
        (f"{HYBRID} MEM* --num-experts 4 --lora-rank 4", "linear_qkv linear_proj in_proj"),
    ],
)
def test_which_layers_get_adapters(flags: str, targets: str) -> None:
    """All that the model has, but for experts, which is noted."""
    config = read(flags)
    assert config.model.lora_targets == targets.split()
    assert any("experts get no adapters" in note for note in config.notes) == ("experts" in flags)


@pytest.mark.parametrize(
    "given, targets, note",
    [
        (
            "q_proj v_proj",
            "linear_qkv",
            "q_proj v_proj: linear_qkv is one layer here, so its adapter also changes k_proj",
        ),
        ("o_proj up_proj", "linear_proj linear_fc1", "up_proj: linear_fc1 is one layer here, so its adapter also"),
        ("q_proj k_proj v_proj down_proj", "linear_qkv linear_fc2", ""),
        ("qkv_proj linear_proj", "linear_qkv linear_proj", ""),
    ],
)
def test_names_of_hugging_face_are_layers_here(given: str, targets: str, note: str) -> None:
    config = read(f"--lora-rank 4 --lora-targets {given}")
    assert config.model.lora_targets == targets.split()
    notes = [line for line in config.notes if "--lora-targets" in line]
    assert len(notes) == bool(note) and note in "".join(notes)


@pytest.mark.parametrize("frequency, layers", [("4", [1, 1, 1, 0]), ("2", [1, 0, 1, 0]), ("[0,1]*2", [0, 1, 0, 1])])
def test_which_layers_have_a_state(frequency: str, layers: list[int]) -> None:
    assert linear_layers(read(f"{VARIANT} --linear-attention-freq {frequency}").model) == layers


def test_hybrid_layers_are_those_of_core() -> None:
    """By the shares of layers, as megatron-core chooses them."""
    from megatron.core.ssm import mamba_hybrid_layer_allocation as core

    allocate_layers = getattr(core, "pattern_from_ratios", None) or core.allocate_layers  # renamed in 0.17

    tenths = [(attention, mlps) for attention in range(11) for mlps in range(11 - attention)]
    for layers in (1, 2, 5, 8, 24, 56):
        for attention, mlps in tenths:
            ratios = f"--hybrid-attention-ratio {attention / 10} --hybrid-mlp-ratio {mlps / 10}"
            config = read(f"{MAMBA} {ratios} --num-layers {layers}")
            assert list(hybrid_pattern(config.model)) == list(allocate_layers(layers, attention / 10, mlps / 10))
    assert hybrid_pattern(read(f"{HYBRID} M-*M").model) == "M-*M"


def test_sizes_without_layers_that_read_them_get_a_note() -> None:
    assert any("--linear-key-head-dim" in note for note in read("--linear-key-head-dim 32").notes)


def test_parameters_and_flops_of_qwen3_next() -> None:
    config = parse(
        "--model qwen3-next-80b-a3b --seq-length 8192 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data".split(),
        {},
        1,
    )
    shape = model_shape(config.model, vocabulary("qwen3-next-80b-a3b"))
    one = stage_parameters(shape, 1, 1, 0, padded=False)
    assert one.numel == 79_674_391_296  # as transformers counts its Qwen3NextForCausalLM
    parts = [stage_parameters(shape, 1, 4, stage, padded=False) for stage in range(4)]
    assert sum(part.numel for part in parts) == one.numel
    assert numel(stage_parameters(shape, 2, 1, 0, padded=False).routed) < numel(one.routed) * 0.6
    flops, longer = (forward_flops(shape, length) for length in (8192, 16384))
    assert longer.qkv == 2 * flops.qkv and longer.attention == 4 * flops.attention
    for how in ({"fpdt_chunk": 1024}, {"recompute": "full", "recompute_layers": 2}, {"recompute_method": "block"}):
        with pytest.raises(ValueError, match="linear attention has no formula with FPDT, units of layers and block"):
            passes_of(Workload(shape, 8192), Strategy(**how))
