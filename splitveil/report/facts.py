"""What the report says: the measured facts of each run, how the runs compare, and what speaks against comparing them."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from splitveil.attacks.threat import SAME_DISTRIBUTION
from splitveil.evaluation.attack_folder import WEIGHTS, weights_digest
from splitveil.evaluation.audit_folder import is_audit
from splitveil.evaluation.comparable import differences
from splitveil.evaluation.flags import FLAGS
from splitveil.evaluation.summary import AttackResult, Summary, read_summary
from splitveil.evaluation.verdict import Verdict, verdict
from splitveil.manifest import verified
from splitveil.registry import UserError
from splitveil.runs import Run


@dataclass(frozen=True)
class ReportedRun:
    """A run, and all that the report says about it."""

    label: str
    """The run's name, told apart from others of the same name."""
    slot: int
    """The run's place in the report, which decides its colour everywhere."""
    folder: Path
    summary: Summary
    curves: list[dict[str, Any]]
    """The lines of metrics.jsonl, one for each epoch."""
    epochs: int
    """How many epochs its config asks for; 0 for an audit, which trains nothing."""
    config_text: str
    """The run's config as TOML; for an audit, what was audited and how."""
    weights_now: str | None
    """Digest of the weights that lie in the folder now; None where there are none, as in an audit."""

    @property
    def strongest(self) -> AttackResult | None:
        """The attack with the lowest MSE, of those that gave a number."""
        return self.summary.strongest

    @cached_property
    def verdict(self) -> Verdict:
        """What a listener gets, in words."""
        return verdict(self.summary)

    @property
    def test_set(self) -> str:
        return self.summary.splits["test"].sha256


def read_runs(folders: list[Path]) -> list[ReportedRun]:
    if not folders:
        raise UserError("a report needs at least one run folder, such as runs/demo/bottleneck")
    trainings = [training_of(folder) for folder in folders]  # first: a folder that is no run is told as such
    summaries = [read_summary(folder) for folder in folders]
    shown = []
    for slot, (folder, training, summary, label) in enumerate(zip(folders, trainings, summaries, distinct_labels(summaries))):
        # Weights may be removed when a run was measured: they are large, or nobody else's to have.
        weights = weights_digest(folder) if (folder / WEIGHTS).exists() else None
        shown.append(ReportedRun(label, slot, folder, summary, *training, weights))
    return shown


def training_of(folder: Path) -> tuple[list[dict[str, Any]], int, str]:
    """The lines of each epoch, how many epochs were asked for, and the config; an audit has no epochs."""
    if is_audit(folder):
        return [], 0, without_paths(verified(folder, "audit.json").decode(errors="replace"))
    run = Run.open(folder)
    by_epoch = {line["epoch"]: line for line in run.metrics()}  # a killed epoch may stand there twice: the later line counts
    text = without_paths((folder / "config.toml").read_text(encoding="utf-8"))
    return [by_epoch[epoch] for epoch in sorted(by_epoch)], run.config.train.epochs, text


def distinct_labels(summaries: list[Summary]) -> list[str]:
    """The runs' names; where they repeat, with the seed, and where that repeats too, with a number."""
    labels = [summary.name for summary in summaries]
    if len(set(labels)) < len(labels):
        labels = [f"{summary.name}, seed {summary.seed}" for summary in summaries]
    seen: Counter[str] = Counter()
    for i, label in enumerate(labels):
        seen[label] += 1
        if seen[label] > 1:
            labels[i] = f"{label} ({seen[label]})"
    return labels


ABSOLUTE = re.compile(r'"(?:\w+:(?=[/~]|\w+:))?(?:file:|/|~|[A-Za-z]:[\\/]|\\\\)(?:\\.|[^"\\])*"')


def without_paths(toml: str) -> str:
    """Absolute paths of a config, cut to their last part: they tell about a person's machine, not about the run."""

    def last_part(match: re.Match[str]) -> str:
        parts = [part for part in re.split(r"[\\/]+", match[0].strip('"')) if part]
        return f'"…/{parts[-1] if parts else ""}"'

    return ABSOLUTE.sub(last_part, toml)


def percent(share: float) -> float:
    """A share in percent, rounded as it is printed, so that differences of printed numbers come out right."""
    return round(100 * share, 1)


def small(value: float) -> str:
    """An MSE: four decimals, or two digits where those would be mostly zeros."""
    return f"{value:.4f}" if value >= 0.001 or value == 0 else f"{value:.2g}"


def comparison(runs: list[ReportedRun]) -> tuple[str, str]:
    """How the runs compare in one sentence, and what it rests on."""
    attacked = [run for run in runs if run.strongest is not None]
    if not attacked:
        return (
            "No attack was run, so this report cannot say what leaks.",
            "Run `splitveil attack`, then `splitveil evaluate`.",
        )
    if len(attacked) == 1:
        return alone(attacked[0])
    if len({run.test_set for run in attacked}) > 1:
        return (
            "These runs were tested on different images, so they are not ranked.",
            "Each row stands for itself; only its share of its own ceiling can be set beside the others.",
        )
    if set_apart(attacked):
        return "These runs do not compare, so they are not ranked.", "Each row stands for itself."
    if any(faced(run) != faced(attacked[0]) for run in attacked):
        return (
            "These runs did not face the same attacks, so they are not ranked.",
            "A run that met only weak attacks would look private; compare the rows of one attack below.",
        )
    first, least = attacked[0], max(attacked, key=lambda run: best_attack(run).mse)
    if least is first:
        left = f"The best reconstruction of what it sends has an MSE of {small(best_attack(first).mse)}, {of_ceiling(first)}."
        return f"No other run leaks less than {first.label}, the first.", f"{left} {alone(first)[1]}"
    ours, theirs = best_attack(least), best_attack(first)
    ratio = ours.mse / theirs.mse if theirs.mse else float("inf")
    times = f"{ratio:.1f} times" if ratio >= 1.1 else f"{ratio:.2f} times"
    overlap = "; the 95 % intervals overlap" if meet(ours.mse_ci95, theirs.mse_ci95) else ""
    detail = (
        f"The strongest attack on it ({ours.attack}) is left with {times} the error of the strongest on {first.label} "
        f"(MSE {small(ours.mse)} against {small(theirs.mse)}{overlap}). That is {of_ceiling(least)}."
    )
    return f"{least.label} leaks least{price(least, first)}.", detail


def set_apart(runs: list[ReportedRun]) -> list[str]:
    """Why runs that `report --anyway` shows do not compare with the first of them, a sentence each."""
    first, *others = runs
    found = [(run, differences(first.summary, run.summary)) for run in others]
    return [f"{run.label} does not compare with {first.label}: {'; '.join(why)}." for run, why in found if why]


def best_attack(run: ReportedRun) -> AttackResult:
    """The strongest attack on a run that was attacked."""
    assert run.strongest is not None
    return run.strongest


def alone(run: ReportedRun) -> tuple[str, str]:
    """The two sentences about a run that stands alone in its report."""
    best, others, accuracy = best_attack(run), len(run.summary.attacks), run.summary.accuracy
    which = f"the strongest of {others} attacks" if others > 1 else "the only attack"
    right = f"; the model is right on {percent(accuracy)} % of the test images" if isfinite(accuracy) else ""
    return (
        f"Against {run.label} the best reconstruction has an MSE of {small(best.mse)}, {of_ceiling(run)}.",
        f"It comes from {best.attack}, {which}{right}.",
    )


def of_ceiling(run: ReportedRun) -> str:
    share = best_attack(run).mse / run.summary.ceiling_mse
    return f"{100 * share:.0f} % of the error of an attacker who sees nothing"


def price(run: ReportedRun, first: ReportedRun) -> str:
    """How much accuracy a run has lost against the first one, in words; empty if an audit has no accuracy."""
    if not (isfinite(run.summary.accuracy) and isfinite(first.summary.accuracy)):
        return ""
    here, there = percent(run.summary.accuracy), percent(first.summary.accuracy)
    points = round(there - here, 1)
    if points == 0:
        return f", at the accuracy of {first.label} ({here} %)"
    overlap = "; the 95 % intervals overlap" if meet(run.summary.accuracy_ci95, first.summary.accuracy_ci95) else ""
    change = "at a cost of" if points > 0 else "and gains"
    unit = "point" if abs(points) == 1 else "points"
    return f", {change} {abs(points)} {unit} of accuracy against {first.label} ({here} % against {there} %{overlap})"


def meet(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """True if two intervals have a number in common."""
    return a[0] <= b[1] and b[0] <= a[1]


def faced(run: ReportedRun) -> dict[str, Any]:
    """The attacks that gave a number, with their settings."""
    usual = {"auxiliary": SAME_DISTRIBUTION}  # what it was before there was such an option
    return {name: usual | attack.options for name, attack in run.summary.attacks.items() if attack.finite}


def judged(runs: list[ReportedRun]) -> bool:
    """True if a judge has looked at a reconstruction of any of them."""
    return any(attack.recognised is not None for run in runs for attack in run.summary.attacks.values())


def raised_flags(runs: list[ReportedRun]) -> list[dict[str, Any]]:
    """Each raised flag once, with where it was raised and what to do about it."""
    where: dict[str, list[tuple[ReportedRun, str]]] = {}
    for run in runs:
        for raised in run.summary.flags:
            where.setdefault(raised.flag, []).append((run, raised.detail))
    return [{"name": name, "known": FLAGS.get(name), "where": places} for name, places in where.items()]


def cautions(runs: list[ReportedRun]) -> list[str]:
    """What a reader must know before setting the rows side by side."""
    found = []
    if len({run.test_set for run in runs}) > 1:
        found.append("The runs were tested on different images: their numbers cannot be compared row by row.")
    else:
        found += set_apart(runs)
    if any(faced(run) != faced(runs[0]) for run in runs):
        found.append(
            "The runs did not face the same attacks with the same settings: "
            "compare the rows of one attack, not the strongest ones."
        )
    for run in runs:
        weights = run.summary.weights_sha256
        if not run.summary.attacks:
            found.append(f"{run.label} was not attacked: nothing is known about what it leaks.")
        if run.curves and len(run.curves) < run.epochs:
            found.append(f"{run.label} has been trained for {len(run.curves)} of its {run.epochs} epochs.")
        if run.weights_now is None and not is_audit(run.folder):
            found.append(
                f"{run.label} has no weights in its folder any more: its numbers are as they were measured, and whether they are "
                "those of the weights that you have cannot be shown."
            )
        elif run.weights_now not in (None, weights):
            found.append(f"{run.label} has been trained further since it was measured: attack and evaluate it again.")
        for name, attack in run.summary.attacks.items():
            if attack.weights_sha256 != weights:
                found.append(f"{name} attacked other weights of {run.label} than were measured: attack it again.")
            if not attack.finite:
                found.append(f"{name} against {run.label} gave no number; it is left out of the comparison.")
    return found
