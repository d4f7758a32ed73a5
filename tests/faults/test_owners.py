# SPDX-License-Identifier: Apache-2.0
"""Owners and modes: what a user may not read or write is one line, and nothing changes; the rest works."""

import os
import sys
from pathlib import Path

import pytest

from megatron.training.checkpoint.checkpoint_folder import check_writable
from megatron.training.refusal import Refusal
from tests.distributed.test_program import FLAGS, PROGRAM, ROOT
from tests.faults.bad_inputs import TOOLS
from tests.faults.kills import ENVIRONMENT
from tests.program import run_forked

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can make files of another user"
)
OTHER = 65534  # a user
RUN = f"{FLAGS} --train-iters 2 --eval-iters 0"
TRACKER = "latest_checkpointed_iteration.txt"


def run(words, umask="022", program=PROGRAM):
    """A program that has given up root's privileges."""
    wrapper = ROOT / "tests" / "without_privileges.py"
    return run_forked(wrapper, [umask, str(program), *words.split()], {**ENVIRONMENT, "PYTHONPATH": str(ROOT)})


def give_away(path, mode=None):
    """To another user, with all that lies in it."""
    for one in (path, *path.rglob("*")):
        os.chown(one, OTHER, -1)
    if mode is not None:
        path.chmod(mode)


def state_of(folder):
    return {path: (path.lstat().st_mode, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def refused(folder, words, program=PROGRAM):
    """The one line."""
    before = state_of(folder)
    done = run(words, program=program)
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode == 2 and len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert state_of(folder) == before
    return lines[0]


@needs_root
def test_what_belongs_to_another_user(tmp_path):
    kept, save = tmp_path / "kept", tmp_path / "c"
    done = run(f"{RUN} --save {save}", umask="077")
    assert done.returncode == 0, done.stderr
    assert {path.stat().st_mode & 0o777 for path in save.rglob("*")} == {0o700, 0o600}
    kept.mkdir()
    give_away(kept)
    give_away(save, 0o700)
    assert f"{save}/{TRACKER}: permission denied" in refused(tmp_path, f"{RUN} --load {save}")
    assert f"--save {kept}/x: {kept} cannot be written to" in refused(tmp_path, f"{RUN} --save {kept}/x")


@needs_root
@pytest.mark.full
def test_everything_else_that_belongs_to_another_user(tmp_path):
    save, text, data = tmp_path / "c", tmp_path / "text.jsonl", tmp_path / "d_text_document"
    assert run(f"{RUN} --save {save}", umask="077").returncode == 0
    text.write_text('{"text": "some words to read"}\n' * 400)
    give = f"--input {text} --tokenizer-type ByteLevelTokenizer --append-eod --workers 1 --output-prefix"
    preprocess = TOOLS / "preprocess_data.py"
    assert run(f"{give} {tmp_path}/d", program=preprocess).returncode == 0
    read = RUN.replace("--mock-data --tokenizer-type NullTokenizer --vocab-size 100", "")
    read = f"{read} --tokenizer-type ByteLevelTokenizer --data-path {data}"
    assert run(read).returncode == 0
    count = 0
    give_away(save, 0o700)
    for words, program in (
        (f"{RUN} --load {save} --use-checkpoint-args", PROGRAM),
        (f"{RUN} --load {save} --ckpt-step 2", PROGRAM),
        (f"{RUN} --save {save}/inside", PROGRAM),
        (f"--from {save} --to-hf {tmp_path}/hf", TOOLS / "convert_hf.py"),
        (f"--load {save} --prompt 1 --max-new-tokens 2", TOOLS / "generate.py"),
        (f"--load {save} --seq-length 32 --eval-tasks perplexity", TOOLS / "evaluate.py"),
        (f"{give} {save}/d", preprocess),
    ):
        assert "ermission denied" in refused(tmp_path, words, program)
        count += 1
    save.chmod(0o755)
    for path in (save / TRACKER, save / "iter_0000002"):  # of modes 600 and 700
        line = refused(tmp_path, f"{RUN} --load {save}")
        assert "ermission denied" in line and str(path) in line
        path.chmod(0o755)
        count += 1
    (cache,) = (tmp_path / "index-cache").iterdir()
    for path in (*cache.glob("*.npy"), cache, Path(f"{data}.bin"), Path(f"{data}.idx"), text):
        mode = path.stat().st_mode
        give_away(path, 0o600)
        words, program = (f"{give} {tmp_path}/e", preprocess) if path == text else (read, PROGRAM)
        assert "ermission denied" in refused(tmp_path, words, program), path
        path.chmod(mode)
        count += 1
    give_away(cache.parent, 0o700)  # then indices are made in memory
    done = run(read)
    assert done.returncode == 0 and "every rank builds in memory" in done.stderr
    print(f"\n{count} files and folders of another user: a line each, nothing changed")


@needs_root
@pytest.mark.full
def test_groups_masks_and_older_checkpoints_of_others(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, -1, OTHER)
    shared.chmod(0o2775)
    assert run(f"{RUN} --save {shared}/c", umask="027").returncode == 0
    found = [path.stat() for path in (shared / "c", *(shared / "c").rglob("*"))]
    assert {one.st_gid for one in found} == {OTHER} and {one.st_mode & 0o7777 for one in found} == {0o2750, 0o640}

    give_away(shared / "c" / "iter_0000002", 0o755)  # in a folder of ours
    for path in (shared / "c" / "iter_0000002").iterdir():
        path.chmod(0o644)
    more = f"{RUN} --override-opt-param-scheduler --save {shared}/c --load {shared}/c --keep-last-checkpoints 1"
    done = run(more.replace("--train-iters 2", "--train-iters 3"))
    assert done.returncode == 0 and (shared / "c" / TRACKER).read_text() == "3", done.stderr
    assert [path.name for path in (shared / "c").glob("iter_*")] == ["iter_0000003"]

    blind = tmp_path / "blind"
    blind.mkdir(mode=0o333)  # nobody can list it
    assert run(f"{RUN} --save {blind}").returncode == 0
    assert (blind / TRACKER).read_text() == "2"


def test_a_tracker_that_cannot_be_replaced_is_refused_at_the_start(tmp_path, monkeypatch):
    (tmp_path / TRACKER).write_text("2")
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(Refusal, match="belongs to another user"):
        check_writable(str(tmp_path))
    tmp_path.chmod(0o777)
    check_writable(str(tmp_path))
