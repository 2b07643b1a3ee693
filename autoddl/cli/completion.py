"""``autoddl completion``: completion of commands, options, models and clusters, for bash and zsh."""

from __future__ import annotations

import argparse
import re

__all__ = ["add_parser", "run"]

SHELLS = ("bash", "zsh")
_FOLDERS = re.compile(r"\bDIR\b")
_FILES = re.compile(r"\bFILE\b|\.(?:json|csv|py|svg|html)\b|^MEASUREMENTS$|^[CF]$")

#: Names, and files besides: what models and clusters may be.
_BASH = """
_autoddl_model() {{ compgen -W "{models}" -- "$1"; compgen -f -- "$1"; }}
_autoddl_cluster() {{ compgen -W "{clusters}" -- "$1"; compgen -f -- "$1"; }}
"""
_ZSH = """
_autoddl_model() {{ compadd -- {models}; _files }}
_autoddl_cluster() {{ compadd -- {clusters}; _files }}
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "completion",
        help="print the completion of this command line for a shell",
        description="Print the completion of this command line for a shell. In bash: source <(autoddl completion bash). In zsh: "
        "write it to a file _autoddl in a folder of $fpath.",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    import shtab

    from autoddl.costmodel.cluster import preset_names

    from ..zoo import known_models
    from ._running import parser_of

    parser = parser_of([])
    for command in _commands(parser):
        for action in command._actions:
            _complete(action)
    names = {"models": " ".join(known_models()), "clusters": " ".join(preset_names())}
    preamble = {"bash": _BASH, "zsh": _ZSH}[arguments.shell].format(**names)
    print(shtab.complete(parser, arguments.shell, preamble=preamble))
    return 0


def _commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    return [
        command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for command in action.choices.values()
    ]


def _complete(action: argparse.Action) -> None:
    """Say what an argument may be: a model, a cluster, a folder, a file."""
    import shtab

    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if metavar in ("MODEL", "C") and action.dest in ("model", "cluster", "base"):
        kind = "model" if action.dest == "model" else "cluster"
        action.complete = dict.fromkeys(SHELLS, f"_autoddl_{kind}")  # type: ignore[attr-defined]
    elif _FOLDERS.search(metavar):
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif _FILES.search(metavar):
        action.complete = shtab.FILE  # type: ignore[attr-defined]
