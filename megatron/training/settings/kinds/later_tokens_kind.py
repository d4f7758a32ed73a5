# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: layers that each predict one more token ahead."""

from __future__ import annotations

from megatron.training.refusal import refuse_combinations
from megatron.training.settings.flag import NOT_NEGATIVE, flag, weights
from megatron.training.settings.kinds.kind import Kind, Run, settings_of
from megatron.training.settings.read_with import of_kind

MTP = of_kind("mtp_num_layers")


@settings_of(MTP)
class LaterTokenSettings:
    """Settings of multi-token prediction."""

    mtp_num_layers: int | None = weights(
        None, "layers that each predict one more token ahead (multi-token prediction)", range=NOT_NEGATIVE, core=True
    )
    mtp_loss_scaling_factor: float = flag(0.1, "weight of the mean of their losses", range=NOT_NEGATIVE, core=True)


def _prepare(config: Run) -> None:
    """Refuse what does not work with multi-token prediction yet."""
    model, parallel, chunks = config.model, config.parallel, config.chunks
    if not model.mtp_num_layers:
        model.mtp_num_layers = None
        return
    refused = {
        "--fpdt-stream-hidden": (chunks.fpdt_stream_hidden, "its layers need hidden states on the device"),
        "--offload-checkpoints": (chunks.offload_checkpoints, "the inputs of its layers stay on the device"),
        "--lora-rank": (model.lora_rank, "its layers have no adapters"),
        "--embed-layernorm": (model.embed_layernorm, "its embedding has no norm"),
        "--position-embedding-type learned_absolute": (
            model.position_embedding_type == "learned_absolute",
            "use --position-embedding-type rope",
        ),
        "--hidden-dropout": (model.hidden_dropout, "its embedding has no dropout: use --hidden-dropout 0"),
        "--fp8-format": (model.fp8_format, "it needs Transformer Engine's layers"),
        "--elastic --gpu": (parallel.elastic and config.simulation.gpu, "the planner does not know its time"),
    }
    fixes = {"--position-embedding-type": "--position-embedding-type rope", "--hidden-dropout": "--hidden-dropout 0"}
    refuse_combinations(f"--mtp-num-layers {model.mtp_num_layers}", refused, fixes)


KIND = Kind(MTP, prepare=_prepare)
