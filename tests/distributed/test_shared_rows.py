# SPDX-License-Identifier: Apache-2.0
"""Rows that share their prompt, computed as one tree, against transformers with each row alone: every gradient."""

from __future__ import annotations

from time import perf_counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import megatron.context_parallel as cp
from megatron.context_parallel.huggingface import Fpdt, packed_rows, parallelize
from megatron.context_parallel.layout.shared_rows import share
from tests.distributed.test_log_probs import FLOAT64, TEMPERATURE, WITH_STATE, loss_of
from tests.errors import change_last_bits, worst
from tests.families import LIMIT, ROUNDINGS, small_model
from tests.hugging_face import Outcome, averaged, errors, take_grads, tiny_model
from tests.pairs import by_pairs
from tests.properties import examples

LENGTH = 48


def group(kind: str = "group", seed: int = 7) -> dict[str, Tensor]:
    """Rows that share a prompt of 31 tokens, padded on the left; labels are those of the answers.

    ``turns``: two of them also share the first answer; one more row shares nothing, one is there twice.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(3, 80, shape, generator=generator)  # noqa: E731
    prompt = draw(31)
    rows = [torch.cat((prompt, draw(n))) for n in (5, 17, 1, 9)]
    if kind == "turns":
        rows += [torch.cat((rows[1], draw(n))) for n in (3, 1)] + [draw(20), rows[0]]
    longest = max(map(len, rows))
    left = [longest - len(row) for row in rows]
    tokens = torch.stack([F.pad(row, (n, 0)) for n, row in zip(left, rows)])
    mask = torch.stack([F.pad(torch.ones_like(row), (n, 0)) for n, row in zip(left, rows)])
    labels = torch.where((mask == 1) & (mask.cumsum(1) > 29), tokens, -100)
    labels[0, -2] = -100  # a row that does not want what another row wants
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def alone(model: torch.nn.Module, batch: dict[str, Tensor]) -> Outcome:
    """Log-probabilities and entropies [2, b, s] of transformers, row after row, and the gradients of a loss."""
    rows = []
    for tokens, mask, labels in zip(*(batch[name] for name in ("input_ids", "attention_mask", "labels"))):
        real = int(mask.sum())
        every = (model(input_ids=tokens[None, -real:]).logits[0] / TEMPERATURE).log_softmax(-1)
        targets = F.pad(labels[-real:][1:], (0, 1), value=-100)
        chosen = every.gather(1, targets.clamp(min=0)[:, None])[:, 0]
        values = torch.stack((chosen, -(every.exp() * every).sum(-1))) * (targets != -100)
        rows.append(F.pad(values, (len(tokens) - real, 0)))
    return finished(model, torch.stack(rows, dim=1))


def in_float64(model: torch.nn.Module) -> None:
    """Of transformers' modules, attention and norms compute in fp32: a sum of rows' gradients would then be rounded."""
    model.set_attn_implementation("sdpa")
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            scale = lambda x, own=module: (x.pow(2).mean(-1, keepdim=True) + own.variance_epsilon).rsqrt()  # noqa: E731
            module.forward = lambda x, own=module, scale=scale: own.weight * (x * scale(x))


def finished(model: torch.nn.Module, values: Tensor) -> Outcome:
    loss = loss_of(values, [[values.size(2)]] * values.size(1))
    loss.backward()
    return Outcome(values.detach(), loss.detach(), take_grads(model))


def compare(
    kind: str, ulysses: int, ring: int, dtype: torch.dtype, batch: dict[str, Tensor], fpdt: int = 0,
    mistake: Any = None, **options: Any,
) -> tuple[dict[str, float], str]:  # fmt: skip
    grid, model = cp.initialize_grid(ulysses=ulysses, ring=ring), small_model(kind).to(dtype)
    if dtype == torch.float64:
        options["kernel"] = "math"
        in_float64(model)
    expected = alone(model, batch)
    chunks = Fpdt(chunk_size=fpdt) if fpdt else None
    with parallelize(model, grid, seq_length=LENGTH, fpdt=chunks, **options) as context, mistake or mock.MagicMock():
        scores = context.log_probs(batch, temperature=TEMPERATURE, entropy=True, shared=True)
        result = finished(model, torch.stack(scores[:2]))
        result.grads = averaged(result.grads, grid.context.group)
    found = errors(result, expected)
    if dtype == torch.float32 and worst(found.values()) > LIMIT and mistake is None:
        change_last_bits(model.parameters())  # rounding may be the cause
        rounding = ROUNDINGS * worst(errors(alone(model, batch), expected).values())
        found = {name: error * min(1.0, LIMIT / rounding) for name, error in found.items()}
    return found, context.shares


def let_siblings_in() -> Any:
    return mock.patch.object(
        cp.Tree, "paths", property(lambda tree: tuple(tuple(range(i + 1)) for i in range(len(tree))))
    )


def in_order() -> Any:
    return mock.patch.object(packed_rows, "restart", lambda positions, tree: positions)


GRIDS = [(1, 1), (2, 1), (1, 2), (4, 1), (1, 3), (2, 2), (1, 4), (4, 2), (2, 4), (1, 8)]
KINDS = ("llama", "mistral", "mixtral", "deepseek_v3", "qwen3_next", "mamba2")
CASES = [
    (kind, *grid, balance, ("group", "turns")[(i + j + n) % 2], 8 if kind in FLOAT64 and (i + j) % 3 == 1 else 0)
    for i, grid in enumerate(GRIDS)
    for j, balance in enumerate(("zigzag", "contiguous", "documents"))
    for n, kind in enumerate(KINDS)
    if grid[0] < 4 or kind not in WITH_STATE  # these have two heads
]


@pytest.mark.parametrize(
    "kind, ulysses, ring, balance, rows, fpdt",
    by_pairs(CASES, lambda kind, u, r, *others: {(kind, u, r), *others}),
)
@pytest.mark.usual(0, 7, 14, 22)
def test_a_tree_has_the_gradients_of_separate_rows(pool, kind, ulysses, ring, balance, rows, fpdt):
    dtype, limit = (torch.float64, 1e-9) if kind in FLOAT64 else (torch.float32, 1e-5)
    case = (kind, ulysses, ring, dtype, group(rows), fpdt)
    for found, shares in pool.run(compare, ulysses * ring, *case, balance=balance, timeout=120):
        assert worst(found.values()) < limit, found
        assert "tokens" in shares


@pytest.mark.parametrize("seed, mistake", [(8, let_siblings_in), (9, in_order)])
def test_mistakes_are_noticed(pool, seed, mistake):
    """A sibling's tokens let in; positions in the order of the tree."""
    found, _ = pool.run(wrong, 1, seed, mistake)[0]
    assert worst(found.values()) > 1e-3


def wrong(seed: int, mistake: Any) -> tuple[dict[str, float], str]:
    return compare("llama", 1, 1, torch.float64, group(seed=seed), mistake=mistake())


def cost(length: int, prompt: int, hidden: int) -> dict[bool, tuple[int, float]]:
    """FLOPs counted operation by operation, and seconds, of a step of 8 answers: as a tree, and as separate rows."""
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 1, "head_dim": 64}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    model = tiny_model("llama", **sizes, **heads, max_position_embeddings=length)
    tokens = torch.randint(3, 90, (8, length))
    tokens[:, :prompt] = tokens[0, :prompt]
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(length) < prompt, -100)}
    costs = {}
    with parallelize(model, cp.initialize_grid(), seq_length=length) as context:
        for shared in (True, False):
            with FlopCounterMode(display=False) as counter:
                context.log_probs(batch, shared=shared).log_probs.sum().backward()
            times = []
            for _ in range(3):
                start = perf_counter()
                context.log_probs(batch, shared=shared).log_probs.sum().backward()
                times.append(perf_counter() - start)
            costs[shared] = counter.get_total_flops(), min(times)
    return costs


def test_the_flops_of_a_group_follow_its_tokens_and_pairs(pool):
    costs = pool.run(cost, 1, 128, 96, 128)[0]
    tokens, separate = 95 + 8 * 33, 8 * 128
    pairs, alone_pairs = cp.Tree(range(95, 360, 33), (-1, *[0] * 8)).pairs, separate * 129 / 2
    each = [48 * 2 * 128**2 * n + 12 * 128 * p for n, p in ((tokens, pairs), (separate, alone_pairs))]
    assert costs[True][0] / costs[False][0] == pytest.approx(each[0] / each[1], rel=0.03)


@pytest.mark.lab
def test_a_group_of_eight_with_a_prompt_of_three_quarters(pool):
    """2.75 of 8 parts of the tokens, 2.03 of 4 of the pairs: at most 0.35 where products of weights are most work."""
    costs = pool.run(cost, 1, 512, 384, 2048, timeout=300)[0]
    flops, seconds = (costs[True][i] / costs[False][i] for i in (0, 1))
    print(f"FLOPs {flops:.3f}, time {seconds:.3f}")
    assert flops < 0.35 and seconds < 0.5


rows_strategy = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=9)), min_size=1, max_size=7
)


@given(rows_strategy, st.sampled_from((1, 2, 4)), st.data())
@examples(60)
def test_rows_of_any_tokens_share_what_they_have_in_common(given_rows, least, data):
    rows: list[np.ndarray] = []
    for other, tokens in given_rows:  # each continues the beginning of an earlier one
        begin = rows[other % len(rows)][: data.draw(st.integers(0, 12))] if rows else []
        rows.append(np.array([*begin, *tokens]))
    limits = data.draw(st.none() | st.just([data.draw(st.integers(0, len(row))) for row in rows]))
    result = share(rows, least, limits)
    following: dict[int, int] = {}
    for row, places in zip(rows, result.places):
        assert result.tokens[places].tolist() == row.tolist()
        segments = np.searchsorted(np.array(tuple(result.tree)), places, side="right").tolist()
        path = tuple(dict.fromkeys(segments))
        assert path == result.tree.paths[path[-1]]
        lengths = [stop - start for start, stop in result.tree.spans]
        assert all(segments.count(segment) == lengths[segment] for segment in path[:-1])
        for place, then in zip(places.tolist(), [*row[1:].tolist(), -1]):
            assert following.setdefault(place, then) == then
    if limits is not None:
        held = np.concatenate(result.places).tolist()
        assert all(held.count(at) == 1 for places, most in zip(result.places, limits) for at in places[most:].tolist())
