"""Starts, watches and ends the processes of ranks, and measures the bytes that they send.

- `launcher`: `RankPool` starts ranks on this machine, runs jobs on them, watches them and ends them;
  `localranks` manages their processes (`processes`), `rank` is the program of each process, `messages` has the messages between a
  rank and the launcher, and `failures` describes failed ranks.
- `keeper`: the parent process of a rank, which ends all processes that the rank started (`descendants`); `parting`: how ranks leave
  a finished job; `workfolders`: temporary folders.
- `devices`: the GPU of a rank, one of those that `gpus` lists; `ownnodes`: ranks that OneFlow takes for nodes of their own.
- `network`, `connections`, `wire`: a private network for the ranks of a job, and the bytes that the ranks send; `turns`: short time
  slices of threads on shared cores.

Nothing is imported here, so that processes without OneFlow never load it.
"""
