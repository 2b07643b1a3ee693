"""How the launcher and the supervisors of hosts talk: JSON objects, one per line, over any stream of bytes.

Every line begins with a mark: what shells say on their way in (a greeting in ``.bashrc``, say) is told apart and kept as noise.
"""

from __future__ import annotations

import json
import os
from typing import Any

__all__ = ["LineReader", "Message", "write_line"]

_MARK = b"@autoddl "

Message = dict[str, Any]


def write_line(fd: int, message: Message) -> None:
    """Write one message, waiting while the pipe is full.

    Raises:
        BrokenPipeError: nobody reads any more.
    """
    rest = memoryview(_MARK + json.dumps(message).encode() + b"\n")
    while rest:
        rest = rest[os.write(fd, rest) :]


class LineReader:
    """Messages out of the pieces in which a stream delivers them; ``noise`` holds the last lines that were none."""

    def __init__(self) -> None:
        self._rest = b""
        self.noise: list[str] = []

    def feed(self, piece: bytes) -> list[Message]:
        """The messages that ``piece`` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        messages = []
        for line in lines:
            if line.startswith(_MARK):
                messages.append(json.loads(line[len(_MARK) :]))
            elif text := line.decode(errors="replace").strip():
                self.noise = [*self.noise[-9:], text]
        return messages
