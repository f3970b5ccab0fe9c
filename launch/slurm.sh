#!/usr/bin/env bash
#SBATCH --job-name=longstraw
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Starts a launch script on every node of a Slurm job, with the job's nodes as its arguments.
# usage: sbatch --nodes 4 launch/slurm.sh launch/glm52_32gpu.sh --rollouts FILE --output DIR [options]
#        sbatch --nodes 1 launch/slurm.sh launch/qwen36_8gpu.sh --rollouts FILE --output DIR [options]
# from the checkout, or with the path of the launch script: Slurm runs a copy of this file from elsewhere.
set -euo pipefail

fail() {
    printf 'slurm.sh: error: %s\n' "$1" >&2
    exit 2
}

case ${1:-} in
--help | -h) sed -n '/^set /q; s/^# //p' "${BASH_SOURCE[0]}" && exit 0 ;;
'') fail "needs a launch script first: sbatch --nodes 4 launch/slurm.sh launch/glm52_32gpu.sh --rollouts ..." ;;
esac
target=$1
shift
[ -f "$target" ] || fail "$target: no such launch script (from $PWD)"
if [ -z "${SLURM_JOB_NODELIST:-}" ] || [ -z "${SLURM_JOB_NUM_NODES:-}" ]; then
    fail "this is no Slurm job: start it with sbatch, or run $target on each node"
fi
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || fail "scontrol can't tell the hosts of $SLURM_JOB_NODELIST"
master=${hosts%%$'\n'*}

# A port of the job's own, should nodes be shared. Only srun's tasks know which node they are.
# shellcheck disable=SC2016 # expanded by the task
exec srun --nodes "$SLURM_JOB_NUM_NODES" --ntasks "$SLURM_JOB_NUM_NODES" --ntasks-per-node 1 --kill-on-bad-exit=1 \
    bash -c 'target=$1 && shift && exec bash "$target" --node-rank "$SLURM_NODEID" "$@"' _ "$target" \
    --nnodes "$SLURM_JOB_NUM_NODES" --master-addr "$master" --master-port "$((20000 + SLURM_JOB_ID % 20000))" "$@"
