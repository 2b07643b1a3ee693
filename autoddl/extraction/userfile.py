"""FILE.py:FUNCTION: loading a user's file and calling its function."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.load import load_oneflow

from .memory import untouched_parameters
from .trace import describe

__all__ = ["load_model"]

WHAT_IS_RETURNED = "a oneflow.nn.Module and its example inputs, as in `return model, (tokens, targets)`"


def load_model(text: str, *, with_values: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """The module and the example inputs that FUNCTION of FILE.py returns.

    The folder of the file is importable while its code runs.  What it prints goes to stderr.

    Args:
        text: ``FILE.py:FUNCTION``.
        with_values: make the module to be run.  Otherwise its large parameters have neither memory nor values: it is to be traced.

    Raises:
        UserError: there is no such file or function, it raises, or it returns something else.
    """
    file, colon, name = text.rpartition(":")
    path = Path(file)
    if not colon or not name.isidentifier() or path.suffix != ".py":
        raise UserError(f"{text!r} should be FILE.py:FUNCTION")
    if not path.is_file():
        raise UserError(f"{file}: there is no such file")
    load_oneflow()
    memory = contextlib.nullcontext() if with_values else untouched_parameters()
    with memory, _importable(path.resolve().parent), contextlib.redirect_stdout(sys.stderr):
        module = _import(path)
        function = getattr(module, name, None)
        if not callable(function):
            raise UserError(f"{file}: there is no function {name!r}{_others(module)}")
        required = _required_arguments(function)
        if required:
            raise UserError(f"{text}: needs arguments ({', '.join(required)}), it should be callable without any")
        with _faults_of_users(text, path):
            returned = function()
        return _checked(text, returned)


def _import(path: Path) -> ModuleType:
    """Execute a file as a module of its own, whatever others are called."""
    name = f"_autoddl_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it there
    try:
        with _faults_of_users(str(path), path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


@contextlib.contextmanager
def _faults_of_users(what: str, path: Path) -> Iterator[None]:
    """Whatever a user's code raises as one line, with the last line of the file that was reached."""
    try:
        yield
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"{what}: line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == path.name]
        where = f" (line {frames[-1].lineno})" if frames else ""
        raise UserError(f"{what} raises {describe(error)}{where}") from error


def _others(module: ModuleType) -> str:
    """The functions that there are."""
    names = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
    return f"; there are {', '.join(names[:8])}" if names else ""


def _required_arguments(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    flexible = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in flexible]


def _checked(text: str, returned: Any) -> tuple[Any, tuple[Any, ...]]:
    """(module, inputs), inputs being a tensor or several."""
    flow: Any = load_oneflow()
    if not isinstance(returned, tuple) or len(returned) < 2 or not isinstance(returned[0], flow.nn.Module):
        raise UserError(f"{text} returns {_kind(returned)}, should return {WHAT_IS_RETURNED}")
    module, *rest = returned
    inputs: Sequence[Any] = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    for i, value in enumerate(inputs):
        if not isinstance(value, flow.Tensor):
            raise UserError(f"{text}: example input {i} is {_kind(value)}, should be a oneflow.Tensor")
        if value.is_global:
            raise UserError(f"{text}: example input {i} is a global tensor, should be a local one")
    if not inputs:
        raise UserError(f"{text} returns no example inputs, should return {WHAT_IS_RETURNED}")
    return module, tuple(inputs)


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in value) or 'nothing'}"
    return "nothing" if value is None else f"a {type(value).__name__}"
