import pytest
import torch

from splitveil.models import build_model
from splitveil.registry import MODELS, UserError


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("cut", ["conv1", "conv2", "conv3", "conv4"])
@pytest.mark.parametrize(("channels", "size"), [(1, 32), (3, 32), (3, 64)])
def test_every_cut_gives_logits_and_says_the_shape_of_z(channels: int, size: int, cut: str, norm: bool) -> None:
    config = MODELS["small"].configure({"cut": cut, "norm": norm})
    model = build_model(config, (channels, size, size), classes=7)
    z = model.edge(torch.rand(2, channels, size, size))
    assert tuple(z.shape) == (2, *model.z_shape)
    assert model.cloud(z).shape == (2, 7)


def test_the_default_cut_gives_8_by_8_features_for_32_pixels() -> None:
    assert build_model(MODELS["small"].configure({}), (3, 32, 32), classes=10).z_shape == (32, 8, 8)


def test_a_misspelt_cut_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match="unknown cut 'covn2'; did you mean 'conv2'"):
        build_model(MODELS["small"].configure({"cut": "covn2"}), (3, 32, 32), classes=10)
