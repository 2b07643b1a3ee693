"""Processes of ranks: started, watched and ended; what they say and what they send.

- `launcher`: `RankPool`, `launch` and `launch_script` start ranks on this machine, give them jobs, watch them and end them;
  `localranks` has their processes (`processes`), `rank` is what runs in each of them, `messages` is what they exchange with the
  launcher, `failures` describes what goes wrong.
- `keeper`: the process above a rank that ends everything that the rank started (`descendants`); `parting`: how ranks that are done
  leave; `workfolders`: the folders that they write to.
- `network`, `connections`, `wire`: a private network for the ranks of a job, and the bytes that they really send; `turns`: short
  turns of threads on shared cores.

Nothing is imported here, so that processes without OneFlow never load it.
"""
