from typing import Any

import pytest
import torch
from torch import Tensor

from splitveil.models.layers import FirstConv2d, NarrowConv2d


class Elsewhere(Tensor):
    """A tensor that says it lies on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def pulled(module: torch.nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Output, and the gradients of its weighted sum in the parameters."""
    out = module(x)
    weight = torch.linspace(-1, 1, out.numel(), dtype=x.dtype).view(out.shape)
    return out.as_subclass(Tensor), *torch.autograd.grad((out * weight).sum(), list(module.parameters()))


@pytest.mark.parametrize("channels", [1, 3, 8])
@pytest.mark.parametrize("options", [
    {"padding": 1, "bias": False}, {"stride": 2, "padding": 2, "bias": True}, {"dilation": 2}, {"padding": "same"},
], ids=str)  # fmt: skip
def test_the_product_of_patches_is_the_convolution(
    channels: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    ours, theirs = (kind(channels, 5, 3, **options).double() for kind in (FirstConv2d, torch.nn.Conv2d))
    theirs.load_state_dict(ours.state_dict())
    x = torch.rand(4, channels, 12, 9).double()
    expected = pulled(theirs, x)
    torch.testing.assert_close(pulled(ours, x), expected)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(pulled(ours, x.as_subclass(Elsewhere)), expected)


@pytest.mark.parametrize("outputs", [1, 3, 8, 11])
@pytest.mark.parametrize("options", [{"padding": 1}, {"bias": False}, {"padding": 1, "padding_mode": "reflect"}], ids=str)
def test_more_outputs_than_asked_for_change_none_of_them(outputs: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours, theirs = (kind(5, outputs, 3, **options).double() for kind in (NarrowConv2d, torch.nn.Conv2d))
    theirs.load_state_dict(ours.state_dict())
    x = torch.rand(4, 5, 12, 9).double()
    expected = pulled(theirs, x)
    torch.testing.assert_close(pulled(ours, x), expected)
    torch.testing.assert_close(pulled(ours, x.as_subclass(Elsewhere)), expected)
