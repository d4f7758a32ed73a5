# SPDX-License-Identifier: Apache-2.0
"""--keep-best-checkpoints: the checkpoint with the lowest validation loss stays, after a restart too."""

import json

from tests.distributed.training_runs import make_job

SMALL = "--num-layers 1 --hidden-size 32 --num-attention-heads 4"


def trained(flags, losses):
    """Run the real loop; validation losses are as told, by iteration."""
    from megatron.training import loop
    from megatron.training.features import held_out
    from megatron.training.features.stopping import Stopper
    from megatron.training.report.reporter import Reporter

    def evaluate(job, reporter, name, dataset):
        return {f"{name}_loss": losses[job.progress.iteration - 1]}

    job, real = make_job(f"{SMALL} {flags}"), held_out.evaluate_on
    stopper = Stopper(job.runtime.device, None)
    held_out.evaluate_on = evaluate
    try:
        reporter = Reporter(job.config, active=False, first_iteration=0, last_iteration=job.iterations)
        return job.progress.iteration, loop.training_loop(job, reporter, stopper)
    finally:
        held_out.evaluate_on = real
        stopper.restore()


def test_the_best_stays_over_restarts(pool, tmp_path):
    flags = (
        f"--train-iters 7 --save {tmp_path} --load {tmp_path} --save-interval 1 --eval-interval 1 --eval-iters 1 "
        "--async-save --keep-last-checkpoints 1 --keep-best-checkpoints 1 --zero-stage 1"
    )
    losses = [3.0, 1.0, 2.0, 4.0, 1.5, float("nan"), 5.0]

    def there():
        return sorted(int(path.name[5:]) for path in tmp_path.glob("iter_*"))

    assert pool.run(trained, 2, f"{flags} --exit-interval 4", losses, timeout=120)[0] == (0, True)
    assert there() == [2, 4]
    assert json.loads((tmp_path / "iter_0000002" / "validation_loss.json").read_text()) == {"validation_loss": 1.0}
    assert "validation_loss.json" in json.loads((tmp_path / "iter_0000002" / "checksums.json").read_text())["files"]
    assert pool.run(trained, 2, flags, losses, timeout=120)[0] == (4, True)
    assert there() == [2, 7]
