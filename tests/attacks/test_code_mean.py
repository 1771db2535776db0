"""code_mean: the mean image of each code, which nothing that sees only the code can beat."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitveil import attacks, defences
from splitveil.attacks.code_mean import code_logits, left_out_error
from splitveil.attacks.threat import Observation, grant
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.evaluation.which_attacks_count import NO_USE, why_not
from splitveil.metrics.bounds import code_mse
from splitveil.registry import UserError
from splitveil.split_model import SplitModel
from splitveil.training.build import Parts

CPU = torch.device("cpu")
SHAPE = (1, 4, 4)


class Code(nn.Module):
    """The code of an image: how bright its upper and its lower half is, in `levels` steps."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, x: Tensor) -> Tensor:
        halves = torch.stack([x[:, 0, :2].mean((1, 2)), x[:, 0, 2:].mean((1, 2))], 1)
        return (halves * self.levels).floor().clamp(max=self.levels - 1)


def images(n: int, seed: int) -> ImageSet:
    rng = np.random.default_rng(seed)
    bright = rng.uniform(40, 215, (n, 1, 2, 1)).repeat(2, 2)
    pixels = (bright + rng.uniform(-40, 40, (n, *SHAPE))).astype(np.uint8)
    return ImageSet(pixels, rng.integers(0, 2, n), ("a", "b"))


def fitted(levels: int, own: ImageSet) -> tuple[Any, SplitModel]:
    attack, model = attacks.build("code_mean"), SplitModel(Code(levels), nn.Flatten(), (2,), SHAPE)
    return attack.fit(grant(attack.requires, model, Channel(), DeviceImages(own, CPU), CPU, 0)), model


def answers(attack: Any, model: SplitModel, x: Tensor, releases: int = 1) -> Tensor:
    return attack.reconstruct(Observation(model.edge(x).unsqueeze(1).expand(-1, releases, -1)))


def test_a_code_with_many_images_is_answered_with_their_mean_which_is_the_best_there_is() -> None:
    own = images(4000, 0)
    attack, model = fitted(2, own)
    x = DeviceImages(own, CPU).take(slice(None))
    rebuilt, code = answers(attack, model, x), model.edge(x)
    for one in code.unique(dim=0):
        rows = (code == one).all(1)
        assert rows.sum() > 300
        torch.testing.assert_close(rebuilt[rows][0], x[rows].mean(0), atol=2e-3, rtol=0)
    assert float((rebuilt - x).square().mean()) == pytest.approx(code_mse(x, code), rel=1e-3)


def test_no_function_of_the_code_is_below_the_certified_error() -> None:
    x = DeviceImages(images(500, 1), CPU).take(slice(None))
    code = Code(3)(x)
    attack, model = fitted(3, images(500, 2))
    floor = code_mse(x, code)
    assert floor <= float((answers(attack, model, x) - x).square().mean())
    looked_up = nn.functional.embedding((3 * code[:, 0] + code[:, 1]).long(), torch.rand(9, 16)).view_as(x)
    assert floor <= float((looked_up - x).square().mean())
    assert code_mse(x, x) == 0
    assert code_mse(x, torch.zeros(500, 1)) == pytest.approx(float((x - x.mean(0)).square().mean()))


def test_16_releases_of_a_code_tell_no_more_than_one() -> None:
    attack, model = fitted(4, images(300, 0))
    x = DeviceImages(images(40, 1), CPU).take(slice(None))
    assert torch.equal(answers(attack, model, x, 16), answers(attack, model, x))


def test_a_code_that_was_never_seen_is_answered_by_its_nearest() -> None:
    own = images(3000, 0)
    code = Code(4)(DeviceImages(own, CPU).take(slice(None)))
    missing = (code == torch.tensor([1.0, 2.0])).all(1)
    attack, model = fitted(4, own.take((~missing).nonzero()[:, 0].numpy()))
    attack.reach_ = 0.05
    everything = DeviceImages(own, CPU).take(slice(None))
    beside = everything[(code - torch.tensor([1.0, 2.0])).abs().sum(1) == 1]
    rebuilt = answers(attack, model, everything[missing])
    torch.testing.assert_close(rebuilt, beside.mean(0).expand_as(rebuilt), atol=1e-5, rtol=0)


def test_with_few_images_a_code_neighbours_help_and_with_many_they_do_not() -> None:
    x = DeviceImages(images(1000, 9), CPU).take(slice(None))
    (few, model), (many, _) = fitted(32, images(400, 0)), fitted(2, images(4000, 0))
    assert few.reach_ > many.reach_
    smooth = (answers(few, model, x) - x).square().mean()
    few.reach_ = 0.05
    assert smooth < (answers(few, model, x) - x).square().mean()


def test_the_left_out_error_is_that_of_fitting_without_each_image_in_turn() -> None:
    torch.manual_seed(0)
    codes, which = torch.tensor([[0.0], [1.0], [3.0]]).double(), torch.tensor([0, 0, 0, 1, 2, 2])
    x, reach = torch.rand(6, 5).double(), 0.8
    expected = 0.0
    for i in range(6):
        weights = (-(codes[which] - codes[which[i]]).abs()[:, 0] / reach).exp()
        weights[i] = 0
        expected += float((x[i] - weights @ x / weights.sum()).square().sum())
    count = which.bincount().double()
    total, squares = torch.zeros(3, 5).double().index_add_(0, which, x), torch.zeros(3).double()
    squares.index_add_(0, which, x.square().sum(1))
    between = torch.cdist(codes, codes, p=1)
    assert left_out_error(between, count, total / count[:, None], squares, reach) == pytest.approx(expected)
    assert code_logits(between, count, reach).softmax(1).sum(1).tolist() == pytest.approx([1, 1, 1])


def test_it_is_skipped_by_name_where_no_finite_code_is_sent() -> None:
    attack, x = attacks.build("code_mean"), torch.rand(8, *SHAPE)
    for stack, use in ((("gaussian",), False), (("quantise",), False), (("finite_code",), True)):
        channel = Channel(defences.build(name) for name in stack)
        model = channel.rebuild(SplitModel(nn.Conv2d(1, 2, 1), nn.Flatten(), (2, 4, 4), SHAPE))
        why = why_not(attack.config, attack, Parts(model, channel, None), x)
        assert (why is None) == use
        assert use or (why or "").startswith(NO_USE)


def test_more_codes_than_can_be_counted_out_are_refused() -> None:
    rng = np.random.default_rng(0)
    many = ImageSet(rng.integers(0, 256, (4200, *SHAPE), np.uint8), np.zeros(4200, int), ("a",))
    with pytest.raises(UserError, match=r"have \d+ different codes, at most 4096 can be counted out"):
        fitted(10_000, many)


def test_one_image_of_its_own_is_enough() -> None:
    own = images(1, 0)
    attack, model = fitted(2, own)
    x = DeviceImages(own, CPU).take(slice(None))
    torch.testing.assert_close(answers(attack, model, x), x)
    assert not (attack.requires.labels or attack.requires.channel)
