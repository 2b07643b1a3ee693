"""Several hosts on one machine: Linux namespaces, each with a network, a name and mounts of its own.

Nothing of it touches the machine's own network.  By default the hosts are on one bridge, in the namespace of the first host,
"login", on which the launcher runs; with links (:mod:`.links`) a relay connects them.  A host exists as long as its holder, a `cat`
that ends when the test does.  However that ends, a process of its own (:mod:`.ending`) then ends all that runs on the hosts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from autoddl.pipelines.runtime.availability import Availability

from . import ending
from .links import Link
from .wires import Wires

__all__ = ["SEARCH_PATH", "Hosts", "hosts_available", "links_available"]


#: Daemons are not on everyone's path.
SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def hosts_available(*programs: str) -> Availability:
    """Whether there can be hosts here that run these programs."""
    if not sys.platform.startswith("linux"):
        return Availability("namespaces are Linux's")
    if os.geteuid() != 0:
        return Availability("several hosts on one machine need root")
    for name in ("ip", "nsenter", "unshare", *programs):
        if shutil.which(name, path=SEARCH_PATH) is None:
            return Availability(f"several hosts on one machine need {name}")
    tried = subprocess.run(
        [
            "unshare",
            "--net",
            "--uts",
            "--mount",
            "sh",
            "-c",
            "ip link add name bridge type bridge && mount -t tmpfs none /mnt",
        ],
        capture_output=True,
        text=True,
    )
    return Availability(tried.stderr.strip().replace("\n", " ") if tried.returncode else "")


def links_available(*programs: str) -> Availability:
    """Whether there can be hosts here with links of limited bandwidth and latency."""
    if not (available := hosts_available("tc", "sysctl", *programs)):
        return available
    tried = subprocess.run(
        ["unshare", "--net", "sh", "-c", "tc qdisc add dev lo clsact && ip tuntap add name tried mode tun"],
        capture_output=True,
        text=True,
    )
    return Availability(tried.stderr.strip().replace("\n", " ") if tried.returncode else "")


class Hosts:
    """Hosts that reach each other by name.

    Args:
        folder: an empty folder for their files.
        names: their names; the launcher runs on the first one.
        wires: the links between a host and all others, by name; hosts that are not named have no limits. Without any, the hosts are
            on a bridge, in the namespace of the first one.
        loopbacks: the links inside a host, by name.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        wires: Mapping[str, Link] | None = None,
        loopbacks: Mapping[str, Link] | None = None,
    ) -> None:
        self.folder = folder
        self.names = tuple(names)
        self.addresses = {name: f"10.77.0.{number + 1}" for number, name in enumerate(names)}
        self._holders: dict[str, subprocess.Popen] = {}
        self._daemons: list[tuple[str, subprocess.Popen]] = []
        self._standing: set[int] = set()  # what daemons started for themselves
        hosts_file = folder / "hosts"
        lines = [f"{address} {name}" for name, address in self.addresses.items()]
        hosts_file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        for name in names:
            self._holders[name] = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
        for name in names:
            self._wait_for_namespace(name)
            self.run(name, "hostname", name)
            self.run(name, "ip", "link", "set", "lo", "up")
            self.run(name, "mount", "--bind", str(hosts_file), "/etc/hosts")
        self._ending = self._start_ending()
        self.wires: Wires | None = None
        if wires or loopbacks:
            self.wires = Wires(self._holder_pids(), self.addresses, wires or {}, loopbacks or {})
        else:
            self._connect()

    def _holder_pids(self) -> dict[str, int]:
        return {name: holder.pid for name, holder in self._holders.items()}

    def _start_ending(self) -> subprocess.Popen[str]:
        """Start the process that ends the hosts when this one has ended."""
        namespaces = [os.readlink(f"/proc/{pid}/ns/net") for pid in self._holder_pids().values()]
        command = [sys.executable, str(ending.__file__), *namespaces]
        return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def remove_at_end(self, control_group: Path) -> None:
        """Have a control group removed with the hosts."""
        assert self._ending.stdin is not None
        print(control_group, file=self._ending.stdin, flush=True)

    def _wait_for_namespace(self, name: str) -> None:
        ours = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 90
        while os.readlink(f"/proc/{self._holders[name].pid}/ns/net") == ours:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def _connect(self) -> None:
        login, *others = self.names
        self.run(login, "ip", "link", "add", "name", "bridge", "type", "bridge")
        self.run(login, "ip", "address", "add", f"{self.addresses[login]}/24", "dev", "bridge")
        self.run(login, "ip", "link", "set", "bridge", "up")
        for number, name in enumerate(others):
            pid, wire = str(self._holders[name].pid), f"wire{number}"
            self.run(login, "ip", "link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", pid)
            self.run(login, "ip", "link", "set", wire, "master", "bridge", "up")
            self.run(name, "ip", "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            self.run(name, "ip", "link", "set", "eth0", "up")

    def pid(self, name: str) -> int:
        """A process in the namespaces of a host."""
        return self._holders[name].pid

    def command(self, name: str, *words: str, folder: Path | None = None) -> list[str]:
        """A command line that runs another one on a host, in a folder or the present working directory."""
        directory = f"--wd={folder or os.getcwd()}"
        return ["nsenter", "-t", str(self._holders[name].pid), "-n", "-u", "-m", directory, "--", *words]

    def run(self, name: str, *words: str) -> str:
        """Run something on a host; its output."""
        done = subprocess.run(self.command(name, *words), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def start(
        self, name: str, *words: str, log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen:
        """Start a daemon on a host, which is ended with the hosts."""
        with log.open("ab") as output:
            daemon = subprocess.Popen(
                self.command(name, *words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PATH": SEARCH_PATH, **(environment or {})},
            )
        self._daemons.append((name, daemon))
        return daemon

    def daemons_of(self, name: str) -> list[subprocess.Popen]:
        """The daemons that :meth:`start` started on a host."""
        return [daemon for host, daemon in self._daemons if host == name]

    def _own_processes(self) -> list[subprocess.Popen]:
        return [*self._holders.values(), *(daemon for _, daemon in self._daemons)]

    def processes(self, name: str) -> set[int]:
        """All processes on a host but its holder, daemons and what these need."""
        known = {process.pid for process in self._own_processes()} | self._standing
        return ending.processes_in([os.readlink(f"/proc/{self._holders[name].pid}/ns/net")]) - known

    def wait_until_idle(self, patience_s: float = 60.0, besides: Sequence[int] = ()) -> None:
        """Fail when something that a job started on any host is still there."""
        deadline = time.monotonic() + patience_s
        while left := {pid for name in self.names for pid in self.processes(name)} - set(besides):
            if time.monotonic() > deadline:
                shown = subprocess.run(
                    ["ps", "-o", "pid,ppid,stat,args", "-p", ",".join(map(str, left))], capture_output=True
                )
                raise AssertionError(f"left behind: {shown.stdout.decode()}")
            time.sleep(0.05)

    def close(self) -> None:
        """End everything on all hosts."""
        assert self._ending.stdin is not None
        self._ending.stdin.close()
        self._ending.wait(60)
        for process in self._own_processes():
            process.wait(10)
        for holder in self._holders.values():
            assert holder.stdin is not None
            holder.stdin.close()
        if self.wires is not None:
            self.wires.close()
