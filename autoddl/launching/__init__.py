"""Launching: a script on all ranks of a plan, on this machine, on hosts over ssh, through Slurm, or as one rank of a started job.

- `job`: what is to be launched; `hosts`: hosts and which ranks go where; `demands`: what a plan needs, and what a host lacks.
- `running`: `run_job`, attempt after attempt; `session`: one attempt; `output`: what ranks say; `interrupts`: Ctrl-C.
- `supervisor`: what runs on each host, `facts` what it finds there; `connection` and `lines`: the conversation with it;
  `beats`: the signs of life that both sides give.
- `joining`, `slurm`, `nodelist`: jobs that others start. `context`: `launched`, for the script.

It needs no OneFlow itself. Nothing is imported here: the processes on hosts load what they need.
"""
