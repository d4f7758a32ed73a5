# SPDX-License-Identifier: Apache-2.0
"""When a setting is read: conditions that fields name, for notes on flags without effect, and for megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Condition(NamedTuple):
    """What must hold for a setting to have an effect.

    Attributes:
        text: for the note on a flag that has none.
        holds: of a complete configuration.
        switch: of the settings of a kind of layer, the one that gives a model such layers. In other models checkpoints
            are not compared by the settings of this kind, and core does not get them.
        value: of the switch, if it chooses one of several kinds.
    """

    text: str
    holds: Callable[[Any], bool]
    switch: str | None = None
    value: str | None = None

    @property
    def flag(self) -> str:
        """The flag that gives a model such layers."""
        return f"--{self.switch.replace('_', '-')}{f' {self.value}' if self.value else ''}"

    def chosen(self, settings: Mapping[str, Any]) -> bool:
        """Whether a model with these settings has layers of the kind."""
        return settings[self.switch] == self.value if self.value else bool(settings[self.switch])


def of_kind(switch: str, value: str | None = None) -> Condition:
    """That a model has layers of the kind which ``switch`` gives it."""
    kind = Condition("", lambda c: kind.chosen(vars(c.model)), switch, value)
    kind = kind._replace(text=f"read only with {kind.flag}")
    return kind


ROTARY = ("rope", "yarn")  # values of --position-embedding-type that rotate queries and keys
# Tokenizers that read no file.
FILELESS = (
    "NullTokenizer", "GPT2BPETokenizer", "QwenTokenizer", "ByteLevelTokenizer", "NucleotideTokenizer", "CodonTokenizer",
)  # fmt: skip

ROPE = Condition(
    "read only with RoPE: --position-embedding-type rope", lambda c: c.model.position_embedding_type in ROTARY
)
ROPE_SCALING = Condition("read only with --use-rope-scaling", lambda c: c.model.use_rope_scaling)
GELU = Condition("read only with GELU", lambda c: not (c.model.gated or c.model.squared_relu))
WITHOUT_XAVIER = Condition(
    "not read with --init-method-xavier-uniform", lambda c: not c.model.init_method_xavier_uniform
)
WITHOUT_PADDED_SIZE = Condition(
    "--padded-vocab-size sets the number of rows", lambda c: c.model.padded_vocab_size is None
)
FP8 = Condition("read only with --fp8-format", lambda c: c.model.fp8_format is not None)
FP8_DELAYED = Condition(
    "read only with --fp8-format and --fp8-recipe delayed",
    lambda c: c.model.fp8_format is not None and c.model.fp8_recipe == "delayed",
)
WITHOUT_FSDP = Condition(
    "--zero-stage 2 and 3 always sum gradients layer by layer, overlapped with computation",
    lambda c: c.parallel.zero_stage < 2,
)
WITHOUT_SGD = Condition("not read with --optimizer sgd", lambda c: c.optimizer.optimizer != "sgd")
SGD = Condition("read only with --optimizer sgd", lambda c: c.optimizer.optimizer == "sgd")
MUON = Condition("read only with --optimizer muon", lambda c: c.optimizer.optimizer == "muon")
DYNAMIC_LOSS_SCALE = Condition(
    "read only with --fp16 and without --loss-scale", lambda c: c.optimizer.fp16 and c.optimizer.loss_scale is None
)
WITHOUT_FP16 = Condition("--fp16 always skips steps that are not finite", lambda c: not c.optimizer.fp16)
SPIKES = Condition(
    "read only with --check-for-spiky-loss or --check-for-large-grads",
    lambda c: c.faults.check_for_spiky_loss or c.faults.check_for_large_grads,
)
WSD = Condition("read only with --lr-decay-style WSD", lambda c: c.optimizer.lr_decay_style == "WSD")
DECAY = Condition("not read with --lr-decay-style constant", lambda c: c.optimizer.lr_decay_style != "constant")
LOAD = Condition("read only with --load", lambda c: bool(c.checkpoint.load or c.checkpoint.pretrained_checkpoint))
COPIES = Condition(
    "read only with --non-persistent-save-interval", lambda c: c.checkpoint.non_persistent_save_interval is not None
)
REPLICATION = Condition("read only with --replication", lambda c: c.checkpoint.replication)
SAVE = Condition("read only with --save", lambda c: bool(c.checkpoint.save))
REAL_DATA = Condition("not read with --mock-data", lambda c: not c.data.mock_data)
URL = Condition("read only with data that have a URL", lambda c: c.data.may_have_url)
BPE = Condition(
    "read only with --tokenizer-type GPT2BPETokenizer or QwenTokenizer",
    lambda c: c.data.tokenizer_type in ("GPT2BPETokenizer", "QwenTokenizer"),
)
FIM = Condition("read only with --fim-data", lambda c: c.data.fim_data)
PLANNED_PACKING = Condition("read only with --packing best-fit or by-work", lambda c: c.data.packing != "greedy")
SFT = Condition("read only with --sft", lambda c: c.data.sft)
PAIRS = Condition("read only with --dpo or --reward-model", lambda c: c.pairs)
DPO = Condition("read only with --dpo", lambda c: c.data.dpo)
WITHOUT_SFT = Condition("not read with --sft", lambda c: not c.data.sft)
LORA = Condition("read only with --lora-rank", lambda c: c.model.lora_rank is not None)
TIKTOKEN = Condition("read only with --tokenizer-type TikTokenizer", lambda c: c.data.tokenizer_type == "TikTokenizer")
TOKENIZER_FILE = Condition("this tokenizer reads no file", lambda c: c.data.tokenizer_type not in FILELESS)
TENSORBOARD = Condition("read only with --tensorboard-dir", lambda c: c.logging.tensorboard_dir is not None)
WANDB = Condition("read only with --wandb-project", lambda c: c.logging.wandb_project is not None)
MLFLOW = Condition("read only with --mlflow-experiment", lambda c: c.logging.mlflow_experiment is not None)
MEMORY_HISTORY = Condition("read only with --record-memory-history", lambda c: c.logging.record_memory_history)
PROFILE = Condition("read only with --profile", lambda c: c.logging.profile)
RECORDED = Condition(
    "read only with --profile or --record-memory-history",
    lambda c: c.logging.profile or c.logging.record_memory_history,
)
PYTORCH_PROFILER = Condition(
    "read only with --profile and --use-pytorch-profiler",
    lambda c: c.logging.profile and c.logging.use_pytorch_profiler,
)
