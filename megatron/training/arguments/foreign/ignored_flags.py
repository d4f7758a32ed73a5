# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron-LM that cannot change the result, and why, for `megatron_flags.py`."""

from __future__ import annotations

HINTS = """
models are always built by megatron-core: --use-mcore-models --use-legacy-models
megatron-core's DDP is the only one, with the same sums: --DDP-impl 1 local
it has no effect without other flags: --enable-experimental
files are read from the file system: --disable-msc
the attention kernel is chosen with --attention-kernel: --attention-backend 1 auto --use-flash-attn --use-flash-attn-v1
    --use-flash-attn-v2 --use-flash-attn-triton
fused or not, the result is the same: --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --no-rope-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion --cross-entropy-loss-fusion
    --cross-entropy-fusion-impl 1 native --disable-jit-fuser --use-te-activation-func --use-fused-weighted-squared-relu
    --no-gradient-reduce-div-fusion --disable-mamba-mem-eff-path
communication and computation overlap by other means here: --no-async-tensor-model-parallel-allreduce
    --disable-async-tensor-model-parallel-allreduce --tp-comm-overlap --tp-comm-overlap-cfg 1
    --tp-comm-bootstrap-backend 1 nccl --tp-comm-overlap-rs-dgrad --no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad
    --no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag
    --no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs --no-tp-comm-split-ag --disable-tp-comm-split-ag
    --no-tp-comm-split-rs --disable-tp-comm-split-rs --delay-wgrad-compute --use-ring-exchange-p2p
    --defer-embedding-wgrad-compute --wgrad-deferral-limit 1 0 --overlap-p2p-communication-warmup-flush
    --no-overlap-p2p-communication --overlap-param-gather-with-optimizer-step --no-align-grad-reduce
    --no-align-param-gather --no-scatter-gather-tensors-in-pipeline
how process groups and buckets are tuned does not change the result: --pipeline-model-parallel-comm-backend 1
    --ddp-num-buckets 1 --ddp-pad-buckets-for-high-nccl-busbw --ddp-average-in-collective --use-nccl-ub
    --disable-symmetric-registration --use-sharp --sharp-enabled-group 1 --create-all-gather-group
    --nccl-communicator-config-path 1 --high-priority-stream-groups * --distributed-timeout-seconds-after-init 1
    --disable-gloo-process-groups --disable-gloo-group
ranks are always ordered TP < Ulysses < Ring < DP < PP: --use-tp-pp-dp-mapping
weights are always initialised, and do not depend on the grid: --no-initialization --use-cpu-initialization
    --init-model-with-meta-device
random streams do not depend on this here: --te-rng-tracker --inference-rng-tracker
always the case: softmax and loss are in fp32, gradients too unless --grad-reduce-in-bf16: --attention-softmax-in-fp32
    --accumulate-allreduce-grads-in-fp32 --apply-query-key-layer-scaling
always the case: the loss is the mean over the tokens of the global batch: --calculate-per-token-loss
no dense attention mask is made here: --no-create-attention-mask-in-dataloader
kernels are launched one by one, with the same result: --enable-cuda-graph --external-cuda-graph
    --cuda-graph-impl 1 none --cuda-graph-scope + --cuda-graph-warmup-steps 1 3
memory is managed without it: --empty-unused-memory-level 1 0 --no-clone-scatter-output-in-embedding
    --disable-clone-scatter-output-in-embedding --distribute-saved-activations --reuse-grad-buf-for-mxfp8-param-ag
weights are gathered in bf16 and cast to FP8 where they are used: --fp8-param-gather
Transformer Engine no longer reads it: --fp8-interval 1 1
checkpoints are always torch_dist, fully reshardable, written and read in parallel, and loaded strictly:
    --no-ckpt-fully-parallel-save --disable-ckpt-fully-parallel-save --ckpt-fully-parallel-save
    --ckpt-fully-parallel-load --ckpt-assume-constant-structure --use-persistent-ckpt-worker --auto-detect-ckpt-format
    --dist-ckpt-strictness 1 assume_ok_unexpected --dist-ckpt-optim-fully-reshardable --dist-ckpt-save-pre-mcore-014
    --distrib-optim-fully-reshardable-mem-efficient --use-dist-ckpt
the tokenizer always comes from the flags, and no code from its folder is run:
    --no-use-tokenizer-model-from-checkpoint-args --disable-use-tokenizer-model-from-checkpoint-args --trust-remote-code
    --legacy-tokenizer --tokenizer-hf-use-fast
data loading is tuned with --num-workers and --data-cache-path: --dataloader-fast-cache-load
    --dataloader-defer-npy-index-mmap --per-dataset-sequences-path 1 --exit-signal-handler-for-dataloader
    --data-impl 1 mmap
data files are always read and never mapped: --no-mmap-bin-files
the schedule of the loop is fixed: --no-manual-gc-eval --disable-manual-gc-eval --train-sync-interval 1
what is logged is set by --log-interval, --log-jsonl, --tensorboard-dir and --wandb-project: --timing-log-level 1 0
    --timing-log-option 1 minmax --log-timers-to-tensorboard --no-log-loss-scale-to-tensorboard
    --disable-log-loss-scale-to-tensorboard --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard
    --log-memory-interval 1 --log-device-memory-used --log-max-attention-logit --no-barrier-with-level-1-timing
    --log-world-size-to-tensorboard --logging-level 1 --log-energy --straggler-ctrlr-port 1 65535
    --straggler-minmax-count 1 1 --disable-straggler-on-startup --run-workload-inspector-server --config-logger-dir 1
    --no-one-logger --one-logger-project 1 megatron-lm --one-logger-run-name 1 --one-logger-async --app-tag-run-name 1
    --app-tag-run-version 1 0.0.0 --log-batch-size-to-tensorboard --log-optimizer-states-to-tensorboard
experts are computed one after the other, with the same result: --moe-grouped-gemm --moe-use-legacy-grouped-gemm
how tokens are sent, and what overlaps, does not change the result: --moe-shared-expert-overlap
    --moe-permute-fusion --moe-router-fusion --moe-deepep-num-sms 1 20 --moe-hybridep-num-sms 1 16
    --moe-flex-dispatcher-backend 1 deepep --moe-enable-deepep --overlap-moe-expert-parallel-comm
    --ep-overlap-early-attn-memory-release
filling experts up to their capacity does not change the result: --moe-pad-expert-input-to-capacity
the tokens of each expert in each layer are in --log-jsonl: --moe-per-layer-logging
recompute is set with --recompute-granularity: --moe-layer-recompute
it belongs to Megatron-LM's inference engine: --cache-mla-latents
layers of multi-token prediction are on the last pipeline stage: --mtp-standalone
without --optimizer-cpu-offload nothing reads it: --optimizer-offload-fraction 1 1.0
    --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params
a run has no test mode: --test-mode
how memory and messages of FSDP are tuned does not change the result: --outer-dp-sharding-strategy 1 no_shard
    --fsdp-manual-registration --fsdp-double-buffer --suggested-communication-unit-size 1 --keep-fp8-transpose-cache
    --enable-full-sharding-in-hsdp --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load
states are split over all of DP x CP here, with the same result: --num-distributed-optimizer-instances 1 1
Megatron-LM no longer reads it: --dist-ckpt-format 1 torch_dist
a blend takes as many samples of each source as it needs: --mid-level-dataset-surplus 1 0.005
steps are not repeated to detect faulty hardware, and no faults are injected: --rerun-mode 1 validate_results
    --result-rejected-tracker-filename 1 --error-injection-rate 1 0 --error-injection-type 1 transient_error
--position-embedding-type sets whether positions are embedded: --no-position-embedding
"""
