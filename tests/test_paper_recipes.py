"""Every row of the CEM paper's tables is a data recipe, a defence recipe and, for its second line, cem.toml."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from splitveil.cli.arguments import parse
from splitveil.config import Config, from_dict, merged, read_toml
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages, Feed
from splitveil.registry import UserError
from splitveil.training.build import build_parts
from splitveil.training.forward_pass import features_of
from splitveil.training.step import Stepper
from splitveil.training.warm_start import warm_start

PAPER = Path(__file__).parent.parent / "recipes" / "paper"
DATA = ["cifar10", "cifar100", "tinyimagenet", "faces"]
ROWS = ["none", "bottleneck", "distcorr", "dropout", "patrol", "ressfl", "noise_nopeek", "noise_arl"]
AGAINST_A_DECODER = ["patrol", "ressfl", "noise_arl", "noise_arl_alpha1"]
TRAINED = [
    pytest.param(data, row, marks=[] if row in ("patrol", "noise_arl") else pytest.mark.slow)  # these two have most parts
    for data, row in [*(("cifar10", row) for row in ROWS), ("cifar100", "none"), ("cifar100", "noise_arl_alpha1")]
]


def recipe(name: str) -> str:
    return str(PAPER / f"{name}.toml")


def test_these_are_all_of_them() -> None:
    assert {path.stem for path in PAPER.glob("*.toml")} == {*DATA, *ROWS, "noise_arl_alpha1", "cem"}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("data", DATA)
def test_a_row_is_its_data_its_defence_and_cem(data: str, row: str) -> None:
    plain, defended = parse([recipe(data), recipe(row)]), parse([recipe(data), recipe(row), recipe("cem")])
    assert plain.name == f"{data}-{row}"
    assert defended.name == f"{data}-{row}-cem"
    assert plain.cem.surrogate is None
    assert type(defended.cem.surrogate).method == "kmeans"
    assert (plain.defences, plain.train, plain.model) == (defended.defences, defended.train, defended.model)
    assert plain.defences == from_dict(read_toml(recipe(row))).defences
    assert plain.data == from_dict(read_toml(recipe(data))).data


def test_flags_come_on_top_of_all_recipes() -> None:
    config = parse([recipe("cifar10"), recipe("dropout"), "--defences.2.p=0.4", "--train.epochs", "3", "--name", "own"])
    assert (config.defences[2].p, config.train.epochs, config.name) == (0.4, 3, "own")


def test_of_two_tables_the_upper_counts_and_lists_are_replaced() -> None:
    below = {"a": {"x": 1, "y": 2}, "list": [1, 2], "only": 1}
    assert merged(below, {"a": {"y": 3}, "list": [9]}) == {"a": {"x": 1, "y": 3}, "list": [9], "only": 1}
    assert below == {"a": {"x": 1, "y": 2}, "list": [1, 2], "only": 1}


def test_a_mistake_in_any_recipe_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[train]\nepoch = 3\n")
    with pytest.raises(UserError, match=r"train\.epoch"):
        parse([recipe("cifar10"), str(tmp_path / "bad.toml")])


@pytest.mark.parametrize("row", AGAINST_A_DECODER)
def test_the_proxy_is_trained_and_the_edge_punished_as_in_the_reference_code(row: str) -> None:
    adversarial = from_dict(read_toml(recipe(row))).defences[-1]
    assert (adversarial.border, adversarial.hinge, adversarial.target) == ("zeros", "batch", 0.5)
    assert (adversarial.proxy_loss, adversarial.proxy_sees, adversarial.proxy_settled) == ("ssim", "clean", True)
    assert (adversarial.milestones, adversarial.gamma, adversarial.warmup, adversarial.warm_start) == ((60, 150), 0.2, 0, 30)
    assert (adversarial.alpha, adversarial.inner) == (1.0 if row.endswith("alpha1") else 0.3, 3 if row == "patrol" else 1)


@pytest.mark.parametrize("row", [row for row in ROWS if row != "none"])
def test_every_defended_row_ends_its_edge_in_a_sigmoid_and_has_noise(row: str) -> None:
    defences = {type(defence).method: defence for defence in from_dict(read_toml(recipe(row))).defences}
    assert defences["bottleneck"].sigmoid
    assert defences["gaussian"].sigma == (0.025 if row.startswith("noise") else 0.01)


@pytest.mark.parametrize(("data", "cut"), [("cifar10", "conv2"), ("cifar100", "conv3")])
def test_the_cifar_recipes_have_the_published_schedule_and_layout(data: str, cut: str) -> None:
    config = parse([recipe(data), recipe("none")])
    train, splits = config.train, config.splits
    assert (train.epochs, train.batch, train.lr, train.weight_decay) == (240, 128, 0.05, 5e-4)
    assert (train.schedule, train.milestones, train.gamma) == ("milestones", (60, 120, 180, 210), 0.2)
    assert (train.augment.crop, train.augment.flip, train.augment.rotate) == (4, True, 15)
    assert (splits.attacker, splits.task, splits.validation, splits.auxiliary) == ("test-first", 50_000, 0, 9_000)
    assert (config.model.cut, config.model.head) == (cut, "wide")
    own = {attack.label: attack.auxiliary for attack in config.attacks if type(attack).method == "decoder"}
    assert own == {"decoder-paper": "same distribution", "decoder-paper-50k": "same set"}


def small(config: Config) -> Config:
    """The same with narrow proxy decoders, one pass of warm start and small batches."""
    narrow = {"blocks": 1, "width": 8, "warm_start": 1}
    defences = tuple(replace(d, **narrow) if type(d).method == "adversarial" else d for d in config.defences)
    return replace(config, defences=defences, train=replace(config.train, batch=8))


@pytest.mark.parametrize(("data", "row"), TRAINED)
def test_one_step_of_every_row_and_of_its_line_with_cem_trains(data: str, row: str) -> None:
    classes, device = 10 if data == "cifar10" else 100, torch.device("cpu")
    pixels = np.random.default_rng(0).integers(0, 256, (16, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(16) % 2 if row != "none" else np.arange(16) % classes  # several images of a class, for clusters
    images = ImageSet(pixels, labels, tuple(map(str, range(classes))))
    config = small(parse([recipe(data), recipe(row), *([] if row == "none" else [recipe("cem")])]))
    parts, own = build_parts(config, images, device), DeviceImages(images, device)
    if parts.channel.warm_start:
        warm_start(parts, own, 8, seed=0, show=False)
    feed = Feed(own, 8, config.train.augment)
    stepper = Stepper(parts, config.train, feed, device)
    feed.begin(0, 0)
    parts.channel.on_epoch(1, parts.model)
    if parts.cem is not None:
        parts.cem.schedule(1, config.train.lr, config.train.epochs)
        parts.cem.refresh(features_of(parts.model, own), own.labels)
    before = {name: value.clone() for name, value in parts.model.named_parameters()}
    stepper.step()
    values = stepper.means.read()
    assert all(np.isfinite(value).all() for value in values.values())
    assert all(not torch.equal(before[name], value) for name, value in parts.model.edge.named_parameters(prefix="edge"))
    assert ("cem_loss" in values) == (row != "none")
    if row == "patrol":  # its filters are cut out, and z stays what the sigmoid makes of it
        assert parts.channel.on_epoch(180, parts.model)
        z = parts.model.eval().edge(own.take(slice(0, 2)))
        assert z.shape[1:] == parts.model.z_shape
        assert 0 < z.min() <= z.max() < 1
    assert ("penalty" in values) == (row in [*AGAINST_A_DECODER, "distcorr", "noise_nopeek"])
