"""Config: everything that decides what a run computes, as frozen dataclasses that are read from TOML and from flags.

    [model] name = "small"            --model small          then --model.cut conv1
    [[defences]] name = "gaussian"    --defences bottleneck,gaussian    then --defences.1.sigma 0.05
    [cem] surrogate = "rate"          --cem.surrogate rate   then --cem.surrogate.form full
    [cem.rate] form = "full"

The registries turn names into methods and suggest a name for a misspelt one. `splitveil.cli.arguments` reads the flags. Under
`imports` stand the modules of a user's own that methods come from; reading a config does not import them, see own_code.py.
"""

import dataclasses
import tomllib
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from splitveil.cem import CEMConfig
from splitveil.data.augment import AugmentConfig
from splitveil.data.splits import SplitsConfig
from splitveil.distillation import DistillationConfig, check_distillation
from splitveil.files.foreign import read_bytes
from splitveil.options import changed_since, check_options, option
from splitveil.own_code import check_imported
from splitveil.registry import ATTACKS, DATASETS, DEFENCES, MODELS, SURROGATES, Registry, UserError, unknown


def _chosen(registry: Registry, *names: str) -> Callable[[], Any]:
    def default() -> Any:
        configs = tuple(registry[name].config() for name in names)
        return configs if registry in LISTS.values() else configs[0]

    return default


LISTS = {"defences": DEFENCES, "attacks": ATTACKS}
SINGLES = {"data": DATASETS, "model": MODELS}
LONGEST_RECIPE = 2**20
"""Most bytes of a recipe; ours have at most 2,000."""


@dataclass(frozen=True)
class TrainConfig:
    """How a run is trained."""

    epochs: int = option(20, at_least=1)
    """Passes over the task images."""
    batch: int = option(128, at_least=2)
    """Images a step, over all processes together."""
    lr: float = option(0.05, above=0, remedy="0.05 is a good start")
    """Learning rate at the start."""
    schedule: Literal["cosine", "milestones"] = "cosine"
    """How the learning rate falls: to zero along a cosine, or by `gamma` at each milestone."""
    milestones: tuple[int, ...] = (60, 120, 160)
    """Epochs at which the learning rate is multiplied by `gamma`."""
    gamma: float = option(0.2, at_least=0)
    """Factor at a milestone."""
    lr_warmup: int = option(0, at_least=0)
    """Epochs in which the learning rate rises linearly to where the schedule has it; large batches want 2 to 5."""
    momentum: float = option(0.9, at_least=0, below=1)
    """Momentum of SGD."""
    nesterov: bool = False
    """Nesterov's momentum."""
    weight_decay: float = option(5e-4, at_least=0)
    """Weight decay of SGD."""
    edge_weight_decay: float | None = option(None, at_least=0)
    """Weight decay of the edge's own weights; default is that of all others."""
    muon: float = option(0.0, at_least=0)
    """Rate of Muon, which then trains the matrices of edge and cloud in SGD's place, with momentum 0.95 and weight decay 0.01 of
    its own; 0.02 is usual, 0 leaves them to SGD."""
    ema: float | None = option(None, above=0, below=1, remedy="0.99 to 0.999 are usual")
    """Share of the running average of the weights that stays in a step. With it the average is validated, saved, attacked and
    served; the weights that are trained are in the state only."""
    start: Literal["model", "dirac", "whitening"] = "model"
    """First convolution of the edge before training: as the model has it, with filters that pass the image on (dirac), or with
    filters that make patches of the task images white (whitening)."""
    label_smoothing: float = option(0.0, at_least=0, below=1)
    """Share of the target that is spread over all classes."""
    augment: AugmentConfig = AugmentConfig()
    distillation: DistillationConfig = DistillationConfig()
    bf16: bool = True
    """Autocast to bfloat16 on CUDA; the CPU always computes in float32."""
    capture: bool = True
    """On CUDA, record the step once and replay it as a whole; false starts every kernel from Python, several times slower."""
    compile: bool = False
    """Let torch.compile fuse kernels, half a minute once: on CUDA of the whole step, on a CPU of the surrogate (needs g++)."""
    checkpoint_every: int | None = option(None, at_least=1)
    """Epochs between checkpoints: what a kill can cost at most. Default is as many as half a minute has."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, into the run folder's tensorboard/."""


@dataclass(frozen=True)
class Config:
    """One run of splitveil."""

    name: str = "run"
    """The run's folder below runs/."""
    seed: int = 0
    """Decides splits, weights, order, augmentation and noise."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1."""
    data: Any = field(default_factory=_chosen(DATASETS, "fashion"))
    """The data set; `splitveil list` shows the names."""
    splits: SplitsConfig = SplitsConfig()
    model: Any = field(default_factory=_chosen(MODELS, "small"))
    """The network, and where it is cut."""
    defences: tuple[Any, ...] = field(default_factory=_chosen(DEFENCES, "bottleneck"))
    """The defences between edge and cloud, in this order."""
    cem: CEMConfig = CEMConfig()
    train: TrainConfig = TrainConfig()
    attacks: tuple[Any, ...] = field(default_factory=_chosen(ATTACKS, "mean_image", "ridge", "decoder"))
    """The attacks that try to rebuild the images."""

    def __post_init__(self) -> None:
        check_options(self.cem, "cem.")
        check_options(self.train, "train.")
        check_options(self.train.augment, "train.augment.")
        check_options(self.train.distillation, "train.distillation.")
        check_distillation(self.train.distillation)
        if self.train.nesterov and not self.train.momentum:
            raise UserError("train.nesterov needs momentum, and train.momentum is 0; raise it, or leave nesterov out")
        if self.train.muon and self.train.edge_weight_decay is not None:
            raise UserError("train.edge_weight_decay is for SGD, and train.muon takes the edge's matrices from it; leave one out")


def from_dict(table: dict[str, Any]) -> Config:
    """Make a Config from nested tables as TOML gives them. An unknown key or a value of the wrong type is refused by its name."""
    table = dict(table)
    check_imported(table.pop("imports", ()))
    fields: dict[str, Any] = {}
    for key, kind in {"data": dict, "model": dict, "cem": dict, "defences": list, "attacks": list}.items():
        if key in table and not isinstance(table[key], kind | str if key in SINGLES else kind):
            raise UserError(f"{key} is {table[key]!r}, must be a {'table' if kind is dict else 'list of tables'}")
    for key, registry in SINGLES.items():
        if key in table:
            fields[key] = _method(registry, table.pop(key), key)
    for key, registry in LISTS.items():
        if key in table:
            fields[key] = tuple(_method(registry, item, f"{key}.{i}") for i, item in enumerate(table.pop(key)))
    if "cem" in table:
        fields["cem"] = _cem(dict(table.pop("cem")))
    return _fill(Config, table | fields, "")


def _method(registry: Registry, table: dict[str, Any] | str, where: str) -> Any:
    if isinstance(table, str):
        return registry[table].config()
    if not isinstance(table, dict) or "name" not in table:
        raise UserError(f"{where} is {table!r}, which has no name; known: {', '.join(registry.names())}")
    options = dict(table)
    name = options.pop("name")
    return _options(registry, name, options, where)


def _options(registry: Registry, name: str, options: dict[str, Any], where: str) -> Any:
    if not isinstance(name, str):
        raise UserError(f"{where} is called {name!r}, must be one of {', '.join(registry.names())}")
    entry = registry[name]
    entry.check_names(options)
    return _fill(entry.config, options, where)


def _cem(table: dict[str, Any]) -> CEMConfig:
    options = {name: table.pop(name) for name in SURROGATES.names() if isinstance(table.get(name), dict)}
    name = table.pop("surrogate", "none")
    surrogate = None if name == "none" else _options(SURROGATES, name, options.get(name, {}), f"cem.{name}")
    return _fill(CEMConfig, table | {"surrogate": surrogate}, "cem")


def with_older_defaults(table: dict[str, Any]) -> dict[str, Any]:
    """The table of a run's config.toml, in which options of the surrogate and of defences that it does not name have the value
    they had then.

    config.toml names every option that is not None. One that lacks an option with a default therefore was written before that
    option came, and its run is to go on as it was begun.
    """
    cem, defences = table.get("cem", {}), table.get("defences", [])
    name = cem.get("surrogate", "none")
    if name == "none" and not defences:
        return table
    check_imported(table.get("imports", ()))  # a method may be a user's own
    table = dict(table)
    if name != "none":
        table["cem"] = cem | {name: _as_of_then(SURROGATES, name, cem.get(name, {}))}
    if isinstance(defences, list):  # what is wrong with other tables, `from_dict` says
        table["defences"] = [
            _as_of_then(DEFENCES, each["name"], each) if isinstance(each, dict) and "name" in each else each for each in defences
        ]
    return table


def _as_of_then(registry: Registry, name: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The options of a method as config.toml gives them. Options that are younger than the file have the value from before."""
    changed = changed_since(registry[name].config) if isinstance(name, str) else {}
    if all(option in given for option, (default, _) in changed.items() if default is not None):
        return given
    return {option: before for option, (_, before) in changed.items()} | given


def as_begun(config: Config, begun: Config) -> Config:
    """The config in which options of surrogate and defences that are at their default, which is another now, are as the run
    `begun` has them: a run goes on with the recipe that it was begun with."""
    defences = config.defences
    if len(defences) == len(begun.defences):
        defences = tuple(map(_kept, defences, begun.defences))
    surrogate = _kept(config.cem.surrogate, begun.cem.surrogate)
    return dataclasses.replace(config, defences=defences, cem=dataclasses.replace(config.cem, surrogate=surrogate))


def _kept(new: Any, old: Any) -> Any:
    """A method's config in which options at a default that has changed since have the value of `old`."""
    if new is None or type(new) is not type(old):
        return new
    kept = {
        option: before for option, (default, before) in changed_since(type(new)).items()
        if getattr(new, option) == default and getattr(old, option) == before
    }  # fmt: skip
    return dataclasses.replace(new, **kept)


def _fill(cls: type, table: dict[str, Any], where: str) -> Any:
    hints = get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    for key in table:
        if key not in known:
            raise unknown("setting", f"{where}.{key}".strip("."), [f"{where}.{name}".strip(".") for name in known])
    return cls(**{key: typed(value, hints[key], f"{where}.{key}".strip(".")) for key, value in table.items()})


def typed(value: Any, hint: Any, where: str) -> Any:
    """The value if it has the type `hint`, with whole numbers as floats and lists as tuples; `where` names it in an error."""
    if hint is Any or dataclasses.is_dataclass(value):
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise UserError(f"{where} is {value!r}, must be a table")
        return _fill(hint, value, where)  # type: ignore[arg-type]
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UserError(f"{where} is {value!r}, must be one of {', '.join(map(repr, get_args(hint)))}")
        return value
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        arms = [arm for arm in get_args(hint) if arm is not type(None)]
        words = [arm for arm in arms if get_origin(arm) is Literal and value in get_args(arm)]
        return typed(value, (words or arms)[0], where)
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{where} is {value!r}, must be a list")
        return tuple(typed(item, get_args(hint)[0], where) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{where} is {value!r}, must be of type {hint.__name__}")
    return value


def to_dict(config: Config) -> dict[str, Any]:
    """The inverse of `from_dict`: nested tables with every setting, in which methods stand by their names."""
    table = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for key in SINGLES:
        table[key] = _named(table[key])
    for key in LISTS:
        table[key] = [_named(item) for item in table[key]]
    cem = dataclasses.asdict(config.cem)
    cem["surrogate"] = "none"
    if config.cem.surrogate is not None:
        cem["surrogate"] = type(config.cem.surrogate).method
        cem[cem["surrogate"]] = dataclasses.asdict(config.cem.surrogate)
    plain = {k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for k, v in table.items()}  # type: ignore[arg-type]
    imports = imports_of(config)
    return plain | {"cem": cem} | ({"imports": imports} if imports else {})


def imports_of(config: Config) -> list[str]:
    """The user's own modules from which methods of a config come."""
    methods = [(DATASETS, config.data), (MODELS, config.model)]
    methods += [(registry, item) for key, registry in LISTS.items() for item in getattr(config, key)]
    methods += [(SURROGATES, config.cem.surrogate)] if config.cem.surrogate is not None else []
    origins = [registry.of(method).origin for registry, method in methods]
    return sorted({origin.module for origin in origins if origin is not None and origin.module != "__main__"})


def _named(config: Any) -> dict[str, Any]:
    return {"name": type(config).method, **dataclasses.asdict(config)}


def without_none(value: Any) -> Any:
    """The same tables without the settings that are None: TOML has no null, and an absent setting means its default."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list | tuple) else value


def to_toml(table: dict[str, Any]) -> str:
    """Nested tables as TOML text; None is left out."""
    return tomli_w.dumps(without_none(table))


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both tables in one. Where they disagree `above` counts; lists are replaced as a whole."""
    both = dict(below)
    for key, value in above.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table in a recipe."""
    if not Path(path).exists():
        raise UserError(f"no recipe at {path}; recipes/ holds ours, runs/NAME/config.toml that of a run")
    return parse_toml(read_bytes(path, LONGEST_RECIPE), path)


def parse_toml(data: bytes, path: str | Path) -> dict[str, Any]:
    """The table in the bytes of a TOML file; `path` names it in an error."""
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise UserError(f"{path} is not valid TOML: its tables or lists are nested too deep") from None
