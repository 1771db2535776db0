from functools import cache
from typing import Any

import torch
from linear_edge import granted, model, noise, private, seen, share_of_ceiling

from splitveil import attacks
from splitveil.attacks import unsplit
from splitveil.attacks.threat import Observation
from splitveil.registry import ATTACKS

SMALL: dict[str, Any] = {"rounds": 8, "image_steps": 10, "clone_steps": 10, "steps": 60, "captured": 30}


@cache
def fitted() -> attacks.Attack:
    attack = attacks.build("unsplit", **SMALL)
    return attack.fit(granted(attack))


def test_the_clone_comes_to_explain_the_features() -> None:
    """Over three seeds: some clones begin near the edge."""
    losses = []
    for seed in range(3):
        attack = attacks.build("unsplit", seed=seed, **SMALL | {"clone_lr": 1e-2})
        losses.append(attack.fit(granted(attack)).losses_)
        assert len(losses[-1]) == 8
    assert sum(course[-1] for course in losses) < 0.5 * sum(course[0] for course in losses)


def test_it_has_features_and_an_architecture_and_nothing_else() -> None:
    access = granted(attacks.build("unsplit"))
    for part in ("query", "edge", "cloud", "channel", "auxiliary"):
        assert getattr(access, part) is None, part
    assert access.captured is not None and access.architecture is not None


def test_it_says_that_it_is_a_floor() -> None:
    assert "weak floor" in (unsplit.__doc__ or "")
    assert "floor" in ATTACKS["unsplit"].summary


def test_with_the_edge_itself_as_clone_the_images_come_back() -> None:
    """What is weak is the clone, not the search for an image."""
    attack = attacks.build("unsplit", **SMALL | {"rounds": 1, "image_lr": 0.05, "tv": 0.0, "l2": 0.0})
    attack.fit(granted(attack))
    attack.clone_ = model().edge  # type: ignore[attr-defined]
    assert share_of_ceiling(attack, seen()) < 0.05


def test_z_of_nothing_gives_no_better_image_than_the_mean() -> None:
    attack = attacks.build("unsplit", **SMALL)
    attack.fit(granted(attack, captured=noise()))
    assert share_of_ceiling(attack, noise()) > 0.98


def test_an_image_depends_on_its_own_features_alone() -> None:
    z = seen()[:6].unsqueeze(1)
    together = fitted().reconstruct(Observation(z))
    alone = torch.cat([fitted().reconstruct(Observation(part)) for part in z.split(1)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    assert together.shape == private()[:6].shape
