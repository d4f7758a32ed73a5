# SPDX-License-Identifier: Apache-2.0
"""Parts of the program under the checker of types, in one process with a fake group of DP 2 x CP 2 x TP 2.

Prints one JSON object, which tests/unit/test_types.py reads: for each part "right" or the first line of its error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig
from spmd_types import I, P, R, V
from spmd_types.checker import typecheck
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron.context_parallel as cp
from megatron.context_parallel.fpdt.chunked_loss import chunked_linear_cross_entropy
from megatron.context_parallel.fpdt.chunked_mixer import ChunkedLinearLayer
from megatron.context_parallel.huggingface.decoder_loss import sum_for_averaged_gradients
from megatron.context_parallel.linear_attention.mixer import linear_attention
from megatron.context_parallel.linear_attention.rules import GATED_DELTA
from megatron.context_parallel.linear_attention.short_convolution import short_convolution
from megatron.platform import cpu
from tests import distribution_types

EVERY = {"dp": V, "cp": V, "tp": V}


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    cpu.run_core_on_cpu()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, context_parallel_size=2, create_gloo_process_groups=False
    )
    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
    }
    grid = {kind: cp.Grid.from_groups(**{kind: groups["cp"]}, context=groups["cp"], tensor=groups["tp"],
                                      data=groups["dp"]) for kind in ("ulysses", "ring")}  # fmt: skip
    with spmd.set_current_mesh({name: spmd.MeshAxis.of(group) for name, group in groups.items()}), typecheck():
        verdicts = {name: verdict(part) for name, part in parts(grid, groups)}
    print(json.dumps({"verdicts": verdicts, "ran": sorted(distribution_types.RAN)}))
    return 0


def verdict(part: Callable[[], Any]) -> str:
    try:
        part()
    except spmd.SpmdTypeError as error:
        return next(line for line in str(error).splitlines() if line.strip())
    return "right"


def parts(grids: dict[str, cp.Grid], groups: dict[str, Any]):
    """(name, function) of each correct part, and of the same part with an error."""
    whole = {"dp": V, "cp": R, "tp": V}
    for kind, grid in grids.items():
        for gathered in (False, True) if kind == "ring" else (False,):

            def attention(kv: dict = EVERY, q: dict = EVERY, grid: cp.Grid = grid, gathered: bool = gathered) -> None:
                made = [typed(torch.randn(16, 1, heads, 8), types) for heads, types in ((4, q), (2, kv), (2, kv))]
                cp.attention(*made, layout=cp.SequenceLayout(32, grid), mask=cp.Causal(), gather_keys=gathered)

            name = f"{kind}{' with gathered keys' if gathered else ''}"
            yield name, attention
            yield f"{name}, keys replicated", lambda attention=attention: attention(whole)
            yield f"{name}, queries partial over TP", lambda attention=attention: attention(q={**EVERY, "tp": P})
    layout = cp.SequenceLayout(32, grids["ring"])

    def linear(keys: dict = EVERY) -> None:
        shapes = ((1, 2, 8), keys), ((1, 2, 8), keys), ((1, 4, 8), EVERY), ((1, 4), EVERY), ((1, 4), EVERY)
        q, k, v, g, beta = (typed(torch.rand(16, *shape), types) for shape, types in shapes)
        linear_attention(q, k, v, g, beta, rule=GATED_DELTA, layout=layout)

    def convolution(weight: Any = R) -> None:
        types = {"dp": R, "cp": weight, "tp": V}
        parameters = (typed(torch.rand(*shape), types) for shape in ((8, 4), (8,)))
        short_convolution(typed(torch.rand(16, 1, 8), EVERY), *parameters, layout=layout, activation="silu")

    def chunked(weight: Any = R) -> None:
        types = {"dp": R, "cp": weight, "tp": V}
        shapes = (64 + 8, 16), (64, 4), (16, 32)  # heads: 2 of 8 for q and k, 4 of 8 for v
        parameters = [typed(torch.rand(*shape), types) for shape in shapes]

        def heads(mixed: torch.Tensor, gates: torch.Tensor) -> list[torch.Tensor]:
            q, k, v = (x.unflatten(2, (-1, 8)) for x in mixed.split((16, 16, 32), dim=2))
            return [q, k, v, *gates.unflatten(2, (2, 4)).unbind(2)]

        layer = ChunkedLinearLayer(
            project=lambda x, chunk: torch.nn.functional.linear(x, parameters[0]).split((64, 8), dim=2), heads=heads,
            output=lambda out, x, chunk: x + torch.nn.functional.linear(out.flatten(2), parameters[2]),
            parameters=parameters, weight=parameters[1], layout=cp.SequenceLayout(32, grids["ring"], chunks=4),
        )  # fmt: skip
        layer(typed(torch.rand(16, 1, 16), EVERY))

    yield "linear attention in chunks", chunked
    yield "linear attention in chunks, gradients not summed over CP", lambda: chunked(I)
    yield "linear attention", linear
    yield "linear attention, keys replicated", lambda: linear(whole)
    yield "short convolution", convolution
    yield "short convolution, gradients not summed over CP", lambda: convolution(I)
    for sp in (False, True):
        name = "chunked loss, TP-sp" if sp else "chunked loss"
        hidden = V if sp else I
        yield name, lambda sp=sp, hidden=hidden: loss(grids["ulysses"], hidden, sp)
        yield f"{name}, hidden states partial", lambda sp=sp: loss(grids["ulysses"], P, sp)
        yield (
            f"{name} by log-probabilities",
            lambda sp=sp, hidden=hidden: loss(grids["ulysses"], hidden, sp, later=True),
        )
        yield (
            f"{name}, differentiated without a sum",
            lambda sp=sp, hidden=hidden: loss(grids["ulysses"], hidden, sp, summed=()),
        )
        yield (
            f"{name}, not summed over CP",
            lambda sp=sp, hidden=hidden: loss(grids["ulysses"], hidden, sp, summed=("dp",)),
        )
        yield (
            f"{name}, the sum of all ranks differentiated",
            lambda sp=sp, hidden=hidden: loss(grids["ulysses"], hidden, sp, summed=("dp",), reported=True),
        )
        name = "MLP, TP-sp" if sp else "MLP"
        yield name, lambda sp=sp: mlp(groups["tp"], sp)
        yield f"{name}, gradients summed over DP alone", lambda sp=sp: mlp(groups["tp"], sp, reduced=("dp",))
    yield "MLP, row layer not reduced", lambda: mlp(groups["tp"], False, row=False)
    yield "MLP, TP-sp, norm not marked", lambda: mlp(groups["tp"], True, marked=False)
    for name, one, other in (("DP then CP", "dp", "cp"), ("DP twice", "dp", "dp")):

        def sums(one: str = one, other: str = other) -> None:
            gradient = typed(torch.randn(4), {"dp": P, "cp": P, "tp": V}, False)
            for axis in (one, other):
                dist.all_reduce(gradient, group=groups[axis])

        yield f"gradients summed over {name}", sums
    layout = cp.SequenceLayout(32, grids["ulysses"])
    for name, local in (("", V), (" of equal parts", R)):
        types = {**EVERY, "cp": local}
        yield f"gathered sequence{name}", lambda types=types: layout.gather(typed(torch.randn(16, 8), types))
        yield (
            f"sum for averaged gradients{name}",
            lambda types=types: sum_for_averaged_gradients(layout.grid.context, typed(torch.randn(()), types)),
        )
    for name, shared in (("summed over TP", R), ("not summed over TP", I)):

        def norm(shared: Any = shared) -> None:
            weight = typed(torch.ones(8), {"tp": shared, "cp": R, "dp": R})
            torch.nn.functional.rms_norm(typed(torch.randn(8, 1, 2, 8), EVERY), (8,), weight)

        yield f"norm of queries, weight {name}", norm


def typed(x: torch.Tensor, types: dict[str, Any], differentiable: bool = True) -> torch.Tensor:
    return spmd.assert_type(x.requires_grad_(differentiable and x.is_floating_point()), types)


def loss(
    grid: cp.Grid,
    hidden: Any,
    sp: bool,
    summed: tuple[str, ...] = ("dp", "cp"),
    reported: bool = False,
    later: bool = False,
) -> None:
    inputs = typed(torch.randn(4 if sp else 8, 1, 16), {"dp": V, "cp": V, "tp": hidden})
    weight = typed(torch.randn(32, 16), {"dp": R, "cp": R, "tp": V})
    others = [typed(x, {"dp": V, "cp": V, "tp": I}, False) for x in (torch.randint(0, 60, (8, 1)), torch.rand(8, 1))]
    settings = {"chunks": 2, "vocab_size": 60, "tensor": grid.tensor, "sequence_parallel": sp}
    if later:
        total = -(cp.log_probs(inputs, weight, others[0], **settings).log_probs * others[1]).sum()
    else:
        total = chunked_linear_cross_entropy(inputs, weight, *others, **settings)
    for axis in summed:
        total = spmd.reinterpret(total, {"dp": grid.data, "cp": grid.context}[axis].group, src=V, dst=P)
    if reported:
        total = spmd.all_reduce(total, grid.context.group, src=V, dst=R)
    total.backward()


def mlp(tp: Any, sp: bool, reduced: tuple[str, ...] = ("dp", "cp"), row: bool = True, marked: bool = True) -> None:
    """A norm and core's two linear layers; a parameter's type follows from what sums its gradient."""
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True, sequence_parallel=sp,
        tensor_model_parallel_size=2, context_parallel_size=2, gradient_accumulation_fusion=False,
    )  # fmt: skip
    more = {"config": config, "init_method": torch.nn.init.normal_, "bias": False, "tp_group": tp}
    with spmd.no_typecheck():
        up = tensor_parallel.ColumnParallelLinear(16, 32, gather_output=False, **more)
        down = tensor_parallel.RowParallelLinear(32, 16, input_is_parallel=True, skip_bias_add=False, **more)
        norm = torch.nn.LayerNorm(16)
    for parameter in (*norm.parameters(), *up.parameters(), *down.parameters()):
        split = V if getattr(parameter, "tensor_model_parallel", False) else R if sp and marked else I
        spmd.assert_type(parameter, {"tp": split, **{axis: R if axis in reduced else I for axis in ("dp", "cp")}})
    x = typed(torch.randn(4 if sp else 8, 1, 16), {"dp": V, "cp": V, "tp": V if sp else I})
    h = torch.nn.functional.gelu(up(norm(x))[0])
    out = down(h)[0] if row else torch.nn.functional.linear(h, down.weight)
    spmd.assert_type(x + out, {"dp": V, "cp": V, "tp": V if sp else I})


if __name__ == "__main__":
    sys.exit(main())
