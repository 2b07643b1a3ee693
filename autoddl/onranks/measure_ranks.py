"""The script of a measuring job: every rank runs it, and rank 0 prints the samples, one per line, for the process that launched it.

``measure_ranks.py REQUEST``, with the request of :func:`autoddl.calib.campaign.request_of` as JSON.
"""

from __future__ import annotations

import sys

from autoddl.calib.campaign import measure_in_job, read_request
from autoddl.calib.measurements import sample_line


def main(request: str) -> None:
    """Measure what the request asks for."""
    options, counts = read_request(request)

    def keep(samples: list) -> None:
        sys.stdout.write("".join(map(sample_line, samples)))
        sys.stdout.flush()

    measure_in_job(options, counts, keep)


if __name__ == "__main__":
    main(sys.argv[1])
