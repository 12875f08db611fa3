#!/bin/bash
# Trains an image model on one machine of a SLURM cluster, or on several, until it is done: the job goes back to the
# queue before its time limit and after a preemption, and resumes.
#
#     sbatch examples/slurm.sh --dataset_name user/prompts --judge_url http://judge:8000/v1 --output_dir /shared/paco-flux
#     sbatch --nodes=2 examples/slurm.sh ...
#
# `output_dir` must be on a file system that all machines share. PACO_TRL_COMMAND=reward trains a judge.
#SBATCH --job-name=paco-trl
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

# USR1 comes 300 seconds before the time limit, to all processes of srun: time for an optimizer step and a checkpoint.
# There is no launcher between srun and the processes, which would have to pass it on
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) WORLD_SIZE=$SLURM_NTASKS
trap 'is_ended=yes' TERM # scancel and the time limit itself: not to be started again

srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec paco-trl "$@"' paco-trl \
    "${PACO_TRL_COMMAND:-grpo}" --resume_from_checkpoint auto "$@"
code=$?

# 75: a signal stopped it, and everything is saved. 138 and 143: it was too early to save anything
case $is_ended$code in
    75 | 138 | 143) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $code
