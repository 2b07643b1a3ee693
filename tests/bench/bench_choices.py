"""Every choice besides splits on ranks, alone and mixed: values against one device, bytes on the wire against the price.

Plans of small models (:mod:`choice_cases`) are verified as by ``autoddl verify``: three training steps on local CPU ranks, whose
losses, gradients and parameters are compared with those of one device, and whose bytes are counted in a network namespace of the
ranks' own, layer by layer and for a whole step.  "sent / price" is that of a whole step, "largest" the largest price of one.
A row has the worst of its plans.  Ends with 1 if a plan is wrong.

    python tests/bench/bench_choices.py [--only ZeRO] [--ranks 4] [--each]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from choice_cases import CHOICES, MESHES, Choice, Mesh, plan_of

from autoddl.costmodel.units import format_bytes
from autoddl.pipelines.runtime.ranks.launcher import RankPool
from autoddl.pipelines.runtime.ranks.network import namespace_available
from autoddl.text.tables import Column, Table
from autoddl.verification import verify
from autoddl.verification.result import ValueCheck, Verification, largest_error


@dataclass(frozen=True)
class Row:
    """The plans that make a choice, on one mesh or on all of them."""

    choice: Choice
    meshes: tuple[Mesh, ...]
    found: tuple[Verification, ...]

    @property
    def ratios(self) -> str:
        """The least and the largest ratio of bytes sent and predicted, of plans that send enough to tell it from noise."""
        checks = [(one.step, one.tolerance) for one in self.found]
        ratios = [1 + (step.deviation or 0.0) for step, tolerance in checks if tolerance.resolves(step)]
        return f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "-"

    def error(self, checks_of: Callable[[Verification], Sequence[ValueCheck]]) -> str:
        """The largest error of some values."""
        found = largest_error([check for one in self.found for check in checks_of(one)])
        return "-" if found is None else f"{found.error:.0e}"

    @property
    def verdict(self) -> str:
        """How many plans are right, and the first fault."""
        faults = [f"{mesh}: {one.faults[0]}" for mesh, one in zip(self.meshes, self.found) if one.faults]
        return f"{len(faults)} of {len(self.found)} wrong; {faults[0]}" if faults else f"{len(self.found)} right"


COLUMNS: tuple[Column[Row], ...] = (
    Column("choice", lambda row: row.choice.name),
    Column("ranks", lambda row: ", ".join(map(str, row.meshes))),
    Column("largest", lambda row: format_bytes(max(one.step.predicted_bytes for one in row.found)), right=True),
    Column("sent / price", lambda row: row.ratios, right=True),
    Column("loss", lambda row: f"{max(max(one.loss_errors) for one in row.found):.0e}", right=True),
    Column("gradients", lambda row: row.error(lambda one: one.gradients), right=True),
    Column("parameters", lambda row: row.error(lambda one: one.parameters), right=True),
    Column("plans", lambda row: row.verdict),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="choices whose name contains it")
    parser.add_argument("--ranks", type=int, metavar="N", help="meshes of so many ranks")
    parser.add_argument("--each", action="store_true", help="a row for each plan, not for all plans of a choice")
    arguments = parser.parse_args()
    if not (counted := namespace_available()):
        print(f"bytes are not counted: {counted.reason}")
    found: dict[tuple[int, int], Verification] = {}  # by the places of the choice and of the mesh
    for num_ranks in sorted({mesh.num_ranks for mesh in MESHES} if arguments.ranks is None else {arguments.ranks}):
        with RankPool(num_ranks, private_network=bool(counted)) as pool:
            for (number, choice), (place, mesh) in product(enumerate(CHOICES), enumerate(MESHES)):
                plan = plan_of(choice, mesh) if mesh.num_ranks == num_ranks and arguments.only in choice.name else None
                if plan is not None:
                    found[number, place] = verify(plan, num_ranks, pool=pool)
                    print(f"{choice.name}, {mesh}: {found[number, place].is_right}", file=sys.stderr, flush=True)
    rows = []
    for number, choice in enumerate(CHOICES):
        places = [place for place in range(len(MESHES)) if (number, place) in found]
        groups = [[place] for place in places] if arguments.each else [places] if places else []
        for group in groups:
            meshes = tuple(MESHES[place] for place in group)
            rows.append(Row(choice, meshes, tuple(found[number, place] for place in group)))
    print("Bytes of a step by all ranks; relative errors of three steps against one device")
    print("\n".join(Table.of(COLUMNS, rows).lines()))
    wrong = sum(not one.is_right for one in found.values())
    print(f"{len(found) - wrong} of {len(found)} plans are right")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
