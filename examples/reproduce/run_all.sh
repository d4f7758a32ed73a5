#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All tables and figures of all papers, under OUT_DIR/PAPER/NAME:  bash examples/reproduce/run_all.sh [OUT_DIR]
#
# ITERATIONS=20 shortens the trainings (default 100). The script runs all papers; its exit code says whether one failed.
# bash examples/reproduce/run_folder.sh PAPER [OUT_DIR] runs one paper.
set -uo pipefail
status=0
for paper in fpdt usp ulysses genslm; do
    bash "$(dirname "${BASH_SOURCE[0]}")/run_folder.sh" "$paper" "$@" || status=1
done
exit $status
