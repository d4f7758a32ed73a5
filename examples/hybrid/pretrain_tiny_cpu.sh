#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A tiny hybrid as Qwen3-Next on a laptop without a GPU: three layers of four carry a state in place of keys and values.
# 15 steps on 4 processes as Ulysses 2 x Ring 2 are saved; 15 more follow on 2 processes with tensor parallelism. The
# loss falls on tokens that can be learned. Flags at the end override the script's.
set -euo pipefail
cd "$(dirname "$0")/../.."
SEQ_LENGTH=512
source examples/common/tiny_cpu.sh

SAVE_DIR="${SAVE_DIR:-out/hybrid}"
HYBRID_ARGS=(
    --num-layers 4 --experimental-attention-variant gated_delta_net --linear-attention-freq 4
    --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 32 --linear-value-head-dim 32
    --attention-output-gate --qk-layernorm --rotary-percent 0.25
)
run() {
    processes=$1
    shift
    torchrun --standalone --nproc-per-node "$processes" pretrain_llama.py "${LLAMA_ARGS[@]}" "${HYBRID_ARGS[@]}" \
        "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" --train-iters 30 --save "$SAVE_DIR" "$@"
}
run 4 --ulysses-parallel-size 2 --ring-parallel-size 2 --exit-interval 15 --save-interval 15 "$@"
run 2 --tensor-model-parallel-size 2 --sequence-parallel --load "$SAVE_DIR" "$@"
