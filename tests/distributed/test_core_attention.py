# SPDX-License-Identifier: Apache-2.0
"""Every option that megatron-core may pass to a core_attention is computed correctly or refused by name."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import megatron.core
import pytest
import torch

import megatron.context_parallel as cp
from megatron.context_parallel.layout.documents import Samples
from megatron.context_parallel.layout.grid import Axis, make_grid
from tests.distributed.test_mask_attention import dense

LENGTH, HEADS, SIZE = 48, 4, 8
ENDS = (0, 10, 30, 48)
PADDED = (0, 12, 32, 48)


def core_attention(settings=None, config=None, layout=None, **options):
    """A ContextParallelAttention in float64, on one process unless ``layout`` has more."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.context_parallel.core.spec import AttentionSettings, ContextParallelAttention

    settings, config = dict(settings or {}), dict(config or {})
    rule = cp.AttentionRule(kernel="math", **settings.pop("rule", {}))
    layout = layout or cp.SequenceLayout(LENGTH, cp.abstract_grid())
    config = TransformerConfig(
        num_layers=4, hidden_size=HEADS * SIZE, num_attention_heads=HEADS, attention_dropout=0.0, **config
    )
    return ContextParallelAttention(config, AttentionSettings(layout, rule, **settings), **options)


def packed(ends=ENDS, **more):
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    return PackedSeqParams(**{"qkv_format": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends, **more})


def kind(name):
    from megatron.core.transformer.enums import AttnMaskType

    return AttnMaskType[name]


# Options of the layer and of the call, and the mask that they mean.
REQUESTS = {
    "nothing": ({}, {}, lambda q, k: k <= q),
    "no_mask of the layer": ({"attn_mask_type": "no_mask"}, {}, lambda q, k: k >= 0),
    "no_mask of the call": ({}, {"attn_mask_type": "no_mask"}, lambda q, k: k >= 0),
    "window": ({"config": {"window_size": (4, 0)}}, {}, lambda q, k: (k <= q) & (k >= q - 4)),
    "window of one token": ({"config": {"window_size": (0, 0)}}, {}, lambda q, k: k == q),
    "window without a left end, of a layer that is not causal": ({"config": {"window_size": (-1, 0)},
     "attn_mask_type": "no_mask"}, {}, lambda q, k: k <= q),
    "window without a left end": ({"config": {"window_size": (-1, 0)}}, {}, lambda q, k: k <= q),
    "window of both sides": ({"config": {"window_size": (4, 3)}, "attn_mask_type": "no_mask"}, {}, lambda q,
     k: (k <= q + 3) & (k >= q - 4)),
    "every second layer": ({"config": {"window_size": (4, 0), "window_attn_skip_freq": 2}, "layer_number": 2}, {},
     lambda q, k: k <= q),
    "documents": ({}, {"packed_seq_params": {}}, lambda q, k: (k <= q) & (document(k, ENDS) == document(q, ENDS))),
    "documents without a mask inside": ({"attn_mask_type": "padding"}, {"packed_seq_params": {}}, lambda q,
     k: document(k, ENDS) == document(q, ENDS)),
    "padded documents": ({"attn_mask_type": "padding_causal"}, {"packed_seq_params": {"cu_seqlens_q_padded": PADDED,
     "cu_seqlens_kv_padded": PADDED}}, lambda q, k: (k <= q) & (document(k, PADDED) == document(q, PADDED))),
    "documents and a window": ({"config": {"window_size": (4, 0)}}, {"packed_seq_params": {}}, lambda q,
     k: (k <= q) & (k >= q - 4) & (document(k, ENDS) == document(q, ENDS))),
}  # fmt: skip


def document(x, ends):
    return torch.bucketize(x, torch.tensor(ends[1:]), right=True)


def requested(name):
    of_layer, of_call, allowed = REQUESTS[name]
    of_layer, of_call = dict(of_layer), dict(of_call)
    for options in (of_layer, of_call):
        if "attn_mask_type" in options:
            options["attn_mask_type"] = kind(options["attn_mask_type"])
    if "packed_seq_params" in of_call:
        more = {key: torch.tensor(value) for key, value in of_call["packed_seq_params"].items()}
        of_call["packed_seq_params"] = packed(**more)
    return of_layer, of_call, allowed


def inputs():
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(LENGTH, 1, heads, SIZE, generator=draw, dtype=torch.float64) for heads in (HEADS, 2, 2, HEADS)]


def expected(allowed):
    """out and the gradients of q, k, v with a mask [s, s]."""
    *qkv, dout = inputs()
    out = dense(*(x.requires_grad_() for x in qkv), cp.MaskFunction(allowed, cp.Full()))
    out.backward(dout)
    return [out.detach(), *(x.grad for x in qkv)]


def answered(name, ulysses=1, ring=1):
    """The same through core's interface on a grid, and gathered."""
    of_layer, of_call, _ = requested(name)
    grid = make_grid(ulysses=ulysses, ring=ring) if ulysses * ring > 1 else cp.abstract_grid()
    layout = cp.SequenceLayout(LENGTH, grid)
    *qkv, dout = (layout.shard(x).contiguous() for x in inputs())
    out = core_attention(layout=layout, **of_layer)(*(x.requires_grad_() for x in qkv), None, **of_call)
    out.backward(dout.flatten(2))
    return [layout.gather(x) for x in (out.detach().unflatten(2, (HEADS, SIZE)), *(x.grad for x in qkv))]


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_of_megatron_core_are_answered(name):
    torch.testing.assert_close(answered(name), expected(requested(name)[2]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "name, ulysses, ring", [("window", 1, 3), ("documents", 2, 2), ("documents and a window", 1, 2)]
)
def test_requests_of_megatron_core_are_answered_on_a_grid(pool, name, ulysses, ring):
    results = pool.run(answered, ulysses * ring, name, ulysses, ring)[0]
    torch.testing.assert_close(results, expected(requested(name)[2]), rtol=1e-10, atol=1e-12)


def test_tokens_of_packed_sequences_may_come_without_a_batch_dimension():
    q, k, v, _ = inputs()
    one = core_attention()(q, k, v, packed_seq_params=packed())
    assert core_attention()(q[:, 0], k[:, 0], v[:, 0], packed_seq_params=packed()).equal(one)


@pytest.mark.parametrize(
    "of_layer, of_call, words",
    [
        ({}, {"attention_bias": torch.zeros(1)}, "attention_bias"),
        ({"attn_mask_type": "arbitrary"}, {}, "attn_mask_type=arbitrary"),
        ({}, {"attention_mask": torch.ones(1, 1, 4, 4).bool()}, "pass masks as values"),
        ({"attn_mask_type": "padding"}, {}, "which tokens are padding"),
        ({"config": {"window_size": (4, 3)}}, {}, "looks ahead"),
        ({"config": {"window_size": (4, 0)}, "settings": {"rule": {"mask": cp.Full()}}}, {}, "choose one of them"),
        ({"attention_dropout": 0.1}, {}, "attention_dropout=0.1"),
        ({"attention_type": "cross"}, {}, "cross"),
        ({"num_splits": 2}, {}, "num_splits"),
        ({}, {"num_splits": 2}, "num_splits"),
        ({}, {"packed_seq_params": {"qkv_format": "sbhd"}}, "qkv_format"),
        ({"settings": {"separate": False}}, {"packed_seq_params": {}}, "separate"),
        ({"attn_mask_type": "no_mask"}, {"packed_seq_params": {"cu_seqlens_q_padded": torch.tensor(PADDED)}},
         "needs a causal mask"),
        ({}, {"packed_seq_params": {}, "attention_mask": torch.tensor([[20, 48]])}, "different documents"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(of_layer, of_call, words):
    q, k, v, _ = inputs()
    of_layer, of_call = dict(of_layer), dict(of_call)
    if "attn_mask_type" in of_layer:
        of_layer["attn_mask_type"] = kind(of_layer["attn_mask_type"])
    if "packed_seq_params" in of_call:
        of_call["packed_seq_params"] = packed(**of_call["packed_seq_params"])
    with pytest.raises(ValueError, match=words):
        core_attention(**of_layer)(q, k, v, **of_call)


def arguments_of(file, kind, method):
    """Arguments of the class of core whose name ends in ``kind``, by its source: Transformer Engine may be missing."""
    tree = ast.parse((Path(megatron.core.__file__).parent / file).read_text())
    (result,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name.endswith(kind)]
    (function,) = [node for node in result.body if isinstance(node, ast.FunctionDef) and node.name == method]
    return {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}


def test_every_argument_of_the_installed_core_is_known():
    """If a newer core passes more arguments, this test fails."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from megatron.context_parallel.core.core_attention import DETERMINED, ContextParallelAttention

    for name in ("__init__", "forward"):
        ours = set(inspect.signature(getattr(ContextParallelAttention, name)).parameters) | DETERMINED | {"num_splits"}
        for file in ("transformer/dot_product_attention.py", "extensions/transformer_engine.py"):
            assert arguments_of(file, "DotProductAttention", name) <= ours, f"{file}: {name}"
    known = {"qkv_format", "local_cp_size", "cp_group", "max_seqlen_q", "max_seqlen_kv"}
    known |= {f"cu_seqlens_{of}{padded}" for of in ("q", "kv") for padded in ("", "_padded")}
    later = {"seq_idx", "total_tokens", "tokens_per_sample", "pad_between_seqs"}  # read by its mixers, not by ours
    assert known <= set(inspect.signature(PackedSeqParams).parameters) <= known | later
    masks = {"padding", "causal", "no_mask", "padding_causal", "arbitrary", "causal_bottom_right"}
    assert {one.name for one in AttnMaskType} == masks


def chunked_layer_with(name, value):
    from tests.distributed.training_runs import make_job

    job = make_job("--num-layers 1 --hidden-size 32 --num-attention-heads 4 --fpdt --fpdt-chunk-size 32")
    model = job.model_chunks[0]
    while hasattr(model, "module"):
        model = model.module
    layer = model.decoder.layers[0]
    x = torch.randn(job.runtime.layout.local_length, 1, 32)
    # Core passes its angles for RoPE, which the layer does not need.
    assert torch.equal(layer(x)[0], layer(x, None, rotary_pos_emb=torch.ones(1), rotary_pos_cos=torch.ones(1))[0])
    with pytest.raises(ValueError, match=f"does not support {name}"):
        layer(x, None, **{name: value})


@pytest.mark.parametrize("name", ["attention_bias", "packed_seq_params", "context"])
def test_a_layer_in_chunks_refuses_what_it_does_not_read(pool, name):
    pool.run(chunked_layer_with, 1, name, torch.ones(1))


def rows_of_ffn(count):
    """The number of rows of each call of a layer's FFN, in a forward and a backward pass."""
    from tests.distributed.training_runs import make_job

    job, rows = make_job("--num-layers 1 --hidden-size 32 --num-attention-heads 4 --ffn-chunks 4"), []
    (mlp,) = [module for module in job.model_chunks[0].modules() if type(module).__name__ == "MLP"]
    mlp.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    (layer,) = [module for module in job.model_chunks[0].modules() if hasattr(module, "has_ffn")]
    layer.chunks = replace(layer.chunks, ffn_chunks=count)
    layer(torch.randn(job.runtime.layout.local_length, 1, 32, requires_grad=True))[0].sum().backward()
    return rows


@pytest.mark.parametrize("count, rows", [(None, [64]), (4, [16] * 8)])
def test_an_ffn_in_chunks_sees_one_chunk_at_a_time_and_again_in_backward(pool, count, rows):
    assert pool.run(rows_of_ffn, 1, count)[0] == rows


@pytest.mark.parametrize("option", ["inference_context", "attention_bias"])
def test_a_layer_with_a_state_refuses_what_it_does_not_read(option):
    from megatron.context_parallel.core.mixers.state_mixer import StateMixer

    with pytest.raises(ValueError, match="supports neither inference_context nor attention_bias"):
        StateMixer.forward(None, torch.zeros(4, 1, 8), **{option: torch.zeros(1)})


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_layers_without_rope(number):
    """Core leaves RoPE out in every second layer; ours is in the attention core, which must leave it out too."""
    from megatron.context_parallel.positions.rope import LayoutRotaryEmbedding, Rope

    layout = cp.SequenceLayout(LENGTH, cp.abstract_grid())
    rotary = LayoutRotaryEmbedding(Rope(SIZE), layout)
    q, k, v, _ = inputs()
    layer = core_attention({"rotary": rotary}, {"no_rope_freq": 2}, layout, layer_number=number)
    rotated, plain = (core_attention(settings, layout=layout)(q, k, v) for settings in ({"rotary": rotary}, {}))
    assert torch.equal(layer(q, k, v), plain if number % 2 == 0 else rotated) and not torch.equal(plain, rotated)


@pytest.mark.parametrize(
    "kind, more, ends, message",
    [
        ("causal", {}, (10, 30, 48), None),
        ("causal", {"cu_seqlens_q_padded": PADDED, "cu_seqlens_kv_padded": PADDED}, (12, 32, 48), None),
        ("causal", {"cu_seqlens_kv": None}, (10, 30, 48), None),
        ("full", {"cu_seqlens_q_padded": ENDS, "cu_seqlens_kv_padded": ENDS}, (10, 30, 48), None),
        ("full", {"cu_seqlens_q_padded": PADDED}, None, "padding inside documents needs a causal mask"),
        ("full", {"cu_seqlens_kv_padded": PADDED}, None, "padding inside documents needs a causal mask"),
        ("causal", {"cu_seqlens_kv": PADDED}, None, "cu_seqlens_kv differs from cu_seqlens_q"),
        ("causal", {"local_cp_size": 2}, None, "leave local_cp_size and cp_group out"),
        ("causal", {"cp_group": "a group"}, None, "leave local_cp_size and cp_group out"),
        ("causal", {"cu_seqlens_q": None}, None, 'must have qkv_format="thd" and cu_seqlens_q'),
        ("causal", {"qkv_format": "bshd"}, None, 'must have qkv_format="thd" and cu_seqlens_q'),
    ],
)
def test_documents_of_packed_sequences(kind, more, ends, message):
    from megatron.context_parallel.core.core_attention import with_packed

    more = {name: torch.tensor(value, dtype=torch.int32) if isinstance(value, tuple) else value
            for name, value in more.items()}  # fmt: skip
    mask = cp.Causal() if kind == "causal" else cp.Full()
    for batch, fits in (
        (Samples((3,)), True),
        (Samples((3,), (ends or ENDS[1:],)), True),
        (Samples((3,), ((48,),)), False),
    ):
        if message is None and fits:
            assert with_packed(batch, packed(**more), mask) == Samples((3,), (ends,))
        else:
            with pytest.raises(ValueError, match=message or "describe different documents"):
                with_packed(batch, packed(**more), mask)


def test_dropped_outputs_and_their_bias_are_added_to_the_input():
    from megatron.context_parallel.core.gpt_dropout import stream_of
    from megatron.context_parallel.core.transformer_layer import FFN, LongContextLayer

    calls = []

    def halved(x, stream, rows):
        calls.append((stream, rows))
        return x / 2

    layer = SimpleNamespace(core_add={FFN: None}, layer_number=3)
    add = LongContextLayer._add(layer, halved, FFN, (4, 9))
    x, bias, residual = torch.randn(5, 1, 8), torch.randn(8), torch.randn(5, 1, 8)
    assert torch.allclose(add((x, bias), residual, 0.5), residual + (x + bias) / 2)
    assert torch.allclose(add((x, None), residual.double(), 0.5), residual + x / 2)
    assert calls == [(stream_of(3, FFN), (4, 9))] * 2


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_norms_against_their_definition(normalization, zero_centered):
    from megatron.context_parallel.core.spec import AllHeadsNorm, Norm

    config = SimpleNamespace(layernorm_zero_centered_gamma=zero_centered, params_dtype=torch.float64,
                             normalization=normalization, sequence_parallel=False)  # fmt: skip
    x, one = torch.randn(3, 2, 4, 8, dtype=torch.float64), 1.0 if zero_centered else 0.0
    norm = Norm(config, 8, eps=0.3)
    for parameter in norm.parameters():
        parameter.data.normal_()
    centred = x - x.mean(-1, keepdim=True) if normalization == "LayerNorm" else x
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.3).sqrt() * (norm.weight + one)
    assert torch.allclose(norm(x), expected if norm.bias is None else expected + norm.bias, rtol=1e-12)
    heads = AllHeadsNorm(config, 8, 0.3, heads=4, tensor=Axis(1))
    heads.weight.data.normal_()
    flat = x.flatten(2)
    expected = flat / (flat.square().mean(-1, keepdim=True) + 0.3).sqrt() * (heads.weight + one)
    assert torch.allclose(heads(x).flatten(2), expected, rtol=1e-12)


@pytest.mark.parametrize("size, rank, first", [(1, 0, 0), (2, 0, 0), (2, 1, 2), (4, 2, 2), (4, 3, 3)])
def test_dropout_of_a_tp_rank_is_that_of_its_heads(size, rank, first):
    from megatron.context_parallel.core.gpt_dropout import ModelDropout

    layout = cp.SequenceLayout(LENGTH, cp.abstract_grid(tensor=size).at(tensor=rank))
    layer = core_attention({"dropout": ModelDropout(attention=0.5, seed=3)}, layout=layout, layer_number=2)
    assert (layer.first_head, layer.heads) == (first, HEADS // size)
    assert layer.train().dropout_of(Samples((7,))).head == first
    assert layer.eval().dropout_of(Samples((7,))) is None


def test_each_dropout_of_a_model_has_its_own_stream():
    from megatron.context_parallel.core import gpt_dropout

    model, batch = gpt_dropout.ModelDropout(0.5, 0.5), Samples((7,))
    streams = [model.of_weights(layer, batch, 0).stream for layer in range(1, 9)]
    streams += [gpt_dropout.stream_of(layer, which) for layer in range(1, 9) for which in (gpt_dropout.ATTENTION,
                                                                                          gpt_dropout.FFN)]  # fmt: skip
    streams.append(gpt_dropout.EMBEDDING)
    assert len(set(streams)) == 8 * 3 + 1 and min(streams) >= 0
    # The same in all versions, so that a run can be repeated.
    assert streams[:2] == [4, 8] and streams[8:11] == [5, 6, 9]


@pytest.mark.parametrize("initialize", [True, False])
def test_sinks_are_initialized_unless_core_leaves_that_out(initialize):
    drawn = []
    config = {"softmax_type": "learnable", "perform_initialization": initialize, "init_method": drawn.append}
    sinks = core_attention(config=config).softmax_offset
    assert [*map(id, drawn)] == [id(sinks)] * initialize


@pytest.mark.parametrize(
    "window, causal, mask",
    [
        ((4, 0), True, cp.Window(4)), ((0, 0), True, cp.Window(0)), ((-1, 0), True, cp.Causal()),
        ((-1, -1), True, cp.Causal()), ((4, -1), True, cp.Window(4)), ((4, 2), False, cp.Window(4, 2)),
        ((-1, 2), False, cp.Window(LENGTH, 2)), ((4, -1), False, cp.Window(4, LENGTH)), ((-1, -1), False, cp.Full()),
        ((0, 2), False, cp.Window(0, 2)), ((4, 0), False, cp.Window(4, 0)), (None, True, cp.Causal()),
        (None, False, cp.Full()),
    ],
)  # fmt: skip
def test_the_mask_of_a_window(window, causal, mask):
    name = "causal" if causal else "no_mask"
    layer = core_attention(config={"window_size": window}, attn_mask_type=kind(name))
    assert layer.rule.mask == mask


def test_a_layer_with_output_norms_normalizes_the_sum_with_the_bias():
    from megatron.context_parallel.core.transformer_layer import FFN, LongContextLayer

    x, bias, residual = torch.randn(5, 1, 8), torch.randn(8), torch.randn(5, 1, 8)
    layer = SimpleNamespace(
        post_self_attn_layernorm=None,
        residual_multiplier=None,
        post_mlp_layernorm=lambda x: 3 * x,
        _add=lambda *_: lambda pair, y, _: pair[0] + y,
    )
    add = LongContextLayer.dropout_add(layer, None, FFN)
    assert torch.allclose(add((x, bias), residual, 0.0), residual + 3 * (x + bias))
    assert torch.allclose(add((x, None), residual, 0.0), residual + 3 * x)


@pytest.mark.parametrize("training, hidden, drops", [(True, 0.5, True), (True, 0.0, False), (False, 0.5, False)])
def test_hidden_states_are_dropped_in_training_only(training, hidden, drops):
    from megatron.context_parallel.core.gpt_dropout import ModelDropout
    from megatron.context_parallel.core.transformer_layer import AttentionSettings, LongContextLayer

    settings = AttentionSettings(cp.SequenceLayout(LENGTH, cp.abstract_grid()), dropout=ModelDropout(hidden=hidden))
    config = SimpleNamespace(sequence_parallel=False)
    layer = SimpleNamespace(training=training, attention_settings=settings, config=config)
    assert (LongContextLayer._hidden_dropout(layer, Samples((7,))) is not None) is drops


def rounded_once(function, *inputs):
    """Whether bf16 inputs give the results of the same inputs in fp32, rounded at the end."""
    narrow = [x.bfloat16() for x in inputs]
    results = [function(*narrow), function(*(x.float() for x in narrow))]
    return all(torch.equal(a, b.to(a.dtype)) for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in results)))


def test_norms_and_gates_in_half_precision_are_rounded_once():
    from megatron.context_parallel.core.mixers.gated_delta_net import GatedDeltaNet, unit
    from megatron.context_parallel.core.mixers.mamba2 import GroupNorm, Mamba2
    from megatron.context_parallel.core.spec import AllHeadsNorm
    from megatron.context_parallel.core.transformer_layer import gated

    x, y = torch.randn(64, 2, 4, 8), torch.randn(64, 2, 32)
    assert rounded_once(gated, x, y) and rounded_once(unit, x)
    config = SimpleNamespace(layernorm_zero_centered_gamma=False, params_dtype=torch.float32, layernorm_epsilon=1e-5)
    assert rounded_once(AllHeadsNorm(config, 8, 1e-5, heads=4, tensor=Axis()), x)
    assert rounded_once(GroupNorm(32, 4, torch.float32, None), y, y.flip(0))
    net = SimpleNamespace(
        config=config, out_norm=torch.nn.RMSNorm(8), value_dim=8, tp_group=SimpleNamespace(size=lambda: 1)
    )
    assert rounded_once(lambda *inputs: GatedDeltaNet.gated_norm(net, *inputs), x, y)
    numbers = {name: torch.randn(4).bfloat16() for name in ("A_log", "dt_bias", "D")}
    mamba = SimpleNamespace(convolved={"x": 16, "B": 6, "C": 6}, groups=2, heads=4, dt_min=0.0, **numbers)
    narrow = Mamba2.inputs_of_rule(mamba, y[..., :28].bfloat16(), y[..., 28:].bfloat16())
    assert [part.dtype for part in narrow] == 3 * [torch.bfloat16] + 3 * [torch.float32]
    softplus = torch.nn.functional.softplus(y[..., 28:].bfloat16().float() + numbers["dt_bias"].float())
    assert torch.equal(narrow[4], softplus) and torch.equal(narrow[3], -numbers["A_log"].float().exp() * softplus)


@pytest.mark.parametrize("recompute, training, again", [("selective", True, True), ("selective", False, False),
                                                        ("full", True, False), (None, True, False)])  # fmt: skip
def test_the_mixer_of_a_state_is_recomputed_if_asked(monkeypatch, recompute, training, again):
    from megatron.context_parallel.core.mixers import state_mixer

    taken, x = [], torch.randn(4, 1, 8)
    monkeypatch.setattr(state_mixer, "checkpoint", lambda function, _, *inputs: taken.append(1) or function(*inputs))
    layer = SimpleNamespace(
        training=training, config=SimpleNamespace(recompute_granularity=recompute), projected=lambda x: (x,),
        _mix=lambda x, batch: 2 * x, out_proj=lambda x: (x, None),
    )  # fmt: skip
    assert torch.equal(state_mixer.StateMixer.forward(layer, x, None)[0], 2 * x) and bool(taken) is again


@pytest.mark.parametrize(
    "recompute, training, again", [("full", True, True), ("full", False, False), (None, True, False)]
)
def test_a_layer_of_later_tokens_is_recomputed_if_asked(monkeypatch, recompute, training, again):
    from megatron.context_parallel.core import later_tokens

    taken, x = [], torch.randn(4, 1, 8)
    monkeypatch.setattr(
        later_tokens.tensor_parallel, "checkpoint", lambda function, _, *inputs: taken.append(1) or function(*inputs)
    )
    config = SimpleNamespace(recompute_granularity=recompute)
    layer = SimpleNamespace(training=training, config=config, _layer=lambda hidden, *others: 2 * hidden)
    result = later_tokens.LaterTokenLayer.forward(layer, None, x, None, None, lambda **_: x)
    assert torch.equal(result, 2 * x) and bool(taken) is again


@pytest.mark.parametrize("spare", [0, 16])
def test_rows_of_positions_of_a_tp_rank(spare):
    from megatron.context_parallel.core.learned_positions import PositionRows

    for rank in (0, 1):
        layout = cp.SequenceLayout(LENGTH, cp.abstract_grid(tensor=2).at(tensor=rank))
        rows = PositionRows(layout, LENGTH + spare, 8, sequence_parallel=False)
        assert rows.replica == (0, rank, 0) and len(rows.weight) == LENGTH + spare
        assert rows.weight.spans == (((0, LENGTH), (LENGTH, LENGTH + spare)) if spare else ((0, LENGTH),))


@pytest.mark.parametrize(
    "options", [{"mixers": {0: None}}, {"pattern": "M"}, {"experts": {0: None}}, {"all_heads_norms": True},
                {"input_norms": False}]
)  # fmt: skip
def test_transformer_engine_has_no_layers_of_ours(options):
    from megatron.context_parallel.core.spec import StageLayers

    with pytest.raises(ValueError, match="transformer_engine"):
        StageLayers(1, transformer_engine=True, **options)


def test_experts_count_and_gate_in_the_dtype_that_is_asked():
    from megatron.context_parallel.core.experts import SUMS, ExpertRouter

    for name, dtype in (("fp32", torch.float32), ("fp64", torch.float64), (None, torch.bfloat16)):
        router = SimpleNamespace(
            config=SimpleNamespace(moe_router_dtype=name), bias=None, weight=torch.randn(3, 8).bfloat16()
        )
        assert ExpertRouter.gating(router, torch.randn(4, 1, 8).bfloat16()).dtype == dtype
    tokens = 2**24 + 1  # fp32 has no such number
    router, one = SimpleNamespace(seen=None), torch.ones(tokens)
    ExpertRouter._add(router, one.bool()[:, None], one, dict.fromkeys(SUMS, torch.zeros(())))
    assert router.seen.dtype == torch.float64 and router.seen[0] == tokens


@pytest.mark.parametrize("fpdt", [True, False])
def test_the_last_norm_is_in_chunks_under_fpdt(fpdt):
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.context_parallel.core.spec import (
        AttentionSettings,
        ChunkedNorm,
        ChunkSettings,
        StageLayers,
        block_spec,
    )

    settings = AttentionSettings(cp.SequenceLayout(LENGTH, cp.abstract_grid(), chunks=4))
    config = TransformerConfig(num_layers=1, hidden_size=HEADS * SIZE, num_attention_heads=HEADS)
    chunks = ChunkSettings(settings, fpdt=fpdt, ffn_chunks=4)
    norm = block_spec(config, settings, StageLayers(1), chunks).layer_norm
    assert (getattr(norm, "module", None) is ChunkedNorm) is fpdt


@pytest.mark.parametrize("ffn_chunks, pieces", [(1, 1), (4, 1), (5, 2), (12, 3)])
@pytest.mark.parametrize("training", [True, False])
def test_a_chunk_of_fpdt_has_its_share_of_the_spans_of_the_ffn(monkeypatch, ffn_chunks, pieces, training):
    from megatron.context_parallel.core import transformer_layer

    made = []
    monkeypatch.setattr(transformer_layer, "ChunkedLayer", lambda **options: made.append(options) or (lambda x: x))
    settings = transformer_layer.AttentionSettings(cp.SequenceLayout(LENGTH, cp.abstract_grid(), chunks=4))
    core = SimpleNamespace(rule=cp.AttentionRule(), sinks=lambda _: None, dropout_of=lambda _: None)
    nothing = lambda *_, **__: None  # noqa: E731
    layer = SimpleNamespace(
        chunks=SimpleNamespace(attention=settings, ffn_chunks=ffn_chunks, offload=None, streamed=False),
        self_attention=SimpleNamespace(core_attention=core), _hidden_dropout=nothing, is_moe_layer=False, has_ffn=True,
        has_state=False, chooses=False, recompute=True, training=training,
        _ffn=nothing, _output=nothing, _project=nothing, parameters=lambda: iter([torch.ones(1)]),
    )  # fmt: skip
    transformer_layer.ChunkedTransformerLayer._chunked(layer, torch.ones(1), Samples((7,)))
    assert made[0]["ffn_pieces"] == pieces and made[0]["recompute"] is training


def gradients_with_kept_results(swapped: bool) -> bool:
    """Whether the gradients of two micro-batches in flight, as in a pipeline, are those of plain attention."""
    from megatron.core.tensor_parallel import checkpoint

    from megatron.context_parallel.core.core_attention import forget_kept
    from megatron.platform.cpu import run_core_on_cpu

    run_core_on_cpu()
    batches = [torch.randn(3, LENGTH, 1, HEADS, SIZE, dtype=torch.float64).requires_grad_() for _ in range(2)]
    plain, keeping = core_attention(), core_attention({"keep": True})
    expected = [torch.autograd.grad(plain(*batch).square().sum(), batch)[0] for batch in batches]
    losses = [checkpoint(keeping, False, *batch).square().sum() for batch in batches]
    assert len(keeping.kept) == 2
    if swapped:
        keeping.kept.reverse()
    for loss in losses:
        loss.backward()
    assert not keeping.kept
    keeping(*batches[0])  # a layer that is not recomputed
    assert not keeping.kept
    checkpoint(keeping, False, *batches[0])  # a step that fails leaves its results
    forget_kept(keeping)
    assert not keeping.kept
    return all(torch.allclose(batch.grad, grad, rtol=0, atol=1e-12) for batch, grad in zip(batches, expected))


@pytest.mark.parametrize("swapped", [False, True])
def test_a_recomputed_layer_takes_the_result_that_it_kept(pool, swapped):
    """The oldest: in another order the gradients are wrong."""
    assert pool.run(gradients_with_kept_results, 1, swapped) == [not swapped]
