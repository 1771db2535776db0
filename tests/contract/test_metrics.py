"""What every metric with one number for each reconstruction must do; a new one is tested without being told."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from splitveil.metrics import PerImage, per_image, per_image_metrics

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
LABELS, CLASSES = torch.arange(12) % 3, 3


@pytest.fixture(params=per_image_metrics())
def metric(request: pytest.FixtureRequest) -> PerImage:
    return per_image_metrics()[request.param]


def images(seed: int) -> Tensor:
    return torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def measured(metric: PerImage, rebuilt: Tensor, x: Tensor) -> Tensor:
    values = metric.measure(rebuilt, x, LABELS, CLASSES) if metric.by_class else metric.measure(rebuilt, x)
    if values is None:
        pytest.skip(f"what {metric.name} needs is not installed")
    return values


@pytest.mark.parametrize("seed", range(3))
def test_each_image_has_one_finite_number_and_equal_images_the_worst_for_privacy(metric: PerImage, seed: int) -> None:
    rebuilt, x = images(seed), images(seed + 10)
    values = measured(metric, rebuilt, x)
    assert values.shape == (12,)
    assert values.isfinite().all()
    if metric.equal is not None:
        equal = measured(metric, x, x.clone())
        torch.testing.assert_close(equal, torch.full_like(equal, metric.equal), atol=1e-5, rtol=1e-5)
        assert ((values > equal) if metric.higher_hides else (values < equal)).all()


def test_the_number_of_an_image_does_not_depend_on_the_others(metric: PerImage) -> None:
    if metric.by_class:
        pytest.skip(f"{metric.name} compares an image with its class")
    rebuilt, x = images(0), images(1)
    each = torch.cat([measured(metric, rebuilt[i : i + 1], x[i : i + 1]) for i in range(12)])
    torch.testing.assert_close(measured(metric, rebuilt, x), each)


def test_its_column_is_named_in_the_documentation(metric: PerImage) -> None:
    assert f"`{metric.name}`" in DOCS.read_text(encoding="utf-8")


def test_two_metrics_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two metrics are called 'mse'"):
        per_image("mse", higher_hides=True, equal=0.0)(images)
