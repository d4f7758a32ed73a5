# SPDX-License-Identifier: Apache-2.0
"""Parts of saving and loading by themselves: which models fit, order of writing, what is refused, what is copied."""

from __future__ import annotations

import io
import os
import pickle
import stat
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.platform.streams import Streams
from megatron.training.arguments.parser import parse
from megatron.training.checkpoint import (
    checkpoint,
    checkpoint_folder,
    older_formats,
    owner,
    rank_file,
    read_torch_dist,
)
from megatron.training.checkpoint.converting.from_older import model_args
from megatron.training.checkpoint.converting.lazy_save import empty_extra_states, sharded
from megatron.training.checkpoint.megatron_lm import load_torch_dist, megatron_args
from megatron.training.checkpoint.sharded_state import (
    PARTITIONED,
    ShardPlaces,
    _cut,
    _load_groups,
    boxes,
    find_places,
    load_optimizer,
    load_weights,
)
from megatron.training.families.llama.llama_weights import Piece
from megatron.training.refusal import Refusal
from tests.unit.test_refusals import GOOD, MOCK

PATH = Path("c/iter_0000001")
LATENTS = "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8"
KINDS = {
    "plain": "",
    "experts": "--num-experts 4 --moe-router-topk 2",
    "latents": f"{LATENTS} --position-embedding-type rope",
    "learned": "--position-embedding-type learned_absolute",
}


def config_of(flags: str):
    return parse(f"{GOOD} {MOCK} {flags}".split(), world_size=1)


@pytest.mark.parametrize(
    "kind, changed, finetune, word",
    [
        ("plain", {}, False, None),
        ("plain", {"hidden_size": 5}, True, "--hidden-size 5"),
        ("plain", {"norm_epsilon": 0.5}, False, "--norm-epsilon 0.5"),
        ("plain", {"norm_epsilon": 0.5}, True, None),
        # What only other kinds of models read may differ.
        ("plain", {"moe_router_topk": 3, "moe_ffn_hidden_size": 5}, False, None),
        ("plain", {"q_lora_rank": 3, "kv_lora_rank": 5}, False, None),
        ("plain", {"linear_key_head_dim": 3}, False, None),
        ("plain", {"mamba_state_dim": 3, "hybrid_override_pattern": "M"}, False, None),
        ("experts", {"moe_router_topk": 3}, False, "--moe-router-topk 3"),
        ("latents", {"kv_lora_rank": 5}, True, "--kv-lora-rank 5"),
        # Weights of positions have a length.
        ("learned", {"max_position_embeddings": 5}, True, "--max-position-embeddings 5"),
        ("plain", {"max_position_embeddings": 5}, False, None),
        ("learned", {"position_embedding_type": "rope"}, True, "--position-embedding-type rope"),
    ],
)
def test_which_checkpoints_fit_a_model(kind: str, changed: dict[str, Any], finetune: bool, word: str | None) -> None:
    config = config_of(KINDS[kind] or "--position-embedding-type rope")
    saved = asdict(config.model) | changed
    if word is None:
        checkpoint.check_model(saved, config, PATH, finetune)
    else:
        with pytest.raises(Refusal, match=f"{word} in the checkpoint"):
            checkpoint.check_model(saved, config, PATH, finetune)


def test_a_checkpoint_from_before_a_setting_has_no_such_layers() -> None:
    config = config_of(KINDS["experts"])
    saved = {name: value for name, value in asdict(config.model).items() if name != "num_experts"}
    with pytest.raises(Refusal, match="--num-experts None in the checkpoint, 4 in this run"):
        checkpoint.check_model(saved, config, PATH, False)
    checkpoint.check_model({}, config, PATH, False)  # nothing is known about it


def test_progress_counts_samples_and_tokens() -> None:
    progress = checkpoint.Progress(2, 10, 100, "a")
    progress.advance(4, 50)
    assert progress == checkpoint.Progress(3, 14, 300, "a")


@pytest.mark.parametrize(
    "saved, rank, weights_only, word",
    [
        ({}, None, False, None), ({}, 4, True, None), ({}, 4, False, "pass --finetune"),
        ({"lora_rank": 4}, None, True, "has adapters: give --lora-rank 4"),
        ({"lora_rank": 4, "lora_alpha": 8.0}, 4, False, None),
        ({"lora_rank": 2}, 4, False, "has other adapters: --lora-rank 2 in the checkpoint, 4 in this run"),
        ({"lora_rank": 4, "lora_alpha": 9.5}, 4, True, "--lora-alpha 9.5 in the checkpoint, 8 in this run"),
        ({"lora_rank": 4, "lora_targets": ["a", "b"]}, 4, True, "--lora-targets a b in the checkpoint"),
    ],
)  # fmt: skip
def test_which_adapters_fit(saved: dict[str, Any], rank: int | None, weights_only: bool, word: str | None) -> None:
    model = SimpleNamespace(lora_rank=rank, lora_alpha=8.0, lora_targets=["c"])
    if word is None:
        new = checkpoint.adapters_are_new(saved, model, PATH, weights_only)
        assert new is (rank is not None and not saved)
    else:
        with pytest.raises(Refusal, match=word):
            checkpoint.adapters_are_new(saved, model, PATH, weights_only)


# ---- the folder


def written(folder: Path, iteration: int, text: str) -> Path:
    final = folder / f"iter_{iteration:07d}"
    partial = checkpoint_folder.partial_of(final, "t")
    partial.mkdir(parents=True)
    (partial / "common.pt").write_text(text)
    return final


@pytest.mark.parametrize("exchange", ["works", "fails", "is missing"])
def test_a_checkpoint_replaces_one_of_the_same_name(tmp_path: Path, monkeypatch, exchange: str) -> None:
    if exchange != "works":
        library = SimpleNamespace(**({"renameat2": lambda *_: -1} if exchange == "fails" else {}))
        monkeypatch.setattr(checkpoint_folder.ctypes, "CDLL", lambda _: library)
    for text in ("old", "new"):
        checkpoint_folder.publish(written(tmp_path, 3, text), "t")
    assert (tmp_path / "iter_0000003" / "common.pt").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", checkpoint_folder.TRACKER]
    assert (tmp_path / checkpoint_folder.TRACKER).read_text() == "3"


def test_a_checkpoint_is_synced_before_it_is_named_and_the_tracker_is_replaced_at_once(tmp_path, monkeypatch) -> None:
    done: list[tuple[str, Any]] = []
    for name in ("sync_folder", "sync_folders_up"):
        monkeypatch.setattr(checkpoint_folder, name, lambda folder, name=name: done.append((name, Path(folder))))
    write = checkpoint_folder.write_bytes
    monkeypatch.setattr(
        checkpoint_folder, "write_bytes", lambda path, *rest: done.append(("write", path.parent)) or write(path, *rest)
    )
    checkpoint_folder.publish(first := written(tmp_path, 1, "a"), "t")
    around = [("sync_folders_up", tmp_path), ("write", tmp_path), ("sync_folder", tmp_path)]
    assert done[:4] == [("sync_folder", checkpoint_folder.partial_of(first, "t")), *around]
    done.clear()
    checkpoint_folder.publish(written(tmp_path, 2, "b"), "t")
    assert done[1:4] == [("sync_folder", tmp_path), *around[1:]]
    done.clear()
    checkpoint_folder.clear(tmp_path)
    assert not done
    (tmp_path / f".iter_0000005{checkpoint_folder.PARTIAL}").mkdir()
    checkpoint_folder.clear(tmp_path)
    assert done == [("sync_folder", tmp_path)]


def test_a_tracker_that_only_its_owner_can_replace_is_refused(tmp_path: Path, monkeypatch) -> None:
    tracker = tmp_path / checkpoint_folder.TRACKER
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 12345)
    checkpoint_folder.check_writable(str(tmp_path / "new" / "folder"))
    tracker.touch()
    with pytest.raises(Refusal, match="belongs to another user, and only its owner can replace it"):
        checkpoint_folder.check_writable(str(tmp_path))
    tmp_path.chmod(0o777)
    assert not tmp_path.stat().st_mode & stat.S_ISVTX
    checkpoint_folder.check_writable(str(tmp_path))


def test_the_remedies_for_a_folder_of_another_run() -> None:
    def line(**settings: Any) -> str:
        usual = {"save": "c", "load": None, "ckpt_step": None}
        usual |= dict.fromkeys(("finetune", "reset_iteration", "universal_checkpoint"), False)
        text = owner._other_run(SimpleNamespace(**usual | settings), 30)
        return text.partition("continue that run with ")[2].partition(", give another")[0]

    assert line() == "--load c"
    assert line(load="c") == "--load c and --ckpt-step 30"
    assert line(load="c", finetune=True, universal_checkpoint=True) == (
        "--load c without --finetune and --universal-checkpoint"
    )
    assert line(load="d", ckpt_step=5) == "--load c without --ckpt-step"


# ---- files


def test_a_file_is_synced_to_the_disk(tmp_path: Path, monkeypatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    rank_file.write_bytes(tmp_path / "a", b"12345", sums := {})
    assert synced == [5] and sums["a"].size == 5


def test_copies_of_a_gpu_are_complete_before_training_goes_on() -> None:
    waited = []

    class Fake(Streams):
        def record(self, stream: Any) -> Any:
            return SimpleNamespace(synchronize=lambda: waited.append(stream))

        def wait(self, stream: Any, event: Any) -> None:
            waited.append((stream, event))

    copies = rank_file.HostCopies(Fake(torch.device("cpu")))
    writer = SimpleNamespace(parts=[("x", torch.ones(3))])
    copies.take(writer, "computed")
    assert waited == [(rank_file.STORES, "computed"), rank_file.STORES]
    assert torch.equal(writer.parts[0][1], torch.ones(3))


class Evil:
    def __reduce__(self) -> Any:
        return os.getcwd, ()


def test_states_of_layers_that_run_code_are_refused() -> None:
    def saved(value: Any) -> io.BytesIO:
        torch.save(value, file := io.BytesIO())
        return file

    for where in ({"a": {"b._extra_state": saved(Evil())}}, [{"b._extra_state": saved(Evil())}]):
        with pytest.raises(Refusal, match="b._extra_state"):
            read_torch_dist.check_engine_states(where, "c")
    tensor = torch.frombuffer(bytearray(pickle.dumps(Evil())), dtype=torch.uint8)
    with pytest.raises(Refusal, match="b._extra_state"):
        read_torch_dist.check_engine_states({"b._extra_state": tensor}, "c")
    # Other entries are not read by Transformer Engine.
    read_torch_dist.check_engine_states({"b.weight": saved(Evil()), 3: saved(Evil())}, "c")
    read_torch_dist.check_engine_states({0: {"b._extra_state": saved({"scale": 1.0})}}, "c")


def test_a_shard_is_cut_into_boxes_of_its_block() -> None:
    """Elements 7 to 16 of a parameter [4, 6], of which this block has the last two rows and is layer 3 of 5."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    whole = torch.arange(24.0)
    data = torch.empty(24, device="meta")[12:].view(2, 6)
    block = ShardedTensor.from_rank_offsets("w", data, (0, 3, 5), prepend_axis_num=1, replica_id=(0, 1, 2))
    for replicated, (first, count) in product((False, True), ((7, 10), (14, 7), (0, 24))):
        pieces = _cut(block, (first, count), replicated)
        shard = whole[first : first + count]
        for piece in pieces:
            (layer, row, column), (one, rows, columns) = piece.place.global_offset, piece.place.local_shape
            box = whole.view(4, 6)[2:][row : row + rows, column : column + columns]
            assert (layer, one) == (3, 1) and torch.equal(shard[piece.part], box.flatten())
            assert piece.place.replica_id == ((0, 1, 2) if replicated else (0, 1, 0))
        found = sorted(int(x) for piece in pieces for x in shard[piece.part])
        assert found == [*range(max(first, 12), first + count)]


def test_what_is_no_parameter_is_saved_beside_them() -> None:
    class Chunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.counts = nn.Parameter(torch.ones(4, 6)), torch.ones(3)

        def sharded_state_dict(self, **_: Any) -> dict[str, Any]:
            from megatron.core.dist_checkpointing.mapping import ShardedTensor

            return {name: ShardedTensor.from_rank_offsets(name, x.data, replica_id=(0, 1, 2))
                    for name, x in (("weight", self.weight), ("counts", self.counts))}  # fmt: skip

    chunk = Chunk()
    places = find_places(chunk)
    assert [other.key for other in places.others] == ["counts"]
    assert [piece.place.replica_id for piece in places.pieces[chunk.weight]] == [(0, 1, 2)]
    (own,) = find_places(chunk, lambda _: (0, 6)).pieces[chunk.weight]
    assert own.place.replica_id == (0, 1, 0) and own.place.local_shape == (1, 6)


def test_stand_ins_for_weights_have_their_attributes() -> None:
    class Chunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 6))
            self.weight.partition_dim = 1

        def sharded_state_dict(self, **_: Any) -> dict[str, Any]:
            seen.append(self.weight.partition_dim)
            return {}

    seen: list[int] = []
    find_places(Chunk())
    assert seen == [1]


def test_complete_rows_are_one_box() -> None:
    assert list(boxes((4, 6), 6, 18)) == [(6, (1, 0), (2, 6))]
    assert list(boxes((4, 2, 3), 3, 24)) == [(3, (0, 1, 0), (1, 1, 3)), (6, (1, 0, 0), (3, 2, 3))]


def test_buffers_beside_the_weights_are_loaded() -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    counts = torch.zeros(3)
    places = ShardPlaces({}, [object(), ShardedTensor.from_rank_offsets("counts", counts)])
    load_weights({"other 1": torch.arange(3.0)}, places)
    assert counts.tolist() == [0.0, 1.0, 2.0]


# ---- the optimizer


def optimizer_with(scaler: dict[str, Any] | None) -> Any:
    weight = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([weight], 0.5)
    inner.state[weight] = {"step": torch.tensor(0.0)}
    identity = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": False}
    inner.param_groups[0].update(identity | {"default_config": True})
    part = SimpleNamespace(optimizer=inner)
    if scaler is not None:
        part.grad_scaler = SimpleNamespace(load_state_dict=scaler.update)
    return part


def test_groups_steps_and_loss_scales_are_loaded() -> None:
    for scaled, saved_scale in ((True, True), (True, False), (False, True), (False, False)):
        scaler: dict[str, Any] = {}
        part = optimizer_with(scaler if scaled else None)
        (group,) = part.optimizer.param_groups
        saved = {name: value for name, value in group.items() if name != "params"}
        saved |= {"lr": 0.125, "step": 7.0, PARTITIONED: True}
        loaded: dict[str, Any] = {"optimizer": {"param_groups": [saved]}}
        if saved_scale:
            loaded["grad_scaler"] = {"scale": 8.0}
        load_optimizer(part, loaded, [])
        assert group["lr"] == 0.125 and group[PARTITIONED] is False
        assert [float(state["step"]) for state in part.optimizer.state.values()] == [7.0]
        assert scaler == ({"scale": 8.0} if scaled and saved_scale else {})


def test_groups_with_other_multipliers_are_refused() -> None:
    part = optimizer_with(None)
    saved = [dict(part.optimizer.param_groups[0]) | {"lr_mult": 2.0}]
    with pytest.raises(Refusal, match="give the --decoupled-lr of its run"):
        _load_groups(part, saved)


# ---- older formats


def test_modules_of_a_pipeline_by_their_numbers() -> None:
    names = ["0.word_embeddings.weight", "3.attention.dense.weight", "5.attention.dense.weight", "7.weight",
             "8.lm_head.weight"]  # fmt: skip
    found = {name: (core.key, core.layer) for name, core in older_formats.pipe_names(names).items()}
    assert found["0.word_embeddings.weight"] == ("embedding.word_embeddings.weight", None)
    assert [found[name][1] for name in names[1:3]] == [0, 1]
    assert found["7.weight"] == ("decoder.final_layernorm.weight", None)
    assert found["8.lm_head.weight"] == ("output_layer.weight", None)
    tied = older_formats.pipe_names([*names[1:3], "tied_modules.embed.word_embeddings.weight", "other.weight"])
    assert {*tied} == {*names[1:3], "tied_modules.embed.word_embeddings.weight"}
    assert older_formats.pipe_names(names[:1]) is None


def test_folders_of_a_universal_checkpoint() -> None:
    files = {"zero/a.weight/fp32.pt", "zero/a.weight/exp_avg.pt", "b/a.weight/fp32.pt", "zero/step.pt"}
    assert [*older_formats.universal_names(SimpleNamespace(files=files))] == ["a.weight"]


def test_rows_of_older_versions_are_reordered() -> None:
    """Our order: of each head its query, key and value. Each row has its (part, head, place) as numbers."""
    heads, size = 2, 3
    ours = torch.tensor([[part, head, at] for head in range(heads) for part in range(3) for at in range(size)])
    zero = torch.tensor([[part, head, at] for part in range(3) for head in range(heads) for at in range(size)])
    one = torch.tensor([[part, head, at] for head in range(heads) for at in range(size) for part in range(3)])
    for version, rows in ((0, zero), (1.0, one), (2.0, ours), (3.0, ours)):
        assert torch.equal(older_formats.reordered(rows, version, heads), ours)


@pytest.mark.parametrize(
    "file, words",
    [
        ("metadata.json", "has the format torch_dist: pass it to --load as it is"),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "convert it to a universal checkpoint"),
        ("other", "neither mp_rank_"),
        ("zero/a", None),
        ("mp_rank_00/model_optim_rng.pt", None),
    ],
)
def test_which_folders_are_older_checkpoints(tmp_path: Path, monkeypatch, file: str, words: str | None) -> None:
    monkeypatch.setattr(older_formats, "_path", lambda folder, step: folder / "iter_0000001")
    path = tmp_path / "iter_0000001" / file
    path.parent.mkdir(parents=True)
    path.touch()
    if words is None:
        assert older_formats.source_path(tmp_path, None) == tmp_path / "iter_0000001"
    else:
        with pytest.raises(Refusal, match=words):
            older_formats.source_path(tmp_path, None)


# ---- Megatron-LM


@pytest.mark.parametrize("kind", ["plain", "learned", "llama"])
def test_args_of_older_models_give_the_model(kind: str) -> None:
    flags = KINDS.get(kind, "--swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 500000 "
        "--untie-embeddings-and-output-weights --disable-bias-linear --group-query-attention --num-query-groups 2 "
        "--norm-epsilon 1e-6 --rotary-percent 0.5 --add-qkv-bias --max-position-embeddings 99")  # fmt: skip
    model = config_of(flags).model
    names = ("make_vocab_size_divisible_by", "bias_gelu_fusion")  # that a checkpoint does not say
    read = megatron_args.model_of(model_args(model), "c")
    differing = {name for name, value in asdict(model).items() if getattr(read, name) != value}
    assert differing <= {*names, "vocab_size", "hidden_dropout", "attention_dropout", "init_method_std"}, differing


@pytest.mark.parametrize(
    "args, biases",
    [({"disable_bias_linear": True}, False), ({"disable_bias_linear": False}, True), ({}, None),
     ({"add_bias_linear": True, "disable_bias_linear": True}, True), ({"disable_bias_linear": "yes"}, None)],
)  # fmt: skip
def test_biases_by_their_older_argument(args: dict[str, Any], biases: bool | None) -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    assert megatron_args.settings_of(sizes | args, "c").get("add_bias_linear") is biases


@pytest.mark.parametrize(
    "args, rows", [({}, 128), ({"tensor_model_parallel_size": 4}, 512), ({"make_vocab_size_divisible_by": 8}, 8),
                   ({"make_vocab_size_divisible_by": 8, "tensor_model_parallel_size": 2}, 16)]
)  # fmt: skip
def test_megatron_lm_pads_the_vocabulary_to_blocks_of_each_tp_rank(args: dict[str, Any], rows: int) -> None:
    assert megatron_args.vocabulary_block(args) == rows


def test_neutral_arguments_are_compared_by_name() -> None:
    kind = SimpleNamespace(name="learned")
    assert megatron_args._is_one_of(kind, ("learned",)) and megatron_args._is_one_of(None, (None, False))
    assert not megatron_args._is_one_of("other", ("learned", None))
    assert megatron_args._is_one_of([1, 1], (None,)) and not megatron_args._is_one_of([1, 2], (None,))


def test_what_megatron_lm_reads_of_the_grid() -> None:
    grid = "--tensor-model-parallel-size 2 --ring-parallel-size 2 --global-batch-size 4 --no-save-optim"
    config = parse(f"{GOOD} {MOCK} {grid}".split(), world_size=8)
    args = megatron_args.args_of(config, 100, 3, 30, 8)
    assert (args.data_parallel_size, args.context_parallel_size, args.tensor_model_parallel_size) == (2, 2, 2)
    config = parse(f"{GOOD} {MOCK} {grid} --num-layers 2 --pipeline-model-parallel-size 2".split(), world_size=16)
    assert megatron_args.args_of(config, 100, 3, 30, 16).data_parallel_size == 2
    assert args.no_save_optim and megatron_args.args_of(config, 100, 3, 30, 1).data_parallel_size == 1
    assert not megatron_args.args_of(config_of(""), 100, 3, 30, 1).no_save_optim
    dtypes = [megatron_args.args_of(config_of(flags), 100, 3, 30, 1).params_dtype for flags in ("", "--bf16", "--fp16")]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float16]


def layers_of(*kinds: str) -> list[Any]:
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    linear = object.__new__(RowParallelLinear)
    mixers = {"attention": {"core_attention": 1, "linear_proj": linear}, "state": {"inputs_of_rule": 1}, "none": {},
              "engine": {"core_attention": 1, "linear_proj": 1}}  # fmt: skip
    return [
        SimpleNamespace(layer_number=number, self_attention=SimpleNamespace(**mixers[kind]))
        for number, kind in enumerate(kinds, 3)
    ]


@pytest.mark.parametrize(
    "kinds, config, last, names",
    [
        (("attention", "attention"), {}, False, [("decoder.layers.self_attention.core_attention", 2),
                                                  ("decoder.layers.self_attention.core_attention", 3)]),
        (("attention",), {"qk_layernorm": True}, True, [
            ("decoder.layers.self_attention.core_attention", 2), ("decoder.layers.self_attention.q_layernorm", 2),
            ("decoder.layers.self_attention.k_layernorm", 2), ("decoder.final_layernorm", 0)]),
        (("state", "attention"), {"linear_attention_freq": 2}, False, [
            ("decoder.layers.2.self_attention.out_norm", 0), ("decoder.layers.3.self_attention.core_attention", 0)]),
        (("state", "none", "attention"), {"is_hybrid_model": True}, True, [
            ("decoder.layers.4.self_attention.core_attention", 0), ("decoder.final_norm", 0)]),
        (("engine",), {}, True, []),  # Transformer Engine's layers have their own
    ],
)  # fmt: skip
def test_empty_states_that_megatron_lm_expects(monkeypatch, kinds, config, last, names) -> None:
    monkeypatch.setattr(megatron_args, "get_data_parallel_rank", lambda **_: 5)
    usual = {"num_layers": 8, "is_hybrid_model": False, "qk_layernorm": False, "linear_attention_freq": None}
    chunk = SimpleNamespace(
        decoder=SimpleNamespace(layers=layers_of(*kinds)), config=SimpleNamespace(**usual | config), post_process=last,
        pg_collection=SimpleNamespace(tp=SimpleNamespace(rank=lambda: 1)),
    )  # fmt: skip
    states = megatron_args.engine_states(chunk)
    assert [(state.key.removesuffix("._extra_state"), *state.global_offset) for state in states] == names
    assert all(state.replica_id == (0, 1, 5) for state in states)


def test_pieces_of_weights_as_core_saves_them() -> None:
    norm, bias = Piece("n", ("n",), ((8,),), 2, stacked=True), Piece("b", ("b",), ((4,),), 1, wide=True, stacked=False)
    words, part = Piece("w", ("w",), ((8, 2),)), Piece("p", ("p",), ((4, 2),), 1, 1, 2, stacked=True)
    shards = [sharded(piece, 3, torch.bfloat16) for piece in (norm, bias, words, part)]
    assert [shard.global_shape for shard in shards] == [(3, 8), (4,), (8, 2), (3, 8, 2)]
    assert [shard.global_offset for shard in shards] == [(2, 0), (0,), (0, 0), (1, 4, 0)]
    assert [shard.dtype for shard in shards] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    assert [shard.allow_shape_mismatch for shard in shards] == [False, False, True, False]  # the vocabulary is padded


def test_empty_states_of_linear_layers() -> None:
    def part(key: str, shape: tuple[int, ...], local: tuple[int, ...], offset: tuple[int, ...]) -> Any:
        return SimpleNamespace(key=key, global_shape=shape, local_shape=local, global_offset=offset)

    states = empty_extra_states([
        part("decoder.layers.mlp.linear_fc1.weight", (4, 8, 2), (1, 8, 2), (3, 0, 0)),
        part("decoder.layers.mlp.linear_fc1.bias", (4, 8), (1, 8), (3, 0)),
        part("decoder.layers.mlp.linear_fc1.layer_norm_weight", (4, 8), (1, 8), (3, 0)),
        part("decoder.layers.0.self_attention.in_proj.weight.query", (8, 2), (8, 2), (0, 0)),
        part("mtp.layers.0.eh_proj.weight", (8, 2), (8, 2), (0, 0)),
        part("decoder.layers.mlp.experts.experts.linear_fc2.weight", (2, 3, 8, 2), (1, 2, 8, 2), (1, 1, 0, 0)),
        part("embedding.word_embeddings.weight", (8, 2), (8, 2), (0, 0)),
    ])  # fmt: skip
    assert [(state.key.removesuffix("._extra_state"), state.global_shape, state.global_offset) for state in states] == [
        ("decoder.layers.mlp.linear_fc1", (4,), (3,)),
        ("decoder.layers.0.self_attention.in_proj", (1,), (0,)),
        ("mtp.layers.0.eh_proj", (1,), (0,)),
        ("decoder.layers.mlp.experts.experts.linear_fc2", (2, 3), (1, 1)),
        ("decoder.layers.mlp.experts.experts.linear_fc2", (2, 3), (1, 2)),
    ]


@pytest.mark.parametrize("size, fits", [(256, False), (257, True), (512, True), (513, False)])
def test_a_vocabulary_is_padded_by_less_than_a_block_of_each_tp_rank(size: int, fits: bool) -> None:
    args = {"padded_vocab_size": 512, "tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": None}
    foreign, config = SimpleNamespace(args=args, path=PATH), SimpleNamespace(notes=[])
    if fits:
        load_torch_dist.check_vocabulary(foreign, size, config)
        assert len(config.notes) == (size < 512)
    else:
        with pytest.raises(Refusal, match="a vocabulary of 257 to 512 tokens"):
            load_torch_dist.check_vocabulary(foreign, size, config)


def test_groups_of_megatron_lm_keep_only_what_we_know() -> None:
    ours = dict(optimizer_with(None).optimizer.param_groups[0])
    theirs = ours | {"lr": 0.125, "step": 7, "fused_by_them": True}
    (matched,) = load_torch_dist._matched([ours], [theirs])
    assert (matched["lr"], matched["step"]) == (0.125, 7)
    assert "fused_by_them" not in matched and "params" not in matched
