"""The launcher's end of the conversation with a supervisor: a process that is the supervisor, or the ssh that reaches it."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.descendants import end_descendants, is_stopped
from autoddl.pipelines.runtime.memory_files import MemoryFile

from .beats import Beats
from .hosts import Host
from .lines import LineReader, LineSender, Message

__all__ = ["Connection", "supervisor_command"]

# Without what is first on a script's path: a folder "autoddl" in the working directory must not hide the package.
_START = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; from autoddl.launching.supervisor import main; "
    "main(is_remote={}, host_timeout_s={!r})"
)
_SSH_OPTIONS = (
    ("BatchMode", "yes"),  # nobody answers questions
    ("ConnectTimeout", "10"),
    ("ServerAliveInterval", "5"),  # a host that has gone is noticed after three of these
    ("ServerAliveCountMax", "3"),
)
_KILL_SECONDS = 5.0  # how long killed processes may take to end
_MOST_ERRORS_BYTES = 1 << 20


def supervisor_command(host: Host, python: str, own_python: str, ssh: Sequence[str], beats: Beats) -> list[str]:
    """How the supervisor of a host is started; all that it is to do travels on its standard input, past every shell."""
    start = _START.format(not host.is_local, beats.host_timeout_s)
    if host.is_local:
        return [own_python, "-c", start]
    options = [word for name, value in _SSH_OPTIONS for word in ("-o", f"{name}={value}")]
    return [*ssh, *options, "-T", "--", host.name, shlex.join([python, "-c", start])]


class Connection:
    """One host: what is said to its supervisor, and what comes from there.

    Raises:
        UserError: ``command`` cannot be run here.
    """

    def __init__(self, host: Host, command: Sequence[str]) -> None:
        self.host = host
        self.is_open = True
        self.silence_s = 0.0  # as far as somebody was listening: see `listened`
        self._reader = LineReader()
        self._errors = MemoryFile()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors.fd,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on
            )
        except OSError as error:
            self._errors.close()
            raise UserError(f"{command[0]}, which is to reach {host.name}, cannot be run: {error.strerror}") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        self._sender = LineSender(self._process.stdin.fileno())
        os.set_blocking(self._output, False)

    def fileno(self) -> int:
        return self._output

    def send(self, do: str, **values: Any) -> None:
        """Tell the supervisor, without waiting for it; one that is gone is noticed when it is read."""
        if self.is_open:
            with contextlib.suppress(BrokenPipeError):
                self._sender.send({"do": do, **values})

    def beat(self) -> None:
        """Give the supervisor a sign of life."""
        if self.is_open:
            with contextlib.suppress(BrokenPipeError):
                self._sender.beat()

    def listened(self, seconds: float) -> None:
        """To be called regularly, after `read` where something had come: so long nothing has, and somebody was there to hear it."""
        self.silence_s += seconds
        if self.is_open:
            with contextlib.suppress(BrokenPipeError):
                self._sender.flush()

    def silence(self, beats: Beats) -> str:
        """What is to be said of a supervisor that has been silent for too long, "" of another."""
        if self.silence_s < beats.host_timeout_s:
            return ""
        said = f"has not been heard of for {self.silence_s:.0f} s"
        if not self.host.is_local:
            return said
        if is_stopped(self._process.pid):
            return f"{said} (its supervisor, process {self._process.pid}, is stopped)"
        return said if self.silence_s >= beats.running_timeout_s else ""

    def read(self) -> list[Message]:
        """What has come; clears ``is_open`` at the end of the conversation."""
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
        """Why the conversation ended: the last thing that ssh or the supervisor said."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(3.0)
        said = os.pread(self._errors.fd, _MOST_ERRORS_BYTES, 0).decode(errors="replace").splitlines()
        lines = [" ".join(line.split()) for line in [*self._reader.noise, *said] if line.strip()]
        if any("No module named 'autoddl" in line for line in lines):
            return "its Python has no AutoDDL; install it there, or name another one with --python"
        if lines:
            return lines[-1]
        code = self._process.returncode
        return f"its supervisor ended with code {code}" if code is not None else "its supervisor said nothing"

    def abandon(self) -> None:
        """End it without its help: a supervisor here with all that it started; the connection to one elsewhere, which ends its
        ranks when it notices."""
        if self.host.is_local and self._process.poll() is None:
            end_descendants([self._process.pid], _KILL_SECONDS)
        self._process.kill()
        self.is_open = False

    def hang_up(self) -> None:
        """End the conversation, which ends whatever is left on the host."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self.is_open = False

    def close(self, deadline: float) -> None:
        """Hang up, and wait for our own process to end until ``deadline``, when it is killed."""
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
