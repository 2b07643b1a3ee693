"""Measuring jobs: ranks on several hosts, or of a job that another launcher started, that measure for `calibrate`.

Every rank runs :mod:`autoddl.onranks.measure_ranks` under the supervision of :mod:`autoddl.launching`.  Rank 0 prints the
samples, and the process that launched it writes them to the file and fits them.  So neither a shared file system nor OneFlow in
that process is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoddl.calib.campaign import CampaignOptions, counts_in, missing, progress, request_of
from autoddl.calib.measurements import SampleFile, sample_in_line
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.devices import GPU
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.ranks.failures import RankError

from .. import onranks
from ..launching.demands import Demands
from ..launching.hosts import LOCALHOST, Host, Placement, parse_hosts
from ..launching.interrupts import Interrupted
from ..launching.job import Job
from ..launching.joining import Membership, find_membership
from ..launching.output import write_message
from ..launching.running import run_job
from .jobs import JOB_DEFAULTS, make_job

__all__ = ["JobPlace", "member_of_job", "place_on_hosts", "place_on_member", "run_measuring_job"]

_SCRIPT = Path(onranks.__path__[0]).absolute() / "measure_ranks.py"


@dataclass(frozen=True)
class JobPlace:
    """The ranks of a measuring job, and those that this process launches.

    Attributes:
        num_ranks: number of ranks of the job.
        ranks_per_node: number of ranks of each host.
        placements: the ranks that this process launches.
        joining: further options of the `Job` of a process that joins a job.
    """

    num_ranks: int
    ranks_per_node: int
    placements: tuple[Placement, ...]
    joining: Mapping[str, Any]

    @property
    def has_rank_0(self) -> bool:
        """Whether rank 0, which takes the samples, is launched here."""
        return any(0 in placement.ranks for placement in self.placements)


def member_of_job(environ: Mapping[str, str]) -> Membership | None:
    """The rank of this process, if a launcher started it as one of several ranks.

    Raises:
        UserError: the variables of the launcher contradict each other, or the address of rank 0 is missing.
    """
    member = find_membership(environ)
    return member if member is not None and member.num_ranks > 1 else None


def place_on_hosts(hosts: Sequence[str]) -> JobPlace:
    """Place ranks on hosts, each given as ``NAME:RANKS``, in this order.

    >>> [list(placement.ranks) for placement in place_on_hosts(["a:2", "b:2"]).placements]
    [[0, 1], [2, 3]]

    Raises:
        UserError: a host is malformed or has no number of ranks, or the hosts have different numbers.
    """
    parsed = parse_hosts(",".join(hosts))
    for host in parsed:
        if host.num_slots is None:
            raise UserError(
                f"hosts: {host.name} has no number of ranks, should be like {host.name}:{parsed[0].num_slots or 8}"
            )
        if host.num_slots != parsed[0].num_slots:
            raise UserError(
                f"hosts: {host.name} has {host.num_slots} ranks, should have {parsed[0].num_slots} like {parsed[0].name}"
            )
    size = parsed[0].num_slots or 1
    if size * len(parsed) < 2:
        raise UserError(f"hosts: {parsed[0].name} has 1 rank; a measuring job needs at least 2")
    placements = tuple(Placement(host, range(k * size, (k + 1) * size)) for k, host in enumerate(parsed))
    return JobPlace(size * len(parsed), size, placements, {})


def place_on_member(member: Membership) -> JobPlace:
    """The part of a job that another launcher started which this process is: one rank.

    Raises:
        UserError: ranks are not numbered host by host, as OneFlow needs it.
    """
    size = member.num_local or member.num_ranks
    is_in_order = member.local_rank == member.rank % size and member.node in (None, member.rank // size)
    if member.num_local is not None and not is_in_order:
        where = "" if member.node is None else f" of node {member.node}"
        raise UserError(
            f"{member.launcher} made rank {member.rank} number {member.local_rank}{where}, should be number "
            f"{member.rank % size} of node {member.rank // size}: start as many ranks on each host, host by host "
            "(srun --distribution=block, mpirun --map-by slot)"
        )
    joining = {"rendezvous": member.rendezvous, "local_ranks": {member.rank: member.local_rank}}
    placement = Placement(Host(LOCALHOST), range(member.rank, member.rank + 1))
    return JobPlace(member.num_ranks, size, (placement,), joining)


def run_measuring_job(
    options: CampaignOptions, file: SampleFile | None, place: JobPlace, base: Cluster, **job_options: Any
) -> None:
    """Run a measuring job to its end, and add its samples to the file.  Call it from the main thread, which receives Ctrl-C.

    Args:
        options: what to measure.
        file: the file of samples, where rank 0 is launched; None elsewhere.
        place: the ranks.
        base: the base cluster, which names the device.
        job_options: options of `JobOptions`.

    Raises:
        UserError: a host cannot be reached, or lacks what the job needs, or a sample cannot be written.
        RankError: a rank or a host failed.  The samples taken before are in the file.
        Interrupted: SIGINT, SIGTERM or SIGHUP was received.
    """
    num_ranks = place.num_ranks
    counts = None if file is None else counts_in(file.samples, options, num_ranks)
    job = _job(request_of(options, counts), place, base, options.device == GPU, job_options)
    if file is None:
        _run(job, _discard, place)
        return
    with progress(f"{num_ranks} ranks", missing(file.samples, options, num_ranks), options.quiet) as bar:

        def keep(line: str) -> None:
            sample = sample_in_line(line)
            if sample is None:
                sys.stderr.write(f"{line}\n")
            else:
                file.append([sample])
                bar.update()

        try:
            _run(job, keep, place)
        except RankError as error:
            kept = f"the {len(file.samples)} samples in {file.path} are kept, and the same command continues them"
            raise type(error)(f"{error}; {kept}", error.rank, error.log) from error


def _run(job: Job, show: Callable[[str], None], place: JobPlace) -> None:
    try:
        run_job(job, show, write_message)
    except Interrupted as interrupted:
        # The launcher of a job reports its end for all ranks.
        raise Interrupted(interrupted.number, is_reported=bool(place.joining)) from None


def _discard(line: str) -> None:
    """Show nothing of ranks that take no samples."""


def _job(request: str, place: JobPlace, base: Cluster, on_gpus: bool, job_options: Mapping[str, Any]) -> Job:
    given = {name: value for name, value in job_options.items() if value is not None}
    fields: dict[str, Any] = {**JOB_DEFAULTS, "environment": None, "log_dir": None, "master_address": None, **given}
    del fields["slurm_options"]
    demands = Demands(
        num_nodes=place.num_ranks // place.ranks_per_node,
        devices_per_node=place.ranks_per_node,
        device=base.device.name,
        on_gpus=on_gpus,
        memory_bytes=(0.0,) * place.num_ranks,
    )
    return make_job(
        None,
        _SCRIPT,
        demands,
        place.placements,
        arguments=(request,),
        edited=False,
        checkpoints=None,
        **fields,
        **place.joining,
    )
