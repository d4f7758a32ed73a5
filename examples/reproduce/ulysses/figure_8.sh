#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Figure 8 of the DeepSpeed-Ulysses paper, small: the loss of a GPT with sequences over 4 processes, by Megatron's
# sequence parallelism and by Ulysses under each ZeRO stage.
#
#   bash examples/reproduce/ulysses/figure_8.sh [OUT_DIR]
#
# A sample has 512 tokens. ITERATIONS is 100. The script fails if the curves differ.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
OUT=${1:-out/reproduce/ulysses/figure_8}
. examples/reproduce/convergence.sh

train megatron-sp pretrain_gpt.py --tensor-model-parallel-size 4 --sequence-parallel
runs=()
for stage in 0 1 2 3; do
    train "ulysses-zero-$stage" pretrain_gpt.py --ulysses-parallel-size 4 --zero-stage "$stage"
    runs+=("ulysses-zero-$stage")
done
"$PYTHON" examples/reproduce/convergence.py "$OUT" figure_8 "Ulysses, figure 8, small: SP 4" megatron-sp "${runs[@]}"
