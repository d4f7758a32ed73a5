# SPDX-License-Identifier: Apache-2.0
"""tools/convert_checkpoint.py: weights of Megatron-LM's older format and of DeepSpeed's universal one are kept."""

import tarfile
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.distributed import megatron_lm
from tests.distributed.flags import P2, T2, V2
from tests.distributed.test_megatron_checkpoints import FLAGS
from tests.distributed.training_runs import make_job, refusal_of, resume, train_job
from tools import convert_checkpoint, convert_hf

BEFORE_CORE = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
MHA = FLAGS.replace("--group-query-attention --num-query-groups 2 ", "")


class Foreign:
    """A class of a program that is not installed."""


def torch_format(flags, folder, llama=True, engine=False):
    """Write as Megatron-LM with ``--ckpt-format torch``, a file per rank. Returns the next loss on batch 0."""
    run = megatron_lm.build(flags, llama, engine=engine)
    megatron_lm.train(run, 2)
    grid = run.job.runtime.grid
    models = megatron_lm.unwrapped(run)
    keys = ["model"] if len(models) == 1 else [f"model{index}" for index in range(len(models))]
    name = f"mp_rank_{grid.tensor.rank:02d}" + (f"_{grid.pipeline.rank:03d}" if grid.pipeline.size > 1 else "")
    if grid.data.rank == 0:
        path = Path(folder) / "iter_0000002" / name
        path.mkdir(parents=True)
        state = {key: model.state_dict_for_save_checkpoint() for key, model in zip(keys, models)}
        state |= {"args": run.args, "iteration": 2, "checkpoint_version": 3.0, "rng_state": [{"cuda": Foreign()}]}
        torch.save(state, path / "model_optim_rng.pt")
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text("2")
    run.args.consumed_train_samples = 0
    return megatron_lm.train(run, 1)[0]


def whole_model(flags, llama):
    """(run of one process after two steps, its weights by core's names, its next loss on batch 0)."""
    run = megatron_lm.build(flags, llama)
    megatron_lm.train(run, 2)
    weights = {name: value.detach().clone() for name, value in megatron_lm.unwrapped(run)[0].named_parameters()}
    run.args.consumed_train_samples = 0
    return run, weights, megatron_lm.train(run, 1)[0]


def before_core(flags, folder, llama, version):
    """The format before core: other, nested names, and another order of queries, keys and values."""
    run, weights, loss = whole_model(flags, llama)
    heads = run.args.num_attention_heads
    encoder, embeddings = {}, {}
    for name, value in weights.items():
        new = name.removeprefix("decoder.")
        for ours, theirs in BEFORE_CORE.items():
            new = new.replace(ours, theirs)
        if "query_key_value" in new:
            split = value.reshape(heads, 3, -1, *value.shape[1:])
            order = {0: (1, 0, 2), 1: (0, 2, 1)}[version]
            value = split.permute(*order, *range(3, split.dim())).reshape(value.shape)
        (encoder if name.startswith("decoder.") else embeddings)[new] = value
    embedding = {
        kind: {"weight": embeddings[f"embedding.{kind}.weight"]}
        for kind in ("word_embeddings", "position_embeddings")
        if f"embedding.{kind}.weight" in embeddings
    }
    model = {"language_model": {"embedding": embedding, "transformer": encoder}}
    old = vars(run.args).copy()
    old["layernorm_epsilon"] = old.pop("norm_epsilon")
    for name in (
        "normalization",
        "position_embedding_type",
        "num_query_groups",
        "group_query_attention",
        "kv_channels",
    ):
        old.pop(name)
    path = Path(folder) / "iter_0000002" / "mp_rank_00"
    path.mkdir(parents=True)
    state = {"args": Namespace(**old), "model": model, "checkpoint_version": version, "iteration": 2}
    torch.save(state, path / "model_optim_rng.pt")
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text("2")
    return loss


def universal(flags, folder, llama, piped, more=0):
    """The output of DeepSpeed's ds_to_universal.py for Megatron-DeepSpeed: a folder per weight.

    Returns the next loss on batch 0, or the losses of ``more`` further steps.
    """
    run = megatron_lm.build(flags, llama, distributed=False)
    megatron_lm.train(run, 2)
    parameters = dict(megatron_lm.unwrapped(run)[0].named_parameters())
    weights = {name: value.detach().clone() for name, value in parameters.items()}
    inner = run.optimizer.chained_optimizers[0].optimizer
    adam = {
        name: {moment: inner.state[value][moment].clone() for moment in ("exp_avg", "exp_avg_sq")}
        for name, value in parameters.items()
    }
    schedule, consumed = run.schedule.state_dict(), run.args.consumed_train_samples
    path = Path(folder) / "global_step2_universal"
    for name, value in weights.items():
        new = name
        for ours, theirs in BEFORE_CORE.items():
            new = new.replace(ours, theirs)
        if not piped:
            new = f"language_model.{new.replace('decoder.', 'encoder.')}"
        elif name.startswith("embedding."):
            tied = not run.args.untie_embeddings_and_output_weights
            new = name.replace("embedding.", "tied_modules.embed." if tied else "1.")
        elif name.startswith("decoder.layers."):
            _, _, layer, rest = new.split(".", 3)
            new = f"{int(layer) + 2}.{rest}"
        elif "final_layernorm" in name:
            new = f"6.{name.rpartition('.')[2]}"
        else:
            new = "7.lm_head.weight"
        at = path / "zero" / new
        at.mkdir(parents=True)
        torch.save({"param": value, "cat_dim": 0}, at / "fp32.pt")
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.save({"param": adam[name][moment]}, at / f"{moment}.pt")
        torch.save(torch.tensor(2.0), at / "step.pt")
    old = vars(run.args).copy()
    groups = old.pop("num_query_groups") if old.pop("group_query_attention") else old["num_attention_heads"]
    old |= {"num_key_value_heads": groups, "num_experts": [1], "rope_theta": old.pop("rotary_base")}
    old |= {"normalization": old["normalization"].lower(), "layernorm_epsilon": old.pop("norm_epsilon")}
    old |= {"use_rotary_position_embeddings": old.pop("position_embedding_type") == "rope"}
    old["consumed_train_samples"] = consumed
    states = {"args": Namespace(**old), "iteration": 2, "module": None, "lr_scheduler": schedule}
    torch.save(states, path / "mp_rank_00_model_states.pt")
    (Path(folder) / "latest_universal").write_text(path.name)
    if more:
        return megatron_lm.train(run, more)
    run.args.consumed_train_samples = 0
    return megatron_lm.train(run, 1)[0]


FORMS = [
    (torch_format, 4, f"{FLAGS} {T2} {P2}", (True, True)),
    (before_core, 1, MHA, (False, 0)),
    (universal, 1, FLAGS, (True, True)),
    pytest.param(torch_format, 2, f"{FLAGS} {T2}", (False, False), marks=pytest.mark.full),
    pytest.param(torch_format, 2, f"{FLAGS} {P2} {V2} --micro-batch-size 1", (False, True), marks=pytest.mark.full),
    pytest.param(before_core, 1, MHA, (False, 1), marks=pytest.mark.full),
    pytest.param(universal, 1, FLAGS, (False, True), marks=pytest.mark.full),
    pytest.param(universal, 1, MHA, (False, False), marks=pytest.mark.full),
]


@pytest.mark.parametrize("write, world, flags, how", FORMS)
@pytest.mark.usual(0, 1)
def test_converted_weights_compute_what_they_did(pool, tmp_path, capsys, write, world, flags, how):
    old, new = tmp_path / "old", tmp_path / "new"
    theirs = pool.run(write, world, flags, str(old), *how, timeout=120)[0]
    assert convert_checkpoint.main(["--from", str(old), "--to", str(new)]) == 0, capsys.readouterr().err
    assert "--num-layers 4 --hidden-size 32" in capsys.readouterr().out
    model_flags = MHA if flags.startswith(MHA) else FLAGS
    flags = f"{model_flags} --ring-parallel-size 2 --finetune"
    first, (ours,) = pool.run(resume, 2, flags, str(new), 1, how[0])[0]
    assert first == 0
    assert ours == pytest.approx(theirs, rel=1e-5)
    if write is universal and how == (True, True):
        assert there_and_back(new, tmp_path) == 4 * 6 + 3  # every weight, bit for bit
    with_optimizer = pool.run(refusal_of, 1, f"{model_flags} --load {new}", how[0])[0]
    assert "no optimizer state: pass --finetune" in with_optimizer


def flip(path):
    """Flip a bit in the data of the largest record, near the end of the file."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda one: one.file_size)
    data[record.header_offset + 200 + record.file_size // 2] ^= 1 << 6
    path.write_bytes(data)


@pytest.mark.parametrize("write, how", [(before_core, (False, 0)), (universal, (True, True))])
def test_a_flipped_bit_is_found_by_the_sums_that_torch_writes(pool, tmp_path, capsys, write, how):
    old = tmp_path / "old"
    pool.run(write, 1, MHA if write is before_core else FLAGS, str(old), *how, timeout=120)
    file = next(old.rglob("model_optim_rng.pt" if write is before_core else "fp32.pt"))
    flip(file)
    assert convert_checkpoint.main(["--from", str(old), "--to", str(tmp_path / "new")]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and f"{file} is not what was written (the CRC-32 of its record " in line
    if write is universal:
        refused = pool.run(refusal_of, 1, f"{FLAGS} --universal-checkpoint --load {old}")[0]
        assert f"{file} is not what was written" in refused
    flip(file)
    assert convert_checkpoint.main(["--from", str(old), "--to", str(tmp_path / "new")]) == 0
    assert "not checked" not in capsys.readouterr().out
    new = tmp_path / "new" / "release"
    (new / "checksums.json").unlink()  # without the list the checkpoint looks like Megatron-LM's
    data = bytearray((new / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1 << 6
    (new / "__0_0.distcp").write_bytes(data)
    flags = f"{MHA if write is before_core else FLAGS} --finetune --load {tmp_path / 'new'}"
    (line,) = pool.run(refusal_of, 1, flags, how[0])
    assert f"{new}/__0_0.distcp is not what was written (the CRC-32 of its record" in line


def test_one_note_says_that_files_of_a_format_without_sums_are_unchecked(pool, tmp_path, capsys):
    pool.run(before_core, 1, MHA, str(tmp_path / "old"), False, 0, timeout=120)
    (file,) = tmp_path.rglob("model_optim_rng.pt")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.load(file, weights_only=False), file)
    finally:
        torch.serialization.set_crc32_options(True)
    assert convert_checkpoint.main(["--from", str(tmp_path / "old"), "--to", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.count(f"not checked: {tmp_path}/old/iter_0000002 has no checksums\n") == 1


def go_on(flags, folder, llama):
    job = make_job(f"{flags} --load {folder} --universal-checkpoint", llama)
    return job.progress.iteration, job.progress.consumed_train_samples, train_job(job, 3)[0]


@pytest.mark.parametrize(
    "llama, piped, world, grid",
    [
        (True, True, 4, f"{T2} {P2} --zero-stage 1"),
        (False, False, 2, "--zero-stage 3 --ring-parallel-size 2"),
        pytest.param(True, False, 1, "", marks=pytest.mark.full),
    ],
)
@pytest.mark.usual(0)
def test_a_universal_checkpoint_continues_without_conversion(pool, tmp_path, llama, piped, world, grid):
    """Weights, Adam's moments, schedule and data position are loaded, so losses continue those of the writer."""
    theirs = pool.run(universal, 1, FLAGS, str(tmp_path), llama, piped, 3, timeout=120)[0]
    first, consumed, losses = pool.run(go_on, world, f"{FLAGS} {grid}", str(tmp_path), llama, timeout=120)[0]
    assert (first, consumed) == (2, 8)
    assert losses == pytest.approx(theirs, rel=1e-5)


def there_and_back(folder, scratch):
    """Convert from Megatron-LM's form to Hugging Face's and back; returns the number of equal weights."""
    from transformers import LlamaConfig

    from megatron.training.checkpoint.megatron_lm.checked import examine
    from megatron.training.checkpoint.megatron_lm.stored_tensors import StoredTensors

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=32, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(scratch / "config")
    hf, back = scratch / "hf", scratch / "back"
    assert convert_hf.main(["--from", str(folder), "--to-hf", str(hf), "--hf-files", str(scratch / "config")]) == 0
    assert convert_hf.main(["--from-hf", str(hf), "--to", str(back)]) == 0
    first, second = (StoredTensors(examine(path / "release")) for path in (folder, back))
    same = 0
    for key in first:
        shape = first.shape(key)
        tensors = [stored.read(key, (0,) * len(shape), shape) for stored in (first, second)]
        same += tensors[0].equal(tensors[1]) * (shape[0] if ".layers." in key else 1)
    return same


# Checkpoints of earlier versions continue with the same losses on any grid.


# Written by commit 0b3becd after 3 of 6 iterations on TP 2 with ZeRO 1:
#   torchrun --nproc-per-node 2 pretrain_llama.py FLAGS --tensor-model-parallel-size 2 --zero-stage 1 --exit-interval 3
OLD = Path(__file__).parent / "data" / "checkpoint_0b3becd.tgz"
OLD_FLAGS = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 16 --max-position-embeddings 16 --lr 1e-2 --lr-decay-style linear "
    "--train-iters 6 --vocab-size 31 --make-vocab-size-divisible-by 1"
)
LOSSES = [3.1767651587724686, 3.1325147300958633, 3.1376088932156563]  # of that commit, one process without a break


@pytest.mark.parametrize(
    "world, grid",
    [
        (1, ""),
        (2, "--ulysses-parallel-size 2 --zero-stage 3"),
        pytest.param(
            4,
            "--tensor-model-parallel-size 2 --sequence-parallel --ring-parallel-size 2 --fpdt --fpdt-chunk-size 8",
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.usual(0)
def test_a_checkpoint_of_november_2026_continues(pool, tmp_path, world, grid):
    with tarfile.open(OLD) as archive:
        archive.extractall(tmp_path, filter="data")
    for first, losses in pool.run(resume, world, f"{OLD_FLAGS} {grid}", str(tmp_path), 3):
        assert first == 3
        assert losses == pytest.approx(LOSSES, rel=1e-5)
