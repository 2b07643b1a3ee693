"""The runtime, calibration and exported files name no device, and make no tensor without one, outside of one place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import autoddl
from autoddl.export import export

from ..autoddl.export_plans import staged_plan

ROOT = Path(__file__).parents[2]
#: Folders whose code runs on ranks, or is copied into exported files.
FOLDERS = ("pipelines/runtime", "autoddl/export", "autoddl/verification", "calib")
#: Functions of OneFlow that make a tensor, or a generator of random numbers, on a device.
FACTORIES = {
    *("tensor", "Tensor", "from_numpy", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm", "normal", "Generator", "recv"),
}
#: Names that an exported file may give a literal device.
DEFINED = {"DEVICE", "CPU", "GPU"}


def faults(source: str, defined: set[str] = frozenset()) -> Iterator[str]:
    """Yield each device literal and each factory call without a device or placement, with its line.

    Args:
        source: a Python file.
        defined: names that may be defined by a device literal at the top level.
    """
    tree = ast.parse(source)
    allowed = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names = {leaf.id for target in node.targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
            if names <= defined:
                allowed |= set(map(id, ast.walk(node.value)))
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in allowed
        if is_text and re.fullmatch(r"(cpu|cuda)(:\d+)?", node.value):
            yield f"{node.lineno}: the literal {node.value!r}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if node.func.attr in ("cuda", "cpu") and not node.args:
                yield f"{node.lineno}: {ast.unparse(node.func)}()"
            is_factory = node.func.attr in FACTORIES and owner in ("flow", "flow.comm", "oneflow")
            if is_factory and not {"device", "placement"} & {keyword.arg for keyword in node.keywords}:
                yield f"{node.lineno}: {ast.unparse(node.func)} without a device"


def test_code_on_ranks_names_no_device_and_makes_no_tensor_without_one():
    found = [
        f"{path.relative_to(ROOT)}:{fault}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for fault in faults(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("cuts", [[(0, 4, "none")], [(0, 2, "none"), (2, 4, "layers")]])
def test_exported_files_name_a_device_once(cuts):
    text = export(staged_plan(cuts, devices=4 // len(cuts)), "oneflow")
    assert not list(faults(text, DEFINED))
    assert text.count('DEVICE = "cuda"') == 1


def test_exported_pages_for_graphs_name_a_device_at_their_top():
    plan = autoddl.plan(
        "mlp:64,64,64", cluster="dgx-a100", nodes=1, devices_per_node=2, batch=8, executor="graph", quiet=True
    )
    text = export(plan, "oneflow-graph")
    assert not list(faults(text, {"DEVICE", "COMPUTE_TYPE", "ON_GPU"}))
    assert text.count('DEVICE, COMPUTE_TYPE = "cuda", "float16"') == 1


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('flow.placement("cuda", [0])', "the literal 'cuda'"),
        ('x.to("cuda:1")', "the literal 'cuda:1'"),
        ("flow.zeros(3)", "flow.zeros without a device"),
        ("flow.comm.recv(0, shape=s, dtype=t)", "flow.comm.recv without a device"),
        ("y = x.cuda()", "x.cuda()"),
        ('OTHER = "cpu"', "the literal 'cpu'"),
    ],
)
def test_the_check_finds_what_it_looks_for(source, expected):
    assert list(faults(source, DEFINED)) == [f"1: {expected}"]


@pytest.mark.parametrize(
    "source", ['DEVICE = "cuda"', "flow.zeros(3, device=x.device)", "flow.zeros_like(x)", '"cpu ranks"']
)
def test_the_check_accepts_what_is_right(source):
    assert not list(faults(source, DEFINED))
