# SPDX-License-Identifier: Apache-2.0
"""Trainer of transformers with accelerate: ``sp_size`` (Ulysses by DeepSpeed) or ``cp_size`` (PyTorch's ring)."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

import megatron.context_parallel as cp
from benchmarks.certify import with_deepspeed
from benchmarks.certify.cases import LENGTH, RATE, Case, NotApplicable, copied, updated


def step(case: Case, sequence: int = 1, context: int = 1, stage: int = 3) -> cp.Outcome:
    """The outcome of one training step.

    Args:
        sequence, context: accelerate's ``sp_size`` and ``cp_size``.
        stage: of ZeRO, with ``sp_size``; accelerate's documentation names 2 and 3.
    """
    from transformers import Trainer, TrainingArguments

    if sequence > 1 and len(case.documents) > 1:
        raise NotApplicable("its documentation asks for flash-attn, which needs a GPU, where samples are packed")
    data = [{name: x[0] for name, x in batch.items()} for batch in case.batches()]
    model = case.model("eager" if case.sinks else "sdpa")
    return trained(Trainer, TrainingArguments, case, model, data, sequence, context, stage, remove_unused_columns=False)


def trained(
    trainer: Any,
    arguments: Any,
    case: Case,
    model: Any,
    data: Any,
    sequence: int,
    context: int,
    stage: int,
    **others: Any,
) -> cp.Outcome:
    """One update by a Trainer."""
    steps, before = len(case.masked), copied(model)
    settings: dict[str, Any] = dict(
        use_cpu=True, per_device_train_batch_size=1, gradient_accumulation_steps=steps, max_steps=1, learning_rate=RATE,
        optim="sgd", lr_scheduler_type="constant", max_grad_norm=case.clip or 0.0, report_to=[], save_strategy="no",
        logging_steps=1, disable_tqdm=True, train_sampling_strategy="sequential",
        **parallel(sequence, context, stage, steps),
    )  # fmt: skip
    other = others.pop("other", {})
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(model=model, args=arguments(output_dir=folder, **settings, **others), train_dataset=data, **other)
        run.train()
    log = next(row for row in run.state.log_history if "loss" in row)
    after = with_deepspeed.whole_weights(model) if sequence > 1 else None
    return updated(model, before, torch.tensor(log["loss"]), case, after)


def parallel(sequence: int, context: int, stage: int, steps: int) -> dict[str, Any]:
    """Trainer's arguments for this grid."""
    from accelerate import ParallelismConfig

    if context > 1:
        from accelerate.utils import FullyShardedDataParallelPlugin  # noqa: F401 - cp_size needs FSDP2

        config = {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}}
        return {"parallelism_config": ParallelismConfig(cp_size=context), **config}
    if sequence == 1:
        return {}
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    with_deepspeed.start()  # on a CPU accelerate does not start it
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    config = dict(
        train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=steps, zero_optimization={"stage": stage},
        gradient_clipping="auto", zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False,
    )  # fmt: skip
    parallelism = ParallelismConfig(sp_size=sequence, sp_backend="deepspeed", sp_handler=handler)
    return {"deepspeed": config, "parallelism_config": parallelism}
