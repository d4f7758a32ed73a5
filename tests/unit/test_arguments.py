# SPDX-License-Identifier: Apache-2.0
"""Reading command lines: Megatron-LM's flags, precedence, hints, refusals."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.training.arguments.foreign import megatron_flags
from megatron.training.arguments.parser import build_parser, parse, spellings, supported_flags
from megatron.training.arguments.parser import settings as all_settings
from megatron.training.arguments.validate import complete
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config
from tests.properties import examples

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "megatron_flags_0.16.1.tsv"

# NVIDIA's published launch script for Llama-3 8B, without FP8.
LLAMA = """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights
--disable-bias-linear --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000
--lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4
--decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
--bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
--empty-unused-memory-level 1 --exit-duration-in-mins 235 --tensor-model-parallel-size 1 --context-parallel-size 1
--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data
--tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2 --split '99,1,0'
--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32
--eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6
--ckpt-format torch_dist --distributed-timeout-minutes 60 --save out --load out --tensorboard-dir board""".split()

# The published launch script for GPT-3 175B.
GPT = """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375
--train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0
--fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --data-path text_document --vocab-file gpt2-vocab.json
--merge-file gpt2-merges.txt --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --save out
--load out --eval-iters 10 --tensorboard-dir board""".split()


def refused(*argv: str) -> str:
    with pytest.raises(Refusal) as caught:
        parse(list(argv))
    message = str(caught.value)
    assert message and "\n" not in message
    return message


# ---- the tables


def test_every_flag_has_one_verdict():
    table, own = megatron_flags.rows(), supported_flags()
    assert len(own) == len(set(own))
    assert not set(own) & set(table)
    written = " ".join(text for groups in megatron_flags.GROUPS.values() for _, text in groups)
    assert sum(word.startswith("--") for word in written.split()) == len(table)  # none is repeated
    assert {row.values for row in table.values()} <= {"0", "1", "3", "+", "*"}
    assert {row.verdict for row in table.values()} == {"hint", "refused"}
    build_parser()  # argparse refuses a repeated flag


def test_every_setting_has_a_flag_and_a_help_line():
    for _, _, field in all_settings():
        assert field.metadata["help"] and not field.metadata["help"].endswith(".")
        assert spellings(field)[0].startswith("--")


@pytest.mark.skipif(not REFERENCE.exists(), reason="no reference list next to the repository")
def test_all_of_megatron_is_known():
    """Each of Megatron-LM's flags is supported, ignored or refused, with the same number of values and default."""
    table, own = megatron_flags.rows(), set(supported_flags())
    fields = {flag: field for _, _, field in all_settings() for flag in spellings(field)}
    differ = {"--exit-signal-handler", "--context-parallel-size", "--transformer-impl", "--distributed-backend"}
    differ |= {"--dataloader-type"}  # Megatron-LM replaces its None later
    differ |= {"--cp-comm-type"}  # without it the split is chosen automatically
    differ |= {"--model-parallel-size"}  # Megatron-LM refuses it as an older spelling
    differ |= {"--recompute-modules"}  # Megatron-LM sets core_attn elsewhere
    differ |= {"--iterations-to-skip"}  # Megatron-LM's default is an empty list
    differ |= {"--sft-tokenizer-prompt-format"}  # Megatron-LM's default is a format of its own, ours the tokenizer's
    differ |= {"--muon-fp32-matmul-prec"}  # without it, medium for 16-bit runs as there, and highest for fp32 runs
    differ |= {"--muon-tp-mode"}  # a matrix is the whole one by default, not the part of a TP rank
    seen = set()
    with REFERENCE.open() as lines:
        for flag, _, default, _, action, values, *_ in csv.reader(lines, delimiter="\t"):
            seen.add(flag)
            assert flag == "--help" or (flag in own) != (flag in table), flag
            if flag in table:
                assert table[flag].values == ("1" if values == "None" else values), flag
            elif flag in fields and flag not in differ and action == "_StoreAction":
                nargs = fields[flag].metadata.get("nargs")
                assert str(nargs) == values, flag
                several = nargs == "+" and default != "None"
                ours = fields[flag].default_factory() if several else fields[flag].default
                ours = ours[0] if several and not default.startswith("[") else ours
                assert str(ours) == default.strip("'") or float(default) == ours, flag
    assert len(seen) == 681


# What the parser of Megatron-LM, tag core_v0.19.0, has and that of core 0.16.1 has not: flag, values, default.
NEWER = Path(__file__).parent / "data" / "megatron_flags_0.19.tsv"


def test_all_of_newer_megatron_is_known():
    table, own = megatron_flags.rows(), set(supported_flags())
    differ = {"--step-batch-size-schedule"}  # in other versions it takes several values
    differ |= {"--mamba-training-ssm-states-dtype"}  # its None follows the model; states are in fp32 here
    with NEWER.open() as lines:
        known = [*csv.reader(lines, delimiter="\t")]
    assert len(known) == 193
    for flag, values, default in known:
        assert (flag in own) != (flag in table), flag
        if flag in table and flag not in differ:
            assert table[flag].values == values, flag
            if values == "1" and default != "None":
                assert table[flag].default == default.strip("'"), flag


def test_judgement_of_each_flag():
    """A value other than the default gives one note if the verdict is a hint, else a refusal with flag and reason."""
    for flag, row in megatron_flags.rows().items():
        values = {"0": [], "1": ["x"], "3": ["x"] * 3, "+": ["x"], "*": []}[row.values]
        if row.default == "same":
            assert megatron_flags.judge([(flag, values)]) == []
        elif row.verdict == "hint":
            (note,) = megatron_flags.judge([(flag, values)])
            assert flag in note and row.reason in note and "\n" not in note
        else:
            with pytest.raises(Refusal) as caught:
                megatron_flags.judge([(flag, values)])
            assert str(caught.value) == f"{flag}: {row.reason}"
        if row.default not in (None, "same"):
            assert megatron_flags.judge([(flag, [row.default])]) == []


# ---- reading


def test_flags_become_settings():
    config = parse(
        "--num-layers 2 --norm-epsilon 1e-6 --disable-bias-linear --no-load-rng --data-path 0.3 a 0.7 b --lr 1e-4 "
        "--rampup-batch-size 2 2 100 --hierarchical-context-parallel-sizes 2 4 --exit-signal-handler --swiglu".split()
    )
    assert config.model.num_layers == 2 and config.model.norm_epsilon == 1e-6 and config.model.swiglu
    assert not config.model.add_bias_linear and not config.checkpoint.load_rng and config.checkpoint.load_optim
    assert config.data.data_path == ["0.3", "a", "0.7", "b"] and config.data.rampup_batch_size == [2, 2, 100]
    assert config.parallel.hierarchical_context_parallel_sizes == [2, 4] and config.run.exit_signal_handler
    assert config.optimizer.lr == 1e-4 and config.optimizer.min_lr == 0.0


@pytest.mark.parametrize(
    ("argv", "section", "field", "value"),
    [
        ("--layernorm-epsilon 1e-3", "model", "norm_epsilon", 1e-3),
        ("--override-opt_param-scheduler", "optimizer", "override_opt_param_scheduler", True),
        ("--use-checkpoint-opt-param-scheduler", "optimizer", "use_checkpoint_opt_param_scheduler", True),
        ("--use-rotary-position-embeddings", "model", "position_embedding_type", "rope"),
        ("--loss-scale-window 500.5", "optimizer", "loss_scale_window", 500.5),
        ("--no-check-for-nan-in-loss-and-grad", "optimizer", "check_for_nan_in_loss_and_grad", False),
        ("--no-progress", "logging", "progress", False),
        ("--seed 1 --seed 2", "run", "seed", 2),
    ],
)
def test_spellings(argv: str, section: str, field: str, value: object):
    assert getattr(getattr(parse(argv.split()), section), field) == value


def test_without_flags_all_settings_are_defaults():
    assert parse([]) == Config()


def test_precedence():
    """Precedence: flags, the named model, the entry point's defaults, the dataclass's defaults."""
    defaults = {"model.rotary_base": 7, "model.num_layers": 5, "data.num_workers": 0, "optimizer.lr": 1.0}
    config = parse("--model llama3-8b --num-layers 4 --lr 2".split(), defaults)
    assert config.model.rotary_base == 500000 and config.model.num_layers == 4 and config.model.swiglu
    assert config.data.num_workers == 0 and config.optimizer.lr == 2.0
    given_default = parse("--model llama3-8b --rotary-base 10000 --norm-epsilon 1e-05 --num-query-groups 1".split())
    assert given_default.model.rotary_base == 10000 and given_default.model.num_query_groups == 1
    assert parse([], {"model.model": "llama2-7b"}).model.hidden_size == 4096
    assert parse(["--model", "gpt-2.7b"], {"model.model": "llama2-7b"}).model.hidden_size == 2560


def test_lists_are_not_shared_with_the_defaults():
    paths = ["a"]
    config = parse([], {"data.data_path": paths})
    config.data.data_path.append("b")
    assert paths == ["a"]


def test_entry_point_defaults_must_exist():
    with pytest.raises(KeyError, match="modl"):
        parse([], {"model.modl": 1})


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--num-layers two", ["--num-layers", "two"]),
        ("--num-layers", ["--num-layers", "expected one argument"]),
        ("--rampup-batch-size 1 2", ["--rampup-batch-size", "3"]),
        ("--lr nan", ["--lr", "nan"]),
        ("--ckpt-format safetensors", ["--ckpt-format safetensors", "torch_dist"]),
        ("--attention-kernel xformers", ["--attention-kernel xformers", "flash_attn"]),
        ("--model llama9", ["--model llama9", "llama3-8b"]),
        ("--tensor-parallel-size=2", ["--tensor-parallel-size", "--tensor-model-parallel-size"]),
        ("-np 4", ["-np"]),
        ("stray", ["stray"]),
        ("--swiglu yes", ["yes"]),
        ("--lazy-mpu-init 1 --moe-grouped-gemm --fp4-format e2m1", ["--lazy-mpu-init: ", "--fp4-format"]),
        ("--num-layers 2 --encoder-num-layers 3", ["--num-layers and --encoder-num-layers", "differ"]),
        ("--no-position-embedding", ["--no-position-embedding", "--position-embedding-type none"]),
    ],
)
def test_refusals(argv: str, words: list[str]):
    message = refused(*argv.split())
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "argv",
    [
        "--expert-model-parallel-size 1 --moe-router-topk 2 --moe-aux-loss-coeff 0 --cuda-graph-impl none",
        "--no-rl-use-sequence-packing --mtp-loss-scaling-factor 1e-1 --rl-default-top-k -1",
        "--exit-signal SIGTERM --recompute-modules core_attn --attention-backend auto",
    ],
)
def test_megatron_lms_defaults_are_accepted_without_a_note(argv: str):
    assert parse(argv.split()) == Config()


def test_hints_take_their_values_and_give_one_note_for_each_reason():
    config = parse(
        "--no-rope-fusion --num-layers 2 --attention-backend flash --no-masked-softmax-fusion --te-rng-tracker "
        "--timing-log-level 2 --cross-entropy-fusion-impl te --hidden-size 64 --no-rope-fusion".split()
    )
    assert config.model.num_layers == 2 and config.model.hidden_size == 64
    assert len(config.notes) == 4
    fused = next(note for note in config.notes if "--no-rope-fusion" in note)
    assert fused.count("--no-rope-fusion") == 1 and "--cross-entropy-fusion-impl" in fused


def test_no_position_embedding_gets_a_note_with_rope():
    config = parse("--no-position-embedding --position-embedding-type rope".split())
    assert any("--no-position-embedding" in note for note in config.notes)


def test_help(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0 and "--ring-parallel-size N" in text and "(default 1e-05)" in text
    assert "--moe-permute-fusion" not in text and "``" not in text


# ---- complete launch scripts


def test_llama_launch_script():
    config = parse(LLAMA, world_size=8)
    assert config.data.split == "99,1,0" and config.model.kv_channels == 128 and not config.parallel.sequence_parallel
    assert config.parallel.zero_stage == 1 and config.optimizer.decoupled_lr == 5e-4
    long = parse(
        [*LLAMA, "--seq-length", "131072", "--context-parallel-size", "8", "--global-batch-size", "4"], world_size=8
    )
    assert (long.parallel.ulysses_parallel_size, long.parallel.ring_parallel_size) == (8, 1)


def test_llama_fp8_launch_script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron.training.arguments.validate.transformer_engine_installed", lambda: True)
    fp8 = "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather".split()
    assert parse([*LLAMA, *fp8], world_size=8).model.transformer_impl == "transformer_engine"


def test_gpt_launch_script():
    config = parse(GPT)
    assert config.data.rampup_batch_size == [16, 16, 5859375] and config.notes == []
    ours = [*GPT, "--train-samples", "700000000", "--lr-decay-samples", "600000000"]
    drop = {"--train-iters": 2, "--lr-decay-iters": 2}
    while drop:
        flag, words = drop.popitem()
        at = ours.index(flag)
        del ours[at : at + words]
    assert parse(ours, world_size=1024).data.tokenizer_type == "GPT2BPETokenizer"


# ---- properties


FIELDS = {spelling: field for _, _, field in all_settings() for spelling in spellings(field)}
TABLE = megatron_flags.rows()
VALUES = st.one_of(
    st.integers(-2, 65).map(str),
    st.sampled_from(
        ["0.5", "-1", "1e-4", "inf", "x", "", "auto", "full", "selective", "uniform", "WSD", "1", "2", "4", "8"]
    ),
)


@st.composite
def options(draw: st.DrawFn) -> list[str]:
    """A supported flag, or an unsupported flag of Megatron-LM, with values that are mostly valid."""
    flag = draw(st.sampled_from([*TABLE] if draw(st.integers(0, 4)) == 0 else [*FIELDS]))
    field, row = FIELDS.get(flag), TABLE.get(flag)
    if field is not None and field.type == "bool" or row is not None and row.values == "0":
        return [flag]
    if field is not None and field.metadata.get("choices") and draw(st.integers(0, 3)):
        return [flag, str(draw(st.sampled_from(field.metadata["choices"])))]
    return [flag, *draw(st.lists(VALUES, min_size=1, max_size=3 if "rampup" in flag or "hier" in flag else 1))]


@examples(60)
@given(st.lists(st.one_of(options(), st.lists(st.text(max_size=6), max_size=2)), max_size=6))
def test_parse_raises_nothing_but_refusals(words: list[list[str]]):
    argv = [word for option in words for word in option if not word.startswith(("-h", "--h", "@"))]
    try:
        assert isinstance(parse(argv), Config)
    except Refusal as refusal:
        assert "\n" not in str(refusal)


@examples(100)
@given(st.lists(options(), max_size=4), st.sampled_from([1, 2, 4, 6, 8, 64]))
@example([["--dry-run"]], 2)  # the parser completes it for --world-size
def test_complete_raises_nothing_but_refusals_and_is_idempotent(words: list[list[str]], world_size: int):
    base = "--model llama3-8b --mock-data --train-iters 4 --lr 1e-3 --micro-batch-size 1 --seq-length 512".split()
    try:
        config = parse([*base, *(word for option in words for word in option)], world_size=world_size)
    except Refusal as refusal:
        assert "\n" not in str(refusal)
        return
    assert complete(config, world_size) == config
