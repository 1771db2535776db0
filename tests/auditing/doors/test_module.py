import pytest
import torch
from small_net import attacker, private, trained_net
from torch import Tensor, nn

import splitveil
from splitveil.auditing.audit import open_door
from splitveil.auditing.subject import weights_sha256
from splitveil.cut_by_fx import split
from splitveil.registry import UserError

X = torch.from_numpy(private()[0][:8]).float() / 255


def test_a_module_a_pair_and_a_split_model_are_the_same_subject() -> None:
    net = trained_net()
    whole = split(net, "stem", X)
    found = [open_door(net, "stem", X), open_door(whole, None, X), open_door((whole.edge, whole.cloud), None, X)]
    assert len({subject.digest for subject in found}) == 1
    for subject in found:
        assert tuple(subject.model.z_shape) == (4, 8, 8) and not subject.lacks and not subject.opaque
    assert found[0].what == "Normalised, cut after stem"


def test_another_weight_or_statistic_gives_another_digest() -> None:
    layer = nn.BatchNorm2d(3)
    digests = [weights_sha256(layer)]
    with torch.no_grad():
        layer.weight[0] = 2.0
        digests.append(weights_sha256(layer))
        layer.running_mean[1] = 1.0  # type: ignore[index]
        digests.append(weights_sha256(layer))
    assert len(set(digests)) == 3


def test_an_edge_without_a_cloud_is_attacked_also_with_its_weights() -> None:
    small = {"blocks": 0, "width": 4, "epochs": 1, "steps": 2, "own": 4}
    attacks = ["mean_image", {"name": "refine", **small}]
    report = splitveil.audit((trained_net().stem, None), private=private(), attacker=attacker(), attacks=attacks)
    assert set(report.attacks) == {"mean_image", "refine"} and report.accuracy is None
    assert report.summary.cost["edge"].parameters == 4 * 9 + 4 + 8 and report.summary.cost["cloud"].macs is None
    with pytest.raises(UserError, match="shadow: there is no cloud: only the edge was given"):
        splitveil.audit((trained_net().stem, None), private=private(), attacker=attacker(), attacks=["shadow"])


class Tokens(nn.Module):
    """A transformer's z: [b, tokens, d], where the tokens do not make a square."""

    def __init__(self, patches: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, 6, (8 // patches, 2), stride=(8 // patches, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x).flatten(2).transpose(1, 2)


class Mean(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z.mean(1)


@pytest.mark.parametrize("patches", [4, 2])
def test_z_may_be_tokens(patches: int) -> None:
    pair = Tokens(patches), nn.Sequential(Mean(), nn.Linear(6, 10))
    small = {"blocks": 0, "width": 4, "epochs": 1}
    attacks = ["nearest", "ridge", {"name": "decoder", **small}, {"name": "fora", "iterations": 2, **small}]
    report = splitveil.audit(pair, private=private(), attacker=attacker(), attacks=attacks)
    assert report.summary.z_shape == (4 * patches, 6)
    assert all(attack.finite for attack in report.attacks.values())


def test_z_may_be_a_vector() -> None:
    pair = nn.Sequential(nn.Flatten(), nn.Linear(64, 12)), nn.Linear(12, 10)
    attacks = ["nearest", "ridge", {"name": "decoder", "blocks": 0, "width": 4, "epochs": 1}]
    report = splitveil.audit(pair, private=private(), attacker=attacker(), attacks=attacks)
    assert report.summary.z_shape == (12,) and len(report.attacks) == 3


class Two(nn.Module):
    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return image + text


class Optional(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x.flatten(1) @ torch.ones(64, 10) if mask is None else mask


def test_a_second_input_is_refused_unless_it_has_a_default() -> None:
    with pytest.raises(UserError, match=r"Two takes 2 inputs \(image, text\), an audit sends images alone; wrap it"):
        open_door(Two(), "x", X)
    assert tuple(open_door((nn.Identity(), Optional()), None, X).model.z_shape) == (1, 8, 8)


def test_images_of_another_size_are_told_before_anything_is_attacked() -> None:
    with pytest.raises(UserError, match=r"Normalised fails on inputs of shape \[1, 12, 12\] \(.*\); are these its inputs\?"):
        open_door(trained_net(), "stem", torch.rand(2, 1, 12, 12))
    with pytest.raises(UserError, match=r"the images are \[1, 12, 12\], the model takes \[1, 8, 8\]"):
        open_door(split(trained_net(), "stem", X), None, torch.rand(2, 1, 12, 12))
