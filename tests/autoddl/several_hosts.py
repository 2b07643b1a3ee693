"""Several hosts on one machine: Linux namespaces, each with a network, a name and mounts of its own, on one bridge.

Nothing of it touches the machine's own network: the bridge is in the namespace of the first host, "login", on which the
launcher runs. A host exists as long as its holder, a `cat` that ends when the test does, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from autoddl.pipelines.runtime.availability import Availability

SSHD = "/usr/sbin/sshd"


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


class Hosts:
    """``names[0]`` has the bridge; all reach each other by name."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self.names = tuple(names)
        self.addresses = {name: f"10.77.0.{number + 1}" for number, name in enumerate(names)}
        self._holders: dict[str, subprocess.Popen] = {}
        self._daemons: list[subprocess.Popen] = []
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
        self._connect()

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
        self._daemons.append(daemon)
        return daemon

    def processes(self, name: str) -> set[int]:
        """All processes on a host but its holder, daemons and what these need."""
        theirs = os.readlink(f"/proc/{self._holders[name].pid}/ns/net")
        known = {process.pid for process in [*self._holders.values(), *self._daemons]} | self._standing
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in known:
                with contextlib.suppress(OSError):
                    if os.readlink(entry / "ns" / "net") == theirs:
                        found.add(int(entry.name))
        return found

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
        self._standing.clear()
        for daemon in reversed(self._daemons):
            daemon.kill()
        for daemon in self._daemons:
            daemon.wait()
        for name in self.names:
            for pid in self.processes(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for holder in self._holders.values():
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait(10)


class SshHosts(Hosts):
    """Hosts that login reaches by ``ssh``; of ``refusing`` the key is not the one that they accept."""

    def __init__(self, folder: Path, names: Sequence[str], refusing: Sequence[str] = ()) -> None:
        super().__init__(folder, names)
        for key in ("user", "other"):
            _make_key(folder / key)
        known = []
        for name in names[1:]:
            key = folder / f"host_{name}"
            _make_key(key)
            known.append(f"{name} {' '.join(key.with_suffix('.pub').read_text().split()[:2])}")
            self._start_sshd(name, key, folder / ("other.pub" if name in refusing else "user.pub"))
        (folder / "known_hosts").write_text("\n".join([*known, ""]))
        config = folder / "ssh_config"
        config.write_text(
            f"Host *\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
            "  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n  User root\n"
        )
        self.ssh = f"ssh -F {config}"

    def launch_options(self, *names: str) -> list[str]:
        """Of a launch on these hosts."""
        return ["--ssh", self.ssh, "--hosts", ",".join(names), "--log-dir", "logs"]

    def _start_sshd(self, name: str, key: Path, authorized: Path) -> None:
        self.run(name, "mount", "-t", "tmpfs", "none", "/run")
        self.run(name, "mkdir", "/run/sshd")
        config = self.folder / f"sshd_{name}.conf"
        config.write_text(
            f"ListenAddress {self.addresses[name]}\nHostKey {key}\nAuthorizedKeysFile {authorized}\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\nPidFile none\n"
        )
        log = self.folder / f"sshd_{name}.log"
        self.start(name, SSHD, "-D", "-e", "-f", str(config), log=log)
        deadline = time.monotonic() + 90
        while "Server listening" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


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
