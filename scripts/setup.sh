#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make a Python that runs this repository, on any machine, and print its path:
#
#   PYTHON=$(bash scripts/setup.sh [EXTRAS])       EXTRAS: of setup.py, such as dev or test
#
# The Python is a virtual environment in .venv (VENV=DIR names another folder). The script changes nothing outside of
# this folder. It is made from python3 if that has torch: then .venv sees its packages and keeps its torch. Otherwise it
# is made from Python 3.13 or 3.12, also one of pyenv, because megatron-core 0.17 and later need them, or else from
# python3; PYTHON=... names another one. The script then first installs torch 2.13.0; on a machine without an NVIDIA GPU
# it takes the CPU build if the index has one. A second run finds the stamp of the first and ends at once. Progress goes
# to stderr.
set -euo pipefail

EXTRAS="${1:-}"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"
OURS="$VENV/bin/python"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_WARN_SCRIPT_LOCATION=1 PIP_USER=0
export PYTHONWARNINGS=ignore
unset PYTHONHOME

say() { echo "setup: $*" >&2; }
stop() { say "$@"; exit 1; }

# The python to start from: PYTHON if set, else the first of these that is new enough.
find_python() {
    local name names=("${PYTHON:-}") pyenv="${PYENV_ROOT:-$HOME/.pyenv}/versions"
    if [ -z "${PYTHON:-}" ]; then
        names=(python3.13 "$pyenv"/3.13.*/bin/python3 python3.12 "$pyenv"/3.12.*/bin/python3)
        names+=(python3 python3.11 python3.10 python)
        if has_torch python3; then names=(python3 "${names[@]}"); fi
    fi
    for name in "${names[@]}"; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    stop "${PYTHON:-python3} is not Python 3.10 or newer: install one, or name one with PYTHON=/path/to/python3"
}

has_torch() { "$1" -c 'import torch; torch.__version__' 2>/dev/null; } # not the remains of one

make_venv() {
    local python version
    python="$(find_python)"
    version="$("$python" -c 'import platform; print(platform.python_version())')"
    say "making $VENV with Python $version"
    if [ -e "$VENV" ] && [ ! -e "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV")" ]; then
        stop "$VENV is not a virtual environment: name another folder with VENV=DIR"
    fi
    if ! "$python" -m venv --clear "$VENV" >/dev/null 2>&1; then
        # Debian and Ubuntu have ensurepip in a separate package. Without it, a pip outside of .venv installs pip there.
        if ! "$python" -m venv --clear --without-pip "$VENV" >/dev/null 2>&1 ||
            ! "$python" -m pip --python "$OURS" install -qq pip >/dev/null 2>&1; then
            rm -rf "$VENV"
            stop "$python cannot make a virtual environment with pip: install its venv module (Debian and Ubuntu:" \
                "apt install python3-venv), or name another python with PYTHON=/path/to/python3"
        fi
    fi
    if has_torch "$python"; then
        share_packages "$python"
    fi
}

# Let .venv see the packages of $1, which may be a system python, conda's or that of another virtual environment.
share_packages() {
    say "torch is already there, from $1: it stays as it is"
    "$1" -c 'import os, sys
for path in sys.path:
    if os.path.basename(path) in ("site-packages", "dist-packages"):
        print(f"import site; site.addsitedir({path!r})")' >"$(site_packages)/shared.pth"
}

# .venv gets its own torchrun: PyTorch's adds thirty lines to a refusal of one, and a shared one starts the other python.
quiet_torchrun() {
    printf '#!%s\nimport sys\n\nfrom tools.torchrun import launch\n\nsys.exit(launch(sys.argv[1:]))\n' "$OURS" \
        >"$VENV/bin/torchrun"
    chmod +x "$VENV/bin/torchrun"
}

site_packages() { "$OURS" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

install_torch() {
    local wanted log
    if nvidia-smi -L >/dev/null 2>&1; then
        say "installing torch for the NVIDIA GPU (a large download)"
        "$OURS" -m pip install -qq "torch>=2.6" >&2
        return
    fi
    for wanted in torch==2.13.0+cpu torch==2.13.0 "torch>=2.6"; do
        say "installing $wanted"
        if log="$("$OURS" -m pip install -qq "$wanted" 2>&1)"; then
            return
        fi
        # The next attempt starts only if pip listed the versions and the wanted one is missing; a pip with constraints
        # of its own calls that a conflict. A network error ends the script, so that it cannot lead to the CUDA packages.
        if ! grep -qE "(No matching distribution found for|Cannot install) torch" <<<"$log" ||
            grep -q "from versions: none" <<<"$log"; then
            break
        fi
    done
    stop "pip could not install $wanted for $("$OURS" -V):"$'\n'"$log"
}

install_rest() {
    local target=".${EXTRAS:+[$EXTRAS]}" isolation="" torch
    # not torch.__version__, which also names a CUDA that pip does not know of
    torch="$("$OURS" -c 'from importlib.metadata import version; print(version("torch"))')"
    if ! "$OURS" -c "import sys; sys.exit(tuple(map(int, '$torch'.split('.')[:2])) < (2, 6))"; then
        stop "torch $torch is too old: install 2.6 or newer, or name a python without torch with PYTHON=/path/to/python3"
    fi
    if "$OURS" -c 'import setuptools, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 71)' 2>/dev/null; then
        isolation="--no-build-isolation" # nothing to download for the build
    fi
    say "installing the other packages${EXTRAS:+, with the extras $EXTRAS} (minutes, the first time)"
    {
        echo "torch==$torch"
        case ",$EXTRAS," in *,dev,* | *,test,*) cat "$ROOT/scripts/constraints.txt" ;; esac
    } >"$VENV/constraints.txt"
    (cd "$ROOT" && "$OURS" -m pip install -qq $isolation -c "$VENV/constraints.txt" -e "$target" >&2) ||
        stop "pip could not install the packages of setup.py; its reason is above"
    # Since 0.17, megatron-core contains a megatron/training, which would be found before ours.
    "$OURS" -c 'import sys; print(f"import sys; sys.path.insert(0, {sys.argv[1]!r})")' "$ROOT" \
        >"$(site_packages)/a_longcontext.pth"
    if ! (cd / && "$OURS" -c 'import megatron.core, megatron.training.settings.config' >&2); then
        stop "megatron-core and this repository do not share the namespace package megatron; a package named megatron" \
            "with an __init__.py, such as an installed Megatron-LM, may be in the way"
    fi
    quiet_torchrun
    say "ready: $OURS, $("$OURS" -V), torch $torch"
}

if command -v flock >/dev/null; then # if two first runs start at the same time, the second one waits
    exec 9<"$ROOT"
    flock 9
fi
STAMP="$VENV/stamp-${EXTRAS:-base}"
KEY="$ROOT $(cat "$ROOT/setup.py" "$ROOT"/scripts/{setup.sh,constraints.txt} | cksum)"
if [ "$(cat "$STAMP" 2>/dev/null)" != "$KEY" ] || ! "$OURS" -c '' 2>/dev/null; then
    "$OURS" -m pip --version >/dev/null 2>&1 || make_venv
    has_torch "$OURS" || install_torch
    install_rest
    echo "$KEY" >"$STAMP"
fi
echo "$OURS"
