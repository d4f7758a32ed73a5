#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run all measurements that need a GPU, in one command:  bash benchmarks/gpu.sh [--stage NAME ...] OUT
#
# This needs a plain checkout, torch, and the wheels of megatron-core and einops on PYTHONPATH, and no network.
# `bash benchmarks/gpu.sh --help` says what each stage does. Without a GPU the same stages run in a tiny size on a CPU.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
