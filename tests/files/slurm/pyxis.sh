#!/bin/sh
#SBATCH --job-name=harness:demo.abc123.0
#SBATCH --comment=/shared/runs/demo
#SBATCH --chdir=/shared/project
#SBATCH --output=/shared/runs/demo/slurm/01/logs/0-0.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gres=gpu:8
#SBATCH --requeue
#SBATCH --signal=TERM@60
#SBATCH --export=HOME,LANG,LOGNAME,PATH,USER
set -u
exec srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --export=ALL --kill-on-bad-exit=0 --wait=0 --unbuffered --container-image=registry.example/team/sglang@sha256:0000000000000000000000000000000000000000000000000000000000000000 --container-mounts=/shared/runs/demo:/shared/runs/demo,/shared/project:/shared/project --container-workdir=/shared/project /opt/harness/tools/bin/python -m harness.run.node_agent /shared/runs/demo 01 0 abc123def4567890
