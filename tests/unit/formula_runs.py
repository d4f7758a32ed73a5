# SPDX-License-Identifier: Apache-2.0
"""Dry runs of the real program, for comparison with formulas."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.formulas.kinds.sparse_figures import SparseLatent
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.planner.plan_report import training_flags

LLAMA: dict[str, Any] = {
    "model.normalization": "RMSNorm",
    "model.swiglu": True,
    "model.position_embedding_type": "rope",
    "model.add_bias_linear": False,
    "model.untie_embeddings_and_output_weights": True,
}
GPT: dict[str, Any] = {"model.position_embedding_type": "learned_absolute"}


@dataclass(frozen=True)
class Case:
    """A configuration, and the rank whose step is counted."""

    name: str
    workload: Workload
    strategy: Strategy
    itemsize: int = 4
    rank: int = 0
    stage: int = 0

    @property
    def fused(self) -> bool:
        """Whether a GPU is simulated (bf16) or a CPU (fp32)."""
        return self.itemsize == 2


@dataclass(frozen=True)
class Measured:
    """Bytes: the device's peak, model states by kind, the peak of host memory, and bytes sent by axis."""

    peak: int
    states: dict[str, int]
    host: int
    sent: dict[str, int]


def flags(case: Case) -> list[str]:
    """The command line of a case."""
    shape, strategy, workload = case.workload.shape, case.strategy, case.workload
    given = {
        "--num-layers": shape.layers,
        "--hidden-size": shape.hidden,
        "--ffn-hidden-size": shape.ffn,
        "--num-attention-heads": shape.heads,
        "--num-query-groups": shape.kv_heads,
        "--vocab-size": shape.vocab - 1,  # the mock tokenizer adds an end-of-document token
        "--max-position-embeddings": shape.positions or workload.seq_length,
        "--context-parallel-balance": strategy.balance,
        "--train-iters": 2,
        "--eval-iters": 0,
        "--lr": 1e-3,
        "--device": "cpu",
        "--hidden-dropout": 0,
        "--attention-dropout": 0,
        **_experts(shape, strategy),
        **_latents(shape),
        **_states(shape),
    }
    words = [word for word in training_flags(workload, strategy) if word != "--bf16" or case.itemsize == 2]
    words += [str(word) for pair in given.items() for word in pair]
    words += ["--mock-data", "--no-check-for-nan-in-loss-and-grad"]
    options = {
        "--group-query-attention": shape.latent is None,
        f"--kv-channels {shape.head_dim}": shape.latent is None,
        "--multi-latent-attention": shape.latent,
        "--dsa-indexer-use-sparse-loss": getattr(shape.latent, "learns", False),
        "--qk-layernorm": shape.qk_norm,
        "--attention-output-gate": shape.output_gate,
        "--is-hybrid-model": shape.pattern,
        "--overlap-grad-reduce": strategy.zero < 2,  # also on one rank
        "--overlap-param-gather": strategy.zero == 1,
        "--moe-enable-routing-replay": shape.mixture and shape.mixture.replay,
    }
    return words + " ".join(text for text, wanted in options.items() if wanted).split()


def _experts(shape: Shape, strategy: Strategy) -> dict[str, Any]:
    mixture = shape.mixture
    if mixture is None:
        return {}
    given = {
        "--num-experts": mixture.experts,
        "--moe-router-topk": mixture.topk,
        "--moe-ffn-hidden-size": mixture.ffn,
        "--expert-tensor-parallel-size": strategy.expert_tensor,
    }
    given |= {} if shape.pattern else {"--moe-layer-freq": str(list(mixture.layers))}
    shared = {"--moe-shared-expert-intermediate-size": mixture.shared} if mixture.shared else {}
    return given | shared | ({"--moe-expert-capacity-factor": mixture.capacity} if mixture.capacity else {})


def _states(shape: Shape) -> dict[str, Any]:
    linear, pattern = shape.linear, {"--hybrid-override-pattern": shape.pattern} if shape.pattern else {}
    if linear is None:
        return pattern
    if not linear.delta:
        return pattern | {
            "--mamba-num-groups": linear.key_heads,
            "--mamba-num-heads": linear.heads,
            "--mamba-state-dim": linear.keys,
            "--mamba-head-dim": linear.values,
        }
    return {
        "--experimental-attention-variant": "gated_delta_net",
        "--linear-attention-freq": str(list(linear.layers)),
        "--linear-num-key-heads": linear.key_heads,
        "--linear-num-value-heads": linear.heads,
        "--linear-key-head-dim": linear.keys,
        "--linear-value-head-dim": linear.values,
        "--linear-conv-kernel-dim": linear.width,
    }


def _latents(shape: Shape) -> dict[str, Any]:
    latent = shape.latent
    if latent is None:
        return {}
    given = {
        "--kv-lora-rank": latent.keys,
        "--qk-head-dim": shape.head_dim - latent.rotated,
        "--qk-pos-emb-head-dim": latent.rotated,
        "--v-head-dim": latent.value,
    }
    if isinstance(latent, SparseLatent):
        given |= {
            "--experimental-attention-variant": "dsa",
            "--dsa-indexer-n-heads": latent.index_heads,
            "--dsa-indexer-head-dim": latent.index_dim,
            "--dsa-indexer-topk": latent.chosen,
        }
        given |= {"--dsa-indexer-loss-coeff": 1} if latent.learns else {}
        given |= {"--dsa-indexer-topk-freq": 2} if latent.choosing else {}
    return given | ({"--q-lora-rank": latent.queries} if latent.queries else {})


def measure(case: Case) -> Measured:
    """A case's step on one simulated rank: on a GPU for bf16, on a CPU for fp32."""
    from megatron.simulator.dry_run.one_rank import run_rank
    from megatron.simulator.machines.machine_file import load
    from megatron.training.arguments.parser import parse
    from megatron.training.report.memory_picture import KINDS, series

    shape, ranks = case.workload.shape, case.strategy.ranks
    kind = GPT if shape.positions else LLAMA | {"model.swiglu": shape.gated}
    config = parse(flags(case), dict(kind), ranks)
    config.simulation.dry_run_expert_imbalance = case.workload.imbalance
    result = run_rank(config, ranks, case.rank, shape.vocab, machine=load("A100-80G") if case.fused else None)
    _, sizes = series(result.profile)
    after_step = dict(zip(KINDS, sizes[-1].tolist()))
    states = {kind: after_step[kind] for kind in ("parameters", "gradients", "optimizer")}
    sent = {axis: size for axis, size in result.trace.communication_bytes().items() if size > 64}
    return Measured(result.device_peak, states, result.host_peak, sent)


def measure_all(cases: list[Case], file: Path) -> None:
    """Measure all cases in this process and write the results."""
    file.write_bytes(pickle.dumps([measure(case) for case in cases]))
