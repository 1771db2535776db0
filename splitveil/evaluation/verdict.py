"""The verdict: what a listener gets, in plain words, as a pure function of a Summary. docs/verdict.md gives the reasons.

    share = (reached - known) / (original - known)           0: as much as without listening, 1: as much as the images themselves

    measure      reached by the attacks                              known without listening        original
    detail       1 - the lowest residual share                       0, the mean of its class       1
    structure    the highest mean SSIM                               that of the floors             1
    class        share that a judge still recognises                 an average image of the class  recognised_original
    person       share whose nearest other image shows the person    the most frequent person       same_identity_original
    image        share whose nearest test image is the one sent      0                              1

    exposed            one share is a half or more
    traces             all are below a half
    hidden             all are below a tenth, also at the unlucky end of their 95 % intervals
    not established    below a half, but a flag was raised or something is missing; `doubts` says what

A leak that an attack has shown stands, whatever is missing: more attacks could only find more. Where the attacker has
near-copies of test images, the verdict says that it may have remembered them. Only `hidden` is a green light.
The worst case over attacks is not used: it chooses by the image itself, which no attacker can do, and so lies above every floor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Literal, NamedTuple

from splitveil.evaluation.evaluate import wilson
from splitveil.evaluation.fail_if import FLOORS
from splitveil.evaluation.summary import AttackResult, Summary
from splitveil.evaluation.which_attacks_count import NO_USE

Grade = Literal["exposed", "traces", "hidden", "not established"]
HALF, TENTH = 0.5, 0.1
"""From HALF on, more of an image is rebuilt than is missing. TENTH is the least difference that the flags count as one."""
NEIGHBOURS = "neighbours-in-attacker-images"
AT_LEAST = "The evaluation is incomplete or flagged: what leaks is at least this much."
REMEMBERED = "The attacker has near-copies of test images: a part of this may be remembered and not rebuilt."


class Share(NamedTuple):
    """How far the attacks have come on the way from not listening (0) to having the images (1)."""

    value: float
    at_most: float
    """The unlucky end of its 95 % interval."""
    reached: float
    """The measured number, before what is known without listening is subtracted."""
    fact: str
    """A sentence with the numbers."""


@dataclass(frozen=True)
class Verdict:
    grade: Grade
    headline: str
    """One sentence."""
    facts: tuple[str, ...]
    """Sentences with the numbers behind it."""
    doubts: tuple[str, ...]
    """Why the evaluation cannot give a green light; empty if it can."""
    shares: dict[str, float]
    """By the name of each measure that was taken: 0 is what one knows without listening, 1 is having the images themselves."""

    def __str__(self) -> str:
        return f"{self.grade}: {self.headline}"


def verdict(summary: Summary) -> Verdict:
    measures = measured(summary)
    doubts = tuple(doubts_of(summary))
    found = {name: share.value for name, share in measures.items()}
    facts = [share.fact for share in measures.values()]
    facts += [f"{flag} was not checked: {why}." for flag, why in summary.not_checked.items()]
    if any(value >= HALF for value in found.values()):
        grade, headline = "exposed", exposed(summary, measures)
        if doubts:
            facts.append(REMEMBERED if NEIGHBOURS in summary.flag_names else AT_LEAST)
    elif doubts:
        grade, headline = "not established", f"What a listener gets is not established: {doubts[0]}."
    elif all(share.at_most < TENTH for share in measures.values()):
        grade = "hidden"
        headline = f"Nothing beyond the class was found by {len(summary.attacks)} attacks, the suite {summary.suite} among them."
    else:
        grade, headline = "traces", f"A listener gets traces: {looks(summary, measures)}."
    return Verdict(grade, headline, tuple(facts), doubts, found)


def share_of(reached: float, known: float, original: float) -> float:
    """How far `reached` lies on the way from `known` to `original`, from 0 to 1; 0 where there is no such way."""
    return min(max((reached - known) / (original - known), 0.0), 1.0) if original > known else 0.0


def measured(summary: Summary) -> dict[str, Share]:
    """Each measure that the summary allows, by name; none where no attack gave a number."""
    attacks = [attack for attack in summary.attacks.values() if attack.finite]
    if not attacks:
        return {}
    found = {
        "detail": detail(attacks), "structure": structure(attacks), "class": recognised(summary, attacks),
        "person": person(summary, attacks), "image": image(attacks),
    }  # fmt: skip
    return {name: share for name, share in found.items() if share is not None}


def wrong_share(attack: AttackResult) -> tuple[float, str]:
    """What an attack gets wrong, as a share of what tells an image from its class mates; without labels, from the mean image."""
    if attack.residual_share is not None and isfinite(attack.residual_share):  # a class of one image has none
        return attack.residual_share, "one image of a class from another"
    return attack.mse_over_ceiling, "an image from the mean image"


def beyond_class(attack: AttackResult) -> float:
    """What an attack gets right of what tells an image from its class mates, as a share."""
    return share_of(1 - wrong_share(attack)[0], 0.0, 1.0)


def listening(attacks: list[AttackResult]) -> list[AttackResult]:
    """The attacks that look at z; if only floors were run, all attacks."""
    return [attack for attack in attacks if attack.method not in FLOORS] or attacks


def detail(attacks: list[AttackResult]) -> Share:
    best = max(listening(attacks), key=beyond_class)
    value = beyond_class(best)
    # The residual has no interval of its own; it is as uncertain as the MSE, of which it is a part.
    lowest = best.mse_ci95[0] / best.mse if best.mse > 0 else 1.0
    fact = f"Of what tells {wrong_share(best)[1]}, {best.attack} rebuilds {value:.0%}."
    return Share(value, 1 - (1 - value) * lowest if isfinite(lowest) else 1.0, value, fact)


def floor_ssim(attacks: list[AttackResult]) -> float:
    """The highest SSIM without listening. Where no floor was run it is 0, the SSIM of unrelated images."""
    return max((attack.ssim for attack in attacks if attack.method in FLOORS), default=0.0)


def structure(attacks: list[AttackResult]) -> Share:
    best, floor = max(listening(attacks), key=lambda attack: attack.ssim), floor_ssim(attacks)
    most = best.ssim_ci95[1]
    fact = f"{best.attack} reaches an SSIM of {best.ssim:.2f}; a guess without listening has {floor:.2f}."
    return Share(share_of(best.ssim, floor, 1.0), share_of(most, floor, 1.0) if isfinite(most) else 1.0, best.ssim, fact)


def recognised(summary: Summary, attacks: list[AttackResult]) -> Share | None:
    """What the judge says of attacks that show more than the class: a typical image of it is recognised and shows nobody."""
    original, asked = summary.recognised_original, [attack for attack in attacks if attack.recognised is not None]
    if original is None or not asked:
        return None
    telling = [attack for attack in asked if beyond_class(attack) >= TENTH]
    if not telling:
        return Share(0.0, 0.0, 0.0, "No attack rebuilds more than a typical image of the class, which may be recognised as well.")
    typical = max((attack.recognised or 0.0 for attack in asked if attack.method in FLOORS), default=0.0)
    known = max(typical, most_frequent(summary, "class"))
    fact = "{} images are still recognised by a network that never saw the model ({:.0%} of the originals are)."
    share = judged(telling, "recognised", known, original, fact)
    if original - known >= TENTH:
        return share
    return share._replace(value=0.0, at_most=0.0, fact=f"{share.fact[:-1]}; so is an average image of the class ({known:.0%}).")


def person(summary: Summary, attacks: list[AttackResult]) -> Share | None:
    known = [attack for attack in attacks if attack.same_identity is not None]
    original = max((attack.same_identity_original or 0.0 for attack in known), default=0.0)
    fact = "The same person is found for {} rebuilt images ({:.0%} of the originals)."
    return judged(known, "same_identity", most_frequent(summary, "identity"), original, fact) if known else None


def image(attacks: list[AttackResult]) -> Share | None:
    known = [attack for attack in attacks if attack.same_image is not None]
    fact = "{} rebuilt images are matched to the very image that was sent."
    return judged(known, "same_image", 0.0, 1.0, fact) if known else None


def judged(attacks: list[AttackResult], judgement: str, known: float, original: float, fact: str) -> Share:
    """The share of images with the answer yes, for the attack with the highest such share."""
    best = max(attacks, key=lambda attack: getattr(attack, judgement))
    reached = getattr(best, judgement)
    most = wilson(round(reached * best.n_images), best.n_images)[1]
    words = sentence(fact.format(of_ten(reached), original))
    return Share(share_of(reached, known, original), share_of(most, known, original), reached, words)


def most_frequent(summary: Summary, attribute: str) -> float:
    """How often a guess at the most frequent value is right. Where no probe has counted it is 0, which hides no leak."""
    return summary.probes.get(attribute, {}).get("majority", 0.0)


def of_ten(share: float) -> str:
    """A share as people say it."""
    tenths = round(10 * share)
    return "nearly all" if tenths == 10 else "hardly any" if tenths == 0 else f"{tenths} of 10"


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def exposed(summary: Summary, measures: dict[str, Share]) -> str:
    """The headline of a leak: the most telling of what was found."""
    high = {name: share.reached for name, share in measures.items() if share.value >= HALF}
    if "person" in high:
        told = "faces are still matched"
    elif "class" in high:
        told = f"{of_ten(high['class'])} images are still recognised"
    elif "image" in high:
        told = f"{of_ten(high['image'])} images are still matched to the one that was sent"
    else:
        told = "a listener gets the images"
    return sentence(f"{told}: {looks(summary, measures)}.")


def looks(summary: Summary, measures: dict[str, Share]) -> str:
    """What the rebuilt images look like. SSIM goes by edges and texture, MSE mostly by large areas."""
    assert summary.strongest is not None
    shape, areas = measures["structure"].value, 1 - summary.strongest.mse_over_ceiling
    if shape >= 1 - TENTH:
        return "almost copies"
    if shape >= HALF:
        return "shapes and most of the detail"
    if areas >= HALF:
        return "colours and layout, " + ("some detail" if shape >= TENTH else "no detail")
    return "a blur that hints at colours and layout" if areas >= TENTH or shape >= TENTH else "hardly more than the mean image"


def doubts_of(summary: Summary) -> Iterator[str]:
    """What a green light would need and this evaluation does not have."""
    if summary.strongest is None:
        yield "no attack gave a number"
        return
    for raised in summary.flags:
        yield f"the flag {raised.flag} is raised ({raised.detail})"
    if summary.suite is None:
        yield "the attacks are somebody's own list and not a whole suite"
    for name in summary.unfinished:
        yield f"{name} was asked for and is not finished"
    for name in summary.incomplete:
        yield f"{name} of the suite {summary.suite} gave no number"
    if not summary.finite_weights:
        yield "a weight of the model is not finite"
    for name, why in summary.skipped.items():
        if not why.startswith(NO_USE):
            yield f"{name} was skipped ({why})"
    for name, attack in summary.attacks.items():
        if not attack.finite:
            yield f"{name} gave no number"
        if attack.weights_sha256 != summary.weights_sha256:
            yield f"{name} attacked other weights"
    if not any(attack.recognised is not None or attack.same_identity is not None for attack in summary.attacks.values()):
        yield summary.no_judge or "no judge has looked at the rebuilt images"
