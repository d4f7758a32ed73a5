# SPDX-License-Identifier: Apache-2.0
"""Losses of ten steps by kind of model and by grid, to compare versions of megatron-core.

python -m tests.core_losses OUT.jsonl           # adds what OUT.jsonl lacks of the installed version, and compares
python -m tests.core_losses --write             # records them in distributed/data/core_losses.json

All versions may write one OUT.jsonl, and a run that was ended continues. On Python 3.12, ``PYTHONPATH=$PWD:FOLDER``
takes the version that is unpacked in FOLDER. A version takes six minutes of one core.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
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

    model, axes = KINDS[kind], GRIDS[grid][1]
    if "--num-layers 4" in axes:
        model = model.replace("[0]+[1]", "[0]+[1]*3")
    try:
        return train_job(make_job(f"{model} {axes}"), steps)[0]
    except Refusal as refusal:
        return str(refusal)


def recorded() -> dict[str, dict[str, Result]]:
    """Results by kind and grid, with megatron-core 0.16.1."""
    return json.loads(RECORD.read_text())


def run_missing(path: Path) -> None:
    """Run the cases of the installed version that a file lacks. A line of it is [version, kind, grid, result]."""
    from megatron.core import __version__

    from tests.distributed.pool import Pool

    done = results(path).get(__version__, {})
    with Pool() as pool, path.open("a") as lines:
        for kind, grid in CASES:
            if (kind, grid) not in done:
                result = pool.run(losses, GRIDS[grid][0], kind, grid, timeout=300)[0]
                print(json.dumps([__version__, kind, grid, result]), file=lines, flush=True)


def results(path: Path) -> dict[str, dict[tuple[str, str], Result]]:
    """What a file has, by version and case."""
    by_version: dict[str, dict[tuple[str, str], Result]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        version, kind, grid, result = json.loads(line)
        by_version.setdefault(version, {})[kind, grid] = result
    return by_version


def compare(name: str, found: dict[tuple[str, str], Result], known: dict[tuple[str, str], Result]) -> None:
    """Print how far results are from others of the same cases."""
    cases = [case for case in CASES if case in found and case in known]
    refused = [case for case in cases if isinstance(found[case], str) and found[case] == known[case]]
    other = [case for case in cases if case not in refused and type(found[case]) is not type(known[case])]
    apart = {
        case: max(abs(a - b) / abs(b) for a, b in zip(found[case], known[case], strict=True))
        for case in cases
        if case not in refused and case not in other
    }
    worst, equal = max(apart, key=apart.__getitem__), sum(one == 0 for one in apart.values())
    print(f"{name}: {len(apart)} runs, {equal} equal; largest relative difference {apart[worst]:.1e}, {worst}")
    print(f"  {len(refused)} refused by both; {len(other)} refused by one or for another reason: {other}")


def main(target: str) -> None:
    if target == "--write":
        with tempfile.TemporaryDirectory() as folder:
            run_missing(path := Path(folder, "losses"))
            ((_, found),) = results(path).items()
        lines = ",\n".join(
            f" {json.dumps(kind)}: {json.dumps({grid: found[kind, grid] for grid in GRIDS})}" for kind in KINDS
        )
        RECORD.write_text(f"{{\n{lines}\n}}\n")
        return
    run_missing(Path(target))
    by_version = results(Path(target))
    by_version["the record"] = {(kind, grid): one for kind, grids in recorded().items() for grid, one in grids.items()}
    for (name, found), (other, known) in itertools.combinations(by_version.items(), 2):
        compare(f"{name} and {other}", found, known)


if __name__ == "__main__":
    main(*sys.argv[1:])
