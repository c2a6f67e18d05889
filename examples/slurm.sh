#!/bin/bash
# One experiment on several nodes of a Slurm cluster: a process per core, and one leads.
#
#     sbatch --nodes 4 --cpus-per-task 32 examples/slurm.sh runs/mine --method mp-fedcl --clients 10000
#
# The first word is the run directory, on a file system that all nodes share; settings follow. The
# same command continues a run that was ended: by its time limit, a lost node or scancel.
#SBATCH --job-name=mpfedcl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00

set -eu
run=$1
shift
if [ -e "$run/experiment.toml" ]; then set -- --resume "$run"; else set -- "$@" --out "$run"; fi

# Where the processes meet: the first node of the job.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MEETING_POINT="$head:${MEETING_PORT:-29400}"
export OMP_NUM_THREADS=1

srun --kill-on-bad-exit=1 bash -c 'exec python -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_CPUS_PER_TASK" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$MEETING_POINT" \
    --rdzv-conf "is_host=$((SLURM_NODEID == 0))" --local-addr "$SLURMD_NODENAME" \
    -m mpfedcl run "$@"' mpfedcl "$@"
