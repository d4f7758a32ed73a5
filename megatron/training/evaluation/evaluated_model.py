# SPDX-License-Identifier: Apache-2.0
"""Loads a model that is only evaluated: weights without gradients and optimizer."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from megatron.platform.collectives import gathered_objects
from megatron.training.arguments.validate.host_memory import check_host_memory
from megatron.training.checkpoint import checkpoint
from megatron.training.checkpoint.arguments_of import vocabulary
from megatron.training.checkpoint.checksums import choose_whole
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.data.datasets import TooFewSamples, build_datasets
from megatron.training.data.tokenizer import Tokenizer, build_tokenizer
from megatron.training.evaluation.eval_plan import EvalPlan, check_held_out, make_plan
from megatron.training.model.build import build_model
from megatron.training.model.fsdp import FullySharded
from megatron.training.model.optimizer import in_compute_dtype
from megatron.training.refusal import Refusal, refuse_together
from megatron.training.settings.config import Config, RunConfig
from megatron.training.setup import Runtime


def prepare_evaluation(config: Config, runtime: Runtime) -> tuple[EvalPlan, list[nn.Module], Dataset | None]:
    """The plan, the model with a checkpoint's weights, and held-out samples if this rank reads them.

    Raises:
        Refusal: on every rank; the flags, the checkpoint or the data cannot be evaluated.
    """

    def read_inputs() -> tuple[Any, Tokenizer, EvalPlan]:
        if not config.evaluation.eval_tasks:
            raise Refusal("missing: --eval-tasks, for example --eval-tasks needle loss-by-position")
        if config.checkpoint.save:
            raise Refusal("--save: an evaluation saves no checkpoint; leave it out, results go to --eval-output")
        if runtime.offload is not None:
            check_host_memory(config)
        latest = checkpoint.find(config.checkpoint, config.notes)
        if latest is None:
            raise Refusal(f"--load {config.checkpoint.load} holds no checkpoint: give the folder of --save")
        tokenizer = build_tokenizer(config.data, config.model.vocab_size)
        return latest, tokenizer, make_plan(config, tokenizer)

    latest, tokenizer, plan = refuse_together(read_inputs)
    path = choose_whole(latest, config.checkpoint, config.notes)
    tokenizer, vocab_size = refuse_together(lambda: vocabulary(path, tokenizer, config))
    dataset = None
    if "loss-by-position" in plan.tasks:
        dataset = _held_out(config, tokenizer, runtime)
    check_held_out(plan, dataset, runtime.device)
    chunks = load_model(config, runtime, vocab_size, path)
    config.notes.append(f"loaded {path}")
    return plan, chunks, dataset


def _held_out(config: Config, tokenizer: Tokenizer, runtime: Runtime) -> Dataset | None:
    """Held-out samples. Of small data all are taken, unless --eval-iters asks for more."""
    usual, few = RunConfig.eval_iters, None
    for _ in range(2):
        samples = config.run.eval_iters * config.data.global_batch_size
        try:
            dataset = build_datasets(config, tokenizer, (0, samples, 0), needed=runtime.reads_data)[1]
        except TooFewSamples as refusal:
            few = refusal
        fewer = gathered_objects(few.fewer if few else 0)  # ranks that read no data do not know it
        if config.run.eval_iters != usual or not max(fewer):
            break
        config.notes.append(f"--eval-iters {max(fewer)}, because the validation data have no more samples")
        config.run.eval_iters, few = max(fewer), None
    if few is not None:
        raise few
    return dataset


def build_untrained(config: Config, runtime: Runtime, vocab_size: int) -> list[nn.Module]:
    """This rank's model chunks for a model without optimizer."""
    chunks = build_model(config, runtime.grid, runtime.layout, vocab_size, runtime.device, runtime.offload)
    return [
        FullySharded(chunk, config) if config.parallel.zero_stage >= 2 else in_compute_dtype(chunk, config)
        for chunk in chunks
    ]


def load_model(config: Config, runtime: Runtime, vocab_size: int, path: Checked) -> list[nn.Module]:
    """This rank's model chunks with the weights of the checkpoint ``path``."""
    chunks = build_untrained(config, runtime, vocab_size)
    config.checkpoint.finetune = True
    checkpoint.load(path, chunks, None, None, config)
    dist.barrier()
    return chunks
