from pathlib import Path
from typing import Any

import pytest

from splitveil import attacks
from splitveil.attacks.threat import ThreatModel
from splitveil.cli.arguments import parse
from splitveil.config import from_dict
from splitveil.evaluation.build_attacks import build_attacks, own_images, threat_of
from splitveil.registry import ATTACKS, UserError
from splitveil.training.build import build_splits


def attacks_of(**options: Any) -> list[attacks.Attack]:
    return build_attacks(from_dict({"attacks": [{"name": "ridge"} | options]}))


def test_the_images_asked_for_stand_in_the_threat_model() -> None:
    told = [
        attack.requires.describe()["own images"]
        for asked in ("same distribution", "same set", "cifar10", "folder:~/faces")
        for attack in attacks_of(auxiliary=asked)
    ]
    assert told == ["same distribution", "same set", "other (cifar10)", "other (folder)"]
    assert attacks.build("ridge").requires.auxiliary == "same distribution"  # the class is left as it was


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auxiliary": "other"}, "auxiliary of ridge is 'other'; say which, such as cifar10"),
        ({"auxiliary": "same sett"}, "unknown auxiliary of ridge 'same sett'; did you mean 'same set'"),
        ({"auxiliary": "cifar:x"}, "unknown auxiliary of ridge 'cifar'; did you mean 'cifar10'"),
        ({"name": "deep_prior", "auxiliary": "same set"}, "deep_prior has no use for images of its own"),
    ],
)
def test_images_that_cannot_be_given_are_refused_before_anything_is_run(options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        attacks_of(**options)


@pytest.mark.parametrize(
    ("improves", "auxiliary", "message"),
    [
        ("decoder", "same distribution", ""),
        ("decodr", "same distribution", "refine improves 'decodr', which is no decoder of the list"),
        ("ridge", "same distribution", "refine improves 'ridge', which is no decoder of the list"),
        ("decoder", "same set", "refine and decoder, which it improves, have other images"),
    ],
)
def test_only_a_decoder_of_the_same_list_and_images_can_be_improved(improves: str, auxiliary: str, message: str) -> None:
    others = [{"name": "ridge"}, {"name": "decoder", "auxiliary": auxiliary}]
    config = from_dict({"attacks": [{"name": "refine", "improves": improves}, *others]})
    if not message:
        assert len(build_attacks(config)) == 3
        return
    with pytest.raises(UserError, match=message):
        build_attacks(config)


@pytest.mark.parametrize("name", ATTACKS.names())
def test_what_an_attack_knows_follows_from_its_method_and_options(name: str) -> None:
    (attack,) = build_attacks(from_dict({"attacks": [{"name": name}]}))
    assert threat_of(name, {}) == attack.requires
    assert threat_of("decoder", {"repeats": 4, "auxiliary": "cifar10", "once an option": 1}) == ThreatModel(
        observations=4, auxiliary="other", elsewhere="cifar10"
    )


def test_no_test_image_is_among_the_attackers_own(small: list[str], pictures: Path) -> None:
    splits = build_splits(parse(small))
    private = {image.tobytes() for image in splits.test.images}
    for asked in ("same distribution", "same set", f"npz:{pictures}"):
        assert not private & {image.tobytes() for image in own_images(asked, splits, 0).images}
