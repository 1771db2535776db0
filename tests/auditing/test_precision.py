"""Networks of 16 and of 64 bits are audited as they are."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_net import attacker, private, trained_net
from torch import Tensor, nn

import splitveil

ATTACKS = ("mean_image", "class_mean", "nearest", "ridge", {"name": "decoder", "blocks": 0, "width": 4, "epochs": 1, "batch": 32})
OTHERS = [torch.bfloat16, torch.float16, torch.float64]


def own_accuracy(net: nn.Module, dtype: torch.dtype) -> float:
    images, labels = private()
    with torch.no_grad():
        scores = net.eval()((torch.from_numpy(images).float() / 255).to(dtype))
    return float((scores.argmax(1).numpy() == labels).mean())


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize("noise", [(), [{"name": "gaussian", "sigma": 0.2}]])
def test_a_network_of_another_precision_keeps_its_accuracy_and_its_bytes(
    dtype: torch.dtype, noise: list[dict[str, object]]
) -> None:
    net = trained_net().to(dtype)
    report = splitveil.audit(net, "stem", private=private(), attacker=attacker(), attacks=ATTACKS, channel=noise)
    assert report.summary.cost["edge"].bytes == dtype.itemsize * np.prod(report.summary.z_shape)
    assert all(attack.finite for attack in report.attacks.values())
    assert noise or report.accuracy == own_accuracy(net, dtype)
    assert next(net.parameters()).dtype == dtype


class Autocast(nn.Module):
    """Takes float32 and has float32 weights, but sends bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, stride=4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.stem(x)


def test_an_edge_that_computes_in_bfloat16_is_a_pair_and_a_function() -> None:
    torch.manual_seed(0)
    edge = Autocast().eval()
    by_module = splitveil.audit((edge, None), private=private(), attacker=attacker(), attacks=["nearest", "ridge"])
    by_function = splitveil.audit(lambda x: edge(x), private=private(), attacker=attacker(), attacks=["nearest", "ridge"])
    for report in (by_module, by_function):
        assert report.summary.cost["edge"].bytes == 2 * np.prod(report.summary.z_shape)
    assert by_module.worst_case == by_function.worst_case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recorded_pairs_of_16_bits_count_two_bytes_a_number(dtype: torch.dtype, tmp_path) -> None:  # type: ignore[no-untyped-def]
    images = torch.from_numpy(private()[0])
    save_file({"sent": (images.flatten(1)[:, ::9].float() / 255).to(dtype), "images": images}, tmp_path / "sent.safetensors")
    report = splitveil.audit(pairs=tmp_path / "sent.safetensors", attacks=["nearest", "ridge"])
    assert report.summary.cost["edge"].bytes == 2 * np.prod(report.summary.z_shape)
