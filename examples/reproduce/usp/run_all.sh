#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All tables and figures of USP:  bash examples/reproduce/usp/run_all.sh [OUT_DIR]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run_folder.sh" usp "$@"
