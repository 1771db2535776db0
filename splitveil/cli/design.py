"""`splitveil design`: given my device, what do I run there?

splitveil design --max-macs 21.2M --max-numbers 512 --accuracy 0.88                      on the bundled images
splitveil design recipes/mine.toml --data cifar10 --data.path ~/cifar --trials 40        with the training of a recipe

Leaves in --out: front.svg (the picture), design.json (every trial and finalist), recipes/ (one for each design that no other
beats), recommended.toml, report.html of the finalists, and their run folders.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from splitveil.cli.arguments import parse
from splitveil.cli.cuts import short
from splitveil.config import Config, to_dict, to_toml
from splitveil.designing.budget import Budget, amount, plain
from splitveil.designing.edges import Edge, edges_within
from splitveil.designing.front import Wish, finalists, recommended, unbeaten
from splitveil.designing.search import Design, Final, Search, Tried
from splitveil.evaluation.suites import suite
from splitveil.evaluation.verdict import verdict
from splitveil.files.folder import locked, write_atomically, write_json
from splitveil.printable import say
from splitveil.progress import SafeConsole, tell_once, warn
from splitveil.registry import MODELS, UserError
from splitveil.report import check_packages, write_report
from splitveil.training.build import build_splits

BASE = {"name": "design", "cem": {"surrogate": "rate", "lr_rescale": "off"}}
"""The recipe that a search varies, unless another recipe or a flag is given."""
SHARE_OF_TRIALS = 0.6
"""The share of --minutes that trials take; full trainings take the rest."""


def design(own: dict[str, Any], flags: list[str]) -> bool:
    """Search, show and keep; True if the recommended design is what was asked for."""
    check_packages()
    config, wish, out = parse(flags, BASE, "design"), wish_of(own), Path(own["--out"])
    if config.cem.surrogate is None:
        raise UserError("--cem.surrogate is none, but a search varies CEM; take rate, or another of `splitveil list surrogates`")
    budget = Budget(*(amount(own[flag], flag) for flag in ("--max-macs", "--max-weights", "--max-numbers")))
    counts = {flag: whole(own[flag], flag) for flag in ("--trials", "--short-epochs", "--finalists")}
    minutes, most_ms = plain(own["--minutes"], "--minutes", "30"), plain(own["--max-ms"], "--max-ms", "2.5")
    suite(own["--suite"])  # a name that is none is told before anything is trained
    task = build_splits(config).task
    names = [name.strip() for name in own["--models"].split(",") if name.strip()] or MODELS.names()
    edges = edges_within(budget, [MODELS[name].config() for name in names], task.shape, len(task.classes))
    if (config.model, config.defences) != (Config().model, Config().defences):
        tell_once("design chooses the model and the defences itself: those of the recipe and the flags are not used")
    models = {edge.method for edge in edges.values()}
    say(f"edges within the budget: {len(edges)}, of {', '.join(sorted(models))}")
    began = time.monotonic()
    until = float("inf") if minutes is None else began + 60 * minutes * SHARE_OF_TRIALS
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out):
        search = Search(out, config, edges, counts["--short-epochs"], most_ms, task)
        done, trials = len(search.tried()) + len(search.failures), counts["--trials"]
        if 0 < done < trials:
            say(f"{done} of {trials} trials were done before; the search goes on with the others")
        tried = search.try_designs(trials, until, Teller(trials))
        if not tried:
            reason = next(iter(search.failures.values()), "no time was left for one; raise --minutes")
            raise UserError(f"no trial came to its end: {reason}")
        finals = []
        chosen = finalists(tried, counts["--finalists"])
        for final in search.in_full(chosen, own["--suite"]):
            finals.append(final)
            say(f"finalist {len(finals)} of {len(chosen)}: {line(final)}")
        best, granted = recommended(finals, wish)
        keep(out, config, edges, tried, finals, best, search.failures, own["--suite"])
        show(finals, best, search.failures)
        say(write_report([final.run for final in finals], out / "report.html"))
    if granted:
        say(f"recommended: {best.design.name}; its recipe is {out / 'recommended.toml'}")
    else:
        warn(f"no design is what was asked for; {best.design.name} comes nearest, its recipe is {out / 'recommended.toml'}")
    return granted


class Teller:
    """Prints, when a trial ends, what came of it and how long the other trials will take."""

    def __init__(self, total: int) -> None:
        self.total, self.seconds = total, list[float]()

    def __call__(self, number: int, tried: Design, result: Tried | str, seconds: float) -> None:
        self.seconds.append(seconds)
        left = (self.total - number) * sum(self.seconds) / len(self.seconds) / 60
        finalists = "are next" if number == self.total else "in about a minute" if left < 1.5 else f"in about {left:.0f} min"
        came = line(result) if isinstance(result, Tried) else f"{tried.name} failed: {result}"
        say(f"trial {number} of {self.total}: {came}; finalists {finalists}")


def line(judged: Tried | Final) -> str:
    return f"{judged.design.name}: validation accuracy {judged.accuracy:.3f}, attacker's MSE {judged.mse:.4f}"


def wish_of(own: dict[str, Any]) -> Wish:
    accuracy, mse = plain(own["--accuracy"], "--accuracy", "0.88"), plain(own["--mse"], "--mse", "0.03")
    for flag, value in (("--accuracy", accuracy), ("--mse", mse)):
        if value is not None and value > 1:
            raise UserError(f"{flag} is {own[flag]}, must be at most 1, such as {0.88 if flag == '--accuracy' else 0.03}")
    return Wish(accuracy, mse)


def whole(text: str, flag: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{flag} is {text!r}, must be a whole number of 1 or more")
    return int(text)


def recipe(final: Final, config: Config, name: str) -> str:
    """The recipe of a finalist, with a comment that says what it reached."""
    table = to_dict(final.design.config(config, config.train.epochs, config.attacks)) | {"name": name}
    summary = final.summary
    reached = f"accuracy {summary.accuracy:.4f} (validation {final.accuracy:.4f}), the strongest attacker's MSE {final.mse:.4f}"
    return f"# Found by `splitveil design`: {reached} (seed {summary.seed}, {summary.n_test} test images).\n{to_toml(table)}"


def keep(
    out: Path, config: Config, edges: dict[str, Edge], tried: list[Tried], finals: list[Final], best: Final,
    failures: dict[str, str], suite_name: str,
) -> None:  # fmt: skip
    """Write recipes, picture and design.json."""
    from splitveil.report.design_picture import write_picture

    for final in unbeaten(finals):
        write_atomically(out / "recipes" / f"{final.design.name}.toml", recipe(final, config, final.design.name).encode())
    write_atomically(out / "recommended.toml", recipe(best, config, "recommended").encode())
    rows = {
        "recommended": best.design.name,
        "suite": suite_name,
        "finalists": [
            facts(one)
            | {"test_accuracy": one.summary.accuracy, "verdict": verdict(one.summary).grade, "run": f"full/{one.run.name}"}
            for one in finals
        ],
        "trials": [facts(one) for one in tried],
        "failed": failures,
        "edges": {name: asdict(edge.cost) for name, edge in edges.items()},
    }
    write_json(out / "design.json", rows)
    say(write_picture(tried, finals, best, out / "front.svg"))


def facts(one: Tried | Final) -> dict[str, Any]:
    made = one.design
    return {
        "design": made.name, "edge": made.edge.name, "sigma": made.sigma, "strength": made.strength,
        "validation_accuracy": one.accuracy, "mse": one.mse,
    }  # fmt: skip


def show(finals: list[Final], best: Final, failures: dict[str, str]) -> None:
    """The designs that no other beats, on the terminal."""
    table = Table(
        title="finalists that no other beats; * is recommended", box=SIMPLE_HEAD, padding=0,
        caption="--accuracy is a floor on validation accuracy, by which designs are chosen", caption_justify="left",
    )  # fmt: skip
    for column in ("design", "validation\naccuracy", "test\naccuracy", "edge\nalone", "MSE", "MACs", "weights", "sent"):
        table.add_column(column, justify="left" if column == "design" else "right", overflow="fold")
    for final in unbeaten(finals):
        cost, alone = final.design.edge.cost, final.summary.edge_alone
        assert cost.macs is not None and cost.parameters is not None
        star = "*" if final is best else " "
        table.add_row(
            star + final.design.name, f"{final.accuracy:.3f}", f"{final.summary.accuracy:.3f}",
            "–" if alone is None else f"{alone.accuracy:.3f}", f"{final.mse:.4f}",
            short(cost.macs), short(cost.parameters), str(cost.bytes // 4),
        )  # fmt: skip
    console = SafeConsole()
    console.print(table)
    for name, why in failures.items():
        console.print(f"failed: {name}: {why}", highlight=False, markup=False)
