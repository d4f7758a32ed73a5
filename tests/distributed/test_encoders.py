# SPDX-License-Identifier: Apache-2.0
"""Encoders, classifiers, rewards and embeddings over ranks against transformers on one process, in fp64.

Loss, outputs and every gradient; packed documents are compared with each document alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.nn import functional as F

import megatron.context_parallel as cp
from megatron.context_parallel.huggingface import parallelize
from megatron.context_parallel.huggingface.rank_batch import Part, cut
from tests.errors import worst
from tests.hugging_face import BATCH, LENGTH, SIZES, VOCABULARY, averaged, draw_weights, take_grads
from tests.pairs import also_in_full

LABELS = 3
OWN = SIZES | {"num_labels": LABELS, "use_cache": False}
BERT = OWN | {"model_type": "bert", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODERN = OWN | {"model_type": "modernbert", "local_attention": 8}
MODERN |= {"layer_types": ["sliding_attention", "full_attention"], "cls_token_id": 1, "sep_token_id": 2}
QWEN = OWN | {"model_type": "qwen3", "head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("AutoModel", BERT),
    "BERT, masked words": ("AutoModelForMaskedLM", BERT),
    "BERT, classes": ("AutoModelForSequenceClassification", BERT),
    "BERT, classes of tokens": ("AutoModelForTokenClassification", BERT),
    "BERT, answers": ("AutoModelForQuestionAnswering", BERT | {"num_labels": 2}),
    "ModernBERT": ("AutoModel", MODERN),
    "ModernBERT, masked words": ("AutoModelForMaskedLM", MODERN),
    "ModernBERT, classes": ("AutoModelForSequenceClassification", MODERN | {"classifier_pooling": "mean"}),
    "Qwen 3, embeddings": ("AutoModel", QWEN),
    "Qwen 3, reward": ("AutoModelForSequenceClassification", QWEN | {"num_labels": 1}),
    "Llama, classes": ("AutoModelForSequenceClassification", OWN | {"model_type": "llama"}),
}
GRIDS = {"U2": (2, 1), "R2": (1, 2), "U2 x R2": (2, 2)}
CUTS = (0, 11, 30, LENGTH)


def tiny(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    auto, sizes = MODELS[name]
    config = transformers.AutoConfig.for_model(**sizes)
    model = getattr(transformers, auto).from_config(config, attn_implementation="sdpa")
    return draw_weights(model.to(torch.float64).eval())


def batch_for(name: str, padded: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if padded:
        batch["attention_mask"][0, LENGTH - 7 :] = 0
        tokens[0, LENGTH - 7 :] = SIZES["pad_token_id"]
    if name.startswith("BERT"):
        batch["token_type_ids"] = (torch.arange(LENGTH) >= 20).long().expand(BATCH, -1)
    auto, classes = MODELS[name][0], MODELS[name][1]["num_labels"]
    words = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    if auto == "AutoModelForMaskedLM":
        batch["labels"] = words.masked_fill(torch.rand(BATCH, LENGTH, generator=generator) < 0.7, -100)
        batch["labels"].masked_fill_(batch["attention_mask"] == 0, -100)
    elif auto == "AutoModelForTokenClassification":
        batch["labels"] = (words % classes).masked_fill(batch["attention_mask"] == 0, -100)
    elif auto == "AutoModelForQuestionAnswering":
        batch |= {"start_positions": words[:, 0] % LENGTH, "end_positions": words[:, 1] % LENGTH}
    elif auto != "AutoModel":
        batch["labels"] = words[:, 0] % classes if classes > 1 else torch.tensor([0.5, -1.0], dtype=torch.float64)
    return batch


def results(output: Any, gather: Any) -> dict[str, torch.Tensor]:
    """Every tensor of an output."""
    found = {name: x for name, x in output.items() if isinstance(x, torch.Tensor)}
    return {name: gather(x) if x.dim() > 1 and x.size(1) * gather.parts == LENGTH else x for name, x in found.items()}


def objective(output: Any, found: dict[str, torch.Tensor], batch: dict[str, torch.Tensor], alone: bool) -> torch.Tensor:
    """The model's loss; for a model without a head, one of the mean of the hidden states and of the pooler's output.

    transformers computes that of masked words in fp32, even in fp64.
    """
    if alone and "labels" in batch and batch["labels"].shape == batch["input_ids"].shape:
        return F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())
    if output.get("loss") is not None:
        return output.loss
    hidden, real = found["last_hidden_state"], batch["attention_mask"][..., None]
    loss = torch.cos((hidden * real).mean(1)).sum() + hidden[:, -9].square().sum()
    return loss + (0 if found.get("pooler_output") is None else torch.sin(found["pooler_output"]).sum())


class Gather:
    def __init__(self, context: Any = None, own: Any = None) -> None:
        self.context, self.own, self.parts = context, own, 1 if context is None else context.grid.context.size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.context is None else self.context.gather(x, self.own)


def run(model: Any, batch: dict[str, Any], context: Any = None) -> dict[str, torch.Tensor]:
    own = batch if context is None else context.shard(batch)
    output = model(**own)
    found = results(output, Gather(context, own))
    loss = objective(output, found, batch, context is None)
    loss.backward()
    group = None if context is None else context.grid.context.group
    kept = {name: x.detach() for name, x in found.items()} | {"loss": loss.detach()}
    return kept | averaged(take_grads(model), group)


def compare(name: str, ulysses: int, ring: int, padded: bool, causal: bool = False) -> dict[str, float]:
    grid, model, batch = cp.initialize_grid(ulysses=ulysses, ring=ring), tiny(name), batch_for(name, padded)
    expected, usual = run(model, batch), Part.masks
    if causal:  # a control: queries that see no later keys
        Part.masks = lambda self, window, ahead: usual(self, window and window + 1, False)
    try:
        with parallelize(model, grid, seq_length=LENGTH) as context:
            result = run(model, batch, context)
    finally:
        Part.masks = usual
    real = batch["attention_mask"].bool()
    errors, grads = {}, [float(expected[name].abs().max()) for name, _ in model.named_parameters() if name in expected]
    for key, wanted in expected.items():
        mine = result.get(key)
        if mine is None:  # not returned with labels
            continue
        if wanted.dim() > 1 and wanted.shape[:2] == real.shape:  # what padding sees is not compared
            mine, wanted = mine[real], wanted[real]
        scale = max(float(wanted.abs().max()), 1e-4 * max(grads))  # a bias of keys has only rounding errors
        errors[key] = float((mine - wanted).abs().max()) / scale
    assert expected.keys() - result.keys() <= {"logits"}, expected.keys() ^ result.keys()
    return errors


ANSWERS = "BERT, answers"  # whose loss reads padding: refused, see below
CASES = [(name, list(GRIDS)[number % 3], number % 2 == 1 and name != ANSWERS) for number, name in enumerate(MODELS)]
OTHERS = [(name, grid, padded) for name in MODELS for grid in GRIDS for padded in (False, True)]
OTHERS = [case for case in OTHERS if case not in CASES and (case[0], case[2]) != (ANSWERS, True)]


@pytest.mark.parametrize("name, grid, padded", [*CASES, *also_in_full(*OTHERS)])
def test_it_is_the_model_of_one_process(pool, name, grid, padded):
    ulysses, ring = GRIDS[grid]
    found = pool.run(compare, ulysses * ring, name, ulysses, ring, padded)
    assert worst(rank.values() for rank in found) < 1e-10, found[0]


def test_answers_with_padding_are_refused():
    with pytest.raises(ValueError, match="start_positions with padding: the loss of answers reads what padding sees"):
        cut(batch_for(ANSWERS, True), cp.SequenceLayout(LENGTH, cp.abstract_grid()), 0, "head")


def test_causal_masks_are_another_model(pool):
    assert pool.run(compare, 2, "ModernBERT, masked words", 1, 2, False, True)[0]["loss"] > 1e-3


def packed(name: str, ulysses: int, ring: int, joined: bool = False) -> float:
    """The largest difference of hidden states of packed documents from each document alone."""
    grid, model = cp.initialize_grid(ulysses=ulysses, ring=ring), tiny(name)
    batch = {"input_ids": batch_for(name, False)["input_ids"]}
    spans = list(zip(CUTS, CUTS[1:]))
    with torch.no_grad():
        alone = [model(input_ids=batch["input_ids"][:, a:b]).last_hidden_state for a, b in spans]
        if not joined:
            batch["position_ids"] = torch.cat([torch.arange(b - a) for a, b in spans]).expand(BATCH, -1)
        with parallelize(model, grid, seq_length=LENGTH) as context:
            own = context.shard(batch)
            mine = context.gather(model(**own).last_hidden_state, own)
    expected = torch.cat(alone, dim=1)
    dist.barrier()
    return float((mine - expected).abs().max() / expected.abs().max())


OTHER_PACKED = also_in_full(("BERT", "R2"), ("Qwen 3, embeddings", "U2"))


@pytest.mark.parametrize("name, grid", [("ModernBERT", "U2 x R2"), *OTHER_PACKED])
def test_packed_documents_are_separate(pool, name, grid):
    ulysses, ring = GRIDS[grid]
    assert max(pool.run(packed, ulysses * ring, name, ulysses, ring)) < 1e-10
    assert pool.run(packed, 2, name, 1, 2, True)[0] > 1e-3  # a control: one document


# ---- inside cp.context_parallel, where models call PyTorch's operator


def in_context(what: str, ulysses: int, ring: int, forgotten: bool = False) -> dict[str, float]:
    """Outputs and gradients of a model with padding at the right of one sample and at the left of the other."""
    grid, batch = cp.initialize_grid(ulysses=ulysses, ring=ring), batch_for("BERT", False)
    layout, seen = cp.SequenceLayout(LENGTH, grid), torch.ones(BATCH, LENGTH, dtype=torch.bool)
    seen[0, LENGTH - 7 :] = seen[1, :5] = False
    ends = [(LENGTH,)] * BATCH if forgotten else [(LENGTH - 7, LENGTH), (5, LENGTH)]
    torch.manual_seed(3)
    if what == "BERT":
        model, inputs = tiny("BERT"), batch["input_ids"]
    else:
        layer = torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        model, inputs = layer.double(), torch.randn(BATCH, LENGTH, 32, dtype=torch.float64)

    def outputs(x: torch.Tensor, places: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if what != "BERT":
            return model(x, src_key_padding_mask=None if mask is None else ~mask)
        mask = None if mask is None else mask.long()
        return model(input_ids=x, position_ids=places[None], attention_mask=mask).last_hidden_state

    def grads(out: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        torch.cos(out[mask]).sum().backward()
        return take_grads(model)

    expected = outputs(inputs, torch.arange(LENGTH), seen)
    wanted = {"out": expected.detach()[seen]} | grads(expected, seen)
    own = layout.shard(seen, dim=1)
    with cp.context_parallel(layout, mask=[cp.Documents(row, cp.Full()) for row in ends]):
        out = outputs(layout.shard(inputs, dim=1), layout.positions, None)
        mine = {"out": layout.gather(out.detach(), 1)[seen]} | grads(out, own)
    for name, grad in mine.items():
        if name != "out":
            dist.all_reduce(grad, group=grid.context.group)
    largest = max(float(x.abs().max()) for x in wanted.values())
    scales = {name: max(float(x.abs().max()), 1e-3 * largest) for name, x in wanted.items()}
    return {name: float((mine[name] - x).abs().max()) / scales[name] for name, x in wanted.items()}


IN_CONTEXT = [("BERT", 2, 2), ("TransformerEncoderLayer", 1, 2)]
MORE = [(what, *grid) for what in ("BERT", "TransformerEncoderLayer") for grid in GRIDS.values()]


@pytest.mark.parametrize(
    "what, ulysses, ring", [*IN_CONTEXT, *also_in_full(*(case for case in MORE if case not in IN_CONTEXT))]
)
def test_padding_is_a_mask_for_each_sample(pool, what, ulysses, ring):
    found = pool.run(in_context, ulysses * ring, what, ulysses, ring)
    assert worst(rank.values() for rank in found) < 1e-10, found[0]


def test_padding_that_is_seen_is_another_result(pool):
    assert pool.run(in_context, 2, "TransformerEncoderLayer", 1, 2, True)[0]["out"] > 1e-3


def windows_in_context() -> str:
    """What ModernBERT's masks of a rank's own tokens are answered with."""
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid(ring=2))
    tokens = layout.shard(batch_for("ModernBERT", False)["input_ids"], dim=1)
    with pytest.raises(ValueError) as refused, cp.context_parallel(layout):
        tiny("ModernBERT")(input_ids=tokens, position_ids=layout.positions[None])
    return str(refused.value)


def test_a_window_over_a_ranks_own_tokens_is_refused(pool):
    for line in pool.run(windows_in_context, 2):
        assert "attn_mask, which ModernBert" in line and "give mask= to context_parallel and pass none" in line
