# SPDX-License-Identifier: Apache-2.0
"""Tensors of Megatron-LM's checkpoints, against files that are laid out here as megatron-core lays them out."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron.training.checkpoint.megatron_lm.source import Buckets, Saved, Source, join_parts, weights_in
from megatron.training.checkpoint.megatron_lm.stored_tensors import StoredTensors, WholeTensors
from megatron.training.refusal import Refusal

BY_ROWS = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "word_embeddings.weight", "output_layer.weight")
HERE = Path("a-folder")
H = 8  # hidden size


def shapes(saved: Saved, engine: bool) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of all weights, layers with their numbers, in the order of the modules."""
    norms = [("self_attention.linear_qkv.layer_norm_weight", (H,)), ("self_attention.linear_qkv.layer_norm_bias", (H,))]
    proj = [("self_attention.linear_proj.weight", (H, 8))]
    rest = [("self_attention.linear_qkv.weight", (8, H)), ("self_attention.linear_qkv.bias", (8,)),
            ("mlp.linear_fc1.layer_norm_weight", (H,)), ("mlp.linear_fc1.weight", (24, H)),
            ("mlp.linear_fc2.weight", (H, 12))]  # fmt: skip
    layer = [*proj, *norms, *rest] if engine else [*norms, *proj, *rest]
    result = [("embedding.word_embeddings.weight", (16, H)), ("embedding.position_embeddings.weight", (7, H))]
    result += [(f"decoder.layers.{n}.{name}", shape) for n in range(saved.layers) for name, shape in layer]
    return result + [("decoder.final_layernorm.weight", (H,))] + [("output_layer.weight", (16, H))] * (not saved.tied)


def of_rank(whole: torch.Tensor, name: str, rank: int, saved: Saved) -> torch.Tensor:
    """A TP rank's part."""
    if saved.gated and "linear_fc1.weight" in name:
        gate, up = (half.chunk(saved.tensor)[rank] for half in whole.chunk(2))
        return torch.cat([gate, up])
    dim = 0 if name.endswith(BY_ROWS) else 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else None
    return whole if dim is None else whole.chunk(saved.tensor, dim)[rank]


def on_stage(name: str, stage: int, chunk: int, saved: Saved) -> bool:
    first, last = (stage, chunk) == (0, 0), (stage, chunk) == (saved.pipeline - 1, saved.chunks - 1)
    if not name.startswith("decoder.layers."):
        return first if name.startswith("embedding") else last
    each = saved.layers // (saved.pipeline * saved.chunks)
    return int(name.split(".")[2]) // each == chunk * saved.pipeline + stage


def written(saved: Saved, engine: bool, stacked: bool, limit: int) -> tuple[dict, dict, dict]:
    """(stored tensors, weights, first moments): the weights in bf16, and the optimizer in buckets of ``limit``."""
    torch.manual_seed(1)
    main = {name: torch.randn(shape) for name, shape in shapes(saved, engine)}
    moments = {name: torch.randn(shape) for name, shape in shapes(saved, engine)}
    stored = {name: weight.bfloat16() for name, weight in main.items()}
    if stacked:
        stored = {name: weight for name, weight in stored.items() if not name.startswith("decoder.layers.")}
        for name in [name for name in main if name.startswith("decoder.layers.0.")]:
            every = [main[name.replace(".0.", f".{n}.")].bfloat16() for n in range(saved.layers)]
            stored[name.replace(".0.", ".")] = torch.stack(every)
    for rank in range(saved.tensor):
        for stage in range(saved.pipeline):
            for chunk in range(saved.chunks):
                names = [name for name in main if on_stage(name, stage, chunk, saved)]
                if saved.tied and (stage, chunk) == (saved.pipeline - 1, saved.chunks - 1) != (0, 0):
                    names.append("embedding.word_embeddings.weight")  # the output layer's copy
                buckets: list[list[torch.Tensor]] = [[]]
                for name in reversed(names):
                    end = sum(part.size(1) for part in buckets[-1])
                    if end >= limit:
                        buckets.append([])
                        end = 0
                    both = [of_rank(values[name], name, rank, saved).flatten() for values in (main, moments)]
                    buckets[-1] += [torch.zeros(2, -end % 64), torch.stack(both)]
                for number, parts in enumerate(buckets):
                    start = f"optimizer.distributed.dp_group_idx_{rank + saved.tensor * stage}.gbuf_idx_{chunk}"
                    for state, values in zip(("param", "exp_avg"), torch.cat(parts, 1)):
                        stored[f"{start}.dtype_x.bucket_idx_{number}.{state}"] = values
    return stored, main, moments


class Strict(WholeTensors):
    """It takes offsets and shapes of all dimensions alone, as files do."""

    def read(self, key, offset, shape):
        assert len(offset) == len(shape) == len(self.shape(key))
        return super().read(key, offset, shape)


def opened(stored: dict) -> WholeTensors:
    return Strict(HERE, {name: lambda values=values: values for name, values in stored.items()})


def blocks(shape: tuple[int, ...], draw: random.Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, shape) of the whole, and of a random block."""
    offset = tuple(draw.randrange(length) for length in shape)
    return [((0,) * len(shape), shape), (offset, tuple(draw.randint(1, n - at) for at, n in zip(offset, shape)))]


def part(whole: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return whole[tuple(slice(at, at + length) for at, length in zip(offset, shape))]


ONE = Saved(1, 1, 1, 2, gated=False, tied=True)
IN_BUCKETS = [
    # grid and model, Transformer Engine's order, layers in one tensor, size of a bucket
    (ONE, False, True, 10**9),
    (Saved(2, 1, 1, 4, gated=True, tied=False), True, False, 250),
    (Saved(1, 2, 1, 4, gated=True, tied=True), False, False, 64),
    (Saved(2, 2, 2, 8, gated=False, tied=False), True, True, 400),
]


@pytest.mark.parametrize("saved, engine, stacked, limit", IN_BUCKETS)
def test_buckets_hold_what_core_puts_into_them(saved, engine, stacked, limit):
    stored, main, moments = written(saved, engine, stacked, limit)
    found, draw = Buckets(opened(stored), saved), random.Random(2)
    for state, values in (("param", main), ("exp_avg", moments)):
        every = {name: whole for name, whole in values.items() if not name.startswith("decoder.layers.")}
        for name in [name for name in main if name.startswith("decoder.layers.0.")]:
            layers = [values[name.replace(".0.", f".{n}.")] for n in range(saved.layers)]
            every[name.replace(".0.", ".")] = torch.stack(layers)
        for name, whole in every.items():
            for offset, shape in blocks(tuple(whole.shape), draw):
                assert found.read(state, name, offset, shape).equal(part(whole, offset, shape)), (name, state, offset)
    with pytest.raises(Refusal, match="dp_reshardable, and there is no decoder.final_layernorm.bias"):
        found.read("param", "decoder.final_layernorm.bias", (0,), (H,))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda stored: stored.popitem(), "its buckets are not those of its TP x PP"),  # param of the last bucket
        (lambda stored: stored.update({OF_LAST: stored[OF_LAST][:-1]}), "the order of parameters in its buckets"),
        (lambda stored: stored.update({OF_LAST: torch.cat([stored[OF_LAST], torch.zeros(1)])}), "the order of param"),
        (lambda stored: stored[OF_LAST].add_(1), "the order of parameters in its buckets"),
    ],
)
def test_buckets_of_another_order_or_length_are_refused(change, message):
    stored, *_ = written(ONE, False, True, 10**9)
    del stored[OF_LAST.replace("param", "exp_avg")]
    change(stored)
    with pytest.raises(Refusal, match=f"dp_reshardable, and {message}.*--no-load-optim"):
        Buckets(opened(stored), ONE)


@pytest.mark.parametrize("changes", [{"pipeline": 2, "layers": 3}, {"chunks": 2, "layers": 3}])
def test_buckets_of_unequal_stages_are_refused(changes):
    stored, *_ = written(ONE, False, True, 10**9)
    with pytest.raises(Refusal, match="its pipeline stages have different numbers of layers"):
        Buckets(opened(stored), replace(ONE, **changes))


def test_a_missing_bucket_is_refused():
    saved = replace(ONE, layers=4, gated=True)
    stored, *_ = written(saved, False, False, 64)
    Buckets(opened(stored), saved)
    last = max((key for key in stored if key.endswith(".param")), key=lambda key: int(key.split(".")[-2][11:]))
    del stored[last]
    with pytest.raises(Refusal, match="the order of parameters in its buckets is unknown"):
        Buckets(opened(stored), saved)


OF_LAST = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.param"


def test_main_weights_that_are_not_the_weights_are_refused_when_they_are_read():
    stored, *_ = written(ONE, False, True, 10**9)
    stored["decoder.layers.mlp.linear_fc2.weight"][1] += 1  # of a layer that does not decide the order
    found = Buckets(opened(stored), ONE)
    with pytest.raises(Refusal, match="main weights of decoder.layers.mlp.linear_fc2.weight differ from its weights"):
        found.read("param", "decoder.layers.mlp.linear_fc2.weight", (0, 0, 0), (2, H, 12))


WEIGHT, NORM = "decoder.layers.mlp.linear_fc1.weight", "decoder.layers.mlp.linear_fc1.layer_norm_weight"


def wanted(key: str, offset: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...], layers: bool = True):
    """core's request for a block; of one layer, it has no dimension for it."""
    local = shape[1:] if layers else shape
    data = torch.empty(local)
    return ShardedTensor(key, data, data.dtype, local, whole, offset, None, prepend_axis_num=int(layers))


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("prefix, older", [("", False), ("model.", True), ("module.", False)])
@pytest.mark.parametrize("parts", [None, (3, 4, 2), (1, 2, 3)])
def test_states_are_found_under_other_names_and_in_flat_parts(by_layer, prefix, older, parts):
    """``parts``: numbers of flat blocks of a state [3, 8, 6]; None: it is stored like the weight."""
    torch.manual_seed(0)
    draw, norm = random.Random(1), "decoder.layers.pre_mlp_layernorm.weight" if older else NORM
    kinds = {WEIGHT: (3, 8, 6), norm: (3, 6), "output_layer.weight": (8, 6)}
    stored, every = {}, {}
    for key, shape in kinds.items():
        for state in ("", "optimizer.state.exp_avg.", "optimizer.state.fp32_param."):
            whole = every[state, key] = torch.randn(shape)
            single = by_layer and len(shape) > 1 and "layers" in key
            for layer, values in enumerate(whole) if single else [("", whole)]:
                if parts and state:  # [X, Y] in blocks of [x, y] -> [X / x, Y / y, x * y]
                    counts = [parts[(3, 8, 6).index(length)] for length in values.shape]
                    sides = [side for count, n in zip(counts, values.shape) for side in (count, n // count)]
                    order = [*range(0, len(sides), 2), *range(1, len(sides), 2)]
                    values = values.reshape(sides).permute(order).reshape(*counts, -1)
                name = key.replace(".layers.", f".layers.{layer}.") if single else key
                stored[f"{state}{prefix}{name}"] = values
    source = Source(opened(stored))
    for state in ("", "optimizer.state.exp_avg.", "optimizer.state.param."):
        for key, saved_key in zip((WEIGHT, NORM, "output_layer.weight"), kinds):
            layers, whole = "layers" in key, every[state.replace(".param", ".fp32_param"), saved_key]
            for _ in range(4):
                offset = tuple(draw.randrange(length) for length in whole.shape)
                shape = tuple(draw.randint(1, n - at) for at, n in zip(offset, whole.shape))
                shape = (1, *shape[1:]) if layers else shape
                read = source.read(wanted(f"{state}{key}", offset, shape, tuple(whole.shape), layers))
                expected = part(whole, offset, shape)
                assert read.equal(expected[0] if layers else expected), (state, key, offset, shape)
    assert {*weights_in(source.stored)} == {key for key in stored if "optimizer" not in key}
    assert {WEIGHT, f"module.{WEIGHT}", f"model.{NORM}", "output_layer.weight"} <= source.requested
    assert "decoder.layers.pre_mlp_layernorm.weight" in source.requested and len(source.requested) == 12


def test_in_fp32_the_weights_are_the_main_weights():
    weight = torch.randn(2, 8, H)
    source = Source(opened({WEIGHT: weight}))
    request = wanted(f"optimizer.state.param.{WEIGHT}", (1, 2, 0), (1, 3, H), (2, 8, H))
    assert source.read(request).equal(weight[1, 2:5])
    request.key = f"optimizer.state.exp_avg.{WEIGHT}"
    with pytest.raises(Refusal, match=f"has no exp_avg of {WEIGHT} in its optimizer: pass --no-load-optim"):
        source.read(request)


@pytest.mark.parametrize("flat", [(2, 2, 8), (2, 2, 32), (1, 2, 2, 16), (3, 2, 8), (3, 2, 12)])
def test_flat_parts_that_do_not_make_the_weight_are_refused(flat):
    source = Source(opened({"output_layer.weight": torch.ones(8, H), "optimizer.state.m.output_layer.weight":
                            torch.ones(flat)}))  # fmt: skip
    with pytest.raises(Refusal, match=r"its weight \[8, 8\]"):
        source.read(wanted("optimizer.state.m.output_layer.weight", (0, 0), (8, H), (8, H), layers=False))


def test_another_shape_is_refused_unless_only_the_vocabulary_differs():
    source = Source(opened({"output_layer.weight": torch.arange(64.0).view(8, H)}))
    request = wanted("output_layer.weight", (6, 0), (4, H), (10, H), layers=False)
    with pytest.raises(Refusal, match=r"output_layer.weight is \[8, 8\] in the checkpoint, \[10, 8\] in this run"):
        source.read(request)
    request.allow_shape_mismatch = True  # core's sign for rows that pad the vocabulary
    assert source.read(request).tolist() == [[*range(48, 56)], [*range(56, 64)], [0] * 8, [0] * 8]
    request.global_shape = (10, H + 1)
    with pytest.raises(Refusal, match="is of another model"):
        source.read(request)
    with pytest.raises(Refusal, match="a-folder has no decoder.x: it is of another model"):
        source.read(wanted("decoder.x", (0,), (2,), (2,), layers=False))


def test_parts_of_tp_ranks_are_joined():
    whole = torch.arange(24.0).view(8, 3)
    halves = list(torch.cat([whole[:4].chunk(2)[n], whole[4:].chunk(2)[n]]) for n in range(2))
    assert join_parts(halves, "x.linear_fc1.weight", gated=True).equal(whole)
    assert join_parts(whole.chunk(2), "x.linear_fc1.weight", gated=False).equal(whole)
    assert join_parts(whole.chunk(3, 1), "x.linear_fc2.weight", gated=True).equal(whole)
    assert join_parts([whole, whole + 1], "x.norm.weight", gated=True).equal(whole)


@pytest.mark.parametrize("stored, found", [([7], 7), ([7, 8], [7, 8]), ({"a": 1}, {"a": 1}), (None, None)])
def test_core_stores_an_object_in_a_list(monkeypatch, stored, found):
    tensors = object.__new__(StoredTensors)
    tensors._tensors, tensors._places = {}, {"optimizer/shard_0_1": {None: "place"}}
    monkeypatch.setattr(StoredTensors, "_read", lambda self, name, at, complete: stored)
    assert tensors.object("optimizer") == found and tensors.object("other") is None
