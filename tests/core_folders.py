# SPDX-License-Identifier: Apache-2.0
"""Checkpoints across versions of megatron-core: write one, or continue from one, with the interpreter that runs this.

    torchrun --nproc-per-node N -m tests.core_folders write|read ours|core FOLDER [FLAGS]

``core`` is Megatron-LM's model and optimizer with core's own saver and loader (distributed/megatron_lm.py), ``ours`` is
the training program. A checkpoint is written after two steps. Both print, as JSON, the losses of the next three steps
and a digest of all weights and optimizer states at the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

FLAGS = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 16 --max-position-embeddings 16 --vocab-size 31 "
    "--make-vocab-size-divisible-by 1 --lr 1e-2 --attention-dropout 0 --hidden-dropout 0"
)


def write(who: str, folder: str, flags: str = "") -> dict[str, Any]:
    """Two steps, a checkpoint, and its digest and next three losses. Needs process groups' default group."""
    from tests.distributed import megatron_lm
    from tests.distributed.training_runs import make_job, save_job, train_job

    if who == "core":
        run = megatron_lm.build(f"{FLAGS} {flags}", distributed=True)
        megatron_lm.train(run, 2)
        megatron_lm.save(run, folder, 2, "fully_reshardable", core_writer=True)
        found = digest(megatron_lm.unwrapped(run), run.optimizer)
        return {"digest": found, "losses": megatron_lm.train(run, 3)}
    job = make_job(f"{FLAGS} --zero-stage 1 {flags}")
    train_job(job, 2)
    save_job(folder, job)
    return {"digest": _digest_of(job), "losses": train_job(job, 3)[0]}


def read(who: str, folder: str, flags: str = "") -> dict[str, Any]:
    """The same from the checkpoint in ``folder``, with the iteration at which it was saved."""
    from tests.distributed import megatron_lm
    from tests.distributed.training_runs import make_job, train_job

    if who == "core":
        run = megatron_lm.build(f"{FLAGS} {flags}", distributed=True)
        iteration = megatron_lm.load(run, folder)
        found = digest(megatron_lm.unwrapped(run), run.optimizer)
        return {"iteration": iteration, "digest": found, "losses": megatron_lm.train(run, 3)}
    job = make_job(f"{FLAGS} --zero-stage 1 {flags} --load {folder}")
    return {"iteration": job.progress.iteration, "digest": _digest_of(job), "losses": train_job(job, 3)[0]}


def _digest_of(job: Any) -> str | None:
    from megatron.training.checkpoint.checkpoint import unwrap

    if job.config.parallel.zero_stage != 1:
        return None
    return digest([unwrap(chunk) for chunk in job.model_chunks], job.optimizer)


def digest(chunks: list[Any], optimizer: Any) -> str:
    """SHA-256 of the main weights and Adam's states of this process, by canonical name."""
    from megatron.training.model.weights import canonical_parameters

    total = hashlib.sha256()
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    named = sorted((name, one) for chunk in chunks for name, one in canonical_parameters(chunk))
    for name, parameter in named:
        (part,) = (part for part in parts if parameter in part.model_param_group_index_map)
        tensors = part._get_main_param_and_optimizer_states(parameter)
        for key in ("param", "exp_avg", "exp_avg_sq"):
            total.update(name.encode() + tensors[key].detach().float().contiguous().numpy().tobytes())
    return total.hexdigest()


def main(command: str, who: str, folder: str, *flags: str) -> None:
    import torch.distributed as dist
    from megatron.core import package_info

    dist.init_process_group("gloo")
    result = {"write": write, "read": read}[command](who, folder, " ".join(flags))
    if dist.get_rank() == 0:
        print(json.dumps({"core": package_info.__version__, **result}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
