"""Flags that compare an attack with another one, with itself when it knew less, or with a proved bound."""

from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any

from splitveil.evaluation.attack_folder import options_of
from splitveil.evaluation.flags.flag import Evidence, flag
from splitveil.evaluation.summary import AttackResult
from splitveil.evaluation.victim import DEFENCES
from splitveil.registry import ATTACKS

LADDER = 0.02
"""An attack that should do at least as well as another may be worse by this share of the MSE."""


@flag(
    "whitebox-weaker",
    raised_if="an attack that has the edge's weights does more than 2 % worse in MSE than one without them that otherwise "
    "knew no more",
    why="who knows more cannot do worse: the white-box attack is badly tuned, or the defence only hides its gradients",
    do="give it more steps and restarts, start it from the decoder's answer (refine), or leave it out of the claim",
    needs="encoder_weights",
)
def whitebox_weaker(evidence: Evidence) -> Iterator[str]:
    black = {name: attack for name, attack in evidence.attacks.items() if not attack.threat.encoder_weights}
    for name, white in evidence.attacks.items():
        if name in black:
            continue
        rivals = {
            other: attack.mse
            for other, attack in black.items()
            if attack.finite and attack.threat.knows_no_more_than(white.threat)
        }
        best = min(rivals, key=rivals.__getitem__, default=None)
        if best is not None and not white.mse <= (1 + LADDER) * rivals[best]:
            yield f"{name}: MSE {white.mse:.4f}, {best} reaches {rivals[best]:.4f} without the edge's weights"


def twins(attacks: Mapping[str, AttackResult], *apart: str) -> Iterator[tuple[str, AttackResult, str, AttackResult]]:
    """Ordered pairs of attacks that gave a number and differ in nothing but the options `apart`; each attack with its name."""

    def kind(attack: AttackResult) -> dict[str, Any]:
        known = attack.method in ATTACKS.names()  # an option that came after the attack was run had its default
        usual = options_of(ATTACKS[attack.method].config()) if known else {}
        facts = usual | attack.options | {"method": attack.method, "auxiliary_images": attack.auxiliary_images}
        return {key: value for key, value in facts.items() if key not in {"label", "attempt", "probe", *apart}}

    finite = [(name, attack) for name, attack in attacks.items() if attack.finite]
    return ((a, one, b, two) for (a, one), (b, two) in permutations(finite, 2) if kind(one) == kind(two))


@flag(
    "stronger-net-worse",
    raised_if="of two decoders that differ in nothing but size, the larger one's MSE is more than 2 % higher",
    why="the ladder should fall and then level off; a large net that does worse was not trained to its end",
    do="train it longer, lower its learning rate, or give it more images",
)
def stronger_net_worse(evidence: Evidence) -> Iterator[str]:
    for small, one, large, two in twins(evidence.attacks, "blocks", "width"):
        sizes = [[attack.options.get(key, 0) for key in ("blocks", "width")] for attack in (one, two)]
        grew = sizes[0] != sizes[1] and all(a <= b for a, b in zip(*sizes))
        if grew and two.mse > (1 + LADDER) * one.mse:
            yield f"{large}: MSE {two.mse:.4f}, the smaller {small} reaches {one.mse:.4f}"


@flag(
    "more-data-worse",
    raised_if="of two attacks that differ in nothing but the number of their own images, the MSE of the one with more is more "
    "than 2 % higher",
    why="more images cannot hurt an attack that works; its number is no measure of the defence",
    do="train it longer, and look whether its images are of the same distribution",
)
def more_data_worse(evidence: Evidence) -> Iterator[str]:
    for few, one, many, two in twins(evidence.attacks, "images", "auxiliary_images"):
        less, more = one.images_used, two.images_used
        if less < more and two.mse > (1 + LADDER) * one.mse:
            yield f"{many}: MSE {two.mse:.4f} with {more} images, {few} reaches {one.mse:.4f} with {less}"


AVERAGING, RELEASES = 0.1, 16


@flag(
    "averaging-hole",
    raised_if="up to 16 releases of one image lower an attack's MSE by more than 10 % against one release, or up to 16 "
    "near-duplicates lower the error of `burst` by as much",
    why="fresh noise at every release averages out: whoever sends an image twice, or two frames of one scene, sends it with less "
    "noise",
    do="send noise that depends on the content (keyed_noise), limit releases, or claim a single release and say so",
    needs="observations",
)
def averaging_hole(evidence: Evidence) -> Iterator[str]:
    for single, one, several, two in twins(evidence.attacks, "repeats"):
        seen = two.threat.observations
        if one.threat.observations == 1 < seen <= RELEASES and two.mse < (1 - AVERAGING) * one.mse:
            yield f"{several}: MSE {two.mse:.4f} from {seen} releases, {single} reaches {one.mse:.4f} from one"
    for name, attack in evidence.attacks.items():
        seen, gain = attack.threat.observations, attack.facts.get("frames_gain", 0.0)
        if seen <= RELEASES and gain > AVERAGING:
            yield f"{name}: {seen} near-duplicates take {gain:.0%} off the error from one of them"


EOT = 0.05


@flag(
    "gradient-masked",
    raised_if="averaging gradients over draws of the defence (EoT) lowers the error by more than 5 % against single draws",
    why="single-draw attacks fail on the defence's randomness and not on lack of information",
    do="believe only attacks with EoT; raise its draws until the gain is gone",
    needs="encoder_weights",
)
def gradient_masked(evidence: Evidence) -> Iterator[str]:
    for name, attack in evidence.attacks.items():
        if (gain := attack.facts.get("eot_gain", 0.0)) > EOT:
            yield f"{name}: averaged gradients lower its error by {gain:.0%}"


DOUBT = 3.0
"""Standard errors by which a mean must lie below a bound before the bound counts as broken."""


@flag(
    "bound-violated",
    raised_if="the MSE of an attack lies more than 3 standard errors below a bound that is proved for what the attack saw",
    why="the bound, or an assumption under it, is wrong; a certificate that one attack breaks certifies nothing",
    do="do not publish the bound; check its assumptions (distribution, sigma, releases) on this run",
    needs=DEFENCES,
)
def bound_violated(evidence: Evidence) -> Iterator[str]:
    """Bounds hold for attackers who have what was sent and nothing else. Three things are therefore not compared with them: the
    worst case over attacks, which chooses by the image itself; attacks that are told the class; and attacks that see
    near-duplicates, which are other images.
    """
    for bound in evidence.certificates:
        if bound.unit != "MSE" or not bound.proved:
            continue
        for name, attack in evidence.attacks.items():
            broken = attack.mse + DOUBT * attack.standard_error < bound.value
            seen = attack.threat
            if broken and seen.observations <= bound.holds_for and not (seen.labels or seen.near_duplicates):
                claim = f"{bound.name} claims at least {bound.value:.4f} for {bound.holds_for} releases"
                yield f"{name}: MSE {attack.mse:.4f}, {claim}"


MASK = 0.05


@flag(
    "mask-aware-gap",
    raised_if="telling an attack which entries were zeroed lowers its MSE by more than 5 %",
    why="the pattern of zeros is sent too and tells about the image; attacks that ignore it underestimate the leak",
    do="count the mask-aware attack; fill zeroed entries with noise instead of zeros",
)
def mask_aware_gap(evidence: Evidence) -> Iterator[str]:
    for blind, one, aware, two in twins(evidence.attacks, "mask"):
        told = two.options.get("mask", False) and not one.options.get("mask", False)
        if told and two.mse < (1 - MASK) * one.mse:
            yield f"{aware}: MSE {two.mse:.4f}, {blind} reaches {one.mse:.4f} without the mask"
