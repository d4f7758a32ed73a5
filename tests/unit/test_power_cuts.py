# SPDX-License-Identifier: Apache-2.0
"""Power cuts at any moment while a tool writes: files with final names are complete, and every sync is necessary."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from megatron.training.checkpoint.checkpoint_folder import clear
from megatron.training.checkpoint.converting.from_hugging_face import from_hugging_face
from megatron.training.checkpoint.converting.to_hugging_face import to_hugging_face
from megatron.training.ownership.atomic import atomic_folder
from tests.disk import Recorder, prove
from tests.unit.test_hugging_face import save_llama

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import preprocess_data  # noqa: E402


def tree_of(event):
    return {path: content for path, (_, content) in event.entries.items()}


def files_below(tree, folder):
    return {path: content for path, content in tree.items() if f"{path}/".startswith(f"{folder}/")}


def folders_judge(record, *, promised=True):
    """A judge of states after a cut: a folder is complete or absent; with ``promised``, it exists after its promise."""
    whole = {event.label: files_below(tree_of(event), event.label) for event in record.events if event.promise}

    def judge(cut, state):
        promised_names = {name for _, name in cut.promises}
        for name, files in whole.items():
            result = files_below(state, name)
            if result != files and (result or promised and name in promised_names):
                return f"{name} is {'incomplete' if result else 'gone'}"
        return None

    return judge


def no_bar(_):
    return lambda: None


def test_folders_of_the_converters(tmp_path):
    source = save_llama(tmp_path / "source")
    (tmp_path / "disk").mkdir()
    with Recorder(tmp_path / "disk", tmp_path / "lock") as recorder:
        from_hugging_face(source, tmp_path / "disk" / "new" / "ours", None, no_bar)
        recorder.promise("new/ours")
        to_hugging_face(tmp_path / "disk" / "new" / "ours", tmp_path / "disk" / "theirs", None, no_bar)
        recorder.promise("theirs")
    print(*prove({"converters": (recorder.record, folders_judge(recorder.record))}))


def test_an_index_cache(tmp_path):
    (tmp_path / "disk").mkdir()
    with Recorder(tmp_path / "disk", tmp_path / "lock") as recorder:
        with atomic_folder(str(tmp_path / "disk" / "index-cache" / "a")) as folder:
            for name in ("documents", "samples"):
                np.save(os.path.join(folder, f"{name}.npy"), np.arange(99))
        recorder.promise("index-cache/a")
    print(*prove({"index": (recorder.record, folders_judge(recorder.record, promised=False))}))


def pair_judge(record, prefix):
    """A judge of states after a cut: both files are of one run, which is the last promised run or a later one."""
    names = [f"{prefix}.bin", f"{prefix}.idx"]
    pairs = [[tree_of(event)[name] for name in names] for event in record.events if event.promise]

    def judge(cut, state):
        result = [state.get(name) for name in names]
        if None not in result and result not in pairs:
            return "the two files do not fit together"
        if not cut.promises or result in pairs[len(cut.promises) - 1 :]:
            return None
        replacement = pairs[len(cut.promises)] if len(cut.promises) < len(pairs) else [None, None]
        for name, key in zip(names, replacement):  # under its final or still under its temporary name
            if key is None or key not in [content for path, content in state.items() if path.startswith(name)]:
                return "neither the earlier pair nor its replacement exists"
        return None

    return judge


def test_tokenized_data_that_replace_others(tmp_path):
    (tmp_path / "disk").mkdir()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with Recorder(tmp_path / "disk", tmp_path / "lock") as recorder:
            for words in (["one", "three"], ["three", "one"]):  # .bin files of equal size, distinguished by contents
                text = tmp_path / "text.jsonl"
                text.write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
                argv = ["--input", str(text), "--output-prefix", str(tmp_path / "disk" / "new" / "data")]
                argv += ["--tokenizer-type", "ByteLevelTokenizer", "--workers", "1", "--overwrite"]
                preprocess_data.main(argv)
                recorder.promise("new/data")
    finally:
        signal.signal(signal.SIGTERM, handler)
    print(*prove({"data": (recorder.record, pair_judge(recorder.record, "new/data_text_document"))}))


def test_an_interrupted_replacement_gives_the_old_checkpoint_its_name_back(tmp_path):
    """Where folders cannot be exchanged atomically, the earlier checkpoint has another name for a moment."""
    for name in (".iter_0000001.replaced", ".iter_0000002.replaced", "iter_0000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "common.pt").write_text(name)
    clear(tmp_path)
    result = {path.name: (path / "common.pt").read_text() for path in tmp_path.iterdir()}
    assert result == {"iter_0000001": ".iter_0000001.replaced", "iter_0000002": "iter_0000002"}
