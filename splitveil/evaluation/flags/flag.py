"""Flags: signs that a number should not be believed as it stands. `evaluate` raises them, each with what raised it.

A flag is one function below its texts (raised if / why it matters / what to do). It gets the Evidence on a run and yields a line
for every place where it is raised. docs/flags.md is `table()`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from math import isfinite
from typing import Any

from splitveil.evaluation.attack_folder import options_of
from splitveil.evaluation.neighbours import TOO_MANY
from splitveil.evaluation.summary import AttackResult, Certificate, RaisedFlag
from splitveil.evaluation.victim import DEFENCES, FOLDER, LOG
from splitveil.registry import ATTACKS, unknown
from splitveil.training.health import COLLAPSED, HIDDEN


@dataclass(frozen=True)
class Evidence:
    """What the flags look at."""

    attacks: Mapping[str, AttackResult]
    ceiling_mse: float
    acting: Mapping[str, bool] = field(default_factory=dict)
    """False for a defence that changes nothing."""
    certificates: Sequence[Certificate] = ()
    mode_difference: str | None = None
    """How what is sent in eval() differs from what was sent in train(); None if it does not."""
    cem_steps: int | None = None
    """Training steps in which CEM acted; None for a run without CEM."""
    cem_inactive: int = 0
    """Those of them in which its gradient was zero."""
    collapsed: Sequence[float] = ()
    """For each epoch in which CEM acted: the share of the classes whose attention had collapsed. Empty without attention."""
    loss_share: float | None = None
    """CEM's loss in the last epoch as a share of that with equal weights; None if there is nothing to compare."""
    hidden: Sequence[float] = ()
    """For each epoch in which CEM acted: the share of the loss with equal weights that the attention hid."""
    degenerate: Sequence[str] = ()
    """Corner cases of the test images, of z and of the model, from degenerate.py."""
    predicted_noise: str | None = None
    """The seed or stream from which whoever has the run folder draws the noise again; None if none was found."""

    @property
    def collapsed_late(self) -> float:
        """The share of classes with collapsed attention, over the last third of the epochs in which CEM acted."""
        return last_third(self.collapsed)


Check = Callable[[Evidence], Iterator[str]]


@dataclass(frozen=True)
class Flag:
    raised_if: str
    why: str
    do: str
    check: Check
    """Yields what raised the flag, once for each place."""
    needs: str = ""
    """What it cannot be checked without, where a victim may lack it: a key of `Victim.lacks`."""


FLAGS: dict[str, Flag] = {}


def flag(name: str, *, raised_if: str, why: str, do: str, needs: str = "") -> Callable[[Check], Check]:
    """Register a check as a flag of this name."""

    def add(check: Check) -> Check:
        FLAGS[name] = Flag(raised_if, why, do, check, needs)
        return check

    return add


def flags_named(names: Iterable[str]) -> set[str]:
    """The flags of these names, or of this one name; refused if there is no such flag."""
    named = {names} if isinstance(names, str) else set(names)
    for name in named:
        if name not in FLAGS:
            raise unknown("flag", name, FLAGS)
    return named


def raised(evidence: Evidence) -> tuple[RaisedFlag, ...]:
    """The flags of one run, in the order of this file."""
    return tuple(RaisedFlag(name, detail) for name, flag in FLAGS.items() for detail in flag.check(evidence))


def not_checked(lacks: Mapping[str, str]) -> dict[str, str]:
    """The flags that nobody can check where some knowledge does not exist, with why."""
    return {name: lacks[flag.needs] for name, flag in FLAGS.items() if flag.needs in lacks}


def table() -> str:
    """All flags as a table in Markdown."""
    rows = [f"| `{name}` | {flag.raised_if} | {flag.why} | {flag.do} |" for name, flag in FLAGS.items()]
    return "\n".join(["| flag | raised if | why | do |", "|---|---|---|---|", *rows])


BEATEN = 1.01
"""An attack does worse than the mean image if its MSE is above this multiple of the mean image's."""


@flag(
    "beaten-by-mean",
    raised_if="an attack does worse than the mean image (by more than 1 %)",
    why="the attack failed; its error says nothing about the defence",
    do="train it longer, lower its learning rate, or leave it out of the claim",
)
def beaten_by_mean(evidence: Evidence) -> Iterator[str]:
    for name, attack in evidence.attacks.items():
        if not attack.finite:
            yield f"{name} diverged and has no MSE, the mean image's is {evidence.ceiling_mse:.4f}"
        elif attack.mse > BEATEN * evidence.ceiling_mse:
            yield f"{name}: MSE {attack.mse:.4f}, the mean image's is {evidence.ceiling_mse:.4f}"


@flag(
    "metric-ceiling",
    raised_if="the strongest attack's MSE is above 90 % of the mean image's",
    why="near the ceiling all defences look alike, and a stronger attack may still get through",
    do="run a stronger attack before you claim anything; compare at a lower strength",
)
def metric_ceiling(evidence: Evidence) -> Iterator[str]:
    finite = [attack.mse for attack in evidence.attacks.values() if attack.finite]
    strongest = min(finite, default=evidence.ceiling_mse)
    if evidence.attacks and strongest > 0.9 * evidence.ceiling_mse:
        yield f"the strongest attack reaches {strongest / evidence.ceiling_mse:.0%} of the mean image's MSE"


CONVERGED = 0.1
"""The share of its error that the last third of an attack's training may still take off."""
DOUBLED = 0.02
"""The share of its error that twice the epochs may take off an attack that has converged."""


@flag(
    "attack-not-converged",
    raised_if="twice the epochs took more than 2 % off an attack's error on images that it held out: the probe of decoders in "
    "standard and plus, which compares half their epochs with all. Without a probe: the last third of its training lowered that "
    "error (its loss, if it holds out none) by more than 10 %",
    why="a longer attack would do better; the error is too high",
    do="raise the attack's epochs until the flag is gone",
)
def attack_not_converged(evidence: Evidence) -> Iterator[str]:
    for name, attack in evidence.attacks.items():
        gain, errors = attack.facts.get("doubling_gain"), attack.held_out or attack.losses
        if gain is not None:
            if gain > DOUBLED:
                yield f"{name}: twice the epochs took {gain:.1%} off its error"
        elif still_falling(errors):
            yield f"{name}: its error still falls after {len(errors)} epochs"


def still_falling(errors: Sequence[float]) -> bool:
    """True if the last third of the training lowered the error by more than CONVERGED, so that more training would help.

    The lowest error before that third is compared with the lowest of all, because single epochs go up and down while the learning
    rate is high. A whole third is looked at, because the learning rate ends at zero, which makes the last epochs look flat.
    """
    known = [error for error in errors if isfinite(error)]
    if len(known) < 3:
        return False
    before = min(known[: len(known) - len(known) // 3])
    return before > 0 and (before - min(known)) / before > CONVERGED


@flag(
    "defence-inactive",
    raised_if="a configured defence changed nothing: z is sent as it is, CEM never acted or had a zero gradient in most steps, "
    "or its loss ended below 1 % of that with equal weights while its attention had collapsed",
    why="the model is as undefended as without it",
    do="raise its strength; for CEM look at the variance histogram against tau",
    needs=DEFENCES,
)
def defence_inactive(evidence: Evidence) -> Iterator[str]:
    for name, acts in evidence.acting.items():
        if not acts:
            yield f"{name} changes nothing"
    steps, inactive, share = evidence.cem_steps, evidence.cem_inactive, evidence.loss_share
    if steps == 0:
        yield "CEM never acted: its warm-up is as long as the training"
    elif steps is not None and inactive > 0.5 * steps:
        yield f"CEM's gradient was zero in {inactive} of {steps} steps"
    if evidence.collapsed_late > COLLAPSED and share is not None and share < 0.01:
        yield f"CEM's loss ended at {share:.2%} of that with equal weights: its attention has collapsed"


@flag(
    "attention-collapsed",
    raised_if="over the last third of the epochs in which CEM acted, the attention of more than half of the classes had "
    "collapsed, or it hid more than 5 % of the loss with equal weights",
    why="a few samples carry the weight of their class: CEM's loss can fall while the class spreads, and leaks, as before",
    do="use the surrogate's preset=default, or train its gates adversarially; see 'Inside the surrogate' in the report",
    needs=LOG,
)
def attention_collapsed(evidence: Evidence) -> Iterator[str]:
    if evidence.collapsed_late > COLLAPSED:
        yield f"collapsed in {evidence.collapsed_late:.0%} of the classes, over the last third of the epochs"
    elif (share := last_third(evidence.hidden)) > HIDDEN:
        yield f"{share:.0%} of the loss with equal weights was hidden, over the last third of the epochs"


def last_third(values: Sequence[float]) -> float:
    """Mean over the last third, at least one, of those that are numbers; 0 if there are none."""
    known = [value for value in values if isfinite(value)]
    tail = known[-max(1, len(known) // 3) :]
    return sum(tail) / len(tail) if tail else 0.0


LADDER = 0.02
"""How much worse, as a share of the MSE, an attack may be that should do at least as well as another."""


@flag(
    "whitebox-weaker",
    raised_if="the MSE of an attack that has the edge's weights lies more than 2 % above that of the best attack without them "
    "that knew no more in any other way: releases, label, cloud weights, captured features, images of its own",
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
    """Ordered pairs of attacks that have a number and differ in nothing but the options `apart`, with their names."""

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
    raised_if="of two attacks that differ in nothing but the number of their own images, the one with more has a MSE over 2 % "
    "higher",
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
    raised_if="seeing up to 16 releases of one image lowers the MSE of the same attack by more than 10 %; or seeing as many "
    "near-duplicates lowers the error of `burst` on images that it held out",
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
    raised_if="the mean MSE of an attack that is not told the class lies, by more than 3 standard errors, below a bound that is "
    "proved for as many releases as it saw",
    why="the bound, or an assumption under it, is wrong; a certificate that one attack breaks certifies nothing",
    do="do not publish the bound; check its assumptions (distribution, sigma, releases) on this run",
    needs=DEFENCES,
)
def bound_violated(evidence: Evidence) -> Iterator[str]:
    """The worst case over attacks is not held against a bound: it chooses by the image itself, which no attacker can do. Nor is
    an attack that is told the class: the bounds are for who has what was sent and nothing else; nor one that sees
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


@flag(
    "neighbours-in-attacker-images",
    raised_if="more than 5 % of the test images have a near-duplicate (a copy, also re-encoded, flipped or cropped) among an "
    "attack's own images",
    why="the attack may show what it has seen before instead of what z tells; its error is not that on images of strangers",
    do="take the copies out of the attacker's images, or split by identity (splits.by-identity); docs/near_duplicates.md",
)
def neighbours_in_attacker_images(evidence: Evidence) -> Iterator[str]:
    for name, attack in evidence.attacks.items():
        found, looked = attack.facts.get("neighbours", 0), attack.facts.get("neighbours_of", 0)
        if looked and found > TOO_MANY * looked:
            yield f"{name}: {found:.0f} of {looked:.0f} test images that were looked at have a near-duplicate among its own"


@flag(
    "channel-off-at-inference",
    raised_if="on the same z the channel sends something of another mean or spread in eval() than in train()",
    why="what was measured is not what the cloud was trained with: a defence that stops at inference protects nothing",
    do="make send ignore self.training, as splitveil's own defences do; nn.Dropout does not",
    needs=DEFENCES,
)
def channel_off_at_inference(evidence: Evidence) -> Iterator[str]:
    if evidence.mode_difference is not None:
        yield evidence.mode_difference


@flag(
    "degenerate",
    raised_if="there is one test image, one class or one image a class, test images of a class that was not trained on, equal "
    "test images, a z that is the same for all of them, or a loss on them of more than 10,000 times that of guessing",
    why="the numbers are right and say little: an interval, an accuracy or a spread needs images and features that differ, and a "
    "model that diverged is nobody's model",
    do="test on more images of more classes; where z never differs or the loss is huge, train again at a lower rate",
)
def degenerate(evidence: Evidence) -> Iterator[str]:
    yield from evidence.degenerate


@flag(
    "noise-predictable",
    raised_if="somebody who has the run folder draws the noise of a release again: what `send` adds without a generator is that "
    "of torch's own generator after loading, or of a seed that was tried (2,000 and those of the config)",
    why="noise that can be drawn again can be subtracted, and then nothing protects z",
    do="draw by splitveil.noise with the generator that send is given, and call channel.serve() on the device",
    needs=FOLDER,
)
def noise_predictable(evidence: Evidence) -> Iterator[str]:
    if evidence.predicted_noise is not None:
        yield evidence.predicted_noise
