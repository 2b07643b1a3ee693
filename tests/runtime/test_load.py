from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from autoddl.pipelines.runtime import load
from autoddl.pipelines.runtime.load import is_available

AVAILABLE = is_available()


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(not AVAILABLE, reason=AVAILABLE.reason)
def test_oneflow_loads_without_a_word():
    done = run(
        "import sys\n"
        "from autoddl.pipelines.runtime.load import is_available, load_oneflow\n"
        "assert is_available() and 'oneflow' not in sys.modules\n"
        "flow = load_oneflow()\n"
        "assert flow is sys.modules['oneflow'] is load_oneflow()\n"
        "print(flow.ones(2).sum().item())\n"
        "print('still heard', file=sys.stderr)\n"
    )
    assert (done.stdout, done.stderr) == ("2.0\n", "still heard\n")


@pytest.mark.skipif(not AVAILABLE, reason=AVAILABLE.reason)
def test_loading_leaves_the_environment_as_it_was():
    done = run(
        "import os; before = dict(os.environ)\n"
        "from autoddl.pipelines.runtime.load import load_oneflow; load_oneflow().ones(2)\n"
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_looking_for_it_does_not_import_it():
    done = run(
        "import sys; from autoddl.pipelines.runtime.load import is_available; is_available()\n"
        "print('oneflow' in sys.modules, 'ctypes.util' in sys.modules)"
    )
    assert done.stdout == "False True\n", done.stderr


@pytest.fixture
def not_loaded(monkeypatch):
    """As in a process that has not loaded OneFlow, whatever tests ran before."""
    monkeypatch.delitem(sys.modules, "oneflow", raising=False)


@pytest.mark.usefixtures("not_loaded")
@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("system", "Darwin", "Linux x86-64 only; this is Darwin"),
        ("machine", "aarch64", "Linux x86-64 only; this is Linux aarch64"),
    ],
)
def test_other_platforms(monkeypatch, attribute, value, words):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, attribute, lambda: value)
    assert not is_available()
    assert words in is_available().reason


@pytest.mark.usefixtures("not_loaded")
@pytest.mark.parametrize("version", [(3, 11, 4), (3, 13, 0)])
def test_other_pythons(monkeypatch, version):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "python_version", lambda: ".".join(map(str, version)))
    monkeypatch.setattr(load.sys, "version_info", version)
    assert "CPython 3.7 to 3.10 only" in is_available().reason
    assert f"this is Python 3.{version[1]}" in is_available().reason
    assert "use Python 3.10" in is_available().reason


ON_LINUX_310 = (
    "import platform, sys\n"
    "platform.system, platform.machine = (lambda: 'Linux'), (lambda: 'x86_64')\n"
    "real, sys.version_info = sys.version_info, (3, 10, 0)\n"
    "from autoddl.pipelines.runtime import load\n"
    "from autoddl.costmodel.errors import UserError\n"
)
REFUSED = "try:\n    load.load_oneflow()\nexcept UserError as error:\n    print(error)\n"


def test_not_installed():
    done = run(ON_LINUX_310 + "sys.modules['oneflow'] = None\n" + REFUSED)
    assert done.stdout.startswith(
        "cannot run on OneFlow: OneFlow is not installed; in Python 3.10 on Linux x86-64 install"
    )
    assert done.stdout.count("\n") == 1, done.stderr


def test_installed_without_its_cuda_libraries(tmp_path):
    (tmp_path / "oneflow.py").write_text("raise AssertionError('imported')")
    done = run(
        ON_LINUX_310
        + f"sys.path.insert(0, {str(tmp_path)!r})\n"
        + "load._nvidia_directories = lambda: []\nload.ctypes.util.find_library = lambda name: None\n"
        + REFUSED
    )
    assert "needs the CUDA 11 libraries cublas and cudnn even on CPU: install oneflow==0.9.0" in done.stdout, (
        done.stderr
    )


def test_installed_but_broken(tmp_path):
    """What the import said is in the message, in one line; nothing else gets out."""
    (tmp_path / "oneflow.py").write_text(
        "import os\nos.write(2, b'wrong driver\\n')\nraise ImportError('libfoo.so.1: cannot open\\nshared object file')\n"
    )
    done = run(
        ON_LINUX_310
        + f"sys.path.insert(0, {str(tmp_path)!r})\n"
        + "load._nvidia_directories = lambda: []\nload.ctypes.util.find_library = lambda name: 'there'\n"
        + REFUSED
    )
    assert "its import fails (libfoo.so.1: cannot open shared object file; wrong driver)" in done.stdout, done.stderr
    assert (done.stdout.count("\n"), done.stderr) == (1, "")
