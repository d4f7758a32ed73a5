# SPDX-License-Identifier: Apache-2.0
"""Copies DeepSpeed's JSON file (``--deepspeed_config``) into settings.

Keys and defaults are DeepSpeed's. A key that has an equivalent must agree with the given flags; a key that asks for
something unsupported is refused by name. Notes say what Megatron-DeepSpeed takes from flags and not from the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any

from megatron.training.json_file import parse_json, read_bytes
from megatron.training.refusal import Refusal, one_line, raise_all, short
from megatron.training.settings.config import Config

NUMBERS = {
    "train_batch_size": ("data.global_batch_size", int),
    "train_micro_batch_size_per_gpu": ("data.micro_batch_size", int),
    "gradient_accumulation_steps": ("data.gradient_accumulation_steps", int),
    "gradient_clipping": ("optimizer.clip_grad", float),
}
# Keys that tune speed, memory or logs: the result does not depend on them.
HINTS = (
    "steps_per_print wall_clock_breakdown memory_breakdown dump_state flops_profiler comms_logger tensorboard wandb "
    "csv_monitor comet aio autotuning checkpoint nebula zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
    "prescale_gradients gradient_predivide_factor sparse_gradients disable_allgather "
    "use_data_before_expert_parallelism activation_checkpointing seq_parallel_communication_data_type timers pipeline "
    "use_node_local_storage"
).split()
ZERO_HINTS = (
    "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions "
    "allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint sub_group_size prefetch_bucket_size "
    "param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance "
    "gather_16bit_weights_on_model_save stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
    "stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params stage3_module_granularity_threshold "
    "module_granularity_threshold ignore_unused_parameters legacy_stage1 round_robin_gradients "
    "zero_hpz_partition_size memory_efficient_linear override_module_apply log_trace_cache_warnings mics_shard_size "
    "mics_hierarchical_params_gather"
).split()
# Sections that change the training, which are refused if they are switched on.
REFUSED = {
    "scheduler": "it would replace the schedule of the flags: use --lr-decay-style and the other --lr flags",
    "amp": "it is not supported: use --bf16 or --fp16",
    "data_efficiency": "every batch is used in full here: leave it out",
    "progressive_layer_drop": "layers are never dropped here: leave it out",
    "quantize_training": "it is not supported: leave it out",
    "compression_training": "it is not supported: leave it out",
    "sparse_attention": "use --attention-mask block-sparse",
    "eigenvalue": "it is not supported: leave it out",
    "elasticity": "the number of processes does not change during a run: leave it out",
    "hybrid_engine": "it generates text, and this program only trains: leave it out",
    "tensor_parallel": "use --tensor-model-parallel-size",
    "weight_quantization": "it is not supported: leave it out",
}
ZERO_REFUSED = {
    "cpu_offload": "the optimizer stays on the device here: leave it out",
    "cpu_offload_params": "weights stay on the device here: leave it out",
    "zero_quantized_weights": "weights are never quantized for communication: leave it out",
    "zero_quantized_nontrainable_weights": "weights are never quantized for communication: leave it out",
    "zero_quantized_gradients": "gradients are never quantized for communication: leave it out",
}
OFFLOAD = {
    "offload_optimizer": "the optimizer stays on the device here: use --zero-stage to split it, or leave it out",
    "offload_param": "weights stay on the device here: use --zero-stage 3 to split them, or leave it out",
}


def read_file(path: str) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        Refusal: no such file, or not a JSON object.
    """
    try:
        content = parse_json(read_bytes(path))
    except OSError as error:
        raise Refusal(f"--deepspeed_config {path}", f": {(error.strerror or 'cannot be read').lower()}") from None
    except ValueError as error:
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else one_line(error, 100)
        raise Refusal(f"--deepspeed_config {path}", f"is not JSON ({where}): are its placeholders filled in?") from None
    if not isinstance(content, dict):
        raise Refusal(f"--deepspeed_config {path}", "is not a JSON object")
    return content


class DeepSpeedFile:
    """Copies one file into a :class:`Config`; its faults are collected and refused together."""

    def __init__(self, path: str, config: Config, assign: Any) -> None:
        self.path, self.config, self.assign = path, config, assign
        self.content = read_file(path)
        self.faults: list[Refusal] = []
        self.unread: list[str] = []

    def translate(self) -> None:
        """Copy every key into the settings.

        Raises:
            Refusal: for every key that is not supported, or that contradicts a flag.
        """
        rules: dict[str, Callable[[Any], None]] = {
            **{key: partial(self._number, *setting, key) for key, setting in NUMBERS.items()},
            "zero_optimization": self._zero,
            "fp16": self._fp16,
            "bf16": self._bf16,
            "bfloat16": self._bf16,
            "communication_data_type": self._communication,
            "data_types": lambda v: self._communication(
                self._section(v or {}, "data_types").get("grad_accum_dtype"), "data_types.grad_accum_dtype"
            ),
            "curriculum_learning": self._curriculum,
            "optimizer": lambda v: self.config.notes.append(
                f"optimizer in {self.path} is ignored, as in Megatron-DeepSpeed: flags set the optimizer"
            ),
        }
        for key, value in self.content.items():
            if key in rules:
                if value is not None and value != "auto":
                    self._try(rules[key], value)
            elif key in REFUSED:
                if _switched_on(value):
                    self._fault(key, f": {REFUSED[key]}")
            elif key in HINTS:
                self.unread.append(key)
            else:
                self._unknown(key, [*rules, *REFUSED, *HINTS])
        self._clipping()
        raise_all(self.faults)
        if self.unread:
            self.config.notes.append(
                f"no effect here: {', '.join(self.unread)} in {self.path} (the result is the same)"
            )

    def _try(self, rule: Callable[[Any], None], value: Any) -> None:
        try:
            rule(value)
        except Refusal as refusal:
            self.faults += refusal.parts

    def _fault(self, key: str, reason: str) -> None:
        self.faults.append(Refusal(f"{key} in {self.path}", reason))

    def _unknown(self, key: str, known: list[str]) -> None:
        near = get_close_matches(key, known, 1, 0.7)
        hint = f"did you mean {near[0]}?" if near else "leave it out"
        self._fault(key, f"is not a known key: {hint}")

    def _number(self, name: str, kind: type, key: str, value: Any) -> None:
        if value == "auto":
            return
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or kind(value) != value or abs(value) > 2**53:
            raise Refusal(
                f"{key} {_written(value)} in {self.path} is not {'an integer' if kind is int else 'a number'}"
            )
        self.assign(name, kind(value), f"{key} {value:g} in {self.path}")

    def _section(self, value: Any, key: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Refusal(f"{key} in {self.path} is not a JSON object")
        return value

    def _zero(self, value: Any) -> None:
        section = {"stage": int(value)} if isinstance(value, bool) else self._section(value, "zero_optimization")
        stage = section.get("stage", 0)
        if stage not in (0, 1, 2, 3):
            raise Refusal(f"zero_optimization.stage {_written(stage)} in {self.path}: use 0, 1, 2 or 3")
        self.assign("parallel.zero_stage", int(stage), f"zero_optimization.stage {int(stage)} in {self.path}")
        for key, entry in section.items():
            name = f"zero_optimization.{key}"
            if key in OFFLOAD:
                device = entry.get("device", "none") if isinstance(entry, dict) else entry
                if device not in (None, False, "none"):
                    self._fault(name, f": {OFFLOAD[key]}")
            elif key in ZERO_REFUSED:
                if entry:
                    self._fault(name, f": {ZERO_REFUSED[key]}")
            elif key in ZERO_HINTS:
                self.unread.append(name)
            elif key != "stage":
                self._unknown(name, [f"zero_optimization.{k}" for k in (*OFFLOAD, *ZERO_REFUSED, *ZERO_HINTS)])

    def _bf16(self, value: Any) -> None:
        section = self._section(value, "bf16")
        self._precision("bf16", bool(section.get("enabled", False)))
        self.unread += [f"bf16.{key}" for key in section if key != "enabled"]

    def _fp16(self, value: Any) -> None:
        section, settings = self._section(value, "fp16"), self.config.optimizer
        on = bool(section.get("enabled", False))
        self._precision("fp16", on)
        if not on:
            return
        fixed = section.get("loss_scale", 0)
        if fixed:
            self._number("optimizer.loss_scale", float, "fp16.loss_scale", fixed)
        elif settings.loss_scale is not None:  # Megatron-DeepSpeed takes the loss scale from the file
            self.config.notes.append(
                f"--loss-scale {settings.loss_scale:g} is ignored with fp16 in {self.path}, as in "
                "Megatron-DeepSpeed: the loss scale is dynamic"
            )
            settings.loss_scale = None
        power = section.get("initial_scale_power", 16)
        if isinstance(power, bool) or not isinstance(power, int) or not 0 <= power <= 64:
            raise Refusal(f"fp16.initial_scale_power {_written(power)} in {self.path} is not an integer from 0 to 64")
        if "initial_scale_power" in section or not self.assign.is_given("optimizer.initial_loss_scale"):
            source = f"fp16.initial_scale_power {power} in {self.path}"
            self.assign("optimizer.initial_loss_scale", 2.0**power, source)
        for key, kind in (("loss_scale_window", float), ("min_loss_scale", float), ("hysteresis", int)):
            if key in section:
                self._number(f"optimizer.{key}", kind, f"fp16.{key}", section[key])
        known = ("enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "min_loss_scale", "hysteresis")
        for key in section:
            if key == "fp16_master_weights_and_grads" and section[key]:
                self._fault(f"fp16.{key}", ": main weights are fp32 here: leave it out")
            elif key in ("auto_cast", "consecutive_hysteresis") and section[key]:
                self._fault(f"fp16.{key}", "is not supported: leave it out")
            elif key not in (*known, "auto_cast", "consecutive_hysteresis", "fp16_master_weights_and_grads"):
                self._unknown(f"fp16.{key}", [f"fp16.{k}" for k in known])

    def _precision(self, name: str, on: bool) -> None:
        other = "bf16" if name == "fp16" else "fp16"
        source = f"{name}.enabled {json.dumps(on)} in {self.path}"
        if on and self.assign.is_given(f"optimizer.{other}") and getattr(self.config.optimizer, other):
            raise Refusal(f"{source} and --{other}", "are two precisions: leave one out")
        if on or self.assign.is_given(f"optimizer.{name}"):
            self.assign(f"optimizer.{name}", on, source)

    def _curriculum(self, value: Any) -> None:
        """Curriculum learning by sequence length: --rampup-seq-length."""
        section = self._section(value, "curriculum_learning")
        if not section.get("enabled", False):
            return
        kinds = (section.get("curriculum_type", "seqlen"), section.get("schedule_type"))
        if kinds != ("seqlen", "fixed_linear"):
            asked = " with ".join(str(kind)[:60] for kind in kinds)
            raise Refusal(
                f"curriculum_learning in {self.path} asks for {asked}: only seqlen with fixed_linear is supported; "
                "use that, or leave it out"
            )
        schedule = self._section(section.get("schedule_config"), "curriculum_learning.schedule_config")
        numbers = [section.get("min_difficulty"), schedule.get("difficulty_step")]
        numbers += [schedule.get("total_curriculum_step"), section.get("max_difficulty")]
        if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
            raise Refusal(
                f"curriculum_learning in {self.path} needs integers for min_difficulty, max_difficulty, "
                "difficulty_step and total_curriculum_step"
            )
        *ramp, longest = numbers
        if longest != self.config.data.seq_length:
            raise Refusal(
                f"curriculum_learning.max_difficulty {longest} in {self.path} is not --seq-length "
                f"{self.config.data.seq_length}: use {self.config.data.seq_length}",
                about="--seq-length",
            )
        source = f"curriculum_learning in {self.path}"
        self.assign("data.rampup_seq_length", ramp, source)

    def _communication(self, value: Any, key: str = "communication_data_type") -> None:
        """The dtype that gradients are summed in: fp32, or bf16 with --grad-reduce-in-bf16."""
        names = {"fp32": False, "float32": False, "bf16": True, "bfp16": True, "bfloat16": True}
        if value in (None, "auto"):
            return
        if not isinstance(value, str) or value not in names:
            raise Refusal(f"{key} {_written(value)} in {self.path}: gradients are summed in fp32 or bf16 here")
        self.assign("parallel.grad_reduce_in_bf16", names[value], f"{key} {value} in {self.path}")

    def _clipping(self) -> None:
        if self.content.get("gradient_clipping") not in (None, "auto"):
            return
        settings = self.config.optimizer
        if self.assign.is_given("optimizer.clip_grad"):
            self.config.notes.append(
                f"gradients are clipped by --clip-grad {settings.clip_grad:g}; DeepSpeed would not clip them, since "
                f"{self.path} has no gradient_clipping"
            )
        else:
            self.config.notes.append(f"gradients are not clipped: {self.path} has no gradient_clipping")
            settings.clip_grad = 0.0


def _written(value: Any) -> str:
    """A value in JSON; long ones shortened."""
    return short(value) if isinstance(value, list | dict) else json.dumps(value)[:100]


def _switched_on(value: Any) -> bool:
    """Whether a section is on: by "enabled", by the sections within it (compression), or by "type" (scheduler)."""
    if not isinstance(value, dict):
        return bool(value)
    if "enabled" in value:
        return bool(value["enabled"])
    return "type" in value or any(_switched_on(part) for part in value.values() if isinstance(part, dict))
