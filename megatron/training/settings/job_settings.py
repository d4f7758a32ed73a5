# SPDX-License-Identifier: Apache-2.0
"""Settings of the job: checkpoints, logs, length of the run, simulation, faults and evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.settings.flag import ABOVE_ZERO, BELOW_1, NOT_NEGATIVE, count, flag
from megatron.training.settings.read_with import (
    COPIES,
    LOAD,
    MEMORY_HISTORY,
    MLFLOW,
    PROFILE,
    PYTORCH_PROFILER,
    RECORDED,
    REPLICATION,
    SAVE,
    SPIKES,
    TENSORBOARD,
    WANDB,
)


@dataclass
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = flag(None, "folder to save checkpoints in")
    save_interval: int | None = count(None, "iterations between checkpoints", aliases=["--persistent-save-interval"])
    save_retain_interval: int | None = count(
        None, "keep older checkpoints only at multiples of this", needs=("save", "save_interval")
    )
    keep_last_checkpoints: int | None = count(None, "keep only this many of the newest checkpoints", needs=("save",))
    keep_best_checkpoints: int | None = count(
        None,
        "also keep this many checkpoints with the lowest validation loss",
        needs=("save", "save_interval", "eval_interval"),
    )
    async_save: bool = flag(
        False, "continue training while a checkpoint is written from a copy in host memory", needs=("save",)
    )
    load: str | None = flag(None, "folder to load a checkpoint from")
    universal_checkpoint: bool = flag(
        False, "DeepSpeed: --load names the folder of a universal checkpoint", needs=("load",)
    )
    ckpt_step: int | None = flag(None, "iteration to load; default the latest", range=NOT_NEGATIVE, needs=("load",))
    finetune: bool = flag(False, "load the weights only and start at iteration 0")
    reset_iteration: bool = flag(
        False,
        "Megatron-DeepSpeed: keep weights and optimizer, but count iterations, samples and tokens from 0",
        aliases=["--reset-progress"],
        needs=("load",),
    )
    pretrained_checkpoint: str | None = flag(None, "weights to start from if --load has no checkpoint")
    use_checkpoint_args: bool = flag(
        False, "take the model from the checkpoint; sizes that are given by flags still win"
    )
    exit_on_missing_checkpoint: bool = flag(False, "stop if --load has no checkpoint", needs=("load",))
    skip_damaged_checkpoints: bool = flag(
        False,
        "if files of the latest checkpoint are damaged, load the newest older one that is complete",
        needs=("load",),
    )
    save_optim: bool = flag(True, "leave the optimizer out of checkpoints", flags=["--no-save-optim"], read_with=SAVE)
    save_rng: bool = flag(True, "leave the random state out of checkpoints", flags=["--no-save-rng"], read_with=SAVE)
    load_optim: bool = flag(True, "do not load the optimizer", flags=["--no-load-optim"], read_with=LOAD)
    load_rng: bool = flag(True, "do not load the random state", flags=["--no-load-rng"], read_with=LOAD)
    non_persistent_save_interval: int | None = count(
        None, "iterations between copies of the training state in the memory of the hosts"
    )
    non_persistent_ckpt_type: str | None = flag(
        None,
        "where those copies go; only local is supported: files on each node",
        choices=["global", "local", "in_memory"],
        read_with=COPIES,
    )
    non_persistent_local_ckpt_dir: str | None = flag(
        None, "folder of the copies on each node; default: one in /dev/shm, which is in memory", read_with=COPIES
    )
    non_persistent_local_ckpt_algo: str = flag(
        "fully_parallel",
        "fully_parallel: one rank keeps what several ranks hold; atomic: each rank keeps everything it holds",
        choices=["fully_parallel", "atomic"],
        read_with=COPIES,
    )
    replication: bool = flag(False, "keep each rank's copy on another node as well", read_with=COPIES)
    replication_jump: int | None = count(
        None,
        "copies of rank n also go to ranks n + J, n + 2J, ...; default: the number of ranks of a node",
        read_with=REPLICATION,
    )
    replication_factor: int = count(
        2, "--replication: number of nodes that hold a copy, including its own node", read_with=REPLICATION
    )
    ckpt_format: str = flag(
        "torch_dist",
        "checkpoint format; torch_dist is always written",
        choices=["torch_dist", "torch", "torch_dcp", "zarr", "fsdp_dtensor"],
    )


@dataclass
class LoggingConfig:
    """Console, JSON, TensorBoard, Weights & Biases and MLflow."""

    log_interval: int = count(100, "iterations between console lines")
    log_jsonl: str | None = flag(None, "file that gets one JSON object per step")
    log_throughput: bool = flag(False, "TFLOP/s and MFU on the console line")
    log_params_norm: bool = flag(False, "norm of the parameters")
    log_num_zeros_in_grad: bool = flag(False, "count zeros in the gradients")
    log_progress: bool = flag(False, "append progress to progress.txt in --save")
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard")
    tensorboard_log_interval: int = count(1, "iterations between TensorBoard points", read_with=TENSORBOARD)
    tensorboard_queue_size: int = count(1000, "TensorBoard events held in memory", read_with=TENSORBOARD)
    wandb_project: str | None = flag(None, "Weights & Biases project", aliases=["--wandb-project-name"])
    wandb_exp_name: str | None = flag(None, "Weights & Biases run name", aliases=["--wandb-name"], read_with=WANDB)
    wandb_save_dir: str | None = flag(None, "folder for Weights & Biases", read_with=WANDB)
    wandb_entity: str | None = flag(None, "Weights & Biases entity", aliases=["--wandb-entity-name"], read_with=WANDB)
    mlflow_experiment: str | None = flag(None, "MLflow experiment", aliases=["--mlflow-project"])
    mlflow_run_name: str | None = flag(None, "MLflow run name", read_with=MLFLOW)
    mlflow_tracking_uri: str | None = flag(
        None, "where MLflow keeps runs; default its own: MLFLOW_TRACKING_URI, or ./mlruns", read_with=MLFLOW
    )
    peak_tflops: float | None = flag(
        None,
        "peak TFLOP/s of one device, for MFU; default by GPU name, or this CPU's measured GEMM rate",
        range=ABOVE_ZERO,
    )
    progress: bool = flag(True, "no progress bar", flags=["--no-progress"])
    profile: bool = flag(False, "record some steps: ranges for nsys, or traces with --use-pytorch-profiler")
    profile_step_start: int = flag(10, "--profile begins after this iteration", read_with=RECORDED, range=NOT_NEGATIVE)
    profile_step_end: int = count(12, "--profile ends after this iteration", read_with=RECORDED)
    profile_ranks: list[int] = flag(
        [0], "ranks that --profile records", nargs="+", read_with=RECORDED, range=NOT_NEGATIVE
    )
    use_pytorch_profiler: bool = flag(
        False,
        "--profile writes PyTorch's traces to --tensorboard-dir, for TensorBoard, Perfetto and compare_trace.py",
        read_with=PROFILE,
    )
    profile_shapes: bool = flag(
        False,
        "--profile records shapes",
        flags=["--pytorch-profiler-collect-shapes", "--record-shapes"],
        read_with=PROFILE,
    )
    profile_stacks: bool = flag(
        False,
        "--use-pytorch-profiler records the lines of Python",
        flags=["--pytorch-profiler-collect-callstack"],
        read_with=PYTORCH_PROFILER,
    )
    record_memory_history: bool = flag(
        False,
        "PyTorch's history of a GPU's memory, of the ranks of --profile-ranks: written after --profile-step-end, for "
        "https://pytorch.org/memory_viz",
    )
    memory_snapshot_path: str = flag(
        "snapshot.pickle", "file of --record-memory-history; rank-N- comes before its name", read_with=MEMORY_HISTORY
    )
    profile_memory: str | None = flag(
        None, "folder for a timeline of the memory of one step by kind, per rank, as JSON and as a picture"
    )
    profile_memory_step: int | None = count(
        None, "which step of this run --profile-memory records; default 2", needs=("profile_memory",)
    )


@dataclass
class RunConfig:
    """The run itself."""

    device: str = flag("auto", "where to run", choices=["auto", "cpu", "cuda"], generation=True)
    seed: int = flag(
        1234, "seed of weights, data order and dropout", range=NOT_NEGATIVE, generation=True, computes=True
    )
    deterministic_mode: bool = flag(
        False,
        "make runs repeat bit for bit on the same grid and kind of device",
        aliases=["--npu-deterministic"],
        computes=True,
    )
    train_iters: int | None = count(None, "iterations to train")
    train_samples: int | None = count(None, "samples to train, in place of --train-iters")
    train_tokens: int | None = count(
        None, "tokens to train; with --train-iters or --train-samples, the run ends at whichever comes first"
    )
    eval_interval: int | None = count(None, "iterations between evaluations")
    eval_iters: int = flag(100, "iterations of an evaluation")
    skip_train: bool = flag(False, "evaluate only")
    exit_interval: int | None = count(None, "stop at the next iteration that is a multiple of this")
    exit_duration_in_mins: int | None = count(None, "save and stop after this many minutes")
    exit_signal_handler: bool = flag(True, "save and stop on SIGTERM or SIGUSR1; always on here")
    manual_gc: bool = flag(False, "run Python's garbage collection at fixed steps only")
    manual_gc_interval: int = flag(
        0, "iterations between collections of --manual-gc", range=NOT_NEGATIVE, needs=("manual_gc",)
    )


@dataclass
class SimulationConfig:
    """A simulated cluster instead of a run."""

    dry_run: bool = flag(False, "simulate one step: memory, communication, FLOPs and, with --gpu, time")
    world_size: int | None = count(
        None, "number of processes, simulated ones with --dry-run; default: as many as were started"
    )
    gpu: str | None = flag(
        None, "--dry-run: simulate this GPU, by name or as a file; default: processes on a CPU. --elastic: plan for it"
    )
    dry_run_json: str | None = flag(
        None, "--dry-run: file for the result; pictures are written next to it", needs=("dry_run",)
    )
    dry_run_jitter: float = flag(
        0.0,
        "--dry-run: the compute time of ranks varies by this share (standard deviation over mean), drawn from --seed",
        range=BELOW_1,
        needs=("dry_run", "gpu"),
    )
    dry_run_expert_imbalance: float = flag(
        1.0, "--dry-run: tokens of the experts on the simulated rank, over the mean of all experts", needs=("dry_run",)
    )
    dry_run_every_layer: bool = flag(
        False, "--dry-run: run all layers, instead of a few that represent all", needs=("dry_run",)
    )
    dry_run_trace_events: int | None = count(
        None,
        "--dry-run-json with --gpu: largest number of kernels and transfers in the trace; default 400000",
        needs=("dry_run", "gpu", "dry_run_json"),
    )


@dataclass
class FaultConfig:
    """Bad batches, faulty memory and slow machines."""

    skip_bad_batches: int = flag(
        0,
        "skip up to this many batches whose loss or gradient norm is not finite (or a spike): such a step changes no "
        "weight; one more ends the run",
        range=NOT_NEGATIVE,
    )
    rollback_on_bad_batch: bool = flag(
        False, "--skip-bad-batches: return to the weights of the last checkpoint, and skip all batches since then"
    )
    iterations_to_skip: list[int] | None = flag(
        None, "skip the batches that follow these iterations", nargs="+", range=NOT_NEGATIVE
    )
    check_for_spiky_loss: bool = flag(
        False, "a spike of the loss makes a batch bad; without --skip-bad-batches it is only reported"
    )
    check_for_large_grads: bool = flag(False, "a spike of the gradient norm makes a batch bad too")
    spike_factor: float = flag(
        10.0, "a spike is above this many times the median of the last 100 good steps", read_with=SPIKES
    )
    check_weight_hash_across_dp_replicas_interval: int | None = count(
        None, "iterations between comparisons of the weights that several ranks hold"
    )
    log_straggler: bool = flag(
        False,
        "report ranks that compute a fifth longer than the median rank and, after a slow step, links between nodes "
        "that have become slow",
    )


# Tasks of --eval-tasks, in addition to the loss on held-out data. GENERATED: tasks whose samples are generated.
GENERATED = ("needle", "ruler-multi-key", "ruler-variable-tracking", "ruler-common-words")
TASKS = ("loss-by-position", *GENERATED, "perplexity", "scores")


@dataclass
class EvaluationConfig:
    """Tasks of tools/evaluate.py, and of training at each --eval-interval."""

    eval_tasks: list[str] | None = flag(None, f"tasks: {', '.join(TASKS)}", nargs="+")
    eval_lengths: list[int] | None = count(
        None,
        "needle and ruler-*: lengths of the samples in tokens; default: --seq-length, a half, a quarter and an eighth "
        "of it, without lengths below 512 or too short for the task",
        nargs="+",
    )
    eval_depths: int = count(11, "needle: number of depths in the haystack, evenly from its start to its end")
    eval_samples: int = count(
        4, "needle: samples per length and depth; ruler-*: samples per length, times --eval-depths"
    )
    eval_haystack: str | None = flag(
        None, "needle and ruler-*: text file to hide facts in; default: twelve plain sentences, in random order"
    )
    eval_files: list[str] | None = flag(
        None, "perplexity: text files; scores: chats or pairs of answers, as for --sft and --dpo", nargs="+"
    )
    eval_stride: int | None = count(
        None, "perplexity: tokens from one window to the next; default --seq-length, no overlap"
    )
    eval_output: str | None = flag(
        None, "folder for evaluation.json and pictures; default of tools/evaluate.py: out/evaluation"
    )
