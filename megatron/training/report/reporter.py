# SPDX-License-Identifier: Apache-2.0
"""Writes the reports of a run: console lines, a progress bar, JSON lines, TensorBoard, Weights & Biases, MLflow.

A number has the same name in all logs: that of --log-jsonl.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import Any, TextIO

from tqdm import tqdm

from megatron.system.whole_file import is_special, whole_file
from megatron.training.refusal import Refusal, reason, refusing
from megatron.training.settings.config import Config, LoggingConfig

logger = logging.getLogger(__name__)
FLAGS = {"tensorboard": "--tensorboard-dir", "wandb": "--wandb-project", "mlflow": "--mlflow-experiment"}


class Reporter:
    """Writes on the rank that is ``active``; on the others every method does nothing."""

    def __init__(self, config: Config, *, active: bool, first_iteration: int, last_iteration: int) -> None:
        self.active, self.config = active, config
        self.first, self.last = first_iteration, last_iteration
        self.started = self.window_started = time.perf_counter()
        self.window: list[dict[str, Any]] = []
        self.jsonl: TextIO | None = None
        self.bar: tqdm | None = None
        self.tensorboard: Any = None
        self.wandb: Any = None
        self.mlflow: Any = None
        self.skipped = 0
        if active:
            self._open()

    def _open(self) -> None:
        settings = self.config.logging
        if settings.log_jsonl:
            self.jsonl = _open_for_rows(settings.log_jsonl, self.first)
        if settings.progress and sys.stderr.isatty():
            self.bar = tqdm(total=self.last, initial=self.first, unit="step", dynamic_ncols=True)
        if settings.tensorboard_dir:
            with refusing(f"--tensorboard-dir {settings.tensorboard_dir}", OSError):
                self.tensorboard = _start_tensorboard(settings, self.first)
        if settings.wandb_project:
            wandb = _imported("wandb", "--wandb-project", "Weights & Biases")
            self._attempt("wandb", lambda: setattr(self, "wandb", _start_wandb(wandb, self.config)))
        if settings.mlflow_experiment:
            mlflow = _imported("mlflow", "--mlflow-experiment", "MLflow")
            self._attempt("mlflow", lambda: setattr(self, "mlflow", _start_mlflow(mlflow, self.config)))

    def say(self, line: str) -> None:
        """One line on the console, above the progress bar."""
        if self.active:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def step(self, row: dict[str, Any], *, learning_rate: float, loss_scale: float, extra: dict[str, float]) -> None:
        """Report one training step; ``row`` has the fields of --log-jsonl."""
        if not self.active:
            return
        self._write_row(row)
        iteration = row["iteration"]
        self.window.append(row)
        self.skipped += bool(extra.pop("skipped", False))
        if self.bar is not None:
            self.bar.update(1)
            self.bar.set_postfix(loss=f"{row['lm_loss']:.4f}")
        scalars = {
            **{k: v for k, v in row.items() if k != "iteration" and not isinstance(v, list)},
            "learning_rate": learning_rate,
            **extra,
        }
        self._scalars(scalars, iteration)
        if iteration % self.config.logging.log_interval == 0 or iteration == self.last:
            self.say(self._line(row, learning_rate, loss_scale, extra))
            self.window, self.skipped, self.window_started = [], 0, time.perf_counter()

    def evaluation(self, iteration: int, name: str, loss: float) -> None:
        """Report the loss on validation or test data."""
        if not self.active:
            return
        perplexity = math.exp(min(loss, 20.0))
        self.say(f" {name} loss at iteration {iteration}: lm loss {loss:.6E} | perplexity {perplexity:.6E}")
        self._scalars({f"{name}_loss": loss}, iteration)

    def _write_row(self, row: dict[str, Any]) -> None:
        """Write a row. If that fails, for example on a full disk, the run continues without the log."""
        if self.jsonl is None:
            return
        finite = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
        try:
            self.jsonl.write(json.dumps(finite) + "\n")
            self.jsonl.flush()
        except OSError as error:
            self.say(f" WARNING: --log-jsonl {self.jsonl.name}: {error.strerror}; going on without it")
            with contextlib.suppress(OSError):
                self.jsonl.close()
            self.jsonl = None

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.jsonl is not None:
            with contextlib.suppress(OSError):  # each row has been flushed
                self.jsonl.close()
        if self.tensorboard is not None:
            self._attempt("tensorboard", self.tensorboard.close)
        if self.wandb is not None:
            self._attempt("wandb", self.wandb.finish)
        if self.mlflow is not None:
            self._attempt("mlflow", self.mlflow.end_run)

    def _attempt(self, writer: str, action: Callable[[], object]) -> None:
        """Call another program's logger. If that fails for any reason, the run continues without that log."""
        try:
            action()
        except Exception as error:
            flag = FLAGS[writer]
            self.say(f" WARNING: {flag}: {reason(error)}; going on without it")
            setattr(self, writer, None)

    def _scalars(self, values: dict[str, float], iteration: int) -> None:
        if self.tensorboard is not None and iteration % self.config.logging.tensorboard_log_interval == 0:
            self._attempt("tensorboard", lambda: self._to_tensorboard(values, iteration))
        if self.wandb is not None:
            self._attempt("wandb", lambda: self.wandb.log(values, step=iteration))
        if self.mlflow is not None:
            numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
            self._attempt("mlflow", lambda: self.mlflow.log_metrics(numbers, step=iteration))

    def _to_tensorboard(self, values: dict[str, float], iteration: int) -> None:
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, iteration)

    def _line(self, row: dict[str, Any], learning_rate: float, loss_scale: float, extra: dict[str, float]) -> str:
        losses = [step["lm_loss"] for step in self.window if "bad_batch" not in step] or [row["lm_loss"]]
        milliseconds = sum(step["iteration_ms"] for step in self.window) / len(self.window)
        since = time.perf_counter() - self.started
        seconds_left = since / max(row["iteration"] - self.first, 1) * (self.last - row["iteration"])
        parts = [
            f" iteration {row['iteration']:8d}/{self.last:8d}",
            f"elapsed time per iteration (ms): {milliseconds:.1f}",
            f"tokens per second: {row['tokens'] / milliseconds * 1000:.0f}",
            f"learning rate: {learning_rate:.6E}",
            f"lm loss: {sum(losses) / len(losses):.6E}",
            f"grad norm: {row['grad_norm']:.3f}",
        ]
        if self.config.optimizer.fp16:
            parts.append(f"loss scale: {loss_scale:.1f} | skipped iterations: {self.skipped}")
        if self.config.logging.log_throughput:
            parts.append(f"TFLOP/s/device: {row['model_tflops_per_device']:.3f} | MFU: {100 * row['mfu']:.1f} %")
        parts += [f"{name if ' ' in name else name.replace('_', ' ')}: {value:g}" for name, value in extra.items()]
        return " | ".join([*parts, f"time left: {duration(seconds_left)}"])


def duration(seconds: float) -> str:
    """A duration as h:mm:ss."""
    minutes, remaining = divmod(int(round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{remaining:02d}"


def _open_for_rows(path: str, first_iteration: int) -> TextIO:
    """Open a JSONL file to continue after ``first_iteration``; drops the rows that this run will write again.

    Something else than a file, such as a pipe or /dev/null, is only written to.
    """
    with refusing(f"--log-jsonl {path} cannot be written", OSError):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        if not is_special(path):
            with whole_file(path) as file:
                if os.path.exists(path) and first_iteration > 0:
                    with open(path, "rb") as rows:
                        file.writelines(line for line in rows if _iteration_of(line) <= first_iteration)
        return open(path, "a", encoding="utf-8")


def _iteration_of(line: bytes) -> float:
    """The iteration of a row; infinite for the incomplete last line of a killed run, and for what is no row."""
    try:
        number = json.loads(line)["iteration"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return number if isinstance(number, int | float) else math.inf


def _start_tensorboard(settings: LoggingConfig, first: int) -> Any:
    """A writer whose thread prints no error, because the next call raises it. Earlier runs' later steps are hidden."""
    from torch.utils.tensorboard import SummaryWriter

    before = set(threading.enumerate())
    purge = first + 1 if first else None
    writer = SummaryWriter(settings.tensorboard_dir, purge_step=purge, max_queue=settings.tensorboard_queue_size)
    threads, default = set(threading.enumerate()) - before, threading.excepthook
    threading.excepthook = lambda error: None if error.thread in threads else default(error)
    return writer


def _imported(package: str, flag: str, name: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise Refusal(f"{flag} needs {name}: pip install {package}, or leave the flag out") from None


def _start_mlflow(mlflow: Any, config: Config) -> Any:
    settings = config.logging
    if settings.mlflow_tracking_uri is not None:
        mlflow.set_tracking_uri(settings.mlflow_tracking_uri)
    mlflow.set_experiment(settings.mlflow_experiment)
    mlflow.start_run(run_name=settings.mlflow_run_name)
    sections = asdict(config).items()
    mlflow.log_params(
        {f"{section}.{name}": value for section, values in sections if isinstance(values, dict)
         for name, value in values.items() if value is not None}
    )  # fmt: skip
    return mlflow


def _start_wandb(wandb: Any, config: Config) -> Any:
    settings = config.logging
    return wandb.init(
        project=settings.wandb_project,
        name=settings.wandb_exp_name,
        dir=settings.wandb_save_dir,
        entity=settings.wandb_entity,
        config=asdict(config),
    )
