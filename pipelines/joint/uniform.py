"""Uniform configurations: the pipelines that Megatron-LM's flags describe.

A uniform configuration has the same tensor parallel degree t, data parallel degree d and number of blocks everywhere.  The devices
are in the order of Megatron-LM (Narayanan et al., SC'21): tensor parallel groups are neighbours, then data parallel ones, and the
pipeline's stages are the outermost.  On nodes of G devices a stage of w = t d devices has

==================  ============================================================================
w <= G              w devices of one node; w divides G
w > G               w / G whole nodes; t <= G divides G, or t is a multiple of G
==================  ============================================================================

**Cut.**  The repeated blocks are divided evenly among p v chunks for p stages with v chunks each (interleaving): chunk c is on
stage c mod p.  The embedding belongs to the first chunk, the final norm, head and loss to the last one.  If the blocks do not
divide evenly, the first and the last chunk, which have more than blocks, get the fewer ones.

**Strategies.**  Column- and row-parallel products alternate (:func:`autoddl.search.baselines.megatron`).  The experts of a layer
are divided over e neighbours among the replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.nearest import divisors, nearest_that_work
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.suggestions import unknown
from autoddl.costmodel.workload import Workload
from autoddl.search.baselines import megatron, with_experts

from .configuration import Configuration, Option, PipelineSchedule, StageChoice
from .meshes import StageMesh
from .partition import Chain

__all__ = ["SCHEDULES", "UniformLayout", "expert_parts", "uniform_configuration", "uniform_cut", "uniform_strategies"]

#: Families of schedules by name, with the options of each: those of one chunk per stage.
SCHEDULES: dict[str, tuple[tuple[str, Option], ...]] = {
    "1f1b": (("policy", "A"),),
    "gpipe": (),
    "zero-bubble": (("policy", "H1"),),
    "chimera": (("concatenation", "direct"), ("num_pipelines", 2)),
}
#: Families with several chunks per stage, by the family without.
INTERLEAVED = {"1f1b": "interleaved-1f1b", "gpipe": "grouped-gpipe"}
#: Families of which every device holds the stages of two pipelines in opposite directions.
_BIDIRECTIONAL = ("chimera",)


@dataclass(frozen=True)
class UniformLayout:
    """The degrees of a uniform configuration.

    Attributes:
        tensor_parallel: Devices that split each layer, t.
        num_stages: Devices in a row of the pipeline, p.
        data_parallel: Replicas of the model, d.
        interleave: Chunks of the model on each stage's devices, v.
        schedule: Family of the schedule, one of :data:`SCHEDULES`; with several chunks that of :data:`INTERLEAVED`.
        expert_parallel: Parts that the experts of a layer are divided into, neighbours among the replicas.

    Raises:
        UserError: a degree is below 1, or there is no such schedule.

    >>> UniformLayout(tensor_parallel=8, num_stages=12, data_parallel=4).num_devices
    384
    """

    tensor_parallel: int = 1
    num_stages: int = 1
    data_parallel: int = 1
    interleave: int = 1
    schedule: str = "1f1b"
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        for name, value in (
            ("tp", self.tensor_parallel),
            ("pp", self.num_stages),
            ("dp", self.data_parallel),
            ("interleave", self.interleave),
            ("ep", self.expert_parallel),
        ):
            if value < 1:
                raise UserError(f"{name} {value} should be at least 1")
        if self.data_parallel % self.expert_parallel:
            raise UserError(
                f"ep {self.expert_parallel} does not divide the dp {self.data_parallel} replicas, over which experts are divided"
            )
        if self.interleave > 1 and self.num_stages == 1:
            raise UserError(f"interleave {self.interleave} needs a pipeline, pp 2 or more")
        if self.schedule not in SCHEDULES:
            raise unknown("schedule", self.schedule, tuple(SCHEDULES))
        if self.interleave > 1 and self.schedule not in INTERLEAVED:
            raise UserError(
                f"interleave {self.interleave} is for schedules {' and '.join(INTERLEAVED)}, {self.schedule} has no chunks"
            )

    @property
    def num_devices(self) -> int:
        """Number of devices, t p d."""
        return self.tensor_parallel * self.num_stages * self.data_parallel

    @property
    def devices_per_stage(self) -> int:
        """Number of devices of a stage, t d."""
        return self.tensor_parallel * self.data_parallel

    def mesh(self, cluster: Cluster) -> StageMesh:
        """The rectangle of devices of a stage.

        Raises:
            UserError: the degrees do not divide the cluster; the message says which value would.
        """
        degrees = f"tp {self.tensor_parallel} x pp {self.num_stages} x dp {self.data_parallel}"
        if self.num_devices != cluster.num_devices:
            rest, remainder = divmod(cluster.num_devices, self.tensor_parallel * self.num_stages)
            right = f"; dp {rest} would use all" if rest and not remainder else ""
            raise UserError(
                f"{degrees} is {self.num_devices} devices, {cluster.name} has {cluster.num_devices} "
                f"({cluster.num_nodes} nodes of {cluster.devices_per_node}){right}"
            )
        width, per_node = self.devices_per_stage, cluster.devices_per_node
        mesh = StageMesh(1, width) if width <= per_node else StageMesh(width // per_node, per_node)
        if mesh.num_devices != width or not mesh.tiles(cluster):
            raise UserError(
                f"{degrees}: stages of tp x dp = {width} devices do not fill nodes of {per_node} devices evenly"
            )
        inner = mesh.devices_per_node
        if inner % self.tensor_parallel and self.tensor_parallel % inner:
            works = [size for size in divisors(inner) if width % size == 0]
            nearest = nearest_that_work("tp", self.tensor_parallel, works)
            raise UserError(
                f"tp {self.tensor_parallel} does not divide the {inner} devices of a stage in a node; {nearest}"
            )
        return mesh

    def degrees(self, cluster: Cluster) -> tuple[tuple[int, int], ...]:
        """(data parallel, tensor parallel) for each network level of a stage's devices, outermost first.

        Raises:
            UserError: as of :meth:`mesh`.
        """
        sizes, left = self.mesh(cluster).devices(cluster).level_sizes, self.tensor_parallel
        degrees: list[tuple[int, int]] = []
        for size in reversed(sizes):  # tensor parallel groups are innermost
            split = min(left, size)
            degrees.append((size // split, split))
            left //= split
        return tuple(reversed(degrees))

    def pipeline_schedule(self, num_micro_batches: int) -> PipelineSchedule:
        """The schedule of ``num_micro_batches`` micro-batches per replica.

        Raises:
            UserError: interleaving needs a multiple of the stages.
        """
        depth, chunks = self.num_stages, self.interleave
        if depth == 1:
            return PipelineSchedule("1f1b", 1, num_micro_batches)
        if chunks > 1:
            name = INTERLEAVED[self.schedule]
            if num_micro_batches % depth and name == "interleaved-1f1b":
                raise UserError(
                    f"interleave {chunks} needs micro-batches in multiples of pp {depth}, a step has {num_micro_batches} of them"
                )
            return PipelineSchedule(name, depth, num_micro_batches, (("groups", chunks),), chunks)
        if self.schedule in _BIDIRECTIONAL:
            if depth % 2 or num_micro_batches < 2:
                raise UserError(
                    f"schedule {self.schedule} needs an even pp and 2 micro-batches or more, not pp {depth} and {num_micro_batches}"
                )
            return PipelineSchedule(self.schedule, depth, num_micro_batches, SCHEDULES[self.schedule], num_pipelines=2)
        return PipelineSchedule(self.schedule, depth, num_micro_batches, SCHEDULES[self.schedule])


def expert_parts(graph: LayerGraph, replicas: int) -> tuple[int, ...]:
    """The numbers of parts that the experts of a model can be divided into over its replicas; (1,) for a model without experts."""
    counts = {layer.attributes["experts"] for layer in graph.layers if layer.kind == "experts"}
    return tuple(divisors(gcd(replicas, *counts))) if counts else (1,)


def uniform_cut(num_units: int, num_chunks: int) -> tuple[int, ...]:
    """Divide the units of a model evenly among chunks; the first and the last chunk get the fewer ones.

    Raises:
        UserError: there are fewer units than chunks.

    >>> uniform_cut(8, 4), uniform_cut(10, 4), uniform_cut(9, 4)
    ((2, 2, 2, 2), (2, 3, 3, 2), (2, 3, 2, 2))
    """
    least, more = divmod(num_units, num_chunks)
    if not least:
        raise UserError(f"{num_chunks} chunks (pp x interleave) should be at most the {num_units} blocks of the model")
    # Chunks from the second one on get one more, then the first one, then the last one.
    order = [*range(1, num_chunks - 1), 0, num_chunks - 1]
    larger = set(order[:more])
    return tuple(least + (chunk in larger) for chunk in range(num_chunks))


def uniform_strategies(
    graph: LayerGraph, layout: UniformLayout, degrees: tuple[tuple[int, int], ...]
) -> dict[str, Strategy]:
    """Return the strategies of a stage's layers by name.

    Args:
        graph: The layers.
        layout: The degrees of the configuration.
        degrees: Its (data parallel, tensor parallel) degrees for each network level (:meth:`UniformLayout.degrees`).
    """
    strategies = with_experts(graph, megatron(graph, degrees).strategies, layout.expert_parallel)
    assert strategies is not None  # ep divides dp
    return strategies


def uniform_configuration(chain: Chain, cluster: Cluster, layout: UniformLayout, workload: Workload) -> Configuration:
    """Make a uniform configuration.

    Args:
        chain: The model as a chain of units.
        cluster: The devices and their network.
        layout: The degrees.
        workload: Batch, micro-batch (over all replicas), precision and so on; all stages recompute as it says.

    Raises:
        UserError: a degree does not fit the model, the cluster or the batch.
    """
    mesh, degrees = layout.mesh(cluster), layout.degrees(cluster)
    if workload.micro_batch % layout.data_parallel:
        raise UserError(
            f"a micro-batch of {workload.micro_batch} does not divide among dp {layout.data_parallel} replicas"
        )
    if layout.expert_parallel > 1 and not any(layer.kind == "experts" for layer in chain.graph.layers):
        raise UserError(f"ep {layout.expert_parallel}: the model {chain.graph.name} has no experts; leave it out")
    first, stages = 0, []
    for num_units in uniform_cut(chain.num_units, layout.num_stages * layout.interleave):
        graph = chain.stage(first, first + num_units).graph
        stages.append(StageChoice(num_units, workload.recompute, uniform_strategies(graph, layout, degrees)))
        first += num_units
    spec = layout.pipeline_schedule(workload.num_micro_batches)
    return Configuration(mesh, spec, workload, tuple(stages))
