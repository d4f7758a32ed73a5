# SPDX-License-Identifier: Apache-2.0
"""Flags of a small model, of a short run, and of grids."""

from megatron.training.settings.models import LLAMA_DEFAULTS as LLAMA  # noqa: F401

SHAPE = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64"
RUN = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 20 --lr 1e-3 --lr-decay-style cosine --clip-grad 1.0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 301 --eval-iters 0 --num-workers 0 --device cpu"
)

T2, SP = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"
U2, R2, P2 = (f"--{axis}-parallel-size 2" for axis in ("ulysses", "ring", "pipeline-model"))
GQA = "--group-query-attention --num-query-groups 2"
V2 = "--num-virtual-stages-per-pipeline-rank 2"
ZERO1, ZERO2, ZERO3 = (f"--zero-stage {stage}" for stage in (1, 2, 3))
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective"
A2A, ETP1 = "--moe-token-dispatcher-type alltoall", "--expert-tensor-parallel-size 1"
DEVICE, HOST, STREAM = "--no-fpdt-offload", "--offload-checkpoints", "--fpdt-stream-hidden"


def cp(ulysses: int, ring: int, balance: str = "") -> str:
    balance = f" --context-parallel-balance {balance}" if balance else ""
    return f"--ulysses-parallel-size {ulysses} --ring-parallel-size {ring}{balance}"


def fpdt(chunk: int, *others: str) -> str:
    """Chunks of at most this many of the 64 tokens."""
    return " ".join(("--fpdt --fpdt-chunk-size", str(chunk), *others))


def ep(size: int) -> str:
    return f"--expert-model-parallel-size {size}"
