"""Registries: one decorator adds a method, and the CLI, the config and the contract tests find it by its name.

    @DEFENCES.register("gaussian", Config)
    class Gaussian(Defence): ...

    DEFENCES["gaussian"].make(sigma=0.05)          # the options are checked against Config, misspellings get a suggestion

A method is found because its file lies in the registry's package; nothing has to be imported or listed by hand.
This file imports no torch, so `splitveil --help` stays fast.
"""

import dataclasses
import difflib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partialmethod
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from splitveil.options import UserError, check_options

__all__ = ["ATTACKS", "DATASETS", "DEFENCES", "MODELS", "SURROGATES", "Entry", "Registry", "UserError", "unknown"]

T = TypeVar("T")


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist: it suggests the most similar known name, or lists all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
    return UserError(f"unknown {kind} {name!r}; {hint}")


@dataclass(frozen=True)
class Entry:
    """One registered method."""

    name: str
    build: Callable[..., Any]
    """A class, which takes the config, or a function, which takes its fields; both also take what their kind needs."""
    config: type
    """The frozen dataclass of its options. It is a subclass made for this name, so that the type of a config tells its method."""
    kind: str

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        doc = self.build.__doc__ or ""
        return doc.strip().split("\n")[0]

    def configure(self, options: dict[str, Any]) -> Any:
        """Make a Config instance from options by name. It refuses an unknown option and a value that is not a choice."""
        self.check_names(options)
        for option, choices in self.choices().items():
            if option in options and options[option] not in choices:
                said = ", ".join(repr(choice) for choice in choices if choice is not None)
                raise UserError(f"{self.kind} {self.name!r}: {option} is {options[option]!r}, must be one of {said}")
        return self.config(**options)

    def check_names(self, options: dict[str, Any]) -> None:
        """Refuse an option that does not exist, and suggest the one that was probably meant."""
        known = [field.name for field in dataclasses.fields(self.config)]
        for option in options:
            if option not in known:
                raise unknown(f"option of {self.kind} {self.name!r}", option, known)

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """The allowed values of each option whose type is a Literal."""
        found = {}
        for option, hint in get_type_hints(self.config).items():
            literals = [arm for arm in (hint, *get_args(hint)) if get_origin(arm) is Literal]
            if literals:
                found[option] = (*get_args(literals[0]), *([None] if type(None) in get_args(hint) else []))
        return found

    def make(self, given: dict[str, Any] | None = None, **options: Any) -> Any:
        """Build the method from options. `given` holds arguments that are not options, such as the dimensions of z."""
        return self.make_from(self.configure(options), **(given or {}))

    def make_from(self, config: Any, **given: Any) -> Any:
        """Build the method from a Config instance. A class gets the config, a function gets its fields as plain arguments."""
        if "config" in inspect.signature(self.build).parameters:
            return self.build(config, **given)
        used = [field.name for field in dataclasses.fields(config) if field.metadata.get("build", True)]
        fields = {name: getattr(config, name) for name in used}
        return self.build(**given, **fields)


class Registry:
    """The methods of one kind by name. They are found by importing every module of one package."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind, self.package = kind, package
        self._entries: dict[str, Entry] = {}
        self._discovered = False

    def register(self, name: str, config: type) -> Callable[[T], T]:
        def add(build: T) -> T:
            if name in self._entries:
                raise ValueError(f"two {self.kind}s are called {name!r}")
            check = partialmethod(check_options, where=f"{self.kind} {name!r}: ")
            own = {"__doc__": config.__doc__, "__module__": config.__module__, "method": name, "__post_init__": check}
            named = dataclass(frozen=True)(type(f"{name}_config", (config,), own))
            setattr(sys.modules[config.__module__], named.__name__, named)  # where pickle looks for it
            self._entries[name] = Entry(name, build, named, self.kind)  # type: ignore[arg-type]
            return build

        return add

    def __getitem__(self, name: str) -> Entry:
        self._discover()
        if name not in self._entries:
            raise unknown(self.kind, name, self._entries)
        return self._entries[name]

    def of(self, config: Any) -> Entry:
        """The entry whose Config this is an instance of."""
        return self[type(config).method]

    def names(self) -> list[str]:
        self._discover()
        return sorted(self._entries)

    def _discover(self) -> None:
        if self._discovered:
            return
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        self._discovered = True


SURROGATES = Registry("surrogate", "splitveil.surrogates")
DEFENCES = Registry("defence", "splitveil.defences")
ATTACKS = Registry("attack", "splitveil.attacks")
MODELS = Registry("model", "splitveil.models")
DATASETS = Registry("data set", "splitveil.data.readers")
