import torch
import torch.nn.functional as F

from splitveil.attacks.shared.fresh_pairs import altered, patched, reflected


def draw(changed: bool, mirrored: bool, down: float, right: float) -> torch.Tensor:
    return torch.tensor([[0.2 if changed else 0.7, 0.2 if mirrored else 0.7, down, right]])


def test_half_of_the_images_stay_as_they_are_and_are_told_so() -> None:
    torch.manual_seed(0)
    x, draws = torch.rand(400, 3, 16, 24), torch.rand(400, 4)
    changed, how = altered(x, draws)
    same = (changed == x).flatten(1).all(1)
    left = draws[:, 0] >= 0.5
    assert same[left].all() and not how[left].any()
    assert torch.equal(same, ~how.any(1))  # who is told of no change has none
    assert 0.2 < how[:, 0].mean() < 0.3
    assert how[:, 1:].abs().max() == 1


def test_an_image_is_mirrored_and_shifted_as_told_with_reflected_borders() -> None:
    x = torch.rand(1, 3, 16, 16)
    assert torch.equal(altered(x, draw(True, True, 0.5, 0.5))[0], x.flip(3))
    padded = F.pad(x, (2, 2, 2, 2), mode="reflect")
    for down in range(5):
        for right in range(5):
            found, how = altered(x, draw(True, False, (down + 0.5) / 5, (right + 0.5) / 5))
            assert torch.equal(found, padded[:, :, down : down + 16, right : right + 16])
            assert how.tolist() == [[0, (down - 2) / 2, (right - 2) / 2]]


def test_an_image_of_less_than_eight_pixels_is_only_mirrored() -> None:
    x = torch.rand(50, 1, 4, 7)
    found, how = altered(x, torch.rand(50, 4))
    assert not how[:, 1:].any()
    mirrored = how[:, 0] > 0
    assert torch.equal(found[mirrored], x[mirrored].flip(3))
    assert torch.equal(found[~mirrored], x[~mirrored])


def test_a_draw_of_almost_one_does_not_leave_the_image() -> None:
    x = torch.rand(1, 1, 32, 32)
    found, how = altered(x, torch.tensor([[0.0, 0.0, 1 - 2**-24, 1 - 2**-24]]))
    assert how.tolist() == [[1, 1, 1]]
    assert found.shape == x.shape
    assert reflected(4, torch.tensor([2.0, -2.0])).tolist() == [[2, 3, 2, 1], [2, 1, 0, 1]]


def test_a_patch_is_the_rectangle_of_the_image_before_it_that_was_drawn() -> None:
    torch.manual_seed(0)
    x = torch.rand(3, 2, 8, 12)
    quarter = torch.tensor([0.0, 0.0, 0.25, 0.5, 0.5])  # a quarter of the area, in the middle
    corner = torch.tensor([0.0, 0.0, 0.25, 0.0, 1.0])  # three quarters of it beyond the border
    found, told = patched(x, torch.stack([quarter, corner, torch.tensor([0.7, 0.0, 1.0, 0.5, 0.5])]))
    wanted = x.clone()
    wanted[0, :, 2:6, 3:9] = x[2, :, 2:6, 3:9]
    wanted[1, :, :2, 9:] = x[0, :, :2, 9:]
    assert torch.equal(found, wanted)
    assert told.tolist() == [[1], [1], [0]]


def test_a_quarter_of_the_images_get_a_patch_and_only_those_that_are_changed() -> None:
    torch.manual_seed(0)
    x, draw = torch.rand(400, 3, 16, 24), torch.rand(400, 8)
    found, told = patched(x, draw[:, [0, 4, 5, 6, 7]])
    assert 0.2 < told.mean() < 0.3
    assert not told[draw[:, 0] >= 0.5].any()
    assert torch.equal(found[told[:, 0] == 0], x[told[:, 0] == 0])
    _, how = altered(x, draw[:, :4])
    assert not how[draw[:, 0] >= 0.5].any()
