"""Launching: runs a script on all ranks of a plan: on this machine, on hosts over ssh, through Slurm, or as one rank of a job.

- `job`: the description of a launch; `hosts`: hosts and the placement of ranks; `demands`: the plan's requirements, checked
  against each host.
- `running`: `run_job`, with restarts; `session`: one attempt; `output`: the ranks' output; `interrupts`: Ctrl-C.
- `supervisor`: the process that runs on each host, `facts`: its report of the host; `connection` and `lines`: messages between
  launcher and supervisor; `heartbeat`: the heartbeats that both send.
- `gpuchecks`: requirements of a job on GPUs (`unmet`); `oneflowbuild`: what OneFlow was built for; `interfaces`: the network.
- `joining`, `slurm`, `nodelist`: jobs that another launcher starts. `context`: `launched`, for the script.

The package does not need OneFlow. Nothing is imported here: the processes on hosts load only what they need.
"""
