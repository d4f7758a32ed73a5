# SPDX-License-Identifier: Apache-2.0
"""``--load`` of a universal checkpoint of DeepSpeed's, as it is: weights, Adam's moments, how far its run had come.

    DIR/latest_universal                                         names the folder
    DIR/global_step100_universal/mp_rank_00_model_states.pt      args, iteration, state of the schedule
    DIR/global_step100_universal/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt
    DIR/global_step100_universal/zero/optimizer_state.pt         groups of parameters, with the step in older ones

Facts from deepspeed/checkpoint/ds_to_universal.py of deepspeedai/DeepSpeed and megatron/checkpointing.py of
deepspeedai/Megatron-DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.checkpoint.megatron_lm.incoming import Theirs
from megatron.training.checkpoint.megatron_lm.source import STATE
from megatron.training.checkpoint.megatron_lm.whole import WholeTensors
from megatron.training.checkpoint.older.names import LAYERS, Name
from megatron.training.checkpoint.older.sources import STATES, universal_names, universal_weights, whole

MOMENTS = ("exp_avg", "exp_avg_sq")


def open_universal(path: Checked) -> Theirs:
    """A universal checkpoint's folder. Raises Refusal where it does not hang together."""
    weights = universal_weights(path)
    states = unpickle.read(path.file(STATES))
    tensors: dict[str, Callable[[], Tensor]] = {_key(name): make for name, make in weights.tensors.items()}
    common: dict[str, Any] = {"iteration": states.get("iteration")}
    folders = universal_names(path)
    folders = {folder: name for folder, name in folders.items() if name in weights.tensors}
    if all(f"zero/{folder}/{moment}.pt" in path.files for folder in folders for moment in MOMENTS):
        tensors |= {
            f"{STATE}{moment}.{_key(name)}": whole(path.file(f"zero/{folder}/{moment}.pt"))
            for folder, name in folders.items()
            for moment in MOMENTS
        }
        step = _step(path, next(iter(folders)))
        common["optimizer"] = {"param_groups": [{"wd_mult": mult, "step": step} for mult in (0.0, 1.0)]}
        if (schedule := states.get("lr_scheduler")) is not None:
            common["opt_param_scheduler"] = schedule
    return Theirs(path.path, common, weights.args, WholeTensors(path.path, tensors))


def _key(name: Name) -> str:
    return name.key if name.layer is None else name.key.replace(LAYERS, f"{LAYERS}{name.layer}.")


def _step(path: Checked, folder: str) -> float:
    """How many steps Adam has taken."""
    own, groups = f"zero/{folder}/step.pt", "zero/optimizer_state.pt"
    if own in path.files:
        return float(unpickle.read(path.file(own)))
    held = unpickle.read(path.file(groups)).get("param_groups", []) if groups in path.files else []
    return float(next((group["step"] for group in held if group.get("step") is not None), 0))
