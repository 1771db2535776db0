"""Audits of a small network that was trained outside splitveil."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_net import attacker, private, trained_net
from torch import nn

import splitveil
from splitveil.attacks import build
from splitveil.attacks.threat import grant
from splitveil.channel import Channel
from splitveil.cut_by_fx import split
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.evaluation.score import score
from splitveil.evaluation.worst_case import worst_case
from splitveil.files.folder import locked
from splitveil.registry import ATTACKS, UserError
from splitveil.rng import seed_of
from splitveil.training.build import Parts

CPU = torch.device("cpu")
FLOORS = ("mean_image", "class_mean", "nearest")
NOISE = {"name": "gaussian", "sigma": 0.2}


def audited(net: Any = None, **given: Any) -> Any:
    usual = {"private": private(), "attacker": attacker(), "attacks": FLOORS, "at": "stem" if net is None else None}
    return splitveil.audit(trained_net() if net is None else net, **usual | given)


def test_it_gives_the_figures_of_the_long_way_round() -> None:
    report = audited(channel=[NOISE], attacks=["nearest", "ridge"])
    names = tuple(map(str, range(10)))
    own, test = (DeviceImages(ImageSet(*part, names), CPU) for part in (attacker(), private()))
    model, channel = (
        split(trained_net(), "stem", test.take(slice(0, 8))),
        Channel([splitveil.defences.build("gaussian", sigma=0.2)]),
    )
    rows = {}
    for name in ("nearest", "ridge"):
        attack = build(name, seed=seed_of(0, "attack", name))
        attack.fit(grant(attack.requires, model, channel, own, CPU, attack.seed))
        rows[name], _ = score(attack, Parts(model, channel, None), test, 0)
    assert report.worst_case == worst_case(rows)
    assert {name: attack.mse for name, attack in report.attacks.items()} == {name: r["mse"].mean() for name, r in rows.items()}


def test_accuracy_is_that_of_the_network_s_own_evaluation_to_the_last_digit() -> None:
    net, (images, labels) = trained_net(), private()
    with torch.no_grad():
        net.eval()
        right = (net(torch.from_numpy(images).float() / 255).argmax(1) == torch.from_numpy(labels)).sum().item()
    net.train()
    report = audited()
    assert report.accuracy == right / 120 and right > 60
    assert audited(targets=20).accuracy == report.accuracy  # over all private images, also where a few are rebuilt


def test_a_network_that_guesses_is_told_as_its_weights_may_be_missing() -> None:
    dead = trained_net()
    nn.init.zeros_(dead.head.weight)  # answers the same class whatever it sees
    told = audited(dead, at="stem", attacks=["mean_image"]).notes
    assert len(told) == 1 and "no better than guessing" in told[0] and "Are its weights loaded" in told[0]
    assert audited(attacks=["mean_image"]).notes == ()
    assert audited(attacks=["mean_image"], private=private()[0]).notes == ()  # no labels, no accuracy


@pytest.mark.parametrize("fails", [False, True])
def test_the_network_and_the_random_numbers_are_left_as_they_were(fails: bool) -> None:
    net = trained_net()
    net.train()
    net.drop.eval()  # a mode of the user's own
    modes, wanted = [part.training for part in net.modules()], [p.requires_grad for p in net.parameters()]
    before, drawn = {name: value.clone() for name, value in net.state_dict().items()}, torch.get_rng_state()
    if fails:
        with pytest.raises(UserError, match="no defence of this channel has trained a proxy decoder"):
            audited(attacks=[{"name": "decoder", "proxy": True}])
    else:
        audited(attacks=[{"name": "rmle", "steps": 3, "own": 4}], channel=[NOISE])
    assert [part.training for part in net.modules()] == modes
    assert [p.requires_grad for p in net.parameters()] == wanted and all(p.grad is None for p in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_killed_audit_goes_on_and_another_model_s_attacks_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[str] = []
    for name in ("mean_image", "nearest"):
        method: Any = ATTACKS[name].build
        fit = method.fit

        def spied(self: Any, access: Any, fit: Any = fit, name: str = name) -> Any:
            fitted.append(name)
            if name == "nearest" and len(fitted) == 2:
                raise KeyboardInterrupt
            return fit(self, access)

        monkeypatch.setattr(method, "fit", spied)
    given: dict[str, Any] = {"folder": tmp_path / "audit", "attacks": ["mean_image", "nearest"]}
    with pytest.raises(KeyboardInterrupt):
        audited(**given)
    first = audited(**given)
    assert fitted == ["mean_image", "nearest", "nearest"]
    again = audited(**given)
    assert (fitted[3:], again.summary) == ([], first.summary)
    audited(**given, channel=[NOISE])
    assert fitted[3:] == ["mean_image", "nearest"]
    audited(**given, channel=[NOISE | {"sigma": 0.3}])
    assert fitted[5:] == ["mean_image", "nearest"]
    audited(**given, channel=[NOISE | {"sigma": 0.3}], private=tuple(part[:100] for part in private()))
    assert fitted[7:] == ["mean_image", "nearest"]


def test_what_needs_labels_is_skipped_by_name_and_accuracy_is_not_measured() -> None:
    report = audited(private=private()[0], attacks=None, suite="quick", targets=40)
    assert report.skipped["class_mean"] == "the private images have no labels"
    assert report.accuracy is None
    assert "decoder-small" in report.attacks
    assert report.summary.no_judge is not None
    without = audited(attacker=attacker()[0], attacks=["nearest"])
    assert without.accuracy is not None
    with pytest.raises(UserError, match="class_mean: the attacker's images have no labels"):
        audited(attacker=attacker()[0], attacks=["class_mean"])


def test_without_images_of_the_attacker_s_own_half_of_the_private_ones_are() -> None:
    report = audited(attacker=None, attacks=["mean_image"])
    assert {name: part.images for name, part in report.summary.splits.items()} == {"test": 60, "auxiliary": 60}


def test_every_attack_works_on_images_that_are_not_square() -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (90, 3, 8, 12), np.uint8), rng.integers(0, 3, 90)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(96, 3))
    attacks = [{"name": name, **ATTACKS[name].build.quick} for name in ATTACKS.names()]  # type: ignore[attr-defined]
    report = splitveil.audit(net, "0", private=(images[:30], labels[:30]), attacker=(images[30:], labels[30:]), attacks=attacks)
    assert len(report.attacks) == len(attacks)
    assert all(attack.finite for attack in report.attacks.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"net": 3}, "the model is a int, must be an nn.Module, a pair"),
        ({"at": None}, "Normalised is a whole network; say where it is cut"),
        ({"at": "stme"}, "unknown cut 'stme'; did you mean 'stem'"),
        ({"net": (trained_net(),) * 3}, "the model is a tuple of 3, must be a pair"),
        ({"net": lambda x: x, "at": "stem"}, "only an nn.Module is cut by name"),
        ({"net": lambda x: x.sum()}, r"returns \[\] for 8 images"),
        ({"net": lambda x: {"z": x}}, "returns a dict, must return one tensor"),
        ({"net": lambda x: x.matrix()}, r"fails on inputs of shape \[1, 8, 8\] \('Tensor' object has no attribute 'matrix'\)"),
        ({"net": nn.Bilinear(8, 8, 2), "at": "x"}, r"Bilinear takes 2 inputs \(input1, input2\), an audit sends images alone"),
        ({"suite": "qick", "attacks": None}, "unknown suite 'qick'; did you mean 'quick'"),
        ({"attacks": ["ridg"]}, "unknown attack 'ridg'"),
        ({"targets": 1}, "targets is 1, must be 2 or more"),
        ({"private": (private()[0], np.full(120, 3))}, "private: all 120 images have label 3"),
        ({"private": (private()[0], private()[1] + 5)}, "private: labels go up to 14, the model has 10 outputs"),
        ({"attacker": np.zeros((5, 1, 9, 9), np.uint8)}, r"private images are \[1, 8, 8\], the attacker's \[1, 9, 9\]"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_line(change: dict[str, Any], message: str) -> None:
    usual = {"net": trained_net(), "private": private(), "attacker": attacker(), "attacks": FLOORS}
    usual |= {} if "net" in change else {"at": "stem"}
    with pytest.raises(UserError, match=message) as raised:
        splitveil.audit(**usual | change)
    assert "\n" not in str(raised.value)


def test_one_audit_at_a_time_writes_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    with locked(folder), pytest.raises(UserError, match="by another process") as refused:
        audited(attacks=["mean_image"], folder=folder)
    assert "\n" not in str(refused.value) and not folder.exists()
    report = audited(attacks=["mean_image"], folder=folder)
    assert report.html(folder / "report.html").exists()  # which takes the lock itself


def test_what_a_kill_left_half_written_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / ".manifest.json.ab.tmp").write_text("x")
    (tmp_path / ".notes").write_text("a file of the user's own")
    audited(attacks=["mean_image"], folder=tmp_path)
    assert (tmp_path / "summary.json").exists()


def test_a_channel_in_service_is_audited_and_stays_in_service() -> None:
    channel = Channel([splitveil.defences.build("gaussian", sigma=0.2)]).serve()
    report = audited(channel=channel, attacks=["nearest"])
    assert channel.in_service
    assert report.worst_case == audited(channel=[NOISE], attacks=["nearest"]).worst_case
