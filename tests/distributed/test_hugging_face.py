# SPDX-License-Identifier: Apache-2.0
"""Models of transformers over ranks against transformers on one process: logits, loss, every gradient."""

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megatron.context_parallel as cp
from megatron.context_parallel.huggingface import Fpdt, parallelize
from tests.errors import worst
from tests.hugging_face import (
    KINDS,
    LENGTH,
    UNPACKED,
    Outcome,
    averaged,
    errors,
    on_one_process,
    take_grads,
    tiny_model,
    whole_batch,
)  # fmt: skip
from tests.pairs import also_in_full

GRIDS = {"U2": (2, 1), "R2": (1, 2), "U2 x R2": (2, 2)}


def over_ranks(model, batch, context) -> Outcome:
    """Like `on_one_process`, for a model distributed over ranks."""
    inputs = context.shard({name: x for name, x in batch.items() if name != "labels"})
    with torch.no_grad():
        logits = context.gather(model(**inputs).logits, inputs)
    loss = model(**context.shard(batch)).loss
    loss.backward()
    return Outcome(logits, loss.detach(), averaged(take_grads(model), context.grid.context.group))


def compare(
    kind, ulysses, ring, packed=True, dtype=torch.float32, samples=2, fpdt=None, sizes=None, **options
) -> dict[str, float]:
    grid = cp.initialize_grid(ulysses=ulysses, ring=ring)
    model, batch = tiny_model(kind, dtype, **(sizes or {})), whole_batch(packed, batch=samples)
    if dtype == torch.float64:
        model.set_attn_implementation("sdpa")  # eager's softmax is fp32
    expected = on_one_process(model, batch)
    with parallelize(model, grid, seq_length=LENGTH, fpdt=fpdt, **options) as context:
        result = over_ranks(model, batch, context)
    return errors(result, expected)


USUAL = [(kind, list(GRIDS)[index % len(GRIDS)]) for index, kind in enumerate(KINDS)]
OTHERS = [(kind, grid) for kind in KINDS for grid in GRIDS if (kind, grid) not in USUAL]


@pytest.mark.parametrize("kind, grid", [*USUAL, *also_in_full(*OTHERS)])
@pytest.mark.usual(1, 3, 4, 6, 9, 10, 12, 13)
def test_every_architecture(pool, kind, grid):
    result = pool.run(compare, GRIDS[grid][0] * GRIDS[grid][1], kind, *GRIDS[grid], packed=kind not in UNPACKED)
    assert worst(rank.values() for rank in result) < 1e-5, result[0]


LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 3.0], "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
SHORT = {"max_position_embeddings": 16}
CHUNKS = Fpdt(chunk_size=16)


@pytest.mark.parametrize(
    "world, settings",
    [
        pytest.param(4, {"kind": "llama", "dtype": torch.float64, "kernel": "math"}, id="float64"),
        pytest.param(4, {"kind": "qwen3", "fpdt": CHUNKS}, id="FPDT"),
        pytest.param(2, {"kind": "mistral", "fpdt": Fpdt(24, offload=False, ffn_chunks=3), "ulysses": 1}, id="FPDT R2"),
        pytest.param(4, {"kind": "llama", "ulysses": 4}, id="more ranks than KV heads"),
        pytest.param(4, {"kind": "llama", "balance": "contiguous"}, id="contiguous"),
        pytest.param(
            2,
            {"kind": "llama", "ulysses": 1, "packed": False, "sizes": SHORT | {"rope_parameters": DYNAMIC}},
            id="dynamic NTK",
        ),
        pytest.param(
            2,
            {"kind": "phi3", "ulysses": 1, "packed": False, "sizes": {"rope_parameters": LONGROPE}},
            id="LongRoPE",
        ),
        *also_in_full(
            (4, {"kind": "deepseek_v32", "fpdt": CHUNKS}),
            (2, {"kind": "deepseek_v32", "fpdt": Fpdt(24, recompute=True), "ulysses": 1, "packed": False}),
            (4, {"kind": "mixtral", "fpdt": CHUNKS}),
            (4, {"kind": "phi3", "fpdt": Fpdt(16, recompute=True)}),
            (4, {"kind": "qwen3", "fpdt": CHUNKS, "dtype": torch.float64, "kernel": "math"}),
            (2, {"kind": "gemma2", "loss_chunks": 1}),
            (4, {"kind": "llama", "balance": "documents", "samples": 1}),
            (4, {"kind": "llama", "balance": "documents", "samples": 1, "fpdt": CHUNKS}),
            (4, {"kind": "llama", "sizes": {"num_key_value_heads": 1}}),
        ),
    ],
)  # fmt: skip
@pytest.mark.usual(2, 5, 6)
def test_settings(pool, world, settings):
    ulysses = settings.get("ulysses", 2)
    result = pool.run(compare, world, **(settings | {"ulysses": ulysses, "ring": world // ulysses}))
    limit = 1e-10 if settings.get("dtype") == torch.float64 else 1e-5
    assert worst(rank.values() for rank in result) < limit, result[0]


def compare_padded() -> dict[str, float]:
    grid = cp.initialize_grid(ulysses=2, ring=2)
    model, batch = tiny_model("llama"), whole_batch(packed=False)
    kept = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 13]])
    batch |= {"attention_mask": kept.long(), "labels": batch["labels"].masked_fill(~kept, -100)}
    expected = on_one_process(model, batch)
    with parallelize(model, grid, seq_length=LENGTH) as context:
        result = over_ranks(model, batch, context)
    for outcome in (result, expected):
        outcome.logits[~kept] = 0  # they are not used
    return errors(result, expected)


def test_padding_at_the_right(pool):
    assert worst(rank.values() for rank in pool.run(compare_padded, 4)) < 1e-5


def compare_dropout(ulysses: int, ring: int) -> dict[str, float]:
    """Compared with our own dropout on one process, because transformers draws other numbers."""
    grid = cp.initialize_grid(ulysses=ulysses, ring=ring)
    model, batch, outcomes = tiny_model("llama", attention_dropout=0.3).train(), whole_batch(), []
    for where in (grid, cp.Grid()):
        with parallelize(model, where, seq_length=LENGTH, dropout_seed=7) as context:
            outcomes.append(over_ranks(model, batch, context))
    with parallelize(model.eval(), cp.Grid(), seq_length=LENGTH) as context:
        assert abs(over_ranks(model, batch, context).loss - outcomes[1].loss) > 1e-3
    return errors(*outcomes)


def test_dropout_of_attention_weights(pool):
    assert worst(rank.values() for rank in pool.run(compare_dropout, 4, 2, 2)) < 1e-5


class Largest(TorchDispatchMode):
    """Number of elements of the largest tensor of all operations."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return made


def largest_tensors(fpdt: Fpdt | None) -> tuple[int, int]:
    """Over four ranks, and on one process of transformers: 1,024 tokens and a vocabulary of 1,024."""
    grid = cp.initialize_grid(ulysses=2, ring=2)
    model = tiny_model("mistral", vocab_size=1024, max_position_embeddings=1024, num_hidden_layers=1)
    batch = whole_batch(length=1024, batch=1)
    with Largest() as alone:
        model(**batch, use_cache=False).loss.backward()
    with parallelize(model, grid, seq_length=1024, fpdt=fpdt) as context, Largest() as together:
        model(**context.shard(batch)).loss.backward()
    return together.elements, alone.elements


@pytest.mark.parametrize("fpdt", [None, *also_in_full(Fpdt(chunk_size=256))])
def test_no_tensor_of_length_by_length_or_by_vocabulary(pool, fpdt):
    for together, alone in pool.run(largest_tensors, 4, fpdt):
        assert alone >= 1024 * 1024
        assert together < 1024 * 1024 // 8  # a rank's complete logits would have 1024 * 1024 // 4


def wrapped_training(what: str) -> dict[str, float]:
    """DDP or FSDP2 over all ranks, with gradient checkpointing; they average gradients themselves."""
    grid = cp.initialize_grid(ulysses=2, ring=2)
    model, batch = tiny_model("llama"), whole_batch()
    expected = on_one_process(model, batch)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": what == "DDP, reentrant"})
    before, wrapped = "first" in what, model
    if not before:
        context = parallelize(model, grid, seq_length=LENGTH, fpdt=CHUNKS if "FPDT" in what else None)
    if what.startswith("DDP"):
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            torch.distributed.fsdp.fully_shard(layer)
        torch.distributed.fsdp.fully_shard(model)
    if before:
        context = parallelize(model, grid, seq_length=LENGTH)
    loss = wrapped(**context.shard(batch)).loss
    loss.backward()
    grads = {name: x.grad for name, x in model.named_parameters()}
    grads = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in grads.items()}
    return errors(Outcome(expected.logits, loss.detach(), grads), expected)


@pytest.mark.parametrize("what", ["DDP", "FSDP2 first", *also_in_full("DDP, reentrant", "FSDP2, FPDT")])
@pytest.mark.usual(0)
def test_with_a_wrapper_that_averages_gradients(pool, what):
    result = pool.run(wrapped_training, 4, what)
    assert worst(rank.values() for rank in result) < 1e-5, result[0]


def compare_lora() -> dict[str, float]:
    from peft import LoraConfig, get_peft_model

    grid = cp.initialize_grid(ulysses=2, ring=2)
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj", "o_proj", "lm_head"], r=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    batch = whole_batch()
    expected = on_one_process(model.eval(), batch)
    with parallelize(model, grid, seq_length=LENGTH) as context:
        result = over_ranks(model, batch, context)
    return errors(result, expected)


@pytest.mark.lab
def test_lora(pool):
    pytest.importorskip("peft", reason="peft is not installed")
    result = pool.run(compare_lora, 4)
    assert all("lora" in name for name in result[0] if name not in ("logits", "loss"))
    assert worst(rank.values() for rank in result) < 1e-5, result[0]


def compare_blocks(ulysses: int, ring: int) -> dict[str, float]:
    """MiniMax-M3 in float64; its norms would compute in fp32."""
    narrow = torch.Tensor.float
    with mock.patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x)):
        return compare("minimax_m3_vl_text", ulysses, ring, packed=False, dtype=torch.float64, kernel="math")


@pytest.mark.parametrize("ulysses, ring", also_in_full((2, 1), (1, 2), (2, 2), (1, 4), (1, 3)))
def test_chosen_blocks_in_float64(pool, ulysses, ring):
    assert worst(rank.values() for rank in pool.run(compare_blocks, ulysses * ring, ulysses, ring)) < 1e-10
