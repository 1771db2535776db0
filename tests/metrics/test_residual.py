import numpy as np
import pytest
import torch

from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.metrics.image import mse
from splitveil.metrics.residual import class_mean_mse, mean_image_mse, over_ceiling, within_class


def some(n: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, rebuilt = (torch.rand(n, 2, 5, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, rebuilt, torch.arange(n) % classes


def test_the_residual_is_that_of_a_loop_over_classes() -> None:
    x, rebuilt, y = some(17, 4)
    rows = within_class(x, rebuilt, y, 4).rows
    for label in range(4):
        mine = y == label
        for i in mine.nonzero().flatten():
            error = (x[i] - x[mine].mean(0)) - (rebuilt[i] - rebuilt[mine].mean(0))
            assert rows[i].item() == pytest.approx(error.square().mean().item())


def test_the_mean_error_of_a_class_is_its_residual_and_that_of_its_mean() -> None:
    x, rebuilt, y = some(20, 2)
    rows = within_class(x, rebuilt, y, 2).rows
    for label in range(2):
        mine = y == label
        of_means = (x[mine].mean(0) - rebuilt[mine].mean(0)).square().mean()
        torch.testing.assert_close(mse(x, rebuilt)[mine].mean(), rows[mine].mean() + of_means)


def test_prototypes_have_share_one_perfect_copies_zero_and_a_common_shift_does_not_count() -> None:
    x, _, y = some(30, 3)
    prototypes = torch.rand(3, 2, 5, 5, dtype=torch.float64)[y]
    assert within_class(x, prototypes, y, 3).share == pytest.approx(1)
    assert within_class(x, x, y, 3).share == pytest.approx(0)
    assert within_class(x, x + prototypes, y, 3).share == pytest.approx(0, abs=1e-12)


def test_the_only_image_of_a_class_has_no_residual() -> None:
    x, rebuilt, _ = some(5, 1)
    found = within_class(x, rebuilt, torch.tensor([0, 0, 1, 2, 2]), 4)
    assert found.rows.isnan().tolist() == [False, False, True, False, False]
    assert found.share > 0


def test_ceilings_are_the_errors_of_the_attackers_means() -> None:
    rng = np.random.default_rng(0)
    parts = [
        ImageSet(rng.integers(0, 256, (n, 1, 4, 4), dtype=np.uint8), np.arange(n) % 3, ("a", "b", "c", "d"))
        for n in (12, 9)
    ]
    auxiliary, test = (DeviceImages(part, torch.device("cpu")) for part in parts)
    own, x = auxiliary.take(slice(None)), test.take(slice(None))
    ceiling, by_class = mean_image_mse(auxiliary, test), class_mean_mse(auxiliary, test)
    for i in range(9):
        assert ceiling[i].item() == pytest.approx((x[i] - own.mean(0)).square().mean().item(), rel=1e-5)
        of_class = own[auxiliary.labels == i % 3].mean(0)
        assert by_class[i].item() == pytest.approx((x[i] - of_class).square().mean().item(), rel=1e-5)
    test.classes = 3
    with pytest.raises(ValueError, match="images have 4 classes, the test images 3"):
        class_mean_mse(auxiliary, test)
    assert over_ceiling(ceiling, ceiling).mean().item() == pytest.approx(1)
