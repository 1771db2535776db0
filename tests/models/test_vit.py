import pytest
import torch
from torch import nn

from splitveil.models import build_model
from splitveil.models.vit import Attention
from splitveil.registry import MODELS, UserError


@pytest.mark.parametrize("cut", ["patches", *(f"block{i}" for i in range(1, 7))])
@pytest.mark.parametrize(("channels", "size", "patch"), [(1, 32, 4), (3, 64, 8)])
def test_every_cut_gives_logits_and_z_is_a_list_of_tokens(channels: int, size: int, patch: int, cut: str) -> None:
    model = build_model(MODELS["vit"].configure({"cut": cut, "patch": patch}), (channels, size, size), classes=7)
    assert model.z_shape == (64, 192)
    with torch.no_grad():
        z = model.edge(torch.rand(2, channels, size, size))
        assert z.shape == (2, 64, 192)
        assert model.cloud(z).shape == (2, 7)


def test_the_parameters_are_as_many_as_counted_by_hand() -> None:
    model = build_model(MODELS["vit"].configure({}), (3, 32, 32), classes=10)
    norm, d = 2 * 192, 192
    block = 2 * norm + (d * 3 * d + 3 * d) + (d * d + d) + (d * 4 * d + 4 * d) + (4 * d * d + d)
    patches = (3 * 4 * 4 * d + d) + 64 * d
    assert sum(p.numel() for p in model.parameters()) == patches + 6 * block + norm + (d * 10 + 10)


def test_attention_agrees_with_that_of_torch() -> None:
    torch.manual_seed(0)
    ours = Attention(12, 3).double()
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double()
    theirs.load_state_dict({
        "in_proj_weight": ours.qkv.weight, "in_proj_bias": ours.qkv.bias,
        "out_proj.weight": ours.out.weight, "out_proj.bias": ours.out.bias,
    })  # fmt: skip
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0])


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="patch = 5 does not divide the image size 32"):
        build_model(MODELS["vit"].configure({"patch": 5}), (3, 32, 32), classes=10)
    with pytest.raises(UserError, match="dim = 192 is not a multiple"):
        build_model(MODELS["vit"].configure({"heads": 5}), (3, 32, 32), classes=10)
