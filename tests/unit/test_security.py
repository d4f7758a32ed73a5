# SPDX-License-Identifier: Apache-2.0
"""Tests of docs/use/security.md: test_NN proves sentence NN."""

from __future__ import annotations

import ast
import base64
import hashlib
import inspect
import io
import json
import os
import pickle
import re
import shutil
import stat
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from megatron.inference.load import configure
from megatron.simulator.dry_run.allocation import allocator
from megatron.training import json_file, setup
from megatron.training.arguments import argv
from megatron.training.arguments.parser import parse
from megatron.training.checkpoint.in_memory import copies
from megatron.training.data import index_files as data_files
from megatron.training.data import row_files as packed_files
from megatron.training.data import text_files, tokenizer
from megatron.training.data.chat_template import Chat, ChatTemplate
from megatron.training.data.packing import length_mixtures
from megatron.training.model.attention_rule import mask_function
from megatron.training.ownership.atomic import atomic_files
from megatron.training.refusal import Refusal
from megatron.training.settings.config import CheckpointConfig, DataConfig
from tests.chats import make_tokenizer
from tools import check_script, launch_confined, plan, trace_alignment

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "use" / "security.md"
CODE = [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "tools").glob("*.py"), *ROOT.glob("pretrain_*.py")]
CONFINED = pytest.mark.skipif(bool(launch_confined.why_not()), reason=launch_confined.why_not() or "-")
MACHINE = '{"extends": "H100-80G", "gpus": "eight"}'


def sentences() -> dict[int, str]:
    result = re.findall(r"^- \*\*(\d+)\.\*\* (.*?)(?=^- |^#|^\w|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return {int(number): " ".join(text.split()) for number, text in result}


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """(file, node) of all lookups, imports and calls."""
    kinds = (ast.Call, ast.Import, ast.Subscript, ast.Compare)
    trees = ((str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in CODE)
    return [(name, node) for name, tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """(file, called name, call)."""
    return [(name, ast.unparse(node.func), node) for name, node in nodes() if isinstance(node, ast.Call)]


class Harm:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_each_sentence_has_a_test_and_the_page_is_short():
    tests = {int(match[1]) for name in globals() if (match := re.fullmatch(r"test_(\d\d)_.*", name))}
    assert tests == set(sentences()) == set(range(1, len(tests) + 1))
    assert len(PAGE.read_text().splitlines()) <= 120


def test_01_the_command_line_names_any_file(tmp_path):
    with atomic_files([str(tmp_path / "a" / "b")], overwrite=False) as (name,):
        Path(name).write_text("1")
    assert (tmp_path / "a" / "b").read_text() == "1"


def test_02_only_a_named_function_is_run(tmp_path):
    (tmp_path / "mask.py").write_text("def seen(q, k):\n    return q[:, None] >= k\n")
    assert mask_function(f"{tmp_path}/mask.py:seen").__name__ == "seen"
    callers = {name for name, called, _ in calls() if called.endswith("user_function")}
    assert callers == {"megatron/training/model/attention_rule.py", "megatron/certifying/of_file.py"}
    runners = ("exec_module", "run_path", "spec_from_file_location")
    runs = {name for name, called, _ in calls() if called.endswith(runners)}
    assert runs == {"megatron/system/user_function.py", "megatron/certifying/scripts/script.py"}


def test_03_a_broken_file_ends_in_one_line(tmp_path, capsys):
    (tmp_path / "gpu.json").write_text(MACHINE)
    words = f"--model llama3-8b --gpus 8 --seq-length 4096 --gpu {tmp_path}/gpu.json"
    assert plan.main(words.split()) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: ") and error.count("\n") == 1 and "gpus" in error


def test_04_every_reader_is_given_broken_files():
    from tests.fuzz import checkpoint_readers, data_readers, test_readers, tokenizer_readers

    assert test_readers.READERS == [
        *data_readers.READERS, *tokenizer_readers.READERS, *checkpoint_readers.READERS
    ]  # fmt: skip


def test_05_code_next_to_a_tokenizer_is_not_run(tmp_path):
    folder = make_tokenizer(tmp_path / "hf")
    (folder / "harm.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass Harm:\n    pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["harm.Harm", "harm.Harm"]}, "tokenizer_class": "Harm"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        tokenizer.build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)), None)
    except Refusal:
        pass
    assert not (tmp_path / "ran").exists()
    given = [keyword for _, _, call in calls() for keyword in call.keywords if keyword.arg == "trust_remote_code"]
    assert given and all(isinstance(one.value, ast.Constant) and one.value.value is False for one in given)


def test_05_every_call_that_reads_a_folder_with_transformers_switches_its_code_off():
    paths = [*CODE, *(ROOT / "examples").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    found = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained"):
                found.append((str(path.relative_to(ROOT)), ast.unparse(node.func), {one.arg for one in node.keywords}))
    unsafe = [(file, called) for file, called, keywords in found if "trust_remote_code" not in keywords]
    # Only its Hugging Face tokenizer has the option, and gets it from _hugging_face.
    assert unsafe == [("megatron/training/data/tokenizer.py", "MegatronTokenizer.from_pretrained")]
    assert len(found) > 3  # the loop finds calls


@pytest.mark.parametrize(
    "words",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() | length }}",
        "{{ cycler.__init__.__globals__.os.mkdir('ran') }}",
        "{{ lipsum.__globals__['os'].mkdir('ran') }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_06_a_chat_template_cannot_reach_python(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_tokenizer(tmp_path / "hf")
    data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    result = tokenizer.build_tokenizer(data, None)
    chat = Chat("a, line 1", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    with pytest.raises(Refusal, match="chat template"):
        ChatTemplate(result.transformers, words, "a tokenizer")(chat)
    assert not (tmp_path / "ran").exists()


def test_07_a_checkpoint_does_not_choose_what_is_run(tmp_path):
    (tmp_path / "mask.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nseen = print\n")
    words = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 48 --max-position-embeddings 48 "
    words += "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 99"
    function = f"--attention-mask function --mask-function {tmp_path}/mask.py:seen"
    saved = tmp_path / "iter_0000003"
    saved.mkdir()
    (saved / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    torch.save({"config": asdict(parse(f"{words} {function}".split(), None, 1))}, saved / "common.pt")
    with pytest.raises(Refusal, match="must not choose code to run.*--mask-function FILE.py:NAME"):
        configure([], str(tmp_path), None, None, 1)
    config, _ = configure(function.split(), str(tmp_path), None, None, 1)
    assert config.attention.mask_function.endswith("mask.py:seen") and not (tmp_path / "ran").exists()


def test_08_an_index_cache_is_not_unpickled(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    for data in (pickle.dumps(Harm(tmp_path / "ran")), array_of_objects(tmp_path / "ran")):
        (folder / "a.npy").write_bytes(data)
        with pytest.raises(Refusal, match="is not an index of data"):
            data_files.check_cache(str(folder))
    (folder / "a.npy").write_bytes(b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little"))
    with pytest.raises(Refusal, match="its header is too long"):
        data_files.check_cache(str(folder))
    assert not (tmp_path / "ran").exists()


def array_of_objects(path: Path) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Harm(path)]), allow_pickle=True)
    return file.getvalue()


def data_file(folder: Path) -> data_files.DataFile:
    for end in ("bin", "idx"):
        (folder / f"c.{end}").write_bytes(b"1234")
    return data_files.DataFile(f"{folder}/c", np.uint16, 1, ("c",), f"{folder}/c.idx")


def test_09_megatron_core_would_unpickle_a_cache_that_is_exchanged(tmp_path):
    from megatron.core.datasets import gpt_dataset

    assert "allow_pickle=True" in inspect.getsource(gpt_dataset)
    data = DataConfig(data_cache_path="/own")
    assert data_files.cache_folder(data, [data_file(tmp_path)], {}).startswith("/own/")


ESCAPES = """trap - DEBUG; /usr/bin/touch {made}
export PATH=/usr/bin:/bin; touch {made}
awk 'BEGIN {{ system("/usr/bin/touch {made}") }}'
builtin command -p touch {made}
$BASH -c 'echo > {made}'
$(type -P env) -i /usr/bin/touch {made}
coproc /usr/bin/touch {made}
time /usr/bin/touch {made}
sort -o {made} /dev/null
a[$(touch {made})]=1
unset -f _called; enable -f eval; PATH=/bin mkdir {made}
exec 5> {made}
builtin source /dev/stdin <<< "/usr/bin/touch {made}" """.splitlines()


def checked(script: Path, text: str, capsys, *flags: str) -> tuple[int, str]:
    script.write_text(text)
    code = check_script.main([*flags, str(script)])
    return code, "".join(capsys.readouterr())


@CONFINED
def test_10_a_script_changes_nothing(tmp_path, capsys):
    made = [tmp_path / f"made{number}" for number in range(len(ESCAPES))]
    victim = tmp_path / "victim"
    victim.write_text("whole")
    victim.chmod(0o600)
    text = "\n".join(f"(\n{line.format(made=file)}\n)" for line, file in zip(ESCAPES, made))
    text += f"\nbuiltin trap - DEBUG\nPATH=/usr/bin:/bin\nchmod 777 {victim}\ntruncate -s 0 {victim}\nrm {victim}\n"
    text += f"builtin kill -0 {os.getpid()} && echo found > {victim}\n(exec 3<> /dev/tcp/127.0.0.1/1) 2>&1 | cat >&2\n"
    code, message = checked(tmp_path / "script.sh", text, capsys)
    assert code == 1 and "socket: Operation not permitted" in message
    assert not [line for line, file in zip(ESCAPES, made) if file.exists()]
    assert victim.read_text() == "whole" and stat.S_IMODE(victim.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.sh", "victim"]


@CONFINED
def test_10_a_script_cannot_forge_what_it_called(tmp_path, capsys):
    code, message = checked(tmp_path / "script.sh", 'builtin printf "x\\0" >> "$CHECK_LOG"', capsys)
    assert code in (1, 2) and "Traceback" not in message and message.startswith("error: ")


def test_11_nothing_runs_if_the_kernel_cannot_confine_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check_script, "why_not", lambda: "this kernel has no Landlock")
    code, message = checked(tmp_path / "script.sh", f"builtin echo > {tmp_path}/made", capsys)
    assert code == 2 and message.count("\n") == 1 and "--trust-script" in message and not (tmp_path / "made").exists()
    code, message = checked(tmp_path / "script.sh", "echo why", capsys, "--trust-script")
    assert code == 1 and "started no training program" in message and "why" in message


def test_12_the_page_runs_only_its_own_script(tmp_path):
    gpu = tmp_path / "gpu.json"
    gpu.write_text('{"extends": "H100-80G", "name": "</script><script>alert(1)</script><!--"}')
    words = f"--model llama3-8b --gpus 4 --gpu {gpu} --seq-length 8K --pipeline 1 --micro-batch 1 --top 2 --html"
    assert plan.main([*words.split(), str(tmp_path / "plans.html")]) == 0
    text = (tmp_path / "plans.html").read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and text.count("<script") == 2 and "alert(1)</script>" not in text
    for name in ("style", "script"):
        content = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[f"{name}-src"] == f"'sha256-{digest}'"
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*)</script>\n', text)[1])
    assert "<script>alert(1)" in data["title"]
    assert not re.search(r"""\son\w+=|javascript:|innerHTML|insertAdjacent|document\.write""", text)


def test_13_text_from_a_file_is_printed_in_one_line():
    message = Refusal("file \x1b]0;title\x07 says\r\n\u202e\ud800" + "x" * 10_000 + "way out").render()
    assert message.isprintable() and len(message) <= 1000 and message.endswith("way out") and "\\x1b" in message
    message.encode()


def test_14_bounds(tmp_path, monkeypatch):
    assert (json_file.MOST_BYTES, json_file.DEEPEST) == (64 << 20, 100)
    assert (text_files.LONGEST, trace_alignment.MOST_BYTES) == (2 << 30, 1 << 30)
    assert tokenizer.LARGEST_VOCABULARY == 16_777_216
    (tmp_path / "a.json").write_text("[" * 101 + "]" * 101)
    with pytest.raises(Refusal, match="nested more than 100 deep"):
        json_file.read_json(tmp_path / "a.json")
    (tmp_path / "a.jsonl").write_bytes(b"x" * (3 << 20))
    monkeypatch.setattr(text_files, "LONGEST", 2 << 20)
    with pytest.raises(Refusal, match="split it"):
        list(text_files.Reader([str(tmp_path / "a.jsonl")]))
    monkeypatch.setattr(trace_alignment, "MOST_BYTES", 1 << 20)
    with pytest.raises(trace_alignment.NoTrace, match="longer than 1 MiB"):
        trace_alignment.read(tmp_path / "a.jsonl")
    with pytest.raises(Refusal, match="a model would have a row"):
        tokenizer._size([2**31], "a tokenizer")
    with pytest.raises(Refusal, match="longer than 1 MiB"):
        json_file.read_json(tmp_path / "a.jsonl", most=1 << 20)


def test_15_packed_files_are_unpacked_in_parts():
    import zstandard

    packed = zstandard.ZstdCompressor(level=1).compress(bytes(400 << 20))
    stream = packed_files.Zstd(io.BytesIO(packed))
    assert stream.readinto(bytearray(10)) == 10 and len(packed) > packed_files.ZSTD_PART
    assert len(stream.ready) < 160 << 20


def listening(process: int | str = "self") -> list[str]:
    """Addresses, as hexadecimal digits, at which a process listens for TCP."""
    links = [os.readlink(f"/proc/{process}/fd/{number}") for number in os.listdir(f"/proc/{process}/fd") if
             os.path.islink(f"/proc/{process}/fd/{number}")]  # fmt: skip
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    result = []
    for name in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]]
        result += [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in own]
    return result


def test_16_the_store_listens_on_all_interfaces_without_authentication():
    before = listening()
    store = dist.TCPStore("127.0.0.1", 0, 1, True, use_libuv=True)
    (address,) = [one for one in listening() if one not in before or listening().count(one) > before.count(one)][:1]
    assert set(address) == {"0"}
    stranger = dist.TCPStore("127.0.0.1", store.port, 1, False)
    stranger.set("key", "of a stranger")
    assert store.get("key") == b"of a stranger" and stranger.delete_key("key")


def where_gloo_listens() -> list[str]:
    dist.all_reduce(torch.ones(1))
    return listening()


def test_17_gloo_listens_at_one_address(pool):
    for addresses in pool.run(where_gloo_listens, 2):
        assert addresses and len(set(addresses)) == 1 and set(addresses[0]) != {"0"}


def test_18_our_programs_open_no_port():
    opens = {
        name
        for name, called, _ in calls()
        if re.search(r"\.(listen|create_server)$|socket\.socket$|HTTPServer$", called)
    }
    servers = [call for _, called, call in calls() if called.endswith("TCPStore")]
    assert opens == {"megatron/platform/network.py"} and servers
    for call in servers:  # host, port, world size, is_master
        named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        master = ast.unparse(call.args[3]) if len(call.args) > 3 else named.get("is_master", "False")
        assert master == "False", ast.unparse(call)


def test_19_ranks_send_each_other_pickled_objects():
    from torch.distributed import distributed_c10d

    assert "_unpickler" in inspect.getsource(distributed_c10d._tensor_to_object)
    assert any(called.endswith("all_gather_object") for _, called, _ in calls())


def test_20_loggers_of_others_only_with_their_flags():
    """Weights & Biases and MLflow are imported by name in one place, after their flags; certify reads its program's."""
    source = (ROOT / "megatron" / "training" / "report" / "reporter.py").read_text()
    for package, setting in (("wandb", "wandb_project"), ("mlflow", "mlflow_experiment")):
        imports = {name for name, node in nodes() if isinstance(node, ast.Import) and package in ast.dump(node)}
        assert imports <= {"megatron/certifying/scripts/printed.py"} and source.count(f'_imported("{package}"') == 1
        guarded = rf'if settings\.{setting}:\n +{package} = _imported\("{package}".*\n.*_start_{package}'
        assert re.search(guarded, source) and source.count(f"_start_{package}(") == 2


def test_21_modes_follow_the_umask(tmp_path):
    modes = {}
    for umask in (0o022, 0o077):
        before = os.umask(umask)
        try:
            with atomic_files([str(tmp_path / f"{umask}" / "log")], overwrite=False) as (name,):
                Path(name).write_text("1")
        finally:
            os.umask(before)
        modes[umask] = [stat.S_IMODE((tmp_path / f"{umask}" / one).stat().st_mode) for one in ("", "log")]
    assert modes == {0o022: [0o755, 0o644], 0o077: [0o700, 0o600]}
    assert not [name for name, called, _ in calls() if called in ("os.umask", "os.fchmod", "os.chmod")]


def test_22_only_this_user_can_read_copies_in_memory():
    assert copies.MEMORY == Path("/dev/shm")
    source = inspect.getsource(copies._folder)
    assert "megatron-{os.geteuid()}" in source
    if not copies.MEMORY.is_dir():
        return
    existed = (parent := copies.MEMORY / f"megatron-{os.geteuid()}").exists()
    copies._folder(CheckpointConfig(), "ofatest")
    try:
        assert stat.S_IMODE((parent / "run-ofatest").stat().st_mode) == 0o700
        assert stat.S_IMODE(parent.stat().st_mode) == 0o700
    finally:
        shutil.rmtree(parent / "run-ofatest" if existed else parent)


def test_23_index_caches_lie_next_to_the_data(tmp_path):
    folder = data_files.cache_folder(DataConfig(), [data_file(tmp_path)], {})
    assert folder.startswith(f"{tmp_path}/index-cache/")


def test_24_programs_that_are_started():
    starts = {name for name, called, _ in calls() if called.startswith("subprocess.") and called.split(".")[1] in
              ("run", "Popen", "call", "check_call", "check_output")}  # fmt: skip
    assert starts == {
        "tools/launch_script.py",  # for check_script
        "megatron/simulator/planner/confirm.py",
    }
    assert not [call for _, _, call in calls() if any(keyword.arg == "shell" for keyword in call.keywords)]


def test_25_no_module_runs_a_text():
    forbidden = {"eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads", "compile"}
    assert not [(name, called) for name, called, _ in calls() if called in forbidden]
    assert issubclass(length_mixtures._Loader, yaml.SafeLoader)
    assert {ast.unparse(call) for _, called, call in calls() if called == "yaml.load"} <= {
        "yaml.load(text, Loader=_Loader)"
    }
    loads = [ast.unparse(call) for _, called, call in calls() if called == "torch.load"]
    assert all("weights_only=True" in call for call in loads)


def test_26_variables_that_are_read():
    result = set(setup.VARIABLES) | set(allocator.VARIABLES) | set(argv.NAMES.values())
    for _, node in nodes():
        parts: list[ast.expr] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
            parts = node.args[:1]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            parts = [node.slice]
        elif isinstance(node, ast.Compare) and "os.environ" in map(ast.unparse, node.comparators):
            parts = [node.left]
        result |= {part.value for part in parts if isinstance(part, ast.Constant)}
    documented = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", sentences()[26]))
    assert result - {"TOKENIZERS_PARALLELISM", "WANDB_MODE"} <= documented  # set for workers, but not read
    source = "".join(path.read_text() for path in CODE)
    assert not [name for name in documented if f'"{name}"' not in source]


def test_27_how_to_report():
    text = sentences()[27]
    assert "Report a vulnerability" in text and "in private" in text
    assert not re.search(r"https?://|\S+@\S+\.\w+", PAGE.read_text())
