"""Hosts that are reached by ssh."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .links import Link
from .namespaces import Hosts

__all__ = ["SshHosts"]

SSHD = "/usr/sbin/sshd"


class SshHosts(Hosts):
    """Hosts that login reaches by ``ssh``.

    Args:
        folder, names, wires, loopbacks: see `Hosts`.
        refusing: hosts that accept another key than login's.
        environment: variables of the processes that ssh starts.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        refusing: Sequence[str] = (),
        wires: Mapping[str, Link] | None = None,
        loopbacks: Mapping[str, Link] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, names, wires, loopbacks)
        for key in ("user", "other"):
            _make_key(folder / key)
        known = []
        for name in names[1:]:
            key = folder / f"host_{name}"
            _make_key(key)
            known.append(f"{name} {' '.join(key.with_suffix('.pub').read_text().split()[:2])}")
            self._start_sshd(name, key, folder / ("other.pub" if name in refusing else "user.pub"), environment or {})
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

    def _start_sshd(self, name: str, key: Path, authorized: Path, environment: Mapping[str, str]) -> None:
        self.run(name, "mount", "-t", "tmpfs", "none", "/run")
        self.run(name, "mkdir", "/run/sshd")
        config = self.folder / f"sshd_{name}.conf"
        variables = "".join(f" {variable}={value}" for variable, value in environment.items())
        config.write_text(
            f"ListenAddress {self.addresses[name]}\nHostKey {key}\nAuthorizedKeysFile {authorized}\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\nPidFile none\n"
            + (f"SetEnv{variables}\n" if variables else "")
        )
        log = self.folder / f"sshd_{name}.log"
        self.start(name, SSHD, "-D", "-e", "-f", str(config), log=log)
        deadline = time.monotonic() + 90
        while "Server listening" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
