# SPDX-License-Identifier: Apache-2.0
"""Where weights come from: files of Megatron-LM's format ``torch``, or a universal checkpoint of DeepSpeed's.

    DIR/iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt        a file for each rank of TP x PP
    DIR/global_step100_universal/zero/NAME/fp32.pt              a file for each weight, whole, in fp32

Files are mapped, not read, and a weight is put together when it is asked for, so memory holds a weight, not the model.
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
from megatron.training.checkpoint.megatron_lm.load_torch_dist import Theirs
from megatron.training.checkpoint.megatron_lm.megatron_args import model_of, namespace
from megatron.training.checkpoint.megatron_lm.places import TRACKER, name_in
from megatron.training.checkpoint.megatron_lm.source import STATE
from megatron.training.checkpoint.megatron_lm.stored_tensors import WholeTensors
from megatron.training.model.weights import BY_COLUMNS, BY_ROWS, VOCABULARY
from megatron.training.refusal import Refusal

# Names of weights, from four programs to core's: Megatron-LM of today and before core, DeepSpeed's with and without
# its pipeline.
#
# Facts from megatron/legacy/model of NVIDIA/Megatron-LM (core 0.9 to 0.12) and megatron/model of
# microsoft/Megatron-DeepSpeed: language_model.py, gpt_model.py, transformer.py.


LAYERS = "decoder.layers."
OF_A_LAYER = {
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
OF_ALL = {
    "encoder.final_layernorm.": "decoder.final_layernorm.",
    "encoder.final_norm.": "decoder.final_layernorm.",
    "tied_modules.embed.": "embedding.",
}
# Copies of a tied embedding, frequencies that follow from settings, states of FP8.
LEFT_OUT = re.compile(r"^word_embeddings_for_head\.|\.?inv_freq$|_extra_state$")


@dataclass(frozen=True)
class Name:
    """Core's name of a weight; ``layer`` counts from where the file's names do."""

    key: str
    layer: int | None = None


def core_name(name: str) -> Name | None:
    """The weight that ``name`` means, None for what is left out. Unknown ones keep their name."""
    name = re.sub(r"^(module\.)*(model\.)?(language_model\.)?", "", name)
    if LEFT_OUT.search(name):
        return None
    name = re.sub(r"^transformer\.", "encoder.", name).replace(".attention.", ".self_attention.")
    if found := re.match(r"(?:encoder|decoder)\.layers\.(\d+)\.(.*)", name):
        return Name(LAYERS + _replaced(found[2], OF_A_LAYER), int(found[1]))
    return Name(_replaced(name, OF_ALL))


def pipe_names(names: Iterable[str]) -> dict[str, Name] | None:
    """The weights of DeepSpeed's pipeline module, whose names begin with a module's number; None if they do not.

    Modules in order: embedding, layers, final norm, output layer; the first and last are ``tied_modules.embed`` where
    they share their weights. In between are functions, which have numbers too but no weights.
    """
    numbered: dict[int, list[tuple[str, str]]] = {}
    found: dict[str, Name] = {}
    for name in names:
        if matched := re.match(r"(\d+)\.(.*)", name):
            numbered.setdefault(int(matched[1]), []).append((name, matched[2]))
        elif name.startswith("tied_modules.embed."):
            found[name] = core_name(name)
    layers = sorted(number for number, inner in numbered.items() if any("attention." in rest for _, rest in inner))
    if not layers:
        return None
    for number, inner in numbered.items():
        for name, rest in inner:
            if number in layers:
                found[name] = core_name(f"encoder.layers.{layers.index(number)}.{rest}")
            elif rest.startswith("lm_head."):
                found[name] = Name(rest.replace("lm_head.", "output_layer."))
            elif "embeddings." in rest:
                found[name] = Name(f"embedding.{rest}")
            elif number > layers[-1]:
                found[name] = Name(f"decoder.final_layernorm.{rest}")
            else:
                found[name] = Name(name)
    return found


def _replaced(name: str, table: dict[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in table.items() if name.startswith(old)), name)


def joined(parts: list[Tensor], key: str, gated: bool) -> Tensor:
    """A weight from its parts on the TP ranks; SwiGLU's first layer has half of the gate and half of the rest on each.

    Raises:
        ValueError: what all ranks should have alike differs between them.
    """
    if len(parts) == 1:
        return parts[0]
    if gated and "linear_fc1." in key and not key.endswith(("layer_norm_weight", "layer_norm_bias")):
        return torch.cat([half for halves in zip(*(part.chunk(2) for part in parts)) for half in halves])
    if key.endswith(BY_ROWS) or key in VOCABULARY:
        return torch.cat(parts)
    if key.endswith(BY_COLUMNS):
        return torch.cat(parts, 1)
    if any(not part.equal(parts[0]) for part in parts[1:]):
        raise ValueError(f"{key} differs between TP ranks")
    return parts[0]


def reordered(qkv: Tensor, version: float, heads: int) -> Tensor:
    """Rows of queries, keys and values as they are since checkpoint version 2: [heads, 3, size of a head, ...].

    Before: [3, heads, size] (version 0), [heads, size, 3] (version 1). There were no query groups then.
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
    """A model's weights by core's names, layers counted over the whole model, each to be made by its function."""

    path: Path
    args: dict[str, Any]
    tensors: dict[Name, Callable[[], Tensor]]


def source_path(folder: Path, step: int | None) -> Path:
    """What :func:`open_source` reads in ``folder``. Raises Refusal where it has none of the forms above."""
    path = _path(folder, step)
    if (path / "zero").is_dir() or any(path.glob("mp_rank_*/model_optim_rng.pt")):
        return path
    if (path / "metadata.json").exists():
        raise Refusal(f"--from {folder}: {path.name} is of the format torch_dist, which --load takes as it is")
    if any(path.glob("*zero_pp_rank_*")):
        raise Refusal(
            f"--from {folder}: {path.name} is of DeepSpeed's own form: make a universal one of it with DeepSpeed's "
            "ds_to_universal.py, and give that"
        )
    raise Refusal(f"--from {folder}: neither mp_rank_*/model_optim_rng.pt nor zero/ in {path}")


def open_source(path: Checked) -> Weights:
    """The weights of a checkpoint. Raises Refusal where it does not hang together."""
    return universal_weights(path) if is_universal(path) else _torch(path)


def is_universal(path: Checked) -> bool:
    """Whether it is one of DeepSpeed's universal checkpoints."""
    return any(name.startswith("zero/") for name in path.files)


def _path(folder: Path, step: int | None) -> Path:
    if step is not None:
        choices = [folder / f"iter_{step:07d}", folder / f"global_step{step}_universal", folder / f"global_step{step}"]
        found = next((path for path in choices if path.is_dir()), None)
        if found is None:
            raise Refusal(f"--from {folder}: no checkpoint of --ckpt-step {step} there")
        return found
    for tracker in (TRACKER, "latest_universal", "latest"):
        if (folder / tracker).exists():
            text = name_in(folder / tracker)
            path = folder / (f"iter_{int(text):07d}" if text.isascii() and text.isdecimal() else text)
            if path.is_dir():
                return path
    return folder


def _torch(path: Checked) -> Weights:
    files: dict[tuple[int, int], Any] = {}
    for name in sorted(name for name in path.files if name.endswith("/model_optim_rng.pt")):
        file = path.file(name)
        tensor, pipeline, expert = (int(part) if part else 0 for part in RANK.match(file.parent.name).groups())
        if expert:
            raise Refusal(f"{path}: experts on ranks of their own are not built here")
        files[tensor, pipeline] = unpickle.read(file, mmap=True)
    first = files.get((0, 0))
    if not isinstance(first, dict):
        raise Refusal(f"{path}: there is no file of the first rank, mp_rank_00")
    args = namespace(first.get("args"), path)
    model = model_of(args, path)
    tensors = 1 + max(tensor for tensor, _ in files)
    stages = 1 + max(stage for _, stage in files)
    if len(files) != tensors * stages:
        raise Refusal(f"{path}: {len(files)} files of ranks, and not TP {tensors} x PP {stages}")
    version, heads = first.get("checkpoint_version", 0), model.num_attention_heads // tensors
    found: dict[Name, Callable[[], Tensor]] = {}
    begin = 0
    chunks = [key for key in ("model", *(f"model{index}" for index in range(len(first)))) if key in first]
    for chunk in chunks:
        for stage in range(stages):
            parts = [dict(_flat(files[tensor, stage][chunk])) for tensor in range(tensors)]
            count = 0
            for name in parts[0]:
                if (core := core_name(name)) is None:
                    continue
                if core.layer is not None:
                    count = max(count, core.layer + 1)
                    core = Name(core.key, core.layer + begin)
                found.setdefault(core, _merged(path, parts, name, core.key, model.swiglu, version, heads))
            begin += count
    if not model.untie_embeddings_and_output_weights:
        found.pop(Name("output_layer.weight"), None)  # the last stage's copy
    return Weights(path.path, args, found)


def _merged(
    path: Checked, parts: list[dict[str, Tensor]], name: str, key: str, gated: bool, version: float, heads: int
) -> Callable[[], Tensor]:
    def merge() -> Tensor:
        try:
            tensors = [part[name] for part in parts]
            if "linear_qkv." in key and not key.endswith(("layer_norm_weight", "layer_norm_bias")):
                tensors = [reordered(tensor, version, heads) for tensor in tensors]
            return joined(tensors, key, gated)
        except (KeyError, ValueError, RuntimeError) as error:
            raise Refusal(f"{path}: {name} does not fit together over TP: {error}") from None

    return merge


def _flat(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) of nested dictionaries."""
    for name, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")


def universal_weights(path: Checked) -> Weights:
    """A universal checkpoint's. Raises Refusal where it does not say of which model they are."""
    if STATES not in path.files:
        raise Refusal(f"{path}: {STATES} is missing, which says of which model the weights are")
    states = unpickle.read(path.file(STATES))
    args = namespace(states.get("args") if isinstance(states, dict) else None, path.path / STATES)
    model = model_of(args, path)
    found = {name: whole(path.file(f"zero/{folder}/fp32.pt")) for folder, name in universal_names(path).items()}
    if not model.untie_embeddings_and_output_weights:
        found.pop(Name("output_layer.weight"), None)
    return Weights(path.path, args, found)


def universal_names(path: Checked) -> dict[str, Name]:
    """The weight that each folder of a universal checkpoint is of."""
    names = sorted(name.split("/")[1] for name in path.files if name.startswith("zero/") and name.endswith("/fp32.pt"))
    piped = pipe_names(names)
    cores = {name: piped.get(name, Name(name)) if piped else core_name(name) for name in names}
    return {name: core for name, core in cores.items() if core is not None}


def whole(file: Path) -> Callable[[], Tensor]:
    """What makes a weight, or a state of one, from its file."""

    def read() -> Tensor:
        held = unpickle.read(file)
        tensor = held.get("param") if isinstance(held, dict) else held
        if not isinstance(tensor, torch.Tensor):
            raise Refusal(f"{file}: no weight in it")
        return tensor

    return read


# ``--load`` of a universal checkpoint of DeepSpeed's, as it is: weights, Adam's moments, how far its run had come.
#
#     DIR/latest_universal                                         names the folder
#     DIR/global_step100_universal/mp_rank_00_model_states.pt      args, iteration, state of the schedule
#     DIR/global_step100_universal/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt
#     DIR/global_step100_universal/zero/optimizer_state.pt         groups of parameters, with the step in older ones
#
# Facts from deepspeed/checkpoint/ds_to_universal.py of deepspeedai/DeepSpeed and megatron/checkpointing.py of
# deepspeedai/Megatron-DeepSpeed.


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
