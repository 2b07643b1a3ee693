"""Hosts in a Slurm cluster."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from .namespaces import Hosts

__all__ = ["SlurmHosts"]


class SlurmHosts(Hosts):
    """Hosts in a Slurm cluster: the controller on login, a node daemon on each of the others. All speak through one munged."""

    def __init__(self, folder: Path, names: Sequence[str], cores_per_node: int = 2) -> None:
        super().__init__(folder, names)
        login, *nodes = names
        folder.chmod(0o711)
        socket, key = folder / "munge.socket", folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._start_munged(socket, key)
        self.config = folder / "slurm.conf"
        memory = 2000
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={login}({self.addresses[login]})",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={socket}",
            "CryptoType=crypto/munge",
            "MpiDefault=none",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SwitchType=switch/none",
            "ReturnToService=2",
            "SlurmdParameters=config_overrides",  # whatever this machine has
            "SlurmctldTimeout=30",
            "SlurmdTimeout=30",
            "KillWait=5",
            "MailProg=/bin/true",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool-%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd-%n.pid",
            f"SlurmctldLogFile={folder}/slurmctld.log",
            f"SlurmdLogFile={folder}/slurmd-%n.log",
            *(
                f"NodeName={name} NodeAddr={self.addresses[name]} NodeHostname={name} CPUs={cores_per_node} "
                f"RealMemory={memory} State=UNKNOWN"
                for name in nodes
            ),
            f"PartitionName=all Nodes={','.join(nodes)} Default=YES MaxTime=INFINITE State=UP",
        ]
        self.config.write_text("\n".join([*lines, ""]))
        (folder / "state").mkdir()
        self.environment = {"SLURM_CONF": str(self.config)}
        self.start(login, "slurmctld", "-D", "-f", str(self.config), log=folder / "ctld.out")
        for name in nodes:
            (folder / f"spool-{name}").mkdir()
            self.start(name, "slurmd", "-D", "-f", str(self.config), log=folder / f"{name}.out")
        self._wait_until_up(len(nodes))
        self._standing = {pid for name in names for pid in self.processes(name)}

    def _start_munged(self, socket: Path, key: Path) -> None:
        files = [f"--{what}-file={self.folder}/munge.{what}" for what in ("pid", "log", "seed")]
        self.start(
            self.names[0],
            "munged",
            "--foreground",
            "--force",
            f"--socket={socket}",
            f"--key-file={key}",
            *files,
            log=self.folder / "munged.out",
        )
        deadline = time.monotonic() + 90
        while not socket.exists():
            assert time.monotonic() < deadline, (self.folder / "munged.out").read_text()
            time.sleep(0.05)

    def _wait_until_up(self, num_nodes: int) -> None:
        deadline = time.monotonic() + 90
        states: list[str] = []
        while states.count("idle") < num_nodes:
            assert time.monotonic() < deadline, (states, (self.folder / "slurmctld.log").read_text()[-3000:])
            time.sleep(0.2)
            done = self.slurm("sinfo", "--noheader", "--Node", "--format=%t")
            states = done.stdout.split()

    def slurm(self, *words: str, timeout_s: float = 180.0) -> subprocess.CompletedProcess[str]:
        """Run something on login that speaks with Slurm."""
        return subprocess.run(
            self.command(self.names[0], *words),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **self.environment},
        )
