# SPDX-License-Identifier: Apache-2.0
# Shared by the Slurm scripts: how the processes find each other, and a job that queues itself again.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270 # torchrun itself waits 30 seconds for a checkpoint that is being written

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
DISTRIBUTED_ARGS=(
    --nproc-per-node 8
    --nnodes "$SLURM_NNODES"
    --rdzv-id "$SLURM_JOB_ID"
    --rdzv-backend c10d
    --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-6000}"
)

# srun_and_requeue COMMAND...: run it on every node. Queue the job again if Slurm stopped it because its time is nearly
# up; a job that scancel stopped has more time left and ends, as does one that has done TRAIN_ITERS.
srun_and_requeue() {
    local code=0 iterations
    srun --kill-on-bad-exit=1 "$@" || code=$? # torchrun fails when it is stopped, even if the checkpoint is complete
    iterations=$(cat "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
    if [ "$iterations" -lt "$TRAIN_ITERS" ] && [ $((${SLURM_JOB_END_TIME:-0} - $(date +%s))) -lt 360 ]; then
        exec scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$code"
}
