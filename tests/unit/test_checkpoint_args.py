# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's model compared with the run's. Activations are compared by their formula, not by flags."""

from __future__ import annotations

import io
import itertools
import os
import pickle
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from megatron.training.arguments.parser import parse
from megatron.training.checkpoint.arguments_of import shape_of
from megatron.training.checkpoint.checkpoint import check_model
from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.load_torch_dist import ForeignCheckpoint
from megatron.training.checkpoint.megatron_lm.megatron_args import for_megatron
from megatron.training.checkpoint.megatron_lm.places import TRACKER, checkpoint_path, run_of, universal_path
from megatron.training.checkpoint.megatron_lm.stored_tensors import WholeTensors
from megatron.training.checkpoint.older_formats import _path
from megatron.training.checkpoint.owner import COPIES, identity
from megatron.training.refusal import Refusal
from megatron.training.settings.config import CheckpointConfig
from tests.distributed.flags import RUN, SHAPE


def gpt(flags):
    return parse(f"{SHAPE} {RUN} --hidden-dropout 0 --attention-dropout 0 {flags}".split(), None, 1)


def older_settings(flags):
    """Model settings as older checkpoints store them, without a flag for GELU, which used tanh."""
    settings = asdict(gpt(flags).model)
    return {name: value for name, value in settings.items() if name not in ("bias_gelu_fusion", "openai_gelu")}


@pytest.mark.parametrize(
    "saved, flags, continues",
    [
        (asdict(gpt("").model), "", True),
        (asdict(gpt("").model), "--openai-gelu", True),
        (asdict(gpt("").model), "--no-bias-gelu-fusion", False),
        (asdict(gpt("--squared-relu").model), "", False),
        (older_settings(""), "", True),
        (older_settings("--disable-bias-linear"), "--disable-bias-linear", False),
        (older_settings("--disable-bias-linear"), "--disable-bias-linear --openai-gelu", True),
        (older_settings("--swiglu"), "--swiglu", True),
    ],
)
def test_a_run_continues_only_with_the_same_activation(saved, flags, continues):
    config = gpt(flags)
    if continues:
        check_model(saved, config, Path("old"), changed=False)
        assert not any("activation" in note for note in config.notes)
        return
    with pytest.raises(Refusal, match="activation .* in the checkpoint, .* in this run"):
        check_model(saved, config, Path("old"), changed=False)
    check_model(saved, config, Path("old"), changed=True)
    assert any("the activation" in note for note in config.notes)


# --use-checkpoint-args, and untrusted files, which are read without running code.


CHECKPOINT_RUN = (
    "--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 9 "
    "--eval-iters 0 --device cpu --use-checkpoint-args"
)
MEGATRON_ARGS = Namespace(
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
    config = parse(f"{CHECKPOINT_RUN} {flags}".split(), None, 1, shape_of)
    return config.model, config.data.seq_length, [note for note in config.notes if "use-checkpoint-args" in note]


def test_samples_that_megatron_lm_skipped_are_consumed():
    args = {"consumed_train_samples": 12, "skipped_train_samples": 4}
    foreign = ForeignCheckpoint(Path("a"), {"iteration": 3}, args, WholeTensors(Path("a"), {}))
    assert foreign.progress() == {"iteration": 3, "consumed_train_samples": 16}


def test_megatron_lm_reads_the_operations_so_far(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    config = parse(f"{SHAPE} {RUN}".split(), None, 1)  # 4 layers of 64, 64 tokens
    weights, scores = 4 * 12 * 64**2 + 301 * 64, 4 * 2 * 64 * 64 / 2  # a token's multiplications; half are masked
    sample = 64 * 2 * (weights + scores) * 3  # the backward pass takes twice the forward pass
    assert for_megatron(config, 301, 5, 7)["num_floating_point_operations_so_far"] == sample * 7


def test_the_model_comes_from_megatrons_args(tmp_path):
    checkpoint_of(tmp_path, {"args": MEGATRON_ARGS, "iteration": 7})
    model, length, notes = model_of(f"--load {tmp_path}")
    for name, value in vars(MEGATRON_ARGS).items():
        assert name in ("seq_length", "params_dtype", "num_experts") or getattr(model, name) == value, name
    assert length == 96
    assert len(notes) == 1 and str(tmp_path) in notes[0]


def test_sizes_come_from_the_flags_and_kinds_from_the_checkpoint(tmp_path):
    checkpoint_of(tmp_path, {"args": MEGATRON_ARGS})
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
def test_a_longer_context_needs_only_positions(tmp_path, flags, base, kind):
    """The rest of the shape comes from the checkpoint. A run of equal length, or a resumed one, keeps its positions."""
    checkpoint_of(tmp_path, {"args": MEGATRON_ARGS})
    model, length, notes = model_of(f"--load {tmp_path} --finetune --seq-length 384 {flags}")
    assert (model.rotary_base, model.position_embedding_type, length) == (base, kind, 384)
    assert (model.num_layers, model.hidden_size, model.max_position_embeddings) == (3, 64, 384)
    assert "flags extend 96 to 384 tokens: " in notes[-1]
    if kind == "yarn":
        assert model.yarn_original_max_position_embeddings == 96
    for other in ("--finetune --seq-length 96", "--seq-length 384"):
        model, _, notes = model_of(f"--load {tmp_path} {other} --rotary-base 20000")
        assert model.rotary_base == 5000 and "rotary-base 20000 -> 5000" in notes[-1]


def test_a_checkpoint_of_ours_gives_its_model_too(tmp_path):
    ours = parse(
        f"{CHECKPOINT_RUN} --model llama3-8b --num-layers 2 --seq-length 64".replace(
            "--use-checkpoint-args", ""
        ).split(),
        None,
        1,
    )
    checkpoint_of(tmp_path, {"config": asdict(ours), "args": Namespace()})
    model, length, _ = model_of(f"--load {tmp_path} --ckpt-step 7")
    assert {**asdict(model), "model": None} == {**asdict(ours.model), "model": None}
    assert length == 64


def test_without_a_checkpoint_the_flags_are_used(tmp_path):
    sizes = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8"
    dropout = "--hidden-dropout 0 --attention-dropout 0"
    model, _, (note,) = model_of(f"--load {tmp_path} {sizes} {dropout}")
    assert model.num_layers == 1
    assert "no checkpoint yet" in note
    checkpoint_of(tmp_path / "other", {"args": MEGATRON_ARGS})
    model, _, _ = model_of(f"--load {tmp_path} --pretrained-checkpoint {tmp_path / 'other'}")
    assert model.num_layers == 3
    with pytest.raises(Refusal, match="--load or --pretrained-checkpoint"):
        model_of(f"{sizes} {dropout}")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_experts": 8}, r"--num-experts \(experts\)"),
        ({"multi_latent_attention": True}, "--multi-latent-attention"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
        ({"position_embedding_type": "mrope"}, "--position-embedding-type mrope"),
        ({"normalization": "L2Norm"}, "--normalization L2Norm"),
        ({"num_layers": None}, "no --num-layers"),
    ],
)
def test_unsupported_models_are_refused_by_name(tmp_path, changes, message):
    checkpoint_of(tmp_path, {"args": Namespace(**(vars(MEGATRON_ARGS) | changes))})
    with pytest.raises(Refusal, match=message):
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
    checkpoint_of(tmp_path / "a", {"args": MEGATRON_ARGS, "more": harm})
    with pytest.raises(Refusal, match="could run code"):
        shape_of(tmp_path / "a")
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"more": harm}))
    with pytest.raises(Refusal, match="could run code"):
        unpickle.read_metadata(tmp_path / ".metadata")
    assert not (tmp_path / "harm").exists()
    packed = io.BytesIO()
    torch.save({"more": harm}, packed)
    torch.load(io.BytesIO(packed.getvalue()), weights_only=False)
    assert (tmp_path / "harm").exists()  # the attack works with the plain unpickler


def test_unknown_classes_are_read_as_placeholders(tmp_path):
    path = checkpoint_of(tmp_path, {"args": MEGATRON_ARGS, "rerun": FromElsewhere(), "step": torch.tensor(3)})
    common = unpickle.read(path / "common.pt")
    assert isinstance(common["rerun"], unpickle.Unread) and not isinstance(common["rerun"], FromElsewhere)
    assert common["step"] == 3
    assert shape_of(tmp_path)["num_layers"] == 3


@pytest.mark.parametrize(
    "inside, message",
    [
        (
            "mp_rank_00/model_optim_rng.pt",
            "older format torch: convert it with python tools/convert_checkpoint.py --from",
        ),
        ("zero/fp32.pt", "universal checkpoint of DeepSpeed: add --universal-checkpoint"),
        (".metadata", "torch_dcp or fsdp_dtensor"),
        ("common.pt", "missing or incomplete"),
    ],
)
def test_other_formats_are_named(tmp_path, inside, message):
    file = tmp_path / "iter_0000007" / inside
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(Refusal, match=message):
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
    "name, message", [("latest", "own format: .*ds_to_universal"), ("latest_universal", "universal checkpoint of")]
)
def test_deepspeeds_folders_are_named(tmp_path, name, message):
    assert checkpoint_path(tmp_path, None) is None
    (tmp_path / name).write_text("global_step7")
    with pytest.raises(Refusal, match=f"{message}.*--universal-checkpoint"):
        checkpoint_path(tmp_path, None)
    with pytest.raises(Refusal, match="--universal-checkpoint: .* does not exist: convert"):
        universal_path(tmp_path, None)


# The latest checkpoint, the run that it belongs to, and folders in which a run may save.


A, B = "a" * 32, "b" * 32


def folder_of(folder: Path, runs: dict[int, str | None], tracker: str | None = None) -> Path:
    """A folder with checkpoints {iteration: run} and a tracker; the run is None if the checkpoint has no identity."""
    for iteration, run in runs.items():
        path = folder / f"iter_{iteration:07d}"
        path.mkdir(parents=True)
        (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        progress = {"iteration": iteration, "consumed_train_samples": 1} | ({} if run is None else {"run": run})
        torch.save({"progress": progress}, path / "common.pt")
    folder.mkdir(exist_ok=True)
    if tracker is not None:
        (folder / TRACKER).write_text(tracker)
    return folder


def latest(folder: Path, notes: list[str] | None = None, whole: bool = True) -> str | None:
    path = checkpoint_path(folder, None, whole=whole, notes=notes)
    return path and path.name


def in_one_line(refused: pytest.ExceptionInfo, *words: str) -> bool:
    line = str(refused.value)
    return "\n" not in line and all(word in line for word in words)


def test_the_tracker_names_the_latest(tmp_path):
    notes: list[str] = []
    assert latest(folder_of(tmp_path / "c", {2: A, 4: A}, "4"), notes) == "iter_0000004" and not notes


@pytest.mark.parametrize("run", [A, None])
def test_a_kill_before_the_tracker_was_updated_loses_nothing(tmp_path, run):
    notes: list[str] = []
    assert latest(folder_of(tmp_path / "c", {2: run, 4: run, 6: run}, "4"), notes) == "iter_0000006"
    (note,) = notes
    assert "says 4" in note and "--ckpt-step 4 goes back" in note
    assert latest(folder_of(tmp_path / "first", {2: run}), notes) == "iter_0000002"
    assert "is missing, as after a kill" in notes[1]


@pytest.mark.parametrize("run", [A, None])
def test_a_tracker_that_names_an_older_step_is_refused_with_both_remedies(tmp_path, run):
    folder, notes = folder_of(tmp_path, {number: run for number in (2, 4, 6, 8)}, "4"), []
    with pytest.raises(Refusal) as refused:
        latest(folder, notes)
    assert in_one_line(refused, f"{folder / TRACKER} says 4", "write 8 to it", "go back with --ckpt-step 4")
    assert checkpoint_path(folder, 4).name == "iter_0000004"
    assert latest(folder, notes, whole=False) == "iter_0000008"  # as with --skip-damaged-checkpoints
    (folder / TRACKER).write_text("8")
    assert latest(folder) == "iter_0000008"


def test_newer_checkpoints_of_another_run_are_ignored(tmp_path):
    notes: list[str] = []
    assert latest(folder_of(tmp_path, {2: A, 4: A, 6: B, 8: A, 10: A}, "6"), notes) == "iter_0000006" and not notes


def test_a_copy_under_another_name_is_no_newer_checkpoint(tmp_path):
    folder = folder_of(tmp_path, {4: A, 6: A}, "4")
    (folder / "iter_0000006" / "common.pt").write_bytes((folder / "iter_0000004" / "common.pt").read_bytes())
    assert run_of(folder / "iter_0000006") is None and latest(folder) == "iter_0000004"


def test_without_a_tracker_no_run_starts_from_the_beginning(tmp_path):
    folder = folder_of(tmp_path / "c", {2: A, 4: A, 6: A})
    with pytest.raises(Refusal) as refused:
        latest(folder)
    assert in_one_line(refused, "up to iteration 6", f"no {TRACKER}", "write 6 to it", "--ckpt-step")
    assert checkpoint_path(folder, 6).name == "iter_0000006"
    (tmp_path / "torch" / "iter_0000003" / "mp_rank_00").mkdir(parents=True)  # one checkpoint in another format
    with pytest.raises(Refusal, match="--ckpt-step"):
        latest(tmp_path / "torch")
    assert latest(folder_of(tmp_path / "empty", {})) is None


@pytest.mark.parametrize(
    "text",
    ["../c/iter_0000004", "/tmp/c/iter_0000004", "..", "iter_0000004/", "", " \n", "four", "4.0", "-4", "\u0664",
     "iter_0000004", "4" * 5000, "x" * 300, "4\n5", "4\0"],
)  # fmt: skip
def test_a_tracker_that_names_no_checkpoint_of_its_folder(tmp_path, text):
    folder = folder_of(tmp_path / "c", {4: A}, text)
    with pytest.raises(Refusal) as refused:
        latest(folder)
    assert in_one_line(refused, str(folder / TRACKER), "--ckpt-step") and len(str(refused.value)) < 600


@pytest.mark.parametrize("text", ["5", "release", "999999999999999"])
def test_a_tracker_that_names_a_missing_checkpoint(tmp_path, text):
    with pytest.raises(Refusal, match="is missing or incomplete: choose another one with --ckpt-step"):
        latest(folder_of(tmp_path, {4: A}, text))


@pytest.mark.parametrize("name", ["../d/global_step7_universal", "/d", "..", "a/b"])
def test_deepspeeds_trackers_stay_in_their_folder(tmp_path, name):
    folder, outside = tmp_path / "c", tmp_path / "d" / "global_step7_universal" / "zero"
    folder.mkdir()
    outside.mkdir(parents=True)
    for tracker, load in (("latest_universal", universal_path), ("latest", _path)):
        (folder / tracker).write_text(name)
        with pytest.raises(Refusal) as refused:
            load(folder, None)
        assert in_one_line(refused, "not in its folder", "--ckpt-step")


def identity_of(result: Path | None, notes: list[str] | None = None, saves: bool = True, **flags) -> str:
    return identity(result, CheckpointConfig(**flags), [] if notes is None else notes, saves=saves)


def test_a_run_keeps_its_identity_and_a_new_one_gets_its_own(tmp_path):
    folder = str(folder_of(tmp_path, {2: A, 4: A}, "4"))
    result = checkpoint_path(tmp_path, None)
    assert identity_of(result, load=folder, save=folder) == A == identity_of(result, load=folder)
    assert identity_of(result, load=folder, save=str(tmp_path / "elsewhere")) == A
    new = {identity_of(None, save=str(tmp_path / "new")) for _ in range(3)}
    new |= {identity_of(result, load=folder, finetune=True), identity_of(result, load=folder, reset_iteration=True)}
    new.add(identity_of(result, pretrained_checkpoint=folder))
    assert len(new) == 6 and A not in new and all(len(run) == 32 for run in new)


def test_continuing_from_the_latest_checkpoint_gives_no_note(tmp_path):
    first, notes = folder_of(tmp_path / "a", {2: A, 4: A}, "4"), []
    second = folder_of(tmp_path / "b", {4: A}, "4")
    result = checkpoint_path(tmp_path / "a", None)
    for save in (first, second):
        assert identity_of(result, notes, load=str(first), save=str(save)) == A and not notes


def test_checkpoints_without_an_identity_get_one(tmp_path):
    folder = str(folder_of(tmp_path, {2: None}, "2"))
    assert len(identity_of(checkpoint_path(tmp_path, None), load=folder, save=folder)) == 32


def test_a_run_without_a_checkpoint_is_identified_by_its_copies_in_memory(tmp_path):
    (tmp_path / COPIES).write_text(A)
    flags = {"load": str(tmp_path), "save": str(tmp_path), "non_persistent_save_interval": 1}
    assert identity_of(None, **flags) == A
    (tmp_path / COPIES).write_text("../../../etc/0123456789012345678")
    with pytest.raises(Refusal, match="remove it"):
        identity_of(None, **flags)


@pytest.mark.parametrize(
    "flags, remedy",
    [
        ({}, "--load {d},"),
        ({"finetune": True, "load": "{d}"}, "--load {d} without --finetune,"),
        ({"finetune": True, "load": "{x}"}, "--load {d} without --finetune,"),
        ({"reset_iteration": True, "load": "{d}"}, "--load {d} without --reset-iteration,"),
        ({"load": "{x}"}, "--load {d},"),
        ({"load": "{x}", "ckpt_step": 2}, "--load {d} without --ckpt-step,"),
        ({"load": "{empty}"}, "--load {d},"),
        ({"pretrained_checkpoint": "{x}"}, "--load {d},"),
        ({"pretrained_checkpoint": "{x}", "load": "{empty}"}, "--load {d},"),
    ],
)
def test_a_folder_of_another_run_is_refused_with_remedies(tmp_path, flags, remedy):
    d = folder_of(tmp_path / "d", {2: A, 4: A}, "4")
    places = {"d": d, "x": folder_of(tmp_path / "x", {2: B, 6: B}, "6"), "empty": folder_of(tmp_path / "e", {})}
    flags = {name: value.format(**places) if isinstance(value, str) else value for name, value in flags.items()}
    folder = Path(flags.get("load") or flags.get("pretrained_checkpoint") or tmp_path / "none")
    if folder == places["empty"] and "pretrained_checkpoint" in flags:
        folder = places["x"]
    result = checkpoint_path(folder, flags.get("ckpt_step"))
    with pytest.raises(Refusal) as refused:
        identity_of(result, save=str(d), **flags)
    remedies = (remedy.format(**places), "another folder to --save", "remove this one")
    assert in_one_line(refused, f"--save {d} holds checkpoints up to iteration 4", *remedies)
    identity_of(result, save=str(d), saves=False, **flags)  # an evaluation does not save
    for path in d.iterdir():  # nothing was changed
        assert path.name in ("iter_0000002", "iter_0000004", TRACKER)


def test_a_run_with_two_folders_continues_only_in_the_one_with_the_later_step(tmp_path):
    first, second = folder_of(tmp_path / "first", {2: A, 4: A}, "4"), folder_of(tmp_path / "second", {4: A}, "4")
    result = checkpoint_path(first, None)
    assert identity_of(result, load=str(first), save=str(second)) == A
    folder_of(second, {6: A}, "6")
    with pytest.raises(Refusal, match=f"continue that run with --load {second},"):
        identity_of(result, load=str(first), save=str(second))


def test_going_back_with_ckpt_step_is_a_new_run_and_gives_one_note(tmp_path):
    d = folder_of(tmp_path, {2: A, 4: A, 6: A}, "6")
    (d / COPIES).write_text(A)
    notes: list[str] = []
    flags = {"load": str(d), "save": f"{d}/../{d.name}", "ckpt_step": 2}
    run = identity_of(checkpoint_path(d, 2), notes, **flags)
    (note,) = notes
    assert run != A and "up to iteration 6" in note and "overwritten" in note
    assert not (d / COPIES).exists()
    folder_of(d, {3: run}, "3")  # its first checkpoint, from which any restart continues
    assert latest(d) == "iter_0000003"
    assert identity_of(checkpoint_path(d, None), notes, load=str(d), save=str(d)) == run
    assert "belong to another run than this one from iteration 3" in notes[1]
    assert identity_of(checkpoint_path(d, 6), load=str(d), save=str(d), ckpt_step=6) == A  # no checkpoint is newer


def test_every_folder_is_continued_or_refused(tmp_path):
    """No start from 0 or from an older checkpoint is silent, for any tracker and any three checkpoints."""
    for number, runs in enumerate(itertools.product([A, B, None, "-"], repeat=3)):
        for tracker in (None, "2", "4", "6"):
            run_at = {2 * (place + 1): run for place, run in enumerate(runs) if run != "-"}
            d, notes = folder_of(tmp_path / f"{number}-{tracker}", run_at, tracker), []
            try:
                result = checkpoint_path(d, None, notes=notes)
                identity_of(result, notes, load=str(d), save=str(d))
            except Refusal:
                continue
            assert (result is None) == (not run_at)
            if run_at and int(result.name[5:]) < max(run_at):
                assert notes, (runs, tracker)
