#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run every command of one paper's folder:  bash examples/reproduce/run_folder.sh PAPER [OUT_DIR]
#
# A command is a file named figure_*, table_* or section_*, a .py or a .sh, that takes the folder to write to. What each
# prints is kept in OUT_DIR/PAPER/NAME/report.txt too. All are run; those that failed are named at the end.
set -euo pipefail
PAPER=${1:?error: which paper? name a folder of examples/reproduce, such as usp}
OUT=${2:-out/reproduce}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=$(bash scripts/setup.sh)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
failed=()
shopt -s nullglob
for file in examples/reproduce/"$PAPER"/{figure,table,section}_*.{py,sh}; do
    name=$(basename "${file%.*}")
    start=$SECONDS
    run=("$PYTHON")
    if [[ $file == *.sh ]]; then run=(bash); fi
    printf '\n=== %s\n' "$file"
    mkdir -p "$OUT/$PAPER/$name"
    if "${run[@]}" "$file" "$OUT/$PAPER/$name" 2>&1 | tee "$OUT/$PAPER/$name/report.txt"; then
        echo "=== $file: $((SECONDS - start)) s"
    else
        failed+=("$file")
    fi
done
if ((${#failed[@]})); then
    echo "error: failed: ${failed[*]}" >&2
    exit 1
fi
