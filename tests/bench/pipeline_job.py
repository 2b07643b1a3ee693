"""What every rank does in the experiment "pipelines": ``autoddl launch PLAN pipeline_job.py -- SPECIFICATION``.

The specification is the pickled arguments of `sleep_through`; rank r writes its reports to the file ``resultR`` beside it.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import autoddl
from autoddl.costmodel.devices import CPU
from autoddl.pipelines.runtime.backend import backend_of
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.pipeline.sleeping import sleep_through


def main() -> None:
    """Run the schedule."""
    specification = Path(sys.argv[1])
    backend = backend_of("float32", CPU, autoddl.launched().load_plan().cluster)
    reports = sleep_through(*pickle.loads(specification.read_bytes()), backend)
    Path(specification.parent, f"result{load_oneflow().env.get_rank()}").write_bytes(pickle.dumps(reports))


if __name__ == "__main__":
    main()
