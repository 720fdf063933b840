"""Imports functions and classes of the user by `module:name`: one mechanism and one set of messages for every key that
takes them. Only what runs imports them; reading a configuration does not."""

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeVar

from trainyard.core.errors import RunStopped, UserError, one_line

T = TypeVar("T")


def is_user_path(value: str) -> bool:
    """True for `module:name`, where a key also takes built-in names."""
    return ":" in value


def import_function(path: str, key: str, or_subclass_of: type | None = None) -> Callable[..., Any]:
    """Import the function `module:name`, also from the current directory, or a subclass of a class. `key` is the config
    key, for messages."""
    function = _import_object(path, key, "a function")
    if or_subclass_of and inspect.isclass(function) and issubclass(function, or_subclass_of):
        return function
    if not callable(function) or inspect.isclass(function):
        raise _wrong_object(path, key, "a function", function)
    return function


def import_subclass(path: str, key: str, base: type[T]) -> type[T]:
    """Import the class `module:name`, which must be a subclass of `base`."""
    expected = f"a subclass of trainyard.{base.__name__}"
    found = _import_object(path, key, expected)
    if not (inspect.isclass(found) and issubclass(found, base)) or found is base:
        raise _wrong_object(path, key, expected, found)
    return found


def import_object(path: str, key: str, base: type[T]) -> T:
    """Import the object `module:name`, which must be an instance of `base`."""
    expected = f"a trainyard.{base.__name__}"
    found = _import_object(path, key, expected)
    if not isinstance(found, base):
        raise _wrong_object(path, key, expected, found)
    return found


def make_instance(cls: type[T], path: str, key: str, options: dict[str, Any] | None = None) -> T:
    """Call a user's class with these keyword arguments, which the key `key` gives; none if there is no such key."""
    parameters = [
        name
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    try:
        inspect.signature(cls).bind(**(options or {}))
    except TypeError as error:
        if options is None:
            raise UserError(f"{key}={path}: must work without arguments: {one_line(error)}") from None
        unknown = next((name for name in options if name not in parameters), None)
        if unknown is None:
            raise UserError(f"{key}: {path}: {one_line(error)}") from None
        hint = f"takes {', '.join(parameters)}{nearest_name(unknown, parameters)}" if parameters else "takes no options"
        raise UserError(f"{key}.{unknown}: {path} {hint}") from None
    return cls(**(options or {}))


def check_call(function: Callable[..., Any], arguments: Iterable[str], label: str) -> None:
    """Raise UserError unless `function` takes these positional arguments."""
    names = list(arguments)
    try:
        inspect.signature(function).bind(*names)
    except TypeError:
        raise UserError(f"{label}{inspect.signature(function)}: must take ({', '.join(names)})") from None
    except ValueError:  # a function of C without a signature
        pass


def call_function(function: Callable[..., T], path: str, *arguments: Any, **named: Any) -> T:
    """Call `function`, which `path` names. Any exception becomes a UserError with its place in the user's code."""
    try:
        return function(*arguments, **named)
    except (UserError, RunStopped):
        raise
    except Exception as error:
        raise UserError(f"{path}: {_problem(error)}") from error


def nearest_name(name: str, names: Iterable[str]) -> str:
    """`; nearest: NAME` for an error message, or nothing if no name is close. Case does not matter."""
    by_lower_case = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), by_lower_case, 1)
    return f"; nearest: {by_lower_case[close[0]]}" if close else ""


def describe_object(found: object) -> str:
    """What an object is, for error messages, such as `a list`."""
    if found is None:
        return "None"
    if inspect.isclass(found):
        return f"the class {found.__qualname__}"
    name = type(found).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def search_current_directory() -> None:
    """Let modules in the current directory be imported."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def load_object(path: str, expected: str) -> Any:
    """The object `module:name` of a module on the Python path. Errors do not name a key."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the module is the user's: anything may happen in it
        raise UserError(f"cannot import {module_name}: {_problem(error, module_name)}") from None
    if not hasattr(module, name):
        hint = nearest_name(name, _public_names(module))
        raise UserError(f"expected {expected} as {name} in {module_name}, found nothing{hint}")
    return getattr(module, name)


def _import_object(path: str, key: str, expected: str) -> Any:
    """The object `module:name`; without a key, only of a module on the Python path."""
    if not key:
        return load_object(path, expected)
    search_current_directory()
    try:
        return load_object(path, expected)
    except UserError as error:
        raise UserError(f"{key}={path}: {error}") from None


def _problem(error: BaseException, module_name: str = "") -> str:
    """Why an import or a call failed, and where in the user's code."""
    label = "" if isinstance(error, ImportError | SyntaxError) else f"{type(error).__name__}: "
    if isinstance(error, ModuleNotFoundError):
        is_module_itself = error.name and f"{module_name}.".startswith(f"{error.name}.")
        where = "add its directory to PYTHONPATH" + (", or run where it is" if is_module_itself else "")
        return f"{one_line(error)}; install it, or {where}"
    if isinstance(error, SyntaxError):
        return one_line(error)  # names its file and line
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{label}{one_line(error)}{place}"


def _wrong_object(path: str, key: str, expected: str, found: object) -> UserError:
    module_name, _, name = path.partition(":")
    label = f"{key}={path}: " if key else ""
    return UserError(f"{label}expected {expected} as {name} in {module_name}, found {describe_object(found)}")


def _public_names(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")]
