#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that only a GPU can tell, in one command:  bash benchmarks/gpu.sh [--stage NAME ...] OUT
#
# Needs a plain checkout, torch, and the wheels of megatron-core and einops on PYTHONPATH; no network. What each stage
# does: bash benchmarks/gpu.sh --help. Without a GPU the same runs in a tiny size on the CPU.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
