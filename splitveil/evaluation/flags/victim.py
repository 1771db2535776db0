"""Flags on the images that a model was tested on, and on what its channel sends once it is trained."""

from collections.abc import Iterator

from splitveil.evaluation.flags.flag import Evidence, flag
from splitveil.evaluation.neighbours import TOO_MANY
from splitveil.evaluation.victim import DEFENCES, FOLDER


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
    raised_if="there is only one test image, one class or one image a class; a class was not trained on; all test images or all "
    "their z are equal; or the loss is more than 10,000 times that of guessing",
    why="the numbers are right and say little: an interval, an accuracy or a spread needs images and features that differ, and a "
    "model that diverged is nobody's model",
    do="test on more images of more classes; where z never differs or the loss is huge, train again at a lower rate",
)
def degenerate(evidence: Evidence) -> Iterator[str]:
    yield from evidence.degenerate


@flag(
    "noise-predictable",
    raised_if="somebody who has the run folder can draw the noise of a release again: from torch's own generator after loading, "
    "from the config's seed, or from one of 2,000 other seeds",
    why="noise that can be drawn again can be subtracted, and then nothing protects z",
    do="draw by splitveil.noise with the generator that send is given, and call channel.serve() on the device",
    needs=FOLDER,
)
def noise_predictable(evidence: Evidence) -> Iterator[str]:
    if evidence.predicted_noise is not None:
        yield evidence.predicted_noise
