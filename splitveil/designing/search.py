"""The search: try edges x noise x strength of CEM by short trainings, and train the best of them in full.

    a trial      a short training, then a linear inverse and the small decoder of `quick`: enough to tell good from bad
    a finalist   a full training and a whole suite; only its numbers are shown as results

Designs are compared by validation accuracy and by the error of the strongest attacker for each test image. A trial that fails is
written down with its reason, and the search goes on.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from splitveil.attacks import label_of
from splitveil.config import Config, to_dict
from splitveil.data import ImageSet
from splitveil.designing.edges import Edge, fast_enough
from splitveil.designing.journal import completed, failed, give_up, next_trial, open_study, put_back_killed
from splitveil.evaluation.attack_folder import read_rows
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.run_attacks import attack_run, trained_weights
from splitveil.evaluation.suites import suite
from splitveil.evaluation.summary import Summary
from splitveil.evaluation.which_attacks_count import standing
from splitveil.evaluation.worst_case import worst_case
from splitveil.files.folder import locked
from splitveil.registry import DEFENCES, UserError, told
from splitveil.runs import Run
from splitveil.training.train_runs import train_run

SIGMAS = (0.0, 0.1, 0.2, 0.3, 0.5)
"""Standard deviations of the noise that a search tries; with 0 there is neither noise nor CEM."""
STRENGTHS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Strengths of CEM that a search tries."""
FIRST = ((0.0, 0.0), (0.3, 0.05))
"""Noise and strength that every model is tried with first, at its deepest edge."""
TRIED_BY = ("ridge", "decoder-small")
"""The attacks of `quick` that are run on each trial."""
REPEATS = 30
"""Proposals in a row that were all tried before: then the search has seen what there is."""


@dataclass(frozen=True)
class Design:
    """One answer to the user's question."""

    edge: Edge
    sigma: float
    strength: float

    @property
    def name(self) -> str:
        return f"{self.edge.name}-noise{self.sigma:g}-cem{self.strength:g}"

    def config(self, base: Config, epochs: int, attacks: tuple[Any, ...]) -> Config:
        """The recipe of this design: `base` with its edge, its noise and its CEM."""
        defences = [DEFENCES["bottleneck"].config(channels=self.edge.channels)]
        if self.sigma:
            defences.append(DEFENCES["gaussian"].config(sigma=self.sigma))
        used = bool(self.sigma and self.strength)
        cem = replace(
            base.cem, surrogate=base.cem.surrogate if used else None, strength=self.strength if used else base.cem.strength
        )
        train = replace(base.train, epochs=epochs)
        return replace(
            base, name=self.name, model=self.edge.model, defences=tuple(defences), cem=cem, train=train, attacks=attacks
        )


@dataclass(frozen=True)
class Tried:
    """A design after its short training."""

    design: Design
    accuracy: float
    """The accuracy on validation images."""
    mse: float
    """The mean over images of the least error that any attack reached."""


@dataclass(frozen=True)
class Final:
    """A design after its full training."""

    design: Design
    accuracy: float
    mse: float
    summary: Summary
    run: Path


class Search:
    """A search in a folder: journal.log, short/DESIGN/ and full/DESIGN/."""

    def __init__(
        self, folder: Path, base: Config, edges: dict[str, Edge], short_epochs: int, most_ms: float | None, task: ImageSet
    ) -> None:  # fmt: skip
        """With `most_ms` edges are timed, once, when the search begins: no two timings are the same."""
        self.folder, self.base, self.edges, self.short_epochs, self.most_ms = folder, base, edges, short_epochs, most_ms
        self.study = open_study(folder / "journal.log", self.settings())
        if most_ms is not None:
            if "fast enough" not in self.study.user_attrs:
                fast = fast_enough(edges, most_ms, task.shape, len(task.classes))
                self.study.set_user_attr("fast enough", list(fast))
            self.edges = {name: edges[name] for name in self.study.user_attrs["fast enough"]}
        put_back_killed(self.study)
        for model, edge in self.deepest().items():
            for sigma, strength in FIRST:
                noise = {"sigma": sigma} | ({"strength": strength} if sigma else {})
                self.study.enqueue_trial({"model": model, f"edge of {model}": edge} | noise, skip_if_exists=True)

    def settings(self) -> dict[str, Any]:
        """The settings that must be the same when a search goes on, so that its trials compare."""
        table = to_dict(self.base)
        shared = {key: table[key] for key in ("data", "splits", "seed", "train", "cem")}
        edges = {name: [edge.cost.macs, edge.cost.parameters] for name, edge in self.edges.items()}
        return shared | {"edges": edges, "short-epochs": self.short_epochs, "max-ms": self.most_ms}

    def deepest(self) -> dict[str, str]:
        """The first edge of each model, which is its deepest."""
        found: dict[str, str] = {}
        for name, edge in self.edges.items():
            found.setdefault(edge.method, name)
        return found

    def proposed(self, trial: Any) -> Design:
        """What Optuna proposes: a model, one of its edges, noise, and with noise a strength."""
        models = list(self.deepest())
        model = trial.suggest_categorical("model", models)
        edge = trial.suggest_categorical(f"edge of {model}", [name for name, e in self.edges.items() if e.method == model])
        sigma = trial.suggest_categorical("sigma", SIGMAS)
        return Design(self.edges[edge], sigma, trial.suggest_categorical("strength", STRENGTHS) if sigma else 0.0)

    def tried(self) -> list[Tried]:
        """Every design that was tried, each once."""
        found: dict[str, Tried] = {}
        for trial in completed(self.study):
            design = self.proposed(trial)  # a finished trial answers with what was proposed
            found[design.name] = Tried(design, *trial.values)
        return list(found.values())

    def try_designs(self, trials: int, until: float, told_of: Callable[[int, Design, Tried | str, float], None]) -> list[Tried]:
        """Try designs until there are so many, or until that moment of time.monotonic(); each is told of as it ends."""
        repeats = 0
        while (done := len(self.tried()) + len(self.failures)) < trials and time.monotonic() < until and repeats < REPEATS:
            trial = next_trial(self.study, self.base.seed, random_first=2 * len(self.deepest()))
            design = self.proposed(trial)
            before = next((one for one in self.tried() if one.design.name == design.name), self.failures.get(design.name))
            if before is not None:  # it was tried before: Optuna is told the same again
                self.tell(trial, design, before)
                repeats += 1
                continue
            repeats, began = 0, time.monotonic()
            try:
                result: Tried | str = self.short(design)
            except (UserError, RuntimeError, ArithmeticError) as error:
                result = told(error)
            self.tell(trial, design, result)
            told_of(done + 1, design, result, time.monotonic() - began)
        return self.tried()

    def tell(self, trial: Any, design: Design, result: Tried | str) -> None:
        """Write down what came of a trial: what was measured, or why it failed."""
        if isinstance(result, Tried):
            self.study.tell(trial, [result.accuracy, result.mse])
        else:
            give_up(self.study, trial, design.name, result)

    def short(self, design: Design) -> Tried:
        """A short training and the attacks of a trial."""
        attacks = tuple(attack for attack in suite("quick") if label_of(attack) in TRIED_BY)
        config = design.config(self.base, self.short_epochs, attacks)
        run, splits, device = train_run(self.folder / "short" / design.name, config)
        with locked(run.folder):
            attack_run(run, splits, device)
        return Tried(design, run.last_metrics()["accuracy"], error_left(run))

    def in_full(self, chosen: list[Tried], suite_name: str) -> Iterator[Final]:
        """Each of the chosen designs, trained and attacked in full."""
        for one in chosen:
            config = one.design.config(self.base, self.base.train.epochs, suite(suite_name))
            run, splits, device = train_run(self.folder / "full" / one.design.name, config)
            with locked(run.folder):
                attack_run(run, splits, device)
                summary = evaluate_run(run, splits, device)
            assert summary.worst_case is not None  # mean_image always gives a number
            yield Final(one.design, run.last_metrics()["accuracy"], summary.worst_case.mse, summary, run.folder)

    @property
    def failures(self) -> dict[str, str]:
        return failed(self.study)


def error_left(run: Run) -> float:
    """The mean, over test images, of the least error that any finished attack reached."""
    found = worst_case({name: read_rows(folder) for name, folder in standing(run, trained_weights(run)).done.items()})
    if found is None:
        raise UserError("no attack gave a number")
    return found.mse
