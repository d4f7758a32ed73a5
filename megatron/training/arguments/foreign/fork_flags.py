# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron-LM's forks and of its older versions, for `megatron_flags.py`.

The forks are Megatron-DeepSpeed, BigScience's, BigCode's and Habana's Megatron-LM, and MindSpeed-LLM (Ascend).
"""

from __future__ import annotations

from megatron.training.arguments.foreign.refused_flags import Advice, leave_out

HINTS = """
fused or not, the result is the same: --use-fused-swiglu --use-fused-rotary-pos-emb --use-fused-rmsnorm *
    --use-fused-sdpa * --use-fused-sdpa-with-recompute * --use-fast-softmax * --use-te-custom-op *
    --use-flash-attn-builder --abort-on-unmet-fused-kernel-constraints --no-scaled-masked-softmax-fusion
    --scaled-upper-triang-masked-softmax-fusion * --disable-mem-efficient-ln --ds_fused_adam --use-fusion-attn-v2
    --alibi-fusion-attn-type 1 --jit-compile --optimization-level 1
    --gemm-gradient-accumulation-fusion --use-fused-moe-token-permute-and-unpermute --shape-order 1
    --mla-fa-without-pad --mla-mm-split
how tokens are sent, and what overlaps, does not change the result: --moe-permutation-async-comm
    --moe-alltoall-overlap-comm --moe-fb-overlap
communication and computation overlap by other means here: --use-ascend-coc --coc-fused-kernel --use-ascend-mc2
    --use-cp-send-recv-overlap --cp-window-size 1 --use-fused-ring-attention-update --overlap-p2p-communication
    --no-delay-grad-reduce --delay-param-gather --use-contiguous-buffers-in-ddp --no-contiguous-buffers-in-local-ddp
    --zero-reduce-scatter --zero-contigious-gradients --zero-reduce-bucket-size 1 --zero-allgather-bucket-size 1
    --reduce-bucket-size 1 --last-bucket-split-count 1 --use-ulysses-allgather-kv
    --use-multiparameter-pipeline-model-parallel --enable-overlap-ag-with-matmul --enable-overlap-matmul-with-rs
    --enable-backward-overlap-ag-with-matmul
memory is managed without it: --distribute-checkpointed-activations --partition-activations --contigious-checkpointing
    --synchronize-each-layer --profile-backward --reuse-fp32-param --swap-attention --recompute-in-advance
    --recompute-activation-function --recompute-activation-function-num-layers 1 --recompute-norm
    --recompute-norm-num-layers 1 --recompute-lgd --enable-recompute-layers-per-pp-rank --use-pin-memory
    --memory-centric-tiled-linear --tile-factor 1 --split-transformers --scattered-embeddings --recompute-in-bubble
    --moe-zero-memory 1 --moe-zero-memory-num-layers 1 --swap-optimizer --swap-optimizer-times 1
    --mtp-mem-efficient-logits --output-layer-slice-num 1
    --context-parallel-kv-cache-policy 1 --context-parallel-cache-interval 1
stages hold equal numbers of layers here: --num-layer-list 1
the schedule is 1F1B or interleaved 1F1B here, with the same result: --enable-zbh1-pipeline
    --enable-zbh1-exact-semantics --enable-zero-bubble --enable-zb-runtime --interleave-group-size 1 --enable-1f1b-v
Megatron-DeepSpeed does not read it either: --no-load-lr-state
stages know each other's shapes, because a step has one sequence length: --variable-seq-lengths
training uses only the tokenizer's size and its end-of-document token: --tokenizer-not-use-fast
TP cuts every matrix along one of its sides here: --tp-2d --tp-x 1 --tp-y 1
Ulysses is used whenever --ulysses-parallel-size is above 1: --force-ds-sequence-parallel
this program is PyTorch's: --ai-framework 1
nothing is compiled here: --use-torch-compile * --use-torch-compiled-autograd * --use-regional-compilation *
    --allow-unspec-int-on-nn-module * --cache-size-limit 1
always the case: softmax and loss are in fp32, gradients too unless --grad-reduce-in-bf16: --no-query-key-layer-scaling
    --fp32-allreduce
weights that TP ranks hold in common are equal by construction: --sync-tp-duplicated-parameters
data loading is tuned with --num-workers and --data-cache-path: --no-shared-storage --valid-num-workers 1
    --repeated-dataloader --mmap-warmup --return-data-index --s3-cache-path 1
--attention-mask sets the mask, which is causal by default: --attention-mask-type 1 --cp-attention-mask-type 1
nothing is generated in training: --max-new-tokens 1
data files are prepared before a run: --handler-name 1 --workers 1
config.json says what a Hugging Face folder holds, and no copy of it is made: --model-type-hf 1 --mg-cache-dir 1
SIGTERM saves and stops a run: --kill-switch-path 1 --kill-switch-file 1 --trigger-path 1
what is logged is set by --log-interval, --log-jsonl, --tensorboard-dir and --wandb-project: --codecarbon-dir 1
    --log-level 1 --log-level-replica 1 --structured-logs --structured-logs-dir 1 --no-log-learnig-rate-to-tensorboard
    --profile_steps 1 --experiment_name 1 --experiment-name 1 --experiment-run-id 1 --experiment-root-dir 1 --job-name 1
checkpoints are always torch_dist, fully reshardable, written and read in parallel, and loaded strictly:
    --save-distrib-optimizer-method 1 --load-distrib-optimizer-method 1 --verify-checkpoint
    --verify-checkpoint-model-type 1
a dense model has no experts (--num-experts adds them): --mlp-type 1 --topk 1 --expert-interval 1
    --moe-expert-parallel-size 1 --create-moe-param-group --disable-moe-token-dropping --moe-train-capacity-factor 1
    --moe-eval-capacity-factor 1 --moe-min-capacity 1 --moe-loss-coeff 1 --disable-moe-top2-2nd-expert-sampling
    --enable-expert-tensor-parallelism --use-tutel
weights of the chosen experts add up to 1: --norm-topk-prob
a decoder alone has no encoder or retriever: --pipeline-model-parallel-split-rank 1 --retriever-seq-length 1
    --standalone-embedding-stage
"""

REFUSED = {
    leave_out: """
checkpoints are torch_dist, and tools/convert_hf.py makes Hugging Face folders of them: --enable-mg2hf-convert
    --only-convert-last-checkpoint --hf-save-dir 1 --mg-save-dir 1 --hf-cfg-dir 1
the loss here is the mean over all tokens that are not masked: --norm-target-loss --loss-on-targets-only
distillation is not supported: --kd --mos --load-teacher 1
without --kd it is not read, and --kd is not supported: --kd-alpha-ce 1 --kd-beta-ce 1 --kd-temp 1
    --num-layers-teacher 1 --hidden-size-teacher 1 --num-attention-heads-teacher 1 --num-experts-teacher +
no stage gets layers that do nothing: --allow-padding-num-layers
gradients and activations are sent as they are, never compressed: --grad_comp --grad_comp_rank 1 --grad_comp_warm_up 1
    --selective_grad_comp --selective_grad_comp_way 1 --inter_grad_comp --inter_grad_comp_rank 1
    --inter_grad_comp_epilogue_only --emb_comm_opt --use_error_feedback
this precision setting is not supported: --embedding-weights-in-fp32
weights and states of the optimizer are in fp32 here: --o2-optimizer
the supported optimizers are adam, sgd and muon, on the training device: --cpu-optimizer --cpu_torch_adam
    --use-bnb-optimizer --remote-device 1 none
all weights are trained here: --bitfit
only Megatron-LM's mixtures of experts are supported: --moe-model-type 1 megatron_moe
each token is predicted from those before it, with the model's own output layer: --causal-lm
layers that do nothing are not supported: --noop-layers 1
layers and tokens are never dropped here: --random-ltd
lengths grow with --rampup-seq-length or --seq-length-schedule; data are not sorted by difficulty:
    --data-efficiency-curriculum-learning
the length of a run is set by --train-iters, --train-samples or --train-tokens: --train-data-exact-num-epochs 1
""",
    Advice: """
layers with experts are set by --moe-layer-freq, as in [0]*3+[1]*29: use that: --first-k-dense-replace 1 -1
give the width of the shared expert: use --moe-shared-expert-intermediate-size: --n-shared-experts 1
weights are split by layer with --zero-stage 3: use that: --layerzero --layerzero-config 1
heads and columns are cut evenly over TP: use a TP that divides them: --unaligned-linear
use --iterations-to-skip, which takes each iteration: --skip-train-iteration-range +
""",
}
