"""A user's own code by its name: `pkg.module`, or one object in it as `pkg.module:function`. Imports no torch.

    import_methods(["my_methods"])             makes the methods known that the module registers; `--import my_methods` does this
    load_object("my_models:resnet")            a function that gives a model, for `splitveil cuts` and `splitveil audit`

Modules are also found in the current directory, which `splitveil` as an installed script would not see. Only a name that the
user has typed may come here: a run folder that names a module is not enough to import it.
"""

import importlib
import os
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from splitveil.registry import EVERY, Origin, UserError, methods_of, told, unknown


def import_methods(modules: Iterable[str]) -> None:
    """Import modules for the methods that they register. Those are then known by name, as splitveil's own are."""
    for name in modules:
        with methods_of(Origin(name)):
            load_module(name)


def check_imported(modules: Any) -> None:
    """Refuse what needs modules that nobody has imported yet.

    A file that names them, such as a run's config.toml, may be somebody else's; it is the user who says that they may run.
    """
    if not isinstance(modules, list | tuple) or not all(isinstance(name, str) and is_module_name(name) for name in modules):
        raise UserError(f"imports is {modules!r}, must be a list of modules, such as ['pkg.module']")
    if modules:
        for registry in EVERY:
            registry.names()  # imports those that are installed as plugins
    if missing := [name for name in modules if name not in sys.modules]:
        flags = " ".join(f"--import {name}" for name in missing)
        raise UserError(
            f"this run uses methods of {', '.join(missing)}, which is not imported just because a file says so; "
            f"if you trust that code, add {flags} (in Python: import {missing[0]})"
        )


def is_module_name(name: str) -> bool:
    """True if Python could import a module of this name."""
    return all(part.isidentifier() for part in name.split("."))


def load_module(name: str) -> ModuleType:
    """Import `pkg.module`, also from the current directory. Whatever goes wrong is told in one line."""
    if not is_module_name(name):
        raise UserError(f"{name!r} is not the name of a module; write it as Python imports it, such as pkg.module")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # first, as for `python -m`: a user's own models.py must not be hidden by an installed one
    importlib.invalidate_caches()  # the file may be newer than the last look into the directory
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UserError(f"there is no module {name!r}, neither installed nor in {here}; check its name") from None
        raise UserError(f"{name} cannot be imported: it needs {error.name or error}, which is not installed") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{name} cannot be imported: {told(error)}") from error


def load_object(where: str) -> Any:
    """The object that `pkg.module:name` stands for; the name may have dots, as in pkg.module:Class.method."""
    module_name, colon, path = where.partition(":")
    if not (module_name and colon and path):
        raise UserError(f"{where!r} is not of the form pkg.module:function")
    found: Any = load_module(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise unknown(f"name in {module_name}", part, [name for name in dir(found) if not name.startswith("_")])
        found = getattr(found, part)
    return found
