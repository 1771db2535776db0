"""Alarms: finds in an epoch's numbers what is wrong with the surrogate or the task, and says what to do.

    warnings_of(line, "gated", batch=128)     {"collapsed": "the attention of 'gated' has collapsed …"}, or {} if all is well
    task_warnings(line, shares, 500, …)       {"diverged": "the training has diverged: loss is 2.4e+16 …"}, or {} if it learns
    setting_warnings(50.0, None, None)        {"muon": "train.muon is 50: …"}, before the first step

`line` is an epoch's line of metrics.jsonl. It has each diagnostic x as cem_x, averaged over the steps. A diagnostic that is not
logged, or is not a number, trips no alarm. A collapse also raises a flag in `evaluate` (evaluation/flags/).
"""

from collections.abc import Sequence
from math import isfinite, log
from typing import Any

from splitveil.cem import REACH
from splitveil.config import TrainConfig
from splitveil.registry import SURROGATES, UserError

COLLAPSED = 0.5
"""Share of the classes with collapsed attention above which the attention as a whole counts as collapsed."""
HIDDEN = 0.05
"""Share of the loss with equal weights that an attention may hide, in however few classes."""
FALLBACK = 0.5
"""Share of the classes measured without the surrogate's own weights above which it counts as replaced."""
OVERFLOW = 0.01
"""Share of a batch's samples that may go without a place among those of their class."""
DIVERGED = 10_000.0
"""A loss of more than so many times that of guessing, log(classes), is no model any more; noise of 30 times z gave 140."""
FAST = 0.5
"""Rate of Muon above which some matrices are no longer what they were after one step."""
OVERPOWERED = 1000.0
"""Times the task's gradient that CEM's may be weighed at the cut; recipes have 0.02 to 16."""


def warnings_of(line: dict[str, Any], surrogate: str, batch: int) -> dict[str, str]:
    """The alarms that trip, as messages by their kind; `batch` is the number of images in a step over all processes."""
    found = {}
    if line.get("cem_collapsed", 0.0) > COLLAPSED:
        found["collapsed"] = collapse(line, surrogate)
    elif line.get("cem_hidden", 0.0) > HIDDEN:
        found["hidden"] = (
            f"the attention of {surrogate!r} hides {line['cem_hidden']:.0%} of the loss that equal weights find (epoch "
            f"{line['epoch']}, bound: {HIDDEN:.0%}), with {line['cem_collapsed']:.0%} of the classes collapsed: CEM's loss may "
            f"fall while classes spread as before; use {remedy_of(surrogate)}"
        )
    if line.get("cem_fallback", 0.0) > FALLBACK:
        found["fallback"] = fallback(line, surrogate)
    if not 2 / REACH < line.get("cem_multiplier", 1.0) < REACH / 2:
        found["target"] = (
            f"cem.target_bits cannot be reached: strength has been multiplied by {line['cem_multiplier']:.3g} (epoch "
            f"{line['epoch']}); choose another target, or a strength nearer to what is needed"
        )
    overflow = line.get("cem_overflow", 0.0)
    if overflow > OVERFLOW * batch:
        found["overflow"] = (
            f"{overflow:.1f} of the {batch} samples of a batch found no place among those of their class (bound: {OVERFLOW:.0%}) "
            f"and were not measured; raise --cem.surrogate.capacity"
        )
    return found


def setting_warnings(muon: float, sigma: float | None, noise: float | None) -> dict[str, str]:
    """Alarms about settings, before the first step: Muon's rate, and CEM's `sigma` where the channel's own `noise` counts."""
    found = {}
    if muon > FAST:
        found["muon"] = (
            f"train.muon is {muon:g}: each step moves a matrix's singular values by about so much, and they start between 0.2 "
            "and 2; 0.02 is usual"
        )
    if sigma is not None and noise is not None and sigma != noise:
        found["sigma"] = (
            f"cem.sigma is {sigma:g} and is not used: the channel has Gaussian noise, and CEM goes by its standard deviation, "
            f"{noise:g}; leave cem.sigma out"
        )
    return found


def rates_of(config: TrainConfig) -> str:
    """The learning rates in words, as the config has them; those of an epoch were lowered by a schedule."""
    muon = f", train.muon ({config.muon:.3g})" if config.muon else ""
    return f"train.lr ({config.lr:.3g}){muon}"


def best_guess(most: float, images: int) -> float:
    """The accuracy up to which a model may merely guess: the share of the most frequent class, and two standard errors of it."""
    return most + 2 * (most * (1 - most) / images) ** 0.5


def task_warnings(line: dict[str, Any], shares: Sequence[float], images: int, last: bool, rates: str) -> dict[str, str]:
    """Alarms about the task, as messages by their kind. `shares` are those of the classes among the `images` validation images;
    whether the model guesses is asked after the last epoch only. `rates` are the settings that may be too high.
    """
    found, most, guessing = {}, max(shares), log(max(len(shares), 2))
    lower = f"lower {rates}"
    for key in ("loss", "val_loss"):
        if line[key] > DIVERGED * guessing:
            found["diverged"] = (
                f"the training has diverged: {key} is {line[key]:.3g} in epoch {line['epoch']}, guessing has {guessing:.3g}; "
                f"{lower} or cem.strength, and do not use this model"
            )
    if line["cem_coef"] > OVERPOWERED:
        found["overpowered"] = (
            f"CEM's gradient is weighed {line['cem_coef']:.3g} times that of the task (bound: {OVERPOWERED:g} times), so that "
            "the edge does not learn the task; lower cem.strength"
        )
    if most == 1:
        found["one-class"] = (
            "all validation images are of one class: an accuracy of 100 % says nothing; use data of several classes"
        )
    elif last and line["accuracy"] <= best_guess(most, images):
        found["guessing"] = (
            f"the model is no better than guessing: its validation accuracy is {100 * line['accuracy']:.1f} %, the most frequent "
            f"class has {100 * most:.1f} % of the images; train it longer, or {lower}, cem.strength or the noise"
        )
    return found


def loss_share(line: dict[str, Any]) -> float | None:
    """CEM's loss divided by the loss with equal weights; None if the latter is zero, as there is nothing to divide by then."""
    return line["cem_loss"] / line["cem_loss_uniform"] if line.get("cem_loss_uniform", 0.0) > 0 else None


def switched_off(line: dict[str, Any]) -> bool:
    """True if the surrogate fell back to no loss at all, as `slots` does in preset `as_written`, and not to equal weights."""
    share = loss_share(line)
    return share is not None and share < 0.5 * line["cem_fallback"]


def remedy_of(surrogate: str) -> str:
    """The options that keep this surrogate's attention from collapsing, in words."""
    options = SURROGATES[surrogate].build.against_collapse  # type: ignore[attr-defined]
    return " or ".join(options) or "another surrogate, such as 'uniform'"


def collapse(line: dict[str, Any], surrogate: str) -> str:
    """The message about collapsed attention, with those of its signs that were logged, and the surrogate's own remedy."""
    signs, share = [], loss_share(line)
    if "cem_effective_samples" in line:
        signs.append(f"{line['cem_effective_samples']:.1%} of the samples of a class carry its weight")
    if "cem_gate_mean" in line:
        signs.append(f"the gates are open to {line['cem_gate_mean']:.1%}")
    if share is not None:
        signs.append(f"the loss is {share:.2g} times that of equal weights")
    replaced = line.get("cem_fallback", 0.0) > FALLBACK and not switched_off(line)
    outcome = "Equal weights stand in for it" if replaced else "The defence may be inactive"
    return (
        f"the attention of {surrogate!r} has collapsed in {line['cem_collapsed']:.0%} of the classes (epoch {line['epoch']})"
        f"{': ' if signs else ''}{', '.join(signs)}. {outcome}; use {remedy_of(surrogate)}"
    )


def fallback(line: dict[str, Any], surrogate: str) -> str:
    """The message about a surrogate that was replaced, with the cause as far as the diagnostics tell it."""
    where = f"in {line['cem_fallback']:.0%} of the classes (epoch {line['epoch']})"
    if switched_off(line):
        return (
            f"{surrogate!r} was switched off {where}: the loss is {loss_share(line):.2g} times that of equal weights. "
            "The defence may be inactive; if it does not recover, use preset=default"
        )
    collapsed = line.get("cem_collapsed", 0.0) > COLLAPSED
    cause = "its attention " + ("collapsed" if collapsed else "or centres could not be used or were no better")
    return (
        f"equal weights were used instead of those of {surrogate!r} {where}, because {cause}. The defence acts, but as 'uniform' "
        "would. While a surrogate starts that is normal; if cem_fallback in metrics.jsonl stays high, raise cem.warmup or "
        "train.batch, or take the surrogate 'uniform' itself"
    )


def check_health(line: dict[str, Any], rates: str) -> None:
    """Stop a training that has diverged, or in which CEM skipped more than 1 % of the steps, with what to do."""
    if not isfinite(line["loss"]):
        raise UserError(f"the loss is {line['loss']} in epoch {line['epoch']}; lower {rates} or cem.strength")
    if line["cem_skipped"] > max(1, 0.01 * line["cem_steps"]):
        raise UserError(
            f"CEM skipped {line['cem_skipped']} of {line['cem_steps']} steps because its gradient was not finite (bound: 1 %); "
            f"lower cem.strength or {rates}, or set cem.clip"
        )


def tell(found: dict[str, str], told: set[str]) -> None:
    """Print each kind of alarm once in a run; `told` remembers the kinds that were printed."""
    from splitveil.progress import warn

    for kind, message in found.items():
        if kind not in told:
            told.add(kind)
            warn(message)
