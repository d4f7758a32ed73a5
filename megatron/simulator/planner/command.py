# SPDX-License-Identifier: Apache-2.0
"""From a plan to the command that starts it."""

from __future__ import annotations

from megatron.formulas.strategy import Strategy, Workload


def training_flags(workload: Workload, strategy: Strategy) -> list[str]:
    """Batch, length, grid and memory savings, as our programs read them."""
    s = strategy
    flags = ["--seq-length", str(workload.seq_length)]
    flags += ["--micro-batch-size", str(s.micro_batch), "--global-batch-size", str(workload.global_batch), "--bf16"]
    if s.tensor > 1:
        flags += ["--tensor-model-parallel-size", str(s.tensor), *(["--sequence-parallel"] * s.sequence_parallel)]
    flags += ["--ulysses-parallel-size", str(s.ulysses), "--ring-parallel-size", str(s.ring)]
    if s.pipeline > 1:
        flags += ["--pipeline-model-parallel-size", str(s.pipeline)]
    flags += uneven_stages(workload.shape.layers, s)
    if s.virtual > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(s.virtual)]
    flags += ["--zero-stage", str(s.zero)]
    if s.zero <= 1 and s.group("dp").size > 1:
        flags += ["--overlap-grad-reduce"] * s.overlap_grad_reduce
        flags += ["--overlap-param-gather"] * (s.zero == 1 and s.overlap_grad_reduce and s.overlap_param_gather)
    return flags + _saving_flags(s)


def uneven_stages(layers: int, s: Strategy) -> list[str]:
    """An embedding and a loss that count as layers where that cuts the stages so; else how long the ends are."""
    if max(s.first_less, s.last_less) <= 1:
        flags = ["--account-for-embedding-in-pipeline-split"] * s.first_less
        return flags + ["--account-for-loss-in-pipeline-split"] * s.last_less
    ends = (("first", s.first_less, 0), ("last", s.last_less, s.pipeline - 1))
    given = [(end, s.stage_layers(layers, stage)) for end, less, stage in ends if less]
    return [word for end, count in given for word in (f"--decoder-{end}-pipeline-num-layers", str(count))]


def _saving_flags(s: Strategy) -> list[str]:
    flags = []
    if s.recompute != "none":
        flags += ["--recompute-granularity", s.recompute]
    if s.recompute == "full":
        flags += ["--recompute-method", s.recompute_method, "--recompute-num-layers", str(s.recompute_layers)]
    if s.fpdt_chunk:
        flags += ["--fpdt", "--fpdt-chunk-size", str(s.fpdt_chunk), *([] if s.fpdt_offload else ["--no-fpdt-offload"])]
    flags += ["--fpdt-stream-hidden"] * s.stream_hidden
    flags += ["--offload-checkpoints"] * s.offload_checkpoints
    for flag, pieces in (("--ffn-chunks", s.ffn_chunks), ("--loss-chunks", s.loss_chunks)):
        flags += [flag, str(pieces)] if pieces else []
    return flags


def launcher(gpus: int, gpus_per_node: int) -> list[str]:
    """torchrun, to be started on every node, with NODE_RANK and MASTER_ADDR set where there are several."""
    words = ["torchrun", "--nproc-per-node", str(gpus_per_node)]
    if gpus > gpus_per_node:
        words += ["--nnodes", str(gpus // gpus_per_node), "--node-rank", "$NODE_RANK"]
        words += ["--master-addr", "$MASTER_ADDR", "--master-port", "6000"]
    return words


def environment(strategy: Strategy) -> list[str]:
    """Variables before the command. One connection keeps TP's transfers in front of the products that they overlap
    (as Megatron-LM asks for); FSDP needs several."""
    one = ["CUDA_DEVICE_MAX_CONNECTIONS=1"] if strategy.tensor > 1 and strategy.zero < 2 else []
    return [*one, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]
