# SPDX-License-Identifier: Apache-2.0
"""A dry run's trace beside torch.profiler's of the same step on real processes: what it predicts is there, in order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.training_runs import LLAMA, RUN, SHAPE, make_job

CASES = {
    "TP with gradient accumulation": (2, "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 8"),
    "USP": (4, "--ulysses-parallel-size 2 --ring-parallel-size 2 --zero-stage 1 --bf16"),
    "PP with gradient accumulation": (2, "--pipeline-model-parallel-size 2 --global-batch-size 8"),
}


def profiled_step(flags: str, folder: str) -> None:
    """A step under torch.profiler, as anybody would look at it; its trace is written."""
    import torch
    import torch.distributed as dist

    from megatron.training.job import batches_for
    from megatron.training.step import train_step

    job = make_job(flags, True)
    batches = batches_for(job, job.datasets[0], 0, 0)
    for chunk in job.chunks:
        chunk.train()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            train_step(job.runtime, job.chunks, job.optimizer, job.schedule, batches, job.config, job.batch_sizes.get())
    profiler.export_chrome_trace(f"{folder}/rank-{dist.get_rank()}.json")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name[0] == "T" else [pytest.mark.full]) for name in CASES]
)
def test_a_profilers_trace_is_laid_beside_the_predicted_one(pool, name: str, tmp_path: Path, capsys) -> None:
    from megatron.simulator.dry_run.dry_run import dry_run
    from megatron.simulator.dry_run.timeline import write_trace
    from megatron.simulator.machines.machine_file import load
    from megatron.training.arguments.parser import parse
    from tools import compare_trace

    ranks, flags = CASES[name]
    pool.run(profiled_step, ranks, flags, str(tmp_path))
    config = parse(f"{SHAPE} {RUN} {flags}".split(), LLAMA, ranks)
    machine = replace(load("A100-80G"), attention_kernel="cpu")
    dry = dry_run(config, ranks, machine, vocab_size=config.model.vocab_size + 1)
    if "accumulation" in name:
        assert dry.ranks[-1].micro_batches == (4, 3)  # one of them is there as a copy
    write_trace(dry, tmp_path / "dry.json.gz")
    real = [str(tmp_path / f"rank-{rank}.json") for rank in range(ranks)]
    out, both = tmp_path / "compared.json", tmp_path / "both.json"
    words = [str(tmp_path / "dry.json.gz"), *real, "--json", str(out), "--merged", str(both)]
    assert compare_trace.main(words) == 0
    print(capsys.readouterr().out[:6000])
    found = json.loads(out.read_text())
    assert [one["rank"] for one in found] == list(range(ranks))
    for one in found:
        assert one["share"] > 0.95, one["alone"]
        kinds = {(row["phase"], row["kind"]): row for row in one["rows"]}
        for phase in ("forward", "backward"):
            for kind in ("gemm", "attention"):
                row = kinds[phase, kind]
                assert row["calls_predicted"] == row["calls_measured"] > 0 and row["ms_measured"] > 0, (phase, kind)
        kind = {"T": "all_gather", "U": "all_to_all", "P": "p2p"}[name[0]]
        for phase in ("forward", "backward") if kind != "p2p" else [("forward", "backward")[one["rank"]]]:
            assert kinds[phase, kind]["calls_predicted"] == kinds[phase, kind]["calls_measured"] > 0
    events = json.loads(both.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} >= {"rank 1, measured"}
    assert compare_trace.main([real[0], real[1]]) == 2
    assert "is not a dry run's" in capsys.readouterr().err
