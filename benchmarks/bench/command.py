"""`splitveil bench`: its flags, the measurements one after the other, the file."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.bench.alone import loop_rows, memory_rows
from benchmarks.bench.refresh import refresh_rows, sklearn_rows
from benchmarks.bench.steps import SHAPES, captured_rows, configs, floor_rows, step_rows, together_rows
from benchmarks.bench.table import TITLES, WORSE, complaint, got_worse, key, print_tables
from benchmarks.bench.timing import IMAGES, QUICK, QUICK_IMAGES, ROUNDS, Row, Setting
from splitveil.cli.command_flags import Flag, read_flags
from splitveil.compute.compile import compiler_settings
from splitveil.compute.pick_device import pick_device
from splitveil.progress import steps_bar
from splitveil.registry import UserError, unknown
from splitveil.runs import environment, read_json, write_json

MEASURE = {
    "step": step_rows, "captured": captured_rows, "together": together_rows, "floor": floor_rows,
    "loop": loop_rows, "memory": memory_rows, "refresh": refresh_rows, "sklearn": sklearn_rows,
}  # fmt: skip
NO_BATCH = {"sklearn"}
CUDA_ONLY = {"captured", "together", "memory"}
FLAGS = (
    Flag("--device", "NAME", "auto, cpu or cuda.", default="auto"),
    Flag("--model", "NAME", f"Of {', '.join(SHAPES)}; without it small on the CPU and vgg11 on CUDA."),
    Flag("--batches", "A,B", "Batch sizes.", default="128,512"),
    Flag("--classes", "A,B", "Numbers of classes.", default="10,100"),
    Flag(
        "--variants",
        "A,B",
        'Surrogates, "noise", "rate full" and "rate turned"; without it all. together, floor and sklearn do not use it.',
    ),
    Flag("--compile", "", "Measure through torch.compile: on CUDA whole steps, on a CPU the surrogates."),
    Flag("--quick", "", "Two rounds only, to see if it runs at all."),
    Flag("--only", "A,B", f"Of {', '.join(TITLES)}. captured, together and memory need CUDA, sklearn needs scikit-learn."),
    Flag("--out", "FILE", "The JSON file that is written, if not runs/bench_cpu.json or runs/bench_cuda.json."),
    Flag(
        "--against",
        "FILE",
        f"An earlier FILE; the exit code is 3 if a ratio is more than {WORSE - 1:.0%} worse than there, on the same hardware.",
    ),
)


@dataclass(frozen=True)
class Plan:
    """What a command line asks for."""

    settings: list[tuple[str, Setting]]
    """Measurements, one after the other."""
    out: Path
    before: Row | None
    """What `--against` names."""


def numbers(flag: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= 2 for word in words):
        raise UserError(f"{flag} is {text!r}, must be numbers from 2 up with commas between them, such as 10,100")
    return [int(word) for word in words]


def kinds(asked: str, device: torch.device) -> list[str]:
    """What to measure; what cannot be here is left out, and refused if it was asked for by name."""
    missing = {} if device.type == "cuda" else dict.fromkeys(CUDA_ONLY, "--device cuda")
    if find_spec("sklearn") is None:
        missing["sklearn"] = "scikit-learn; pip install 'splitveil[dev]'"
    if not asked:
        return [what for what in TITLES if what not in missing]
    for what in asked.split(","):
        if what not in TITLES:
            raise unknown("measurement", what, TITLES)
        if what in missing:
            raise UserError(f"--only {what} needs {missing[what]}")
    return [what for what in TITLES if what in asked.split(",")]


def chosen_of(asked: str, model: str, only: list[str]) -> tuple[str, ...]:
    names, known = tuple(asked.split(",")) if asked else (), configs(model)
    for name in names:
        if name not in known:
            raise unknown("variant", name, known)
    if names and {"loop", "memory"} & set(only) and all(known[name].cem.surrogate is None for name in names):
        raise UserError(f"--variants {asked} names no surrogate, which loop and memory need; leave those out with --only")
    return names


def plan_of(arguments: list[str]) -> Plan:
    given, _ = read_flags("bench", FLAGS, arguments)
    device = pick_device(given["--device"])
    if device.type not in ROUNDS:
        raise UserError(f"--device is {device.type!r}, must be cpu or cuda")
    model = given["--model"] or ("vgg11" if device.type == "cuda" else "small")
    if model not in SHAPES:
        raise unknown("model to measure", model, SHAPES)
    batches, classes = (numbers(flag, given[flag]) for flag in ("--batches", "--classes"))
    only = kinds(given["--only"], device)
    variants = chosen_of(given["--variants"], model, only)
    out, against = Path(given["--out"] or f"runs/bench_{device.type}.json"), given["--against"]
    quick, compiled = given["--quick"], given["--compile"]
    rounds, steps, slow = (QUICK if quick else ROUNDS)[device.type]
    images = QUICK_IMAGES if quick else IMAGES
    one = Setting(device, model, batches[0], classes[0], compiled, rounds, steps, slow, images, variants)
    settings = [
        (what, replace(one, batch=batch, classes=c))
        for c in classes
        for what in only
        for batch in (batches[:1] if what in NO_BATCH else batches)
    ]
    return Plan(settings, out, earlier(Path(against), settings) if against else None)


def earlier(path: Path, settings: list[tuple[str, Setting]]) -> Row:
    """The measurement to compare with, if it is of the same kind."""
    setting = settings[0][1]
    if not path.exists():
        raise UserError(f"--against: {path} is missing; `splitveil bench --out {path}` makes it")
    before = read_json(path)
    if not isinstance(before, dict) or not {"rows", "device", "model", "compile"} <= before.keys():
        raise UserError(f"--against: {path} was not written by `splitveil bench`")
    on_cpu = before["device"] == "cpu"
    if before["model"] != setting.model or before["compile"] != setting.compile or on_cpu != (setting.device.type == "cpu"):
        how = f"--device {'cpu' if on_cpu else 'cuda'} --model {before['model']}{' --compile' * before['compile']}"
        raise UserError(f"--against: {path} was measured with {how}; measure the same way")
    places = {(row["what"], row["classes"]) for row in before["rows"]}
    if not places & {(what, each.classes) for what, each in settings}:
        raise UserError(f"--against: {path} has no row of what would be measured; other --only, --batches or --classes")
    return before


def rows_of(title: str, settings: list[tuple[str, Setting]], save: Callable[[list[Row]], None]) -> list[Row]:
    """All measurements; saved as they come, because a long run may be cut short."""
    rows: list[Row] = []
    with steps_bar(title, len(settings)) as advance:
        for what, setting in settings:
            torch.manual_seed(0)
            with compiler_settings(setting.compile, setting.device):
                rows += MEASURE[what](setting, advance)
            save(rows)
            advance(1)
    return rows


def measure(plan: Plan, command: str) -> Row:
    first = plan.settings[0][1]
    used = {name: getattr(first, name) for name in ("model", "compile", "images", "rounds", "steps", "slow_rounds")}
    claim = "what training steps, surrogates and refreshes take, each over a baseline measured in turns with it"
    about: Row = {"claim": claim, "command": command, **environment(first.device), **used}
    rows = rows_of("bench", plan.settings, lambda rows: write_json(plan.out, about | {"rows": rows}))
    return about | {"rows": rows}


def worse_twice(plan: Plan, rows: list[Row], before: list[Row]) -> list[Row]:
    """What got worse, and is so again when it is measured a second time: a busy machine is not a regression."""
    first = got_worse(rows, before)
    places = {(row["what"], row["batch"], row["classes"]) for row in first}
    again = [
        (what, setting)
        for what, setting in plan.settings
        if (what, None if what in NO_BATCH else setting.batch, setting.classes) in places
    ]
    if not again:
        return []
    suspects = {key(row) for row in first}
    second = rows_of("bench, what seems worse", again, lambda rows: None)
    return got_worse([row for row in second if key(row) in suspects], before)


def bench(arguments: list[str]) -> bool:
    """Measure, print and save; false if something got worse."""
    plan = plan_of(arguments)
    measured = measure(plan, " ".join(["splitveil bench", *arguments]))
    print_tables(measured)
    print(plan.out)
    if plan.before is None:
        return True
    before = plan.before["rows"]
    same = {key(row) for row in measured["rows"]} & {key(row) for row in before}
    worse = worse_twice(plan, measured["rows"], before)
    print(f"{len(worse)} of {len(same)} ratios got more than {WORSE - 1:.0%} worse")
    for row in worse:
        print(f"  {complaint(row)}")
    if other := other_hardware(measured, plan.before):
        print(f"Nothing is judged, because that file is of {other}: keep a file of this machine, and hold later ones against it.")
    return not worse or bool(other)


def other_hardware(now: Row, before: Row) -> str:
    """What an earlier measurement was made on, if that is not what this one was made on: ratios differ between processors."""
    here, there = (row.get("processor", "an unknown CPU") if row["device"] == "cpu" else row["device"] for row in (now, before))
    return "" if here == there else there
