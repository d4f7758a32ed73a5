#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run every command of one paper's folder:  bash examples/reproduce/run_folder.sh PAPER [OUT_DIR]
#
# The commands are `tables.py NAME` for each of its names, and the .py and .sh files named figure_* or section_*. Each
# writes to the folder OUT_DIR/PAPER/NAME, where its printed output is kept as report.txt. The script runs all commands,
# and names those that failed at the end.
set -euo pipefail
PAPER=${1:?error: which paper? name a folder of examples/reproduce, such as usp}
OUT=${2:-out/reproduce}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=$(bash scripts/setup.sh)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
failed=()

run() { # NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    local label="${*:2}"
    printf '\n=== %s\n' "$label"
    mkdir -p "$OUT/$PAPER/$name"
    if "$@" "$OUT/$PAPER/$name" 2>&1 | tee "$OUT/$PAPER/$name/report.txt"; then
        echo "=== $label: $((SECONDS - start)) s"
    else
        failed+=("$label")
    fi
}

folder=examples/reproduce/$PAPER
names=$("$PYTHON" "$folder/tables.py" --names)
for name in $names; do
    run "$name" "$PYTHON" "$folder/tables.py" "$name"
done
shopt -s nullglob
for file in "$folder"/{figure,section}_*.{py,sh}; do
    name=$(basename "${file%.*}")
    if [[ $file == *.sh ]]; then run "$name" bash "$file"; else run "$name" "$PYTHON" "$file"; fi
done
if ((${#failed[@]})); then
    printf 'error: failed: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
    exit 1
fi
