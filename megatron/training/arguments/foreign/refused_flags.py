# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron-LM and others that are refused, with the reason or what to use instead, for `megatron_flags.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.training.refusal import LEAVE_OUT, SUBJECT, Fix


class Advice(NamedTuple):
    """Why flags are refused, and what to do."""

    reason: str  # what the user reads after the flags
    # what to do, as a change of the command line; None if the user has to choose. Flags that it sets replace the
    # refused flags.
    fix: Fix | None = None
    name: str = ""  # the flag here that takes the values of a refused one

    def fixes(self, flags: Sequence[str]) -> list[Fix]:
        """The fixes for ``flags``, which are refused for this reason."""
        if self.name:
            return [Fix(rename=(flags[0], self.name))] if len(flags) == 1 else []
        return [self.fix] if self.fix else []


def leave_out(reason: str) -> Advice:
    return Advice(f"{reason}: leave it out", LEAVE_OUT)


def rename(name: str) -> Advice:
    return Advice(f"use {name}", name=name)


def replace(words: str) -> Advice:
    """Advice to use other flags. ``words``: these flags, then "; " and the message if it is not ``use FLAGS``."""
    words, _, reason = words.partition("; ")
    return Advice(reason or f"use {words}", Fix(words, drop=SUBJECT))


# Why these are not built: --fine-grained-activation-offloading is megatron-core's own copies on CUDA streams (1,470
# lines in 0.19) without a form for CPUs, so that no test here could compare it with one process; --fpdt and
# --offload-checkpoints keep activations in host memory. --mtp-detach-heads also clips the gradients of those layers by
# a norm of their own, and here there is one norm, over all ranks.
REFUSED = {
    leave_out: """
this option of mixtures of experts is not supported: --moe-extended-tp
    --moe-router-padding-for-quantization --moe-router-padding-for-fp8
    --moe-input-jitter-eps 1 --moe-apply-probs-on-input --moe-latent-size 1 --moe-use-upcycling
    --moe-upcycling-granularity 1 1 --moe-pad-experts-for-cuda-graph-inference
tokens choose experts by their scores, not at random as in benchmarks: --moe-router-force-load-balancing
the supported optimizers are adam, sgd and muon, on the training device: --optimizer-cpu-offload
weight decay applies to all weights but biases and those of norms: --no-weight-decay-cond-type 1
this program does not write such files: --save-wgrads-interval 1 --save-dgrads-interval 1
    --dump-param-to-param-group-map 1
weights are always created at start-up: --lazy-mpu-init 1
this way of reading data is not supported: --allow-ambiguous-pad-tokens
megatron-core 0.16 has no such layer: --apply-residual-connection-post-layernorm
of norms of queries and keys, --qk-layernorm and --qk-layernorm-all-heads are supported: --qk-l2-norm
weights are not clipped by the size of attention scores: --qk-clip --qk-clip-alpha 1 0.5 --qk-clip-threshold 1 100
the attention kernel is chosen with --attention-kernel: --use-kitchen-attention --kitchen-attention-backend 1 sdpa
    --batch-invariant-mode
biases by relative position are ALiBi's, --position-embedding-type alibi: --relative-attention-num-buckets 1 32
    --relative-attention-max-distance 1 128
positions of images and video are not supported: --mrope-section +
embeddings begin like the other weights, by --init-method-std: --embedding-init-method-std 1
all layers of a kind have the same sizes: --heterogeneous-layers-config-path 1
    --heterogeneous-layers-config-encoded-json 1
hybrid context parallelism by sequence is not supported: --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 1
this precision setting is not supported: --fp32-residual-connection --disable-bf16-reduced-precision-matmul
    --fp16-lm-cross-entropy --ddp-reduce-scatter-with-fp32-accumulation
weights and states of the optimizer are in fp32 here: --main-params-dtype 1 fp32 --exp-avg-dtype 1 fp32
    --exp-avg-sq-dtype 1 fp32
FP4 is not supported: --fp4-format 1 --fp4-recipe 1 nvfp4 --fp4-param-gather --fp4-quantizer-factory 1
the batch size is never changed to fit --micro-batch-size x DP: --decrease-batch-size-if-needed
SIGTERM and SIGUSR1 are the signals that save and stop: --exit-signal 1 SIGTERM
the tokenizer is taken as it is: --vocab-extra-ids 1 0 --tokenizer-metadata 1 --tokenizer-special-tokens +
    --tiktoken-special-tokens + --tokenizer-sentencepiece-legacy --tokenizer-hf-include-special-tokens
this program trains GPT and Llama models only: --ict-head-size 1 --biencoder-projection-dim 1 0
    --biencoder-shared-query-context-model --ict-load 1 --bert-load 1 --titles-data-path 1 --query-in-block-prob 1 0.1
    --use-one-sent-docs --evidence-data-path 1 --retriever-report-topk-accuracies + --retriever-score-scaling
    --block-data-path 1 --embedding-path 1 --indexer-batch-size 1 128 --indexer-log-interval 1 1000 --sample-rate 1 1.0
    --mask-prob 1 0.15 --short-seq-prob 1 0.1 --onnx-safe 1 --bert-no-binary-head
this program trains on text only: --num-classes 1 1000 --img-h 1 224 --img-w 1 224 --num-channels 1 3 --patch-dim 1 16
    --classes-fraction 1 1.0 --data-per-class-fraction 1 1.0 --no-data-sharding --head-lr-mult 1 1.0
    --vision-pretraining --vision-pretraining-type 1 classify --vision-backbone-type 1 vit --swin-backbone-type 1 tiny
    --mask-type 1 random --mask-factor 1 1.0 --iter-per-epoch 1 1250 --dino-local-img-size 1 96
    --dino-local-crops-number 1 10 --dino-head-hidden-size 1 2048 --dino-bottleneck-size 1 256
    --dino-freeze-last-layer 1 1 --dino-norm-last-layer --dino-warmup-teacher-temp 1 0.04 --dino-teacher-temp 1 0.07
    --dino-warmup-teacher-temp-epochs 1 30
reinforcement learning is not supported: --perform-rl-step --rl-prompts-per-eval 1 32 --grpo-prompts-per-step 1 32
    --grpo-group-size 1 2 --grpo-iterations 1 2 --grpo-clamp-eps-lower 1 0.01 --grpo-clamp-eps-upper 1 0.01
    --grpo-kl-beta 1 0.001 --grpo-entropy-term-weight 1 0.0 --grpo-filter-groups-with-same-reward
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
this program trains; for inference use tools/generate.py, or convert the checkpoint with tools/convert_hf.py:
    --inference-batch-times-seqlen-threshold 1 -1 --max-tokens-to-oom 1 12000 --output-bert-embeddings
    --bert-embedder-type 1 megatron --use-legacy-static-engine --inference-max-requests 1 8
    --inference-max-seq-length 1 2560 --inference-max-batch-size 1 --inference-dynamic-batching
    --inference-dynamic-batching-buffer-size-gb 1 40.0 --inference-dynamic-batching-paused-buffer-size-gb 1
    --inference-dynamic-batching-block-size 1 256 --inference-dynamic-batching-max-requests 1
    --inference-dynamic-batching-max-tokens 1 --inference-dynamic-batching-num-cuda-graphs 1 16
    --inference-dynamic-batching-track-paused-request-events --decode-only-cuda-graphs
    --inference-dynamic-batching-unified-memory-level 1 0 --nccl-all-reduce-for-prefill --enable-chunked-prefill 0 same
    --disable-chunked-prefill --inference-dynamic-batching-cuda-graph-max-tokens 1 16384
    --inference-dynamic-batching-cuda-graph-mixed-prefill-count 1 16 --inference-logging-step-interval 1 0
    --inference-wandb-logging --no-inference-wandb-logging 0 same --inference-coordinator-port 1 12346 --flash-decode
    --symmetric-ar-type 1 --inference-fuse-tp-communication --mlp-chunks-for-prefill 1 1
restarts are left to torchrun or Slurm; SIGTERM saves and stops: --adlr-autoresume --adlr-autoresume-interval 1 1000
    --inprocess-restart --inprocess-max-iterations 1 --inprocess-monitor-thread-interval 1 1.0
    --inprocess-monitor-process-interval 1 1.0 --inprocess-progress-watchdog-interval 1 1.0
    --inprocess-heartbeat-interval 1 30 --inprocess-soft-timeout 1 60 --inprocess-hard-timeout 1 90
    --inprocess-heartbeat-timeout 1 60 --inprocess-barrier-timeout 1 120 --inprocess-completion-timeout 1 120
    --inprocess-last-call-wait 1 1 --inprocess-termination-grace-time 1 1 --inprocess-granularity 1 node
    --inprocess-active-world-size 1 1 --inprocess-empty-cuda-cache --enable-ft-package --calc-ft-timeouts
    --ft-num-warmup-iters 1 5
""",
    Advice: """
use --dry-run --world-size N: --fake-process-group
use --fpdt, or --recompute-granularity full --offload-checkpoints, to keep activations in host memory:
    --fine-grained-activation-offloading --offload-modules +
a run has one blend of data: begin a run for each phase, with --load and its own data: --phase-transition-iterations 1
use tools/convert_hf.py: --ckpt-convert-format 1 --ckpt-convert-save 1 --ckpt-convert-update-legacy-dist-opt-format
of FP8, only --fp8-format, --fp8-recipe and the amax settings are supported: --fp8-quantizer-factory 1 --fp8-margin 1 0
    --no-fp8-wgrad --disable-fp8-wgrad --first-last-layers-bf16 --num-layers-at-start-in-bf16 1 1
    --num-layers-at-end-in-bf16 1 1 --te-precision-config-file 1
weights follow --seed alone, so that they do not depend on the grid: --data-parallel-random-init
settings come from flags: give them again, or take the model's from a checkpoint with --use-checkpoint-args:
    --use-mp-args-from-checkpoint-args --yaml-cfg 1
checkpoints are written by --save and --save-interval alone: --load-main-params-from-ckpt
evaluation uses one validation set and --eval-iters: --full-validation --multiple-validation-sets
""",
    replace: """
--fpdt; use --fpdt, or --recompute-granularity full --offload-checkpoints, to keep activations in host memory:
    --cpu-offloading-num-layers 1 0 --min-offloaded-tensor-size 1 1048576
--non-persistent-ckpt-type local; copies in memory are files of each node: use --non-persistent-ckpt-type
    local: --non-persistent-global-ckpt-dir 1
""",
    rename: """
--num-layers: --decoder-num-layers 1
--seq-length: --decoder-seq-length 1
""",
}


# Names that USP (yunchang), LoongTrain, DeepSpeed, PEFT, TRL and Hugging Face's trainer have for settings of this
# program. They are refused, since their values do not always mean the same. Flags of Megatron-LM's forks are in
# `fork_flags.py`.
OTHER_NAMES = {
    rename: """
--tensor-model-parallel-size: --tp-size 1 --tp_size 1 --tp 1 --tensor-parallel 1
--pipeline-model-parallel-size: --pipeline-parallel-size 1 --pp-size 1 --pp_size 1 --pp 1
--context-parallel-size: --cp-size 1 --sp-size 1 --sp_size 1 --sequence_parallel_size 1
--ulysses-parallel-size: --ulysses-degree 1 --ulysses_degree 1 --sp-ulysses-degree 1 --sp_ulysses_degree 1
    --ulysses-size 1 --head-parallel-size 1 --head_size 1
--ds-sequence-parallel-size: --ds-sequence-parallel 1
--ring-parallel-size: --ring-degree 1 --ring_degree 1 --sp-ring-degree 1 --sp_ring_degree 1 --ring-size 1
    --context_size 1
--qk-layernorm: --use-qk-norm --qk-norm
--rotary-base: --rope-theta 1 --rope_theta 1 --rotary-emb-base 1
--num-layers: --num-hidden-layers 1 --num_hidden_layers 1 --n-layers 1 --n_layers 1
--ffn-hidden-size: --intermediate-size 1 --intermediate_size 1
--norm-epsilon: --rms-norm-eps 1 --rms_norm_eps 1 --rmsnorm-epsilon 1
--attention-kernel: --attn-implementation 1 --attn_implementation 1
--seq-length: --max-seq-length 1 --max_seq_length 1 --max-seq-len 1 --sequence-length 1 --seqlen 1
--micro-batch-size: --per-device-train-batch-size 1 --per_device_train_batch_size 1 --mbs 1
--global-batch-size: --train-batch-size 1 --gbs 1
--lr: --learning-rate 1 --learning_rate 1
--lr-warmup-iters: --warmup-steps 1 --warmup_steps 1
--lr-decay-style: --lr-scheduler-type 1 --lr_scheduler_type 1
--clip-grad: --max-grad-norm 1 --max_grad_norm 1 --gradient-clipping 1
--train-iters: --max-steps 1 --max_steps 1 --train-steps 1
--lora-rank: --lora-r 1 --lora_r 1
--lora-targets: --target-modules + --target_modules + --lora-target-modules + --lora_target_modules +
""",
    replace: """
--context-parallel-balance zigzag; use --context-parallel-balance zigzag, or contiguous: --ring-impl-type 1
    --ring_impl_type 1
--position-embedding-type rope: --use-rope --use-rotary-emb
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1: --gradient-checkpointing
    --gradient_checkpointing --activation-checkpointing
""",
    Advice: """
adapters have no dropout; leave it out: --lora-dropout 1 0 --lora_dropout 1 0
use --group-query-attention with --num-query-groups: --num-kv-heads 1 --num_key_value_heads 1 --kv-heads 1
use --window-size N-1,0: --sliding-window 1 --sliding_window 1 --sliding-window-size 1
""",
}
