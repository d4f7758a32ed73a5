# SPDX-License-Identifier: Apache-2.0
"""A rank's complete training state: its local tensors, and the objects that are not tensors.

It is saved without planning or gathering, so it fits only the same grid. Tensors that are identical on all ranks of
DP x CP (weights below ZeRO 2, states below ZeRO 1) are each saved by one rank, in shares of about the same size, and
sent to the others when they are loaded.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_state import get_data_parallel_group
from megatron.core.utils import to_local_if_dtensor
from safetensors import safe_open
from torch import Tensor, nn

from megatron.training.checkpoint.checkpoint import gather_parameters, unwrap
from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.rank_file import packed
from megatron.training.checkpoint.read_torch_dist import EXTRA_STATE, check_engine_states
from megatron.training.checkpoint.run_state import load_schedule, random_state, set_random_state
from megatron.training.checkpoint.sharded_state import make_states, parts_of
from megatron.training.refusal import Refusal, refuse_together
from megatron.training.settings.config import Config

OBJECTS = "objects"


@dataclass(frozen=True)
class Part:
    """A tensor of the training state."""

    name: str
    tensor: Tensor
    owner: int | None = None  # rank in DP x CP that saves it; None if every rank saves its own


@dataclass(frozen=True)
class TrainingState:
    """The objects that hold a job's state."""

    chunks: Sequence[nn.Module]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler | None
    config: Config

    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors that this rank saves, by name, without copying them. All ranks call it together."""
        gather_parameters(self.chunks, self.config)
        kept = [(part.name, part.tensor) for part in self._kept()]
        objects = torch.frombuffer(bytearray(packed(self._objects())), dtype=torch.uint8)
        return [*kept, (OBJECTS, objects)]

    def load(self, path: Path) -> None:
        """Load a copy whose checksum was verified. All ranks call it together, each with its own file.

        Raises:
            Refusal: on every rank, before anything is changed; the copy has other tensors.
        """
        make_states(self.optimizer)
        group = get_data_parallel_group(with_context_parallel=True)
        with safe_open(path, "pt") as file:
            refuse_together(lambda: self._check(file, path))
            for part in self._kept():
                part.tensor.copy_(file.get_tensor(part.name))
            named = path.resolve()  # for messages, because ``path`` contains a descriptor
            objects = unpickle.read_bytes(file.get_tensor(OBJECTS).numpy().tobytes(), named, complete=True)
        for part in self._parts():
            if part.owner is not None:
                dist.broadcast(part.tensor, dist.get_global_rank(group, part.owner), group=group)
        self._load_objects(objects, named)

    def _check(self, file: Any, path: Path) -> None:
        saved = {name: file.get_slice(name).get_shape() for name in file.keys() if name != OBJECTS}
        wanted = {part.name: list(part.tensor.shape) for part in self._kept()}
        if saved != wanted:
            name = next(name for name in (*wanted, *saved) if saved.get(name) != wanted.get(name))
            raise Refusal(
                f"the copy {path.resolve()} does not fit this run: {name} is {saved.get(name, 'missing')} in the copy, "
                f"{wanted.get(name, 'missing')} in this run; remove its folder to continue from the disk"
            )

    def _kept(self) -> list[Part]:
        rank = get_data_parallel_group(with_context_parallel=True).rank()
        return [part for part in self._parts() if part.owner in (None, rank)]

    def _parts(self) -> list[Part]:
        parts, identical = [], []
        for part, same in self._all_tensors():
            (identical if same else parts).append(part)
        shares = [0] * get_data_parallel_group(with_context_parallel=True).size()
        for part in sorted(identical, key=lambda part: -part.tensor.nbytes):
            owner = shares.index(min(shares))
            shares[owner] += part.tensor.nbytes
            parts.append(Part(part.name, part.tensor, owner))
        return parts

    def _all_tensors(self) -> list[tuple[Part, bool]]:
        """(tensor, whether it is identical on all ranks of DP x CP and is saved by only one of them)."""
        stage = self.config.parallel.zero_stage
        share = self.config.checkpoint.non_persistent_local_ckpt_algo == "fully_parallel"
        parts, weights = [], set()
        for number, chunk in enumerate(self.chunks):
            model = unwrap(chunk)
            for name, parameter in model.named_parameters():
                tensor = to_local_if_dtensor(parameter).detach()
                weights.add(tensor.untyped_storage().data_ptr())
                same = share and stage < 2 and getattr(parameter, "allreduce", True)  # False for partitioned positions
                parts.append((Part(f"model{number}.{name}", tensor), same))
            for name, buffer in model.named_buffers():
                parts.append((Part(f"model{number}.{name}", to_local_if_dtensor(buffer)), False))
        for name, main, states in self._states():
            tensor = to_local_if_dtensor(main).detach()
            same = share and stage < 1 and name.startswith("optimizer0.")  # optimizer1 has partitioned positions
            if tensor.untyped_storage().data_ptr() not in weights:  # in fp32 it is the weight, or a view of it
                parts.append((Part(f"{name}.param", tensor), same))
            for key, value in states.items():
                if isinstance(value, Tensor):
                    parts.append((Part(f"{name}.{key}", to_local_if_dtensor(value).detach()), same))
        return parts

    def _states(self) -> list[tuple[str, Tensor, dict[str, Any]]]:
        """(name, weight that the optimizer updates, its optimizer states)."""
        return [
            (f"optimizer{number}.{at}.{index}", main, part.optimizer.state[main])
            for number, part in enumerate(parts_of(self.optimizer))
            for at, group in enumerate(part.optimizer.param_groups)
            for index, main in enumerate(group["params"])
        ]

    def _objects(self) -> dict[str, Any]:
        optimizers = parts_of(self.optimizer)
        groups = [part.optimizer.param_groups for part in optimizers]
        return {
            "groups": [
                [{name: value for name, value in group.items() if name != "params"} for group in of_part]
                for of_part in groups
            ],
            "numbers": [
                {key: value for key, value in states.items() if not isinstance(value, Tensor)}
                for _, _, states in self._states()
            ],
            "scalers": [
                scaler.state_dict() if (scaler := getattr(part, "grad_scaler", None)) else None for part in optimizers
            ],
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "random": random_state(),
            "engine": {name: value for name, _, value in self._engine_states()},
        }

    def _load_objects(self, objects: dict[str, Any], path: Path) -> None:
        for part, groups, scaler in zip(parts_of(self.optimizer), objects["groups"], objects["scalers"]):
            for group, saved in zip(part.optimizer.param_groups, groups):
                group.update(saved)
            if scaler is not None:
                part.grad_scaler.load_state_dict(scaler)
        for (_, _, states), numbers in zip(self._states(), objects["numbers"]):
            states.update(numbers)
        if self.schedule is not None:
            load_schedule(self.schedule, {"opt_param_scheduler": objects["schedule"]}, path)
        loaded = {
            name: io.BytesIO(value) if isinstance(value, bytes) else value for name, value in objects["engine"].items()
        }
        check_engine_states(loaded, path)
        for name, module, _ in self._engine_states():
            if name in loaded:
                module.set_extra_state(loaded[name])
        set_random_state(objects["random"])

    def _engine_states(self) -> list[tuple[str, nn.Module, Any]]:
        """(name, module, extra state) of Transformer Engine's layers, for FP8."""
        states = []
        for number, chunk in enumerate(self.chunks):
            for name, module in unwrap(chunk).named_modules():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    value = module.get_extra_state()
                    value = value.getvalue() if isinstance(value, io.BytesIO) else value
                    if value is not None:
                        states.append((f"model{number}.{name}.{EXTRA_STATE}", module, value))
        return states
