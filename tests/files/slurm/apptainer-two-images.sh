#!/bin/sh
#SBATCH --job-name=harness:demo.abc123.0
#SBATCH --comment=/shared/runs/demo
#SBATCH --chdir=/shared/project
#SBATCH --output=/shared/runs/demo/slurm/01/logs/0-0.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gres=gpu:8
#SBATCH --requeue
#SBATCH --signal=TERM@60
#SBATCH --export=HOME,LANG,LOGNAME,PATH,USER
set -u
srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none --export=ALL --kill-on-bad-exit=0 --wait=0 --unbuffered apptainer exec --nv --pwd /shared/project --bind /shared/runs/demo:/shared/runs/demo --bind /shared/project:/shared/project --cleanenv /images/a.sif /opt/harness/tools/bin/python -m harness.run.node_agent /shared/runs/demo 01 0 abc123def4567890 --step 0 || exit $?
exec srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none --export=ALL --kill-on-bad-exit=0 --wait=0 --unbuffered apptainer exec --nv --pwd /shared/project --bind /shared/runs/demo:/shared/runs/demo --bind /shared/project:/shared/project --cleanenv /images/b.sif /opt/harness/tools/bin/python -m harness.run.node_agent /shared/runs/demo 01 0 abc123def4567890 --step 1
