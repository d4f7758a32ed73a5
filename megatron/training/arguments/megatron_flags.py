# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron-LM and DeepSpeed that are not settings of ours, and what becomes of each.

A *hint* cannot change the result: it is accepted and one line says so. Any other flag is *refused* with the reason or
the flag to use instead, unless its value is Megatron-LM's default, which asks for nothing. Flags that are settings of
ours are in `config.py` and not here. Table rows read ``--flag [values] [default]``: how many values the flag takes
(none, 1, 3, + or *) and Megatron-LM's default; ``same`` marks a flag that spells out its default.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

from megatron.training.arguments import fork_flags, other_names
from megatron.training.arguments.words import options
from megatron.training.refusal import Refusal, Refusals


class Row(NamedTuple):
    """One flag of the tables."""

    flag: str
    values: str
    default: str | None
    verdict: str
    reason: str


@cache
def rows() -> dict[str, Row]:
    """The tables, by flag."""
    table = {}
    hints, refused = HINTS + fork_flags.HINTS, REFUSED + fork_flags.REFUSED + other_names.REFUSED
    for verdict, groups in (("hint", hints), ("refused", refused)):
        for reason, text in groups:
            for entry in text.replace("\n", " ").split(" --"):
                if not (words := entry.split()):
                    continue
                flag = "--" + words[0].removeprefix("--")
                values = words[1] if len(words) > 1 else "0"
                table[flag] = Row(flag, values, words[2] if len(words) > 2 else None, verdict, reason)
    return table


def judge(given: list[tuple[str, list[str]]]) -> list[str]:
    """Notes on the hints among the flags given, with their values; one line a reason.

    Raises:
        Refusal: a refused flag is among them with a value other than Megatron-LM's default.
    """
    table, hints, refused = rows(), {}, {}
    for flag, values in given:
        row = table[flag]
        if row.default is not None and _same(values, row.default):
            continue
        flags = (hints if row.verdict == "hint" else refused).setdefault(row.reason, [])
        if flag not in flags:
            flags.append(flag)
    if refused:
        raise Refusals([f"{', '.join(flags)}: {reason}" for reason, flags in refused.items()])
    return [f"no effect here: {', '.join(flags)} ({reason})" for reason, flags in hints.items()]


def unknown(words: list[str], supported: list[str], given: list[str] | None = None) -> None:
    """Refuse what no table knows, with the nearest flag that one does.

    Args:
        words: those that nothing reads.
        supported: the flags that set a setting.
        given: the whole command line.

    Raises:
        Refusal: there is anything in ``words``.
    """
    flags = [word.split("=")[0] for word in words if word.startswith("-") and word.strip("-")]
    if words and not flags:
        before = next((flag for flag, *values in options(given or []) if words[0] in values), None)
        after = f" after {before}" if before else ""
        raise Refusal(f"{words[0]!r}{after} belongs to no flag: quote values that hold spaces")
    if flags:
        raise Refusals([f"{flag} is not a known flag{_nearest(flag, supported)}" for flag in dict.fromkeys(flags)])


def _nearest(flag: str, supported: list[str]) -> str:
    return _suggestion(flag, tuple(supported))


@cache
def _suggestion(flag: str, supported: tuple[str, ...]) -> str:
    """The flag that is meant, as far as it can be told: never one that is refused."""
    word, table = flag.strip("-").replace("_", "-").lower(), rows()
    for row in (table.get("--" + word), table.get("--" + word.replace("-", "_"))):
        if row is not None and row.verdict == "refused":
            return f": {row.reason}"
    known = [name[2:] for name in supported] + [name[2:] for name, row in table.items() if row.verdict == "hint"]
    own = [name[2:] for name in supported]
    longer = [name for name in known if name.startswith(f"{word}-") and len(word) > 7]
    if word in known:
        near = [word]
    else:
        near = get_close_matches(word, own, 1, 0.9) or longer if len(longer) == 1 else []
        near = near or get_close_matches(word, own, 1, 0.8) or get_close_matches(word, known, 1, 0.8)
    if not near:  # the same words, in another order or with one more or less
        parts = set(word.split("-"))
        likeness = {name: len(parts & set(name.split("-"))) / len(parts | set(name.split("-"))) for name in known}
        near = [name for name in likeness if likeness[name] == max(likeness.values()) >= 0.6][:1]
    return f": did you mean --{near[0]}?" if near else ": --help lists them"


def _same(values: list[str], default: str) -> bool:
    if not values:
        return default == "same"
    try:
        return [float(value) for value in values] == [float(default)]
    except ValueError:
        return values == [default]


HINTS: tuple[tuple[str, str], ...] = (
    ("models are always built by megatron-core", "--use-mcore-models"),
    ("it switches nothing on by itself", "--enable-experimental"),
    ("files are read from the file system", "--disable-msc"),
    (
        "the attention kernel is chosen with --attention-kernel",
        "--attention-backend 1 auto --use-flash-attn --use-flash-attn-v1 --use-flash-attn-v2 --use-flash-attn-triton",
    ),
    (
        "fused or not, the result is the same",
        """
        --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
        --no-rope-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion --cross-entropy-loss-fusion
        --cross-entropy-fusion-impl 1 native --disable-jit-fuser --use-te-activation-func
        --use-fused-weighted-squared-relu --no-gradient-reduce-div-fusion
        """,
    ),
    (
        "communication and computation overlap by other means here",
        """
        --no-async-tensor-model-parallel-allreduce --disable-async-tensor-model-parallel-allreduce --tp-comm-overlap
        --tp-comm-overlap-cfg 1 --tp-comm-bootstrap-backend 1 nccl --tp-comm-overlap-rs-dgrad --no-tp-comm-bulk-wgrad
        --disable-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag
        --disable-tp-comm-overlap-ag --no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs --no-tp-comm-split-ag
        --disable-tp-comm-split-ag --no-tp-comm-split-rs --disable-tp-comm-split-rs --delay-wgrad-compute
        --use-ring-exchange-p2p --defer-embedding-wgrad-compute --wgrad-deferral-limit 1 0
        --overlap-p2p-communication-warmup-flush --no-overlap-p2p-communication
        --microbatch-group-size-per-virtual-pipeline-stage 1 --overlap-param-gather-with-optimizer-step
        --no-align-grad-reduce --no-align-param-gather --no-scatter-gather-tensors-in-pipeline
        """,
    ),
    (
        "how process groups and buckets are tuned does not change the result",
        """
        --pipeline-model-parallel-comm-backend 1 --ddp-num-buckets 1 --ddp-pad-buckets-for-high-nccl-busbw
        --ddp-average-in-collective --use-nccl-ub --disable-symmetric-registration --use-sharp --sharp-enabled-group 1
        --create-all-gather-group --nccl-communicator-config-path 1 --high-priority-stream-groups *
        --distributed-timeout-seconds-after-init 1 --disable-gloo-process-groups --disable-gloo-group
        """,
    ),
    ("ranks are always ordered TP < Ulysses < Ring < DP < PP", "--use-tp-pp-dp-mapping"),
    ("the local rank is read from LOCAL_RANK", "--local-rank 1 0 --local_rank 1"),
    (
        "weights are always initialised, and do not depend on the grid",
        "--no-initialization --use-cpu-initialization --init-model-with-meta-device",
    ),
    ("random streams do not depend on this here", "--te-rng-tracker --inference-rng-tracker"),
    (
        "always so here: softmax and loss are in fp32, gradients too unless --grad-reduce-in-bf16",
        "--attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32 --apply-query-key-layer-scaling",
    ),
    ("always so here: the loss is the mean over the tokens of the global batch", "--calculate-per-token-loss"),
    ("no dense attention mask is made here", "--no-create-attention-mask-in-dataloader"),
    (
        "memory is managed without it",
        """
        --empty-unused-memory-level 1 0 --no-clone-scatter-output-in-embedding
        --disable-clone-scatter-output-in-embedding --distribute-saved-activations --reuse-grad-buf-for-mxfp8-param-ag
        """,
    ),
    ("weights are gathered in bf16 and cast to FP8 where they are used", "--fp8-param-gather"),
    ("Transformer Engine no longer reads it", "--fp8-interval 1 1"),
    (
        "checkpoints are always torch_dist, fully reshardable, written and read in parallel, and loaded strictly",
        """
        --no-ckpt-fully-parallel-save --disable-ckpt-fully-parallel-save --ckpt-fully-parallel-save
        --ckpt-fully-parallel-load --ckpt-assume-constant-structure --use-persistent-ckpt-worker
        --auto-detect-ckpt-format --dist-ckpt-strictness 1 assume_ok_unexpected --dist-ckpt-optim-fully-reshardable
        --distrib-optim-fully-reshardable-mem-efficient --use-dist-ckpt
        """,
    ),
    (
        "the tokenizer always comes from the flags, and no code from its folder is run",
        """
        --no-use-tokenizer-model-from-checkpoint-args --disable-use-tokenizer-model-from-checkpoint-args
        --trust-remote-code --legacy-tokenizer --tokenizer-hf-use-fast
        """,
    ),
    (
        "data loading is tuned with --num-workers and --data-cache-path",
        """
        --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap --per-dataset-sequences-path 1
        --exit-signal-handler-for-dataloader --data-impl 1 mmap
        """,
    ),
    ("the schedule of the loop is fixed", "--no-manual-gc-eval --disable-manual-gc-eval --train-sync-interval 1"),
    (
        "what is logged is set by --log-interval, --log-jsonl, --tensorboard-dir and --wandb-project",
        """
        --timing-log-level 1 0 --timing-log-option 1 minmax --log-timers-to-tensorboard
        --no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard --log-validation-ppl-to-tensorboard
        --log-memory-to-tensorboard --log-memory-interval 1 --log-device-memory-used --log-max-attention-logit
        --no-barrier-with-level-1-timing --log-world-size-to-tensorboard --logging-level 1 --log-energy --log-straggler
        --straggler-ctrlr-port 1 65535 --straggler-minmax-count 1 1 --disable-straggler-on-startup
        --run-workload-inspector-server --config-logger-dir 1 --no-one-logger --one-logger-project 1 megatron-lm
        --one-logger-run-name 1 --one-logger-async --app-tag-run-name 1 --app-tag-run-version 1 0.0.0
        --log-batch-size-to-tensorboard --log-optimizer-states-to-tensorboard
        """,
    ),
    (
        "no profile is written",
        """
        --profile --profile-step-start 1 10 --profile-step-end 1 12 --use-pytorch-profiler --profile-ranks + 0
        """,
    ),
    (
        "where memory goes is shown by --profile-memory",
        "--record-memory-history --memory-snapshot-path 1 snapshot.pickle",
    ),
    ("a checkpoint is written whole before training goes on", "--async-save"),
    (
        "a dense model has none of it: --num-experts is what asks for experts",
        """
        --expert-model-parallel-size 1 1 --expert-tensor-parallel-size 1 --moe-extended-tp
        --moe-shared-expert-intermediate-size 1 --moe-shared-expert-gate --moe-shared-expert-overlap
        --moe-ffn-hidden-size 1 --moe-router-topk 1 2 --moe-enable-routing-replay --moe-router-padding-for-quantization
        --moe-router-padding-for-fp8 --moe-router-num-groups 1 --moe-router-group-topk 1 --moe-router-pre-softmax
        --moe-router-topk-scaling-factor 1 --moe-router-score-function 1 softmax --moe-router-dtype 1
        --moe-router-enable-expert-bias --moe-router-bias-update-rate 1 0.001 --moe-router-force-load-balancing
        --moe-grouped-gemm --moe-use-legacy-grouped-gemm --moe-z-loss-coeff 1 --moe-input-jitter-eps 1
        --moe-token-dispatcher-type 1 allgather --moe-enable-deepep --moe-flex-dispatcher-backend 1 deepep
        --moe-per-layer-logging --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity
        --moe-token-drop-policy 1 probs --moe-layer-recompute --moe-permute-fusion --moe-router-fusion
        --moe-apply-probs-on-input --moe-latent-size 1 --moe-deepep-num-sms 1 20 --moe-hybridep-num-sms 1 16
        --moe-layer-freq 1 1 --moe-use-upcycling --moe-router-load-balancing-type + aux_loss --moe-aux-loss-coeff + 0.0
        --moe-upcycling-granularity 1 1 --moe-pad-experts-for-cuda-graph-inference --overlap-moe-expert-parallel-comm
        --ep-overlap-early-attn-memory-release
        """,
    ),
    (
        "without --multi-latent-attention nothing reads it",
        """
        --q-lora-rank 1 --kv-lora-rank 1 32 --qk-head-dim 1 128 --qk-pos-emb-head-dim 1 64 --v-head-dim 1 128
        --cache-mla-latents
        """,
    ),
    ("without --mtp-num-layers nothing reads it", "--mtp-standalone --mtp-loss-scaling-factor 1 0.1"),
    (
        "without --optimizer muon nothing reads it",
        """
        --muon-momentum 1 0.9 --muon-no-split-qkv --muon-use-nesterov --muon-scale-mode 1 spectral
        --muon-fp32-matmul-prec 1 medium --muon-num-ns-steps 1 5 --muon-tp-mode 1 blockwise
        --muon-extra-scale-factor 1 1.0
        """,
    ),
    (
        "without --optimizer-cpu-offload nothing reads it",
        """
        --optimizer-offload-fraction 1 1.0 --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d
        --no-pin-cpu-grads --no-pin-cpu-params
        """,
    ),
    (
        "without --fim-data nothing reads it",
        """
        --fim-rate 1 0.5 --fim-spm-rate 1 0.5 --fim-split-sample 1 --fim-fragment-rate 1 --fim-no-prefix 1
        --fim-prefix-token 1 <fim_prefix> --fim-middle-token 1 <fim_middle> --fim-suffix-token 1 <fim_suffix>
        --fim-pad-token 1 <fim_pad> --fim-eod-token 1 <|endoftext|>
        """,
    ),
    (
        "of such checks this program has one: it stops where the loss or the gradient norm is not finite",
        """
        --check-for-large-grads --check-for-spiky-loss --check-weight-hash-across-dp-replicas-interval 1 --test-mode
        """,
    ),
    (
        "how memory and messages of FSDP are tuned does not change the result",
        """
        --outer-dp-sharding-strategy 1 no_shard --fsdp-manual-registration --fsdp-double-buffer
        --suggested-communication-unit-size 1 --keep-fp8-transpose-cache --enable-full-sharding-in-hsdp
        --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load
        """,
    ),
    (
        "states are split over all of DP x CP here, to the same result",
        "--num-distributed-optimizer-instances 1 1",
    ),
    ("Megatron-LM no longer reads it", "--dist-ckpt-format 1 torch_dist"),
    ("every sample of the data is read, none is spared", "--mid-level-dataset-surplus 1 0.005"),
    (
        "no step is run twice to look for faulty hardware, and no fault is feigned",
        """
        --rerun-mode 1 validate_results --result-rejected-tracker-filename 1 --error-injection-rate 1 0
        --error-injection-type 1 transient_error
        """,
    ),
    ("RoPE, or no positions, is --position-embedding-type", "--no-position-embedding"),
)

REFUSED: tuple[tuple[str, str], ...] = (
    ("mixtures of experts are not built here: leave it out", "--num-experts 1 1"),
    ("multi-latent attention is not built here: leave it out", "--multi-latent-attention"),
    (
        "it is of multi-latent attention: use --position-embedding-type yarn and --yarn-rotary-scaling-factor",
        "--rotary-scaling-factor 1 1.0",
    ),
    (
        "it is of multi-latent attention: use --position-embedding-type yarn with --yarn-mscale, --yarn-mscale-all-dim",
        "--mscale 1 1.0 --mscale-all-dim 1 0.0",
    ),
    ("multi-token prediction is not built here: leave it out", "--mtp-num-layers 1"),
    (
        "the optimizers built here are adam and sgd, on the training device: leave it out",
        """
        --apply-wd-to-qk-layernorm --no-weight-decay-cond-type 1 --optimizer-cpu-offload
        """,
    ),
    (
        "what this writes is not written here: leave it out",
        "--save-wgrads-interval 1 --save-dgrads-interval 1 --dump-param-to-param-group-map 1",
    ),
    ("the weights are made at once here: leave it out", "--lazy-mpu-init 1"),
    (
        "samples are whole stretches of text here, without fill-in-the-middle: leave it out",
        "--fim-data",
    ),
    ("data files are on a file system here: leave it out", "--object-storage-cache-path 1"),
    (
        "this way of reading data is not built here: leave it out",
        "--allow-ambiguous-pad-tokens",
    ),
    ("all layers have the same mask: leave it out", "--window-attn-skip-freq 1"),
    (
        "use --fpdt, or --recompute-granularity full --offload-checkpoints, to keep activations in host memory",
        """
        --cpu-offloading-num-layers 1 0 --fine-grained-activation-offloading --offload-modules +
        --min-offloaded-tensor-size 1 1048576
        """,
    ),
    ("megatron-core 0.16 has no such layer: leave it out", "--apply-residual-connection-post-layernorm"),
    ("use --dry-run --world-size N", "--fake-process-group"),
    ("use --num-layers", "--decoder-num-layers 1"),
    ("use --seq-length", "--decoder-seq-length 1"),
    ("use --data-path", "--data-args-path 1"),
    ("use --train-data-path, --valid-data-path and --test-data-path", "--per-split-data-args-path 1"),
    (
        "use tools/convert_hf.py",
        "--ckpt-convert-format 1 --ckpt-convert-save 1 --ckpt-convert-update-legacy-dist-opt-format",
    ),
    ("megatron-core's DDP is the only one: leave it out", "--DDP-impl 1 local"),
    (
        "Mamba and hybrid models are not built here: leave it out",
        """
        --is-hybrid-model --hybrid-attention-ratio 1 0.0 --hybrid-mlp-ratio 1 0.0 --hybrid-override-pattern 1
        --hybrid-layer-pattern 1 --mamba-state-dim 1 128 --mamba-head-dim 1 64 --mamba-num-groups 1 8
        --mamba-num-heads 1 --disable-mamba-mem-eff-path
        """,
    ),
    (
        "only softmax attention over all heads of a layer is built here: leave it out",
        """
        --experimental-attention-variant 1 --dsa-indexer-n-heads 1 --dsa-indexer-head-dim 1 --dsa-indexer-topk 1
        --dsa-indexer-loss-coeff 1 --dsa-indexer-use-sparse-loss --linear-conv-kernel-dim 1 4
        --linear-key-head-dim 1 128 --linear-value-head-dim 1 128 --linear-num-key-heads 1 16
        --linear-num-value-heads 1 32 --linear-attention-freq 1 --attention-output-gate
        --qk-l2-norm --qk-clip --qk-clip-alpha 1 0.5 --qk-clip-threshold 1 100 --no-rope-freq 1 --use-kitchen-attention
        --kitchen-attention-backend 1 sdpa --relative-attention-num-buckets 1 32 --relative-attention-max-distance 1 128
        --mrope-section + --batch-invariant-mode
        """,
    ),
    ("it is of multi-latent attention: use --position-embedding-type yarn", "--rope-type 1 rope"),
    (
        "not part of the GPT and Llama models built here: leave it out",
        """
        --quick-geglu --glu-linear-offset 1 0.0 --activation-func-clamp-value 1
        --embedding-init-method-std 1 --heterogeneous-layers-config-path 1
        --heterogeneous-layers-config-encoded-json 1 --use-legacy-models
        """,
    ),
    (
        "hybrid context parallelism by sequence is not built here: leave it out",
        "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 1",
    ),
    (
        "use --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers",
        "--pipeline-model-parallel-layout 1",
    ),
    (
        "this precision setting is not built here: leave it out",
        """
        --fp32-residual-connection --disable-bf16-reduced-precision-matmul --fp16-lm-cross-entropy
        --ddp-reduce-scatter-with-fp32-accumulation --use-precision-aware-optimizer --main-grads-dtype 1 fp32
        --main-params-dtype 1 fp32 --exp-avg-dtype 1 fp32 --exp-avg-sq-dtype 1 fp32
        """,
    ),
    (
        "of FP8, only --fp8-format, --fp8-recipe and the amax settings are built here",
        """
        --fp8-quantizer-factory 1 --fp8-margin 1 0 --no-fp8-wgrad --disable-fp8-wgrad --first-last-layers-bf16
        --num-layers-at-start-in-bf16 1 1 --num-layers-at-end-in-bf16 1 1 --te-precision-config-file 1
        """,
    ),
    (
        "FP4 is not built here: leave it out",
        "--fp4-format 1 --fp4-recipe 1 nvfp4 --fp4-param-gather --fp4-quantizer-factory 1",
    ),
    (
        "CUDA graphs are not built here: leave it out",
        """
        --enable-cuda-graph --external-cuda-graph --cuda-graph-impl 1 none --cuda-graph-scope +
        --cuda-graph-warmup-steps 1 3
        """,
    ),
    ("weights follow --seed alone, so that they do not depend on the grid", "--data-parallel-random-init"),
    (
        "every batch of the data is used, in full: leave it out",
        """
        --decrease-batch-size-if-needed --iterations-to-skip + --phase-transition-iterations 1
        --step-batch-size-schedule 1
        """,
    ),
    ("SIGTERM is the signal that saves and stops: leave it out", "--exit-signal 1 SIGTERM"),
    (
        "settings come from the flags: give them again; a model's from a checkpoint with --use-checkpoint-args",
        "--use-mp-args-from-checkpoint-args --yaml-cfg 1",
    ),
    (
        "checkpoints are written by --save and --save-interval alone",
        """
        --non-persistent-save-interval 1 --non-persistent-ckpt-type 1 --non-persistent-global-ckpt-dir 1
        --non-persistent-local-ckpt-dir 1 --non-persistent-local-ckpt-algo 1 fully_parallel --replication
        --replication-jump 1 --replication-factor 1 2 --load-main-params-from-ckpt --dist-ckpt-save-pre-mcore-014
        """,
    ),
    ("evaluation uses one validation set and --eval-iters", "--full-validation --multiple-validation-sets"),
    (
        "the tokenizer is taken as it is: leave it out",
        """
        --vocab-extra-ids 1 0 --tokenizer-metadata 1 --tokenizer-special-tokens + --tiktoken-special-tokens +
        --tokenizer-sentencepiece-legacy --tokenizer-hf-include-special-tokens
        """,
    ),
    (
        "this program trains GPT and Llama models only: leave it out",
        """
        --ict-head-size 1 --biencoder-projection-dim 1 0 --biencoder-shared-query-context-model --ict-load 1
        --bert-load 1 --titles-data-path 1 --query-in-block-prob 1 0.1 --use-one-sent-docs --evidence-data-path 1
        --retriever-report-topk-accuracies + --retriever-score-scaling --block-data-path 1 --embedding-path 1
        --indexer-batch-size 1 128 --indexer-log-interval 1 1000 --sample-rate 1 1.0 --mask-prob 1 0.15
        --short-seq-prob 1 0.1 --onnx-safe 1 --bert-no-binary-head
        """,
    ),
    (
        "this program trains on text only: leave it out",
        """
        --num-classes 1 1000 --img-h 1 224 --img-w 1 224 --num-channels 1 3 --patch-dim 1 16 --classes-fraction 1 1.0
        --data-per-class-fraction 1 1.0 --no-data-sharding --head-lr-mult 1 1.0 --vision-pretraining
        --vision-pretraining-type 1 classify --vision-backbone-type 1 vit --swin-backbone-type 1 tiny
        --mask-type 1 random --mask-factor 1 1.0 --iter-per-epoch 1 1250 --dino-local-img-size 1 96
        --dino-local-crops-number 1 10 --dino-head-hidden-size 1 2048 --dino-bottleneck-size 1 256
        --dino-freeze-last-layer 1 1 --dino-norm-last-layer --dino-warmup-teacher-temp 1 0.04 --dino-teacher-temp 1 0.07
        --dino-warmup-teacher-temp-epochs 1 30
        """,
    ),
    (
        "reinforcement learning is not built here: leave it out",
        """
        --perform-rl-step --rl-prompts-per-eval 1 32 --grpo-prompts-per-step 1 32 --grpo-group-size 1 2
        --grpo-iterations 1 2 --grpo-clamp-eps-lower 1 0.01 --grpo-clamp-eps-upper 1 0.01 --grpo-kl-beta 1 0.001
        --grpo-entropy-term-weight 1 0.0 --grpo-filter-groups-with-same-reward
        --langrl-inference-server-type 1 inplace_megatron --langrl-inference-server-conversation-template 1
        --langrl-external-server --no-langrl-external-server 0 same --langrl-env-config 1 --rl-default-temperature 1 1.0
        --rl-default-top-p 1 0 --rl-default-top-k 1 -1 --rl-offload-optimizer-during-inference
        --rl-offload-kv-cache-during-training --no-rl-offload-kv-cache-during-training 0 same
        --rl-remove-kv-cache-during-training --no-rl-remove-kv-cache-during-training 0 same --rl-reset-cuda-graphs
        --no-rl-reset-cuda-graphs 0 same --rl-partial-rollouts --no-rl-partial-rollouts 0 same
        --rl-inference-logprobs-is-correction --no-rl-inference-logprobs-is-correction 0 same
        --rl-importance-sampling-truncation-coef 1 --rl-use-sequence-packing --no-rl-use-sequence-packing 0 same
        --rl-sequence-packing-max-sequences-per-bin 1 50 --rl-sequence-packing-algo 1 fifo --rl-training-cuda-graphs
        --no-rl-training-cuda-graphs 0 same --rl-inference-tensor-model-parallel-size 1
        --rl-inference-pipeline-model-parallel-size 1 --rl-inference-expert-model-parallel-size 1
        --rl-inference-expert-tensor-model-parallel-size 1 --rl-inference-model-unified-memory-level 1 0
        --rl-offload-inference-model-weights-when-idle --no-rl-offload-inference-model-weights-when-idle 0 same
        --refit-method 1 gloo --rl-verify-model-weights-swap --no-rl-verify-model-weights-swap 0 same
        --rl-parallel-generation-tasks 1 512 --rl-skip-bos-token --no-rl-skip-bos-token 0 same
        """,
    ),
    (
        "supervised fine-tuning on chats is not built here: leave it out",
        "--sft --sft-tokenizer-prompt-format 1 nemotron-h-aligned",
    ),
    (
        "this program trains; for inference, convert the checkpoint with tools/convert_hf.py: leave it out",
        """
        --inference-batch-times-seqlen-threshold 1 -1 --max-tokens-to-oom 1 12000 --output-bert-embeddings
        --bert-embedder-type 1 megatron --use-legacy-static-engine --inference-max-requests 1 8
        --inference-max-seq-length 1 2560 --inference-max-batch-size 1 --inference-dynamic-batching
        --inference-dynamic-batching-buffer-size-gb 1 40.0 --inference-dynamic-batching-paused-buffer-size-gb 1
        --inference-dynamic-batching-block-size 1 256 --inference-dynamic-batching-max-requests 1
        --inference-dynamic-batching-max-tokens 1 --inference-dynamic-batching-num-cuda-graphs 1 16
        --inference-dynamic-batching-track-paused-request-events --decode-only-cuda-graphs
        --inference-dynamic-batching-unified-memory-level 1 0 --nccl-all-reduce-for-prefill
        --enable-chunked-prefill 0 same --disable-chunked-prefill
        --inference-dynamic-batching-cuda-graph-max-tokens 1 16384
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count 1 16 --inference-logging-step-interval 1 0
        --inference-wandb-logging --no-inference-wandb-logging 0 same --inference-coordinator-port 1 12346
        --flash-decode --symmetric-ar-type 1 --inference-fuse-tp-communication --mlp-chunks-for-prefill 1 1
        """,
    ),
    (
        "restarts are left to torchrun or Slurm; SIGTERM saves and stops: leave it out",
        """
        --adlr-autoresume --adlr-autoresume-interval 1 1000 --inprocess-restart --inprocess-max-iterations 1
        --inprocess-monitor-thread-interval 1 1.0 --inprocess-monitor-process-interval 1 1.0
        --inprocess-progress-watchdog-interval 1 1.0 --inprocess-heartbeat-interval 1 30 --inprocess-soft-timeout 1 60
        --inprocess-hard-timeout 1 90 --inprocess-heartbeat-timeout 1 60 --inprocess-barrier-timeout 1 120
        --inprocess-completion-timeout 1 120 --inprocess-last-call-wait 1 1 --inprocess-termination-grace-time 1 1
        --inprocess-granularity 1 node --inprocess-active-world-size 1 1 --inprocess-empty-cuda-cache
        --enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters 1 5
        """,
    ),
)

# Older spellings that store a value in a setting of ours: flag -> (section.field, value).
SPELLINGS: dict[str, tuple[str, Any]] = {
    "--use-rotary-position-embeddings": ("model.position_embedding_type", "rope"),
    "--fp8-e4m3": ("model.fp8_format", "e4m3"),
    "--fp8-hybrid": ("model.fp8_format", "hybrid"),
    "--fpdt-offload": ("chunks.fpdt_offload", True),
    "--ds-sequence-parallel-fpdt-offloading": ("chunks.fpdt_offload", True),
}
