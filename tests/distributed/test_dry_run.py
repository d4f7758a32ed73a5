# SPDX-License-Identifier: Apache-2.0
"""A dry run predicts memory, communication and host memory of the same step on real processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed.flags import (
    A2A,
    FULL,
    GQA,
    HOST,
    LLAMA,
    P2,
    R2,
    RUN,
    SELECTIVE,
    SHAPE,
    SP,
    STREAM,
    U2,
    ZERO1,
    ZERO2,
    ZERO3,
    ep,
    fpdt,
)
from tests.distributed.training_runs import data_of, make_job, take_steps
from tests.pairs import by_pairs, settings

BIGGER = "--num-layers 2 --hidden-size 128 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512"
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 64"
STATES = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 32"
)

# name: (processes, llama or gpt, flags)
CASES = {
    "one process": (1, True, ""),
    "gpt, tied, learned positions": (1, False, "--hidden-dropout 0 --attention-dropout 0"),
    "bf16 with ZeRO 0": (2, True, "--bf16 --zero-stage 0"),
    "recompute": (2, True, f"{FULL} {ZERO1}"),
    "selective recompute": (2, True, f"{SELECTIVE} --bf16 {ZERO1}"),
    "Ulysses, more ranks than KV heads": (4, True, f"--ulysses-parallel-size 4 {GQA}"),
    "Ring": (4, True, "--ring-parallel-size 4"),
    "USP with DP": (8, True, f"{U2} {R2} {ZERO1} --bf16"),
    "TP with sequence parallel": (4, True, f"{SP} {ZERO1}"),
    "TP x Ulysses x Ring": (8, False, f"--hidden-dropout 0 --attention-dropout 0 {SP} {U2} {R2}"),
    "pipeline": (4, True, f"{P2} {R2} --global-batch-size 8"),
    "virtual pipeline": (2, True,
     f"--num-layers 4 {P2} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8"),
    "ZeRO 2": (2, True, f"{ZERO2} --bf16 {U2}"),
    "ZeRO 3": (4, True, f"{ZERO3} {R2} {FULL}"),
    "FPDT in host memory": (2, True, f"{fpdt(256)} {U2} {GQA} --global-batch-size 2"),
    "FPDT on a ring with offloaded checkpoints": (4, True,
     f"{fpdt(256)} {U2} {R2} {FULL} {HOST} --bf16 {ZERO1} --global-batch-size 2"),
    "offloaded checkpoints": (2, True, f"{FULL} {HOST} --ffn-chunks 4 --loss-chunks 4"),
    "latents on a Ring": (4, True,
     f"--multi-latent-attention --q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
     f"--v-head-dim 16 --qk-layernorm {SP} {R2}"),
    "experts on EP": (2, True,
     f"{EXPERTS} {ep(2)} {A2A} {ZERO1} --bf16 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff "
     f"0.01 --moe-layer-freq [0,1]"),
    "busy experts on EP": (2, True, f"{EXPERTS} {ep(2)} {A2A}"),
    "experts on EP x Ulysses": (4, True,
     f"{EXPERTS} {ep(4)} {U2} {A2A} --moe-shared-expert-intermediate-size 96 --moe-router-dtype fp32"),
    "experts on EP x Ulysses, gathered": (4, True,
     f"{EXPERTS} {ep(2)} {U2} --moe-token-dispatcher-type allgather {FULL} {ZERO1}"),
    "experts with ZeRO 3": (4, True, f"{EXPERTS} {ep(2)} {R2} {A2A} {ZERO3} --bf16 {FULL}"),
    "experts split over TP, with biases": (4, False, f"{EXPERTS} {SP} {ep(2)} --expert-tensor-parallel-size 2 {A2A}"),
    "latents and experts on EP x Ring": (4, True,
     f"{EXPERTS} {ep(2)} {R2} {A2A} --multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 "
     f"--qk-pos-emb-head-dim 8 --v-head-dim 16"),
    "states on Ulysses x Ring": (4, True, f"{STATES} {U2} {R2} --qk-layernorm --num-layers 3 --bf16"),
    "states on TP x Ring": (4, True, f"{STATES} {SP} {R2} {ZERO1} {FULL}"),
    "states by heads, ZeRO 3": (2, True, f"{STATES} {U2} --linear-attention-exchange heads {ZERO3}"),
    "states in FPDT": (4, True, f"{STATES} {U2} {R2} {fpdt(256)} --global-batch-size 2"),
    "prediction further on TP x Ring": (4, True, f"--mtp-num-layers 2 {SP} {R2} {ZERO1} --loss-chunks 2 --bf16 {GQA}"),
    "prediction further on the last stage": (4, True, f"--mtp-num-layers 1 {P2} {U2} --global-batch-size 8 {FULL}"),
    "prediction further with experts, ZeRO 3": (2, True, f"{EXPERTS} --mtp-num-layers 1 {ep(2)} {A2A} {ZERO3} --bf16"),
    "prediction further in FPDT": (2, True, f"--mtp-num-layers 1 {fpdt(256)} {R2} --global-batch-size 2"),
    "FPDT with TP, streamed": (4, True, f"{SP} {U2} {fpdt(256, STREAM)} {FULL} --global-batch-size 2"),
}  # fmt: skip


def choose(router, busy):
    """Let a rank's tokens choose all experts equally often, as in a dry run: token t the experts t * topk, ...

    ``busy``: the second half of 8 experts gets 1.5 times the mean: in 16 tokens 24 of 32 choices.
    """
    real, experts, topk = router.gating, router.num_experts, router.rule.topk

    def gating(x):
        logits = real(x)
        token, expert = torch.arange(logits[..., 0].numel()).view(logits.shape[:-1] + (1,)), torch.arange(experts)
        chosen = (expert - topk * token) % experts < topk
        if busy:
            second = torch.where(token % 16 < 8, 4 + (token + 1) % 4, token % 4)
            chosen = (expert == 4 + token % 4) | (expert == second)
        return logits / 1000 + 10 * chosen

    router.gating = gating


def watch(flags, llama, busy):
    """Peaks of a step of the real program, and what it sends and computes, on this rank."""
    from megatron.simulator.dry_run.recording.recorder import Recorder, axes_of
    from megatron.training.model.expert_load import routers

    job = make_job(flags, llama)
    for router in routers(job.model_chunks):
        choose(router, busy)
    recorder = Recorder(axes_of(job.runtime.grid), resized=job.config.parallel.zero_stage >= 2, history=False)
    batches = data_of(job)
    for chunk in job.model_chunks:
        chunk.train()
    with recorder:
        take_steps(job, 1, batches)
    host = max(recorder.host_peak, job.runtime.offload.pool.peak if job.runtime.offload else 0)
    return recorder.peak, host, recorder.trace.communication_bytes(), recorder.trace.flops()


def settings_of(name):
    """The settings of a case."""
    _, llama, flags = CASES[name]
    return settings(flags) | {"llama" if llama else "gpt"}


@pytest.mark.parametrize("name", by_pairs([(name,) for name in CASES], settings_of, lambda name: 2.0 + CASES[name][0]))
@pytest.mark.usual(0, 1, 2, 4, 5, 7)
def test_dry_run_equals_the_run(pool, name):
    from megatron.simulator.dry_run.one_rank import run_rank
    from megatron.training.arguments.parser import parse

    ranks, llama, flags = CASES[name]
    flags = f"{BIGGER} {flags}"
    real = pool.run(watch, ranks, flags, llama, "busy" in name)
    config = parse(f"{SHAPE} {RUN} {flags}".split(), LLAMA if llama else None, ranks)
    config.simulation.dry_run_expert_imbalance = 1.5 if "busy" in name else 1.0
    for rank in {0, ranks - 1} if "pipeline" in name or "Ring" in name else {ranks - 1}:
        device, host, communication, flops = real[rank]
        dry = run_rank(config, ranks, rank, config.model.vocab_size + 1)
        assert dry.trace.communication_bytes() == communication, rank
        assert dry.host_peak == host, rank
        assert dry.trace.flops() == flops, rank
        assert dry.device_peak == pytest.approx(device, rel=0.02), (rank, dry.device_peak / device)


# A dry run's trace compared with torch.profiler's of a real step: the predicted operations occur in the same order.


TRACE_CASES = {
    "TP with gradient accumulation": (2, "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 8"),
    "USP": (4, "--ulysses-parallel-size 2 --ring-parallel-size 2 --zero-stage 1 --bf16"),
    "PP with gradient accumulation": (2, "--pipeline-model-parallel-size 2 --global-batch-size 8"),
}


ZERO = {"calls_predicted": 0}


def profiled_step(flags: str, folder: str) -> None:
    """Write torch.profiler's trace of a step."""
    import torch
    import torch.distributed as dist

    job = make_job(flags, True)
    batches = data_of(job)
    for chunk in job.model_chunks:
        chunk.train()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        take_steps(job, 2, batches)
    profiler.export_chrome_trace(f"{folder}/rank-{dist.get_rank()}.json")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full) for name in TRACE_CASES])
def test_a_profilers_trace_is_compared_with_the_predicted_one(pool, name: str, tmp_path: Path, capsys) -> None:
    from megatron.simulator.dry_run.dry_run import dry_run
    from megatron.simulator.dry_run.timeline import write_trace
    from megatron.simulator.machines.machine_file import load
    from megatron.training.arguments.parser import parse
    from tools import compare_trace

    ranks, flags = TRACE_CASES[name]
    pool.run(profiled_step, ranks, flags, str(tmp_path))
    config = parse(f"{SHAPE} {RUN} {flags}".split(), LLAMA, ranks)
    machine = replace(load("A100-80G"), attention_kernel="cpu")
    dry = dry_run(config, ranks, machine, vocab_size=config.model.vocab_size + 1)
    if "accumulation" in name:
        assert dry.ranks[-1].micro_batches == (4, 3)  # one of them is a copy
    write_trace(dry, tmp_path / "dry.json.gz")
    real = [str(tmp_path / f"rank-{rank}.json") for rank in range(ranks)]
    out, both = tmp_path / "compared.json", tmp_path / "both.json"
    words = [str(tmp_path / "dry.json.gz"), *real, "--json", str(out), "--merged", str(both)]
    assert compare_trace.main(words) == 0
    print(capsys.readouterr().out[:6000])
    result = json.loads(out.read_text())
    assert [one["rank"] for one in result] == list(range(ranks))
    for one in result:
        assert one["share"] > 0.95, one["alone"]
        kinds = {(row["phase"], row["kind"]): row for row in one["rows"]}
        for phase in ("forward", "backward"):
            for kind in ("gemm", "attention"):
                row = kinds[phase, kind]
                assert row["calls_predicted"] == row["calls_measured"] > 0 and row["ms_measured"] > 0, (phase, kind)
        kind, others = {"T": ("all_gather", ""), "U": ("p2p", "all_to_all"), "P": ("p2p", "")}[name[0]]
        for phase in ("forward", "backward") if name[0] != "P" else [("forward", "backward")[one["rank"]]]:
            # On gloo the all-to-alls are messages, so that both directions of a link are used at once.
            predicted = kinds[phase, kind]["calls_predicted"] + kinds.get((phase, others), ZERO)["calls_predicted"]
            assert predicted == kinds[phase, kind]["calls_measured"] > 0, (phase, kind)
    events = json.loads(both.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} >= {"rank 1, measured"}
    assert compare_trace.main([real[0], real[1]]) == 2
    assert "is not a dry run's" in capsys.readouterr().err
