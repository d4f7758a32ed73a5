# SPDX-License-Identifier: Apache-2.0
"""The readers of a checkpoint's files, each with valid files and a function that changes them."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import zlib
from argparse import Namespace
from collections import OrderedDict
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save as safetensors_bytes
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.inference.load import read_saved
from megatron.simulator.planner import memory_table
from megatron.training.arguments.parser import parse
from megatron.training.checkpoint import checkpoint, checkpoint_folder, older_formats
from megatron.training.checkpoint.arguments_of import shape_of
from megatron.training.checkpoint.converting import quantized, to_hugging_face
from megatron.training.checkpoint.hugging_face import load_folder, safetensors_folder
from megatron.training.checkpoint.hugging_face.safetensors_folder import HEADERS
from megatron.training.checkpoint.in_memory import copy_file
from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.checkpoint.megatron_lm.file_list import CHECKSUMS, Damaged, read_list
from megatron.training.checkpoint.megatron_lm.places import checkpoint_path, universal_path
from megatron.training.checkpoint.megatron_lm.stored_tensors import StoredTensors
from megatron.training.families import architectures
from megatron.training.families.llama import llama_settings
from megatron.training.json_file import read_json
from megatron.training.refusal import Refusal, Refusals
from megatron.training.settings.config import CheckpointConfig
from tests.distributed.training_runs import damage
from tests.fuzz import mutations
from tests.fuzz.harness import Reader

OLD = Path(__file__).parents[1] / "distributed" / "data"
OURS, CORE = "checkpoint_0b3becd.tgz", "megatron_core_0.12.tgz"  # an older version's, Megatron-LM's
TRACKER = "latest_checkpointed_iteration.txt"


@cache
def old_checkpoint(archive: str) -> dict[str, bytes]:
    """The files of a checkpoint, by name."""
    with tarfile.open(OLD / archive) as tar:
        return {Path(one.name).name: tar.extractfile(one).read() for one in tar if one.isfile()}


def archive_files(archive: str, folder: str = "", without: str = "") -> dict[str, bytes]:
    """The same files in a folder, without one file and without the tracker."""
    result = old_checkpoint(archive).items()
    return {f"{folder}{name}": data for name, data in result if name not in (without, TRACKER)}


def saved(value: Any, **options: Any) -> bytes:
    """The bytes that ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


# .metadata, and the tensors that it describes


def small_metadata() -> bytes:
    size, half = torch.Size([4, 3]), torch.Size([2, 3])
    tensors = {
        name: TensorStorageMetadata(
            TensorProperties(dtype), size, [ChunkStorageMetadata(torch.Size([at, 0]), half) for at in (0, 2)]
        )
        for name, dtype in (("weight", torch.float32), ("optimizer.state.exp_avg.weight", torch.bfloat16))
    }
    places = {
        MetadataIndex(name, torch.Size([at, 0]), number): _StorageInfo("__0_0.distcp", 1000 * number, 900)
        for name in tensors
        for number, at in enumerate((0, 2))
    }
    places[MetadataIndex("rng/shard_0_1")] = _StorageInfo("__0_1.distcp", 0, 77)
    entries = {**tensors, "rng/shard_0_1": BytesStorageMetadata()}
    return pickle.dumps(Metadata(entries, None, places, StorageMeta("/somewhere", "a", "b")))


@cache
def two_tensors() -> dict[str, bytes]:
    """A folder with two tensors, one of them in two parts, and an object."""
    weight, other = torch.arange(12.0).reshape(4, 3), torch.ones(5, dtype=torch.bfloat16)
    parts = {
        ("weight", (0, 0)): weight[:2].clone(),
        ("weight", (2, 0)): weight[2:].clone(),
        ("other", (0,)): other,
        ("rng/shard_0_1", None): [random_state()],
    }
    data, places = b"", {}
    for (name, at), part in parts.items():
        packed = saved(part)
        offset = None if at is None else torch.Size(at)
        places[MetadataIndex(name, offset)] = _StorageInfo("__0_0.distcp", len(data), len(packed))
        data += packed
    entries: dict[str, Any] = {"rng/shard_0_1": BytesStorageMetadata()}
    for name, tensor, chunks in (("weight", weight, ((0, 0), (2, 0))), ("other", other, ((0,),))):
        sizes = torch.Size([tensor.shape[0] // len(chunks), *tensor.shape[1:]])
        listed = [ChunkStorageMetadata(torch.Size(at), sizes) for at in chunks]
        entries[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, listed)
    return {".metadata": pickle.dumps(Metadata(entries, None, places)), "__0_0.distcp": data}


def random_state() -> dict[str, Any]:
    return {
        "python": Random(0).getstate(),
        "numpy": np.random.RandomState(0).get_state(),
        "torch": torch.get_rng_state()[:16].clone(),
        "tracker": {"model-parallel-rng": torch.arange(4, dtype=torch.uint8)},
    }


def read_stored(folder: Path) -> None:
    stored = StoredTensors(as_it_is(folder))
    for key in stored:
        stored.dtype(key)
    for key, shape in (("weight", (4, 3)), ("other", (5,))):
        if key in stored and stored.shape(key) == shape:
            stored.read(key, (0,) * len(shape), shape)
    stored.object("rng")


# common.pt


def ours() -> bytes:
    """A small common.pt in the current format, without fields that no reader uses."""
    model = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "rotary_base": 10000, "swiglu": True}
    model |= {"position_embedding_type": "rope", "norm_epsilon": 1e-5, "bias_gelu_fusion": True}
    data = {"seq_length": 32, "tokenizer_type": "NullTokenizer"}
    return saved(
        {
            "config": {"model": model, "data": data, "optimizer": {"optimizer": "adam", "bf16": True}, "attention": {}},
            "progress": {"iteration": 2, "consumed_train_samples": 8, "consumed_train_tokens": 256},
            "vocab_size": 100,
            "rng_world_size": 1,
            "args": megatron_args(),
            "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 2},
        }
    )


def megatron_args() -> Namespace:
    return Namespace(
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=16,
        num_attention_heads=2,
        num_query_groups=2,
        group_query_attention=False,
        kv_channels=4,
        max_position_embeddings=16,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=False,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        seq_length=16,
        consumed_train_samples=4,
        padded_vocab_size=32,
        make_vocab_size_divisible_by=32,
        tensor_model_parallel_size=1,
        params_dtype=torch.float32,
        save=Path("/somewhere"),
    )


def read_common(folder: Path) -> None:
    shape_of(folder)
    path = folder / "iter_0000002"
    read_saved(path, folder)
    checkpoint.progress_in(as_it_is(path), CheckpointConfig())


# Megatron-LM's format torch, and DeepSpeed's universal one


def language_model() -> dict[str, Any]:
    ones = torch.ones
    layer = {
        "self_attention.linear_proj.weight": ones(8, 8),
        "self_attention.linear_qkv.layer_norm_weight": ones(8),
        "self_attention.linear_qkv.weight": ones(24, 8),
        "mlp.linear_fc1.layer_norm_weight": ones(8),
        "mlp.linear_fc1.weight": ones(16, 8),
        "mlp.linear_fc2.weight": ones(8, 16),
    }
    state = OrderedDict({"embedding.word_embeddings.weight": ones(32, 8), "output_layer.weight": ones(32, 8)})
    state |= {f"decoder.layers.0.{name}": tensor for name, tensor in layer.items()}
    state["decoder.final_layernorm.weight"] = torch.nn.Parameter(ones(8))
    state._metadata = {"": {"version": 1}}
    return state


def torch_format(**options: Any) -> bytes:
    common = {"args": megatron_args(), "checkpoint_version": 3.0, "iteration": 7, "rng_state": [random_state()]}
    return saved({**common, "model": language_model()}, **options)


def all_weights(weights: older_formats.Weights) -> None:
    for make in weights.tensors.values():
        make()


def universal_states() -> bytes:
    return saved({"args": megatron_args(), "iteration": 7, "lr_scheduler": {"num_steps": 7}, "dp_world_size": 1})


def universal_files(without: str) -> dict[str, bytes]:
    result = {"u/mp_rank_00_model_states.pt": universal_states()}
    for name, tensor in language_model().items():
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            result[f"u/zero/{name}/{kind}.pt"] = saved({"param": tensor, "cat_dim": 0})
        result[f"u/zero/{name}/step.pt"] = saved(torch.tensor(3.0))
    return {name: data for name, data in result.items() if name != without}


def read_universal(folder: Path) -> None:
    theirs = older_formats.open_universal(as_it_is(folder / "u"))
    theirs.network  # noqa: B018 (a property, which checks)
    theirs.progress()
    for key in theirs.stored:
        theirs.stored.shape(key)


ONE_WEIGHT = "u/zero/decoder.final_layernorm.weight/fp32.pt"


# Hugging Face

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "tie_word_embeddings": False,
    "vocab_size": 32,
}
BLOOM = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 1, "hidden_size": 8, "n_head": 2}
BLOOM |= {"vocab_size": 32, "layer_norm_epsilon": 1e-5}
QWEN = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 4, "rope_scaling": None}
OWN = {"architectures": None, "rope_scaling": None}  # in place of a Llama's
OLMO = {**LLAMA, **OWN, "model_type": "olmo3", "sliding_window": 8, "layer_types": ["sliding_attention"]}
NEOX = {**LLAMA, **OWN, "model_type": "gpt_neox", "rotary_pct": 0.5, "hidden_act": "gelu"}
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 32}
GLM = {**LLAMA, **OWN, "model_type": "glm4_moe", "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_group": 1,
       "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
       "moe_intermediate_size": 8, "routed_scaling_factor": 1.0, "partial_rotary_factor": 0.5}  # fmt: skip
CONFIGS = [json.dumps(one).encode() for one in (LLAMA, QWEN, BLOOM, OLMO, NEOX, GPT2, GLM)]


@cache
def llama_tensors() -> dict[str, torch.Tensor]:
    model = architectures.described(LLAMA, "x")
    pieces = architectures.pieces(model, ())
    return {name: torch.ones(shape) for piece in pieces for name, shape in zip(piece.names, piece.shapes)}


@cache
def llama_parts() -> dict[str, bytes]:
    names = list(llama_tensors())
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    result = {
        file: safetensors_bytes({name: llama_tensors()[name] for name in inside}, {"format": "pt"})
        for file, inside in shards.items()
    }
    places = {name: file for file, inside in shards.items() for name in inside}
    result[safetensors_folder.INDEX] = json.dumps({"metadata": {"total_size": 1}, "weight_map": places}).encode()
    return result


def read_weights(folder: Path) -> None:
    """All tensors of a Hugging Face folder, as a run loads them."""
    stored = load_folder.open_folder(as_it_is(folder)).stored
    for key in stored:
        stored.shape(key)


def headers_json() -> bytes:
    """The files that a conversion keeps from a Hugging Face folder."""
    texts = {}
    for name, data in llama_parts().items():
        if name != safetensors_folder.INDEX:
            texts[name] = data[8 : 8 + int.from_bytes(data[:8], "little")].decode()
    return json.dumps(texts).encode()


def headers_changed(random: Random, data: bytes) -> bytes:
    """Change a header in the list as JSON, or the list itself."""
    if random.random() < 0.5:
        return mutations.json_text(random, data)
    texts = json.loads(data)
    name = random.choice(list(texts))
    texts[name] = mutations.changed_json(random, json.loads(texts[name]))
    return json.dumps(texts).encode()


def write_as_the_original(folder: Path) -> None:
    model = architectures.described(LLAMA, "x")
    ignored = partial(architectures.is_ignored, model)
    pieces = architectures.pieces(model, ())
    headers, _ = to_hugging_face._headers(as_it_is(folder), pieces, torch.float32, {}, ignored)
    (folder / "out").mkdir(exist_ok=True)
    with safetensors_folder.writing(folder / "out", headers) as put:
        for name in sorted({name for header in headers.values() for name in header.entries}):
            put(name, llama_tensors()[name])


def read_config(folder: Path) -> None:
    model = architectures.described(llama_settings.read_config(folder / "config.json"), folder / "config.json")
    if model.settings.num_layers < 1000:
        architectures.pieces(model, ())


FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 4]}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


def quantized_tensors() -> bytes:
    numbers, blocks = torch.ones(8, 8), torch.full((2, 4, 1, 16), 34, dtype=torch.uint8)
    eights = {"a": numbers.to(torch.float8_e4m3fn), "a_scale_inv": torch.ones(2, 2)}
    return safetensors_bytes(eights | {"b_blocks": blocks, "b_scales": torch.full((2, 4, 1), 127, dtype=torch.uint8)})


def read_quantized(folder: Path) -> None:
    """All weights of a folder, dequantized as for a conversion."""
    config = llama_settings.read_config(folder / "config.json")
    if how := quantized.quantization(config, folder / "config.json"):
        stored = safetensors_folder.read_folder(as_it_is(folder))
        names = [name for header in how.headers(stored).values() for name in header.entries]
        with safetensors_folder.reading(as_it_is(folder), stored) as read:
            dequantized = how.reader(read, stored, torch.bfloat16)
            assert all(dequantized(name).isfinite().all() for name in names if name == "ab"[how.method == "mxfp4"])


def memory_of(folder: Path) -> None:
    """The table of tools/memory.py for a config.json."""
    shape = memory_table.shape_of(f"hf:{folder}", 4096)
    sizes = {"gpus": 8, "tensor": 1, "pipeline": 1, "seq_length": 4096}
    list(memory_table.rows(shape, 4096, iter(list(memory_table.strategies(shape, **sizes))[:8])))


WORDS = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --dry-run
    --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 0.1 --mock-data --vocab-size 99 --num-workers 2
    --tokenizer-type NullTokenizer --group-query-attention --num-query-groups 2 --rotary-base 10000 --seed 3
    --tensor-model-parallel-size 2 --context-parallel-size 2 --world-size 8 --clip-grad 1.0
    --eval-iters 3 --eval-interval 5 --save-interval 2 --save out --position-embedding-type rope
""".split()
MORE = (
    "--window-size 8,0 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "--num-experts 4 --moe-layer-freq [0]*2+[1]*2 --moe-ffn-hidden-size 32 --moe-router-topk 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --rampup-batch-size 2 2 16",
)
COMMAND_LINES = [json.dumps([*WORDS, *more.split()]).encode() for more in MORE]


def read_command_line(folder: Path) -> None:
    words = read_json(folder / "words.json")
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        try:
            parse(words, world_size=8)
        except Refusals as several:  # printed one a line
            raise several.parts[0] from None


def copy_of_state() -> bytes:
    path = Path("a_copy")
    about = {"run": "a", "iteration": "3", "rank": "0", "progress": json.dumps({"iteration": 3})}
    try:
        copy_file.write(path, [("a", torch.arange(6.0)), ("b", torch.ones(3, dtype=torch.uint8))], about)
        copy_file.seal(path)
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)


def sealed(random: Random, data: bytes) -> bytes:
    """A changed copy, usually with its correct checksum."""
    new = mutations.safetensors(random, data)
    at = new.find(copy_file.FIELD) + len(copy_file.FIELD)
    if at < len(copy_file.FIELD) or random.random() < 0.2:
        return new
    head = new[:at] + copy_file.NO_SUM
    return new[:at] + b"%08x" % zlib.crc32(head + new[at + 8 :]) + new[at + 8 :]


def read_copy(folder: Path) -> bool:
    copy_file.about(folder / "copy")
    if copy_file.intact(folder / "copy"):
        with safe_open(folder / "copy", "pt") as file:
            return bool(file.keys())
    return False


def whole(folder: Path) -> None:
    """Turn Damaged into a Refusal, as programs do."""
    if wrong := damage(folder):
        raise Refusal(wrong)


def read_sums(folder: Path) -> None:
    """Turn errors of reading a list into a Refusal, as programs do."""
    try:
        read_list(folder / CHECKSUMS)
    except Damaged as damaged:
        raise Refusal(str(damaged)) from None


LISTED = {name: {"size": 1, "crc32": zlib.crc32(data)} for name, data in (("a", b"x"), ("b", b"y"))}

READERS = [
    Reader(
        name="metadata",
        file=".metadata",
        seeds=lambda: [small_metadata(), old_checkpoint(CORE)[".metadata"]],
        change=mutations.pickled,
        read=lambda folder: unpickle.read_metadata(folder / ".metadata"),
    ),
    Reader(
        name="metadata_and_tensors",
        file=".metadata",
        seeds=lambda: [two_tensors()[".metadata"]],
        change=mutations.pickled,
        other_files={"__0_0.distcp": two_tensors()["__0_0.distcp"]},
        read=read_stored,
    ),
    Reader(
        name="distcp",
        file="__0_0.distcp",
        seeds=lambda: [two_tensors()["__0_0.distcp"]],
        change=mutations.any_bytes,
        other_files={".metadata": two_tensors()[".metadata"]},
        read=read_stored,
    ),
    Reader(
        name="common",
        file="iter_0000002/common.pt",
        seeds=lambda: [ours()],
        change=mutations.archived,
        other_files={TRACKER: b"2", **archive_files(OURS, "iter_0000002/", "common.pt")},
        read=read_common,
    ),
    Reader(
        name="common_of_megatron",
        file="iter_0000002/common.pt",
        seeds=lambda: [old_checkpoint(CORE)["common.pt"]],
        change=mutations.archived,
        other_files={TRACKER: b"2", **archive_files(CORE, "iter_0000002/", "common.pt")},
        read=read_common,
    ),
    Reader(
        name="objects",
        file="object",
        seeds=lambda: [saved([random_state()]), saved({"groups": [{"lr": 0.1}], "engine": {"a": b"xyz"}})],
        change=mutations.archived,
        read=lambda folder: [unpickle.read_bytes((folder / "object").read_bytes(), "an object", complete=True)],
    ),
    Reader(
        name="engine_states",
        file="state",
        seeds=lambda: [pickle.dumps({"scale_fwd": torch.ones(3), "extra_fp8_variables": {"steps": 3}})],
        change=mutations.pickled,
        read=lambda folder: unpickle.check_engine_state((folder / "state").read_bytes(), "a state"),
    ),
    Reader(
        name="torch_format",
        file="iter_0000007/mp_rank_00/model_optim_rng.pt",
        seeds=lambda: [torch_format(), torch_format(_use_new_zipfile_serialization=False)],
        change=mutations.archived,
        other_files={TRACKER: b"7"},
        read=lambda folder: all_weights(older_formats.open_source(as_it_is(older_formats._path(folder, None)))),
    ),
    Reader(
        name="universal_states",
        file="u/mp_rank_00_model_states.pt",
        seeds=lambda: [universal_states()],
        change=mutations.archived,
        other_files=universal_files("u/mp_rank_00_model_states.pt"),
        read=read_universal,
    ),
    Reader(
        name="universal_weight",
        file=ONE_WEIGHT,
        seeds=lambda: [saved({"param": torch.ones(8), "cat_dim": 0}), saved(torch.ones(8))],
        change=mutations.archived,
        other_files=universal_files(ONE_WEIGHT),
        read=read_universal,
    ),
    Reader(
        name="metadata_json",
        file="iter_0000002/metadata.json",
        seeds=lambda: [old_checkpoint(CORE)["metadata.json"], b'{"sharded_backend": "torch_dist"}'],
        change=mutations.json_text,
        other_files={TRACKER: b"2", **archive_files(CORE, "iter_0000002/", "metadata.json")},
        read=lambda folder: [checkpoint_path(folder, None), whole(folder / "iter_0000002")],
    ),
    Reader(
        name="checksums_json",
        file="checksums.json",
        seeds=lambda: [json.dumps(LISTED).encode()],
        change=mutations.json_text,
        other_files={"a": b"x", "b": b"y"},
        read=read_sums,
    ),
    Reader(
        name="tracker",
        file=TRACKER,
        seeds=lambda: [b"2", b"2\n"],
        change=mutations.line_of_text,
        other_files=archive_files(CORE, "iter_0000002/"),
        read=lambda folder: checkpoint_path(folder, None),
    ),
    Reader(
        name="tracker_of_deepspeed",
        file="latest_universal",
        seeds=lambda: [b"u"],
        change=mutations.line_of_text,
        other_files={"u/zero/a/fp32.pt": b""},
        read=lambda folder: universal_path(folder, None),
    ),
    Reader(
        name="validation_loss",
        file="validation_loss.json",
        seeds=lambda: [b'{"validation_loss": 1.5}'],
        change=mutations.json_text,
        read=checkpoint_folder.validation_loss,
    ),
    Reader(
        name="safetensors",
        file=safetensors_folder.SINGLE,
        seeds=lambda: [safetensors_bytes(llama_tensors(), {"format": "pt"})],
        change=mutations.safetensors,
        other_files={"config.json": CONFIGS[0]},
        read=read_weights,
    ),
    Reader(
        name="safetensors_index",
        file=safetensors_folder.INDEX,
        seeds=lambda: [llama_parts()[safetensors_folder.INDEX]],
        change=mutations.json_text,
        other_files={
            "config.json": CONFIGS[0],
            **{name: data for name, data in llama_parts().items() if name != safetensors_folder.INDEX},
        },
        read=read_weights,
    ),
    Reader(
        name="config_json",
        file="config.json",
        seeds=lambda: CONFIGS,
        change=mutations.json_text,
        read=read_config,
    ),
    Reader(
        name="memory_of_a_config",
        file="config.json",
        seeds=lambda: CONFIGS,
        change=mutations.json_text,
        read=memory_of,
    ),
    Reader(
        name="quantized_config",
        file="config.json",
        seeds=lambda: [json.dumps(one).encode() for one in (FP8, MXFP4)],
        change=mutations.json_text,
        other_files={"model.safetensors": quantized_tensors()},
        read=read_quantized,
    ),
    *(
        Reader(
            name=f"quantized_{how['quantization_config']['quant_method']}",
            file="model.safetensors",
            seeds=lambda: [quantized_tensors()],
            change=mutations.safetensors,
            other_files={"config.json": json.dumps(how).encode()},
            read=read_quantized,
        )
        for how in (FP8, MXFP4)
    ),
    Reader(
        name="command_line",
        file="words.json",
        seeds=lambda: COMMAND_LINES,
        change=mutations.json_text,
        read=read_command_line,
    ),
    Reader(
        name="headers_of_an_original",
        file=HEADERS,
        seeds=lambda: [headers_json()],
        change=headers_changed,
        other_files={"config.json": CONFIGS[0]},
        read=write_as_the_original,
    ),
    Reader(
        name="copy_in_memory",
        file="copy",
        seeds=lambda: [copy_of_state()],
        change=sealed,
        read=read_copy,
    ),
]


# A Checked whose checksums are not compared, for tests of the readers of its files.
def as_it_is(folder: Path) -> Checked:
    """All files below a folder, as if their checksums had been compared."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()]
    return Checked(folder, frozenset(names), unchecked=True)
