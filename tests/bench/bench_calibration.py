"""How well a fit predicts message sizes that it has not seen, in its own session and in a later one.

Collectives are measured at 4^k bytes and at sizes between them, interleaved.  The cost model is fitted to the former; the latter
are predicted.  Then the ranks are started again, the latter are measured once more, and the first session's fit is held
against that.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence

import numpy as np

from autoddl.calib.campaign import CampaignOptions, measure_locally
from autoddl.calib.clusterfile import Fit, calibrated_document, errors_of_cluster, fit_samples
from autoddl.calib.fit import UNDISTURBED, HeldOut, points_of
from autoddl.calib.measurements import Sample, SampleFile
from autoddl.costmodel.calibration import TRANSFER
from autoddl.costmodel.cluster import from_document, load_cluster
from autoddl.costmodel.units import format_bytes
from autoddl.text.fits import crowding_remarks

FITTED = tuple(2**k for k in range(14, 25, 2))
HELD_OUT = tuple(3 * 2**k for k in (15, 17, 19, 21, 22))


def session(path: str, ranks: Sequence[int], budget_s: float, quiet: bool, sizes: Sequence[int]) -> list[Sample]:
    """Measure, or read what an earlier run left in ``path``."""
    options = CampaignOptions(
        ranks=tuple(ranks),
        sizes=tuple(sizes),
        shapes=(),
        elementwise=(),
        repetitions=30,
        budget_s=budget_s,
        quiet=quiet,
    )
    file = SampleFile(path)
    measure_locally(options, file)
    disturbed = np.mean([sample.foreign > UNDISTURBED for sample in file.samples])
    print(f"{len(file.samples):,} samples; other processes used the cores during {disturbed:.0%} of them")
    return file.samples


def show(title: str, errors: Sequence[HeldOut]) -> None:
    """Median errors by ranks and collective."""
    print(f"\n{title}: median (and 90th percentile) of |predicted - measured| / measured")
    names = list(dict.fromkeys(one.point.collective for one in errors if one.point.collective != TRANSFER))
    for ranks in sorted({one.point.ranks_per_node for one in errors}):
        mine = [one for one in errors if one.point.ranks_per_node == ranks and one.point.collective in names]
        cells = [
            f"{name} {np.median([one.error for one in mine if one.point.collective == name]):.1%}" for name in names
        ]
        every = [one.error for one in mine]
        print(
            f"  {ranks} ranks: {np.median(every):.1%} ({np.quantile(every, 0.9):.1%}) of {len(every)} points; {', '.join(cells)}"
        )


def show_ceiling(first: Sequence[Sample], second: Sequence[Sample]) -> None:
    """How far two sessions' measurements of the same are apart: no prediction can be expected to be nearer."""

    def measured(samples: Sequence[Sample]) -> dict[tuple[object, ...], float]:
        points = [point for point in points_of(samples, "intra-node") if point.collective != TRANSFER]
        return {(p.ranks_per_node, p.collective, p.ranks, p.stride, p.num_bytes): p.seconds for p in points}

    before, after = measured(first), measured(second)
    for ranks in sorted({key[0] for key in after}):
        apart = [abs(before[key] - after[key]) / after[key] for key in after.keys() & before.keys() if key[0] == ranks]
        print(f"  {ranks} ranks: the two sessions' measurements themselves are {np.median(apart):.1%} apart")


def fitted_to(samples: Sequence[Sample], sizes: Sequence[int]) -> Fit:
    """The fit to some of the sizes."""
    return fit_samples([sample for sample in samples if sample.bytes in sizes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for each session (%(default)s)")
    parser.add_argument("--folder", help="keep the samples here, and continue what is there")
    parser.add_argument("--one-session", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    arguments = parser.parse_args()
    ranks = [int(number) for number in arguments.ranks.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or temporary
        os.makedirs(folder, exist_ok=True)
        first = session(f"{folder}/first.csv", ranks, arguments.budget, arguments.quiet, (*FITTED, *HELD_OUT))
        fit = fitted_to(first, FITTED)
        cluster = from_document(calibrated_document(fit, load_cluster("local-cpu"), "session"), "session")
        level = fit.levels[0]
        tried = ", ".join(f"{choice.form.name} {choice.median_error:.1%}" for choice in level.choices)
        print(f"formula: {level.form.name} (held-out errors of all: {tried})")
        print("\n".join(crowding_remarks(level)))
        between = [sample for sample in first if sample.bytes not in FITTED]
        sizes = f"{format_bytes(min(HELD_OUT))} to {format_bytes(max(HELD_OUT))}"
        show(f"Sizes between the fitted ones, {sizes}, same session", errors_of_cluster(cluster, between))
        if not arguments.one_session:
            second = session(f"{folder}/second.csv", ranks, arguments.budget, arguments.quiet, HELD_OUT)
            show("The same sizes a session later", errors_of_cluster(cluster, second))
            show_ceiling(between, second)


if __name__ == "__main__":
    main()
