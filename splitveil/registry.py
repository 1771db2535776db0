"""Registries: one decorator adds a method, and the CLI, the config and the contract tests find it by its name.

    @DEFENCES.register("gaussian", Config)
    class Gaussian(Defence): ...

    DEFENCES["gaussian"].make(sigma=0.05)          # the options are checked against Config, misspellings get a suggestion

A method is found because its file lies in the registry's package; nothing has to be imported or listed by hand. Methods of other
packages are found by their entry points (groups `splitveil.defences`, …), or by `--import MODULE`: docs/extending.md.
This file imports no torch, so `splitveil --help` stays fast.
"""

import dataclasses
import difflib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from splitveil.options import UserError, check_options

__all__ = [
    "ATTACKS", "DATASETS", "DEFENCES", "EVERY", "MODELS", "SURROGATES", "Entry", "Origin", "Registry", "UserError", "unknown",
]  # fmt: skip

T = TypeVar("T")


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist: it suggests the most similar known name, or lists all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
    return UserError(f"unknown {kind} {name!r}; {hint}")


@dataclass(frozen=True)
class Origin:
    """Where a method that is not splitveil's own comes from."""

    module: str
    """The module whose import registers it."""
    distribution: str = ""
    """The installed package that brings it by an entry point, with its version; empty if nothing is installed."""

    def __str__(self) -> str:
        return f"{self.module} of {self.distribution}" if self.distribution else self.module


_origins: list[Origin] = []
"""The origins whose modules are being imported for their methods, outermost first."""


@contextmanager
def methods_of(origin: Origin) -> Iterator[None]:
    """Methods that are registered inside this context come from `origin`."""
    _origins.append(origin)
    try:
        yield
    finally:
        _origins.pop()


def told(error: BaseException) -> str:
    """An error in one line: its type, unless it is a user's mistake, and the first line of its message."""
    first = str(error).strip().split("\n")[0]
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}".removesuffix(": ")


@dataclass(frozen=True)
class Entry:
    """One registered method."""

    name: str
    build: Callable[..., Any]
    """A class, which takes the config, or a function, which takes its fields; both also take what their kind needs."""
    config: type
    """The frozen dataclass of its options. It is a subclass made for this name, so that the type of a config tells its method."""
    kind: str
    origin: Origin | None = None
    """Where the method comes from; None for splitveil's own."""

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
    """The methods of one kind by name. They are found by importing every module of one package, and by entry points."""

    def __init__(self, kind: str, package: str, group: str = "") -> None:
        self.kind, self.package, self.group = kind, package, group
        self.broken: list[str] = []
        """One sentence for each installed package whose methods could not be imported."""
        self._entries: dict[str, Entry] = {}
        self._discovered = self._asked = False

    def register(self, name: str, config: type) -> Callable[[T], T]:
        def add(build: T) -> T:
            origin = self._origin(build)
            if origin is not None:
                self._discover_own()  # so that of two methods of one name it is always the foreign one that is refused
            if name in self._entries:
                raise UserError(f"two {self.kind}s are called {name!r}; give yours another name")
            further = getattr(config, "__post_init__", lambda config: None)  # checks over several options, if it has any

            def check(config: Any) -> None:
                check_options(config, f"{self.kind} {name!r}: ")
                further(config)

            own = {"__doc__": config.__doc__, "__module__": config.__module__, "method": name, "__post_init__": check}
            named = dataclass(frozen=True)(type(f"{name}_config", (config,), own))
            setattr(sys.modules[config.__module__], named.__name__, named)  # where pickle looks for it
            self._entries[name] = Entry(name, build, named, self.kind, origin)  # type: ignore[arg-type]
            return build

        return add

    def __getitem__(self, name: str) -> Entry:
        self._discover()
        if name not in self._entries:
            told = [str(unknown(self.kind, name, self._entries)), *self.broken]
            if "did you mean" not in told[0]:
                told.append("one of your own needs --import MODULE, which registers it: docs/extending.md")
            raise UserError("; ".join(told))
        return self._entries[name]

    def of(self, config: Any) -> Entry:
        """The entry whose Config this is an instance of."""
        return self[type(config).method]

    def names(self) -> list[str]:
        self._discover()
        return sorted(self._entries)

    def _origin(self, build: Any) -> Origin | None:
        """Where a method that is being registered comes from; None for splitveil's own, which lie in its package."""
        module = getattr(build, "__module__", "")
        if module.split(".")[0] in ("splitveil", self.package.split(".")[0]):
            return None
        return _origins[0] if _origins else Origin(module)

    def _discover(self) -> None:
        self._discover_own()
        if self.group and not self._asked:
            self._asked = True  # a plugin may use the registry while it is imported
            self._discover_plugins()

    def _discover_own(self) -> None:
        if self._discovered:
            return
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        self._discovered = True

    def _discover_plugins(self) -> None:
        """Import what installed packages name in their entry points. One that is broken is warned of and left out."""
        from importlib.metadata import entry_points

        from splitveil.progress import warn

        for point in sorted(entry_points(group=self.group), key=lambda point: (point.value, point.name)):
            distribution = "" if point.dist is None else f"{point.dist.name} {point.dist.version}"
            try:
                with methods_of(Origin(point.module, distribution)):
                    point.load()
            except (Exception, SystemExit) as error:
                self.broken.append(f"{distribution or point.module} is broken ({told(error)})")
                warn(f"the {self.kind} {point.name!r} of {self.broken[-1]}; repair or uninstall it")


SURROGATES = Registry("surrogate", "splitveil.surrogates", "splitveil.surrogates")
DEFENCES = Registry("defence", "splitveil.defences", "splitveil.defences")
ATTACKS = Registry("attack", "splitveil.attacks", "splitveil.attacks")
MODELS = Registry("model", "splitveil.models", "splitveil.models")
DATASETS = Registry("data set", "splitveil.data.readers", "splitveil.data")
EVERY = (SURROGATES, DEFENCES, ATTACKS, MODELS, DATASETS)
