#!/bin/sh
#SBATCH --job-name=harness:demo.abc123.0
#SBATCH --comment="/shared/my runs/demo"
#SBATCH --chdir=/shared/project
#SBATCH --output=/shared/runs/demo/slurm/01/logs/0-0.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gres=gpu:1
#SBATCH --requeue
#SBATCH --signal=TERM@60
#SBATCH --export=HOME,LANG,LOGNAME,PATH,USER
set -u
exec srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none --export=ALL --kill-on-bad-exit=0 --wait=0 --unbuffered enroot start --mount '/shared/my runs/demo:/shared/my runs/demo' --mount /shared/project:/shared/project --mount /models:/models /images/a.sqsh /opt/harness/tools/bin/python -m harness.run.node_agent '/shared/my runs/demo' 01 0 abc123def4567890
