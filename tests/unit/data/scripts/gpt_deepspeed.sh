#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A GPT with DeepSpeed: the script writes its configuration, fetches files, and starts a command that is in a string.
DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$DIR/cluster.env"

CONFIG=ds_config.json
cat <<EOT > $CONFIG
{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 2,
  "zero_optimization": { "stage": 1 },
  "bf16": { "enabled": true }
}
EOT

[ -f gpt2-vocab.json ] || wget https://example.org/gpt2-vocab.json
[ -f gpt2-merges.txt ] || wget https://example.org/gpt2-merges.txt

options=" \
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 2 --global-batch-size 64 --train-iters 1000 --lr 1e-4 --lr-decay-style cosine \
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-path data_text_document --split 98,2,0 \
    --attention-dropout 0 --hidden-dropout 0 --clip-grad 1.0 --zero-stage 1 \
    --embed-layernorm --cpu-optimizer --lr-warmup-iter 100"
[ "$PRECISION" = bf16 ] && options="$options --bf16"

run="deepspeed --num_nodes $NODES --num_gpus 8 pretrain_gpt.py $options &> run.log"
echo "$run"
eval $run
