"""The launcher's end of the conversation with a supervisor: a process that is the supervisor, or the ssh that reaches it."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

from autoddl.costmodel.errors import UserError

from .hosts import Host
from .lines import LineReader, Message, write_line

__all__ = ["Connection", "supervisor_command"]

# Without what is first on a script's path: a folder "autoddl" in the working directory must not hide the package.
_START = "import sys; sys.path[:] = [p for p in sys.path if p]; from autoddl.launching.supervisor import main; main(is_remote={})"
_SSH_OPTIONS = (
    ("BatchMode", "yes"),  # nobody answers questions
    ("ConnectTimeout", "10"),
    ("ServerAliveInterval", "5"),  # a host that has gone is noticed after three of these
    ("ServerAliveCountMax", "3"),
)


def supervisor_command(host: Host, python: str, own_python: str, ssh: Sequence[str]) -> list[str]:
    """How the supervisor of a host is started; all that it is to do travels on its standard input, past every shell."""
    if host.is_local:
        return [own_python, "-c", _START.format(False)]
    options = [word for name, value in _SSH_OPTIONS for word in ("-o", f"{name}={value}")]
    return [*ssh, *options, "-T", "--", host.name, shlex.join([python, "-c", _START.format(True)])]


class Connection:
    """One host: what is said to its supervisor, and what comes from there.

    Raises:
        UserError: ``command`` cannot be run here.
    """

    def __init__(self, host: Host, command: Sequence[str]) -> None:
        self.host = host
        self.is_open = True
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the connection
        self._reader = LineReader()
        self._speaking = threading.Lock()  # signs of life come from a thread of their own
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on
            )
        except OSError as error:
            self._errors.close()
            raise UserError(f"{command[0]}, which is to reach {host.name}, cannot be run: {error.strerror}") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._output, False)

    def fileno(self) -> int:
        return self._output

    def send(self, do: str, **values: Any) -> None:
        """Tell the supervisor; one that is gone is noticed when it is read."""
        if self.is_open:
            with self._speaking, contextlib.suppress(BrokenPipeError):
                write_line(self._input, {"do": do, **values})

    def read(self) -> list[Message]:
        """What has come; clears ``is_open`` at the end of the conversation."""
        messages: list[Message] = []
        while self.is_open:
            try:
                piece = os.read(self._output, 1 << 20)
            except BlockingIOError:
                break
            if piece:
                messages += self._reader.feed(piece)
            else:
                self.is_open = False
        return messages

    def fault(self) -> str:
        """Why the conversation ended: the last thing that ssh or the supervisor said."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(3.0)
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").splitlines()
        lines = [" ".join(line.split()) for line in [*self._reader.noise, *said] if line.strip()]
        if any("No module named 'autoddl" in line for line in lines):
            return "its Python has no AutoDDL; install it there, or name another one with --python"
        if lines:
            return lines[-1]
        code = self._process.returncode
        return f"its supervisor ended with code {code}" if code is not None else "its supervisor said nothing"

    def close(self, patience_s: float) -> None:
        """Hang up, which ends whatever is left on the host, and wait for our own process to end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()
        self.is_open = False
