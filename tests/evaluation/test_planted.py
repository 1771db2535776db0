"""One model with a planted weakness for each flag, and one without: trained, attacked and evaluated as every run is.

Bundled images of 8 pixels. Most models are `wire`: the edge only normalises, so that z is the image and everything that protects
it is the channel, and what an attack can reach is known beforehand. docs/flags.md says which plant shows which flag.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil import audit
from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.threat import Access, Observation
from splitveil.config import from_dict
from splitveil.data.loader import DeviceImages
from splitveil.data.readers.fashion import fashion
from splitveil.data.splits import Splits
from splitveil.defences import AttackHints, Defence
from splitveil.defences.gaussian import add_noise
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.flags import FLAGS
from splitveil.evaluation.run_attacks import attack_run, load_parts
from splitveil.evaluation.score import on_the_wire
from splitveil.evaluation.suites import suite
from splitveil.evaluation.summary import Summary
from splitveil.evaluation.verdict import HALF, TENTH, verdict
from splitveil.noise import uniform
from splitveil.registry import ATTACKS, DEFENCES, MODELS
from splitveil.runs import Run
from splitveil.training.train_runs import train_run


@dataclass(frozen=True)
class WireConfig:
    cut: str = "wire"


def wire(channels: int, size: int, classes: int, cut: str) -> nn.Sequential:
    """z is the normalised image."""
    head = nn.Sequential(nn.Flatten(), nn.Linear(channels * size**2, classes))
    return nn.Sequential(OrderedDict(wire=nn.Identity(), head=head))


@dataclass(frozen=True)
class NoOptions:
    pass


class Boaster(Defence):
    """Claims noise that it does not send."""

    noise_std = 2.0

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return add_noise(z, 0.1, generator)


class Ripple(Defence):
    """Hardly changes z, but its slope is up to 11 times that of z, with a random sign: only on average does it point anywhere."""

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        phase = 2 * torch.pi * uniform(z, generator)
        return z + 0.05 * torch.sin(200 * z + phase)

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(random=True)


class OnlyInTraining(Defence):
    """nn.Dropout stops at inference; the rounding does not."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(0.2)

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return self.dropout((8 * z).round() / 8)


@cache
def small_images() -> tuple[Tensor, Tensor]:
    """The bundled images at a quarter of their size and their labels: 1,300 to train on, then 300 to test, [1600, 1, 8, 8]."""
    source = fashion()
    assert source.test is not None
    parts = source.train.take(np.arange(1300)), source.test.take(np.arange(300))
    images = [F.avg_pool2d(torch.from_numpy(part.images).float(), 4).round() for part in parts]
    return torch.cat(images), torch.cat([torch.from_numpy(part.labels) for part in parts])


@cache
def mean_images() -> Tensor:
    """The mean image of each class, [10, 1, 8, 8] in [0, 1]."""
    images, labels = small_images()
    return torch.stack([images[labels == label].mean(0) / 255 for label in range(10)])


@dataclass(frozen=True)
class TypicalConfig:
    brighter: bool = False
    """It is also sent whether the image is brighter or darker than that."""


class Typical(Defence[TypicalConfig]):
    """Knows the class of every image and sends its mean image in the place of z."""

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        images, labels = small_images()
        known = torch.cdist(255 * x.flatten(1), images.flatten(1).to(x)).argmin(1)
        means = mean_images().to(x)[labels.to(x.device)[known]]
        if self.config.brighter:
            means = means + 0.1 * (x - means).mean((1, 2, 3), keepdim=True).sign()
        return means + 0 * z


class Careless(Defence):
    """Draws from torch's own generator where it is given none, and loading a run seeds that one."""

    noise_std = 0.5

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return z + 0.5 * torch.randn(z.shape, generator=generator)

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(random=True, stand_in="identity", side_information={"sigma": 0.5})


@dataclass(frozen=True)
class LeastSquaresConfig(AttackConfig):
    images: int = 48
    """The attacker's images that are used."""
    width: int = 64
    """The directions of z that are used, those with the largest spread first."""


class LeastSquares(Attack[LeastSquaresConfig]):
    """A linear inverse without regularisation: at its worst where it has about as many images as z has directions."""

    def fit(self, access: Access) -> "LeastSquares":
        assert access.query is not None and access.auxiliary is not None
        x = access.auxiliary.take(slice(self.config.images))
        self.shape_, z = access.x_shape, access.query(x)[:, 0].flatten(1).double()
        directions = torch.linalg.svd(z, full_matrices=False).Vh[: self.config.width].T
        self.weights_ = directions @ torch.linalg.lstsq(z @ directions, x.flatten(1).double(), driver="gelsd").solution
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        z = observation.z[:, 0].flatten(1).double()
        return (z @ self.weights_).float().clamp(0, 1).view(-1, *self.shape_)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs go, and the images: bundled ones at a quarter of their size. Runs of the same images share a judge there."""
    folder = tmp_path_factory.mktemp("planted")
    images, labels = (part.numpy() for part in small_images())
    images = images.astype(np.uint8)
    parts = {"images": images[:1300], "test_images": images[1300:]}
    known = {"labels": labels[:1300], "test_labels": labels[1300:]}
    np.savez(folder / "small.npz", **parts, **known)
    np.savez(folder / "one_class.npz", **parts, **{name: np.zeros_like(values) for name, values in known.items()})
    parts["images"] = np.concatenate([images[:1000], images[1300:, ..., ::-1]])  # with all test images, mirrored
    known["labels"] = np.concatenate([labels[:1000], labels[1300:]])
    np.savez(folder / "copies.npz", **parts, **known)
    return folder


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user would have registered."""
    for registry in (MODELS, DEFENCES, ATTACKS):
        registry.names()
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setenv("SPLITVEIL_KEY", "0123456789abcdef" * 2)
    MODELS.register("wire", WireConfig)(wire)
    DEFENCES.register("boaster", NoOptions)(Boaster)
    DEFENCES.register("typical", TypicalConfig)(Typical)
    DEFENCES.register("ripple", NoOptions)(Ripple)
    DEFENCES.register("only_in_training", NoOptions)(OnlyInTraining)
    DEFENCES.register("careless", NoOptions)(Careless)
    ATTACKS.register("least_squares", LeastSquaresConfig)(LeastSquares)


def defence(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, **options}


def attack(name: str, label: str = "", **options: Any) -> dict[str, Any]:
    return {"name": name, "label": label, **options}


def decoder(label: str = "", **options: Any) -> dict[str, Any]:
    return attack("decoder", label, **{"blocks": 0, "width": 8, "epochs": 12, "batch": 32, "lr": 1e-2} | options)


@dataclass(frozen=True)
class Plant:
    """A weakness: the channel and the attacks under which it shows."""

    told: str
    """As docs/flags.md tells it."""
    defences: tuple[dict[str, Any], ...]
    attacks: tuple[dict[str, Any], ...] = (attack("ridge"),)
    model: str = "wire"
    cem: dict[str, Any] | None = None
    data: str = "small"


NOISE = defence("gaussian", sigma=0.5)
RIDGE = attack("ridge")
PLANTS: dict[str, Plant] = {
    "beaten-by-mean": Plant(
        "Gaussian noise; beside `ridge` a decoder of one epoch at a rate of 1e-5, which answers with grey",
        (NOISE,), (RIDGE, decoder(epochs=1, lr=1e-5)),
    ),
    "metric-ceiling": Plant("Gaussian noise 30 times as large as z", (defence("gaussian", sigma=30.0),)),
    "attack-not-converged": Plant(
        "Gaussian noise; a decoder of three epochs", (NOISE,), (RIDGE, decoder(epochs=3, lr=5e-4))
    ),
    "defence-inactive": Plant(
        "`topk` behind a ReLU, which zeroes a fiftieth of the entries: they were zero before",
        (defence("topk", drop=0.02),), model="small",
    ),
    "attention-collapsed": Plant(
        "`small` trained with CEM and the surrogate `gated` in its preset `as_written`, whose gates learn to shut",
        (NOISE,), model="small",
        cem={"surrogate": "gated", "gated": {"preset": "as_written"}, "warmup": 0, "lr": 0.2},
    ),
    "whitebox-weaker": Plant(
        "Gaussian noise; beside `ridge` a `refine` of no steps, from a decoder of one epoch", (NOISE,),
        (RIDGE, attack("refine", blocks=0, width=8, epochs=1, batch=32, decoder_lr=1e-2, steps=0)),
    ),
    "stronger-net-worse": Plant(
        "Gaussian noise; a user's least squares without regularisation, on 8 and on 48 directions of z and 48 images",
        (NOISE,), (RIDGE, attack("least_squares", "small", width=8), attack("least_squares", "large", width=48)),
    ),
    "more-data-worse": Plant(
        "Gaussian noise; a user's least squares without regularisation, on 24 and on 48 images of 64 pixels",
        (NOISE,), (RIDGE, attack("least_squares", "few", images=24), attack("least_squares", "many", images=48)),
    ),
    "averaging-hole": Plant(
        "Gaussian noise, fresh at every release; `nearest` with 1 and with 16 releases",
        (NOISE,), (RIDGE, attack("nearest"), attack("nearest", "nearest-16", repeats=16)),
    ),
    "gradient-masked": Plant(
        "a user's ripple on z, small but steep and of random phase; `refine` with 16 draws", (defence("ripple"),),
        (attack("refine", blocks=0, width=8, epochs=2, batch=32, decoder_lr=1e-2, steps=60, lr=3e-2, draws=16),),
    ),
    "bound-violated": Plant(
        "a user's defence that claims `noise_std` 2 and sends noise of 0.1", (defence("boaster"),)
    ),
    "mask-aware-gap": Plant(
        "`dropout` of 0.5 where grey is 0; a decoder with and one without the mask",
        (defence("dropout", p=0.5),), (decoder(epochs=10), decoder("aware", epochs=10, mask=True)),
    ),
    "neighbours-in-attacker-images": Plant(
        "Gaussian noise; the attacker's images hold mirrored copies of almost half of the test images", (NOISE,),
        data="copies",
    ),
    "channel-off-at-inference": Plant(
        "a user's defence that rounds z and then calls nn.Dropout", (defence("only_in_training"),)
    ),
    "degenerate": Plant("Gaussian noise; every image has the same label", (NOISE,), data="one_class"),
    "noise-predictable": Plant(
        "a user's defence that draws by torch.randn with the generator that it is given, or with none",
        (defence("careless"),),
    ),
}  # fmt: skip
GRADED = {
    "exposed": Plant("no defence: z is the image", (), ()),
    "traces": Plant("the same, a little brighter or darker as the image is", (defence("typical", brighter=True),), ()),
    "hidden": Plant("the mean image of the class in the place of z", (defence("typical"),), ()),
}
"""One model for each grade of docs/verdict.md, under the suite quick."""
CLEAN = Plant(
    "keyed noise; decoders of two widths and with 4 releases, 12 epochs each, and `refine` from a decoder of 18 epochs",
    (defence("keyed_noise", sigma=1.0),),
    (
        attack("mean_image"), decoder("small", lr=5e-3), decoder("large", lr=5e-3, width=16),
        decoder("repeats", lr=5e-3, width=16, repeats=4),
        attack("refine", blocks=0, width=16, epochs=18, batch=32, decoder_lr=5e-3, steps=40),
    ),
)  # fmt: skip


def trained(plant: Plant, name: str, shelf: Path) -> tuple[Run, Splits, torch.device]:
    config = from_dict({
        "name": name, "device": "cpu", "data": {"name": "npz", "path": str(shelf / f"{plant.data}.npz")},
        "splits": {"task": 300, "validation": 100, "auxiliary": 600}, "model": {"name": plant.model},
        "defences": list(plant.defences), "attacks": list(plant.attacks), "cem": plant.cem or {},
        "train": {"epochs": 1, "batch": 32, "augment": {"crop": 0, "flip": False}},
    })  # fmt: skip
    if not plant.attacks:
        config = replace(config, attacks=suite("quick"))
    return train_run(shelf / name, config)


def summary_of(plant: Plant, name: str, shelf: Path) -> Summary:
    run, splits, device = trained(plant, name, shelf)
    attack_run(run, splits, device)
    return evaluate_run(run, splits, device)


def flags_of(summary: Summary) -> dict[str, list[str]]:
    """Details by flag."""
    found: dict[str, list[str]] = {}
    for flag in summary.flags:
        found.setdefault(flag.flag, []).append(flag.detail)
    return found


@pytest.mark.parametrize("flag", FLAGS)
def test_a_planted_weakness_raises_its_flag_and_no_other_and_gets_no_green_light(flag: str, shelf: Path) -> None:
    assert flag in PLANTS, "a new flag needs a model that it is raised for"
    summary = summary_of(PLANTS[flag], flag, shelf)
    found = flags_of(summary)
    assert set(found) == {flag}, found
    assert verdict(summary).grade in ("exposed", "not established")


def test_a_probe_finds_a_decoder_that_has_not_converged(shelf: Path) -> None:
    """Of four epochs at a low rate the second half takes off much more than 2 %."""
    plant = Plant("the same by a probe", (NOISE,), (RIDGE, decoder(epochs=4, lr=5e-4, probe=True)))
    summary = summary_of(plant, "probed", shelf)
    (detail,) = flags_of(summary)["attack-not-converged"]
    assert detail.startswith("decoder: twice the epochs took ")
    assert summary.attacks["decoder"].facts["doubling_gain"] > 0.1


def test_a_model_without_a_planted_weakness_raises_none(shelf: Path) -> None:
    assert flags_of(summary_of(CLEAN, "clean", shelf)) == {}


@pytest.mark.parametrize("grade", GRADED)
def test_a_model_that_was_made_for_a_grade_gets_it_unless_an_attack_on_it_was_flagged(grade: str, shelf: Path) -> None:
    summary = summary_of(GRADED[grade], grade, shelf)
    found = verdict(summary)
    highest = max(found.shares["detail"], found.shares["structure"])
    assert {"exposed": highest >= HALF, "traces": TENTH <= highest < HALF, "hidden": highest < TENTH}[grade], found.shares
    assert summary.suite == "quick"
    if found.shares["class"] < TENTH:  # a judge of 600 images is no part of the plant
        assert found.grade == (grade if grade == "exposed" or not summary.flags else "not established")


REFUSED = "degenerate"
"""An audit does not measure images of one class: it refuses them."""


@pytest.mark.slow
@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag != REFUSED])
def test_an_audit_of_the_same_model_raises_the_same_flag_or_says_that_it_was_not_checked(flag: str, shelf: Path) -> None:
    run, splits, device = trained(PLANTS[flag], flag, shelf)
    parts = load_parts(run, splits, device)
    images = {"private": splits.test, "attacker": splits.auxiliary}
    report = audit(parts.model, **images, channel=parts.channel, attacks=PLANTS[flag].attacks)
    assert set(report.not_checked) == {"attention-collapsed", "noise-predictable"}
    assert {raised.flag for raised in report.flags} == {flag} - set(report.not_checked)


SHOWN_BY_PAIRS = {
    "beaten-by-mean", "metric-ceiling", "attack-not-converged", "stronger-net-worse", "more-data-worse", "mask-aware-gap",
    "neighbours-in-attacker-images",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag != REFUSED])
def test_an_audit_of_pairs_raises_the_flag_where_pairs_show_it_and_says_so_where_not(flag: str, shelf: Path) -> None:
    run, splits, device = trained(PLANTS[flag], flag, shelf)
    parts, pairs = load_parts(run, splits, device), dict[str, Any]()
    for side, prefix in ((splits.test, ""), (splits.auxiliary, "attacker_")):
        sent = on_the_wire(parts, DeviceImages(side, device), 0)
        pairs |= {f"{prefix}sent": sent, f"{prefix}images": side.images, f"{prefix}labels": side.labels}
    attacks = PLANTS[flag].attacks if flag in SHOWN_BY_PAIRS else (RIDGE,)
    report = audit(pairs=pairs, attacks=attacks)
    assert set(FLAGS) - set(report.not_checked) == SHOWN_BY_PAIRS | {REFUSED}
    assert (flag in {raised.flag for raised in report.flags}) == (flag in SHOWN_BY_PAIRS), report.flags


def test_the_page_on_flags_names_every_plant_and_nothing_else() -> None:
    page = (Path(__file__).parents[2] / "docs" / "flags.md").read_text()
    rows = [f"| `{flag}` | {plant.told} |" for flag, plant in PLANTS.items()] + [f"| none | {CLEAN.told} |"]
    table = "\n".join(["| flag | planted model |", "|---|---|", *rows])
    assert table in page, table
