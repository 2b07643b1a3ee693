"""Run a command on an emulated cluster: ``python tests/cluster --hosts 4 --wire 300Mbit,1ms -- COMMAND ...``.

The command runs on a host of its own, which reaches the others by ssh. It finds them in its environment: ``CLUSTER_SSH`` is the ssh
command, ``CLUSTER_HOSTS`` the names (``host1,host2``), ``CLUSTER_SLOTS`` the names with numbers of ranks (``host1:2,host2:2``).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster.emulated import ClusterSize, cluster_available, emulated, pairs
from cluster.links import parse_link


def main() -> int:
    """Make the cluster, run the command, and end the cluster; returns the command's exit code."""
    parser = argparse.ArgumentParser(
        prog="python tests/cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="number of hosts (%(default)s)")
    parser.add_argument("--ranks", type=int, default=1, metavar="G", help="ranks of each host (%(default)s)")
    link = "BANDWIDTH,LATENCY"
    parser.add_argument("--wire", default="", metavar=link, help="of each host, such as 300Mbit,1ms (no limit)")
    parser.add_argument("--inside", default="", metavar=link, help="between ranks of a host (no limit)")
    parser.add_argument(
        "--wire-of", action="append", default=[], metavar=f"HOST={link}", help="of one host; repeatable"
    )
    parser.add_argument(
        "--cores-of", action="append", default=[], metavar="HOST=CORES", help="CPU quota of one host; repeatable"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("the command is missing: give it after --")
    if not (available := cluster_available()):
        parser.error(available.reason)
    try:
        size = ClusterSize(
            arguments.hosts,
            arguments.ranks,
            *(parse_link(text) if text else parse_link("0s") for text in (arguments.wire, arguments.inside)),
            {name: parse_link(text) for name, text in pairs(arguments.wire_of).items()},
            {name: float(text) for name, text in pairs(arguments.cores_of).items()},
        )
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder, emulated(Path(folder), size) as cluster:
        print(size.described(), file=sys.stderr)
        # So that `autoddl` and `python` are those of this environment, even if it is not activated.
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        environment = {**os.environ, **cluster.environment, "PATH": programs}
        return subprocess.run(cluster.command("login", *command), env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
