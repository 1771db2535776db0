"""What each command does. A command takes its arguments as a list and returns nothing."""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from splitveil.cem_watch import epochs_of
from splitveil.cli.arguments import parse
from splitveil.cli.chosen_attacks import named_attacks, operands_and_options, with_added
from splitveil.cli.command_flags import COMMANDS, HELP, command_help, read_flags, take_flags
from splitveil.compute.pick_device import pick_device
from splitveil.config import Config
from splitveil.data.splits import Splits
from splitveil.evaluation.audit_folder import is_audit
from splitveil.evaluation.build_attacks import build_attacks
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.fail_if import parse_condition
from splitveil.evaluation.flags import flags_named
from splitveil.evaluation.gate import refusals
from splitveil.evaluation.run_attacks import attack_run, trained_weights
from splitveil.evaluation.suites import suite
from splitveil.evaluation.suites_begun import begin, begin_suite_of
from splitveil.evaluation.which_attacks_count import Incomplete, list_begun, standing
from splitveil.files.folder import PATIENCE, locked, read_json
from splitveil.manifest import NAME as MANIFEST
from splitveil.manifest import out_of_date, problems
from splitveil.manifest.signing import new_key, sign, signed_by
from splitveil.printable import say
from splitveil.progress import warn
from splitveil.registry import DATASETS, EVERY, UserError, unknown
from splitveil.report.terminal import print_table
from splitveil.runs import Run, run_folder
from splitveil.training.build import build_splits
from splitveil.training.train_runs import train_runs


def run_folders(command: str, operands: list[str]) -> list[Path]:
    """Run folders named on the command line; a folder of runs stands for the runs in it."""
    if not operands:
        raise UserError(f"{command} needs a run folder, such as runs/demo/bottleneck, or a folder of such folders")
    return [folder for operand in operands for folder in runs_in(Path(operand))]


def runs_in(path: Path) -> list[Path]:
    """The run folder itself, or the runs in a folder of runs, in the order of its summary.json if it has one."""
    below = sorted(schema.parent for schema in path.glob("*/schema.json"))
    if (path / "schema.json").exists() or not below:
        return [path]
    if (path / "summary.json").exists():
        order = names_in(path / "summary.json")
        below.sort(key=lambda run: order.index(run.name) if run.name in order else len(order))
    return below


def evaluated(runs: list[Path]) -> list[Path]:
    """The runs without those that are still to be evaluated, which a warning names; all of them if there would be none."""
    early = [run for run in runs if (run / "schema.json").exists() and not (run / "summary.json").exists()]
    if len(early) == len(runs):
        return runs
    for run in early:
        warn(f"{run} is left out: it has no summary.json; run `splitveil attack {run}` and `splitveil evaluate {run}`")
    return [run for run in runs if run not in early]


def names_in(summary: Path) -> list[str]:
    """The runs in the order of a demo's summary.json; a damaged one decides no order."""
    try:
        return [row["name"] for row in read_json(summary)]
    except (UserError, TypeError, KeyError):
        warn(f"{summary} is not a list of runs; they are taken by their names")
        return []


def each_of(command: str, axes: list[str], arguments: list[str]) -> list[Config]:
    """The config of the command line; with `--each seed=0,1,2` one for every value, and for every combination of several."""
    values = []
    for axis in axes:
        name, _, words = axis.partition("=")
        if not name or not words:
            raise UserError(f"--each is {axis!r}, must be a setting and its values, such as seed=0,1,2 or cem.pool=2,4")
        values.append([(name, word) for word in words.split(",")])
    configs = []
    for chosen in product(*values):
        flags = [f"--{name}={value}" for name, value in chosen]
        config = parse([*arguments, *flags], command=command)
        label = "".join(f"-{name.rpartition('.')[2]}{value}" for name, value in chosen)
        configs.append(replace(config, name=config.name + label))
    names = [config.name for config in configs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"--each gives {min(twice)} twice; name every value once")
    return configs


def train_command(arguments: list[str]) -> None:
    own, rest = take_flags(COMMANDS["train"].flags, arguments)
    root = Path(own["--runs"])
    for run, _, _ in train_runs({run_folder(root, c.name): c for c in each_of("train", own["--each"], rest)}):
        accuracy = run.last_metrics()["accuracy"]
        say(f"{run.folder}: {epochs_of(run.config.train.epochs)}, validation accuracy {accuracy:.4f}")


def run_command(arguments: list[str]) -> None:
    from splitveil.report import check_packages, write_report

    own, rest = take_flags(COMMANDS["run"].flags, arguments)
    root, attacks = Path(own["--runs"]), chosen_suite(own["--suite"], [*rest, *(f"--{axis}" for axis in own["--each"])])
    configs = each_of("run", own["--each"], rest)
    if attacks is not None:
        configs = [replace(config, attacks=attacks) for config in configs]
    for config in configs:
        build_attacks(config)  # a mistake in the attacks must be told before the training, not after it
    check_packages()
    summaries = []
    for run, splits, device in train_runs({run_folder(root, config.name): config for config in configs}):
        with locked(run.folder):
            attack_run(run, splits, device)
            summaries.append(evaluate_run(run, splits, device))
    print_table(summaries)
    for config in configs:
        say(write_report([root / config.name], root / config.name / "report.html"))


def chosen_suite(name: str, others: list[str]) -> tuple[Any, ...] | None:
    """The attacks of `--suite NAME`, None without it. A suite is a fixed list, so no other flag may choose attacks."""
    if name and (named := [word for word in others if word.startswith("--attacks")]):
        raise UserError(f"--suite {name} is a fixed list; leave {named[0]} out, or name all attacks with --attacks")
    return suite(name) if name else None


def attack_command(arguments: list[str]) -> None:
    """Attack trained runs with all that they remember; with what `--attacks` adds to their list, or with a suite in its place."""
    own, words = take_flags(COMMANDS["attack"].flags, arguments)
    operands, options = operands_and_options(words)
    read_flags("attack", COMMANDS["attack"].flags, operands)  # refuses flags that it does not know
    name, names, only = own["--suite"], own["--attacks"], own["--only"]
    attacks = chosen_suite(name, [*(["--attacks"] if names else []), *options])
    if only and not names:
        raise UserError("--only says that no other attacks are to be run than --attacks names; name some")
    for folder in run_folders("attack", operands):
        run, place = trained_run(folder), folder / "attacks"
        with locked(folder):
            run.take_edits()
            begin_suite_of(place, run.config.attacks)
            if name:
                begin(place, name)
            elif names or options:
                named = named_attacks(run.config, names, options)
                replaces = only and not list_begun(place, run.config.attacks)  # what was begun must not shrink
                config = replace(run.config, attacks=named) if replaces else with_added(run.config, named)
                build_attacks(config)  # a mistake must be told before the run remembers it
                run = Run.create(folder, config)
                attacks = named if only else config.attacks
            skipped = attack_run(run, checked_splits(run), pick_device(run.config.device), attacks)
        done = standing(run, trained_weights(run), attacks).done
        told = f"; skipped {', '.join(skipped)}" if skipped else ""
        say(f"{folder}: attacked by {', '.join(done)}{told}")


def evaluate_command(arguments: list[str]) -> None:
    """Measure attacked runs; exit code 3, with the reasons, if a condition of `--fail-if` holds or cannot be judged."""
    own, operands = read_flags("evaluate", COMMANDS["evaluate"].flags, arguments)
    conditions = [parse_condition(text) for text in own["--fail-if"]]
    accepted, suite_name = flags_named(own["--accept-flag"]), own["--suite"]
    chosen_suite(suite_name, [])  # a name that is none is told before anything is measured
    summaries, lines = [], []
    for folder in run_folders("evaluate", operands):
        run = trained_run(folder)
        try:
            with locked(folder, PATIENCE):
                summary = evaluate_run(run, checked_splits(run), pick_device(run.config.device), suite_name)
        except Incomplete as error:
            if not conditions:
                raise
            lines.append(f"{run.config.name}: {error}")
            continue
        summaries.append(summary)
        lines += refusals(folder, summary, conditions, accepted, suite_name)
    if summaries:
        print_table(summaries, gaps=not conditions)
    if lines:
        say(*lines, sep="\n", file=sys.stderr)
        sys.exit(3)


def audit_command(arguments: list[str]) -> None:
    """Audit a model of the user's own; exit code 3, with a line for each, if a condition of `--fail-if` holds."""
    from splitveil.cli.audit import run_audit

    if not run_audit(arguments):
        sys.exit(3)


def report_command(arguments: list[str]) -> None:
    from splitveil.report import write_report

    own, operands = read_flags("report", COMMANDS["report"].flags, arguments)
    folders = evaluated(run_folders("report", operands))
    say(write_report(folders, Path(own["--out"] or Path(operands[0]) / "report.html"), own["--anyway"]))


def verify_command(arguments: list[str]) -> None:
    """Check runs against their manifests and signatures; exit code 3, with a line for each file that is not what it should be."""
    own, operands = read_flags("verify", COMMANDS["verify"].flags, arguments)
    key = Path(own["--key"]) if own["--key"] else None
    found = []
    for folder in run_folders("verify", operands):
        lines = problems(folder)
        try:
            owner = signed_by(folder, key)
        except UserError as error:
            lines.append(str(error))
        else:
            told = f"signed by {owner}" if owner else "not signed: whoever can write there can have forged it"
            if owner and key is None:
                told += " (pass --key FILE.pub to check whose that is)"
            if not lines:
                say(f"{folder}: every file is what {MANIFEST} says; {told}", *out_of_date(folder), sep="\n")
        found += lines
    if found:
        say(*found, sep="\n", file=sys.stderr)
        sys.exit(3)


def sign_command(arguments: list[str]) -> None:
    own, operands = read_flags("sign", COMMANDS["sign"].flags, arguments)
    if own["--new-key"]:
        public = new_key(Path(own["--new-key"]))
        say(f"{own['--new-key']}: a new key, keep it to yourself; {public}: give this to those who verify")
        if not operands:
            return
    if not (file := own["--key"] or own["--new-key"]):
        raise UserError("sign needs --key FILE; `splitveil sign --new-key FILE` makes one")
    for folder in run_folders("sign", operands):
        with locked(folder, PATIENCE):
            say(f"{folder}: signed by {sign(folder, Path(file))}")


def demo_command(arguments: list[str]) -> None:
    from splitveil.cli.demo import demo

    own, rest = take_flags(COMMANDS["demo"].flags, arguments)
    demo(Path(own["--runs"]) / "demo", rest)


def bench_command(arguments: list[str]) -> None:
    """Measured ratios; exit code 3 if one got worse than in the file that `--against` names."""
    checkout = Path(__file__).parents[2]
    if not (checkout / "benchmarks" / "bench").is_dir():
        raise UserError("bench needs splitveil's source tree, which holds benchmarks/; run it from a clone")
    sys.path.insert(0, str(checkout))
    from benchmarks.bench.command import FLAGS, bench

    if HELP & set(arguments):
        print(command_help("bench", FLAGS))
    elif not bench(arguments):
        sys.exit(3)


def list_command(arguments: list[str]) -> None:
    """All methods, or those of the kinds (attacks) and names (ridge) that are given."""
    _, wanted = read_flags("list", (), arguments)
    kinds = {f"{registry.kind}s": registry for registry in EVERY}
    names = {name for registry in EVERY for name in registry.names()}
    for word in wanted:
        if word not in kinds and word not in names:
            raise unknown("kind or name", word, {*kinds, *names})
    for kind, registry in kinds.items():
        shown = [name for name in registry.names() if not wanted or kind in wanted or name in wanted]
        if shown:
            print(kind)
        for name in shown:
            entry = registry[name]
            print(f"  {name:<19}{entry.summary}{f' [{entry.origin}]' if entry.origin else ''}")


def cuts_command(arguments: list[str]) -> None:
    """Where a model can be cut; the flags of data and model (--data.path, --model.width) are those of train."""
    if HELP & set(arguments):
        print(command_help("cuts"), "`splitveil train --model NAME --data NAME --help` shows their flags.", sep="\n")
        return
    from splitveil.cli.cuts import cuts

    own, rest = take_flags(COMMANDS["cuts"].flags, arguments)
    if not rest or rest[0].startswith("-"):
        raise UserError("cuts needs a model first: a name such as vgg11, or pkg.module:function")
    cuts(rest[0], own, rest[1:])


def design_command(arguments: list[str]) -> None:
    """Find what to run on a device; exit code 3 if no design is what was asked for."""
    from splitveil.cli.design import design

    own, rest = take_flags(COMMANDS["design"].flags, arguments)
    if not design(own, rest):
        sys.exit(3)


def data_command(arguments: list[str]) -> None:
    """`check` reads a set and says what it is; `prepare` may download it first."""
    if HELP & set(arguments):
        print(command_help("data"), f"NAME is one of {', '.join(DATASETS.names())}.", sep="\n")
        print("`splitveil train --data NAME --help` shows the flags of each.")
        return
    if len(arguments) < 2 or arguments[0] not in ("check", "prepare"):
        raise UserError(f"data needs check or prepare, then a name: splitveil data check {'|'.join(DATASETS.names())}")
    verb, name, *flags = arguments
    can_download = "download" in DATASETS[name].config.__dataclass_fields__
    download = ["--data.download"] if verb == "prepare" and can_download else []
    config = parse([*flags, "--data", name, *download], command="data")
    splits = build_splits(config)
    channels, height, width = splits.task.shape
    plural = "s" * (channels > 1)
    say(f"{name}: {len(splits.task.classes)} classes, {height}x{width} pixels, {channels} channel{plural}")
    for part, facts in splits.summary().items():
        print(f"  {part:<12}{facts['images']:>8} images   sha256 {facts['sha256']}")


def trained_run(folder: Path) -> Run:
    if is_audit(folder):
        raise UserError(f"{folder} is an audit, not a run; `splitveil audit --out {folder} …` goes on with it")
    run = Run.open(folder)
    if not run.has_weights():
        raise UserError(
            f"{folder} is not trained to its end; "
            f"`splitveil train {folder}/config.toml --runs {folder.parent} --name {folder.name}` goes on with it"
        )
    return run


def checked_splits(run: Run) -> Splits:
    splits = build_splits(run.config)
    run.check_splits(splits.summary())
    return splits
