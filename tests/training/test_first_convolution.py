import pytest
import torch
from torch import nn

from splitveil.models import build_model
from splitveil.registry import MODELS, UserError
from splitveil.split_model import SplitModel
from splitveil.training.first_convolution import patch_covariance, start_edge, whitening_filters


def test_whitening_filters_make_patches_white():
    x = torch.rand(300, 1, 9, 9, generator=torch.Generator().manual_seed(0)).cumsum(3)  # neighbours are alike
    covariance = patch_covariance(x, (2, 2))
    filters = whitening_filters(covariance, 8)
    assert torch.equal(filters[1::2], -filters[::2])
    found = filters[::2] @ covariance @ filters[::2].mT
    assert (found - found.diag().diag()).abs().max() < 1e-9
    values = torch.linalg.eigvalsh(covariance).flip(0)
    torch.testing.assert_close(found.diag(), values / (values + 0.01 * values[0]))


def test_a_dirac_start_passes_the_image_on_and_leaves_the_other_filters():
    torch.manual_seed(0)
    model = build_model(MODELS["small"].config(), (3, 16, 16), 4)
    conv = next(layer for layer in model.edge.modules() if isinstance(layer, nn.Conv2d))
    before = conv.weight.detach().clone()
    x = torch.rand(2, 3, 16, 16)
    start_edge(model, "dirac", x)
    assert torch.equal(conv(x)[:, :3], x)
    assert torch.equal(conv.weight[3:], before[3:])


def test_whitening_keeps_the_norm_of_the_layer():
    torch.manual_seed(0)
    model = build_model(MODELS["small"].config(), (3, 16, 16), 4)
    conv = next(layer for layer in model.edge.modules() if isinstance(layer, nn.Conv2d))
    norm = conv.weight.flatten(1).norm(dim=1).mean()
    start_edge(model, "whitening", torch.rand(20, 3, 16, 16))
    torch.testing.assert_close(conv.weight.flatten(1).norm(dim=1), norm.expand(16))


def test_an_edge_without_a_convolution_is_refused():
    model = SplitModel(nn.Flatten(), nn.Linear(12, 2), (12,), (3, 2, 2))
    with pytest.raises(UserError, match=r"train\.start is 'dirac', but the edge does not begin with a plain convolution"):
        start_edge(model, "dirac", torch.rand(2, 3, 2, 2))
