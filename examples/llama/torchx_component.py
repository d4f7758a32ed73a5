# SPDX-License-Identifier: Apache-2.0
"""Llama 3 8B as a TorchX component, for any scheduler that TorchX supports:

torchx run -s slurm examples/llama/torchx_component.py:pretrain --nnodes 4
torchx run -s kubernetes --cfg queue=default examples/llama/torchx_component.py:pretrain --nnodes 1:4 --image IMAGE
"""

from torchx import specs
from torchx.components.dist import ddp


def pretrain(
    *flags: str,
    nnodes: str = "4",
    gpus: int = 8,
    image: str = "megatron-longcontext:latest",
    checkpoints: str = "checkpoints/llama3_8b",
    max_retries: int = 100,
) -> specs.AppDef:
    """Pretrain Llama 3 8B: TP 2 x Ulysses 4 inside a node; ``--elastic`` chooses Ring and DP over the nodes.

    Args:
        flags: more flags of pretrain_llama.py, after ``--``
        nnodes: nodes, or MIN:MAX of an elastic job
        gpus: of a node
        image: made by the Dockerfile
        checkpoints: folder that all nodes share
        max_retries: how often the job starts again
    """
    smallest = nnodes.split(":")[0]
    return ddp(
        *"--model llama3-8b --max-position-embeddings 262144 --seq-length 262144 --bf16".split(),
        *"--tensor-model-parallel-size 2 --sequence-parallel --ulysses-parallel-size 4".split(),
        *f"--ring-parallel-size {smallest} --use-distributed-optimizer --recompute-granularity full".split(),
        *"--recompute-method uniform --recompute-num-layers 1 --micro-batch-size 1 --global-batch-size 16".split(),
        *"--train-iters 10000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 500".split(),
        *"--mock-data --save-interval 100 --elastic --log-interval 1".split(),
        *("--save", checkpoints, "--load", checkpoints, "--log-jsonl", f"{checkpoints}/log.jsonl"),
        *flags,
        script="pretrain_llama.py",
        name="llama3-8b",
        image=image,
        j=f"{nnodes}x{gpus}",
        gpu=gpus,
        max_retries=max_retries,
        rdzv_backend="c10d",
        env={
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # otherwise a node that joins later is not admitted
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "270",  # torchrun's default is 30 seconds, too short for a save
        },
    )
