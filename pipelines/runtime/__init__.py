"""All that runs on OneFlow ranks.

- `load`: OneFlow with its CUDA libraries, and whether it is there; `availability`: a yes, or a no with its reason.
- `launcher`: `RankPool`, `launch`, `launch_script` start ranks on this machine, give them work, watch and end them; `rank` is
  what runs in each of them (`report` sends values while a job goes on), `failures` what goes wrong. `keeper` is the process above a
  rank that ends all that the rank started (`descendants`); `parting` is how ranks that are done leave. `memory_files`: where they
  write that must not depend on a disk.
- `mesh`: ranks as a mesh, `RankAxis` and the groups along it; `collectives`: differentiable collectives along one axis.
- `network`, `wire`: a network of their own for the ranks of a job, and the bytes that they really send.
- `stage`: one stage at its plan, a package of its own: parameters, forward pass, backward pass, gradients. `applied`:
  `AppliedModule`, a plan without a pipeline as one stage that users hold (`autoddl.apply` makes it), and `comparing` with the
  user's module. Below them `parameters` (global tensors, sums of gradients), `userparameters` (those of the user's module),
  `feeding` (which input layers read).
- What a rank does for a layer is written once, and run here or printed in an exported file (:mod:`autoddl.export.library`):
  `statements` and `moves` say what is called, kind by kind and between layers; `operations`, `attending`, `losses`, `rows`,
  `moving`, `exchanging` and `stepping` are what is called, `layouts` which elements a rank holds, `facts` what the user's modules
  say. `layers` carries statements out.
- `pipeline`: schedules executed on ranks, whose stages are those of `stage`; a package of its own.

`statements`, `moves`, `layouts`, `feeding`, `samples` and everything above `collectives` do without OneFlow; others need it when
they are imported.
Nothing is imported here, so that processes that have no use for OneFlow never load it.
"""
