"""What each command does. A command takes its arguments as a list and returns nothing."""

import gc
import sys
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from splitveil.attacks import label_of
from splitveil.cli.arguments import HELP, choose, parse
from splitveil.config import Config, from_dict, to_dict
from splitveil.data.splits import Splits
from splitveil.evaluation.build_attacks import build_attacks
from splitveil.evaluation.conditions import broken, parse_condition
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.run_attacks import attack_run
from splitveil.evaluation.suites import suite
from splitveil.registry import ATTACKS, DATASETS, DEFENCES, MODELS, SURROGATES, UserError
from splitveil.report.terminal import print_table
from splitveil.runs import Run, environment, locked, read_json, write_json
from splitveil.training.build import build_parts, build_splits, pick_device
from splitveil.training.loop import Training, check, process_group, train


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


FOLDER_FLAGS = {
    "attack": {
        "--attacks A,B": "attack with these instead of what the run's config says; it is remembered there",
        "--suite NAME": "attack with a fixed list, quick, standard or plus (suites.toml); it is remembered there",
    },
    "evaluate": {
        "--fail-if CONDITION": "exit with 3 if it holds, such as 'ssim>0.5' or 'accuracy<0.8'; may be there several times. "
        "mse, ssim, psnr: worst case over attacks; accuracy; bits",
    },
    "report": {"--out FILE": "where the report goes, if not to report.html in the first folder"},
}


def run_folders(arguments: list[str], command: str) -> list[Path]:
    """Run folders named on the command line; a folder of runs stands for the runs in it."""
    if HELP & set(arguments):
        print(
            f"usage: splitveil {command} RUN…      RUN is a folder such as runs/demo/none, or a folder of such folders"
        )
        for flag, what in FOLDER_FLAGS[command].items():
            print(f"  {flag:<21}{what}")
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
    return train_runs({folder: config})[0]


def train_runs(configs: dict[Path, Config]) -> list[tuple[Run, Splits, torch.device]]:
    """Train runs side by side, a step of each in one captured graph where there is a GPU."""
    devices = {config.device for config in configs.values()}
    if len(devices) > 1:
        raise UserError(
            f"runs that are trained together must be on one device, these are on {', '.join(sorted(devices))}"
        )
    device = pick_device(devices.pop())
    with process_group(device) as (rank, world), ExitStack() as locks:
        built = []
        for config in configs.values():
            splits = build_splits(config)
            check(config.train, len(splits.task), world)
            # Before the folder is made: a setting that is refused must not leave one behind.
            built.append((splits, build_parts(config, splits.task, device)))
        runs, trainings = [], []
        for (folder, config), (splits, parts) in zip(configs.items(), built):
            if rank == 0:
                locks.enter_context(locked(folder))
                Run.create(folder, config).check_splits(splits.summary())
            if world > 1:
                dist.barrier()  # one process makes the folder, the others find it
            runs.append(Run.open(folder))
            if not runs[-1].finished():
                if rank == 0:
                    write_json(folder / "environment.json", environment(device))
                trainings.append(Training(runs[-1], parts, splits, device, rank, world))
        if trainings:
            train(trainings)
            # What DistributedDataParallel runs in threads has to end before the process group does; a process's first training
            # is left in a cycle, which only the collector frees.
            trainings.clear()
            gc.collect()
        if rank > 0:
            sys.exit(0)  # attacks and reports are the first process's work
    return [(run, splits, device) for run, (splits, _) in zip(runs, built)]


def each_of(arguments: list[str]) -> list[Config]:
    """The config of the command line; with `--each seed=0,1,2` one for every value, and for every combination of several."""
    axes = []
    while axis := take_flag(arguments, "--each", ""):
        name, _, values = axis.partition("=")
        if not name or not values:
            raise UserError(
                f"--each is {axis!r}, must be a setting and its values, such as seed=0,1,2 or cem.strength=4,8"
            )
        axes.append([(name, value) for value in values.split(",")])
    configs = []
    for chosen in product(*axes):
        flags = [word for name, value in chosen for word in (f"--{name}", value)]
        config = parse([*arguments, *flags])
        label = "".join(f"-{name.rpartition('.')[2]}{value}" for name, value in chosen)
        configs.append(replace(config, name=config.name + label))
    names = [config.name for config in configs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"--each gives {min(twice)} twice; name every value once")
    return configs


def train_command(arguments: list[str]) -> None:
    root = Path(take_flag(arguments, "--runs", "runs"))
    for run, _, _ in train_runs({root / config.name: config for config in each_of(arguments)}):
        accuracy = run.last_metrics()["accuracy"]
        print(f"{run.folder}: {run.config.train.epochs} epochs, validation accuracy {accuracy:.4f}")


def run_command(arguments: list[str]) -> None:
    from splitveil.report import check_packages, write_report

    root = Path(take_flag(arguments, "--runs", "runs"))
    name = take_suite(arguments)
    configs = each_of(arguments)
    if name:
        configs = [replace(config, attacks=suite(name)) for config in configs]
    for config in configs:
        build_attacks(config)  # what is wrong with them should be said before the training, not after
    check_packages()
    summaries = []
    for run, splits, device in train_runs({root / config.name: config for config in configs}):
        attack_run(run, splits, device)
        summaries.append(evaluate_run(run, splits, device))
    print_table(summaries)
    for config in configs:
        print(write_report([root / config.name], root / config.name / "report.html"))


def take_suite(arguments: list[str]) -> str:
    """Remove `--suite NAME` from the arguments; a suite is a fixed list, so nothing else may say what attacks."""
    name = take_flag(arguments, "--suite", "")
    if name:
        suite(name)  # what is wrong with it should be said before anything is done
        if others := [flag for flag in arguments if flag.startswith("--attacks")]:
            raise UserError(
                f"--suite {name} is a fixed list; leave {others[0]} out, or name all attacks with --attacks"
            )
    return name


def attack_command(arguments: list[str]) -> None:
    """Attack trained runs; `--attacks a,b` or `--suite` chooses others than the run's config says and is remembered there."""
    chosen = take_suite(arguments)
    names = take_flag(arguments, "--attacks", "")
    for folder in run_folders(arguments, "attack"):
        run = trained_run(folder)
        if chosen:
            run = Run.create(folder, replace(run.config, attacks=suite(chosen)))
        if names:
            table = to_dict(run.config)
            choose(table, "attacks", names)
            run = Run.create(folder, from_dict(table))
        skipped = attack_run(run, checked_splits(run), pick_device(run.config.device))
        labels = [label for attack in run.config.attacks if (label := label_of(attack)) not in skipped]
        told = f"; skipped {', '.join(skipped)}" if skipped else ""
        print(f"{folder}: attacked by {', '.join(labels)}{told}")


def evaluate_command(arguments: list[str]) -> None:
    """Measure attacked runs; exit code 3, with a line for each, if a condition of `--fail-if` holds."""
    conditions = []
    while text := take_flag(arguments, "--fail-if", ""):
        conditions.append(parse_condition(text))
    summaries = []
    for folder in run_folders(arguments, "evaluate"):
        run = trained_run(folder)
        summaries.append(evaluate_run(run, checked_splits(run), pick_device(run.config.device)))
    print_table(summaries)
    if lines := [line for summary in summaries for line in broken(summary, conditions)]:
        print(*lines, sep="\n", file=sys.stderr)
        sys.exit(3)


def report_command(arguments: list[str]) -> None:
    from splitveil.report import write_report

    out = take_flag(arguments, "--out", "")
    folders = run_folders(arguments, "report")
    print(write_report(folders, Path(out) if out else Path(arguments[0]) / "report.html"))


def demo_command(arguments: list[str]) -> None:
    from splitveil.cli.demo import demo

    root = Path(take_flag(arguments, "--runs", "runs"))
    if HELP & set(arguments):
        print(
            "usage: splitveil demo [--runs DIR] [flags of train]      leaves DIR/demo/summary.json and DIR/demo/report.html"
        )
        return
    demo(root / "demo", arguments)


def bench_command(arguments: list[str]) -> None:
    """Measured ratios; exit code 3 if one got worse than in the file that `--against` names."""
    checkout = Path(__file__).parents[2]
    if not (checkout / "benchmarks" / "bench").is_dir():
        raise UserError("bench needs splitveil's source tree, which holds benchmarks/; run it from a clone")
    sys.path.insert(0, str(checkout))
    from benchmarks.bench.command import USAGE, bench

    if HELP & set(arguments):
        print(USAGE)
        return
    if not bench(arguments):
        sys.exit(3)


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
