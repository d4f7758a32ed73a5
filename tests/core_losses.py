# SPDX-License-Identifier: Apache-2.0
"""Losses of ten steps by kind of model and by grid, to compare versions of megatron-core.

python -m tests.core_losses OUT.json            # of the installed version; compares them with the recorded ones
python -m tests.core_losses --write             # records them in distributed/data/core_losses.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

RECORD = Path(__file__).parent / "distributed" / "data" / "core_losses.json"
STEPS = 10
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 48 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
LATENT = (
    "--num-layers 2 --multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"
)
KINDS = {
    "Llama": f"--num-layers 2 --group-query-attention --num-query-groups 4 {DROPOUT}",
    "GPT": f"--num-layers 2 --position-embedding-type learned_absolute --normalization LayerNorm {DROPOUT}",
    "Mixtral": f"--num-layers 2 {EXPERTS} --moe-z-loss-coeff 0.002",
    "DeepSeek": f"{LATENT} {EXPERTS} --moe-layer-freq [0]+[1] --moe-router-score-function sigmoid --moe-router-dtype "
    "fp32 --moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 32 --mtp-num-layers 1",
    # the layers of multi-token prediction have their own dropout, and windows by their own numbers
    "later tokens": "--num-layers 2 --mtp-num-layers 2 --window-size 16,0 --window-attn-skip-freq 2 "
    "--attention-dropout 0.1",
    "Gated DeltaNet": "--num-layers 4 --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 "
    "--linear-value-head-dim 12 --experimental-attention-variant gated_delta_net --linear-attention-freq [1,0,1,0]",
    "Mamba2": "--num-layers 4 --is-hybrid-model --mamba-num-heads 8 --mamba-head-dim 12 --mamba-state-dim 6 "
    f"--mamba-num-groups 4 --mamba-dt-min 0.01 --hybrid-override-pattern MM*- {DROPOUT}",
    "LoRA": "--num-layers 2 --lora-rank 4",
}
T2, P2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
R2, U2 = "--ring-parallel-size 2", "--ulysses-parallel-size 2"
GRIDS = {
    "one process": (1, ""),
    "R 2": (2, R2),
    "U 2, ZeRO 1": (2, f"{U2} --zero-stage 1"),
    "TP 2": (2, f"{T2} --sequence-parallel"),
    "PP 2": (2, P2),
    "DP 2, ZeRO 3": (2, "--zero-stage 3"),
    "R 2, FPDT": (2, f"{R2} --fpdt --fpdt-chunk-size 16"),
    "chunks of FFN": (1, "--ffn-chunks 4 --loss-chunks 4"),
    "full recompute": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "PP 2, interleaved": (2, f"{P2} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1"),
    "R 4": (4, "--ring-parallel-size 4"),
    "U 4": (4, "--ulysses-parallel-size 4"),
    "U 2, R 2": (4, f"{U2} {R2}"),
    "TP 2, R 2": (4, f"{T2} --sequence-parallel {R2}"),
    "TP 2, PP 2": (4, f"{T2} --sequence-parallel {P2}"),
    "TP 2, DP 2, ZeRO 1": (4, f"{T2} --sequence-parallel --zero-stage 1"),
    "R 2, DP 2, ZeRO 2": (4, f"{R2} --zero-stage 2"),
    "R 2, FPDT streamed, ZeRO 3": (2, f"{R2} --fpdt --fpdt-chunk-size 16 --fpdt-stream-hidden --zero-stage 3"),
    "EP 2": (2, "--expert-model-parallel-size 2"),
    "TP 2, EP 2, ETP 1": (
        4,
        f"{T2} --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    ),
}
CASES = [(kind, grid) for kind in KINDS for grid in GRIDS]


Result = list[float] | str  # losses, or why the program refuses the kind on the grid


def losses(kind: str, grid: str, steps: int = STEPS) -> Result:
    """The losses of the first steps, on each rank of a grid."""
    from megatron.training.refusal import Refusal
    from tests.distributed.training_runs import make_job, train_job

    try:
        return train_job(make_job(f"{KINDS[kind]} {GRIDS[grid][1]}"), steps)[0]
    except Refusal as refusal:
        return str(refusal)


def recorded() -> dict[str, dict[str, Result]]:
    """Results by kind and grid, with megatron-core 0.16.1."""
    return json.loads(RECORD.read_text())


def main(target: str) -> None:
    from tests.distributed.pool import Pool

    found: dict[str, dict[str, Result]] = {}
    with Pool() as pool:
        for kind, grid in CASES:
            found.setdefault(kind, {})[grid] = pool.run(losses, GRIDS[grid][0], kind, grid, timeout=300)[0]
    if target == "--write":
        lines = ",\n".join(f" {json.dumps(kind)}: {json.dumps(grids)}" for kind, grids in found.items())
        RECORD.write_text(f"{{\n{lines}\n}}\n")
        return
    Path(target).write_text(json.dumps(found))
    known = recorded()
    pairs = {case: (found[case[0]][case[1]], known[case[0]][case[1]]) for case in CASES}
    refused = {case: ours for case, (ours, theirs) in pairs.items() if isinstance(ours, str) and ours == theirs}
    other = [case for case, (ours, theirs) in pairs.items() if case not in refused and type(ours) is not type(theirs)]
    compared = [case for case in CASES if case not in refused and case not in other]
    apart = {case: max(abs(a - b) / abs(b) for a, b in zip(*pairs[case])) for case in compared}
    worst, equal = max(apart, key=apart.__getitem__), sum(one == 0 for one in apart.values())
    print(f"{len(compared)} runs compared, {equal} equal; largest relative difference {apart[worst]:.1e}, {worst}")
    print(
        f"{len(refused)} refused by both:",
        *(f"  {kind}, {grid}: {why}" for (kind, grid), why in refused.items()),
        sep="\n",
    )
    print(f"{len(other)} refused by one or for another reason: {other}")


if __name__ == "__main__":
    main(*sys.argv[1:])
