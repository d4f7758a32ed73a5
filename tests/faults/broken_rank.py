# SPDX-License-Identifier: Apache-2.0
"""The training program with one rank that breaks in its third step: ``broken_rank.py HOW RANK FLAGS...``.

HOW: ``loss`` (the rank's own loss is NaN), ``norm`` (the norm of the gradients is NaN for this rank alone), ``train``
(no memory is left for a step), ``save`` (no memory is left for a checkpoint).
"""

import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def no_memory_left() -> None:
    """Limit the memory of this process to what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20),) * 2)


def main() -> int:
    from megatron.training import loop, step
    from megatron.training import watch as watching
    from megatron.training.checkpoint import save_job
    from megatron.training.pretrain import main as program
    from megatron.training.settings.models import LLAMA_DEFAULTS

    how, rank, steps = sys.argv[1], sys.argv[2], [0]
    if os.environ.get("RANK", "0") == rank:
        train, loss, norm, write = loop.train_step, step.sum_of_losses, watching.Watch.judge, save_job.Save.write

        def train_step(*args, **more):
            steps[0] += 1
            if how == "train" and steps[0] == 3:
                no_memory_left()
            return train(*args, **more)

        def sum_of_losses(mask, losses):
            return loss(mask, losses * float("nan") if how == "loss" and steps[0] == 3 else losses)

        def judge(watch, result, grad_norm, device):
            return norm(watch, result, float("nan") if how == "norm" and steps[0] == 3 else grad_norm, device)

        def write_file(save):
            if how == "save" and steps[0] == 3:
                no_memory_left()
            write(save)

        loop.train_step, step.sum_of_losses, watching.Watch.judge = train_step, sum_of_losses, judge
        save_job.Save.write = write_file
    return program(sys.argv[3:], LLAMA_DEFAULTS)


if __name__ == "__main__":
    sys.exit(main())
