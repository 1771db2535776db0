from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_net import attacker, private, trained_net
from torch import Tensor, nn

import splitveil
from splitveil.evaluation.suites import suite
from splitveil.registry import UserError


def in_numpy(x: Tensor) -> Tensor:
    """An edge that autograd cannot follow."""
    assert not torch.is_grad_enabled()
    return torch.from_numpy(np.round(x.numpy()[:, :, ::2, ::2] * 4).astype(np.float64))


def audited(net: Any, **given: Any) -> Any:
    return splitveil.audit(net, private=private(), attacker=attacker(), **given)


def test_a_function_that_autograd_cannot_follow_is_audited_and_what_needs_weights_is_skipped_by_name() -> None:
    report = audited(in_numpy, suite="quick", targets=40)
    assert set(report.attacks) == {"mean_image", "class_mean", "nearest", "ridge", "decoder-small"}
    assert report.worst_case.mse < 0.5 * report.summary.ceiling_mse
    assert report.accuracy is None
    assert report.summary.cost["edge"].parameters is None and report.summary.cost["edge"].bytes == 64
    black = "the edge is a black box: its weights are not known"
    assert report.not_checked == {
        "attention-collapsed": "an audit has no training log", "whitebox-weaker": black, "gradient-masked": black,
        "noise-predictable": "an audit has no run folder that a device loads",
    }  # fmt: skip


def test_of_the_largest_suite_all_that_needs_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("decoder", "gan", "nearest", "ridge"):
        monkeypatch.setattr(
            splitveil.registry.ATTACKS[name].build, "fit", lambda self, access: (_ for _ in ()).throw(UserError("dear"))
        )
    report = audited(in_numpy, suite="plus", targets=40)
    denied = {name for name, why in report.skipped.items() if "black box" in why or "no cloud" in why}
    generative = {"diffusion", "diffusion-mean16", "diffusion-sample"}
    assert denied == generative | {"decoder-logits", "refine-eot", "rmle", "deep_prior", "shadow", "sdar", "unsplit"}
    assert len(report.attacks) + len(report.skipped) == len(suite("plus"))


def test_a_function_has_the_figures_of_the_same_edge_as_a_module() -> None:
    net = trained_net()

    def edge(x: Tensor) -> Tensor:
        was = net.training
        z = net.eval().stem((x - 0.286) / 0.353)
        net.train(was)
        return z

    attacks = ["nearest", "ridge", {"name": "decoder", "blocks": 0, "width": 4, "epochs": 1}]
    white = splitveil.audit(net, "stem", private=private(), attacker=attacker(), attacks=attacks)
    black = audited(edge, attacks=attacks)
    assert black.worst_case == white.worst_case


def test_a_pair_of_functions_has_an_accuracy() -> None:
    net = trained_net()
    net.eval()
    report = audited((lambda x: F.avg_pool2d(x, 1), lambda z: net(z)), attacks=["mean_image"])
    assert (
        report.accuracy == splitveil.audit(net, "stem", private=private(), attacker=attacker(), attacks=["mean_image"]).accuracy
    )
    with pytest.raises(UserError, match="shadow: the edge is a black box: its layers are not known"):
        audited((lambda x: F.avg_pool2d(x, 1), lambda z: net(z)), attacks=["shadow"])


def noisy(x: Tensor) -> Tensor:
    """An edge that draws its own noise."""
    return x.flatten(1) + 0.05 * torch.randn(len(x), x[0].numel())


def test_audits_of_an_edge_with_noise_of_its_own_belong_together_in_one_folder(tmp_path: Path) -> None:
    for channel in ((), [{"name": "gaussian", "sigma": 0.1}]):
        folder = tmp_path / f"audit{len(channel)}"
        first = audited(noisy, attacks=["ridge"], channel=channel, folder=folder)
        again = audited(noisy, attacks=["mean_image"], channel=channel, folder=folder)  # a weaker list
        assert set(again.attacks) == {"ridge", "mean_image"}
        assert again.attacks["ridge"].mse == first.attacks["ridge"].mse  # it was not run a second time
        assert "other answers to the same images" in " ".join(again.notes)
    assert audited(in_numpy, attacks=["mean_image"]).notes == ()


def test_an_edge_with_noise_of_its_own_is_told_from_another_function(tmp_path: Path) -> None:
    def other(x: Tensor) -> Tensor:
        return noisy(x)

    audited(noisy, attacks=["ridge"], folder=tmp_path / "audit")
    assert set(audited(other, attacks=["mean_image"], folder=tmp_path / "audit").attacks) == {"mean_image"}


def test_a_module_behind_a_function_is_in_eval_mode_while_it_is_audited_and_left_as_it_was() -> None:
    cloud = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 10)).train()
    cloud[2].eval()
    before, modes = {name: value.clone() for name, value in cloud.state_dict().items()}, [m.training for m in cloud.modules()]
    report = audited((lambda x: x[:, :, ::2, ::2], cloud), attacks=["mean_image"])
    assert all(torch.equal(value, before[name]) for name, value in cloud.state_dict().items())
    assert [module.training for module in cloud.modules()] == modes
    images, labels = private()
    with torch.no_grad():
        found = cloud.eval()(torch.from_numpy(images)[:, :, ::2, ::2].float() / 255).argmax(1)
    assert report.accuracy == (found == torch.from_numpy(labels)).sum().item() / len(labels)
