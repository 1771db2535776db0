import pytest
import torch

from splitveil.metrics.image import mse
from splitveil.metrics.residual import residual, residual_ceiling, residual_share


def some(n: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, rebuilt = (torch.rand(n, 2, 5, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, rebuilt, torch.arange(n) % classes


def share(rebuilt: torch.Tensor, x: torch.Tensor, y: torch.Tensor, classes: int) -> float | None:
    rows, ceiling = (metric(rebuilt, x, y, classes).numpy() for metric in (residual, residual_ceiling))
    return residual_share(rows, ceiling)


def test_the_residual_is_that_of_a_loop_over_classes() -> None:
    x, rebuilt, y = some(17, 4)
    rows = residual(rebuilt, x, y, 4)
    for label in range(4):
        mine = y == label
        for i in mine.nonzero().flatten():
            error = (x[i] - x[mine].mean(0)) - (rebuilt[i] - rebuilt[mine].mean(0))
            assert rows[i].item() == pytest.approx(error.square().mean().item())


def test_the_mean_error_of_a_class_is_its_residual_and_that_of_its_mean() -> None:
    x, rebuilt, y = some(20, 2)
    rows = residual(rebuilt, x, y, 2)
    for label in range(2):
        mine = y == label
        of_means = (x[mine].mean(0) - rebuilt[mine].mean(0)).square().mean()
        torch.testing.assert_close(mse(x, rebuilt)[mine].mean(), rows[mine].mean() + of_means)


def test_prototypes_have_share_one_perfect_copies_zero_and_a_common_shift_does_not_count() -> None:
    x, _, y = some(30, 3)
    prototypes = torch.rand(3, 2, 5, 5, dtype=torch.float64)[y]
    assert share(prototypes, x, y, 3) == pytest.approx(1)
    assert share(x, x, y, 3) == pytest.approx(0)
    assert share(x + prototypes, x, y, 3) == pytest.approx(0, abs=1e-12)


def test_class_mates_that_do_not_differ_have_no_share_whatever_the_rounding() -> None:
    x = torch.full((1000, 1, 4, 4), 77 / 255)
    assert share(torch.rand(1000, 1, 4, 4), x, torch.arange(1000) % 3, 3) is None


def test_the_only_image_of_a_class_has_no_residual() -> None:
    x, rebuilt, _ = some(5, 1)
    y = torch.tensor([0, 0, 1, 2, 2])
    assert residual(rebuilt, x, y, 4).isnan().tolist() == [False, False, True, False, False]
    assert (share(rebuilt, x, y, 4) or 0) > 0
    assert share(rebuilt, x, torch.arange(5), 5) is None
