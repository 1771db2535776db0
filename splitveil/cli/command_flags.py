"""The commands and their own flags: one table, from which command lines are read and help is printed. Imports no torch.

A command's own flags stand here. `train`, `run` and `demo` also have a flag for every setting of a Config, which
`splitveil.cli.arguments` finds in the dataclasses. The flags of `bench` are in benchmarks/bench/command.py, in the same form.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from splitveil.registry import UserError, unknown

HELP = {"-h", "--help"}
Row = tuple[str, str, str]  # a line of help: the flag, its default, its meaning


@dataclass(frozen=True)
class Flag:
    """A flag of a command."""

    name: str
    value: str
    """The word for its value in the help, such as FILE; empty for a switch, which has none."""
    meaning: str
    default: str = ""
    repeats: bool = False
    """True if the flag may be given several times; the command then gets all its values."""

    @property
    def row(self) -> Row:
        return f"{self.name} {self.value}".strip(), self.default, self.meaning


@dataclass(frozen=True)
class Command:
    """A command of `splitveil`."""

    about: str
    operands: str = ""
    """The words between the command's name and its flags, as the help shows them, such as RUN…"""
    flags: tuple[Flag, ...] = ()
    idle: tuple[str, ...] = ()
    """Settings, or tables of settings, that the command accepts but does not use; its help leaves them out."""


IMPORT = Flag(
    "--import", "MODULE",
    "Import this module of yours first, so that its methods are known by name. May be given several times.", repeats=True,
)  # fmt: skip
"""The flag that every command has."""
RUNS = Flag("--runs", "DIR", "The folder in which run folders are made.", default="runs")
EACH = Flag(
    "--each", "SETTING=A,B",
    "Train one run for every value, side by side. With several --each, one for every combination.", repeats=True,
)  # fmt: skip
SUITE = Flag("--suite", "NAME", "Attack with a fixed list: quick, standard or plus. The run remembers it.")
ATTACKS = Flag(
    "--attacks", "A,B",
    "Add these to the attacks of the run's config, which remembers them: methods, or attacks of a suite such as decoder-strong. "
    "Each may have options, by its place or by its name: --attacks.0.epochs 100, --attacks.decoder.epochs 100. What was finished "
    "before counts as well.",
)  # fmt: skip
ONLY = Flag("--only", "", "Run just what --attacks names. It takes the place of the run's list if nothing of that was run yet.")
FAIL_IF = Flag(
    "--fail-if", "CONDITION",
    "Exit with 3 if it holds, such as 'ssim>0.5' or 'accuracy<0.8'. mse, ssim and psnr are of the worst case over attacks; "
    "accuracy and bits are of the run. May be given several times.", repeats=True,
)  # fmt: skip
HELD_TO = Flag(
    "--suite", "NAME", "Hold the run to this suite: conditions fail unless all of it was run. Default is the largest begun in it."
)
ACCEPT_FLAG = Flag(
    "--accept-flag", "FLAG",
    "Judge conditions although this flag makes their numbers worthless, such as attack-not-converged. May be repeated.",
    repeats=True,
)  # fmt: skip
OUT = Flag("--out", "FILE", "Where the report is written, if not to report.html in the first of the folders.")
AUDIT = (
    Flag(
        "--model",
        "PKG.MODULE:NAME",
        "A function that gives the network, or the network itself. The current folder is looked in too.",
    ),
    Flag("--weights", "FILE", "Put these weights into it: a .safetensors, or a .pt state dict of tensors alone."),
    Flag("--at", "LAYER", "Where the network is cut: after this submodule, such as layer1."),
    Flag("--edge", "PKG.MODULE:NAME", "In the place of --model: a function from images to what is sent (black box)."),
    Flag("--onnx", "FILE", "In the place of --model: an ONNX file of the edge (black box)."),
    Flag(
        "--exported",
        "FILE",
        "In the place of --model: a torch.export file of the edge (black box). Loading it unpickles: see --trust.",
    ),
    Flag("--trust", "", "Load --exported, though a pickle can run any code."),
    Flag(
        "--pairs",
        "FILE",
        "In the place of a model and --data: what was sent, and the images. A .npz, a .safetensors, a folder of .npy.",
    ),
    Flag(
        "--private",
        "DIR",
        "In the place of --data: the images to protect, in this folder or in one folder a class, resized to --data.size.",
    ),
    Flag("--attacker", "DIR", "The attacker's own images; without them half of --private are the attacker's."),
    Flag("--attacker-pairs", "FILE", "Those of the attacker; without them half of --pairs are the attacker's."),
    Flag("--suite", "NAME", "Attack with a fixed list: quick (the default), standard or plus; or name attacks with --attacks."),
    Flag("--targets", "N", "Private images that are rebuilt, at most. Accuracy is always over all of them."),
)
AUDIT_OUT = Flag("--out", "DIR", "Where results are kept; the same command goes on there.", default="audit")
LEAK = Flag("--leak", "", "Attack every cut by a linear inverse, some seconds each, and show what it rebuilds.")
WEIGHTS = Flag("--weights", "FILE", "Weights of the model (.safetensors); without them a registered model has random ones.")
INPUT = Flag(
    "--input", "C,H,W", "Shape of an image; images of --data are brought to it. Default is theirs, or 3,32,32 without --data."
)
IMAGES = Flag(
    "--images", "N", "Images that the attacker of --leak has; fewer if z is so large that they need over 1 GiB.", "1000"
)
PICTURE = Flag("--out", "FILE", "Also draw the cuts, as .svg, .png or .pdf.")
ANYWAY = Flag("--anyway", "", "Report runs together although their numbers do not compare, such as those on other test images.")
KEY = Flag("--key", "FILE", "The key that signs. It lies outside the run, and only you may read it.")
NEW_KEY = Flag("--new-key", "FILE", "Make a key there, and FILE.pub beside it for those who verify. Needs no RUN.")
PUBLIC_KEY = Flag("--key", "FILE.pub", "Whose signature there must be: the public half of the key that signed.")
DESIGN = (
    Flag("--max-macs", "N", "The most multiply-adds of the edge for an image, such as 21.2M."),
    Flag("--max-weights", "N", "The most numbers in the edge's weights, such as 85k."),
    Flag("--max-numbers", "N", "The most numbers that are sent of an image, such as 512."),
    Flag("--max-ms", "MS", "The most milliseconds that the edge takes for an image on one thread of this CPU."),
    Flag(
        "--accuracy",
        "SHARE",
        "Ask for this validation accuracy at least, such as 0.88: then the design that hides most above it is taken.",
    ),
    Flag(
        "--mse",
        "ERROR",
        "Ask that the strongest attacker errs so much at least: then the most accurate design above it is taken.",
    ),
    Flag("--models", "A,B", "Look among these models only; default is all that take such images."),
    Flag("--trials", "N", "Designs that are tried by a short training and two attacks.", "24"),
    Flag("--short-epochs", "N", "Epochs of a trial.", "5"),
    Flag("--finalists", "N", "Designs that are then trained in full and meet the whole suite.", "4"),
    Flag("--minutes", "M", "Begin no further trial after six tenths of this time; finalists then begin."),
    Flag("--suite", "NAME", "What finalists meet: quick, standard or plus.", "quick"),
    Flag("--out", "DIR", "Where the search is kept; the same command goes on there.", "runs/design"),
)
NAMES = (
    Flag("--data", "NAME", "Which images.", repeats=True),
    Flag("--model", "NAME", "Which network.", repeats=True),
    Flag("--defences", "A,B", "What stands between edge and cloud, in this order.", repeats=True),
    Flag("--cem.surrogate", "NAME", "Which loss keeps z from telling more than the class, or none.", repeats=True),
    Flag("--attacks", "A,B", "Who tries to rebuild the images, or none.", repeats=True),
)
"""Flags that choose methods; the last of the same name counts. They are read first, because each method has its own flags."""

COMMANDS = {
    "demo": Command(
        "train four split models (bottleneck; noise; noise and CEM; the same behind a narrow edge), attack them and write a "
        "report (3 to 5 minutes on 2 cores)",
        flags=(RUNS,),
    ),
    "run": Command("train, attack, evaluate and report", "[RECIPE.toml …]", (RUNS, EACH, SUITE)),
    "train": Command("train a split model; the same command resumes it", "[RECIPE.toml …]", (RUNS, EACH)),
    "attack": Command("attack trained runs", "RUN…", (ATTACKS, ONLY, SUITE)),
    "evaluate": Command("measure accuracy, leak, cost and flags of attacked runs", "RUN…", (FAIL_IF, HELD_TO, ACCEPT_FLAG)),
    "audit": Command(
        "attack and measure a model that splitveil did not train; the test split of --data is private, the auxiliary one is the "
        "attacker's",
        flags=(*AUDIT, FAIL_IF, ACCEPT_FLAG, AUDIT_OUT),
    ),
    "report": Command("write one HTML file from one or more runs", "RUN…", (OUT, ANYWAY)),
    "verify": Command("check that every file of a run is what its manifest, and a signature, says", "RUN…", (PUBLIC_KEY,)),
    "sign": Command("sign runs as they are, so that forgery is found", "RUN…", (KEY, NEW_KEY)),
    "list": Command("show every surrogate, defence, attack, model and data set, or some of them", "[KIND or NAME …]"),
    "cuts": Command(
        "show where a model can be cut: what is sent, what the edge computes and, with --leak, what leaks",
        "MODEL",
        (LEAK, WEIGHTS, INPUT, IMAGES, PICTURE),
    ),
    "design": Command(
        "find what to run on a device: edges, cuts, noise and CEM within its budget, tried, attacked and compared",
        "[RECIPE.toml …]",
        DESIGN,
        idle=("name", "model", "defences", "attacks", "cem.strength"),
    ),
    "bench": Command("measure what a step, a surrogate and a refresh cost, as ratios"),
    "data": Command("check a data set; prepare downloads what is missing", "check|prepare NAME [--data.path DIR …]"),
}


def take_flags(flags: Iterable[Flag], arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Sort a command line into the values of these flags and the other words, which keep their order.

    The value is a list where a flag may be repeated, a bool for a switch, and else a string, empty where there is no default.
    """
    known, found, others, left = {flag.name: flag for flag in flags}, dict[str, list[str]](), [], list(arguments)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        flag = known.get(name)
        if flag is None:
            others.append(word)
            continue
        if found.get(name) and not flag.repeats:
            raise UserError(f"{name} is there twice; give it once")
        if equals and not flag.value:
            raise UserError(f"{word} has a value, but {name} takes none")
        if flag.value and not equals:
            if not left or left[0].startswith("--"):
                raise UserError(f"{name} needs a value: {flag.value}")
            value = left.pop(0)
        found.setdefault(name, []).append(value)
    values: dict[str, Any] = {}
    for name, flag in known.items():
        given = found.get(name, [])
        values[name] = given if flag.repeats else (given or [flag.default])[0] if flag.value else bool(given)
    return values, others


def read_flags(command: str, flags: Iterable[Flag], arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """As `take_flags`, for a command that has no other flags than these: the other words must be operands."""
    values, operands = take_flags(flags, arguments)
    for word in operands:
        if word.startswith("-"):
            raise unknown("flag", word.partition("=")[0], values) if values else UserError(f"{command} has no flags")
        if not COMMANDS[command].operands:
            raise UserError(f"{command}: unexpected argument {word!r}; `splitveil {command} --help` shows its flags")
    return values, operands


def usage() -> str:
    """What `splitveil --help` prints."""
    rows = [(name, "", command.about) for name, command in COMMANDS.items()]
    end = "`splitveil COMMAND --help` lists every flag of a command."
    return "\n".join(["usage: splitveil COMMAND …", "", *aligned(rows), "", end])


def command_help(command: str, flags: Iterable[Flag] = (), groups: dict[str, list[Row]] | None = None) -> str:
    """What `splitveil COMMAND --help` prints; `groups` are tables of further flags, by title."""
    told = COMMANDS[command]
    rows = [flag.row for flag in (*told.flags, *flags, IMPORT)]
    operands = f" {told.operands}" if told.operands else ""
    lines = [f"usage: splitveil {command}{operands}{' [flags]' if rows or groups else ''}", ""]
    lines += wrap(f"{told.about[0].upper()}{told.about[1:]}.", columns())
    if "MODEL" in operands:
        lines += ["MODEL is a name of `splitveil list models` or pkg.module:function, which returns an nn.Module."]
    if "RUN…" in operands:
        lines += ["RUN is a run folder, such as runs/demo/bottleneck, or a folder of run folders."]
    for title, table in ({"": rows} | (groups or {})).items():
        lines += ["", *([title] if title else []), *aligned(table)] if table else []
    return "\n".join(lines)


def columns() -> int:
    """The width of the help: that of the terminal, within what reads well."""
    return max(60, min(shutil.get_terminal_size().columns, 120))


def aligned(rows: list[Row]) -> list[str]:
    """Rows in three columns as wide as the terminal; a flag that is too long for its column stands on a line of its own."""
    longest = max(len(flag) for row in rows for flag in row[0].split("\n"))
    first = min(longest, columns() * 2 // 5)
    second = min(max(len(row[1]) for row in rows), columns() // 6)
    third = columns() - first - second - (6 if second else 4)
    lines = []
    for flags, default, meaning in rows:
        left = flags.split("\n")
        if max(map(len, left)) > first:
            lines += [f"  {flag}" for flag in left]
            left = []
        cells = zip_longest(left, wrap(default, second or 1), wrap(meaning, third), fillvalue="")
        gap = "  " if second else ""
        lines += [f"  {flag:<{first}}{gap}{value:<{second}}  {words}".rstrip() for flag, value, words in cells]
    return lines
