#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the steps of action.yml as a workflow does: a fresh home, a fresh virtual environment with torch alone, and a
# clone of the last commit. As root the checkout is hidden, so nothing of it is used.
#
#   time bash tests/action.sh [PYTHON]      needs a package index, and about 1.5 GB below /tmp
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${1:-python3}" place="$(mktemp -d /tmp/action.XXXX)"
trap 'rm -rf "$place"' EXIT
git clone -q --depth 1 "file://$PWD" "$place/action"
mkdir "$place/home" "$place/project"
"$python" -m venv "$place/venv"

cat > "$place/project/program.py" <<'PROGRAM'
import torch
import torch.distributed as dist


def right(ranks, middle=torch.nn.Tanh):
    torch.manual_seed(1)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), middle(), torch.nn.Linear(4, 3)), torch.randn(8, 4)
    loss = model(x.chunk(ranks)[dist.get_rank()]).square().sum()
    loss.backward()
    dist.all_reduce(loss := loss.detach())
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
    return model, loss


def wrong(ranks):
    return right(ranks, torch.nn.Softsign if ranks > 1 else torch.nn.Tanh)
PROGRAM

cat > "$place/project/my script.py" <<'SCRIPT'
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rows, notes = int(sys.argv[1].split("=")[1]), sys.argv[3].split()
assert notes in ([], ["$(touch", "evil);", "two", "words"]), sys.argv
torch.manual_seed(1)
model, data = torch.nn.Linear(4, 3), torch.randn(8, 4)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(9):
    optimizer.zero_grad()
    loss = model(data[rows * dist.get_rank() :][:rows]).square().mean() / dist.get_world_size()
    loss.backward()
    for tensor in [loss.detach(), *(weight.grad for weight in model.parameters())]:
        if "--alone" not in sys.argv:
            dist.all_reduce(tensor)
    print("mean loss", loss.item())
    optimizer.step()
SCRIPT

cat > "$place/steps.sh" <<'STEPS'
set -euo pipefail
cd "$PLACE/project"
. "$PLACE/venv/bin/activate"
python -m pip install -q torch==2.13.0 numpy
read_step() {  # the text of a step's run: its lines are indented by more than "run"
    awk -v step="$1" '/^ +(- )?(shell|env|run):/ {on = 0} /run:/ {n++; on = n == step; sub(/.*run: ?\|?/, "")} on' \
        "$PLACE/action/action.yml" | sed 's/^ *//'
}
bash -c "$(read_step 1 | sed "s|\${{ github.action_path }}|$PLACE/action|")"
check() {  # check CODE PROGRAM [LOSS]: the step ends with this code
    code=0
    PROGRAM="$2" GRIDS="ranks=2 ranks=4" LOSS="${3:-}" LOSS_FILE="" \
        bash -eo pipefail -c "$(read_step 2)" > "$PLACE/said" 2>&1 || code=$?
    echo "$2: exit code $code"; cat "$PLACE/said"
    [ "$code" = "$1" ]
}
check 0 program.py:right
check 1 program.py:wrong
grep -q "forward: first in the output of 1" "$PLACE/said"
check 0 "'my script.py' --rows={8/ranks} --note '"'$(touch evil); two words'"'" "mean loss"
check 1 "'my script.py' --rows={8/ranks} --note '' --alone" "mean loss"
[ ! -e evil ]
check 2 "'my script.py"  # a quote that does not end
[ "$(cat "$PLACE/said")" = "error: No closing quotation" ]
STEPS

run=(env -i "PATH=/usr/local/bin:/usr/bin:/bin" "HOME=$place/home" "PLACE=$place" bash "$place/steps.sh")
if unshare -m true 2> /dev/null; then
    unshare -m bash -c 'mount -t tmpfs none "$0" && cd / && shift 0 && exec "$@"' "$PWD" "${run[@]}"
else
    "${run[@]}"
fi
