"""The same plan on a Slurm cluster: pieces of it become jobs, in which every machine runs the same supervisor.

pieces   which launches go together in a job, and what a job needs
render   the batch script of a job (a function of values)
queue    sbatch, squeue, sacct, scancel: the only module that calls them
states   what Slurm's words for a job's state mean (a function of values)
submit   pieces into jobs, written down so that nothing queued is forgotten
follow   what jobs do, until they are done
orders   the files that the submitting machine and the nodes speak through
"""
