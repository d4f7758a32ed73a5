# SPDX-License-Identifier: Apache-2.0
"""On any grid, a run that resumes here from Megatron-LM's checkpoint, or there from ours, has the writer's losses."""

import shutil
import tarfile
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.distributed import megatron_lm
from tests.distributed.flags import P2, T2, V2
from tests.distributed.training_runs import make_job, refusal_of, take_steps, train_and_save, train_job

# The vocabulary has no padding, which Megatron-LM would count in its loss.
FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 48 --seq-length 32 --max-position-embeddings 32 --vocab-size 63 "
    "--make-vocab-size-divisible-by 1 --lr 1e-2 --attention-dropout 0 --hidden-dropout 0 --zero-stage 0"
)


def megatron_saves(flags, folder, kind, distributed, llama=True, engine=False, core_writer=False):
    """Two steps of Megatron-LM, its checkpoint, and its next three losses."""
    run = megatron_lm.build(flags, llama, distributed=distributed, engine=engine)
    megatron_lm.train(run, 2)
    megatron_lm.save(run, folder, 2, kind, core_writer=core_writer)
    return megatron_lm.train(run, 3)


def we_go_on(flags, folder, llama=True):
    job = make_job(f"{flags} --load {folder}", llama)
    return job.progress.iteration, job.progress.consumed_train_samples, train_job(job, 3)[0]


KINDS = {
    # processes, grid, form of the optimizer, whether the optimizer is distributed, whether the model is a Llama
    "alone, fully_reshardable": (1, "", "fully_reshardable", True, True),
    "TP 2, not distributed": (2, T2, None, False, True),
    "TP 2 x DP 2, dp_reshardable": (4, T2, "dp_reshardable", True, True),
    "TP 2 x PP 2, dp_reshardable": (4, f"{T2} {P2}", "dp_reshardable", True, True),
    "PP 2 interleaved, fully_reshardable": (2, f"{P2} {V2} --micro-batch-size 1", "fully_reshardable", True, True),
    "PP 2 interleaved, dp_reshardable": (2, f"{P2} {V2} --micro-batch-size 1", "dp_reshardable", True, True),
    "GPT, PP 2, dp_reshardable": (2, P2, "dp_reshardable", True, False),
    "GPT, TP 2 x PP 2, fully_reshardable": (4, f"{T2} {P2}", "fully_reshardable", True, False),
    "by core's writer": (1, "", "fully_reshardable", True, True),
    "Transformer Engine, TP 2 x PP 2, dp_reshardable": (4, f"{T2} {P2}", "dp_reshardable", True, True),
    "GPT, Transformer Engine, TP 2, fully_reshardable": (2, T2, "fully_reshardable", True, False),
}
GRIDS = {
    "one process": (1, "--zero-stage 0"),
    "ZeRO 1, R 2": (2, "--zero-stage 1 --ring-parallel-size 2"),
    "ZeRO 3, U 2": (2, "--zero-stage 3 --ulysses-parallel-size 2"),
    "TP 2, PP 2, ZeRO 1": (4, f"{T2} {P2} --zero-stage 1"),
    "TP 2, FPDT, ZeRO 2": (4, f"{T2} --sequence-parallel --fpdt --fpdt-chunk-size 16 --zero-stage 2"),
}
PAIRS = [
    ("alone, fully_reshardable", "TP 2, PP 2, ZeRO 1"),
    ("TP 2, not distributed", "ZeRO 1, R 2"),
    ("Transformer Engine, TP 2 x PP 2, dp_reshardable", "ZeRO 3, U 2"),
    ("GPT, PP 2, dp_reshardable", "one process"),
]


@pytest.fixture(scope="module")
def written(pool, shared, tmp_path_factory):
    """Megatron-LM's checkpoint after two steps, made once, and its next three losses."""

    def run(name):
        world, grid, *how = KINDS[name]
        folder = str(tmp_path_factory.mktemp("megatron"))
        kind, distributed, llama = how
        args = (f"{FLAGS} {grid}", folder, kind, distributed, llama, "Engine" in name, "writer" in name)
        return folder, pool.run(megatron_saves, world, *args, timeout=120)[0]

    return lambda name: shared(("megatron", name), lambda: run(name))


def every_pair():
    usual = [pytest.param(*pair) for pair in PAIRS]
    return usual + [
        pytest.param(kind, grid, marks=pytest.mark.full)
        for kind in KINDS
        for grid in GRIDS
        if (kind, grid) not in PAIRS
    ]


@pytest.mark.parametrize("kind, grid", every_pair())
@pytest.mark.usual(2, 3)
def test_a_checkpoint_of_megatron_lm_continues_here(pool, written, kind, grid):
    folder, theirs = written(kind)
    world, flags = GRIDS[grid]
    first, consumed, losses = pool.run(we_go_on, world, f"{FLAGS} {flags}", folder, KINDS[kind][-1], timeout=120)[0]
    assert (first, consumed) == (2, 8)
    assert losses == pytest.approx(theirs, rel=1e-5)


def megatron_goes_on(flags, folder, llama=True, engine=False):
    run = megatron_lm.build(flags, llama, engine=engine)
    first = megatron_lm.load(run, folder)
    return first, run.args.consumed_train_samples, megatron_lm.train(run, 3)


THEIR_GRIDS = [
    # our grid, (processes, grid) of Megatron-LM, whether a Llama, whether with Transformer Engine's layers
    ("ZeRO 3, U 2", (1, ""), True, True),
    ("one process", (4, f"{T2} {P2}"), False, False),
    pytest.param("one process", (4, f"{T2} {P2}"), False, True, marks=pytest.mark.full),
    pytest.param("ZeRO 1, R 2", (2, T2), True, False, marks=pytest.mark.full),
    pytest.param("TP 2, PP 2, ZeRO 1", (1, ""), False, True, marks=pytest.mark.full),
    pytest.param("TP 2, FPDT, ZeRO 2", (2, f"{P2} {V2} --micro-batch-size 1"), True, False, marks=pytest.mark.full),
]


@pytest.mark.parametrize("grid, there, llama, engine", THEIR_GRIDS)
@pytest.mark.usual(1)
def test_our_checkpoint_continues_in_megatron_lm(pool, tmp_path, grid, there, llama, engine):
    world, flags = GRIDS[grid]
    _, ours = pool.run(train_and_save, world, f"{FLAGS} {flags}", str(tmp_path), 2, 3, llama, timeout=120)[0]
    first, consumed, theirs = pool.run(
        megatron_goes_on, there[0], f"{FLAGS} {there[1]}", str(tmp_path), llama, engine, timeout=120
    )[0]
    assert (first, consumed) == (2, 8)
    assert theirs == pytest.approx(ours, rel=1e-5)


def rewritten(source, folder, *, change):
    """The checkpoint of ``source``, saved again by one process with tensors changed by ``change``.

    ``change``: (key, complete tensor) -> the list of objects to save.
    """
    import torch
    from megatron.core import dist_checkpointing

    from megatron.training.checkpoint.save_job import Save

    path, new = next(Path(source).glob("iter_*")), Path(folder) / "iter_0000002"
    make_job(FLAGS)  # process groups
    common = dist_checkpointing.load_common_state_dict(str(path))
    content = common.pop("content_metadata")
    tensors = {
        key: value
        for key, value in dist_checkpointing.load_plain_tensors(str(path)).items()
        if isinstance(value, torch.Tensor)
    }
    content = content | {"distrib_optim_sharding_type": "fully_sharded_model_space"} if change is flat else content
    parts = {key: change(key, tensor) for key, tensor in tensors.items()}
    state = {**common, "parts": parts, "content_metadata": content}
    save = Save(new, lambda: state, lambda: None)
    save.write()
    save.finish()


def flat(key, tensor):
    """An optimizer state as TP 2 x DP 2 saved it before core 0.15; weights as they are."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    if not key.startswith("optimizer.state."):
        return [ShardedTensor.from_rank_offsets(key, tensor)]
    key = key.replace(".param.", ".fp32_param.")
    parts = [4 if ".layers." in key else 1, *(1 for _ in tensor.shape[1:])]
    if tensor.dim() > 1 + (".layers." in key):  # a matrix: TP cuts its rows, or its columns
        dim = tensor.dim() - (1 if "linear_proj" in key or "linear_fc2" in key else 2)
        parts[dim] = 4 if "linear_fc1" in key else 2
    sides = [side for count, length in zip(parts, tensor.shape) for side in (count, length // count)]
    order = [*range(0, len(sides), 2), *range(1, len(sides), 2)]
    blocks = tensor.reshape(sides).permute(order).reshape(*parts, -1)
    first = blocks.shape[-1] // 3  # a data-parallel rank's part may end anywhere
    cuts = (0, first), (first, blocks.shape[-1])
    return [
        ShardedTensor(
            key,
            blocks[..., start:stop].contiguous(),
            tensor.dtype,
            (*blocks.shape[:-1], stop - start),
            tuple(blocks.shape),
            (*(0 for _ in parts), start),
            None,
        )
        for start, stop in cuts
    ]


def by_layer(key, tensor):
    """Names with layer numbers, as Megatron-LM writes them if layers may differ."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    if ".layers." not in key:
        return [ShardedTensor.from_rank_offsets(key, tensor)]
    return [
        ShardedTensor.from_rank_offsets(key.replace(".layers.", f".layers.{layer}."), rows.contiguous())
        for layer, rows in enumerate(tensor)
    ]


@pytest.mark.parametrize("change, grid", [(flat, "TP 2, PP 2, ZeRO 1"), (by_layer, "ZeRO 3, U 2")])
@pytest.mark.usual(1)
def test_older_forms_and_other_names_continue_too(pool, written, tmp_path, change, grid):
    folder, theirs = written("alone, fully_reshardable")
    pool.run(rewritten, 1, folder, str(tmp_path), change=change)
    world, flags = GRIDS[grid]
    first, _, losses = pool.run(we_go_on, world, f"{FLAGS} {flags}", str(tmp_path), timeout=120)[0]
    assert first == 2
    assert losses == pytest.approx(theirs, rel=1e-5)


def fp32_states(flags, folder, kind, distributed):
    """Main weights and Adam's states of a bf16 run of Megatron-LM's, after two steps, saved."""
    run = megatron_lm.build(flags, distributed=distributed)
    megatron_lm.train(run, 2)
    megatron_lm.save(run, folder, 2, kind)
    return states_of(megatron_lm.unwrapped(run)[0], run.optimizer, distributed)


def states_of(model, optimizer, distributed):
    """{canonical name: [main weight, first moment, second moment]} of one process, each flattened, in its dtype."""
    from megatron.training.model.weights import canonical_parameters

    part = optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer
    result = {}
    for name, parameter in canonical_parameters(model):
        if distributed:
            tensors = part._get_main_param_and_optimizer_states(parameter)
            three = [tensors[key] for key in ("param", "exp_avg", "exp_avg_sq")]
        else:
            main = getattr(parameter, "main_param", parameter)
            three = [main, *(part.optimizer.state[main][key] for key in ("exp_avg", "exp_avg_sq"))]
        result[name] = [one.detach().flatten().clone() for one in three]
    return result


def our_states(flags, folder):
    from megatron.training.checkpoint.checkpoint import unwrap

    job = make_job(f"{flags} --load {folder}")
    distributed = job.config.parallel.zero_stage == 1
    steps = {float(state["step"]) for state in job.optimizer.chained_optimizers[0].optimizer.state.values()}
    return (
        states_of(unwrap(job.model_chunks[0]), job.optimizer, distributed),
        steps,
        job.optimizer.param_groups[0]["lr"],
    )


@pytest.mark.parametrize(
    "kind, distributed, stage",
    [(None, False, 1), pytest.param("dp_reshardable", True, 0, marks=pytest.mark.full)],
)
def test_bf16_keeps_every_bit_of_main_weights_and_states(pool, tmp_path, kind, distributed, stage):
    theirs = pool.run(fp32_states, 1, f"{FLAGS} --bf16", str(tmp_path), kind, distributed)[0]
    ours, steps, rate = pool.run(our_states, 1, f"{FLAGS} --bf16 --zero-stage {stage}", str(tmp_path))[0]
    assert steps == {2.0} and 0 < rate < 1e-2
    assert theirs.keys() == ours.keys()
    for name, three in theirs.items():
        assert all(a.equal(b) for a, b in zip(three, ours[name])), name


def change_args(folder, **changes):
    """Save ``common.pt`` with other args."""
    import torch

    path = next(Path(folder).glob("iter_*")) / "common.pt"
    common = torch.load(path, weights_only=False)
    for name, value in changes.items():
        setattr(common["args"], name, value)
    torch.save(common, path)


def message(flags, folder, **changes):
    """The refusal of a run for a checkpoint with changed args; if it starts, its notes about padding."""
    from megatron.training.refusal import Refusal

    if changes:
        change_args(folder, **changes)
    try:
        job = make_job(f"{flags} --load {folder}")
    except Refusal as refusal:
        return str(refusal)
    return [note for note in job.config.notes if "rows that pad" in note]


def test_what_does_not_fit_is_refused_by_name(pool, written, tmp_path):
    folder = str(shutil.copytree(written("alone, fully_reshardable")[0], tmp_path / "copy"))

    def refused(flags="", **changes):
        return pool.run(message, 1, f"{FLAGS} --zero-stage 0 {flags}", folder, **changes)[0]

    text = refused("--num-layers 2 --rotary-base 5000")
    assert "another model" in text and "--num-layers 4 in the checkpoint, 2 in this run" in text
    assert "--rotary-base 10000" in text
    text = refused("--ffn-hidden-size 64 --finetune")
    assert "--ffn-hidden-size 48 in the checkpoint, 64 in this run" in text
    text = refused("--vocab-size 50")
    assert "vocabulary of 64 to 64 tokens (padded to 64), this run's tokenizer has 51" in text
    text = refused("--optimizer sgd")
    assert "--optimizer adam" in text
    text = refused("--train-iters 40")
    assert "--override-opt-param-scheduler" in text
    assert refused("--train-iters 40 --override-opt-param-scheduler") == []
    text = refused(num_experts=8, multi_latent_attention=True)
    assert "not supported: --num-experts (experts), --multi-latent-attention" in text
    text = refused(num_experts=None, multi_latent_attention=False, untie_embeddings_and_output_weights=False)
    assert "--untie-embeddings-and-output-weights False in the checkpoint, True in this run" in text
    text = refused("--finetune --make-vocab-size-divisible-by 16 --vocab-size 59", make_vocab_size_divisible_by=16)
    assert "--untie" in text
    changes = {"make_vocab_size_divisible_by": 16, "untie_embeddings_and_output_weights": True}
    (note,) = refused("--make-vocab-size-divisible-by 16 --vocab-size 59", **changes)
    assert "4 rows" in note


def test_an_unknown_order_in_buckets_is_refused(pool, written):
    folder, _ = written("GPT, PP 2, dp_reshardable")
    text = pool.run(refusal_with_other_orders, 1, f"{FLAGS} --zero-stage 0", folder)[0]
    assert "dp_reshardable" in text and "--dist-ckpt-optim-fully-reshardable" in text and "--no-load-optim" in text


def refusal_with_other_orders(flags, folder):
    from megatron.training.checkpoint.megatron_lm import source

    with patch.object(source, "ORDERS", tuple(order[1:] + order[:1] for order in source.ORDERS)):
        return refusal_of(f"{flags} --load {folder}", llama=False)


def without(folder, key):
    """Save the metadata again without the tensor ``key``."""
    import pickle

    path = next(Path(folder).glob("iter_*")) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    del metadata.state_dict_metadata[key]
    path.write_bytes(pickle.dumps(metadata))


def test_all_ranks_refuse_what_one_stage_lacks(pool, written, tmp_path):
    folder = str(shutil.copytree(written("alone, fully_reshardable")[0], tmp_path / "copy"))
    without(folder, "decoder.final_layernorm.weight")
    for text in pool.run(message, 2, f"{FLAGS} {P2}", folder):
        assert "has no decoder.final_layernorm.weight" in text
    source, _ = written("GPT, PP 2, dp_reshardable")
    (text,) = pool.run(message, 1, FLAGS, source)
    assert "--normalization LayerNorm in the checkpoint, RMSNorm in this run" in text


# Written by megatron-core 0.12.0 itself (tag core_v0.12.0 of NVIDIA/Megatron-LM, on PyTorch 2.13, four processes of
# gloo), in its default form: TP 2 x DP 2, fully_sharded_model_space, after two steps of four samples.
CORE_0_12 = Path(__file__).parent / "data" / "megatron_core_0.12.tgz"
ITS_LOSSES = [3.453139305114746, 3.46364426612854, 3.469318985939026]
ITS_FLAGS = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 16 --max-position-embeddings 16 --vocab-size 31 "
    "--make-vocab-size-divisible-by 1 --lr 1e-2"
)


def go_on_with_its_data(flags, folder):
    import torch

    job = make_job(f"{flags} --load {folder}")

    def batches():
        for step in range(2, 5):
            rows = torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(step))
            for part in rows.split(2):
                yield {"tokens": part[:, :-1], "labels": part[:, 1:], "loss_mask": torch.ones(2, 16)}

    return job.progress.iteration, [step.lm_loss for step in take_steps(job, 3, batches())]


@pytest.mark.parametrize("world, grid", [(1, "--zero-stage 0"), (4, f"{T2} {P2} --zero-stage 1")])
@pytest.mark.usual(0)
def test_a_checkpoint_of_core_0_12_continues(pool, tmp_path, world, grid):
    with tarfile.open(CORE_0_12) as archive:
        archive.extractall(tmp_path, filter="data")
    for first, losses in pool.run(go_on_with_its_data, world, f"{ITS_FLAGS} {grid}", str(tmp_path)):
        assert first == 2
        assert losses == pytest.approx(ITS_LOSSES, rel=1e-5)
