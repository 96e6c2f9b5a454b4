#!/usr/bin/env bash
# One step on two nodes under Slurm:
#   sbatch recipes/cluster/slurm.sh STEP FILE.yaml [--KEY VALUE ...]
# STEP is sft, reward, preference or rl; FILE.yaml has the keys of that step; output_dir may also be an option. Submit
# the same command again to resume from the newest checkpoint. Five minutes before the time limit Slurm signals this
# script, which runs on the node of rank 0 and asks rank 0 for a checkpoint (docs/reliability.md).
# If a rank or a node dies, the job is requeued up to RESTARTS times (3) and resumes; a user's mistake ends it.
# Set --cpus-per-task to the cores of a node: without it a task may get one core for eight ranks.
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
step=$1 config=$2
shift 2
output=$(sed -nE 's/^output_dir:[[:space:]]*//p' "$config" |
    sed -E "s/^\"([^\"]*)\".*/\1/; t; s/^'([^']*)'.*/\1/; t; s/[[:space:]]+#.*//; s/[[:space:]]+$//")
previous=
for word in "$@"; do
    if [[ $previous == --output_dir ]]; then output=$word; fi
    if [[ $word == --output_dir=* ]]; then output=${word#*=}; fi
    previous=$word
done
trap 'signalled=1; read -r pid host < "$output/.lock" && kill -USR1 "$pid"' USR1
mistakes=$(mktemp -d)
trap 'rm -rf "$mistakes"' EXIT
export HYBRID_RLHF_ERROR_FILE=$mistakes/user_error # torchrun ends with 1 whatever the exit code of a rank is
export FIRST_NODE=$(hostname) GPUS=${GPUS:-8}
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # since Slurm 22.05 srun does not inherit it
srun --label --kill-on-bad-exit=0 bash -c 'exec torchrun --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
    --nproc-per-node "$GPUS" --master-addr "$FIRST_NODE" --master-port 29500 -m "hybrid_rlhf.cli.$0" --config "$@"' \
    "$step" "$config" --resume auto "$@" &
child=$! code=0 signalled=1
while ((signalled)); do # a signal ends the wait, not the step
    signalled=0
    wait "$child" && code=0 || code=$?
done
may_restart() { # not after scancel or at the time limit, when the job is no longer running
    [[ -n ${SLURM_JOB_ID:-} && ! -e $HYBRID_RLHF_ERROR_FILE ]] && ((${SLURM_RESTART_COUNT:-0} < ${RESTARTS:-3})) &&
        [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]
}
if ((code != 0)) && may_restart; then
    echo "step $step ended with exit code $code: the job is requeued and resumes from the newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
