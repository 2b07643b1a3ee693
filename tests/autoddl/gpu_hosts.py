"""Hosts that seem to have GPUs: an `nvidia-smi` of our own lists them. OneFlow finds none."""

from __future__ import annotations

import stat
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["A100", "install_nvidia_smi", "ssh_stand_in"]

A100 = "{index}, GPU-a{index}, NVIDIA A100-SXM4-80GB, 515.65.01, 8.0, 81920, 81100"


def install_nvidia_smi(folder: Path, lines: Sequence[str]) -> Path:
    """Write an ``nvidia-smi`` that prints these lines for the fields that AutoDDL asks for; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tool = folder / "nvidia-smi"
    answer = "\n".join(line.format(index=index) for index, line in enumerate(lines))
    fields = "index,uuid,name,driver_version,compute_cap,memory.total,memory.free"
    tool.write_text(
        f'#!/bin/sh\n[ "$1" = "--query-gpu={fields}" ] || exit 2\n[ "$2" = "--format=csv,noheader,nounits" ] || exit 2\n'
        f"cat <<'END'\n{answer}\nEND\n"
    )
    tool.chmod(0o755)
    return folder


def ssh_stand_in(folder: Path, enter: Sequence[Sequence[str]], names: Sequence[str]) -> Path:
    """Write a program that is called like ssh and runs the command on hosts of this machine, with the host's programs first.

    Args:
        folder: where it is written; programs of a host are in ``folder/NAME``.
        enter: for each host, the words before a command that is to be run there.
        names: of the hosts.
    """
    path = folder / "ssh"
    text = f"""#!{sys.executable}
import os, sys
name, command = sys.argv[-2:]
enter = {dict(zip(names, map(list, enter)))!r}[name]
os.environ["PATH"] = {str(folder)!r} + "/" + name + ":" + os.environ["PATH"]
os.execvp((enter + ["sh"])[0], [*enter, "sh", "-c", command])
"""
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
