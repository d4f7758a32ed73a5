# SPDX-License-Identifier: Apache-2.0
"""tools/check_script.py reports the command that a launch script would start, and starts and writes nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.training.arguments.foreign import megatron_flags
from megatron.training.arguments.parser import parse, supported_flags
from megatron.training.refusal import Refusal
from tests.pairs import by_pairs
from tests.recipes import recipes, refused
from tests.starts import make, start
from tools import check_script
from tools.launch_command import grid, launch, processes, slurm
from tools.launch_redirect import elsewhere
from tools.launch_script import record

ROOT = Path(__file__).parents[2]

SCRIPTS = Path(__file__).parent / "data" / "scripts"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a copy of the scripts."""
    shutil.copytree(SCRIPTS, tmp_path / "folder")
    monkeypatch.chdir(tmp_path / "folder")
    return tmp_path / "folder"


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    before = {path: path.read_bytes() for path in Path.cwd().rglob("*") if path.is_file()}
    code = check_script.main(list(arguments))
    assert {path: path.read_bytes() for path in Path.cwd().rglob("*") if path.is_file()} == before
    return code, "".join(capsys.readouterr())


# ---- three scripts


def test_a_script_that_is_accepted(folder: Path, capsys: pytest.CaptureFixture[str]):
    code, text = check(capsys, "llama_torchrun.sh", "16384")
    assert code == 0 and "(8 processes)" in text and "\naccepted, with these notes:\n" in text
    assert "--use-flash-attn (the attention kernel is chosen with --attention-kernel)" in text
    start = text[text.index("start it with") :]
    assert "torch.distributed.run --nproc-per-node 8 --nnodes 1 pretrain_gpt.py --num-layers 32" in start
    assert "--seq-length 16384 --max-position-embeddings 16384" in start and "--global-batch-size 128" in start
    assert "not run: nvidia-smi, rm\n" in text


def test_a_script_that_writes_its_configuration(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "run.log").write_text("of yesterday's run")
    code, text = check(capsys, "gpt_deepspeed.sh")
    assert code == 2 and "deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py ... (16 processes)" in text
    assert "refused, for 2 reasons" in text and "did you mean --lr-warmup-iters?" in text
    assert "without --cpu-optimizer, --lr-warmup-iter; with --lr-warmup-iters 100):\n" in text
    accepted = text[text.index("this would be accepted") :].splitlines()[1]
    assert accepted.startswith("  deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py ") and "--bf16" in accepted
    assert "not run: wget (2 times)" in text


def test_a_slurm_script(folder: Path, capsys: pytest.CaptureFixture[str]):
    code, text = check(capsys, "gpt_slurm.sbatch")
    assert code == 2 and "torchrun --nproc_per_node 8 --nnodes 4 --node_rank 0" in text and "(32 processes)" in text
    assert "--pipeline-model-parallel-size 3 = 24 ranks does not divide the 32 processes" in text
    assert "not run: module, conda, pip, scontrol" in text
    code, text = check(capsys, "--processes", "48", "gpt_slurm.sbatch")
    assert code == 0, text


def test_scripts_that_start_nothing(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert check(capsys, "nowhere.sh") == (2, "error: nowhere.sh is not a file\n")
    (folder / "empty.sh").write_text("echo usage: empty.sh SIZE; exit 3")
    code, text = check(capsys, "empty.sh")
    assert code == 1 and "its exit code is 3" in text and "usage: empty.sh SIZE" in text


def test_another_program_is_named(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "tune.sh").write_text("python finetune_llama.py --num-layers 2")
    code, text = check(capsys, "tune.sh")
    assert code == 2 and "finetune_llama.py is another program: only its flags are checked" in text


MODEL = "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 " \
        "--train-iters 1 --lr 1e-3 --mock-data --vocab-size 99 --num-layers"  # fmt: skip


def test_jobs_that_a_script_writes_and_submits_are_followed(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "jobs.sh").write_text(
        f"""#!/bin/bash
LAYERS=6
cat > generated.sbatch <<X
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
. ./more.sh
srun python pretrain_gpt.py {MODEL} $LAYERS \\$MORE
X
echo "MORE=--bf16" > more.sh
job=$(sbatch --parsable -J name -p gpu generated.sbatch)
[ "$job" = 1 ] && sbatch --wrap "torchrun --nproc_per_node 2 pretrain_gpt.py {MODEL} 4"
sbatch -N 3 <<X
#SBATCH --ntasks-per-node=2
srun pretrain_gpt.py {MODEL} 5
X
echo "torchrun pretrain_gpt.py {MODEL} 7" | tee written.sh
chmod +x written.sh; bash written.sh
sbatch nowhere.sbatch; sbatch $0
"""
    )
    code, text = check(capsys, "jobs.sh")
    assert code == 0, text
    assert text.count("\naccepted") == 4
    assert all(f"({processes} processes)" in text for processes in (8, 6, 2))
    for layers in ("6 --bf16", "4", "5", "7"):
        assert f"--vocab-size 99 --num-layers {layers}\n" in text
    assert "not run: chmod\n" in text


def test_output_of_python_in_a_script_is_used_or_reported_as_unknown(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "count.sh").write_text(
        f"""N=$(python3 -c "print(2 * 3)")
M=$(python - <<X
import math
print(math.isqrt(16))
X
)
python -c "import torch; print(torch.__version__)" || exit 1
python3 -c "open('made', 'w')"
torchrun --nproc_per_node $M pretrain_gpt.py {MODEL} $N
"""
    )
    code, text = check(capsys, "count.sh")
    assert code == 0 and "--num-layers 6\n" in text and "(4 processes)" in text
    assert "python -c 'import torch; print(torch.__version__)': its output is unknown here" in text
    assert not (folder / "made").exists() and text.count("its output is unknown") == 2
    code, text = check(capsys, "--trust-script", "count.sh")  # without confinement, check_script runs no Python code
    assert code == 2 and "--num-layers: the script's variable N is empty" in text and "--nproc_per_node" in text


@pytest.mark.parametrize(
    "text, code",
    [
        ("set -e\nBLEND=$(cat $DATA/blend.txt)\ntorchrun pretrain_gpt.py --num-layers 2 --data-path $BLEND", 1),
        ("torchrun pretrain_gpt.py --num-layers 2 --data-path $(cat $DATA/blend.txt)", 2),
        ("while read -r name; do echo $name; done < $DATA/blend.txt", 1),
        ("source $DATA/blend.txt", 1),
    ],
)
def test_a_file_that_only_the_cluster_has_is_named_as_the_cause(folder: Path, capsys, text: str, code: int):
    (folder / "reads.sh").write_text(f"DATA=/cluster/data\n{text}\n")
    done, message = check(capsys, "reads.sh")
    assert done == code and "arguments that it needs" not in message
    assert "reads /cluster/data/blend.txt, which does" in message
    assert "copy it here, or set the variable that names its folder" in message


@pytest.mark.parametrize(
    "where", ["D=<PATH TO THE DATA>\ntorchrun", "D=(<PATH TO THE DATA>)\n", "sed s/a/b/ <PATH TO x>\n"]
)
def test_a_placeholder_is_named(folder: Path, capsys: pytest.CaptureFixture[str], where: str):
    (folder / "fill.sh").write_text(f"{where} pretrain_gpt.py\n")
    code, message = check(capsys, "fill.sh")
    assert code == 1 and "fill.sh has a placeholder, <PATH TO " in message and ">: put your own value in" in message


def test_a_file_that_sed_misses_is_named(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "sed.sh").write_text("sed s/a/b/ template.json > mine.json\n")
    assert "sed.sh reads template.json, which does not exist" in check(capsys, "sed.sh")[1]


def test_an_empty_variable_is_named(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "empty.sh").write_text(
        """GPT_ARGS="
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size "$PP"
    --hidden-size $1 --num-layers=$LAYERS
"
ARRAY=(--seq-length $LENGTH --lr "$RATE")
torchrun --nproc_per_node $GPUS pretrain_gpt.py $GPT_ARGS "${ARRAY[@]}" --bf16 $NOTHING
"""
    )
    code, text = check(capsys, "empty.sh")
    assert code == 2
    names = {"--tensor-model-parallel-size": "TP", "--pipeline-model-parallel-size": "PP", "--num-layers": "LAYERS",
             "--nproc_per_node": "GPUS", "--seq-length": "LENGTH", "--lr": "RATE"}  # fmt: skip
    for flag, name in names.items():
        assert f"{flag}: the script's variable {name} is empty: set it, for example by {name}=VALUE" in text, flag
    assert "--hidden-size: the script's argument $1 is empty: give it after the script's name" in text
    assert "expected one argument" not in text and "NOTHING" not in text and "has no value" not in text


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--data-path x --tokenizer-type PretrainedFromHF --vocab-file x",
         "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model, a folder, and reads no --vocab-file"),
        ("--data-path x --tokenizer-type Llama2Tokenizer", "--tokenizer-type Llama2Tokenizer needs --tokenizer-model"),
        ("--data-path x --tokenizer-type GPT2BPETokenizer --vocab-file x", "needs --merge-file, a file: add --merge"),
        ("--data-path x", "--tokenizer-type is missing"),
        ("--data-path 1 x 2 y --split 9,-1 --tokenizer-type ByteLevelTokenizer", "--split 9,-1: give up to three"),
        ("--data-path 1 x y 2 --tokenizer-type ByteLevelTokenizer", "--data-path: give only prefixes, or a weight"),
        ("--mock-data --tokenizer-type NullTokenizer", "--tokenizer-type NullTokenizer needs --vocab-size"),
    ],
)  # fmt: skip
def test_refusals_that_appear_only_with_real_data(
    flags: str, expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "data.sh").write_text(f"python pretrain_gpt.py {MODEL.replace('--mock-data --vocab-size 99', flags)} 2")
    code, text = check(capsys, "data.sh")
    assert code == 2 and expected in text


# ---- nothing is started, nothing is written


def calls(script: str, folder: Path, **environment: str) -> list[str]:
    path = Path.cwd() / "script.sh"
    path.write_text(script)
    scratch = folder / f"scratch{len(list(folder.iterdir()))}"
    scratch.mkdir()
    return [
        " ".join(call.words) for call in record(path, ["a b"], Path.cwd(), {**os.environ, **environment}, scratch).calls
    ]


LINES = [
    "touch {made}", "/usr/bin/touch {made}", "T=/usr/bin/touch; $T {made}", 'T=/usr/bin/touch; X=1 "$T" {made}',
    "exec touch {made}", "exec /usr/bin/touch {made}", "command touch {made}", "env touch {made}",
    "nohup touch {made} &", "xargs touch {made}", "bash -c 'touch {made}'", "/bin/bash -c '/usr/bin/touch {made}'",
    "sh -c 'echo > {made}'", 'run() {{ "$@"; }}; run /usr/bin/touch {made}', "eval 'echo 1 &> {made}'",
    "echo > {made}", "echo >> {made}", "echo >| {made}", "( echo 1 ) &> {made}", "cat <<X > {made}\n1\nX",
    "for i in 1 2; do echo; done > {made}", "echo | tee {made}", "sed -i s/a/b/ {made}; cp script.sh {made}",
    'srun -n 2 bash -c "echo > {made}"', "exec 3> {made}; echo >&3", "source env.sh", ". ./env.sh", "./env.sh",
]  # fmt: skip


def test_no_program_runs_and_no_file_is_made(folder: Path, tmp_path: Path):
    (folder / "env.sh").write_text("#!/bin/bash\n/usr/bin/touch $MADE\necho > $MADE\n")
    (folder / "env.sh").chmod(0o755)
    made = [tmp_path / f"made{number}" for number in range(len(LINES))]
    parts = [f"(\nexport MADE={file}\n{line.format(made=file)}\n)" for line, file in zip(LINES, made)]
    assert "torchrun x.py" in calls("\n".join([*parts, "torchrun x.py"]), tmp_path)
    assert not [line for line, file in zip(LINES, made) if file.exists()]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("torchrun x.py '1 2' \"$1\"", "torchrun x.py 1 2 a b"),
        ("echo 'a > b' > log; torchrun $(cat log | wc -w)", "torchrun 3"),
        ("torchrun x.py 1 \\\n", "torchrun x.py 1"),  # at the end of the input bash drops the backslash
        ("N=$(nvidia-smi -L | wc -l); torchrun -n $N", "torchrun -n 8"),
        ("torchrun ${0##*/} $(basename ${BASH_SOURCE[0]})", "torchrun script.sh script.sh"),
        ("cd nowhere && torchrun x.py", "torchrun x.py"),
        ("set -eux; mkdir -p a; cd a; torchrun x.py 2>&1 | tee a/log", "torchrun x.py"),
        ("cat <<E\n > not a file\nE\n[[ a > b ]] || torchrun x.py # > c", "torchrun x.py"),
        ("srun -n 4 bash -c 'torchrun --node_rank $SLURM_PROCID x.py'", "srun -n 4 torchrun --node_rank 1 x.py"),
        ("exec torchrun x.py > log", "torchrun x.py"),
        ("/opt/none/bin/torchrun x.py", "/opt/none/bin/torchrun x.py"),
    ],
)
def test_what_is_called(script: str, expected: str, folder: Path, tmp_path: Path):
    assert expected in calls(script, tmp_path, SLURM_PROCID="1")


def test_only_output_files_are_renamed():
    plain = "a 2>&1 | b; [[ x > y ]]; (( x > y )); c > /dev/null 2> /dev/stderr; d >&3; e < f; g <(h) > >(i) # > j\n"
    assert elsewhere(plain) == plain
    assert elsewhere("a &> b") == 'a >| "$(_elsewhere b)" 2>&1'
    assert elsewhere('a >> "$B/c d"; e') == 'a >> "$(_elsewhere "$B/c d")"; e'


@pytest.mark.parametrize(
    "line",
    [
        'export PATH="$PWD/env/bin:$PATH"; torchrun',
        "PATH=$PWD/env/bin:$PATH; exec torchrun",
        "PATH=$PWD/env/bin:$PATH torchrun",
        "source env/bin/activate; torchrun",
        "PATH=env/bin; (torchrun",
    ],
)
def test_a_script_that_puts_its_own_programs_first_in_path_starts_none_of_them(folder: Path, capsys, line: str):
    (folder / "env" / "bin").mkdir(parents=True)
    (folder / "env" / "bin" / "activate").write_text('export PATH="$PWD/env/bin:$PATH"\nhash -r\n')
    (folder / "env" / "bin" / "torchrun").write_text("#!/bin/sh\necho the real torchrun ran\n")
    (folder / "env" / "bin" / "torchrun").chmod(0o755)
    flags = "--model llama3-8b --mock-data --seq-length 8192 --micro-batch-size 1 --train-iters 1"
    end = ")" if "(" in line else ""
    (folder / "own_path.sh").write_text(f"{line} --nproc-per-node 2 pretrain_llama.py {flags}{end}\n")
    code, text = check(capsys, "own_path.sh")
    assert "(2 processes)" in text and "real torchrun" not in text, text


# ---- reading the command


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("torchrun --nproc_per_node 8 --nnodes 4", 32),
        ("torchrun --nproc-per-node=4 --nnodes=1:2", 8),
        ("torchrun --nproc_per_node gpu", 8),
        ("python -u -m torch.distributed.launch --nproc_per_node 4 --nnodes 2", 8),
        ("deepspeed --num_gpus 4 --num_nodes 2", 8),
        ("deepspeed --hostfile hosts", None),
        ("srun -n 16 python -u", 16),
        ("srun -N 2 --ntasks-per-node=8 python", 16),
        ("srun python", 24),
        ("mpirun -np 12 -x PATH python", 12),
        ("mpirun --hostfile h -n 6 python3", 6),
        ("python3", 1),
        ("", 1),
    ],
)
def test_processes(launcher: str, expected: int | None):
    assert processes(launcher.split(), 24) == expected


def test_the_training_program_is_the_one_with_flags_of_a_model():
    assert launch("python tools/preprocess_data.py --input a --workers 4".split()) is None
    result = launch("torchrun --nproc_per_node 2 /m/pretrain_gpt.py --num-layers=2 --bf16".split())
    assert result.program == "/m/pretrain_gpt.py" and result.flags == ["--num-layers=2", "--bf16"]
    assert (
        grid("--tensor-model-parallel-size 2 --pipeline-model-parallel-size=3 --ulysses-parallel-size 4".split()) == 24
    )


def test_directives_of_slurm_become_variables():
    variables = slurm("#SBATCH -N 3\n#SBATCH --ntasks-per-node=2 # two\n#SBATCH --gres=gpu:4\n")
    assert (variables["SLURM_NNODES"], variables["SLURM_NTASKS"], variables["SLURM_GPUS_ON_NODE"]) == ("3", "6", "4")
    assert slurm("#!/bin/bash\n") == {} and json.dumps(variables)


# Published launch commands: how many are accepted unchanged, and the refusals of the others.


AT_LEAST = 341  # accepted recipes; this number must not be lowered
ALL = by_pairs(  # the usual run has every flag and every refusal once
    list(recipes()),
    lambda _, recipe: {*re.findall(r"(?<!\S)--?[A-Za-z][\w-]*", recipe["flags"]), *recipe.get("refused", [])},
    ids=lambda repository, recipe: f"{repository}:{recipe['name']}",
)


def test_the_collection_is_broad():
    repositories = [repository for repository, _ in recipes()]
    assert len(repositories) >= 150 and len(set(repositories)) >= 8
    assert len({recipe["flags"] for _, recipe in recipes()}) == len(repositories)


def test_the_share_of_accepted_recipes_does_not_fall():
    assert sum("refused" not in recipe for _, recipe in recipes()) >= AT_LEAST


@pytest.mark.parametrize("repository, recipe", ALL)
def test_recipe(repository: str, recipe: dict):
    """Accepted, or refused for the stored reasons; each reason names a flag or the recipe's file."""
    lines = refused(recipe)
    assert lines == recipe.get("refused", []), "if this change is wanted, run python -m tests.recipes --write"
    known = {word.split("=")[0] for word in recipe["flags"].split()} | set(supported_flags())
    files = recipe.get("files", {})
    for line in lines:
        assert "\n" not in line
        assert known & set(re.findall(r"--?[A-Za-z][\w-]*", line)) or any(file in line for file in files), line


# Accepted recipes start: they run tokenizer, data and a simulated step with stand-ins for files.


def kind(recipe: dict[str, Any]) -> str:
    """How a recipe names its tokenizer and its data; recipes with the same result are of one kind."""
    words = shlex.split(recipe["flags"])
    named = words[words.index("--tokenizer-type") + 1] if "--tokenizer-type" in words else "none"
    return named + next((word for word in words if "weighted" in word or word == "--train-data-path"), "")


ACCEPTED = [(f"{repository}:{recipe['name']}", recipe) for repository, recipe in recipes() if "refused" not in recipe]
FIRST = {kind(recipe): name for name, recipe in reversed(ACCEPTED)}.values()  # one of each kind
CASES = [pytest.param(recipe, id=name, marks=() if name in FIRST else pytest.mark.full) for name, recipe in ACCEPTED]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("stand-ins"))


@pytest.mark.parametrize("recipe", CASES)
def test_the_data_of_an_accepted_recipe_are_built(recipe: dict[str, Any], stand_ins: Path, tmp_path: Path) -> None:
    start(recipe, tmp_path, stand_ins, step=False)


QUICK = "Ascend/MindSpeed-LLM:pretrain_llama2_13b_ms"


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(recipe, id=name, marks=() if name == QUICK else pytest.mark.full) for name, recipe in ACCEPTED],
)
def test_an_accepted_recipe_starts(recipe: dict[str, Any], stand_ins: Path, tmp_path: Path) -> None:
    start(recipe, tmp_path, stand_ins)


# Misspelt flags and other programs' names: the refusal suggests the right flag.


MEANT = {  # given flag -> suggested flag
    # misspelt
    "--num_layers 2": "--num-layers",
    "--num-layer 2": "--num-layers",
    "--hiddensize 64": "--hidden-size",
    "--hidden-sizes 64": "--hidden-size",
    "--seqlength 64": "--seq-length",
    "--num-attention-head 4": "--num-attention-heads",
    "--ffn-hidden-dim 4": "--ffn-hidden-size",
    "--micro-batchsize 1": "--micro-batch-size",
    "--globalbatch-size 1": "--global-batch-size",
    "--tensor-parallel-size 2": "--tensor-model-parallel-size",
    "--tensor-model-parallel 2": "--tensor-model-parallel-size",
    "--pipeline-parallel-size 2": "--pipeline-model-parallel-size",
    "--ulyses-parallel-size 2": "--ulysses-parallel-size",
    "--ring-parallel 2": "--ring-parallel-size",
    "--context-parallel 2": "--context-parallel-size",
    "--sequence-paralel": "--sequence-parallel",
    "--distributed-optimizer": "--use-distributed-optimizer",
    "--rotary-pct 1": "--rotary-percent",
    "--untie-embeddings": "--untie-embeddings-and-output-weights",
    "--dissable-bias-linear": "--disable-bias-linear",
    "--lr-warmup-iter 1": "--lr-warmup-iters",
    "--recompute-activation": "--recompute-activations",
    "--weightdecay 0.1": "--weight-decay",
    "--save-intervall 5": "--save-interval",
    "--BF16": "--bf16",
    "--fpdt-chunksize 64": "--fpdt-chunk-size",
    "--offload-checkpoint": "--offload-checkpoints",
    "--ft-package": "--enable-ft-package",  # which is refused, as the message says
    # flags of other versions that have another form here
    "--skip-train-iteration-range 3-5": "--iterations-to-skip",
    # USP, yunchang, LoongTrain
    "--ulysses-degree 2": "--ulysses-parallel-size",
    "--ulysses_degree 2": "--ulysses-parallel-size",
    "--sp_ulysses_degree 2": "--ulysses-parallel-size",
    "--head_size 2": "--ulysses-parallel-size",
    "--ring-degree 2": "--ring-parallel-size",
    "--sp_ring_degree 2": "--ring-parallel-size",
    "--context_size 2": "--ring-parallel-size",
    "--ring_impl_type zigzag": "--context-parallel-balance",
    # DeepSpeed, FPDT
    "--ds-sequence-parallel 2": "--ds-sequence-parallel-size",
    "--ds-sequence-parallel-fpdt-offload": "--ds-sequence-parallel-fpdt-offloading",
    "--fpdt-offloading": "--fpdt-offload",
    # Hugging Face and others
    "--rope-theta 500000": "--rotary-base",
    "--num-hidden-layers 2": "--num-layers",
    "--intermediate-size 64": "--ffn-hidden-size",
    "--num-kv-heads 2": "--num-query-groups",
    "--rms-norm-eps 1e-5": "--norm-epsilon",
    "--sliding-window 4096": "--window-size",
    "--max-seq-len 64": "--seq-length",
    "--learning-rate 1e-4": "--lr",
    "--gradient-checkpointing": "--recompute-granularity",
    "--max_grad_norm 1": "--clip-grad",
    "--per_device_train_batch_size 1": "--micro-batch-size",
    "--tp-size 2": "--tensor-model-parallel-size",
    "--cp_size 2": "--context-parallel-size",
}

EQUIVALENT = {  # given flag -> section.field and its value
    "--ds-sequence-parallel-size 4": ("parallel.ulysses_parallel_size", 4),
    "--ulysses-degree-in-cp=4": ("parallel.ulysses_parallel_size", 4),
    "--ds-sequence-parallel-fpdt": ("chunks.fpdt", True),
    "--ds-sequence-parallel-fpdt-chunk-size 64": ("chunks.fpdt_chunk_size", 64),
    "--ds-sequence-parallel-fpdt-offloading": ("chunks.fpdt_offload", True),
    # values in other programs' notation
    "--bf16 true": ("optimizer.bf16", True),
    "--bf16=True": ("optimizer.bf16", True),
    "--bf16 false": ("optimizer.bf16", False),
    "--disable-bias-linear true": ("model.add_bias_linear", False),
    "--window-size -1,0": ("attention.window_size", (-1, 0)),
    "--window-size=-1,0": ("attention.window_size", (-1, 0)),
    "--window-size (127,0)": ("attention.window_size", (127, 0)),
    "--window-size 127 0": ("attention.window_size", (127, 0)),
    "--window-size -1 0": ("attention.window_size", (-1, 0)),
    "--window-size [127, 0]": ("attention.window_size", (127, 0)),
    "--hierarchical-context-parallel-sizes 2,4": ("parallel.hierarchical_context_parallel_sizes", [2, 4]),
    "--hierarchical-context-parallel-sizes [2, 4]": ("parallel.hierarchical_context_parallel_sizes", [2, 4]),
    "--rampup-batch-size 16,16,1000": ("data.rampup_batch_size", [16, 16, 1000]),
    "--data-path ['a','b']": ("data.data_path", ["a", "b"]),
    "--data-path a,b": ("data.data_path", ["a,b"]),
}

NOTED = ["--use-cp-send-recv-overlap", "--cp-window-size 2", "--use-fused-rmsnorm", "--use-flash-attn true"]


def refusal_of(flags: str) -> str:
    with pytest.raises(Refusal) as caught:
        parse(flags.split())
    return str(caught.value)


@pytest.mark.parametrize("written", MEANT)
def test_the_flag_that_is_meant_is_named(written: str):
    message = refusal_of(written)
    assert message.startswith(written.split()[0]) and MEANT[written] in re.findall(r"--[a-z][\w-]*", message), message


def test_an_unknown_flag_unlike_all_others_gets_the_nearest_as_no_suggestion():
    for flag in ("--qwertyuiop", "--handle", "--a", "--model-family"):
        near = re.fullmatch(f"{flag} is not a known flag; the nearest is (--[a-z-]+), and --help lists all",
                            refusal_of(f"{flag} 3"))  # fmt: skip
        assert near[1] in supported_flags()


@pytest.mark.parametrize("written", EQUIVALENT)
def test_equivalent_values_are_accepted(written: str):
    name, value = EQUIVALENT[written]
    section, field = name.split(".")
    assert getattr(getattr(parse(written.split()), section), field) == value


def test_false_is_refused_if_the_default_is_true():
    for flag in ("--fpdt-offload", "--ds-sequence-parallel-fpdt-offloading", "--exit-signal-handler"):
        assert refusal_of(f"{flag} false") == f"'false' after {flag} belongs to no flag: quote values that hold spaces"


@pytest.mark.parametrize("written", NOTED)
def test_flags_that_cannot_change_the_result_get_a_note(written: str):
    (note,) = parse(written.split()).notes
    assert written.split()[0] in note


def test_no_suggestion_is_itself_refused():
    """A refused flag is never suggested, either by the tables or for a flag with a missing letter."""
    rows = megatron_flags.rows()
    wrong = {flag for flag, row in rows.items() if row.verdict == "refused"}
    for flag, row in rows.items():
        if row.verdict == "refused":
            advice = re.findall(r"(?<=use )(?:--[\w-]+)", row.reason)
            assert not wrong & set(advice), f"{flag}: {row.reason}"
    for flag in sorted([*wrong, *supported_flags()])[::8]:
        if flag[:-1] not in rows and flag[:-1] not in supported_flags():
            named = re.findall(r"did you mean (--[\w-]+)", refusal_of(flag[:-1]))
            assert not wrong & set(named), named


def test_the_filter_for_launch_scripts_ends_the_shell_where_it_cannot_follow() -> None:
    def filtered(text: str) -> str:
        command = [sys.executable, "tools/launch_redirect.py", "run.sh"]
        return subprocess.run(command, input=text, text=True, capture_output=True, check=True, cwd=ROOT).stdout

    assert '>| "$(_elsewhere x)"' in filtered("echo a > x\n")
    done = subprocess.run(["bash", "-c", filtered('"$(' * 3000)], text=True, capture_output=True)
    assert done.returncode == 1
    assert done.stderr == "run.sh: quotations or $(...) are nested too deeply to follow\n"
