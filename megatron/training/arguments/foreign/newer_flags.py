# SPDX-License-Identifier: Apache-2.0
"""Flags that Megatron-LM has since core 0.17, up to 0.19, for `megatron_flags.py`."""

from __future__ import annotations

from megatron.training.arguments.foreign.refused_flags import Advice, leave_out, rename, replace

HINTS = """
fused or not, the result is the same: --fused-residual-rmsnorm --use-transformer-engine-op-fuser --mla-down-proj-fusion
the attention kernel is chosen with --attention-kernel: --flash-attention-version 1
an orthogonal rotation of the indexer's queries and keys changes scores by rounding alone (DSA):
    --no-dsa-indexer-rotate-activation --disable-dsa-indexer-rotate-activation
the norm of the indexer's keys computes in fp32 anyway (DSA): --dsa-indexer-k-norm-fp32
attention to chosen keys has one kernel (DSA): --dsa-kernel-backend 1 none
communication and computation overlap by other means here: --overlap-dispatch-backward-with-experts-wgrad
    --high-priority-a2a-comm-stream --disable-align-grad-reduce
kernels are launched one by one, with the same result: --cuda-graph-modules + --optimizer-cuda-graph
memory is managed without it: --moe-paged-stash --moe-paged-stash-page-size 1 64
    --moe-paged-stash-buffer-size-factor-cuda 1 1.1 --moe-paged-stash-buffer-size-factor-cpu 1 0.0
how tokens are sent, and what overlaps, does not change the result: --moe-permute-fusion-into-hybridep
    --moe-hybridep-pad-uneven-dispatch-inputs --moe-flex-dispatcher-num-sms 1 --moe-hybridep-num-blocks-permute 1
    --moe-hybridep-num-blocks-unpermute 1 --moe-hybridep-num-sms-preprocessing 1 108 --moe-ncclep-static-shape
    --moe-ncclep-zero-copy
experts are computed one after the other, with the same result: --use-grouped-gemm-for-shared-expert
    --use-grouped-gemm-for-dense-mlp --moe-single-grouped-weight --moe-single-grouped-bias
without --cpu-offloading-num-layers or --fine-grained-activation-offloading nothing reads it:
    --cpu-offloading-retain-pinned-cpu-buffers --delay-offload-until-cuda-graph
    --delta-offload-bytes-across-pp-ranks 1 0 --activation-offload-fraction 1 1.0
    --fine-grained-offloading-max-inflight-offloads 1
without --optimizer lion nothing reads it: --lion-beta1 1 0.95 --lion-beta2 1 0.98
states are split over all of DP x CP with --use-distributed-optimizer, also those of muon:
    --no-use-layer-wise-param-layout --disable-use-layer-wise-param-layout
without --use-mup nothing reads it: --mup-width-mult 1 1.0 --mup-base-hidden-size 1 --mup-embedding-mult 1 1.0
    --mup-output-mult 1 1.0 --mup-base-head-dim 1 --mup-attn-scale-power 1 1.0
without --logits-load-dir or --logits-save-dir nothing reads it: --logits-save-top-k 1 --logits-save-top-p 1
    --logits-save-top-p-min-k 1 1 --logits-save-dtype 1 fp16 --logits-load-decode-threads 1 4
    --logits-load-prefetch-factor 1 3 --logits-load-msc-prefetch-depth 1 2 --logits-load-kd-loss-alpha 1 1.0
    --logits-load-ignore-errors
always the case: gradients are in fp32 unless --grad-reduce-in-bf16:
    --ddp-param-name-patterns-for-fp32-local-accumulation +
always the case: each file of a checkpoint has a checksum, which is compared when it is read: --verify-integrity
how a checkpoint is written does not change what is in it: --async-strategy 1 nvrx --async-ckpt-cpu-priority 1 10
    --async-ckpt-io-priority 1 3 --async-ckpt-use-cpu-shm --dist-ckpt-workers 1 1
    --ckpt-fully-parallel-save-process-group 1 dp
checkpoints are always torch_dist, fully reshardable, written and read in parallel, and loaded strictly:
    --ckpt-fully-parallel-load-exchange-algo 1 broadcast --ckpt-fully-parallel-load-process-group 1 dp
    --no-ckpt-load-validate-sharding-integrity --disable-ckpt-load-validate-sharding-integrity
    --no-stream-ckpt-dequant --disable-stream-ckpt-dequant
training uses only the tokenizer's size and its end-of-document token: --tokenizer-hf-no-use-fast
    --tokenizer-hf-no-include-special-tokens
files are read from the file system: --enable-msc
--profile has no such record: --pytorch-profiler-collect-chakra --nvtx-ranges
PyTorch's flight recorder is set by PyTorch's environment variables: --flight-recorder-dump-path 1
    --flight-recorder-trace-buffer-size 1 2000 --no-flight-recorder-dump-on-timeout
    --disable-flight-recorder-dump-on-timeout --flight-recorder-include-stack-trace
    --no-flight-recorder-include-only-active --disable-flight-recorder-include-only-active
    --no-flight-recorder-extra-dump-on-exec --disable-flight-recorder-extra-dump-on-exec
the bounds of YaRN's correction are rounded unless --no-yarn-correction-range-round-to-int is given:
    --yarn-correction-range-round-to-int 0 same
SIGTERM saves and stops a run: --exit-signal-handler-for-training
steps are not repeated to detect faulty hardware, and no faults are injected: --gpu-sniff-test-interval 1
how memory and messages of FSDP are tuned does not change the result: --fsdp-db-use-persist-buf-on-alloc-fail
    --megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer
"""

REFUSED = {
    leave_out: """
this option of mixtures of experts is not supported: --moe-router-quantile-balancing-ema 1 0.0
    --moe-router-force-biased 1 --moe-expert-rank-capacity-factor 1
gate and value of an FFN are not interleaved here: --moe-shared-expert-glu-interleave-size 1
    --moe-mlp-glu-interleave-size 1
this option of multi-token prediction is not supported: --mtp-use-repeated-layer --mtp-detach-heads
    --mtp-hybrid-override-pattern 1
the scores of an indexer (DSA) always have a ReLU, as in transformers: --no-dsa-indexer-scoring-relu
    --disable-dsa-indexer-scoring-relu
Muon's other weights are always updated by AdamW: --muon-scalar-optimizer 1 adam
widths do not change learning rates and initial weights (muP) here: --use-mup
this precision setting is not supported: --mamba-training-ssm-states-dtype 1 fp32
    --megatron-fsdp-main-params-dtype 1 fp32
this program does not write such files: --save-params-interval 1 --save-activations-interval 1
    --save-tokens-per-expert-interval 1 --moe-routing-trace-path 1 --moe-routing-trace-max-training-iters 1
    --moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights
distillation is not supported: --logits-save-dir 1 --logits-load-dir 1
weights are frozen only with --lora-rank: --freeze-all-layers
evaluation has the batch sizes of training, from the first --eval-interval on: --start-eval-at-iter 1
    --eval-global-batch-size 1 --eval-micro-batch-size 1
a run goes on at the iteration of its checkpoint: --override-ckpt-iteration 1
the tokenizer is taken as it is: --null-tokenizer-eod-id 1 --null-tokenizer-pad-id 1 -1 --chat-template 1
    --no-tokenizer-sentencepiece-ignore-extra-whitespaces --disable-tokenizer-sentencepiece-ignore-extra-whitespaces
faults are not injected: --fault-injector-ranks 1 --fault-injector-num-ranks 1 --fault-injector-fault-types 1
    --fault-injector-fault-probabilities 1 --fault-injector-fault-delay 1 --fault-injector-delay-start-iteration 1
    --fault-injector-mtti-seconds 1 --fault-injector-offset-seconds 1 --fault-injector-seed 1
reinforcement learning is not supported: --rl-generation-lag 1 0 --rl-submission-granularity 1 B
    --rl-consumption-granularity 1 B --rl-kv-cache-management-mode 1 persist --rl-persist-cuda-graphs
    --no-rl-persist-cuda-graphs 0 same --rl-profile --rl-profile-dir 1 --rl-inference-parsers *
this program trains; for inference use tools/generate.py, or convert the checkpoint with tools/convert_hf.py:
    --inference-cuda-graph-scope 1 --inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend 1 vllm
    --inference-moe-disable-fused-quant-kernels --inference-moe-token-dispatcher-type 1 nvls
    --inference-dynamic-batching-mamba-memory-ratio 1 --inference-dynamic-batching-track-generated-token-events
    --inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens 1 512 --num-speculative-tokens 1 0
    --inference-dynamic-batching-prefix-caching --no-inference-dynamic-batching-prefix-caching 0 same
    --inference-dynamic-batching-prefix-caching-eviction-policy 1 ref_zero
    --inference-dynamic-batching-prefix-caching-coordinator-policy 1 load_balanced
    --inference-dynamic-batching-prefix-caching-routing-alpha 1 0.5
    --inference-dynamic-batching-prefix-caching-mamba-gb 1
    --inference-dynamic-batching-cuda-graph-sizing-distribution 1 exponential
    --inference-dynamic-batching-sampling-backend 1 torch --use-same-sampling-seed-across-dp-ranks
    --inference-dynamic-batching-async-sched-mode 1 legacy
    --inference-dynamic-batching-logprobs-mode 1 raw_logprobs --inference-text-gen-server-logging
    --no-inference-text-gen-server-logging 0 same --mamba-inference-conv-states-dtype 1 bf16
    --mamba-inference-ssm-states-dtype 1 bf16 --inference-use-synchronous-zmq-collectives
    --no-inference-use-synchronous-zmq-collectives 0 same --inference-disable-ep-consensus
    --no-inference-disable-ep-consensus 0 same --inference-shards 1
""",
    Advice: """
of FP8, only --fp8-format, --fp8-recipe and the amax settings are supported: --fp8-output-proj
names of validation sets come from their paths: --validation-set-names +
use --zero-stage 3, which splits weights over all of DP x CP: --tensor-parallel-num-weight-shards 1
    --expert-tensor-parallel-num-weight-shards 1
""",
    replace: """
--make-vocab-size-divisible-by 1: --no-pad-vocab-size --disable-pad-vocab-size
""",
    rename: """
--ffn-chunks: --mlp-chunks-for-training 1 1
""",
}
