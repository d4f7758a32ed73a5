#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All tables and figures of DeepSpeed4Science:  bash examples/reproduce/genslm/run_all.sh [OUT_DIR]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_folder.sh" genslm "$@"
