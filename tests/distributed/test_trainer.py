# SPDX-License-Identifier: Apache-2.0
"""Evaluations of transformers' Trainer over ranks against the Trainer alone, and against DDP on the data axis."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import megatron.context_parallel as cp
from megatron.context_parallel.huggingface import ContextParallelMixin, parallelize
from tests.hugging_face import LENGTH, tiny_model, whole_batch

pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers.Trainer needs")
SAMPLES = 7  # neither 4 nor 2 x 4 nor 2 x 2 divides it


class Samples(Dataset):
    """Samples with different numbers of labels."""

    def __init__(self, labels: bool = True) -> None:
        batch = whole_batch(packed=False, batch=SAMPLES)
        for row in range(SAMPLES):
            batch["labels"][row, : 5 * row] = -100
        self.batch = batch if labels else {"input_ids": batch["input_ids"]}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: x[index] for name, x in self.batch.items()}


class Stream(IterableDataset):
    """The same samples, without a length."""

    def __iter__(self):
        return (Samples()[index] for index in range(SAMPLES))


class Tokens:
    """Metrics of logits, labels, losses and inputs; also when they come batch by batch."""

    def __init__(self) -> None:
        self.right = self.count = 0

    def __call__(self, given, compute_result: bool = True) -> dict[str, float]:
        arrays = (given.predictions, given.label_ids, *(x for x in (given.inputs, given.losses) if x is not None))
        logits, labels, *others = (np.asarray(x) for x in arrays)
        self.right += int(((logits.argmax(-1) == labels) & (labels != -100)).sum())
        self.count += len(labels)
        result = {"right": self.right, "count": self.count, "logits": float(np.abs(logits).sum(dtype=float))}
        return (result | {f"other {n}": float(x.sum()) for n, x in enumerate(others)}) if compute_result else {}


def evaluate(folder: str, batch: int, grid: dict[str, int] | None) -> dict[str, object]:
    """Evaluations and predictions of different kinds; ``grid``: None for the Trainer without our mixin."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    model = tiny_model("llama")

    def trainer(metrics: bool = True, **settings: object) -> Trainer:
        arguments = TrainingArguments(
            folder, use_cpu=True, report_to=[], disable_tqdm=True, per_device_eval_batch_size=batch,
            remove_unused_columns=False, **settings,
        )  # fmt: skip
        metrics = Tokens() if metrics else None
        if grid is None:
            return Trainer(model=model, args=arguments, compute_metrics=metrics)
        return LongTrainer(context=context, model=model, args=arguments, compute_metrics=metrics)

    class LongTrainer(ContextParallelMixin, Trainer):
        pass

    if grid is not None:
        context = parallelize(model, cp.initialize_grid(**grid), seq_length=LENGTH)
    try:
        usual = trainer(metrics=False)
        results = {"losses": [usual.evaluate(Samples()), usual.evaluate(Samples())]}
        stream = trainer(metrics=False, accelerator_config={"dispatch_batches": False})
        results["stream"] = stream.evaluate(Stream())
        results["metrics"] = trainer(include_for_metrics=["inputs", "loss"]).evaluate(Samples())
        results["by batch"] = trainer(batch_eval_metrics=True, eval_accumulation_steps=1).evaluate(Samples())
        objects = trainer(eval_use_gather_object=True, eval_do_concat_batches=False, metrics=False)
        results["objects"] = objects.evaluate(Samples())
        predicted, unlabelled = usual.predict(Samples()), usual.predict(Samples(labels=False))
        results["predict"] = {"loss": predicted.metrics["test_loss"]}
        results["arrays"] = [predicted.predictions, predicted.label_ids, unlabelled.predictions]
        assert unlabelled.label_ids is None
        return results
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def numbers(results: dict[str, object]) -> dict[str, float]:
    rows = {name: row for name, row in results.items() if isinstance(row, dict)}
    rows |= {f"losses {n}": row for n, row in enumerate(results["losses"])}
    slow = ("_runtime", "_per_second", "_time")
    return {f"{row}: {key}": x for row, one in rows.items() for key, x in one.items() if not key.endswith(slow)}


@pytest.mark.parametrize(
    "alone, batch, world, grid",
    [
        (1, 4, 2, {"ulysses": 2}),
        (1, 4, 2, {"ring": 2}),
        (2, 2, 4, {"ring": 2}),
    ],
    ids=["U2", "R2", "DP2 x R2"],
)
@pytest.mark.usual(1)
def test_an_evaluation_counts_each_sample_once(pool, shared, tmp_path, alone, batch, world, grid):
    """Loss, metrics and predictions; DP against DDP, because the Trainer averages over batches."""
    expected = shared(("evaluation", alone, batch), lambda: pool.run(evaluate, alone, str(tmp_path), batch, None)[0])
    right = numbers(expected)
    for result in pool.run(evaluate, world, str(tmp_path), batch, grid):
        assert numbers(result) == pytest.approx(right, rel=1e-5)
        for mine, theirs in zip(result["arrays"], expected["arrays"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_trainers_of_trl_need_their_own_mixin():
    trl = type("DPOTrainer", (), {"__module__": "trl.trainer.dpo_trainer"})
    with pytest.raises(ValueError, match="use TrlMixin"):
        type("Long", (ContextParallelMixin, trl), {})(context=None)
