"""The launcher's connection to a supervisor: a local process that is the supervisor, or the ssh process that reaches it."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.memory_files import MemoryFile
from autoddl.pipelines.runtime.ranks.descendants import end_descendants, is_stopped

from .heartbeat import HeartbeatTimes
from .hosts import Host
from .lines import LineReader, LineSender, Message

__all__ = ["Connection", "supervisor_command"]

# Remove the script's folder from the path: a folder "autoddl" in the working directory must not hide the package.
_START = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; from autoddl.launching.supervisor import main; "
    "main(is_remote={}, host_timeout_s={!r})"
)
_SSH_OPTIONS = (
    ("BatchMode", "yes"),  # no prompts
    ("ConnectTimeout", "10"),
    ("ServerAliveInterval", "5"),  # a lost host is noticed after three of these
    ("ServerAliveCountMax", "3"),
)
_KILL_SECONDS = 5.0  # how long killed processes may take to exit
_MAX_ERRORS_BYTES = 1 << 20


def supervisor_command(
    host: Host, python: str, own_python: str, ssh: Sequence[str], heartbeat: HeartbeatTimes
) -> list[str]:
    """The command that starts the supervisor of a host. Its work is sent to its standard input, so that no shell parses it."""
    start = _START.format(not host.is_local, heartbeat.host_timeout_s)
    if host.is_local:
        return [own_python, "-c", start]
    options = [word for name, value in _SSH_OPTIONS for word in ("-o", f"{name}={value}")]
    return [*ssh, *options, "-T", "--", host.name, shlex.join([python, "-c", start])]


class Connection:
    """The messages to and from the supervisor of one host.

    Attributes:
        host: the host.
        is_open: whether the supervisor can be reached.
        silence_s: time without a message, as counted by :meth:`add_silence`.

    Raises:
        UserError: ``command`` cannot be run.
    """

    def __init__(self, host: Host, command: Sequence[str]) -> None:
        self.host = host
        self.is_open = True
        self.silence_s = 0.0
        self._reader = LineReader()
        self._errors = MemoryFile()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors.fd,
                start_new_session=True,  # Ctrl-C reaches only the launcher, which forwards it
            )
        except OSError as error:
            self._errors.close()
            raise UserError(f"{command[0]}, which connects to {host.name}, cannot be run: {error.strerror}") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        self._sender = LineSender(self._process.stdin.fileno())
        os.set_blocking(self._output, False)

    def fileno(self) -> int:
        return self._output

    def send(self, do: str, **values: Any) -> None:
        """Send a command without waiting for the supervisor; a lost supervisor is noticed by :meth:`read`."""
        if self.is_open:
            with contextlib.suppress(BrokenPipeError):
                self._sender.send({"do": do, **values})

    def beat(self) -> None:
        """Send a heartbeat."""
        if self.is_open:
            with contextlib.suppress(BrokenPipeError):
                self._sender.beat()

    def add_silence(self, seconds: float) -> None:
        """Count time without a message. To be called regularly, after :meth:`read`, which resets the count."""
        self.silence_s += seconds
        if self.is_open:
            with contextlib.suppress(BrokenPipeError):
                self._sender.flush()

    def silence_fault(self, heartbeat: HeartbeatTimes) -> str:
        """The fault of a supervisor that has been silent for too long; "" if it has not."""
        if self.silence_s < heartbeat.host_timeout_s:
            return ""
        fault = f"has not responded for {self.silence_s:.0f} s"
        if not self.host.is_local:
            return fault
        if is_stopped(self._process.pid):
            return f"{fault} (its supervisor, process {self._process.pid}, is stopped)"
        return fault if self.silence_s >= heartbeat.running_timeout_s else ""

    def read(self) -> list[Message]:
        """The messages that have arrived; clears ``is_open`` at the end of the stream."""
        messages: list[Message] = []
        while self.is_open:
            try:
                piece = os.read(self._output, 1 << 20)
            except BlockingIOError:
                break
            if piece:
                self.silence_s = 0.0
                messages += self._reader.feed(piece)
            else:
                self.is_open = False
        return messages

    def fault(self) -> str:
        """Why the connection ended: the last line that ssh or the supervisor printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(3.0)
        said = os.pread(self._errors.fd, _MAX_ERRORS_BYTES, 0).decode(errors="replace").splitlines()
        lines = [" ".join(line.split()) for line in [*self._reader.noise, *said] if line.strip()]
        if any("No module named 'autoddl" in line for line in lines):
            return "its Python has no AutoDDL; install it there, or give another one, python=PATH"
        if lines:
            return lines[-1]
        code = self._process.returncode
        return f"its supervisor ended with code {code}" if code is not None else "its supervisor printed no error"

    def abandon(self) -> None:
        """End the connection by force: kill a local supervisor with all its descendants, or the ssh process of a remote one,
        which then ends its ranks itself."""
        if self.host.is_local and self._process.poll() is None:
            end_descendants([self._process.pid], _KILL_SECONDS)
        self._process.kill()
        self.is_open = False

    def hang_up(self) -> None:
        """Close the supervisor's input, upon which it ends everything on its host."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self.is_open = False

    def close(self, deadline: float) -> None:
        """Hang up, and wait until ``deadline`` for the local process to exit; then kill it."""
        assert self._process.stdout is not None
        self.hang_up()
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.abandon()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_SECONDS)
        self._process.stdout.close()
        self._errors.close()
