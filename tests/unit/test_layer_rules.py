# SPDX-License-Identifier: Apache-2.0
"""Layers with different rules: what they compute and send, the balance of the ring, MFU, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.context_parallel.attention.ring_plan import attention_plan
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.masks import Causal, Full, Window
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import count
from megatron.formulas.flops import step_flops
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.cost.estimate import estimate, pass_seconds
from megatron.simulator.machines.machine_file import load
from megatron.simulator.planner.request import Request, packed
from megatron.training.families.architectures import described
from megatron.training.model.attention_rule import layer_masks
from megatron.training.model.build import layer_rotaries
from megatron.training.refusal import Refusal
from megatron.training.report.layer_traffic import describe_layers, layer_traffic
from megatron.training.report.mfu import attended_share
from megatron.training.settings.kinds.layer_patterns import expert_layers
from megatron.training.settings.models import rope_layers
from tests.unit.test_validate import build

ROPE = "--position-embedding-type rope"
LENGTH, RING, WIDTH = 131072, 8, 1024
GEMMA3 = f"--window-size {WIDTH - 1},0 --window-attn-skip-freq 6 --num-layers 6"


def gemma(flags: str = "", length: int = LENGTH, ring: int = RING):
    return build(f"{GEMMA3} --seq-length {length} --max-position-embeddings {length} --ring-parallel-size {ring} "
                 f"--micro-batch-size 1 {flags}", ring)  # fmt: skip


def seen(mask, layout: SequenceLayout, rank: int) -> tuple[int, torch.Tensor]:
    """(pairs of a rank's queries, which keys they see [length]) by positions alone."""
    pairs, keys = 0, torch.zeros(layout.seq_length, dtype=torch.bool)
    for start, stop in layout.ring_spans(rank):
        queries = torch.arange(start, stop)
        first = (queries - mask.left).clamp(min=0) if isinstance(mask, Window) else torch.zeros_like(queries)
        pairs += int((queries + 1 - first).sum())
        keys[int(first.min()) : stop] = True
    return pairs, keys


def test_gemma_3_sends_and_computes_what_its_masks_need():
    """5 layers with a window of 1,024 and one without, 131,072 tokens, Ring 8: within 2 %."""
    config = gemma()
    assert config.parallel.context_parallel_balance == "zigzag"
    layout = SequenceLayout(LENGTH, abstract_grid(ring=RING), "zigzag")
    sent = pairs = needed_rows = needed_pairs = 0
    for mask in layer_masks(config):
        for rank in range(RING):
            plan = attention_plan(layout, mask).ring(rank=rank)
            sent += sum(count(hop.keys_out.rows) for hop in plan.hops)
            pairs += sum(tile.pairs for hop in plan.hops for tile in hop.tiles)
            own, keys = seen(mask, layout, rank)
            needed_pairs += own
            for start, stop in layout.ring_spans(rank):
                keys[start:stop] = False  # a rank's own keys are not sent
            needed_rows += int(keys.sum())
    assert pairs == pytest.approx(needed_pairs, rel=0.02) and sent == pytest.approx(needed_rows, rel=0.02)
    whole = sum(
        sum(count(hop.keys_out.rows) for hop in attention_plan(layout, Causal()).ring(rank=rank).hops)
        for rank in range(RING)
    )
    windows = 5 * (2 * RING - 2) * (WIDTH - 1)  # before each half, where another rank has the keys
    assert needed_rows == windows + whole
    # If windows were ignored, or passed on from rank to rank around the ring, this would be noticed.
    around = 5 * RING * RING * (WIDTH - 1)
    assert 6 * whole > 1.02 * sent and around + whole > 1.02 * sent


@pytest.mark.lab
def test_a_dry_run_sends_what_the_layers_send(tmp_path):
    """The program itself, with fake tensors: ring bytes and FLOPs of attention at 131,072 tokens on Ring 8."""
    from megatron.simulator.dry_run.dry_run import dry_run

    flags = "--hidden-size 64 --num-attention-heads 4 --vocab-size 99 --mock-data --dry-run --world-size 8 --device cpu"
    config = gemma(f"{flags} --position-embedding-type rope --rotary-base-local 10000")
    result = dry_run(config, RING, vocab_size=99)
    (report,) = result.ranks
    window, full = layer_traffic(config)
    layout = SequenceLayout(LENGTH, abstract_grid(ring=RING), "zigzag")
    # Keys and values of 4 heads of 16 in fp32 forward; in backward the same again, and their gradients in fp32.
    row, rank = 2 * 4 * 16 * 4, report.rank
    sent = {}
    for kind in (window, full):
        hops = attention_plan(layout, kind.mask).ring(rank=rank).hops
        sent[kind.mask] = row * sum(2 * count(hop.keys_out.rows) + count(hop.grads_out.rows) for hop in hops)
        assert row * sum(count(hop.keys_out.rows) for hop in hops) <= kind.sent
    expected = sum(len(kind.layers) * sent[kind.mask] for kind in (window, full))
    assert report.figures.communication["ring"] == pytest.approx(expected, rel=0.02)
    flops = sum(len(kind.layers) * seen(kind.mask, layout, rank)[0] for kind in (window, full)) * 4 * 4 * 16
    attention = report.figures.flops - dense_flops(config)
    assert attention == pytest.approx(3.5 * flops, rel=0.02)


def dense_flops(config) -> float:
    from megatron.formulas.flops import forward_flops
    from megatron.training.settings.models import model_shape

    one = forward_flops(model_shape(config.model, 128), config.data.seq_length)
    return 3 * one.gemm / RING


def test_lines_of_a_run_say_what_layers_send():
    lines = list(describe_layers(gemma()))
    assert len(lines) == 2 and lines[0].startswith("layers 1-5: Window(left=1023") and "MiB" in lines[0]
    assert lines[1].startswith("layers 6: Causal()")
    assert not list(describe_layers(build("--window-size 15,0")))
    assert "MiB" not in "".join(describe_layers(gemma(ring=1)))


@pytest.mark.parametrize(
    "flags, balance",
    [
        ("--window-size 15,0", "contiguous"),
        ("--window-size 15,0 --window-attn-skip-freq 4", "zigzag"),
        ("--window-size 95,0 --window-attn-skip-freq [1,1,1,0]*2", "zigzag"),
        ("--window-size 15,0 --window-attn-skip-freq 2 --context-parallel-balance contiguous", "contiguous"),
        ("--window-size 15,0 --window-attn-skip-freq 2 --reset-attention-mask", "documents"),
        ("--window-size 15,0 --window-attn-skip-freq 2 --reset-attention-mask --micro-batch-size 2", "zigzag"),
        ("--window-size 15,0 --reset-attention-mask", "contiguous"),
        ("--window-size 95,0 --window-attn-skip-freq 30 --num-layers 30", "contiguous"),
    ],
)
def test_the_balance_is_chosen_by_the_work_of_all_layers(flags, balance):
    assert build(f"--ring-parallel-size 2 {flags}", 2).parallel.context_parallel_balance == balance


def test_the_rules_of_each_layer():
    config = build(f"{ROPE} --num-layers 4 --window-size 7,0 --window-attn-skip-freq 2 --no-rope-freq [0,0,1,0] "
                   "--rotary-base-local 300 --use-rope-scaling")  # fmt: skip
    assert layer_masks(config) == [Window(7), Causal(), Window(7), Causal()]
    layout = SequenceLayout(config.data.seq_length, abstract_grid())
    local, whole, none, again = layer_rotaries(config, layout, torch.device("cpu"))
    assert none is None and again is whole
    assert (local.rope.base, local.rope.llama3) == (300, None) and (whole.rope.base, whole.rope.llama3) == (10000, 8.0)
    both = build("--window-size 7,7 --window-attn-skip-freq [1,0] --num-layers 2 --attention-mask window")
    assert layer_masks(both) == [Window(7, 7), Full()]


def test_mfu_counts_each_layer_with_its_mask():
    length = 192
    one, other = (attended_share(build(flags)) for flags in ("--window-size 15,0", ""))
    mixed = attended_share(build("--window-size 15,0 --window-attn-skip-freq [1,1,1,0] --num-layers 4"))
    assert one == (16 * length - 16 * 15 / 2) / length**2 and other == 0.5
    assert mixed == pytest.approx((3 * one + other) / 4, rel=1e-12)


WIDE = "--qk-layernorm-all-heads --normalization RMSNorm"


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--window-attn-skip-freq 2", "--window-attn-skip-freq is used only by --attention-mask window"),
        ("--window-size 7,0 --window-attn-skip-freq 0", "must be at least 1"),
        ("--window-size 7,0 --window-attn-skip-freq 1", "leaves no layer with the window"),
        ("--window-size 7,0 --window-attn-skip-freq [1,0,1]", "with 3 layers does not fit --num-layers 4"),
        ("--window-size 7,0 --window-attn-skip-freq [1,2]", "--window-attn-skip-freq"),
        ("--no-rope-freq 2", "--no-rope-freq with --position-embedding-type learned_absolute"),
        (f"{ROPE} --no-rope-freq 3", "--no-rope-freq 3 does not divide --num-layers 4"),
        (f"{ROPE} --no-rope-freq 1", "leaves no layer with RoPE"),
        (f"{ROPE} --no-rope-freq 0", "must be at least 1"),
        (f"{ROPE} --no-rope-freq [1,0]", "with 2 layers does not fit --num-layers 4"),
        (f"{ROPE} --rotary-base-local 500", "--rotary-base-local needs some layers with a window and some without"),
        (f"{ROPE} --rotary-base-local 500 --window-size 7,0", "use --rotary-base"),
        ("--rotary-base-local 500 --window-size 7,0 --window-attn-skip-freq 2", "no layer with the window has RoPE"),
        (f"{ROPE} --rotary-base-local 0 --window-size 7,0 --window-attn-skip-freq 2", "must be at least 1"),
    ],
)
def test_what_is_refused(flags, words):
    with pytest.raises(Refusal) as caught:
        build(f"--num-layers 4 {flags}")
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--glu-linear-offset 1", "--glu-linear-offset needs a gated MLP: add --swiglu, --geglu or --quick-geglu"),
        ("--activation-func-clamp-value 7", "--activation-func-clamp-value needs a gated MLP"),
        ("--swiglu --activation-func-clamp-value 0", "--activation-func-clamp-value 0 must be above 0"),
        ("--swiglu --geglu", "--swiglu and --geglu are 2 activations"),
        ("--softmax-scale 0", "--softmax-scale 0 must be above 0"),
        ("--attn-logit-softcapping -1", "--attn-logit-softcapping -1 must be above 0"),
        ("--final-logit-softcapping 0", "--final-logit-softcapping 0 must be above 0"),
        ("--attention-output-gate --group-query-attention --num-query-groups 1 --tensor-model-parallel-size 2",
         "--attention-output-gate with --tensor-model-parallel-size 2 and --num-query-groups 1 is not supported"),
        ("--reordered-norm --sandwich-norm", "--reordered-norm with --sandwich-norm is not supported"),
        (f"{WIDE} --qk-layernorm", "--qk-layernorm-all-heads with --qk-layernorm is not supported"),
        ("--qk-layernorm-all-heads", "--qk-layernorm-all-heads with --normalization LayerNorm is not supported"),
        (f"{WIDE} --fp8-format hybrid", "--qk-layernorm-all-heads with --fp8-format is not supported"),
        (f"{WIDE} --multi-latent-attention {ROPE}",
         "--qk-layernorm-all-heads with --multi-latent-attention is not supported"),
        (f"{WIDE} --group-query-attention --num-query-groups 1 --tensor-model-parallel-size 2",
         "TP ranks would share some of the 1 key/value heads: use TP 1"),
        ("--parallel-residual --fpdt", "--parallel-residual with --fpdt is not supported"),
        ("--parallel-residual --ffn-chunks 2", "--parallel-residual with --ffn-chunks is not supported"),
        ("--qk-l2-norm", "--qk-l2-norm: of norms of queries and keys, --qk-layernorm and"),
    ],
)  # fmt: skip
def test_what_is_refused_inside_attention_and_mlp(flags, words):
    with pytest.raises(Refusal) as caught:
        build(flags, 2 if "tensor" in flags else 1)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_what_the_planner_does_not_know():
    for flag in ("--sandwich-norm", "--reordered-norm", "--qk-layernorm-all-heads", "--parallel-residual",
                 "--attn-logit-softcapping 5", "--final-logit-softcapping 5"):  # fmt: skip
        with pytest.raises(Refusal, match="the planner does not know its time and memory"):
            Request((*LLAMA8, *flag.split())).workload(8192)


def test_a_gemma_that_is_not_supported_is_refused_by_name():
    given = {
        "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": 99,
        "max_position_embeddings": 128, "query_pre_attn_scalar": 16, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    model = described(given, "config.json")
    assert model.settings.rotary_base_local == 10000 and model.settings.softmax_scale == 0.25
    assert model.attention == {
        "attention_mask": "window", "window_size": (7, 0), "window_attn_skip_freq": [1, 0],
    }  # fmt: skip
    assert described(given | {"layer_types": ["full_attention"] * 2}, "config.json").attention == {}
    local = {"rope_type": "default", "rope_theta": 500.0}
    wrong = [
        ({"head_dim": None}, "head_dim of gemma3_text is missing"),
        ({"attention_bias": True}, "attention_bias True of gemma3_text is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types must name sliding_attention or full_attention"),
        ({"sliding_window": 0}, "sliding_window 0 is not a positive integer"),
        ({"rope_local_base_freq": 0.5}, "rope_theta 0.5 of layers with a window is not an integer"),
        (
            {"rope_parameters": {"sliding_attention": local | {"rope_type": "linear"}, "full_attention": local}},
            "scaled RoPE in layers with a window",
        ),
        ({"rope_parameters": {"sliding_attention": local}}, "must have sliding_attention and full_attention"),
    ]
    for change, words in wrong:
        with pytest.raises(Refusal) as caught:
            described(given | change, "config.json")
        assert words in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(Refusal, match="is not a Gemma 3"):
        model.family.config_json(replace(model.settings, qk_layernorm=False), 99, torch.float32, model.attention)
    written = model.family.config_json(model.settings, 99, torch.float32, model.attention)
    assert {name: written[name] for name in given} == given


def test_patterns_that_name_no_exception_are_like_none():
    config = build(f"{ROPE} --num-layers 4 --window-size 7,0 --window-attn-skip-freq [1]*4 --no-rope-freq [0]*4")
    assert config.attention.window_attn_skip_freq is None and config.model.no_rope_freq is None


# ---- formulas and the planner

LLAMA = Shape(layers=8, hidden=64, ffn=96, heads=8, kv_heads=8, head_dim=8, vocab=99)
LLAMA8 = ("--model", "llama3-8b")


def planned(window: int, skip: int, length: int = 131072):
    return Request(LLAMA8, 8, "", window, skip).workload(length)


def test_formulas_count_each_kind_of_layer():
    window, mixed, causal = planned(1024, 0), planned(1024, 4), planned(0, 0)
    machine, strategy = load("H100-80G"), Strategy(tensor=2, ring=4, recompute="full")
    for of in (
        lambda work: step_flops(work, strategy).model_attention,
        lambda work: step_flops(work, strategy).attention,
        lambda work: estimate(work, strategy, machine).flops,
        lambda work: pass_seconds(work, strategy, machine),
        lambda work: work.attended,
    ):
        low, between, high = (of(work) for work in (window, mixed, causal))
        assert low < between < high and between == pytest.approx((3 * low + high) / 4, rel=0.02)


def test_formulas_agree_with_mfu():
    flags = f"--num-layers 8 --seq-length 8192 --max-position-embeddings 8192 {ROPE}"
    config = build(f"{flags} --window-size 511,0 --window-attn-skip-freq 4")
    share = Workload(LLAMA, 8192, keys=packed("", 8192, 512).keys, whole=0.25).attended
    assert share == pytest.approx(attended_share(config), rel=1e-4)


def test_the_planner_knows_layers_without_the_window(capsys):
    from tools.plan import main

    base = ["--model", "llama3-8b", "--gpus", "8", "--gpu", "H100-80G", "--seq-length", "64K", "--global-batch", "8"]
    plan = Request(LLAMA8, 8, "", 1024, 4)
    assert " ".join(plan.program_flags(65536)).endswith("--window-size 1023,0 --window-attn-skip-freq 4")
    assert main([*base, "--top", "1", "--window", "1024", "--window-attn-skip-freq", "1"]) == 2
    assert "needs --window N and layers that have it" in capsys.readouterr().err


# ---- dry runs of a few layers


@pytest.mark.parametrize(
    "flags, counts",
    [
        ("--num-layers 36 --window-attn-skip-freq 3", [12, 15]),
        ("--num-layers 72 --window-attn-skip-freq ([1]*2+[0])*24 --no-rope-freq 2", [24, 30]),
        ("--num-layers 36 --window-attn-skip-freq 3 --pipeline-model-parallel-size 2", [None]),  # 18 layers, 27 needed
        ("--num-layers 80 --window-attn-skip-freq 3", [None]),  # no complete periods
        ("--num-layers 80 --window-attn-skip-freq [1]*40+[0]*40", [None]),
        ("--num-layers 80", [4, 5]),
        ("--num-layers 36 --num-experts 4 --moe-layer-freq 2 --window-attn-skip-freq 3", [None]),  # periods of 6
        ("--num-layers 64 --num-experts 4 --moe-layer-freq ([1]*1+[0]*1)*32", [8, 10]),
    ],
)
def test_layers_are_extrapolated_by_periods(flags, counts):
    from megatron.simulator.dry_run.dry_run import layer_counts, with_layers

    config = build(f"{ROPE} --window-size 7,0 {flags} --global-batch-size 4", 2 if "pipeline" in flags else 1)
    assert layer_counts(config) == counts
    for number in filter(None, counts):
        few = with_layers(config, number)
        assert layer_masks(few) == layer_masks(config)[:number]
        assert rope_layers(few.model) == rope_layers(config.model)[:number]
        assert expert_layers(few.model) == expert_layers(config.model)[:number]


@pytest.mark.full
def test_an_extrapolated_dry_run_has_the_figures_of_all_layers():
    from megatron.simulator.dry_run.dry_run import dry_run

    flags = "--hidden-size 64 --num-attention-heads 4 --vocab-size 99 --mock-data --dry-run --world-size 2 --device cpu"
    config = build(f"{flags} {ROPE} --num-layers 24 --window-size 63,0 --window-attn-skip-freq 2 --seq-length 1024 "
                   "--ring-parallel-size 2 --max-position-embeddings 1024 --micro-batch-size 1", 2)  # fmt: skip
    some, every = (dry_run(config, 2, vocab_size=99, every_layer=whole).ranks[0] for whole in (False, True))
    assert some.layers == (24, 10) and every.layers == (24, 24)
    assert some.figures.communication["ring"] == every.figures.communication["ring"] > 0
    assert some.figures.flops == pytest.approx(every.figures.flops, rel=1e-12)
    assert some.figures.device_peak == pytest.approx(every.figures.device_peak, rel=1e-3)
