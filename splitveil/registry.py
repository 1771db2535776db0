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
import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

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
        """Make a Config instance from options by name. It refuses an unknown option; the Config refuses a wrong value."""
        self.check_names(options)
        return self.config(**options)

    def check_names(self, options: dict[str, Any]) -> None:
        """Refuse an option that does not exist, and suggest the one that was probably meant."""
        known = [field.name for field in dataclasses.fields(self.config)]
        for option in options:
            if option not in known:
                raise unknown(f"option of {self.kind} {self.name!r}", option, known)

    def make(self, given: dict[str, Any] | None = None, **options: Any) -> Any:
        """Build the method from options. `given` holds arguments that are not options, such as the dimensions of z."""
        return self.make_from(self.configure(options), **(given or {}))

    def make_from(self, config: Any, **given: Any) -> Any:
        """Build the method from a Config instance. A class gets the config, a function gets its fields as plain arguments."""
        if isinstance(self.build, type):
            return self.build(config, **given)
        return self.build(**given, **{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


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
            further = getattr(config, "__post_init__", lambda config: None)  # checks over several options, if it has any

            def check(config: Any) -> None:
                check_options(config, f"{self.kind} {name!r}: ")
                further(config)

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
