"""``autoddl completion``: print the completion script of this command line for bash or zsh."""

from __future__ import annotations

import argparse
import re

__all__ = ["add_parser", "run"]

SHELLS = ("bash", "zsh")
#: Patterns of the metavars of arguments that are folders, and of arguments that are files.
_FOLDERS = re.compile(r"\bDIR\b")
_FILES = re.compile(r"\bFILE\b|\.(?:json|csv|py|svg|html)\b|^(?:MEASUREMENTS|PROFILE)$")

#: Functions of the shells that complete models and clusters: built-in names and files.
_BASH = """
_autoddl_model() {{ compgen -W "{models}" -- "$1"; compgen -f -- "$1"; }}
_autoddl_cluster() {{ compgen -W "{clusters}" -- "$1"; compgen -f -- "$1"; }}
"""
_ZSH = """
_autoddl_model() {{ compadd -- {models}; _files }}
_autoddl_cluster() {{ compadd -- {clusters}; _files }}
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "completion",
        help="print the completion script for a shell",
        description="Print a script that completes commands, options, models and clusters in a shell. In bash, run: "
        "source <(autoddl completion bash). In zsh, write the script to a file _autoddl in a folder of $fpath.",
    )
    parser.add_argument("shell", choices=SHELLS, help="name of the shell")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from autoddl.costmodel.cluster import preset_names

    from ..zoo import known_models
    from ._running import parser_of

    parser = parser_of([])
    for command in _command_parsers(parser):
        for action in command._actions:
            _set_completion(action)
    names = {"models": " ".join(known_models()), "clusters": " ".join(preset_names())}
    preamble = {"bash": _BASH, "zsh": _ZSH}[arguments.shell].format(**names)
    print(shtab.complete(parser, arguments.shell, preamble=preamble))
    return 0


def _command_parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    return [
        command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for command in action.choices.values()
    ]


def _set_completion(action: argparse.Action) -> None:
    """Set how shells complete an argument: as a model, a cluster, a folder or a file."""
    import shtab

    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if metavar in ("MODEL", "CLUSTER") and action.dest in ("model", "cluster", "base"):
        kind = "model" if action.dest == "model" else "cluster"
        action.complete = dict.fromkeys(SHELLS, f"_autoddl_{kind}")  # type: ignore[attr-defined]
    elif _FOLDERS.search(metavar):
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif _FILES.search(metavar):
        action.complete = shtab.FILE  # type: ignore[attr-defined]
