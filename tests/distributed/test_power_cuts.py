# SPDX-License-Identifier: Apache-2.0
"""Power cuts at any moment of a save: reported checkpoints are complete, and every sync is necessary for that."""

import random
from pathlib import Path

import pytest

from megatron.training.checkpoint.checkpoint_folder import REPLACED
from megatron.training.checkpoint.megatron_lm.places import TRACKER
from megatron.training.refusal import Refusal
from tests.disk import Recorder, lay_out, prove, try_all_cuts
from tests.distributed.training_runs import make_job, run_loop, save_job, train_job

pytestmark = pytest.mark.lab

TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--vocab-size 29 --ffn-hidden-size 16"
)


SAVE = "new/c"  # neither folder exists before


class PromiseRecorder:
    """Replaces a reporter; its lines are promises to the user."""

    def __init__(self, recorder):
        self.recorder = recorder

    def say(self, line):
        if line.startswith(" > saved "):
            self.recorder.promise(Path(line.split()[2]).name)

    def step(self, *_, **__):
        pass

    evaluation = step


def trained(flags, root, lock):
    """Run the real loop; the record of this rank."""
    import torch.distributed as dist

    job, recorder = make_job(f"{TINY} {flags}"), Recorder(root, lock)
    dist.barrier()
    with recorder:
        reporter = PromiseRecorder(recorder)
        if dist.get_rank():
            reporter.say = lambda line: None
        run_loop(job, reporter)
    return recorder.record


def saved_twice(root, lock, exchange):
    """Save the same iteration twice, with other weights the second time."""
    from megatron.training.checkpoint import checkpoint_folder

    job = make_job(TINY)
    real = checkpoint_folder._exchange
    checkpoint_folder._exchange = real if exchange else lambda *_: False
    try:
        with Recorder(root, lock) as recorder:
            for _ in range(2):
                train_job(job, 1)
                job.progress.iteration = 1
                recorder.promise(save_job(f"{root}/{SAVE}", job).name)
    finally:
        checkpoint_folder._exchange = real
    return recorder.record


def inside(tree, folder):
    """The contents of a folder in a state; None if it does not exist."""
    if folder not in tree:
        return None
    return {path.removeprefix(f"{folder}/"): key for path, key in tree.items() if path.startswith(f"{folder}/")}


def restored(state):
    """The state after the next run has restored an interrupted replacement of a checkpoint."""
    for path in [path for path in state if path.startswith(f"{SAVE}/.") and path.endswith(REPLACED)]:
        final = f"{SAVE}/{path.removeprefix(f'{SAVE}/.').removesuffix(REPLACED)}"
        if final not in state:
            state = {
                f"{final}{name[len(path) :]}" if f"{name}/".startswith(f"{path}/") else name: key
                for name, key in state.items()
            }
    return state


def judge_of(record):
    """The error in a state of the disk, judged by names and contents."""
    versions = {}  # by name: (event, files)
    for number, event in enumerate(record.events):
        if event.promise:
            files = inside({path: content for path, (_, content) in event.entries.items()}, f"{SAVE}/{event.label}")
            versions.setdefault(event.label, []).append((number, files))

    def judge(cut, state):
        state = restored(state)
        for path in state:
            folder, _, name = path.rpartition("/")
            if folder == SAVE and name.startswith("iter_"):
                result = inside(state, path)
                if result not in [files for _, files in versions[name]]:
                    return f"{name} is not whole"
        since, saved = cut.promises[-1] if cut.promises else (0, "")
        latest = ""
        if f"{SAVE}/{TRACKER}" in state:
            written = record.contents.get(state[f"{SAVE}/{TRACKER}"], b"")
            latest = f"iter_{int(written):07d}" if written.isdigit() else "nothing"
            if f"{SAVE}/{latest}" not in state:
                return f"the tracker names {latest}, which is not there"
        if latest < saved:
            return f"{saved} was reported as saved, but the tracker names {latest or 'nothing'}"
        result = inside(state, f"{SAVE}/{latest}")
        if saved and latest == saved and result not in [files for number, files in versions[saved] if number >= since]:
            return f"{saved} has its earlier contents"
        for name in {name for _, name in cut.promises}:
            if f"{SAVE}/{name}" in cut.logical and f"{SAVE}/{name}" not in state:
                return f"{name} is gone"
        return None

    return judge


RUNS = {
    "during training": (
        2,
        "--exit-interval 2 --save-interval 1 --eval-interval 1 --eval-iters 1 --async-save --zero-stage 1 "
        "--keep-last-checkpoints 1 --keep-best-checkpoints 1",
    ),
    "new folder": (1, "--exit-interval 2 --save-interval 1 --keep-last-checkpoints 1"),
}


@pytest.fixture(scope="module")
def recorded(pool, tmp_path_factory):
    made = {}

    def record(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("disk")
            (folder / "disk").mkdir()
            root, lock = folder / "disk", folder / "lock"
            if name in RUNS:
                world, flags = RUNS[name]
                records = pool.run(trained, world, f"{flags} --save {root}/{SAVE}", root, lock, timeout=120)
                made[name] = sum(records[1:], records[0])
            else:
                made[name] = pool.run(saved_twice, 1, root, lock, name == "twice")[0]
        return made[name]

    return record


def test_after_any_power_cut_reported_saves_are_complete_and_each_sync_is_needed(recorded):
    records = {name: recorded(name) for name in [*RUNS, "twice", "twice, no exchange"]}
    print(*prove({name: (record, judge_of(record)) for name, record in records.items()}), sep="\n")


def loaded(folder):
    """The iteration that ``--load`` finds, or the refusal."""
    try:
        return make_job(f"{TINY} --save {folder} --load {folder}").progress.iteration
    except Refusal as refusal:
        return str(refusal)


@pytest.mark.parametrize("name", ["during training", "twice, no exchange"])
def test_the_program_finds_in_a_state_what_its_judge_says(pool, recorded, tmp_path, name):
    """Write some good and some bad states as real files, and load them."""
    record, draw = recorded(name), random.Random(0)
    judge, good, bad, contents = judge_of(record), [], [], {}

    def collect(cut, state):
        if cut.promises and draw.random() < 0.2:
            saved, wrong = cut.promises[-1][1], judge(cut, state)
            if wrong is None:
                good.append((saved, state))
            elif wrong.startswith((f"{saved} is not whole", "the tracker names")):  # without a tracker it may be loaded
                bad.append((saved, state))

    for number, event in enumerate(record.events):
        if event.label.startswith((f"{SAVE}/.iter_N.partial/common.pt", f"{SAVE} by")):
            contents |= try_all_cuts(record.without(number), collect, number).contents
    for number, (saved, state) in enumerate(draw.sample(good, 3) + draw.sample(bad, 3)):
        lay_out(state, contents, tmp_path / str(number))
        result, least = pool.run(loaded, 1, str(tmp_path / str(number) / SAVE))[0], int(saved[5:])
        if number < 3:
            assert isinstance(result, int) and result >= least, (saved, result)
        else:  # refused, unless a newer one of the run is complete
            assert isinstance(result, str) or result > least, (saved, result)
