# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP2 engine with Ulysses, trained by its SFT loss, as its workers call it: documents are samples, which it
packs. The platform for CPUs is that of integrations/verl. With flash attention, its default, the kernel is stood in."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron.context_parallel as cp
from benchmarks.certify import flash_attn_on_a_cpu
from benchmarks.certify.cases import RATE, Case, NotApplicable, copied, updated, whole

PLATFORM = Path(__file__).parents[2] / "integrations" / "verl" / "longcontext_verl"


def step(case: Case, ranks: int = 1, attention: str = "flash_attention_2") -> cp.Outcome:
    """The outcome of one training step.

    Args:
        attention: ``override_config.attn_implementation`` of verl's model.
    """
    if case.experts:
        raise NotApplicable("its SFT loss is that of log-probabilities, without the one that balances experts")
    if ranks == 1:
        return whole(case)
    if case.frozen:
        raise NotApplicable("it trains all weights or those of LoRA")
    if case.sinks and attention == "flash_attention_2":
        raise NotApplicable("the kernel that is stood in has no sinks")
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}  # the engine that it has for GPUs
    sys.path.insert(0, str(PLATFORM))
    import cpu_platform  # noqa: F401 - registers itself
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.utils.losses import sft_loss

    model = case.model("eager" if case.sinks else "sdpa")
    before = copied(model)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)  # transformers saves on rank 0 alone
        replace(case, lora=False).model(model.config._attn_implementation).save_pretrained(folders[0])
        adapter = {}
        if case.lora:
            model.save_pretrained(f"{folders[0]}/adapter")
            adapter = {"lora_rank": 4, "lora_adapter_path": f"{folders[0]}/adapter"}
        dist.barrier()
        settings = HFModelConfig(
            path=folders[0], load_tokenizer=False, **adapter,
            override_config={"attn_implementation": model.config._attn_implementation},
        )  # fmt: skip
        engine = EngineRegistry.new(
            "language_model",
            "fsdp2",
            model_config=settings,
            engine_config=FSDPEngineConfig(
                strategy="fsdp2", ulysses_sequence_parallel_size=ranks, use_torch_compile=False,
                mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
            ),
            optimizer_config=FSDPOptimizerConfig(
                optimizer="SGD", lr=RATE, weight_decay=0.0, clip_grad=case.clip or 1e30, lr_warmup_steps=0,
                total_training_steps=1,
            ),
            checkpoint_config=CheckpointConfig(),
        )  # fmt: skip
        engine.initialize()
        dist.barrier()
    if attention == "flash_attention_2":
        flash_attn_on_a_cpu.install_for_transformers()
        engine.module.config._attn_implementation = attention
    with engine.train_mode():
        out = engine.train_batch(batch_of(case), partial(sft_loss, None))
    loss = torch.tensor(sum(out["loss"]))
    after = {name: weight.full_tensor().detach() for name, weight in engine.module.named_parameters()}
    return updated(model, before, loss, case, after)


def batch_of(case: Case) -> Any:
    """All documents of all micro-batches, as verl hands samples to a worker."""
    from verl.utils import tensordict_utils as tu

    starts, samples = (0, *case.documents[:-1]), []
    for batch in case.batches():
        for start, end in zip(starts, case.documents):
            counted = (batch["labels"][0, start:end] != -100).long()
            counted[0] = 0  # nothing predicts it
            samples.append((batch["input_ids"][0, start:end], torch.arange(end - start), counted))
    jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    columns = dict(zip(("input_ids", "position_ids", "loss_mask"), (jagged(list(column)) for column in zip(*samples))))
    each = len(case.documents)
    return tu.get_tensordict(columns, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": each, "temperature": 1.0})
