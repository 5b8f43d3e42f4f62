#!/bin/bash -l
#SBATCH --job-name=harness:demo.abc123.0
#SBATCH --comment=/shared/runs/demo
#SBATCH --chdir=/shared/project
#SBATCH --output=/shared/runs/demo/slurm/01/logs/0-0.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --constraint=ib&rack[1-2]
#SBATCH --requeue
#SBATCH --signal=TERM@60
#SBATCH --export=HOME,LANG,LOGNAME,PATH,USER
#SBATCH --gres-flags=disable-binding
set -u
module load cuda/13.0
export HARNESS_HOME=/shared/state
export HARNESS_PROJECT=/shared/project
export TMPDIR='/local/$USER'
export NCCL_DEBUG='WARN; rm -rf /'
exec srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none --export=ALL --kill-on-bad-exit=0 --wait=0 --unbuffered /shared/venv/bin/python -m harness.run.node_agent /shared/runs/demo 01 0 abc123def4567890
