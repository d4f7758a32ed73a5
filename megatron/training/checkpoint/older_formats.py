# SPDX-License-Identifier: Apache-2.0
"""Read weights from Megatron-LM's older format ``torch``, or from a universal checkpoint of DeepSpeed.

    DIR/iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt        a file for each rank of TP x PP
    DIR/global_step100_universal/zero/NAME/fp32.pt              a file for each complete weight, in fp32

Files are memory-mapped, and a weight is assembled when it is requested, so memory holds one weight, not the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.checkpoint.megatron_lm.load_torch_dist import ForeignCheckpoint
from megatron.training.checkpoint.megatron_lm.megatron_args import model_of, namespace
from megatron.training.checkpoint.megatron_lm.places import TRACKER, name_in
from megatron.training.checkpoint.megatron_lm.source import LAYERS, STATE, join_parts, split_dim
from megatron.training.checkpoint.megatron_lm.stored_tensors import WholeTensors
from megatron.training.refusal import Refusal

# Names of weights in Megatron-LM before core, and in DeepSpeed with and without its pipeline module, to core's names.
#
# Sources: megatron/legacy/model of NVIDIA/Megatron-LM (core 0.9 to 0.12) and megatron/model of
# microsoft/Megatron-DeepSpeed: language_model.py, gpt_model.py, transformer.py.
LAYER_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "input_norm.": "self_attention.linear_qkv.layer_norm_",
    "self_attention.query_key_value.": "self_attention.linear_qkv.",
    "self_attention.dense.": "self_attention.linear_proj.",
    "post_attention_layernorm.": "mlp.linear_fc1.layer_norm_",
    "post_attention_norm.": "mlp.linear_fc1.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "mlp.dense_h_to_4h.": "mlp.linear_fc1.",
    "mlp.dense_4h_to_h.": "mlp.linear_fc2.",
}
OTHER_NAMES = {
    "encoder.final_layernorm.": "decoder.final_layernorm.",
    "encoder.final_norm.": "decoder.final_layernorm.",
    "tied_modules.embed.": "embedding.",
}
# These are not loaded: copies of a tied embedding, RoPE's frequencies (derived from the settings), and FP8 states.
IGNORED = re.compile(r"^word_embeddings_for_head\.|\.?inv_freq$|_extra_state$")


@dataclass(frozen=True)
class Name:
    """Core's name of a weight, and the number of its layer if it belongs to one."""

    key: str
    layer: int | None = None

    @property
    def with_layer(self) -> str:
        """The name with the layer's number in it."""
        return self.key if self.layer is None else self.key.replace(LAYERS, f"{LAYERS}{self.layer}.")


def core_name(name: str) -> Name | None:
    """Core's name of the weight ``name``; None for tensors that are not needed. Unknown weights keep their name."""
    name = re.sub(r"^(module\.)*(model\.)?(language_model\.)?", "", name)
    if IGNORED.search(name):
        return None
    name = re.sub(r"^transformer\.", "encoder.", name).replace(".attention.", ".self_attention.")
    if match := re.match(r"(?:encoder|decoder)\.layers\.(\d+)\.(.*)", name):
        return Name(LAYERS + _replaced(match[2], LAYER_NAMES), int(match[1]))
    return Name(_replaced(name, OTHER_NAMES))


def pipe_names(names: Iterable[str]) -> dict[str, Name] | None:
    """Core's names for DeepSpeed's pipeline module, whose names begin with a module's number; None for other models.

    The modules in order: embedding, layers, final norm, output layer. If the first and last share their weights, they
    are called ``tied_modules.embed``. Functions between them have numbers but no weights.
    """
    numbered: dict[int, list[tuple[str, str]]] = {}
    result: dict[str, Name] = {}
    for name in names:
        if matched := re.match(r"(\d+)\.(.*)", name):
            numbered.setdefault(int(matched[1]), []).append((name, matched[2]))
        elif name.startswith("tied_modules.embed."):
            result[name] = core_name(name)
    layers = sorted(number for number, inner in numbered.items() if any("attention." in key for _, key in inner))
    if not layers:
        return None
    for number, inner in numbered.items():
        for name, key in inner:
            if number in layers:
                result[name] = core_name(f"encoder.layers.{layers.index(number)}.{key}")
            elif key.startswith("lm_head."):
                result[name] = Name(key.replace("lm_head.", "output_layer."))
            elif "embeddings." in key:
                result[name] = Name(f"embedding.{key}")
            elif number > layers[-1]:
                result[name] = Name(f"decoder.final_layernorm.{key}")
            else:
                result[name] = Name(name)
    return result


def _replaced(name: str, table: dict[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in table.items() if name.startswith(old)), name)


def joined(parts: list[Tensor], key: str, gated: bool) -> Tensor:
    """A weight from its parts on the TP ranks. Raises ValueError if a weight that TP does not split differs."""
    if split_dim(key) is None and any(not part.equal(parts[0]) for part in parts[1:]):
        raise ValueError(f"{key} differs between TP ranks")
    return join_parts(parts, key, gated)


def reordered(qkv: Tensor, version: float, heads: int) -> Tensor:
    """Rows of queries, keys and values in the order of checkpoint version 2: [heads, 3, head size, ...].

    Version 0 has [3, heads, head size], version 1 [heads, head size, 3]; neither has query groups.
    """
    rest = qkv.shape[1:]
    if version >= 2:
        return qkv
    if version == 0:
        return qkv.reshape(3, heads, -1, *rest).transpose(0, 1).reshape(qkv.shape)
    return qkv.reshape(heads, -1, 3, *rest).transpose(1, 2).reshape(qkv.shape)


RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?$")
STATES = "mp_rank_00_model_states.pt"


@dataclass(frozen=True)
class Weights:
    """A model's weights by core's names with global layer numbers; each function reads one weight."""

    path: Path
    args: dict[str, Any]
    tensors: dict[Name, Callable[[], Tensor]]


def source_path(folder: Path, step: int | None) -> Path:
    """The checkpoint in ``folder`` for :func:`open_source`. Raises Refusal if it has neither format."""
    path = _path(folder, step)
    if (path / "zero").is_dir() or any(path.glob("mp_rank_*/model_optim_rng.pt")):
        return path
    if (path / "metadata.json").exists():
        raise Refusal(f"--from {folder}: {path.name} has the format torch_dist: pass it to --load as it is")
    if any(path.glob("*zero_pp_rank_*")):
        raise Refusal(
            f"--from {folder}: {path.name} has DeepSpeed's own format: convert it to a universal checkpoint with "
            "DeepSpeed's ds_to_universal.py, and give that"
        )
    raise Refusal(f"--from {folder}: neither mp_rank_*/model_optim_rng.pt nor zero/ in {path}")


def open_source(path: Checked) -> Weights:
    """The weights of a checkpoint. Raises Refusal if it is inconsistent."""
    return universal_weights(path) if is_universal(path) else _torch_weights(path)


def is_universal(path: Checked) -> bool:
    """Whether it is a universal checkpoint of DeepSpeed."""
    return any(name.startswith("zero/") for name in path.files)


def _path(folder: Path, step: int | None) -> Path:
    if step is not None:
        choices = [folder / f"iter_{step:07d}", folder / f"global_step{step}_universal", folder / f"global_step{step}"]
        chosen = next((path for path in choices if path.is_dir()), None)
        if chosen is None:
            raise Refusal(f"--from {folder}: no checkpoint of --ckpt-step {step} there")
        return chosen
    for tracker in (TRACKER, "latest_universal", "latest"):
        if (folder / tracker).exists():
            text = name_in(folder / tracker)
            path = folder / (f"iter_{int(text):07d}" if text.isascii() and text.isdecimal() else text)
            if path.is_dir():
                return path
    return folder


def _torch_weights(path: Checked) -> Weights:
    files: dict[tuple[int, int], Any] = {}  # by TP and PP rank
    for name in sorted(name for name in path.files if name.endswith("/model_optim_rng.pt")):
        file = path.file(name)
        tensor, pipeline, expert = (int(part) if part else 0 for part in RANK.match(file.parent.name).groups())
        if expert:
            raise Refusal(f"{path}: expert parallelism is not supported")
        files[tensor, pipeline] = unpickle.read(file, mmap=True)
    first = files.get((0, 0))
    if not isinstance(first, dict):
        raise Refusal(f"{path}: the file of the first rank, mp_rank_00, is missing")
    args = namespace(first.get("args"), path)
    model = model_of(args, path)
    tensor_ranks = 1 + max(tensor for tensor, _ in files)
    stages = 1 + max(stage for _, stage in files)
    if len(files) != tensor_ranks * stages:
        raise Refusal(f"{path}: it has the files of {len(files)} ranks, not of TP {tensor_ranks} x PP {stages}")
    version, heads = first.get("checkpoint_version", 0), model.num_attention_heads // tensor_ranks
    readers: dict[Name, Callable[[], Tensor]] = {}
    begin = 0
    chunks = [key for key in ("model", *(f"model{index}" for index in range(len(first)))) if key in first]
    for chunk in chunks:
        for stage in range(stages):
            parts = [dict(_flat(files[tensor, stage][chunk])) for tensor in range(tensor_ranks)]
            count = 0
            for name in parts[0]:
                if (core := core_name(name)) is None:
                    continue
                if core.layer is not None:
                    count = max(count, core.layer + 1)
                    core = Name(core.key, core.layer + begin)
                readers.setdefault(
                    core, _merger(path, parts, name, core.key, gated=model.gated, version=version, heads=heads)
                )
            begin += count
    if not model.untie_embeddings_and_output_weights:
        readers.pop(Name("output_layer.weight"), None)  # the last stage's copy
    return Weights(path.path, args, readers)


def _merger(
    path: Checked, parts: list[dict[str, Tensor]], name: str, key: str, *, gated: bool, version: float, heads: int
) -> Callable[[], Tensor]:
    """A function that joins a weight's parts on the TP ranks.

    Args:
        parts: for each TP rank, its tensors by their names in the file.
        name: the weight's name in the file.
        key: the weight's name in core.
        version: of the checkpoint's format, see :func:`reordered`.
        heads: attention heads per TP rank.
    """

    def merge() -> Tensor:
        try:
            tensors = [part[name] for part in parts]
            if "linear_qkv." in key and not key.endswith(("layer_norm_weight", "layer_norm_bias")):
                tensors = [reordered(tensor, version, heads) for tensor in tensors]
            return joined(tensors, key, gated)
        except (KeyError, ValueError, RuntimeError) as error:
            raise Refusal(f"{path}: the parts of {name} on the TP ranks do not fit together: {error}") from None

    return merge


def _flat(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) of nested dictionaries."""
    for name, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")


def universal_weights(path: Checked) -> Weights:
    """The weights of a universal checkpoint. Raises Refusal if its model's args are missing."""
    if STATES not in path.files:
        raise Refusal(f"{path}: {STATES}, which describes the model, is missing")
    states = unpickle.read(path.file(STATES))
    args = namespace(states.get("args") if isinstance(states, dict) else None, path.path / STATES)
    model = model_of(args, path)
    readers = {name: reader(path.file(f"zero/{folder}/fp32.pt")) for folder, name in universal_names(path).items()}
    if not model.untie_embeddings_and_output_weights:
        readers.pop(Name("output_layer.weight"), None)
    return Weights(path.path, args, readers)


def universal_names(path: Checked) -> dict[str, Name]:
    """{folder of a universal checkpoint: the weight in it}."""
    names = sorted(name.split("/")[1] for name in path.files if name.startswith("zero/") and name.endswith("/fp32.pt"))
    piped = pipe_names(names)
    cores = {name: piped.get(name, Name(name)) if piped else core_name(name) for name in names}
    return {name: core for name, core in cores.items() if core is not None}


def reader(file: Path) -> Callable[[], Tensor]:
    """A function that reads a weight, or one of its optimizer states, from its file."""

    def read() -> Tensor:
        content = unpickle.read(file)
        tensor = content.get("param") if isinstance(content, dict) else content
        if not isinstance(tensor, torch.Tensor):
            raise Refusal(f"{file}: it does not contain a tensor")
        return tensor

    return read


# ``--load`` of a universal checkpoint of DeepSpeed without conversion: weights, Adam's moments, progress.
#
#     DIR/latest_universal                                         names the folder
#     DIR/global_step100_universal/mp_rank_00_model_states.pt      args, iteration, state of the schedule
#     DIR/global_step100_universal/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt
#     DIR/global_step100_universal/zero/optimizer_state.pt         parameter groups; in older versions with the step
#
# Sources: deepspeed/checkpoint/ds_to_universal.py of deepspeedai/DeepSpeed and megatron/checkpointing.py of
# deepspeedai/Megatron-DeepSpeed.
MOMENTS = ("exp_avg", "exp_avg_sq")


def open_universal(path: Checked) -> ForeignCheckpoint:
    """Open a universal checkpoint. Raises Refusal if it is inconsistent."""
    weights = universal_weights(path)
    states = unpickle.read(path.file(STATES))
    tensors: dict[str, Callable[[], Tensor]] = {name.with_layer: read for name, read in weights.tensors.items()}
    common: dict[str, Any] = {"iteration": states.get("iteration")}
    folders = universal_names(path)
    folders = {folder: name for folder, name in folders.items() if name in weights.tensors}
    if all(f"zero/{folder}/{moment}.pt" in path.files for folder in folders for moment in MOMENTS):
        tensors |= {
            f"{STATE}{moment}.{name.with_layer}": reader(path.file(f"zero/{folder}/{moment}.pt"))
            for folder, name in folders.items()
            for moment in MOMENTS
        }
        step = _step(path, next(iter(folders)))
        common["optimizer"] = {"param_groups": [{"wd_mult": mult, "step": step} for mult in (0.0, 1.0)]}
        if (schedule := states.get("lr_scheduler")) is not None:
            common["opt_param_scheduler"] = schedule
    return ForeignCheckpoint(path.path, common, weights.args, WholeTensors(path.path, tensors))


def _step(path: Checked, folder: str) -> float:
    """How many steps Adam has taken."""
    step, optimizer = f"zero/{folder}/step.pt", "zero/optimizer_state.pt"
    if step in path.files:
        return float(unpickle.read(path.file(step)))
    groups = unpickle.read(path.file(optimizer)).get("param_groups", []) if optimizer in path.files else []
    return float(next((group["step"] for group in groups if group.get("step") is not None), 0))
