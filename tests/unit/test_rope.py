# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: frequencies as in Hugging Face's transformers, angles exact for far tokens, one rounding."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import ModuleType

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.context_parallel.core.learned_positions import PositionRows
from megatron.context_parallel.layout.grid import Axis, abstract_grid
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.positions import rope as rope_module
from megatron.context_parallel.positions.rope import LayoutRotaryEmbedding, Rope, Yarn, rotary_angles
from megatron.decisions.division import length_unit
from megatron.training.arguments.parser import parse
from megatron.training.model import weights
from megatron.training.refusal import Refusal
from tests.distributed.flags import RUN, SHAPE
from tests.properties import examples

FAR = 2**22  # 4,194,304
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


# ---- frequencies


class InDouble(ModuleType):
    """torch with fp64 in place of fp32."""

    def __getattr__(self, name: str) -> object:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@pytest.fixture
def transformers_in_double(monkeypatch: pytest.MonkeyPatch):
    """(inverse frequencies in fp64, attention factor) as transformers computes them for Llama's rope_parameters."""
    from transformers import LlamaConfig, modeling_rope_utils

    monkeypatch.setattr(modeling_rope_utils, "torch", InDouble("torch"))

    def compute(head: int, **rope: object) -> tuple[Tensor, float]:
        config = LlamaConfig(hidden_size=4 * head, num_attention_heads=4, max_position_embeddings=2**20)
        config.rope_parameters = rope
        return modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))

    return compute


@pytest.mark.parametrize("head, base", [(128, 10000), (64, 500000), (96, 1000000), (16, 100)])
@pytest.mark.parametrize(
    "theirs, mine",
    [
        ({"rope_type": "linear", "factor": 2.5}, {"interpolation": 2.5}),
        ({"rope_type": "llama3", "factor": 32.0, **LLAMA3}, {"llama3": 32.0}),
        (YARN, {"yarn": Yarn(16.0)}),
        (YARN | {"factor": 2.5, "original_max_position_embeddings": 100}, {"yarn": Yarn(2.5, 100)}),
        (YARN | {"truncate": False}, {"yarn": Yarn(16.0, whole_pairs=False)}),
        (YARN | {"beta_fast": 8.0, "beta_slow": 2.0}, {"yarn": Yarn(16.0, beta_fast=8, beta_slow=2)}),
        (YARN | {"mscale": 0.707, "mscale_all_dim": 0.5}, {"yarn": Yarn(16.0, mscale=0.707, mscale_all_dim=0.5)}),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, {"yarn": Yarn(16.0, mscale_all_dim=1)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_frequencies_are_those_of_transformers(transformers_in_double, head, base, theirs, mine, share) -> None:
    inv_freq, factor = transformers_in_double(head, rope_theta=float(base), partial_rotary_factor=share, **theirs)
    rope = Rope(int(head * share), base, **mine)
    assert inv_freq.dtype == rope.inverse_frequencies().dtype == torch.float64
    torch.testing.assert_close(rope.inverse_frequencies(), inv_freq, rtol=2e-14, atol=0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-15)


def test_the_attention_factor_is_the_papers() -> None:
    assert Yarn(1.0).attention_factor == 1 and Rope(64).attention_factor == 1
    assert Rope(64, yarn=Yarn(32.0)).attention_factor == pytest.approx(0.1 * math.log(32) + 1, rel=1e-15)


def test_frequencies_and_factor_are_those_of_megatron_core() -> None:
    """megatron-core computes them in fp32, on a GPU or under use_cpu_initialization."""
    from megatron.core.models.common.embeddings import RotaryEmbedding, yarn_rotary_pos_embedding

    plain = RotaryEmbedding(64, 0.5, rotary_base=500000, rope_scaling=True, use_cpu_initialization=True)
    mine = Rope(32, 500000, llama3=8.0)
    torch.testing.assert_close(mine.inverse_frequencies().float(), plain.inv_freq, rtol=2e-6, atol=0)
    factor = yarn_rotary_pos_embedding._yarn_get_concentration_factor(16.0, 0.707, 0.3)
    assert Yarn(16.0, mscale=0.707, mscale_all_dim=0.3).attention_factor == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize("length, kept", [(1, 1), (5, 1), (2**50, 8)])
def test_yarn_of_a_tiny_or_huge_original_length(length: int, kept: int) -> None:
    """No pair turns within 1 or 5 tokens, all turn often within 2 ** 50: each pair is either kept or divided by 4."""
    plain, yarn = (Rope(16, 100, yarn=which).inverse_frequencies() for which in (None, Yarn(4.0, length)))
    assert torch.equal(yarn[:kept], plain[:kept]) and torch.equal(yarn[kept:], plain[kept:] / 4)


def test_yarn_with_few_pairs_and_a_low_base(transformers_in_double) -> None:
    """The last pair makes more than one turn within the original length, so the upper bound is beyond all pairs."""
    inv_freq, _ = transformers_in_double(16, rope_theta=10.0, **(YARN | {"original_max_position_embeddings": 1000}))
    mine = Rope(16, 10.0, yarn=Yarn(16.0, 1000)).inverse_frequencies()
    torch.testing.assert_close(mine, inv_freq, rtol=2e-14, atol=0)


# ---- angles


def exact_angle(position: int, frequency: mpmath.mpf) -> mpmath.mpf:
    return mpmath.fmod(position * frequency, 2 * mpmath.pi)


@pytest.mark.parametrize(
    "ring, ulysses, chunks, tensor",
    [pytest.param(1, 1, 1, 1, marks=pytest.mark.full), (4, 2, 1, 1), (2, 2, 4, 2)],
)
def test_angles_at_four_million_are_exact_to_fp32_rounding(ring, ulysses, chunks, tensor) -> None:
    """Compared with mpmath at 50 digits near four and eight million, for a layout's rows and for FPDT's chunks."""
    grid = abstract_grid(ulysses=ulysses, ring=ring, tensor=tensor).at(ulysses=ulysses - 1, ring=ring // 2)
    layout = SequenceLayout(2 * FAR, grid, chunks=chunks, tensor_parts=tensor)
    rope = Rope(16, 10000, yarn=Yarn(8.0))
    embedding = LayoutRotaryEmbedding(rope, layout)
    far = (layout.positions >= FAR - 2).nonzero()[:6].flatten().tolist() + [-1]
    result = [(int(layout.positions[row]), embedding.angles()[row, 0, 0]) for row in far]
    spans = layout.local_chunk_spans(chunks - 1)
    positions = [position for start, stop in spans for position in (start, stop - 1)]
    ends = embedding.of_spans(tuple((position, position + 1) for position in positions))
    result += [(position, ends[row, 0, 0]) for row, position in enumerate(positions)]
    assert max(position for position, _ in result) >= FAR
    with mpmath.workdps(50):
        base, kept = mpmath.mpf(10000), rope.inverse_frequencies() / Rope(16, 10000).inverse_frequencies()
        for position, angles in result:
            assert angles.dtype == torch.float32 and angles.shape == (8,)
            for pair, angle in enumerate(angles.tolist()):
                frequency = base ** (-mpmath.mpf(pair) / 8)
                share = (float(kept[pair]) * 8 - 1) / 7  # share of the unchanged frequency
                frequency *= share + (1 - share) / mpmath.mpf(8)
                error = mpmath.fmod(angle - exact_angle(position, frequency) + 3 * mpmath.pi, 2 * mpmath.pi) - mpmath.pi
                # Half a unit in the last place of an fp32 below 8, and 2e-8 for fp64 frequencies at eight million.
                assert abs(error) < 2.0**-22 + 2e-8, (position, pair, error)


def test_angles_restart_with_documents_of_each_sample() -> None:
    """Angles of one batch are not reused for the next."""
    layout = SequenceLayout(16, abstract_grid(ring=2).at(ring=1))  # 4 to 11
    inv_freq = Rope(8).inverse_frequencies()
    plain, restarting = (LayoutRotaryEmbedding(Rope(8), layout, restarts=restarts) for restarts in (False, True))
    whole = rotary_angles(layout.positions, inv_freq)[:, None, None]
    documents = [(6, 16), (4, 9, 16)]
    assert torch.equal(plain.angles(documents), whole) and plain.angles() is plain.angles(documents)
    assert torch.equal(restarting.angles(), whole)
    at = [[4, 5, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 0, 1, 2]]
    wanted = rotary_angles(torch.tensor(at).t(), inv_freq)[:, :, None]
    assert torch.equal(restarting.angles(documents), wanted)
    assert torch.equal(restarting.angles(documents[1:]), wanted[:, 1:])
    assert torch.equal(restarting.angles(documents[:1] * 2), wanted[:, :1])
    assert torch.equal(restarting.of_spans(((5, 8),), documents[0]), wanted[1:4, :1])
    assert torch.equal(plain.of_spans(((5, 8),), documents[0]), whole[1:4])


def test_angles_follow_documents_distributed_over_a_ring() -> None:
    layout = SequenceLayout(32, abstract_grid(ring=2).at(ring=1), "documents")
    embedding = LayoutRotaryEmbedding(Rope(8), layout)
    for ends in ((3, 20, 32), (16, 24, 32)):
        wanted = rotary_angles(layout.of_documents(ends).positions, Rope(8).inverse_frequencies())
        assert torch.equal(embedding.angles([ends])[:, 0, 0], wanted)


def test_angles_of_positions_of_any_shape() -> None:
    inv_freq = Rope(8).inverse_frequencies()
    positions = torch.randint(2**23, (3, 5))
    angles = rotary_angles(positions, inv_freq)
    assert angles.shape == (3, 5, 4)
    assert torch.equal(angles[1], rotary_angles(positions[1], inv_freq))


# ---- rotation


def rotated_exactly(x: Tensor, angles: Tensor, rope: Rope) -> Tensor:
    """x [s, b, heads, d] rotated in fp64 by complex multiplication."""
    half = rope.dim // 2
    first = range(0, rope.dim, 2) if rope.interleaved else range(half)
    second = range(1, rope.dim, 2) if rope.interleaved else range(half, rope.dim)
    z = torch.complex(x[..., list(first)].double(), x[..., list(second)].double())
    z = z * torch.polar(torch.full_like(angles.double(), rope.attention_factor), angles.double())
    out = x.double().clone()
    out[..., list(first)], out[..., list(second)] = z.real, z.imag
    return out


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("rope", [Rope(8), Rope(6, interleaved=True), Rope(4, yarn=Yarn(40.0))], ids=str)
@pytest.mark.parametrize("piece", [2 * 2 * 3 * 8, 1])
def test_rotation_and_its_gradient(monkeypatch: pytest.MonkeyPatch, rope: Rope, per_sample: bool, piece: int) -> None:
    """x is a view of a larger tensor; its five rows are rotated in pieces of at most two, or one by one."""
    monkeypatch.setitem(rope_module.PIECE, "cpu", piece)
    pairs, rows = rope_module._pairs, set()
    monkeypatch.setattr(rope_module, "_pairs", lambda x, rope: rows.add(len(x)) or pairs(x, rope))
    torch.manual_seed(0)
    whole = torch.randn(5, 2, 3, 20, dtype=torch.float64, requires_grad=True)
    x = whole[..., 7:15]
    positions = torch.randint(FAR, (5, 2 if per_sample else 1))
    angles = rotary_angles(positions, rope.inverse_frequencies())[:, :, None]
    out = rope.rotate(x, angles)
    assert max(rows) == max(piece // x[0].numel(), 1)
    wanted = rotated_exactly(x, angles, rope)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-6)  # sine and cosine of fp32 angles are fp32
    assert torch.equal(out[..., rope.dim :], x[..., rope.dim :])
    grad = torch.randn(8, 3, 2, 5, dtype=torch.float64).permute(3, 2, 1, 0)
    (mine,) = torch.autograd.grad(out, whole, grad)
    (exact,) = torch.autograd.grad(wanted, whole, grad)
    torch.testing.assert_close(mine, exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Errors are at most half a unit in the last place; megatron-core, which rounds sine and cosine too, has more."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    torch.manual_seed(0)
    rope = Rope(64)
    x = torch.randn(256, 1, 4, 64).to(dtype)
    angles = rotary_angles(torch.arange(FAR, FAR + 256), rope.inverse_frequencies())[:, None, None]
    exact = rotated_exactly(x, angles, rope)
    unit = torch.finfo(dtype).eps * exact.abs().clamp(min=1e-3)

    def worst(out: Tensor) -> float:
        assert out.dtype == dtype
        return float(((out.double() - exact).abs() / unit).max())

    assert worst(rope.rotate(x, angles)) < 0.51
    assert worst(_apply_rotary_pos_emb_bshd(x, torch.cat((angles, angles), -1))) > 2


def test_scores_depend_on_the_distance_alone() -> None:
    """Scores of fp32 queries and keys at position four million; angles multiplied in fp32 would be wrong."""
    torch.manual_seed(0)
    rope = Rope(64)
    q, k = (torch.randn(8, 1, 1, 64) for _ in range(2))
    near, far = torch.arange(8), torch.arange(FAR, FAR + 8)
    inv_freq = rope.inverse_frequencies()

    def scores(angles: Tensor) -> Tensor:
        angles = angles[:, None, None]
        return torch.einsum("sbhd,tbhd->st", rope.rotate(q, angles), rope.rotate(k, angles))

    wanted = scores(rotary_angles(near, inv_freq))
    torch.testing.assert_close(scores(rotary_angles(far, inv_freq)), wanted, rtol=0, atol=5e-5)
    assert (scores(torch.outer(far.float(), inv_freq.float())) - wanted).abs().max() > 0.5


def test_model_settings_become_a_rope() -> None:
    from megatron.training.arguments.parser import parse
    from megatron.training.model.build import rope

    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    shape += "--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --vocab-size 9 --attention-dropout 0 "
    shape += "--rotary-base 500"

    def rope_of(flags: str) -> Rope | None:
        return rope(parse(f"{shape} {flags}".split(), world_size=1).model)

    assert rope_of("") is rope_of("--position-embedding-type none") is None
    plain = "--position-embedding-type rope"
    assert rope_of(f"{plain} --rotary-percent 0.5 --rotary-interleaved") == Rope(8, 500, interleaved=True)
    assert rope_of(f"{plain} --rotary-seq-len-interpolation-factor 4") == Rope(16, 500, interpolation=4)
    assert rope_of(f"{plain} --use-rope-scaling --rope-scaling-factor 32") == Rope(16, 500, llama3=32)
    yarn = "--position-embedding-type yarn --yarn-rotary-scaling-factor 8"
    assert rope_of(yarn) == Rope(16, 500, yarn=Yarn(8.0, 4096, 32, 1, 1, 0, True))
    assert rope_of(
        f"{yarn} --yarn-original-max-position-embeddings 2048 --yarn-beta-fast 16 --yarn-beta-slow 2 --yarn-mscale 0.7 "
        "--yarn-mscale-all-dim 0.5 --no-yarn-correction-range-round-to-int"
    ) == Rope(16, 500, yarn=Yarn(8.0, 2048, 16, 2, 0.7, 0.5, False))


# A partitioned table: every row is on one rank with its value of the complete table; each rank holds its share.


PARTITION = "--partition-position-embedding --hidden-dropout 0 --attention-dropout 0"
cases = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans())


@examples(150)
@given(cases, st.integers(1, 4), st.integers(0, 40), st.data())
def test_every_position_has_one_row_on_a_rank_that_embeds_its_token(case, times, spare, data):
    ulysses, ring, tensor, sequence_parallel, fpdt = case
    parts = tensor if sequence_parallel else 1
    length = length_unit(ulysses, ring, "zigzag", parts) * times
    chunks = data.draw(st.integers(1, length // (ulysses * ring * parts))) if fpdt else 1
    whole = SequenceLayout(
        length,
        abstract_grid(ulysses=ulysses, ring=ring, tensor=tensor),
        chunks=chunks,
        tensor_parts=parts if fpdt else 1,
    )
    held = []
    for u, r, t in ((u, r, t) for u in range(ulysses) for r in range(ring) for t in range(tensor)):
        layout = replace(whole, grid=whole.grid.at(ulysses=u, ring=r, tensor=t))
        rows = PositionRows(layout, length + spare, 3, sequence_parallel=sequence_parallel)
        positions = [position for start, stop in rows.weight.spans for position in range(start, stop)]
        assert rows.weight.shape == (len(positions), 3)
        # the tokens that this TP rank embeds, as core's scatter distributes them
        mine = layout.positions.chunk(parts)[t if sequence_parallel else 0].tolist()
        assert positions[: rows.tokens] == mine
        assert rows().shape == (len(mine), 3)
        torch.testing.assert_close(rows((1, len(mine) - 1)), rows()[1:-1], rtol=0, atol=0, equal_nan=True)
        if sequence_parallel or t == 0:
            held += positions
    assert sorted(held) == list(range(length + spare))


def config_of(flags: str, world_size: int = 1):
    return parse(f"{SHAPE} {RUN} {flags}".split(), None, world_size)


@pytest.mark.parametrize("flags", ["", "--init-method-xavier-uniform"])
def test_rows_are_those_of_the_whole_table(flags, monkeypatch):
    config = config_of(f"{PARTITION} {flags}")
    drawn = []
    draw = weights.draw

    def watched(*args, **kwargs):
        values = draw(*args, **kwargs)
        drawn.append(values.size(0))
        return values

    monkeypatch.setattr(weights, "draw", watched)
    rows = partial(weights.draw_rows, name=weights.POSITIONS, shape=(1000, 6), core=None, config=config, at_once=100)
    whole = torch.full((1000, 6), torch.nan)
    rows(whole, [(0, 1000)])
    assert len(drawn) == 10 and whole.isfinite().all() and whole.unique().numel() > 5900
    std = 0.02 if not flags else (2 / 1006) ** 0.5
    assert float(whole.std()) == pytest.approx(std, rel=0.03)
    spans = [(950, 1000), (0, 7), (7, 130), (99, 101), (300, 300), (250, 501)]
    mine = torch.full((50 + 7 + 123 + 2 + 251, 6), torch.nan)
    rows(mine, spans)
    assert torch.equal(mine, torch.cat([whole[start:stop] for start, stop in spans]))
    assert max(drawn) == 100  # never all rows at once


def test_a_short_table_is_drawn_at_once():
    """Tables of up to 4,096 rows are drawn like other parameters, so their values are those of earlier versions."""
    config, shape = config_of(PARTITION), (weights.ROWS_DRAWN, 2)
    part = torch.empty(shape)
    weights.draw_rows(part, [(0, shape[0])], weights.POSITIONS, shape, None, config)
    assert torch.equal(part, weights.draw(weights.POSITIONS, shape, None, config, torch.device("cpu")))


@pytest.mark.parametrize(
    "flags, world, message",
    [
        ("--position-embedding-type rope --ulysses-parallel-size 2", 2, "--position-embedding-type learned_absolute"),
        ("--position-embedding-type none --ulysses-parallel-size 2", 2, "--position-embedding-type none"),
        ("--fp16 --ulysses-parallel-size 2", 2, "--bf16"),
        ("--reset-position-ids --ring-parallel-size 2", 2, "--reset-position-ids"),
        (
            "--reset-attention-mask --context-parallel-balance documents --ring-parallel-size 2 --micro-batch-size 1",
            2,
            "use --context-parallel-balance zigzag",
        ),
    ],
)
def test_refused_by_name(flags, world, message):
    with pytest.raises(Refusal) as caught:
        config_of(f"{PARTITION} {flags}", world)
    assert "--partition-position-embedding" in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    "flags, world, on",
    [
        ("", 2, False),
        ("--tensor-model-parallel-size 2", 2, False),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2, True),
        ("--ring-parallel-size 2", 2, True),
    ],
)
def test_a_note_says_that_there_is_nothing_to_split(flags, world, on):
    config = config_of(f"{PARTITION} {flags}", world)
    assert config.parallel.partition_position_embedding == on
    assert on != any("--partition-position-embedding" in note for note in config.notes)


def test_zigzag_stays_the_default_for_packed_documents():
    """With the balance "documents" positions would change ranks in each batch, so zigzag stays the default."""
    flags = "--attention-mask document --ring-parallel-size 2 --micro-batch-size 1"
    assert config_of(f"{PARTITION} {flags}", 2).parallel.context_parallel_balance == "zigzag"
    whole = f"--hidden-dropout 0 --attention-dropout 0 {flags}"
    assert config_of(whole, 2).parallel.context_parallel_balance == "documents"


GRIDS = [
    "--ulysses-parallel-size 8",
    "--ring-parallel-size 8",
    "--tensor-model-parallel-size 2 --sequence-parallel --ulysses-parallel-size 2 --ring-parallel-size 2",
    "--ulysses-parallel-size 8 --zero-stage 1",
]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_copy_of_the_first_data_parallel_rank_is_saved(sequence_parallel):
    grid = replace(abstract_grid(ring=2, tensor=2).at(ring=1, tensor=1), data=Axis(3, 2))
    layout = SequenceLayout(16, grid, tensor_parts=2 if sequence_parallel else 1)
    rows = PositionRows(layout, 16, 3, sequence_parallel=sequence_parallel)
    assert rows.replica == (0, 0 if sequence_parallel else 1, 2)
