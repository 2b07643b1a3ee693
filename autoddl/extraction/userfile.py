"""Loads a user's model: imports FILE.py and calls its FUNCTION."""

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

#: Functions of a user's file that an error message lists.
MAX_LISTED_FUNCTIONS = 8

#: What a user's function must return, for error messages.
EXPECTED_RESULT = "a oneflow.nn.Module and its example inputs, as in `return model, (tokens, targets)`"


def load_model(text: str, *, with_values: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """Return the module and the example inputs that a user's function returns.

    The user's code can import modules from the folder of the file.  Its output to stdout is redirected to stderr.

    Args:
        text: ``FILE.py:FUNCTION``.
        with_values: Whether the module will be executed.  If False, it can only be traced: its large parameters have neither
            memory nor values.

    Raises:
        UserError: If the file or the function does not exist, or if the function raises, requires arguments, or returns anything
            but a module and example inputs.
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
            raise UserError(f"{file}: there is no function {name!r}{_available_functions(module)}")
        required = _required_arguments(function)
        if required:
            raise UserError(
                f"{text}: the function requires the arguments {', '.join(required)}; it should be callable without arguments"
            )
        with _errors_as_user_errors(text, path):
            returned = function()
        return _module_and_inputs(text, returned)


def _import(path: Path) -> ModuleType:
    """Execute a file as a module whose name cannot clash with that of another module."""
    name = f"_autoddl_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up there
    try:
        with _errors_as_user_errors(str(path), path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Allow imports from a folder while the context is active."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


@contextlib.contextmanager
def _errors_as_user_errors(name: str, path: Path) -> Iterator[None]:
    """Turn an exception of the user's code into a one-line UserError, with the last line of the file that was executed."""
    try:
        yield
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"{name}: line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == path.name]
        where = f" (line {frames[-1].lineno})" if frames else ""
        raise UserError(f"{name} raises {describe(error)}{where}") from error


def _available_functions(module: ModuleType) -> str:
    """Return the names of a module's public functions, as the end of an error message."""
    names = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
    return f"; there are {', '.join(names[:MAX_LISTED_FUNCTIONS])}" if names else ""


def _required_arguments(function: Any) -> list[str]:
    """Return the names of the parameters without default values; empty if the signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variadic]


def _module_and_inputs(text: str, returned: Any) -> tuple[Any, tuple[Any, ...]]:
    """Check the result of a user's function and return its module and its inputs.

    The function returns ``(module, tensor, ...)`` or ``(module, (tensor, ...))``.
    """
    flow: Any = load_oneflow()
    if not isinstance(returned, tuple) or len(returned) < 2 or not isinstance(returned[0], flow.nn.Module):
        raise UserError(f"{text} returns {_type_name(returned)}, should return {EXPECTED_RESULT}")
    module, *rest = returned
    inputs: Sequence[Any] = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    for i, value in enumerate(inputs):
        if not isinstance(value, flow.Tensor):
            raise UserError(f"{text}: example input {i} is {_type_name(value)}, should be a oneflow.Tensor")
        if value.is_global:
            raise UserError(f"{text}: example input {i} is a global tensor, should be a local one")
    if not inputs:
        raise UserError(f"{text} returns no example inputs, should return {EXPECTED_RESULT}")
    return module, tuple(inputs)


def _type_name(value: Any) -> str:
    """Return the type of a value with its article, such as ``a Linear``; for a tuple, the types of its parts."""
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in value) or 'nothing'}"
    return "nothing" if value is None else f"a {type(value).__name__}"
