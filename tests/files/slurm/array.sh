#!/bin/sh
#SBATCH --job-name=harness:demo.abc123.0
#SBATCH --comment=/shared/runs/demo
#SBATCH --chdir=/shared/project
#SBATCH --output="/shared/runs/demo/slurm/01/logs/0-%a.log"
#SBATCH --open-mode=append
#SBATCH --array=0-3%2
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu
#SBATCH --account=team
#SBATCH --qos=high
#SBATCH --time=4:00:00
#SBATCH --exclusive
#SBATCH --gres=gpu:rtx6000:8
#SBATCH --requeue
#SBATCH --signal=TERM@60
#SBATCH --export=HF_TOKEN,HOME,LANG,LOGNAME,PATH,USER
set -u
export HARNESS_HOME=/shared/state
export HARNESS_PROJECT=/shared/project
exec srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none --export=ALL --kill-on-bad-exit=0 --wait=0 --unbuffered /shared/venv/bin/python -m harness.run.node_agent /shared/runs/demo 01 0 abc123def4567890
