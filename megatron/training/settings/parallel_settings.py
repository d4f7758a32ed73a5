# SPDX-License-Identifier: Apache-2.0
"""Settings of the grid, and of what is split over it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.decisions.key_exchange import KEY_EXCHANGES, PASSED_ON
from megatron.decisions.state_exchange import EXCHANGES
from megatron.training.settings.flag import AT_LEAST_1, AT_MOST_A_YEAR, count, flag
from megatron.training.settings.kinds.expert_kind import EXPERTS
from megatron.training.settings.kinds.hybrid_kind import STATES
from megatron.training.settings.kinds.latent_kind import LATENT
from megatron.training.settings.read_with import WITHOUT_FSDP

# A number of ranks, which a stage of --seq-length-schedule and generation may set.
ranks = partial(flag, range=AT_LEAST_1, stage=True, generation=True)


@dataclass
class ParallelConfig:
    """The grid TP x Ulysses x Ring x DP x PP, and how memory is split over it."""

    tensor_model_parallel_size: int = ranks(1, "tensor-parallel size (TP)", aliases=["--model-parallel-size"])
    sequence_parallel: bool = flag(
        False,
        "split activations over TP between the linear layers (TP-sp)",
        stage=True,
        generation="one new token has no sequence to split over TP",
        computes=True,
    )
    partition_position_embedding: bool = flag(
        False,
        "learned positions: each rank holds and trains only the rows of its own tokens",
        generation="a new token may have any position, so each rank holds the complete table",
        computes=True,
    )
    context_parallel_size: int | None = ranks(
        None,
        "ranks that a sequence is split over: Ulysses x Ring; without the two sizes, the split is chosen and logged",
    )
    ulysses_parallel_size: int | None = ranks(
        None, "Ulysses degree: all-to-all over heads", aliases=["--ds-sequence-parallel-size", "--ulysses-degree-in-cp"]
    )
    ring_parallel_size: int | None = ranks(None, "Ring degree: keys and values travel around the ranks")
    hierarchical_context_parallel_sizes: list[int] | None = ranks(
        None, "Megatron-LM's name for the two sizes: Ulysses degree, then Ring degree", nargs="+"
    )
    cp_comm_type: list[str] | None = flag(
        None,
        "Megatron-LM's name for the split: p2p is Ring, a2a is Ulysses, a2a+p2p is both (with "
        "--hierarchical-context-parallel-sizes); "
        + "; ".join(f"{name} {how.says}" for name, how in KEY_EXCHANGES.items() if name != PASSED_ON),
        nargs="+",
        stage=True,
        generation=True,
    )
    context_parallel_balance: str | None = flag(
        None,
        "how the work is split over the ring: zigzag for causal masks, contiguous for windows, documents for packed "
        "documents; default: the one that suits the mask",
        choices=["zigzag", "contiguous", "documents"],
        stage=True,
        generation=True,
        computes=True,
    )
    linear_attention_exchange: str = flag(
        "auto",
        "how linear-attention and SSM layers exchange states: maps are gathered, a state goes from rank to rank, or "
        "heads are split over Ulysses; auto: the one with the fewest bytes",
        choices=EXCHANGES,
        read_with=STATES,
        stage=True,
    )
    latent_exchange: str = flag(
        "keys",
        "what multi-latent attention sends over Ulysses and the ring: keys and values, or latents, from which each "
        "rank makes those of its heads",
        choices=("keys", "latents"),
        read_with=LATENT,
        stage=True,
    )
    expert_model_parallel_size: int = ranks(
        1, "ranks that share the experts (EP), neighbours in TP x CP x DP", read_with=EXPERTS, core=True
    )
    expert_tensor_parallel_size: int | None = ranks(
        None, "ranks that split each expert (TP of the experts); default the TP size", read_with=EXPERTS
    )
    moe_token_dispatcher_type: str = flag(
        "allgather",
        "how tokens reach the ranks of their experts; flex and alltoall_seq are sent as alltoall",
        choices=["allgather", "alltoall", "flex", "alltoall_seq"],
        read_with=EXPERTS,
        core=True,
        generation=True,
    )
    pipeline_model_parallel_size: int = ranks(1, "pipeline-parallel size (PP)", aliases=["--pipe-parallel-size"])
    num_layers_per_virtual_pipeline_stage: int | None = count(
        None,
        "interleaved 1F1B: layers per virtual stage",
        stage=True,
        generation="each rank has one pipeline stage, and stages work one after the other",
    )
    num_virtual_stages_per_pipeline_rank: int | None = count(
        None,
        "interleaved 1F1B: virtual stages per rank",
        stage=True,
        generation="each rank has one pipeline stage, and stages work one after the other",
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = count(
        None,
        "interleaved 1F1B: consecutive micro-batches on a virtual stage; default: the number of stages",
        stage=True,
    )
    decoder_first_pipeline_num_layers: int | None = flag(None, "layers of the first pipeline stage", stage=True)
    decoder_last_pipeline_num_layers: int | None = flag(None, "layers of the last pipeline stage", stage=True)
    account_for_embedding_in_pipeline_split: bool = flag(False, "the first stage has one layer less", stage=True)
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "layers of each pipeline stage, as in Et*3|(tt|)*29,m|L: E embedding, t layer, m prediction further, L loss",
        stage=True,
        generation="stages hold equal numbers of layers",
    )
    account_for_loss_in_pipeline_split: bool = flag(False, "the last stage has one layer less", stage=True)
    elastic: bool = flag(
        False,
        "choose the grid at each start for the number of processes: TP and PP as given, the largest CP that fits; "
        "for torchrun --nnodes MIN:MAX --max-restarts N",
    )
    elastic_grids: str | None = flag(
        None,
        'grids of --elastic by number of processes, "8: tp2 u2 r2; 4: u2 r2"; the remaining ranks are DP',
        stage=True,
    )
    zero_stage: int | None = flag(
        None,
        "ZeRO, over DP x CP: 1 splits optimizer states, 2 also gradients, 3 also weights",
        choices=[0, 1, 2, 3],
        stage=True,
        generation="each rank holds the complete weights of its TP part and stage; use TP or PP to split them",
        computes=True,
    )
    use_distributed_optimizer: bool = flag(False, "Megatron-LM's name for --zero-stage 1", stage=True)
    overlap_grad_reduce: bool = flag(
        False, "reduce gradients during the backward pass", read_with=WITHOUT_FSDP, stage=True, computes=True
    )
    overlap_param_gather: bool = flag(
        False, "gather parameters during the forward pass (ZeRO 1)", stage=True, computes=True
    )
    ddp_bucket_size: int | None = count(
        None, "gradient bucket, in parameters", read_with=WITHOUT_FSDP, stage=True, computes=True
    )
    grad_reduce_in_bf16: bool = flag(False, "reduce gradients in bf16", computes=True)
    distributed_backend: str | None = flag(
        None, "default: nccl on GPUs, gloo on a CPU", choices=["nccl", "gloo"], generation=True
    )
    distributed_timeout_minutes: int = flag(
        10, "longest time of one collective", range=(AT_LEAST_1, AT_MOST_A_YEAR), generation=True
    )
    network_interface: str | None = flag(
        None,
        "network interface of gloo and NCCL on every node, such as eth0; default GLOO_SOCKET_IFNAME, else the one on "
        "the route to MASTER_ADDR",
        generation=True,
    )

    @property
    def key_exchange(self) -> str:
        """How keys travel on the ring, by the table of decisions/key_exchange.py."""
        name = (self.cp_comm_type or [PASSED_ON])[0]
        return name if name in KEY_EXCHANGES else PASSED_ON
