# SPDX-License-Identifier: Apache-2.0
"""--use-checkpoint-args, and files of others that are read without running anything."""

import io
import os
import pickle
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from megatron.training.arguments.config import CheckpointConfig
from megatron.training.arguments.parser import parse
from megatron.training.checkpoint.arguments_of import shape_of
from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.places import checkpoint_path, universal_path
from megatron.training.refusal import Refusal

RUN = (
    "--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 9 "
    "--eval-iters 0 --device cpu --use-checkpoint-args"
)
THEIRS = Namespace(
    num_layers=3,
    hidden_size=64,
    ffn_hidden_size=160,
    num_attention_heads=8,
    group_query_attention=True,
    num_query_groups=4,
    kv_channels=8,
    max_position_embeddings=128,
    seq_length=96,
    position_embedding_type="rope",
    rotary_base=5000,
    normalization="RMSNorm",
    norm_epsilon=1e-6,
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    params_dtype=torch.bfloat16,
    num_experts=None,
)


def checkpoint_of(folder: Path, common: dict, name: str = "iter_0000007") -> Path:
    path = folder / name
    path.mkdir(parents=True)
    torch.save(common, path / "common.pt")
    (path / ".metadata").write_bytes(b"")
    (path / "metadata.json").write_text("{}")
    (folder / "latest_checkpointed_iteration.txt").write_text(name.removeprefix("iter_").lstrip("0"))
    return path


def model_of(flags: str):
    config = parse(f"{RUN} {flags}".split(), None, 1, shape_of)
    return config.model, config.data.seq_length, [note for note in config.notes if "use-checkpoint-args" in note]


def test_the_model_comes_from_megatrons_args(tmp_path):
    checkpoint_of(tmp_path, {"args": THEIRS, "iteration": 7})
    model, length, notes = model_of(f"--load {tmp_path}")
    for name, value in vars(THEIRS).items():
        assert name in ("seq_length", "params_dtype", "num_experts") or getattr(model, name) == value, name
    assert length == 96
    assert len(notes) == 1 and str(tmp_path) in notes[0]


def test_sizes_that_flags_give_count_and_kinds_that_the_checkpoint_gives(tmp_path):
    checkpoint_of(tmp_path, {"args": THEIRS})
    model, length, notes = model_of(
        f"--load {tmp_path} --num-layers 2 --seq-length 32 --rotary-base 10000 --norm-epsilon 1e-5"
    )
    assert (model.num_layers, length, model.norm_epsilon) == (2, 32, 1e-5)
    assert model.rotary_base == 5000
    assert "rotary-base 10000 -> 5000" in notes[1]


@pytest.mark.parametrize(
    ("flags", "base", "kind"),
    [("--rotary-base 20000", 20000, "rope"),
     ("--position-embedding-type yarn --yarn-rotary-scaling-factor 4", 5000, "yarn")],
)  # fmt: skip
def test_a_longer_context_needs_its_positions_alone(tmp_path, flags, base, kind):
    """The rest of the shape comes from the checkpoint. A run of its length, or that goes on, keeps its positions."""
    checkpoint_of(tmp_path, {"args": THEIRS})
    model, length, notes = model_of(f"--load {tmp_path} --finetune --seq-length 384 {flags}")
    assert (model.rotary_base, model.position_embedding_type, length) == (base, kind, 384)
    assert (model.num_layers, model.hidden_size, model.max_position_embeddings) == (3, 64, 384)
    assert "96 to 384 tokens, by the flags: " in notes[-1]
    if kind == "yarn":
        assert model.yarn_original_max_position_embeddings == 96
    for other in ("--finetune --seq-length 96", "--seq-length 384"):
        model, _, notes = model_of(f"--load {tmp_path} {other} --rotary-base 20000")
        assert model.rotary_base == 5000 and "rotary-base 20000 -> 5000" in notes[-1]


def test_a_checkpoint_of_ours_gives_its_model_too(tmp_path):
    ours = parse(
        f"{RUN} --model llama3-8b --num-layers 2 --seq-length 64".replace("--use-checkpoint-args", "").split(), None, 1
    )
    checkpoint_of(tmp_path, {"config": asdict(ours), "args": Namespace()})
    model, length, _ = model_of(f"--load {tmp_path} --ckpt-step 7")
    assert {**asdict(model), "model": None} == {**asdict(ours.model), "model": None}
    assert length == 64


def test_without_a_checkpoint_the_flags_count(tmp_path):
    sizes = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8"
    dropout = "--hidden-dropout 0 --attention-dropout 0"
    model, _, (note,) = model_of(f"--load {tmp_path} {sizes} {dropout}")
    assert model.num_layers == 1
    assert "no checkpoint yet" in note
    checkpoint_of(tmp_path / "other", {"args": THEIRS})
    model, _, _ = model_of(f"--load {tmp_path} --pretrained-checkpoint {tmp_path / 'other'}")
    assert model.num_layers == 3
    with pytest.raises(Refusal, match="--load or --pretrained-checkpoint"):
        model_of(f"{sizes} {dropout}")


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"num_experts": 8}, r"--num-experts \(experts\)"),
        ({"multi_latent_attention": True}, "--multi-latent-attention"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
        ({"position_embedding_type": "mrope"}, "--position-embedding-type mrope"),
        ({"normalization": "L2Norm"}, "--normalization L2Norm"),
        ({"num_layers": None}, "no --num-layers"),
    ],
)
def test_models_that_are_not_built_here_are_refused_by_name(tmp_path, changes, told):
    checkpoint_of(tmp_path, {"args": Namespace(**(vars(THEIRS) | changes))})
    with pytest.raises(Refusal, match=told):
        shape_of(tmp_path)


class Harmful:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


class FromElsewhere:
    def __init__(self) -> None:
        self.kept = 5


def test_no_code_of_a_file_is_run(tmp_path):
    harm = Harmful(f"touch {tmp_path / 'harm'}")
    checkpoint_of(tmp_path / "a", {"args": THEIRS, "more": harm})
    with pytest.raises(Refusal, match="could run code"):
        shape_of(tmp_path / "a")
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"more": harm}))
    with pytest.raises(Refusal, match="could run code"):
        unpickle.read_metadata(tmp_path / ".metadata")
    assert not (tmp_path / "harm").exists()
    packed = io.BytesIO()
    torch.save({"more": harm}, packed)
    torch.load(io.BytesIO(packed.getvalue()), weights_only=False)
    assert (tmp_path / "harm").exists()  # it would have


def test_classes_that_are_not_known_come_as_nothing(tmp_path):
    path = checkpoint_of(tmp_path, {"args": THEIRS, "rerun": FromElsewhere(), "step": torch.tensor(3)})
    common = unpickle.read(path / "common.pt")
    assert isinstance(common["rerun"], unpickle.Unread) and not isinstance(common["rerun"], FromElsewhere)
    assert common["step"] == 3
    assert shape_of(tmp_path)["num_layers"] == 3


@pytest.mark.parametrize(
    "inside, told",
    [
        (
            "mp_rank_00/model_optim_rng.pt",
            "older format torch: convert it with python tools/convert_checkpoint.py --from",
        ),
        ("zero/fp32.pt", "universal one of DeepSpeed's: add --universal-checkpoint"),
        (".metadata", "torch_dcp or fsdp_dtensor"),
        ("common.pt", "missing or incomplete"),
    ],
)
def test_other_forms_are_named(tmp_path, inside, told):
    file = tmp_path / "iter_0000007" / inside
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(Refusal, match=told):
        checkpoint_path(tmp_path, CheckpointConfig().ckpt_step)


def test_zarr_is_named(tmp_path):
    path = tmp_path / "iter_0000007"
    path.mkdir()
    (path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(Refusal, match="format zarr: .* save it there with --ckpt-format torch_dist"):
        checkpoint_path(tmp_path, None)
    with pytest.raises(Refusal, match="is a checkpoint itself: give "):
        checkpoint_path(path, None)


@pytest.mark.parametrize(
    "name, told", [("latest", "own format: .*ds_to_universal"), ("latest_universal", "universal checkpoint of")]
)
def test_deepspeeds_folders_are_named(tmp_path, name, told):
    assert checkpoint_path(tmp_path, None) is None
    (tmp_path / name).write_text("global_step7")
    with pytest.raises(Refusal, match=f"{told}.*--universal-checkpoint"):
        checkpoint_path(tmp_path, None)
    with pytest.raises(Refusal, match="--universal-checkpoint: .* does not exist: convert"):
        universal_path(tmp_path, None)
