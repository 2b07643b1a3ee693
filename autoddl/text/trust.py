"""How far a plan can be trusted, as a section of its text."""

from __future__ import annotations

from ..trusting import PlanTrust
from .tables import Block, Section

__all__ = ["trust_section"]

#: How many rivals are named.
NAMED = 4


def trust_section(known: PlanTrust) -> Section:
    """What the plan's cluster was calibrated with, its chance to be the best, its rivals, and what to measure."""
    found = known.trust
    calibration = known.calibration
    lines: list[Block] = [
        "Trust",
        f"  calibrated {calibration.date[:10]} on {calibration.machine}, {calibration.num_samples:,} samples",
        f"  best of {len(found.rivals) + 1} plans with probability {found.probability:.0%}, expected regret "
        f"{found.expected_regret:.2%} (over {found.num_draws} draws of the parameters that the measurements leave open)",
    ]
    for name, probability in [rival for rival in found.rivals if rival[1] > 0][:NAMED]:
        lines.append(f"  else {name}: {probability:.0%}")
    if found.measurement is not None:
        measurement = found.measurement
        lines.append(
            f"  to settle it against {measurement.rival}, measure {measurement} ({measurement.share:.0%} of the doubt)"
        )
    return lines
