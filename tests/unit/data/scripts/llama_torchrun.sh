#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A Llama on one node, as in many repositories: the script has arrays of flags, writes a log and makes folders.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=$(nvidia-smi --list-gpus | wc -l)
SEQ_LENGTH=${1:-8192}
OUT=${OUT:-/checkpoints/llama}
PYTHON=/opt/conda/bin/python

mkdir -p "$OUT"
rm -rf /tmp/torchelastic_*

MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
    --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
    --tokenizer-type NullTokenizer --vocab-size 128256 --mock-data
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size $((GPUS_PER_NODE * 16)) --train-iters 1000 --lr 3e-4 --min-lr 3e-5
    --lr-decay-style cosine --lr-warmup-iters 100 --clip-grad 1.0 --bf16 --use-flash-attn
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --save "$OUT" --save-interval 500
)

"$PYTHON" -m torch.distributed.run --nproc-per-node "$GPUS_PER_NODE" --nnodes 1 \
    pretrain_gpt.py "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" --tensor-model-parallel-size 2 --sequence-parallel \
    2>&1 | tee "$OUT/train.log"
