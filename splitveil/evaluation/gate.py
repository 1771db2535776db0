"""The gate: whether a folder with attacks and a summary passes the conditions that were set, and if not, why.

    refusals(folder, summary, conditions)     one line for each reason; empty if it passes
    held(summary, folder)                     the summary with the suite that it is held to, and what is missing of it
    uncounted(folder, summary)                attacks that lie in the folder and are not in the summary

It fails closed. Beside a condition that holds, a number that is none and a flag that makes it worthless (fail_if.py) it names
what is incomplete: an attack of the suite that is missing or gave no number, and an attack that came after the summary.
`evaluate`, audits and `splitveil.testing` all ask here.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from splitveil.evaluation.fail_if import Condition, broken
from splitveil.evaluation.suites import needs_codes
from splitveil.evaluation.suites_begun import LOST, held_to, other_version
from splitveil.evaluation.summary import Summary
from splitveil.evaluation.which_attacks_count import finished, standing_of, target_of
from splitveil.progress import warn_once
from splitveil.runs import Run, read_json


def held(summary: Summary, folder: Path, name: str = "") -> Summary:
    """The summary held to the suite of this name, else to the largest that was begun in the folder, if any was."""
    suite = held_to(folder / "attacks", name)
    if suite is None:
        return replace(summary, suite=None, suite_version=None, incomplete=())
    if suite == LOST:
        return replace(
            summary, suite=suite.name, suite_version=None, incomplete=("begun.json was damaged: name a suite by --suite",)
        )
    if (line := other_version(folder / "attacks", suite)) is not None:
        warn_once(line)
    target = target_of(summary.weights_sha256, summary.splits)
    codes = any("codes" in report for report in summary.reports)
    wanted = [attack for attack in suite.attacks if codes or not needs_codes(attack)]  # without codes it would be skipped
    found = standing_of(folder / "attacks", wanted, summary.seed, target)
    without_number = [name for name in found.done if name not in summary.attacks or not summary.attacks[name].finite]
    missing = (*(place.name for place in found.missing), *without_number)
    skipped = summary.skipped | found.skipped
    return replace(summary, suite=suite.name, suite_version=suite.version, incomplete=missing, skipped=skipped)


def uncounted(folder: Path, summary: Summary) -> list[str]:
    """Attacks that were finished on the same weights and images, but not when the summary was written."""
    found = []
    for name, place in finished(folder / "attacks", target_of(summary.weights_sha256, summary.splits)).items():
        lies, counted = read_json(place / "attack.json"), summary.attacks.get(name)
        # No two attacks take equally many seconds, to the last digit.
        if counted is None or (lies["options"], lies["seconds"]) != (counted.options, counted.seconds):
            found.append(name)
    return found


def asked_since(folder: Path, summary: Summary) -> list[str]:
    """Attacks that the config of a run lists and that are not finished, also those that were added after the summary."""
    if not (folder / "config.toml").exists():
        return []
    target = target_of(summary.weights_sha256, summary.splits)
    missing = standing_of(folder / "attacks", Run.open(folder).config.attacks, summary.seed, target).missing
    return [place.name for place in missing if place.name not in (*summary.unfinished, *summary.incomplete)]


def incomplete(summary: Summary, folder: Path | None = None) -> list[str]:
    """A line if attacks of the suite have given no number, and one if attacks of its own list are not finished; with what to
    run, where the folder is named."""
    lines, own = [], [name for name in summary.unfinished if name not in summary.incomplete]
    if summary.incomplete:
        remedy = goes_on(folder, f" --suite {summary.suite}") if summary.suite_version else ""  # else a line says what was lost
        missing = ", ".join(summary.incomplete)
        lines.append(f"{summary.name}: suite {summary.suite} is incomplete, without a number: {missing}{remedy}")
    if own:
        lines.append(f"{summary.name}: attacks that were asked for are not finished: {', '.join(own)}{goes_on(folder)}")
    return lines


def goes_on(folder: Path | None, flags: str = "") -> str:
    """The command that runs what is missing in a folder of a run or of an audit."""
    if folder is None:
        return ""
    if (folder / "config.toml").exists():
        return f"; run `splitveil attack {folder}{flags}`"
    return f"; `splitveil audit --out {folder} …` goes on with it"


def unfinished(folder: Path, summary: Summary, suite: str = "") -> list[str]:
    """As `incomplete`, and a line if there are attacks that the summary does not count, or that were asked for since."""
    summary = held(summary, folder, suite)
    lines, later, asked = incomplete(summary, folder), uncounted(folder, summary), asked_since(folder, summary)
    if asked:
        lines.append(f"{summary.name}: {', '.join(asked)} was asked for and is not finished; run `splitveil attack {folder}`")
    if later:
        lines.append(f"{summary.name}: {', '.join(later)} came after summary.json; run `splitveil evaluate {folder}`")
    return lines


def refusals(
    folder: Path, summary: Summary, conditions: Sequence[Condition], accepted: Collection[str] = (), suite: str = ""
) -> list[str]:
    """Why a folder does not pass, a line each; `accepted` names flags that are not to count, `suite` what must be complete."""
    return [*unfinished(folder, summary, suite), *broken(summary, conditions, accepted)] if conditions else []
