#!/usr/bin/env bash
# One step on two nodes without Slurm, on each of them:
#   NODE_RANK=0 recipes/cluster/torchrun.sh FIRST_NODE STEP FILE.yaml [--KEY VALUE ...]
# with NODE_RANK=1 on the other. STEP is sft, reward, preference or rl; the nodes share output_dir.
set -euo pipefail
first=$1 step=$2 config=$3
shift 3
exec torchrun --nnodes "${NODES:-2}" --node-rank "$NODE_RANK" --nproc-per-node "${GPUS:-8}" \
    --master-addr "$first" --master-port 29500 -m "hybrid_rlhf.cli.$step" --config "$config" "$@"
