#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the site of docs/, with the Python API from docstrings:  bash scripts/docs.sh [OUT_DIR]
#
# The build needs few packages and no torch, so it has its own virtual environment, .venv-docs (VENV=DIR names another
# folder), made from python3 (PYTHON=... names another one). A broken link stops the build.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT="${1:-out/site}"
VENV="${VENV:-.venv-docs}"
if ! "$VENV/bin/python" -c 'import mkdocs, material, mkdocstrings_handlers.python' 2>/dev/null; then
    echo "docs: making $VENV" >&2
    "${PYTHON:-python3}" -m venv "$VENV"
    "${PYTHON:-python3}" - "$VENV" <<'PYTHON'
import ast, subprocess, sys
tree = ast.parse(open("setup.py").read())
docs = next(n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "DOCS")
subprocess.run([f"{sys.argv[1]}/bin/python", "-m", "pip", "install", "-q", *ast.literal_eval(docs)], check=True)
PYTHON
fi
OUT="$(realpath -m "$OUT")"
# --quiet would hide the warnings from --strict.
NO_MKDOCS_2_WARNING=1 "$VENV/bin/python" -m mkdocs build --strict --site-dir "$OUT"
echo "docs: $OUT/index.html"
