"""Makes each rank a node of its own for OneFlow, so that it may have any GPU of any host.

OneFlow 0.9.0 counts the hosts from which ranks connect, N, and maps rank r of R to the device r % (R / N) of node r // (R / N). A
rank that was started elsewhere, or that sees only its own GPU, does not fit. If there are as many nodes as ranks, then rank r is
the only one of node r, on device 0: the one GPU that it sees. OneFlow's Python code fills in a message that may state the number
of nodes (``BootstrapConf.node_size``), but never states it; this module adds it while OneFlow is imported. Nothing else depends on
nodes: NCCL finds out by itself which GPUs share a host, and CPU ranks talk to the same addresses.

All ranks of a job must do the same, with ``LOCAL_RANK=0``.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any

__all__ = ["OWN_NODES_VARIABLE", "make_own_nodes"]

#: Environment variable by which a launch tells its ranks to be nodes of their own.
OWN_NODES_VARIABLE = "AUTODDL_OWN_NODES"
_MODULE = "oneflow.framework.env_util"


def make_own_nodes() -> None:
    """Let OneFlow count as many nodes as ranks. Call it before OneFlow is imported."""
    assert "oneflow" not in sys.modules, "OneFlow has already counted its nodes"
    sys.meta_path.insert(0, _EnvironmentFinder())


class _EnvironmentFinder:
    """Finds OneFlow's module that describes the job to its core, once, and changes what it does."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            complete = module.CompleteEnvProto

            def complete_with_nodes(description: Any) -> None:
                complete(description)
                job = description.ctrl_bootstrap_conf
                job.node_size = job.world_size

            module.CompleteEnvProto = complete_with_nodes

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
