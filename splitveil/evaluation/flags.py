"""Flags: signs that a number should not be believed as it stands. Each is raised by `evaluate` with its detail.

Documented as: raised if / why it matters / what to do; docs/flags.md is `table()`.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import isfinite
from typing import Any, NamedTuple

from splitveil.training.health import COLLAPSED


class Flag(NamedTuple):
    raised_if: str
    why: str
    do: str


FLAGS = {
    "beaten-by-mean": Flag(
        "an attack does worse than the mean image (by more than 1 %)",
        "the attack failed; its error says nothing about the defence",
        "train it longer, lower its learning rate, or leave it out of the claim",
    ),
    "metric-ceiling": Flag(
        "the strongest attack's MSE is above 90 % of the mean image's",
        "near the ceiling all defences look alike, and a stronger attack may still get through",
        "run a stronger attack before you claim anything; compare at a lower strength",
    ),
    "attack-not-converged": Flag(
        "the last third of an attack's training lowered its least error on images that it held out (its loss, if it holds out "
        "none) by more than 10 %",
        "a longer attack would do better; the error is too high",
        "raise the attack's epochs until the flag is gone",
    ),
    "defence-inactive": Flag(
        "a configured defence changed nothing: z is sent as it is, CEM never acted or had a zero gradient in most steps, or its "
        "loss ended below 1 % of that with equal weights while its attention had collapsed",
        "the model is as undefended as without it",
        "raise its strength; for CEM look at the variance histogram against tau",
    ),
    "attention-collapsed": Flag(
        "over the last third of the epochs in which CEM acted, the attention of more than half of the classes had collapsed",
        "a few samples carry the weight of their class: CEM's loss can fall while the class spreads, and leaks, as before",
        "use the surrogate's preset=default, or train its gates adversarially; see 'Inside the surrogate' in the report",
    ),
    "whitebox-weaker": Flag(
        "the MSE of an attack that has the edge's weights lies more than 2 % above that of the best without them that had no "
        "more else: releases, label, cloud weights, captured features, or better images of its own",
        "who knows more cannot do worse: the white-box attack is badly tuned, or the defence only hides its gradients",
        "give it more steps and restarts, start it from the decoder's answer (refine), or leave it out of the claim",
    ),
    "stronger-net-worse": Flag(
        "of two decoders that differ in nothing but size, the larger one's MSE is more than 2 % higher",
        "the ladder should fall and then level off; a large net that does worse was not trained to its end",
        "train it longer, lower its learning rate, or give it more images",
    ),
    "more-data-worse": Flag(
        "of two attacks that differ in nothing but the number of their own images, the one with more has a MSE over 2 % higher",
        "more images cannot hurt an attack that works; its number is no measure of the defence",
        "train it longer, and look whether its images are of the same distribution",
    ),
    "averaging-hole": Flag(
        "seeing up to 16 releases of one image lowers the MSE of the same attack by more than 10 %",
        "fresh noise at every release averages out: whoever sends an image twice sends it with less noise",
        "send noise that depends on the content (keyed_noise), limit releases, or claim a single release and say so",
    ),
    "gradient-masked": Flag(
        "averaging gradients over draws of the defence (EoT) lowers the error by more than 5 % against single draws",
        "single-draw attacks fail on the defence's randomness and not on lack of information",
        "believe only attacks with EoT; raise its draws until the gain is gone",
    ),
    "bound-violated": Flag(
        "an attack's mean MSE lies, by more than 3 standard errors, below a bound that is proved for as many releases as it saw",
        "the bound, or an assumption under it, is wrong; a certificate that one attack breaks certifies nothing",
        "do not publish the bound; check its assumptions (distribution, sigma, releases) on this run",
    ),
    "mask-aware-gap": Flag(
        "telling an attack which entries were zeroed lowers its MSE by more than 5 %",
        "the pattern of zeros is sent too and tells about the image; attacks that ignore it underestimate the leak",
        "count the mask-aware attack; fill zeroed entries with noise instead of zeros",
    ),
    "channel-off-at-inference": Flag(
        "on the same z the channel sends something of another mean or spread in eval() than in train()",
        "what was measured is not what the cloud was trained with: a defence that stops at inference protects nothing",
        "make send ignore self.training, as splitveil's own defences do; nn.Dropout does not",
    ),
}

CONVERGED = 0.1
LADDER = 0.02
AVERAGING, RELEASES = 0.1, 16
EOT = MASK = 0.05
DOUBT = 3.0
IDENTITY = {"label", "attempt"}
"""Options that say how an attack stands in a run, and not what it does."""
DATA = {"images", "auxiliary_images"}
"""Options that say how many images of its own an attack uses."""
OWN_IMAGES = ("none", "other", "same distribution", "same set")
"""Images of its own that an attack may have, the better the later."""


def table() -> str:
    """All flags as a table in Markdown."""
    rows = [f"| `{name}` | {flag.raised_if} | {flag.why} | {flag.do} |" for name, flag in FLAGS.items()]
    return "\n".join(["| flag | raised if | why | do |", "|---|---|---|---|", *rows])


def still_falling(errors: list[float]) -> bool:
    """Whether the last third of training lowered the least error so far by more than CONVERGED.

    The least, because an epoch's error goes up and down while the learning rate is high. A third, because the rate ends at zero:
    the very last epochs look flat whatever is left to learn.
    """
    known = [error for error in errors if isfinite(error)]
    if len(known) < 3:
        return False
    before = min(known[: len(known) - len(known) // 3])
    return before > 0 and (before - min(known)) / before > CONVERGED


def last_third(values: Sequence[float]) -> float:
    """Mean over the last third, at least one, of those that are numbers; 0 of nothing."""
    known = [value for value in values if isfinite(value)]
    tail = known[-max(1, len(known) // 3) :]
    return sum(tail) / len(tail) if tail else 0.0


def siblings(attacks: dict[str, dict[str, Any]], *ignored: str) -> Iterator[tuple[str, str]]:
    """Ordered pairs of attacks of one method that are the same but for the options ignored; both have a number."""

    def kind(name: str) -> dict[str, Any]:
        row = attacks[name]
        facts = {"method": row.get("method", name), "auxiliary_images": row.get("auxiliary_images")}
        return {
            key: value for key, value in (row.get("options", {}) | facts).items() if key not in {*IDENTITY, *ignored}
        }

    finite = [name for name, row in attacks.items() if isfinite(row["mse"])]
    return ((a, b) for a, b in permutations(finite, 2) if kind(a) == kind(b))


def releases(row: dict[str, Any]) -> int:
    return int(row.get("threat", {}).get("releases of one image", 1))


def images_used(row: dict[str, Any]) -> int:
    """The attacker's images that an attack learned from: those it had, or as many of them as its option `images` says."""
    had = int(row.get("auxiliary_images") or 0)
    return min(had, int(row.get("options", {}).get("images", had)))


def rank_of_images(row: dict[str, Any]) -> int:
    kind, _, _ = row.get("threat", {}).get("own images", "none").partition(" (")  # "other (cifar10)"
    return OWN_IMAGES.index(kind)


def knows_no_more(row: dict[str, Any], than: dict[str, Any]) -> bool:
    """Whether an attack sees and knows no more than another, their knowledge of the edge aside."""
    ours, theirs = row.get("threat", {}), than.get("threat", {})
    nothing = ("unknown", "none")
    return (
        releases(row) <= releases(than)
        and rank_of_images(row) <= rank_of_images(than)
        and all(
            ours.get(what, "none") in nothing or theirs.get(what, "none") not in nothing
            for what in ("label of the target", "cloud weights", "captured features")
        )
    )


def white_boxes(attacks: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    white = {name: row for name, row in attacks.items() if row.get("threat", {}).get("edge weights") == "known"}
    for name, row in white.items():
        black = {
            other: own["mse"]
            for other, own in attacks.items()
            if other not in white and isfinite(own["mse"]) and knows_no_more(own, row)
        }
        best = min(black, key=black.__getitem__, default=None)
        if best is not None and not row["mse"] <= (1 + LADDER) * black[best]:
            yield (
                "whitebox-weaker",
                f"{name}: MSE {row['mse']:.4f}, {best} reaches {black[best]:.4f} without the edge's weights",
            )


def ladders(attacks: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Pairs of attacks of which one should do at least as well as the other, or not much better."""

    def mse(name: str) -> float:
        return attacks[name]["mse"]

    def option(name: str, key: str, default: Any) -> Any:
        return attacks[name].get("options", {}).get(key, default)

    for small, large in siblings(attacks, "blocks", "width"):
        sizes = [tuple(option(name, key, 0) for key in ("blocks", "width")) for name in (small, large)]
        grew = sizes[0] != sizes[1] and all(a <= b for a, b in zip(*sizes))
        if grew and mse(large) > (1 + LADDER) * mse(small):
            told = f"{large}: MSE {mse(large):.4f}, the smaller {small} reaches {mse(small):.4f}"
            yield "stronger-net-worse", told
    for few, many in siblings(attacks, *DATA):
        counts = [images_used(attacks[name]) for name in (few, many)]
        if counts[0] < counts[1] and mse(many) > (1 + LADDER) * mse(few):
            told = f"{many}: MSE {mse(many):.4f} with {counts[1]} images, {few} reaches {mse(few):.4f} with {counts[0]}"
            yield "more-data-worse", told
    for one, several in siblings(attacks, "repeats"):
        seen = releases(attacks[several])
        if releases(attacks[one]) == 1 < seen <= RELEASES and mse(several) < (1 - AVERAGING) * mse(one):
            told = f"{several}: MSE {mse(several):.4f} from {seen} releases, {one} reaches {mse(one):.4f} from one"
            yield "averaging-hole", told
    for blind, aware in siblings(attacks, "mask"):
        if option(aware, "mask", False) and not option(blind, "mask", False) and mse(aware) < (1 - MASK) * mse(blind):
            yield "mask-aware-gap", f"{aware}: MSE {mse(aware):.4f}, {blind} reaches {mse(blind):.4f} without the mask"


def bounds_broken(attacks: dict[str, dict[str, Any]], proofs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Not by the worst case over attacks: that chooses by the image itself, which no attacker that a bound speaks of can do."""
    for proof in proofs:
        if proof["unit"] != "MSE" or not proof["proved"]:
            continue
        for name, row in attacks.items():
            error = (row["mse_ci95"][1] - row["mse"]) / 1.96 if "mse_ci95" in row else 0.0
            if releases(row) <= proof["holds_for"] and row["mse"] + DOUBT * error < proof["value"]:
                claim = f"{proof['name']} claims at least {proof['value']:.4f} for {proof['holds_for']} releases"
                yield "bound-violated", f"{name}: MSE {row['mse']:.4f}, {claim}"


def raised(
    attacks: dict[str, dict[str, Any]],
    ceiling: float,
    acting: dict[str, bool],
    cem_steps: int | None,
    cem_inactive: int,
    collapsed: Sequence[float] = (),
    loss_share: float | None = None,
    proofs: Sequence[dict[str, Any]] = (),
    shifted: str | None = None,
) -> list[dict[str, str]]:
    """The flags of one run, each with what raised it; `cem_steps` is None for a run without CEM.

    `collapsed`: of each epoch in which CEM acted, the share of the classes whose attention had collapsed, if it has one.
    `loss_share`: CEM's loss in the last epoch as a share of that with equal weights; None if there is nothing to compare.
    `proofs`: the certificates of `metrics.bounds`, as tables. `shifted`: how what is sent differs from training's.
    """
    found: list[tuple[str, str]] = []
    for name, row in attacks.items():
        if not row["mse"] <= 1.01 * ceiling:  # written so that NaN, an attack that diverged, raises it too
            found.append(("beaten-by-mean", f"{name}: MSE {row['mse']:.4f}, the mean image's is {ceiling:.4f}"))
        errors = row.get("held_out") or row.get("losses", [])
        if still_falling(errors):
            found.append(("attack-not-converged", f"{name}: its error still falls after {len(errors)} epochs"))
    strongest = min((row["mse"] for row in attacks.values() if isfinite(row["mse"])), default=ceiling)
    if attacks and strongest > 0.9 * ceiling:
        found.append(
            ("metric-ceiling", f"the strongest attack reaches {strongest / ceiling:.0%} of the mean image's MSE")
        )
    found += [*white_boxes(attacks), *ladders(attacks), *bounds_broken(attacks, proofs)]
    for name, row in attacks.items():
        if (gain := row.get("facts", {}).get("eot_gain", 0.0)) > EOT:
            found.append(("gradient-masked", f"{name}: averaged gradients lower its error by {gain:.0%}"))
    if shifted is not None:
        found.append(("channel-off-at-inference", shifted))
    found += [("defence-inactive", f"{name} changes nothing") for name, acts in acting.items() if not acts]
    if cem_steps == 0:
        found.append(("defence-inactive", "CEM never acted: its warm-up is as long as the training"))
    elif cem_steps is not None and cem_inactive > 0.5 * cem_steps:
        found.append(("defence-inactive", f"CEM's gradient was zero in {cem_inactive} of {cem_steps} steps"))
    late = last_third(collapsed)
    if late > COLLAPSED:
        found.append(
            ("attention-collapsed", f"collapsed in {late:.0%} of the classes, over the last third of the epochs")
        )
        if loss_share is not None and loss_share < 0.01:
            told = f"CEM's loss ended at {loss_share:.2%} of that with equal weights: its attention has collapsed"
            found.append(("defence-inactive", told))
    return [{"flag": name, "detail": detail} for name, detail in found]
