# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's AutoSP as its training page and its example describe it: a pass of the compiler splits the inputs of a
model of transformers, and every rank is given whole samples. Its test is for GPUs; on a CPU nothing refuses it."""

from __future__ import annotations

import torch
import torch.distributed as dist

import megatron.context_parallel as cp
from benchmarks.certify.cases import RATE, Case, copied, updated, whole
from benchmarks.certify.with_deepspeed import start


def step(case: Case, ranks: int = 1) -> cp.Outcome:
    """The outcome of one training step."""
    if ranks == 1:  # the engine averages micro-batches
        return whole(case, mean_of_means=True)
    import deepspeed
    from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs

    start()
    model, batches = case.model("eager" if case.sinks else "sdpa"), case.batches()
    before, total = copied(model), torch.zeros(())
    parameters = [p for p in model.parameters() if p.requires_grad]
    config = dict(
        train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=len(batches), sequence_parallel_size=ranks,
        zero_optimization={"stage": 0}, compile={"deepcompile": True, "passes": ["autosp"]},
        gradient_clipping=case.clip or 0.0,
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, optimizer=torch.optim.SGD(parameters, lr=RATE), config=config
    )
    engine.compile(backend="inductor")
    for batch in batches:
        # Without a mask of padding, transformers finds documents by positions.
        padding = torch.ones_like(batch["input_ids"]) if len(case.documents) == 1 else None
        ids, labels, at, padding = prepare_autosp_inputs(
            batch["input_ids"], batch["labels"], batch["position_ids"], padding, seq_dim=1
        )
        loss = engine(input_ids=ids, labels=labels, position_ids=at, attention_mask=padding).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach() / len(batches)
    dist.all_reduce(total)  # each rank has the mean of its part
    return updated(model, before, total / ranks, case)
