# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies over ranks against dense logits on one process: values, losses, every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import megatron.context_parallel as cp
from megatron.context_parallel.huggingface import Fpdt, parallelize
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from tests.distributed import test_experts, test_gated_delta_net, test_latent_attention, test_mamba2
from tests.distributed.flags import P2, SP, STREAM, T2, ZERO1, ZERO3, fpdt
from tests.distributed.test_training import cp as over
from tests.distributed.training_runs import compare_gradients, make_job, train_job, wrong_by
from tests.errors import change_last_bits, limit_of_rounding, worst
from tests.families import LIMIT, ROUNDINGS, small_model
from tests.hugging_face import LENGTH, Outcome, averaged, errors, take_grads, whole_batch
from tests.pairs import also_in_full

# ---- The operation: hidden states and an output layer over TP.

S, B, H = 12, 3, 16


def operation(tensor: int, sequence_parallel: bool, vocab: int, dtype: torch.dtype, **options: Any) -> list[float]:
    """Errors of log-probabilities, entropies, and gradients of hidden states, weight and bias."""
    grid = cp.initialize_grid(tensor=tensor)
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    tokens = torch.randint(vocab, (S, B), generator=generator)
    wanted = torch.rand(S, B, generator=generator) > 0.4
    wanted[:, 1], wanted[3:6] = False, False  # a sample, and a span of tokens, without any
    hidden, weight, bias = (x.to(dtype).double() for x in (draw(S, B, H), draw(vocab, H), draw(vocab)))
    upstream = draw(2, S, B)

    whole = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    logits = whole[0] @ whole[1].t() + (whole[2] if options.get("bias", True) else 0)
    if (cap := options.get("softcap")) is not None:
        logits = cap * torch.tanh(logits / cap)
    every = (logits / options.get("temperature", 1.0)).log_softmax(-1)
    chosen = every.gather(2, tokens[..., None])[..., 0]
    expected = torch.stack((chosen, -(every.exp() * every).sum(-1))) * wanted
    (expected * upstream).sum().backward()

    rows = -(-vocab // (4 * tensor)) * 4  # padded
    mine = slice(rows * grid.tensor.rank, rows * (grid.tensor.rank + 1))
    part = slice(None)
    if sequence_parallel:
        part = slice(S // tensor * grid.tensor.rank, S // tensor * (grid.tensor.rank + 1))
    padding = rows * tensor - vocab
    own = [hidden[part], F.pad(weight, (0, 0, 0, padding), value=9.0)[mine], F.pad(bias, (0, padding), value=9.0)[mine]]
    own = [x.to(dtype).clone().requires_grad_() for x in own]
    settings = {name: value for name, value in options.items() if name != "bias"}
    scores = cp.log_probs(
        own[0], own[1], tokens, wanted, bias_V=own[2] if options.get("bias", True) else None, vocab_size=vocab,
        entropy=True, tensor=grid.tensor, sequence_parallel=sequence_parallel, **settings,
    )  # fmt: skip
    result = torch.stack(scores[:2])
    (result * upstream.to(result.dtype)).sum().backward()
    local = torch.zeros_like(hidden)  # a rank's tokens may be all masked
    local[part] = whole[0].grad[part] - own[0].grad
    pairs = [(result, expected), (whole[0].grad - local, whole[0].grad)]
    for index in (1, 2) if options.get("bias", True) else (1,):
        grads = [torch.empty_like(own[index]) for _ in range(tensor)]
        dist.all_gather(grads, own[index].grad, group=grid.tensor.group)
        assert not torch.cat(grads)[vocab:].any()
        pairs.append((torch.cat(grads)[:vocab], whole[index].grad))
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]


OPTIONS = [
    {},
    {"chunks": 3, "bias": False},
    {"chunks": 5, "softcap": 3.0, "temperature": 0.7},
    {"chunks": 1000, "temperature": 1.3, "bias": False},
]


@pytest.mark.parametrize("tensor, sequence_parallel", [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("vocab", [40, 37])
@pytest.mark.usual(4, 6, 11, 29)
def test_the_operation_in_float64(pool, tensor, sequence_parallel, options, vocab):
    result = pool.run(operation, tensor, tensor, sequence_parallel, vocab, torch.float64, **options)
    assert worst(result) < 1e-12, result


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 4e-6), (torch.bfloat16, 2e-2)])
def test_softmax_is_in_fp32(pool, dtype, tolerance):
    result = pool.run(operation, 2, 2, True, 37, dtype, bias=False, chunks=4)
    assert worst(result) < tolerance, result


def test_a_temperature_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="temperature 0 is not above 0"):
        cp.log_probs(torch.ones(2, 1, 4), torch.ones(3, 4), torch.zeros(2, 1, dtype=torch.int64), temperature=0)


class Sizes(TorchDispatchMode):
    """Bytes of the largest tensor that an operation makes, except the weight and its gradients."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.largest = weight.numel(), 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, Tensor) and x.numel() != self.weight:
                self.largest = max(self.largest, x.numel() * x.element_size())
        return made


def largest_tensor(length: int, hidden: int, vocab: int, dense: bool) -> int:
    """Of a forward and a backward pass in bf16, without memory for the numbers (device meta)."""
    with torch.device("meta"):
        states = torch.empty(length, 1, hidden, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab, hidden, dtype=torch.bfloat16, requires_grad=True)
        tokens = torch.zeros(length, 1, dtype=torch.int64)
    with Sizes(weight) as sizes:
        if dense:
            every = (states @ weight.t()).float().log_softmax(-1)
            chosen, entropy = every.gather(2, tokens[..., None])[..., 0], -(every.exp() * every).sum(-1)
        else:
            chosen, entropy, _ = cp.log_probs(states, weight, tokens, entropy=True)
        (chosen.sum() + entropy.sum()).backward()
    return sizes.largest


def test_no_tensor_above_a_gibibyte_at_128k_tokens_and_152064_words():
    ours, dense = (largest_tensor(131072, 3584, 152064, dense) for dense in (False, True))
    print(f"largest tensor: {ours / 2**20:.0f} MiB, with complete logits {dense / 2**30:.1f} GiB")
    assert ours < 2**30 < 70 * 2**30 < dense


# ---- Models of transformers. Every document is run alone on one process, with complete logits.

KINDS = ("llama", "mistral", "mixtral", "deepseek_v3", "qwen3_next", "mamba2", "gemma2")
WITH_STATE = ("qwen3_next", "mamba2")
FLOAT64 = ("llama", "mistral")  # transformers computes states, routers and softmax of soft-caps in fp32
TEMPERATURE = 0.8


def ends_of(batch: dict[str, Tensor]) -> list[list[int]]:
    if "position_ids" not in batch:
        return [[LENGTH]] * len(batch["input_ids"])
    return [[*(row[1:] == 0).nonzero().flatten().add(1).tolist(), LENGTH] for row in batch["position_ids"]]


def loss_of(values: Tensor, ends: list[list[int]]) -> Tensor:
    """Pairs of documents by the sums of their log-probabilities, as in DPO, and entropies of all tokens."""
    sums = torch.stack([
        part.sum() for row, cuts in zip(values[0], ends) for part in row.tensor_split(cuts[:-1])
    ])  # fmt: skip
    return -F.logsigmoid(0.05 * (sums[:-1] - sums[1:])).sum() + 0.02 * values[1].sum()


def dense(model: torch.nn.Module, batch: dict[str, Tensor]) -> Outcome:
    """Log-probabilities and entropies [2, b, s] of transformers, and the gradients of :func:`loss_of`."""
    ends, rows = ends_of(batch), []
    for tokens, labels, cuts in zip(batch["input_ids"], batch["labels"], ends):
        parts = []
        for a, b in zip([0, *cuts], cuts):
            every = (model(input_ids=tokens[None, a:b]).logits[0] / TEMPERATURE).log_softmax(-1)
            targets = F.pad(labels[a + 1 : b], (0, 1), value=-100)
            chosen = every.gather(1, targets.clamp(min=0)[:, None])[:, 0]
            parts.append(torch.stack((chosen, -(every.exp() * every).sum(-1))) * (targets != -100))
        rows.append(torch.cat(parts, dim=1))
    values = torch.stack(rows, dim=1)
    loss = loss_of(values, ends)
    loss.backward()
    return Outcome(values.detach(), loss.detach(), take_grads(model))


def model_and_batch(kind: str, dtype: torch.dtype, packed: bool, samples: int) -> tuple[Any, dict[str, Tensor]]:
    model, batch = small_model(kind).to(dtype), whole_batch(packed, batch=samples)
    batch["input_ids"] = batch["input_ids"] % 80 + 3
    batch["labels"] = torch.where(batch["labels"] == -100, -100, batch["input_ids"])
    if dtype == torch.float64 and kind not in WITH_STATE:
        model.set_attn_implementation("sdpa")  # eager's softmax is fp32
    return model, batch


def over_ranks(model: Any, batch: dict[str, Tensor], context: Any, gather: bool = True) -> Outcome:
    ends, wrapper = ends_of(batch), None
    scores = context.log_probs(batch, temperature=TEMPERATURE, entropy=True, gather=gather, model=wrapper)
    values = torch.stack(scores[:2])
    if gather:
        loss = loss_of(values, ends)
    else:  # the same by sums over ranks: each rank knows to which document its tokens belong
        layout = context.layout
        documents = torch.zeros(values.shape[1:2] + (LENGTH,), dtype=torch.int64)
        for row, cuts in enumerate(ends):
            documents[row, cuts[:-1]] = 1
        first = torch.tensor([0, *(len(cuts) for cuts in ends[:-1])]).cumsum(0)
        documents = layout.shard(documents.cumsum(1) + first[:, None], dim=1)
        sums = values.new_zeros(sum(map(len, ends))).index_add(0, documents.flatten(), values[0].flatten())
        sums, entropy = context.total(sums), context.total(values[1].sum())
        loss = -F.logsigmoid(0.05 * (sums[:-1] - sums[1:])).sum() + 0.02 * entropy
        values = layout.gather(values.detach(), dim=2)
    loss.backward()
    return Outcome(values.detach(), loss.detach(), averaged(take_grads(model), context.grid.context.group))


def compare(
    kind: str,
    ulysses: int,
    ring: int,
    packed: bool = True,
    dtype: torch.dtype = torch.float32,
    fpdt: Fpdt | None = None,
    gather: bool = True,
    mistake: Callable[[], None] | None = None,
    **options: Any,
) -> dict[str, float]:
    grid = cp.initialize_grid(ulysses=ulysses, ring=ring)
    model, batch = model_and_batch(kind, dtype, packed, 1 if options.get("balance") == "documents" else 2)
    expected = dense(model, batch)
    if mistake is not None:
        mistake()
    if dtype == torch.float64:
        options["kernel"] = "math"
    with parallelize(model, grid, seq_length=LENGTH, fpdt=fpdt, **options) as context:
        result = over_ranks(model, batch, context, gather)
    found = errors(result, expected)
    if dtype == torch.float32 and worst(found.values()) > LIMIT and mistake is None:
        change_last_bits(model.parameters())  # rounding may be the cause, as in tests/families.py
        rounding = ROUNDINGS * worst(errors(dense(model, batch), expected).values())
        found = {name: error * min(1.0, LIMIT / rounding) for name, error in found.items()}
    return found


GRIDS = [(1, 1), (2, 1), (1, 2), (4, 1), (1, 3), (2, 2), (1, 4), (4, 2), (2, 4), (1, 8)]
PLACES = [(grid, {"balance": balance}) for grid in GRIDS for balance in ("zigzag", "contiguous", "documents")]
MATRIX = [
    (kind, grid, {**place, "packed": packed})
    for index, (grid, place) in enumerate(PLACES)
    for number, kind in enumerate(KINDS)
    for packed in ((True, False) if place["balance"] != "documents" else (True,))
    if grid[0] < 4 or kind not in WITH_STATE  # these have two heads
]
USUAL = [
    ("llama", (2, 2), {}),
    ("qwen3_next", (1, 2), {}),
    ("gemma2", (2, 1), {}),
    ("mistral", (2, 1), {"fpdt": Fpdt(chunk_size=16)}),
    ("llama", (1, 2), {"gather": False}),
    ("mixtral", (1, 2), {}),
    ("mamba2", (1, 2), {}),
    ("deepseek_v3", (2, 2), {"packed": False}),
    ("gemma2", (2, 2), {"gather": False}),
    ("mistral", (2, 2), {"fpdt": Fpdt(chunk_size=16), "gather": False}),
    ("mixtral", (1, 4), {"fpdt": Fpdt(24, offload=False, ffn_chunks=3), "packed": False}),
    ("llama", (2, 2), {"loss_chunks": 5}),
]


@pytest.mark.parametrize("kind, grid, settings", [*USUAL, *also_in_full(*MATRIX)])
@pytest.mark.usual(0, 1, 2, 3, 4)
def test_models_of_transformers(pool, kind, grid, settings):
    result = pool.run(compare, grid[0] * grid[1], kind, *grid, **settings)
    assert worst(rank.values() for rank in result) < 1e-5, result[0]


@pytest.mark.parametrize(
    "kind, grid, settings",
    [("llama", (2, 2), {}), *also_in_full(*(case for case in MATRIX if case[0] in FLOAT64 and case[1] != (1, 3)))],
)
def test_models_of_transformers_in_float64(pool, kind, grid, settings):
    """Not on three ranks: norms of transformers have fp32 gradients, which only powers of two scale exactly."""
    result = pool.run(compare, grid[0] * grid[1], kind, *grid, dtype=torch.float64, **settings)
    assert worst(rank.values() for rank in result) < 1e-9, result[0]


# ---- Models of megatron-core. If log-probabilities weigh -1, the loss is the cross entropy, also in training.

STREAMED, SHARDED = fpdt(22, STREAM), f"{ZERO3} --loss-chunks 3"
DENSE = "--num-layers 2 --group-query-attention --num-query-groups 2 --eod-mask-loss"
WINDOWS = f"{DENSE} --window-size 11,0 --window-attn-skip-freq [0,1]"
MODELS = (WINDOWS, test_experts.MIXTRAL, test_latent_attention.MLA, test_gated_delta_net.SHORT, test_mamba2.SHORT)
GRIDS_OF_CORE = [
    (2, T2), (2, over(2, 1)), (2, over(1, 2)), (4, over(2, 2)), (4, over(4, 1)), (4, over(1, 4, "contiguous")),
    (4, f"{SP} {over(2, 1)}"), (8, f"{SP} {over(2, 2)}"), (8, f"{T2} {P2} {over(1, 2)}"), (1, "--loss-chunks 7"),
    (2, ZERO1), (2, "--zero-stage 2 --loss-chunks 3"), (4, f"{over(1, 2)} {SHARDED}"), (4, f"{SP} {SHARDED}"),
    (2, f"{fpdt(22)} {SHARDED}"),
    (2, f"{fpdt(16)} {over(2, 1)}"), (4, f"{STREAMED} {over(2, 2)}"), (4, f"{SP} {fpdt(22)} {P2}"),
]  # fmt: skip
FEW = [(2, SP), (2, over(1, 2)), (4, over(2, 2)), (4, f"{P2} {over(1, 2)}"), (2, fpdt(22)), (4, f"{SP} {over(1, 2)}")]


def uneven(model: str, grid: str) -> str:
    """The grid, with stages for three layers."""
    return f"{grid} {test_gated_delta_net.UNEVEN}" if "--num-layers 3" in model and P2 in grid else grid


CORE = [
    (2, DENSE, SP),
    (4, DENSE, f"{SP} {over(1, 2)} {STREAMED}"),
    (4, DENSE, f"{P2} {over(2, 1)} {ZERO1}"),
    *also_in_full(
        *((world, DENSE, grid) for world, grid in GRIDS_OF_CORE),
        *((world, model, uneven(model, grid)) for model in MODELS for world, grid in FEW),
    ),
]


def train_by_scores(
    flags: str,
    options: dict[str, Any],
    entropy: float = 0.0,
    steps: int = 1,
    change: Callable[[Any], Any] | None = None,
) -> tuple:
    """As `run_training`, with the loss -(log-probability + ``entropy`` x entropy) of the tokens that count.

    ``change`` is called with the job before its first step.
    """
    from megatron.training import step
    from megatron.training.checkpoint.checkpoint import unwrap

    job = make_job(flags)
    for chunk in job.model_chunks:
        unwrap(chunk).scoring, unwrap(chunk).score_options = True, options
    if change is not None:
        change(job)

    def loss(mask: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total, tokens = -(scores[0] + entropy * scores[-1]).sum(), mask.sum(dtype=torch.float64)
        return total, tokens.to(torch.int), torch.stack((total.detach().double(), tokens))

    with mock.patch.object(step, "sum_of_losses", loss):
        losses, _, grads = train_job(job, steps)
    return losses, grads


@pytest.mark.parametrize("world, model, grid", CORE)
@pytest.mark.usual(0, 1)
def test_models_of_core(pool, on_one_process, reference, world, model, grid):
    losses, _, grads = on_one_process(model, True)
    changed = {"temperature": 0.8, "entropy": True}
    regular = reference(train_by_scores, model, changed, 0.1)
    for options, entropy, (expected, expected_grads) in (({}, 0.0, (losses, grads)), (changed, 0.1, regular)):
        results = pool.run(train_by_scores, world, f"{model} {grid}", options, entropy, timeout=180)
        assert all(mine == pytest.approx(expected[:1], rel=1e-6) for mine, _ in results)
        if model != test_gated_delta_net.SHORT:
            compare_gradients([mine for _, mine in results], expected_grads, 1e-5)
            continue
        # Gradients of the decay's parameters are sums over all tokens that cancel: last bits of weights move them by
        # 1.3e-4, on one process.
        last_bit = test_gated_delta_net.last_bit
        moved = pool.run(train_by_scores, 1, model, options, entropy, 1, last_bit, timeout=120)[0][1]
        for _, mine in results:
            for name in mine:
                limit = limit_of_rounding(1e-5, wrong_by(moved, expected_grads, name), 5e-4)
                assert wrong_by(mine, expected_grads, name) < limit, name


# ---- Mistakes that these comparisons must see.


def shift_on_each_rank() -> None:
    """Labels are shifted after the cut, so that the token behind a shard's border is lost."""
    right = SequenceLayout.shard

    def shard(self: SequenceLayout, x: Tensor, dim: int = 0) -> Tensor:
        part = right(self, x, dim)
        shifted = x.dtype == torch.int64 and x.dim() == 2 and bool((x[:, -1] == -100).all())
        return F.pad(right(self, F.pad(x, (1, 0))[:, :-1], dim), (0, 1), value=-100)[:, 1:] if shifted else part

    SequenceLayout.shard = shard


def let_documents_touch() -> None:
    """The first token of a document is predicted from the document before it."""
    from megatron.context_parallel.huggingface import parallel

    parallel.only_within_documents = dict


def mean_on_each_rank() -> None:
    """A rank's share of a sum is not its share of the mean: the gradient of the gathered tokens is not summed."""
    from megatron.context_parallel.layout import sequence_layout

    right = sequence_layout._Gather.backward

    def backward(ctx: Any, grad: Tensor) -> tuple:
        found, *others = right(ctx, grad)
        return found / ctx.layout.grid.context.size, *others

    sequence_layout._Gather.backward = staticmethod(backward)


@pytest.mark.parametrize("mistake", [shift_on_each_rank, let_documents_touch, mean_on_each_rank])
def test_mistakes_are_seen(pool, mistake):
    result = pool.run(compare_with, 2, mistake)
    assert worst(rank.values() for rank in result) > 1e-3, result[0]


def compare_with(mistake: Callable[[], None]) -> dict[str, float]:
    from megatron.context_parallel.huggingface import parallel
    from megatron.context_parallel.layout import sequence_layout

    before = SequenceLayout.shard, parallel.only_within_documents, sequence_layout._Gather.backward
    try:
        return compare("llama", 1, 2, mistake=mistake)
    finally:
        SequenceLayout.shard, parallel.only_within_documents = before[:2]
        sequence_layout._Gather.backward = staticmethod(before[2])
