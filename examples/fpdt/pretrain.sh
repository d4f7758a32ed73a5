#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The six models of the FPDT paper on long sequences, on nodes of GPUs with 80 GB. MODEL names one of them:
#
#   MODEL=llama3-8b DATA_PATH=data/text_document TOKENIZER=path/to/tokenizer bash examples/fpdt/pretrain.sh [FLAGS]
#   MODEL=gpt-30b NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=data/text_document \
#       VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt bash examples/fpdt/pretrain.sh [FLAGS]   # on each node
#
# Without DATA_PATH it trains on random tokens. FLAGS are added at the end of the command, where they override the
# script's. Variables: GPUS (of a node), NNODES, NODE_RANK, MASTER_ADDR, SEQ_LENGTH, CHUNK, ZERO_STAGE, and STREAM=1
# where the hidden states do not fit on the GPUs.
#
# The paper's nodes have 4 GPUs.
#
#               nodes x GPUs   tokens      in the paper
#   gpt-2.7b    1 x 4          2,097,152   4M tokens on these GPUs (table 1)
#   gpt-6.7b    1 x 4          2,097,152   the longest on one node (section 5.2)
#   gpt-13b     1 x 8          2,097,152   3M tokens on 8 GPUs (table 1)
#   gpt-30b     2 x 8          2,097,152   3M tokens on 16 GPUs (table 1)
#   llama3-8b   1 x 4          2,097,152   the longest on 4 GPUs; with GPUS=8 SEQ_LENGTH=4194304 the run of table 3
#   llama3-70b  4 x 8          4,194,304   4M tokens on 32 GPUs, its longest sequence (table 1)
#
# Memory. A parameter takes 18 bytes (a bf16 weight; an fp32 gradient, main weight and Adam's two moments). A GPU holds
# its share of these states, about six hidden states at a time, and in the first forward pass the keys and values of the
# current layer, on several nodes also its queries and fp32 sums. The host memory of a node holds the inputs of the
# layers, which --recompute-num-layers 2 halves, and the current layer in its backward pass.
#
#                            of a GPU: states, GB     a hidden      current      of a node: inputs     current
#               parameters   ZeRO 3      ZeRO 1       state, GiB    layer, GiB   GiB (KiB a token)     layer, GiB
#   gpt-2.7b     2.6B        12           24          2.5           5              320   (160)          70
#   gpt-6.7b     6.7B        30           60          4             8              512   (256)         112
#   gpt-13b     12.8B        29           96          2.5           5              800   (400)         140
#   gpt-30b     30.0B        34          202          1.8           8.8            672   (672)          98
#   llama3-8b    8.0B        36           72          4             2              512   (256)          56
#   llama3-70b  70.6B        40          450          2             6.5          1,280 (1,280)          84
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
MODEL=${MODEL:-llama3-8b}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/fpdt_${MODEL//-/_}}
source examples/common/pretrain.sh

case $MODEL in # GPUs of a node, nodes, tokens, learning rate in units of 1e-4
    gpt-2.7b) SIZES=(4 1 2097152 1.6) ;;
    gpt-6.7b) SIZES=(4 1 2097152 1.2) ;;
    gpt-13b) SIZES=(8 1 2097152 1) ;;
    gpt-30b) SIZES=(8 2 2097152 1) ;;
    llama3-8b) SIZES=(4 1 2097152 3) ;;
    llama3-70b) SIZES=(8 4 4194304 1.5) ;;
    *) echo "error: MODEL=$MODEL: use gpt-2.7b, gpt-6.7b, gpt-13b, gpt-30b, llama3-8b or llama3-70b" >&2 && exit 2 ;;
esac
GPUS=${GPUS:-${SIZES[0]}}
NNODES=${NNODES:-${SIZES[1]}}
SEQ_LENGTH=${SEQ_LENGTH:-${SIZES[2]}}
LEARNING_RATE=${SIZES[3]}
CHUNK=${CHUNK:-65536}
ZERO_STAGE=${ZERO_STAGE:-3}
if [ -n "${STREAM:-}" ]; then HIDDEN_STATES=--fpdt-stream-hidden; else HIDDEN_STATES=--offload-checkpoints; fi

MODEL_ARGS=(--model "$MODEL" --max-position-embeddings "$SEQ_LENGTH")
if [[ $MODEL == llama* ]]; then
    PROGRAM=pretrain_llama.py
    choose_data 100,0,0 "${HUGGING_FACE_TOKENIZER[@]}"
else
    PROGRAM=pretrain_gpt.py
    # RoPE in place of GPT-3's learned positions, whose table would have 5 to 15 billion parameters at this length.
    MODEL_ARGS+=(--position-embedding-type rope)
    MOCK_VOCABULARY=50256
    choose_data 100,0,0 "${GPT2_TOKENIZER[@]}"
fi
# All-to-all inside a node, a ring across nodes.
PARALLEL_ARGS=(--ulysses-parallel-size "$GPUS" --ring-parallel-size "$NNODES" --zero-stage "$ZERO_STAGE")
LONG_ARGS=(--fpdt --fpdt-chunk-size "$CHUNK" "${RECOMPUTE_ARGS[@]}" "$HIDDEN_STATES")
TRAINING_ARGS=(
    --bf16 --micro-batch-size 1 --global-batch-size 1 --seq-length "$SEQ_LENGTH" --train-iters 1000
    --lr "${LEARNING_RATE}e-4" --min-lr "${LEARNING_RATE}e-5" --lr-decay-style cosine --lr-warmup-fraction 0.01
    "${OPTIMIZER_ARGS[@]}"
)
LOGGING_ARGS=("${LOG_ARGS[@]}" --save-interval 100 --eval-iters 0 --distributed-timeout-minutes 60)

exec torchrun --nproc-per-node "$GPUS" --nnodes "$NNODES" "${NODE_ARGS[@]}" "$PROGRAM" \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${LONG_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
