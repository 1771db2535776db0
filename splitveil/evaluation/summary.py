"""What is known of a run after `evaluate`, as types, and the only place that reads and writes its JSON.

    read_summary(folder) -> Summary            write_summary(folder, summary)             runs/NAME/summary.json
    attack_record(table) -> AttackRecord       to_json(record)                            runs/NAME/attacks/decoder-0/attack.json

A field has the same name and place in the JSON as here; before the fields comes the number of the schema. Numbers that are not
finite are written as NaN and Infinity, which Python reads.

    schema 1    `threat` held words; it is rebuilt from the attack's method and options. Fields that did not exist yet have
                the defaults below: an attack's method was its name, and what was not measured is None or empty.
    schema 2    `threat` holds the fields of ThreatModel; attack.json says its schema too.

A field that this version does not know is ignored: whoever adds one with a default need not raise the schema. Whoever changes
what a field means must raise it, and a file of a later schema is refused.
"""

from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from splitveil.attacks.threat import ThreatModel
from splitveil.evaluation.build_attacks import threat_of
from splitveil.files.folder import is_there, json_bytes, parse_json, write_json
from splitveil.manifest import changing, verified, why_stale
from splitveil.metrics.cost import Cost, Latency
from splitveil.progress import warn
from splitveil.registry import UserError

SCHEMA = 2
"""The schema of summary.json and attack.json; the schema of the run folder is in runs.py."""
Interval = tuple[float, float]
"""Both ends of a 95 % interval."""
Probes = dict[str, dict[str, float]]
"""For each attribute: how often it is guessed by the most frequent value ("majority") and by each kind of probe."""
PLAIN: dict[Any, Any] = {float: int | float, int: int, str: str, bool: bool}
"""The type that a value of JSON must have for a field of each of these types."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class AttackRecord:
    """What attack.json says: which attack it was, what it knew and how its training went."""

    attack: str
    """The attack's name in this run: its label, or its method if it has no label."""
    method: str
    seed: int
    """The seed of the run, from which the attack's own seed is made."""
    options: dict[str, Any]
    weights_sha256: str
    """Digest of the weights that it attacked."""
    threat: ThreatModel
    n_images: int
    """The number of test images that it rebuilt."""
    test_sha256: str | None = None
    """Digest of these images; None where this was not written down."""
    auxiliary_images: int | None = None
    """The number of images that the attacker had of its own; None where this was not written down."""
    auxiliary_sha256: str | None = None
    """Digest of these images."""
    losses: tuple[float, ...] = ()
    """The attack's own loss in the course of its training; empty if it does not train."""
    held_out: tuple[float, ...] = ()
    """Its error, in the same course, on images of its own that it did not learn from."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers that its method notes for the flags, such as `eot_gain`."""
    seconds: float
    probes: Probes = field(default_factory=dict)
    """How well probes read attributes from its reconstructions."""
    device: str = ""

    @property
    def images_used(self) -> int:
        """The number of its own images that it learned from: all, or as many as its option `images` allows (0 allows all)."""
        had = self.auxiliary_images or 0
        return min(had, int(self.options.get("images") or had))


@dataclass(frozen=True, kw_only=True)
class AttackResult(AttackRecord):
    """An attack with its means over the test images. None stands for what was not measured."""

    mse: float
    mse_ci95: Interval
    ssim: float
    ssim_ci95: Interval
    psnr: float
    psnr_ci95: Interval
    residual_share: float | None = None
    """The part of an image that its class mean does not explain: how much of this the attack got wrong, as a share."""
    lpips: float | None = None
    recognised: float | None = None
    """The share of the images that the judge recognises; judges.py explains this field and the next six."""
    recognised_original: float | None = None
    identity_cosine: float | None = None
    identity_others: float | None = None
    same_image: float | None = None
    same_identity: float | None = None
    same_identity_original: float | None = None
    more: dict[str, float] = field(default_factory=dict)
    """Metrics without a field of their own, by name."""
    mse_over_ceiling: float

    @property
    def finite(self) -> bool:
        """True if the attack gave a number; one that diverged did not."""
        return isfinite(self.mse)

    @property
    def standard_error(self) -> float:
        """The standard error of the mean MSE over images."""
        return (self.mse_ci95[1] - self.mse) / 1.96


@dataclass(frozen=True)
class WorstCase:
    """Each image's best reconstruction over all attacks. `mse` is a mean, `mse_q05` bounds the unluckiest twentieth."""

    attacks: tuple[str, ...]
    n_images: int
    mse: float
    mse_ci95: Interval
    mse_q05: float
    mse_q05_ci95: Interval
    ssim: float
    ssim_ci95: Interval
    ssim_q95: float
    ssim_q95_ci95: Interval
    psnr: float
    psnr_ci95: Interval
    psnr_q95: float
    psnr_q95_ci95: Interval
    lowest: dict[str, float]
    """The share of the images on which each attack has the lowest MSE."""


@dataclass(frozen=True)
class Certificate:
    """One bound on what any attack can do."""

    name: str
    value: float
    unit: str
    """"MSE" (a lower bound), "bits" or "epsilon" (upper bounds)."""
    holds_for: int
    """The bound holds for up to so many releases of one image, each with fresh noise."""
    assumptions: tuple[str, ...]
    """What is assumed, in plain sentences; the value says nothing where one of them is wrong."""
    proved: bool
    """False where an assumption is about images at large and cannot be checked."""
    per_class: tuple[float, ...] | None = None
    """The value for each class alone; NaN for a class with less than two images."""


@dataclass(frozen=True)
class EdgeAlone:
    """A small head in the place of the cloud, which learned from what is sent; edge_alone.py says how."""

    accuracy: float
    """The head's accuracy on the test images, as a fraction."""
    images: int
    """The number of images that the head learned from."""
    parameters: int
    """Numbers in the head's weights."""


@dataclass(frozen=True)
class RaisedFlag:
    flag: str
    """The flag's name; docs/flags.md explains each."""
    detail: str
    """What raised it."""


@dataclass(frozen=True)
class Part:
    """One part of the data set, as splits.json has it."""

    images: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All that `evaluate` found about one run."""

    name: str
    seed: int
    accuracy: float
    """The accuracy with the channel on, as a fraction; NaN where an audit has no labels or no cloud."""
    accuracy_ci95: Interval
    n_test: int
    ceiling_mse: float
    """The error of an attacker who sees nothing and guesses the mean of its own images."""
    sigma: float | None
    """Standard deviation of the channel's Gaussian noise; None if it has none."""
    bits: float | None
    """The rate bound; None where no finite bound holds."""
    attacks: dict[str, AttackResult]
    suite: str | None = None
    """The suite that the run is held to: the one that `evaluate` was asked for, else the largest that was begun."""
    suite_version: str | None = None
    """Digest of that suite's attacks and their options; None where this was not written down."""
    unfinished: tuple[str, ...] = ()
    """Attacks of the run's own list that were begun or asked for and are not finished."""
    incomplete: tuple[str, ...] = ()
    """Attacks of that suite that neither gave a number nor were skipped. If there are any, no condition passes."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Attacks of the suite that make no sense for this run, with the reason."""
    worst_case: WorstCase | None = None
    """None where no attack gave a number, and in old files."""
    no_lpips: str | None = None
    """Why LPIPS was not measured."""
    recognised_original: float | None = None
    """The share of the test images themselves that the judge recognises."""
    no_judge: str | None = None
    """Why no judge was asked."""
    not_checked: dict[str, str] = field(default_factory=dict)
    """Flags that could not be checked, with why: an audit has no training log. Empty for a run."""
    probes: Probes = field(default_factory=dict)
    """What probes read from z as it is sent."""
    certificates: tuple[Certificate, ...] = ()
    defences: tuple[str, ...]
    reports: tuple[dict[str, Any], ...] = ()
    """What each defence reports about itself, such as its guarantees."""
    surrogate: str | None
    """The name of CEM's surrogate; None for a run without CEM."""
    strength: float
    tau: float | None
    variance_histogram: tuple[int, ...]
    histogram_range: tuple[float, float, int]
    """log10 of the lowest and the highest variance, and the number of bins."""
    acting: dict[str, bool]
    """By the name of each defence: False if it changes nothing."""
    cost: dict[str, Cost]
    """What "edge" and "cloud" cost."""
    latency: Latency | None = None
    """How long the edge takes on the CPU that evaluated; None where it cannot be run there, and in old files."""
    edge_alone: EdgeAlone | None = None
    """How far the edge gets without the cloud; None without labels, and in old files."""
    z_shape: tuple[int, ...]
    config_sha256: str
    weights_sha256: str
    finite_weights: bool = True
    """False if a weight is NaN or infinite."""
    splits: dict[str, Part]
    layout: str = ""
    """Where the attacker's images come from (`splits.attacker`); empty where this was not written down, and for an audit."""
    environment: dict[str, Any]
    """The software and hardware that trained the model."""
    measured_by: dict[str, Any] = field(default_factory=dict)
    """The version and commit of the splitveil that evaluated; empty where this was not written down."""
    flags: tuple[RaisedFlag, ...] = ()

    @property
    def strongest(self) -> AttackResult | None:
        """The attack with the lowest MSE; None where none was run or none gave a number."""
        return min((a for a in self.attacks.values() if a.finite), key=lambda a: a.mse, default=None)

    @property
    def flag_names(self) -> list[str]:
        """The names of the flags that were raised, each once."""
        return sorted({raised.flag for raised in self.flags})


def to_json(value: Summary | AttackRecord) -> dict[str, Any]:
    """The table that goes into the file."""
    return {"schema": SCHEMA} | asdict(value)


def write_summary(folder: Path, summary: Summary) -> None:
    rows = [f"attacks/{attack.attack}-{attack.seed}/rows.npz" for attack in summary.attacks.values()]
    with changing(folder) as step:
        step.write("summary.json", json_bytes(to_json(summary)), come_from=("weights/last.safetensors", "config.toml", *rows))


def write_summaries(folder: Path, summaries: Sequence[Summary]) -> None:
    """summary.json of a folder of runs: a list of their summaries."""
    write_json(folder / "summary.json", [to_json(summary) for summary in summaries])


def read_summary(folder: Path) -> Summary:
    """summary.json of a run folder, also one that an older version wrote."""
    path = folder / "summary.json"
    if not is_there(path):
        raise UserError(f"{folder} has no summary.json; run `splitveil attack {folder}` and `splitveil evaluate {folder}`")
    found = from_json(Summary, parse_json(verified(folder, "summary.json"), path), str(path))
    if (source := why_stale(folder, "summary.json")) is not None:
        warn(f"{path} was made from another {source} than lies there now; run `splitveil evaluate {folder}`")
    return found


def attack_record(table: dict[str, Any], where: str) -> AttackRecord:
    """What an attack.json says, also one that an older version wrote."""
    return from_json(AttackRecord, {"schema": 1} | table, where)


def from_json(kind: type[T], table: dict[str, Any], where: str) -> T:
    """A Summary or an AttackRecord from its table of any schema up to ours; `where` begins the error message."""
    if not isinstance(table, dict):
        raise UserError(f"{where} is of several runs; name the folder of one of them")
    schema = table.get("schema")
    if schema not in range(1, SCHEMA + 1):
        raise UserError(f"{where} has schema {schema}, this splitveil reads 1 to {SCHEMA}; evaluate the run again")
    if schema == 1 and kind is Summary and isinstance(table.get("attacks"), dict):
        table = table | {"attacks": {name: since_schema_2(row) for name, row in table["attacks"].items()}}
    elif schema == 1 and kind is not Summary:
        table = since_schema_2(table)
    return read_as(kind, table, where)


def since_schema_2(row: dict[str, Any]) -> dict[str, Any]:
    """An attack of schema 1 with the fields of its threat model in the place of words; `read_as` says what else is wrong."""
    if not isinstance(row, dict) or not isinstance(row.get("attack"), str) or not isinstance(row.get("options"), dict):
        return row
    method = row.get("method", row["attack"])
    return row | {"method": method, "threat": threat_of(method, row["options"]).to_dict()}


field_types = cache(get_type_hints)


def fits(kind: Any, value: Any) -> bool:
    """True if a value of JSON can stand for the type of a field."""
    if isinstance(value, bool) and kind in (int, float):
        return False
    is_table = get_origin(kind) is dict or is_dataclass(kind)
    return isinstance(value, list if get_origin(kind) is tuple else dict if is_table else PLAIN.get(kind, object))


def read_as(kind: Any, value: Any, where: str) -> Any:
    """A value of JSON as the type that a field declares: lists become tuples, tables become dataclasses."""
    origin, arms = get_origin(kind), get_args(kind)
    if origin is UnionType:  # X | None
        return None if value is None else read_as(arms[0], value, where)
    if not fits(kind, value):
        raise UserError(f"{where} has {str(value)[:40]!r} in the place of a {kind}; evaluate the run again")
    if origin is tuple:
        if arms[-1] is not ... and len(value) != len(arms):
            raise UserError(f"{where} has {len(value)} numbers where {len(arms)} belong; evaluate the run again")
        return tuple(read_as(arms[0], item, where) for item in value)
    if origin is dict:
        return {key: read_as(arms[1], item, where) for key, item in value.items()}
    if not is_dataclass(kind):
        return value
    found = {}
    for own in fields(kind):
        if own.name in value:
            found[own.name] = read_as(field_types(kind)[own.name], value[own.name], where)
        elif own.default is MISSING and own.default_factory is MISSING:
            raise UserError(f"{where} has no {own.name!r}; evaluate the run again")
    return kind(**found)  # pyright: ignore[reportCallIssue]
