"""`splitveil audit`: from flags to `splitveil.audit`, and from its report to the terminal, to a folder and to an exit code.

splitveil audit --model nets:resnet --weights resnet.safetensors --at layer1 --data folder --data.path faces --fail-if 'ssim>0.5'
splitveil audit --onnx edge.onnx --data npz --data.path images.npz
splitveil audit --onnx edge.onnx --private mine --attacker theirs --data.size 224
splitveil audit --pairs sent.npz
"""

import sys
from pathlib import Path
from typing import Any

from torch import nn

from splitveil.auditing.audit import audit
from splitveil.auditing.doors.exported import load_program
from splitveil.auditing.report import AuditReport
from splitveil.cli.arguments import parse, setting_rows
from splitveil.cli.command_flags import COMMANDS, HELP, NAMES, command_help, take_flags
from splitveil.compute.pick_device import pick_device
from splitveil.config import Config, to_dict
from splitveil.data.readers.folder import Config as Folder
from splitveil.data.readers.folder import picture_files
from splitveil.evaluation.fail_if import parse_condition
from splitveil.evaluation.flags import flags_named
from splitveil.evaluation.gate import refusals
from splitveil.own_code import load_object
from splitveil.own_model import load_weights, model_from
from splitveil.printable import say
from splitveil.progress import console
from splitveil.registry import DATASETS, UserError
from splitveil.report import check_packages
from splitveil.report.terminal import print_table
from splitveil.training.build import build_splits

DOORS = ("--model", "--edge", "--onnx", "--exported", "--pairs")
OURS = ("data", "splits", "defences", "attacks", "seed", "name", "device")
"""Settings of a config that an audit uses; all others are about training."""
BASE = {"name": "audit", "defences": [{"name": "none"}]}


def run_audit(arguments: list[str]) -> bool:
    """Audit what the flags say; True if it passes the conditions of --fail-if."""
    own, rest = take_flags(COMMANDS["audit"].flags, arguments)
    if HELP & set(rest):
        print(help_text(rest))
        return True
    conditions, accepted = [parse_condition(text) for text in own["--fail-if"]], flags_named(own["--accept-flag"])
    given = [door for door in DOORS if own[door]]
    if len(given) != 1:
        named = ", ".join(DOORS)
        raise UserError(f"audit needs one of {named}{f', not {len(given)} of them' if given else ''}; --help shows examples")
    rest = with_folder(own, rest)
    config, named = settings_of(rest), any(flag.startswith("--attacks") for flag in flags_in(rest))
    if named and own["--suite"]:
        raise UserError(f"--suite {own['--suite']} is a fixed list; leave it out, or --attacks")
    targets = whole(own["--targets"], "--targets")
    check_packages()  # what the report needs is told before the work, not after it
    report = audit(
        **(from_pairs(own, rest) if own["--pairs"] else from_model(own, config, rest)), channel=channel_of(config),
        suite=own["--suite"] or "quick", attacks=to_dict(config)["attacks"] if named else None,
        targets=targets, seed=config.seed, name=config.name, folder=Path(own["--out"]),
    )  # fmt: skip
    show(report, gaps=not conditions)
    lines = refusals(report.folder, report.summary, conditions, accepted, own["--suite"])
    if lines:
        say(*lines, sep="\n", file=sys.stderr)
    return not lines


def flags_in(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def settings_of(words: list[str]) -> Config:
    """The settings that an audit shares with a run; those of a training are refused."""
    if words and not words[0].startswith("-"):
        raise UserError(f"audit: unexpected argument {words[0]!r}; `splitveil audit --help` shows its flags")
    for flag in flags_in(words):
        if flag.removeprefix("--").partition(".")[0] not in OURS:
            raise UserError(f"audit has no flag {flag}: it trains no model; `splitveil audit --help` shows its flags")
    return parse(words, base=BASE, command="audit")


def help_text(words: list[str]) -> str:
    config = parse([word for word in words if word not in HELP], base=BASE, command="audit")
    names = {"methods": [flag.row for flag in NAMES if flag.name.removeprefix("--") in OURS]}
    tables = setting_rows(config)
    shared = [row for row in tables["run"] if row[0].partition(" ")[0].removeprefix("--") in OURS]
    rows = {
        title: table
        for title, table in tables.items()
        if title.partition(":")[0].partition(".")[0] in ("data", "splits", "defences")
    }
    return command_help("audit", groups=names | {"settings": shared} | rows)


def channel_of(config: Config) -> list[dict[str, Any]]:
    return [table for table in to_dict(config)["defences"] if table["name"] != "none"]


def whole(word: str, flag: str) -> int | None:
    if word and not word.isdecimal():
        raise UserError(f"{flag} is {word!r}, must be a whole number")
    return int(word) if word else None


def from_pairs(own: dict[str, Any], words: list[str]) -> dict[str, Any]:
    if "--data" in flags_in(words):
        raise UserError("--pairs holds the images too; leave --data out")
    return {"pairs": own["--pairs"], "attacker": own["--attacker-pairs"] or None}


def from_model(own: dict[str, Any], config: Config, words: list[str]) -> dict[str, Any]:
    """The model and the images: the test split is private, the auxiliary split is the attacker's."""
    net = opened(own)
    if "--data" not in flags_in(words) and not own["--private"]:
        names = ", ".join(DATASETS.names())
        raise UserError(f"audit needs images: --data NAME, one of {names}, and --data.path; or --private DIR")
    if own["--model"] and isinstance(net, nn.Module):
        net.to(pick_device(config.device))
    if own["--private"]:
        sides = from_folders(own, config)
    else:
        splits = build_splits(config)
        sides = {"private": splits.test, "attacker": splits.auxiliary}
    return {"net": net, "at": own["--at"] or None, **sides}


def from_folders(own: dict[str, Any], config: Config) -> dict[str, Any]:
    """The images of two folders, or of one for both sides; they are read one at a time."""
    assert isinstance(config.data, Folder)
    named = {side: Path(own[f"--{side}"]).expanduser() for side in ("private", "attacker") if own[f"--{side}"]}
    return dict(zip(named, picture_files(list(named.values()), config.data.size, config.data.grey)))


def with_folder(own: dict[str, Any], words: list[str]) -> list[str]:
    """The words of the settings, with the reader that --private stands for."""
    if own["--attacker"] and not own["--private"]:
        raise UserError("--attacker is the folder of the attacker's images; name that of the private ones by --private")
    if not own["--private"]:
        return words
    if own["--pairs"]:
        raise UserError("--pairs holds the images too; leave --private out")
    if named := flags_in(words) & {"--data", "--data.path"}:
        raise UserError(f"--private names the images; leave {min(named)} out")
    return ["--data", "folder", *words]


def opened(own: dict[str, Any]) -> Any:
    if own["--weights"] and not own["--model"]:
        raise UserError("--weights are those of --model; leave them out")
    if own["--onnx"]:
        return Path(own["--onnx"])
    if own["--exported"]:
        return load_program(Path(own["--exported"]), own["--trust"])
    if own["--edge"]:
        return load_object(own["--edge"])
    net = model_from(own["--model"])
    if own["--weights"]:
        load_weights(net, Path(own["--weights"]))
    return net


def show(report: AuditReport, gaps: bool) -> None:
    """Print the table, what a reader must know, and where the results are."""
    print_table([report.summary], gaps)
    for note in report.notes:
        console.print(note, highlight=False, markup=False)
    for flag, why in report.not_checked.items():
        console.print(f"not checked: {flag}, {why}", highlight=False, markup=False)
    print(report.html(report.folder / "report.html"))
