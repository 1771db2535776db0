"""What each command does. A command takes its arguments as a list and returns nothing."""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from splitveil.arguments import HELP, choose, parse
from splitveil.build import build_parts, build_splits, pick_device
from splitveil.config import Config, from_dict, to_dict
from splitveil.data.splits import Splits
from splitveil.evaluate import attack_run, build_attacks, evaluate_run
from splitveil.headline import print_table
from splitveil.registry import ATTACKS, DATASETS, DEFENCES, MODELS, SURROGATES, UserError
from splitveil.runs import Run, environment, locked, read_json, write_json
from splitveil.train import check, process_group, train


def take_flag(arguments: list[str], flag: str, default: str) -> str:
    """Remove `--flag value` (or `--flag=value`) from the arguments and return the value."""
    for i, argument in enumerate(arguments):
        if argument == flag:
            if i + 1 == len(arguments) or arguments[i + 1].startswith("--"):
                raise UserError(f"{flag} needs a value")
            value = arguments[i + 1]
            del arguments[i : i + 2]
            return value
        if argument.startswith(f"{flag}="):
            del arguments[i]
            return argument.partition("=")[2]
    return default


def run_folders(arguments: list[str], command: str) -> list[Path]:
    """Run folders named on the command line; a folder of runs stands for the runs in it."""
    if HELP & set(arguments):
        print(
            f"usage: splitveil {command} RUN…      RUN is a folder such as runs/demo/none, or a folder of such folders"
        )
        sys.exit(0)
    if not arguments:
        raise UserError(f"{command} needs a run folder, such as runs/demo/none, or a folder of such folders")
    folders: list[Path] = []
    for argument in arguments:
        if argument.startswith("-"):
            raise UserError(f"{command}: unknown flag {argument!r}; it takes run folders")
        folders += runs_in(Path(argument))
    return folders


def runs_in(path: Path) -> list[Path]:
    """The run folder itself, or the runs of a folder of runs, in the order of its summary.json where it has one."""
    below = sorted(schema.parent for schema in path.glob("*/schema.json"))
    if (path / "schema.json").exists() or not below:
        return [path]
    if (path / "summary.json").exists():
        order = [row["name"] for row in read_json(path / "summary.json")]
        below.sort(key=lambda run: order.index(run.name) if run.name in order else len(order))
    return below


def train_run(folder: Path, config: Config) -> tuple[Run, Splits, torch.device]:
    """Train, or go on training, the run in `folder`."""
    device = pick_device(config.device)
    with process_group(device) as (rank, world):
        splits = build_splits(config)
        check(config.train, len(splits.task), world)
        parts = build_parts(config, splits.task, device)  # first: a setting that is refused must not leave a run folder
        with locked(folder) if rank == 0 else nullcontext():
            if rank == 0:
                Run.create(folder, config).check_splits(splits.summary())
            if world > 1:
                dist.barrier()  # one process makes the folder, the others find it
            run = Run.open(folder)
            if not run.finished():
                if rank == 0:
                    write_json(folder / "environment.json", environment(device))
                train(run, parts, splits, device, rank, world)
        if rank > 0:
            sys.exit(0)  # attacks and reports are the first process's work
    return run, splits, device


def train_command(arguments: list[str]) -> None:
    root = Path(take_flag(arguments, "--runs", "runs"))
    config = parse(arguments)
    run, _, _ = train_run(root / config.name, config)
    print(f"{run.folder}: {config.train.epochs} epochs, validation accuracy {run.last_metrics()['accuracy']:.4f}")


def run_command(arguments: list[str]) -> None:
    from splitveil.report import check_packages, write_report

    root = Path(take_flag(arguments, "--runs", "runs"))
    config = parse(arguments)
    build_attacks(config)  # what is wrong with them should be said before the training, not after
    check_packages()
    run, splits, device = train_run(root / config.name, config)
    attack_run(run, splits, device)
    print_table([evaluate_run(run, splits, device)])
    print(write_report([run.folder], run.folder / "report.html"))


def attack_command(arguments: list[str]) -> None:
    """Attack trained runs; `--attacks a,b` chooses others than the run's config says and is remembered there."""
    names = take_flag(arguments, "--attacks", "")
    for folder in run_folders(arguments, "attack"):
        run = trained_run(folder)
        if names:
            table = to_dict(run.config)
            choose(table, "attacks", names)
            run = Run.create(folder, from_dict(table))
        attack_run(run, checked_splits(run), pick_device(run.config.device))
        print(f"{folder}: attacked by {', '.join(type(a).method for a in run.config.attacks)}")


def evaluate_command(arguments: list[str]) -> None:
    summaries = []
    for folder in run_folders(arguments, "evaluate"):
        run = trained_run(folder)
        summaries.append(evaluate_run(run, checked_splits(run), pick_device(run.config.device)))
    print_table(summaries)


def report_command(arguments: list[str]) -> None:
    from splitveil.report import write_report

    out = take_flag(arguments, "--out", "")
    folders = run_folders(arguments, "report")
    print(write_report(folders, Path(out) if out else Path(arguments[0]) / "report.html"))


def demo_command(arguments: list[str]) -> None:
    from splitveil.demo import demo

    root = Path(take_flag(arguments, "--runs", "runs"))
    if HELP & set(arguments):
        print(
            "usage: splitveil demo [--runs DIR] [flags of train]      leaves DIR/demo/summary.json and DIR/demo/report.html"
        )
        return
    demo(root / "demo", arguments)


def list_command(arguments: list[str]) -> None:
    if HELP & set(arguments):
        print("usage: splitveil list      every registered name, with one line each")
        return
    for registry in (SURROGATES, DEFENCES, ATTACKS, MODELS, DATASETS):
        print(f"{registry.kind}s")
        for name in registry.names():
            print(f"  {name:<19}{registry[name].summary}")


def data_command(arguments: list[str]) -> None:
    """`check` reads a set and says what it is; `prepare` may download it first."""
    if HELP & set(arguments):
        print("usage: splitveil data check|prepare NAME [--data.path DIR …]      prepare downloads what is missing")
        print(f"NAME: {', '.join(DATASETS.names())}")
        return
    if len(arguments) < 2 or arguments[0] not in ("check", "prepare"):
        raise UserError(f"data needs check or prepare, then a name: splitveil data check {'|'.join(DATASETS.names())}")
    verb, name, *flags = arguments
    can_download = "download" in DATASETS[name].config.__dataclass_fields__
    download = ["--data.download"] if verb == "prepare" and can_download else []
    config = parse([*flags, "--data", name, *download])
    splits = build_splits(config)
    channels, height, width = splits.task.shape
    print(
        f"{name}: {len(splits.task.classes)} classes, {height}x{width} pixels, {channels} channel{'s' * (channels > 1)}"
    )
    for part, facts in splits.summary().items():
        print(f"  {part:<12}{facts['images']:>8} images   sha256 {facts['sha256']}")


def trained_run(folder: Path) -> Run:
    run = Run.open(folder)
    if not run.finished():
        raise UserError(
            f"{folder} is not trained to its end; "
            f"`splitveil train {folder}/config.toml --runs {folder.parent} --name {folder.name}` goes on with it"
        )
    return run


def checked_splits(run: Run) -> Splits:
    splits = build_splits(run.config)
    run.check_splits(splits.summary())
    return splits
