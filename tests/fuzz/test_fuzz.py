"""Mutated input of every reader: it is accepted, and then works, or is refused in one line with exit code 2.

A worker process for each reader runs the cases (worker.py): 2,000 of a fixed seed, or as many as ``--fuzz-cases`` says.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
#: Each case is limited by its processor time; this only ends what waits without any.
LIMIT_S = 7200


def _readers() -> list[str]:
    """The names in the table of readers.py, which imports from its folder and so is not imported here."""
    tree = ast.parse((HERE / "readers.py").read_text(encoding="utf-8"))
    table = next(
        node for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "READERS"
    )
    assert isinstance(table.value, ast.Dict)
    return [ast.literal_eval(key) for key in table.value.keys if key is not None]


def _run(*arguments: str) -> tuple[int, list[str], str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AUTODDL_")}
    command = [sys.executable, str(HERE / "worker.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environ)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("reader", _readers())
@pytest.mark.fault(
    "input",
    "a mutated document, table, text, option or variable, for every reader",
    "it is accepted and then works, or is refused in one line; under 10 s of processor time and 2 GB",
    exit_code="0 or 2",
)
def test_mutated_input(reader, request, record_property):
    """2,000 cases of each reader; those of plans, which are priced anew, take over 10 s."""
    num_cases = request.config.getoption("--fuzz-cases")
    code, lines, stderr = _run(reader, "--cases", str(num_cases))
    assert code == 0, "\n".join([*lines[:200], stderr[-4000:]])
    facts = json.loads(lines[-1])
    record_property("seconds", facts["slowest_s"])
    assert facts["faults"] == 0 and sum(facts["codes"].values()) == num_cases
    # Mutations that are all refused, or all taken, would test nothing.
    assert num_cases < 500 or min(facts["codes"]["0"], facts["codes"]["2"]) > num_cases / 100, facts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise RuntimeError('ours')", "exit code 70"),
        ("while True: pass", "it took more than 0.5 s"),
        ("bytearray(3 * 10**9)", "it took more than 2 GB: autoddl: out of memory"),
        ("print('{\"a\": NaN}')", "NaN in the output"),
        (
            "from autoddl.costmodel.errors import UserError; raise UserError((MARKER + ' ') * 500)",
            "of them surely input",
        ),
    ],
)
def test_the_worker_sees_faults(fault, said, tmp_path):
    """Each kind of fault, put into a command, is found: the worker is run on a reader that has it."""
    script = tmp_path / "faulty.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "import readers, worker\n"
        "from mutations import MARKER\n"
        "import autoddl.cli.schedule as command\n"
        f"def run(arguments):\n    {fault}\n    return 0\n"
        "command.run = run\n"
        "worker.MAX_SECONDS = 0.5\n"
        "readers.READERS['options'] = lambda rng: readers.Case(('schedule', 'list'))\n"
        "sys.argv = ['worker.py', 'options', '--cases', '1']\n"
        "sys.exit(worker.main())\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and said in done.stdout, done.stdout + done.stderr
