# SPDX-License-Identifier: Apache-2.0
"""What is logged of each step: loss, rates, memory."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron.training.features.feature import Step
from megatron.training.job import Job, params_norm
from megatron.training.report.mfu import peak_flops, step_flops
from megatron.training.report.reporter import Reporter


class StepLog:
    """The log of a run. All ranks create it at the same time: on a CPU it measures the rate of matrix products."""

    def __init__(self, job: Job, reporter: Reporter) -> None:
        self.job, self.reporter = job, reporter
        self._flops = step_flops(job.config, job.vocab_size)
        dist.barrier()  # so that ranks that share a machine measure its rate at the same time
        self._peak = peak_flops(job.config, job.runtime.device)

    def row(self, step: Step, device_peak: int, host_peak: int, data_wait_ms: float) -> dict[str, Any]:
        """The step's fields of --log-jsonl.

        Args:
            device_peak: the largest peak of a rank's device memory, in bytes.
            host_peak: the same for host memory.
            data_wait_ms: the longest time that a rank waited for its data.
        """
        result, flops, pairs = step.result, self._flops, self.job.config.pairs
        tokens = step.samples * step.length if pairs else result.tokens
        per_device = flops.model * step.samples / step.seconds / dist.get_world_size()
        row: dict[str, Any] = {
            "iteration": step.iteration,
            "lm_loss": result.lm_loss,
            "grad_norm": result.grad_norm,
            "tokens": tokens,
            "iteration_ms": 1000 * step.seconds,
            "data_wait_ms": data_wait_ms,
            "tokens_per_second": tokens / step.seconds,
            "model_tflops_per_device": per_device / 1e12,
            "mfu": per_device / self._peak,
            "mfu_full_mask_with_recompute": per_device / self._peak * flops.old_papers / flops.model,
            "device_peak_bytes": device_peak,
            "host_peak_bytes": host_peak,
        }
        if self.job.config.stage is not None:
            row |= {"stage": self.job.config.stage.number, "seq_length": step.length}
        if result.experts is not None:
            row |= result.experts.losses | {"expert_imbalance": result.experts.imbalance}
            row["tokens_per_expert"] = result.experts.tokens_per_expert
        row |= result.further | ({"pairs": result.tokens} if pairs else {})
        if result.bad:
            row["bad_batch"] = result.bad
        return row

    def write(self, step: Step, row: dict[str, Any]) -> None:
        scale = float(self.job.optimizer.get_loss_scale())
        self.reporter.step(row, learning_rate=step.learning_rate, loss_scale=scale, extra=self._extra(step))

    def _extra(self, step: Step) -> dict[str, float]:
        """What flags add to the console line."""
        settings, result = self.job.config.logging, step.result
        values: dict[str, float] = {"skipped": float(result.skipped)}
        if settings.log_num_zeros_in_grad and result.zeros_in_grad is not None:
            values["num_zeros"] = float(result.zeros_in_grad)
        if result.experts is not None:
            values |= result.experts.losses | {"expert_imbalance": result.experts.imbalance}
        values |= result.further
        if settings.log_params_norm:
            values["params_norm"] = params_norm(self.job)
        return values
