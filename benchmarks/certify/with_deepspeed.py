# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's Ulysses for models of transformers, as its tutorial on ALST trains: the model is registered, the loader
wrapped, and the losses of the ranks are gathered and averaged by their labels."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn

import megatron.context_parallel as cp
from benchmarks.certify.cases import LENGTH, RATE, VOCABULARY, Case, NotApplicable, copied, updated, whole


def start() -> None:
    """Start DeepSpeed's communication on a CPU."""
    import deepspeed

    # Otherwise it compiles an all-reduce in shared memory for minutes, which only inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights of which each rank may have a part (ZeRO 3)."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return copied(model)


def step(case: Case, ranks: int = 1, stage: int = 3) -> cp.Outcome:
    """The outcome of one training step.

    Args:
        stage: of ZeRO; the tutorial's is 3.
    """
    if ranks == 1:  # the tutorial's loss is the mean of a micro-batch; the engine averages micro-batches
        return whole(case, mean_of_means=True)
    if case.experts:
        raise NotApplicable("the tutorial computes the loss from logits, without the one that balances experts")
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

    start()
    attention = "eager" if case.sinks else "sdpa"
    model, batches = case.model(attention), case.batches()
    before = copied(model)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation=attention, sequence_parallel_size=ranks, micro_batch_size=1,
        seq_length=LENGTH, seq_length_is_variable=True,
    )  # fmt: skip
    parameters = [p for p in model.parameters() if p.requires_grad]
    config = dict(
        train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=len(batches), sequence_parallel_size=ranks,
        zero_optimization={"stage": stage}, gradient_clipping=case.clip or 0.0, zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=False,
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, optimizer=torch.optim.SGD(parameters, lr=RATE), config=config, mpu=mpu
    )
    group = mpu.get_sequence_parallel_group()
    # Each rank's loader has its own samples. The adapter splits every sample over all ranks.
    own = [batches[number] for number in range(dist.get_rank(), len(batches), ranks)] or batches[:1]
    own += own[-1:] * (-(-len(batches) // ranks) - len(own))
    adapter = UlyssesSPDataLoaderAdapter(
        own, sp_rank=mpu.get_sequence_parallel_rank(), sp_group=group, sp_world_size=ranks, device="cpu"
    )
    total = torch.zeros(())
    for number, batch in enumerate(adapter):
        if number == len(batches):
            break
        labels = batch.pop("shift_labels")
        logits = engine(**batch).logits
        loss = engine.module.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=VOCABULARY)
        losses = differentiable.all_gather(loss, group=group)
        counts = differentiable.all_gather((labels != -100).view(-1).sum(), group=group)
        loss = sum(losses[r] * counts[r] for r in range(ranks) if counts[r] > 0) / max(sum(counts), 1)
        total += loss.detach() / len(batches)
        engine.backward(loss)
        engine.step()
    return updated(model, before, total, case, whole_weights(model))
