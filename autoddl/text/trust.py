"""How far a plan can be trusted, as a section of its text."""

from __future__ import annotations

from ..trusting import PlanTrust
from .tables import Block, Section

__all__ = ["trust_section"]

#: Largest number of rivals that are named.
_MAX_RIVALS = 4


def trust_section(trusted: PlanTrust) -> Section:
    """Return the calibration, the probability that the plan is the best, its rivals, and the measurement that would decide."""
    trust, calibration = trusted.trust, trusted.calibration
    lines: list[Block] = [
        "Trust",
        f"  calibrated {calibration.date[:10]} on {calibration.machine}, {calibration.num_samples:,} samples",
        f"  best of {len(trust.rivals) + 1} plans with probability {trust.probability:.0%}, expected regret "
        f"{trust.expected_regret:.2%} (over {trust.num_draws} draws of the parameters that the measurements leave open)",
    ]
    for name, probability in [rival for rival in trust.rivals if rival[1] > 0][:_MAX_RIVALS]:
        lines.append(f"  else {name}: {probability:.0%}")
    if trust.measurement is not None:
        measurement = trust.measurement
        lines.append(
            f"  to settle it against {measurement.rival}, measure {measurement} ({measurement.share:.0%} of the doubt)"
        )
    return lines
