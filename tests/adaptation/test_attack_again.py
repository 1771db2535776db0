"""The attacks before and after an update: a smaller gain hides more, and what an attacker gains by is refused."""

import pytest
import torch
from small_world import SHAPE, world

from splitveil.adaptation import Client, attack_again
from splitveil.adaptation.message import Update, write
from splitveil.options import UserError


def again(gain: float, **more):
    made = world()
    (mine, _), (theirs, _) = made.images(60, 1), made.images(300, 2)
    digest = Client(made.model.edge, made.channel, SHAPE).digest
    message = write(Update(torch.full((SHAPE[0],), gain), torch.zeros(SHAPE[0]), 1, digest))
    return attack_again(made.model, made.channel, message, mine.numpy(), theirs.numpy(), ["mean_image", "ridge"], **more)


def test_a_smaller_gain_raises_the_error_of_the_strongest_attack_and_the_model_stays_as_it_is() -> None:
    before = {name: value.clone() for name, value in world().model.state_dict().items()}
    found = again(0.3)
    assert set(found.before) == set(found.after) == {"mean_image", "ridge"}
    assert found.before["ridge"] < found.after["ridge"]
    assert found.ratio > 1
    assert all(torch.equal(before[name], value) for name, value in world().model.state_dict().items())


def test_an_update_that_changes_nothing_has_the_same_attacks() -> None:
    assert again(1.0).ratio == pytest.approx(1.0, abs=1e-6)


def test_where_less_remains_than_must_it_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"MSE is 1\.000 of what it was, must be 1\.2 or more; do not publish it"):
        again(1.0, least=1.2)


def test_an_update_that_no_device_would_take_is_not_even_attacked() -> None:
    with pytest.raises(UserError, match=r"gain of channel 0 is 1\.5"):
        again(1.5)
