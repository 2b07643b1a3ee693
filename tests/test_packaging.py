"""The house rules that no type checker sees: what is packaged, who may import whom, and where OneFlow may appear."""

from __future__ import annotations

import ast
import configparser
import functools
import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

import autoddl

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ["costmodel", "search", "pipelines", "calib", "autoddl"]  # from the ground up
THIRD_PARTY = {"numpy", "scipy", "networkx", "shtab", "tqdm", "matplotlib", "pandas", "oneflow"}
ONEFLOW_AREAS = (
    *("pipelines/runtime/", "calib/", "autoddl/extract", "autoddl/apply", "autoddl/verification/rank_job.py"),
    "autoddl/verification/graph_job.py",
    "autoddl/verification/running.py",
    "autoddl/zoo/modules.py",
    "autoddl/export/parts/",
)
#: Where texts may be imported: nothing that plans, prices or runs knows how it is shown.
SHOWING_AREAS = ("autoddl/text/", "autoddl/cli/", "autoddl/report/", "autoddl/__init__.py", "autoddl/api")
PRINTING_AREAS = ("autoddl/cli/", "autoddl/__main__.py")
#: Several tests look at the same sources.
parsed = functools.cache(ast.parse)
IS_ONEFLOW_PYTHON = (
    sys.implementation.name == "cpython"
    and sys.version_info[:2] == (3, 10)
    and (sys.platform, platform.machine()) == ("linux", "x86_64")
)


def sources() -> list[Path]:
    """Every module of the package, relative to the repository."""
    return sorted(path.relative_to(ROOT) for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


def packaged_name(path: Path) -> str:
    """Where a file of the repository is in the wheel."""
    return path.as_posix() if path.parts[0] == "autoddl" else f"autoddl/{path.as_posix()}"


def module_name(path: Path) -> str:
    return packaged_name(path)[: -len(".py")].replace("/", ".").replace(".__init__", "")


def imported_names(path: Path, tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Absolute names of all that a module imports, wherever in it, and whether the import is written relatively."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            yield from ((f"{node.module}.{alias.name}", False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = list(Path(packaged_name(path)).parent.parts)
            base = package[: len(package) - node.level + 1] + ([node.module] if node.module else [])
            yield from ((".".join([*base, alias.name]), True) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((arg.value, False) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def floor_of(name: str) -> str | None:
    """The floor that an absolute name lives on; None where it is not ours."""
    parts = name.split(".")
    if parts[0] != "autoddl":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else "autoddl"


def import_faults(path: Path, text: str) -> list[str]:
    """Breaches of the import rules in one module."""
    own, faults = path.parts[0], []
    for name, relative in imported_names(path, parsed(text)):
        floor = floor_of(name)
        if floor is None:
            top = name.split(".")[0]
            if top == "oneflow" and not path.as_posix().startswith(ONEFLOW_AREAS):
                faults.append(f"{path} imports {name} outside {', '.join(ONEFLOW_AREAS)}")
            if top == "typing_extensions" and "if TYPE_CHECKING:\n    from typing_extensions import" in text:
                continue  # type checkers bring it, and nothing imports it at run time
            if sys.version_info >= (3, 10) and top not in THIRD_PARTY | sys.stdlib_module_names:
                faults.append(f"{path} imports {name}, which setup.cfg does not declare")
        elif FLOORS.index(floor) > FLOORS.index(own):
            faults.append(f"{path} imports {name}, which is on a floor above")
        elif name.startswith("autoddl.text") and not path.as_posix().startswith(SHOWING_AREAS):
            faults.append(f"{path} imports {name} outside {', '.join(SHOWING_AREAS)}")
        elif relative != (floor == own):
            faults.append(f"{path} imports {name} {'relatively' if relative else 'absolutely'}")
    return faults


def run_python(code: str, *args: str) -> str:
    done = subprocess.run([sys.executable, "-I", "-c", code, *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- The distribution -----------------------------------------------------------------------------------------------


def test_every_folder_of_the_package_is_declared():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    packages = set(config["options"]["packages"].split())
    folders = dict(line.split(" = ") for line in config["options"]["package_dir"].strip().splitlines())
    with_modules = {module_name(path.parent / "__init__.py"): path.parent.as_posix() for path in sources()}
    assert packages == set(with_modules), "setup.cfg's packages are not the folders with modules in them"
    for package, folder in with_modules.items():
        parent = folders.get(package.rpartition(".")[0])
        assert folders.get(package, parent and f"{parent}/{package.rpartition('.')[2]}") == folder


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, built from a copy of the sources, and the wheel, built from the source distribution."""
    pytest.importorskip("setuptools", "64")
    copy, dist = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for floor in FLOORS:
        shutil.copytree(ROOT / floor, copy / floor, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = "import os, sys; from setuptools import build_meta as b; os.chdir(sys.argv[1]); "
    run_python(build + "b.build_sdist(sys.argv[2])", str(copy), str(dist))
    (archive,) = dist.glob("*.tar.gz")
    subprocess.run([sys.executable, "-m", "tarfile", "-e", str(archive), str(dist)], check=True)
    run_python(build + "b.build_wheel(sys.argv[2])", str(dist / archive.name[: -len(".tar.gz")]), str(dist))
    (wheel,) = dist.glob("*.whl")
    return archive, wheel


@pytest.mark.slow
def test_wheel_holds_all_files_of_the_folders_and_nothing_else(distributions):
    files = [path.relative_to(ROOT) for floor in FLOORS for path in (ROOT / floor).rglob("*") if path.is_file()]
    expected = {packaged_name(path) for path in files if "__pycache__" not in path.parts}
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        licenses = [name for name in wheel.namelist() if name.endswith("LICENSE")]
        entry_points = wheel.read(next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))).decode()
    assert names == expected
    assert "autoddl/py.typed" in names
    assert any(name.startswith("autoddl/costmodel/clusters/") and name.endswith(".json") for name in names)
    assert len(licenses) == 1
    assert "autoddl = autoddl.__main__:main" in entry_points


@pytest.mark.slow
def test_wheel_asks_for_oneflow_where_it_exists(distributions):
    markers = pytest.importorskip("packaging.requirements")
    with zipfile.ZipFile(distributions[1]) as wheel:
        text = wheel.read(next(n for n in wheel.namelist() if n.endswith("/METADATA"))).decode()
    requirements = [markers.Requirement(line[15:]) for line in text.splitlines() if line.startswith("Requires-Dist: ")]
    linux = {"sys_platform": "linux", "platform_machine": "x86_64", "implementation_name": "cpython", "extra": ""}

    def wanted(**environment: str) -> set[str]:
        return {str(r.name) for r in requirements if not r.marker or r.marker.evaluate({**linux, **environment})}

    everywhere = {"numpy", "scipy", "networkx", "shtab", "tqdm"}
    with_oneflow = everywhere | {"oneflow", "nvidia-cublas-cu11", "nvidia-cudnn-cu11"}
    assert wanted(python_version="3.10") == with_oneflow
    for version in ("3.9", "3.11", "3.12", "3.13"):
        assert wanted(python_version=version) == everywhere
    assert wanted(python_version="3.10", platform_machine="aarch64") == everywhere
    assert wanted(python_version="3.10", sys_platform="darwin") == everywhere
    assert wanted(python_version="3.10", implementation_name="pypy") == everywhere


def test_tests_run_against_the_installation():
    """An editable installation is this repository; any other one lies among the installed packages, all of it."""
    distribution = importlib.metadata.distribution("autoddl")
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        assert Path(autoddl.__path__[0]).resolve() == ROOT / "autoddl"
        return
    installed = Path(str(distribution.locate_file("autoddl"))).resolve()
    assert Path(autoddl.__path__[0]).resolve() == installed
    for path in sources():
        assert (installed.parent / packaged_name(path)).read_bytes() == (ROOT / path).read_bytes(), path


# ---- Imports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_keep_to_the_floors(floor):
    paths = [path for path in sources() if path.parts[0] == floor]
    assert paths
    assert [fault for path in paths for fault in import_faults(path, (ROOT / path).read_text())] == []


@pytest.mark.parametrize(
    ("path", "line", "fault"),
    [
        ("costmodel/sbp.py", "from autoddl.search.exact import solve", "floor above"),
        ("search/exact.py", "from autoddl import plan", "floor above"),
        ("search/exact.py", "import autoddl.pipelines", "floor above"),
        ("pipelines/runtime/ranks.py", "from ...calib import fit", "floor above"),
        ("search/exact.py", "from autoddl.search.result import Result", "absolutely"),
        ("search/exact.py", "from ..costmodel import table", "relatively"),
        ("autoddl/cli/plan.py", "def f():\n    import oneflow as flow", "outside"),
        ("autoddl/claims.py", "from .text.tables import Table", "outside"),
        ("pipelines/draw.py", "import importlib\nimportlib.import_module('oneflow.nn')", "outside"),
        pytest.param(
            *("search/exact.py", "import sklearn", "does not declare"),
            marks=pytest.mark.skipif(sys.version_info < (3, 10), reason="no list of the standard library in 3.9"),
        ),
    ],
)
def test_import_rules_find_a_breach(path, line, fault):
    (found,) = import_faults(Path(path), line)
    assert fault in found


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (
            "search/exact.py",
            "from .result import Result\nfrom . import result\nfrom autoddl.costmodel.table import CostTable",
        ),
        ("pipelines/runtime/ranks.py", "import oneflow as flow\nfrom ..schedule import Schedule"),
        ("autoddl/cli/plan.py", "from ..planfile import Plan\nfrom autoddl.search import solve\nimport numpy as np"),
        ("autoddl/planfile.py", "import autoddl.search.exact, json"),
    ],
)
def test_import_rules_allow_what_is_right(path, line):
    assert import_faults(Path(path), line) == []


def test_no_module_imports_itself_through_others():
    """Imports inside functions count as well; those for type checkers alone do not."""
    paths = {module_name(path): path for path in sources()}
    graph = nx.DiGraph((name, other) for name, path in paths.items() for other in imported_modules(name, path, paths))
    assert [sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1] == []
    assert graph.has_edge("autoddl.cli.plan", "autoddl.api.planning") and len(graph) > 300


def imported_modules(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a module imports, somewhere."""
    tree = parsed((ROOT / path).read_text())
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and isinstance(branch.test, ast.Name) and branch.test.id == "TYPE_CHECKING"
        for statement in branch.body
        for node in ast.walk(statement)
    }
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in for_types:
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                found = f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in known else origin
                if found in known and found != name:
                    yield found


@pytest.mark.slow
def test_everything_but_the_oneflow_parts_imports_without_oneflow():
    """Every module outside OneFlow's areas, and every package, with OneFlow made impossible to import."""
    names = [
        module_name(path)
        for path in sources()
        if path.name == "__init__.py" or not path.as_posix().startswith(ONEFLOW_AREAS)
    ]
    run_python(
        "import importlib, sys\n"
        "sys.modules['oneflow'] = None\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n",
        *names,
    )


def test_plots_and_oneflow_are_not_imported_by_the_command_line():
    names = [module_name(path) for path in sources() if path.as_posix().startswith(("autoddl/cli/", "autoddl/__"))]
    loaded = run_python(
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))\n",
        *names,
    ).split()
    assert "autoddl" in loaded
    assert not {"oneflow", "matplotlib"} & set(loaded)


@pytest.mark.skipif(not IS_ONEFLOW_PYTHON, reason="OneFlow 0.9.0 needs CPython 3.10 on Linux x86-64")
def test_oneflow_is_installed():
    """Where OneFlow can be, it has to be: nothing else here would notice that all its tests are skipped."""
    assert importlib.metadata.version("oneflow") == "0.9.0"
    assert importlib.metadata.version("nvidia-cublas-cu11") == "11.10.3.66"
    assert importlib.metadata.version("nvidia-cudnn-cu11") == "8.5.0.96"


# ---- Texts ----------------------------------------------------------------------------------------------------------


def test_only_the_command_line_prints():
    for path in sources():
        if path.as_posix().startswith(PRINTING_AREAS):
            continue
        calls = [node for node in ast.walk(parsed((ROOT / path).read_text())) if isinstance(node, ast.Call)]
        lines = [call.lineno for call in calls if ast.unparse(call.func) == "print"]
        assert lines == [], f"{path} prints"


MACHINE_SPECIFIC = re.compile(
    r"\b(?:pypi|pythonhosted|npmjs|npmmirror|crates|debian|conda|anaconda)\.(?:org|com|io)\b"  # a registry's host
    r"|(?<![\w.$}~*/-])/(?:work|root|home|Users|mnt|data)/\w"  # a path of somebody's machine
)


def repository_texts() -> list[Path]:
    """All files that git tracks; where there is no git, all that look like texts outside hidden folders."""
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True)
    if done.returncode == 0:
        return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
    texts = {".py", ".md", ".json", ".cfg", ".toml", ".csv", ""}
    return [p for p in ROOT.rglob("*") if p.is_file() and p.suffix in texts and "/." not in str(p.relative_to(ROOT))]


def test_nothing_names_a_registry_or_a_place_on_one_machine():
    for example in (["see py", "pi.org"], ["in /ro", "ot/x"]):  # in pieces: this file is looked at too
        assert MACHINE_SPECIFIC.search("".join(example))
    faults = []
    for path in repository_texts():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if MACHINE_SPECIFIC.search(line):
                faults.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert faults == []
