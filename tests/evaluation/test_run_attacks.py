from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from splitveil import attacks
from splitveil.attacks.mean_image import MeanImage
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.channel import Channel
from splitveil.cli.arguments import parse
from splitveil.config import from_dict
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.data.splits import Splits
from splitveil.defences import build
from splitveil.evaluation.run_attacks import (
    attack_folder,
    attack_run,
    average,
    build_attacks,
    done_before,
    mean_interval,
    observe,
    own_images,
    read_attack,
    read_rows,
    sample_index,
    score,
    weights_digest,
)
from splitveil.metrics.image import mse, psnr, ssim
from splitveil.metrics.lpips import lpips_or_why
from splitveil.registry import UserError
from splitveil.runs import Run, read_json, write_json
from splitveil.split_model import SplitModel
from splitveil.training.build import Parts
from splitveil.training.run import train_run

CPU = torch.device("cpu")


def test_the_interval_of_a_mean_is_scipys() -> None:
    values = np.random.default_rng(0).exponential(size=500)
    expected = stats.norm.interval(0.95, values.mean(), stats.sem(values))
    assert mean_interval(values) == pytest.approx(expected, rel=1e-4)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 15))
def test_the_samples_are_the_first_of_each_class_in_turn(labels: list[int], count: int) -> None:
    queues = {label: [i for i, own in enumerate(labels) if own == label] for label in sorted(set(labels))}
    expected: list[int] = []
    while any(queues.values()):
        expected += [queue.pop(0) for queue in queues.values() if queue]
    assert sample_index(np.array(labels), count).tolist() == expected[:count]


def setting() -> tuple[Parts, DeviceImages]:
    torch.manual_seed(0)
    model = SplitModel(
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)), nn.Flatten(), (2, 16, 16), (1, 16, 16)
    )
    rng = np.random.default_rng(0)
    images = ImageSet(rng.integers(0, 256, (510, 1, 16, 16), np.uint8), rng.integers(0, 3, 510), ("a", "b", "c"))
    return Parts(model, Channel([build("gaussian", sigma=0.5)]), None), DeviceImages(images, CPU)


def test_the_wire_shows_each_image_as_often_as_asked_and_in_eval_mode() -> None:
    parts, images = setting()
    batches = list(
        observe(parts.model, parts.channel, images, ThreatModel(observations=3), torch.Generator().manual_seed(0))
    )
    x, z = torch.cat([x for x, _ in batches]), torch.cat([seen.z for _, seen in batches])
    assert torch.equal(x, images.take(slice(None)))
    assert z.shape == (510, 3, 2, 16, 16)
    assert not z.requires_grad
    assert not torch.equal(z[:, 0], z[:, 1])
    with torch.no_grad():
        noise = z - parts.model.eval().edge(x).unsqueeze(1)
    assert noise.std().item() == pytest.approx(0.5, rel=0.01)
    assert all(seen.labels is None and seen.logits is None for _, seen in batches)


class Guess(attacks.Attack):
    """Answers with grey; notes how often each image was shown."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(attacks.AttackConfig(), seed=0)
        self.shape = shape

    def reconstruct(self, observation: Observation) -> Tensor:
        return torch.full((len(observation.z), *self.shape), 0.5)


def test_every_image_gets_one_row_of_its_own_figures() -> None:
    parts, images = setting()
    rows, rebuilt = score(Guess((1, 16, 16)), parts, images, 0)
    x = images.take(slice(None))
    grey = torch.full_like(x, 0.5)
    assert torch.equal(rebuilt, grey)
    for name, metric in {"mse": mse, "psnr": psnr, "ssim": ssim}.items():
        np.testing.assert_allclose(rows[name], metric(grey, x).numpy(), rtol=1e-6)
    assert rows["label"].tolist() == images.labels.tolist()
    np.testing.assert_allclose(rows["residual"], rows["residual_ceiling"], rtol=1e-4)  # grey tells no class mates apart
    assert ("lpips" in rows) == (lpips_or_why()[0] is not None)


def test_an_attack_that_gives_images_of_another_size_is_an_error() -> None:
    parts, images = setting()
    with pytest.raises(RuntimeError, match=r"Guess gave \(500, 1, 8, 8\) for images of \(500, 1, 16, 16\)"):
        score(Guess((1, 8, 8)), parts, images, 0)


def test_the_mean_of_what_was_not_measured_is_none() -> None:
    rows = {
        "some": np.array([1.0, np.nan, 0.0]),
        "none": np.array([np.nan]),
        "bits": np.array([True, True, False, True]),
    }
    assert average(rows, "some") == 0.5
    assert average(rows, "bits") == 0.75
    assert average(rows, "none") is average(rows, "absent") is None


def attacks_of(**options: Any) -> list[attacks.Attack]:
    return build_attacks(from_dict({"attacks": [{"name": "ridge"} | options]}))


def test_the_images_asked_for_stand_in_the_threat_model() -> None:
    told = [
        attack.requires.describe()["own images"]
        for asked in ("same distribution", "same set", "cifar10", "folder:~/faces")
        for attack in attacks_of(auxiliary=asked)
    ]
    assert told == ["same distribution", "same set", "other (cifar10)", "other (folder)"]
    assert attacks.build("ridge").requires.auxiliary == "same distribution"  # the class is left as it was


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auxiliary": "other"}, "auxiliary of ridge is 'other'; say which, such as cifar10"),
        ({"auxiliary": "same sett"}, "unknown auxiliary of ridge 'same sett'; did you mean 'same set'"),
        ({"auxiliary": "cifar:x"}, "unknown auxiliary of ridge 'cifar'; did you mean 'cifar10'"),
        ({"name": "deep_prior", "auxiliary": "same set"}, "deep_prior has no use for images of its own"),
    ],
)
def test_images_that_cannot_be_given_are_refused_before_anything_is_run(options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        attacks_of(**options)


@pytest.fixture
def trained(small: list[str], tmp_path: Path) -> tuple[Run, Splits]:
    run, splits, _ = train_run(tmp_path / "run", parse([*small, "--train.epochs", "1"]))
    return run, splits


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """60 colour images of 20 x 20 pixels in 3 classes, all of one grey."""
    file = tmp_path / "elsewhere.npz"
    np.savez(file, images=np.full((60, 3, 20, 20), 200, np.uint8), labels=np.arange(60) % 3)
    return file


def with_attacks(run: Run, *options: dict[str, str]) -> Run:
    return Run(run.folder, from_dict(run_table(run) | {"attacks": list(options)}))


def run_table(run: Run) -> dict[str, Any]:
    from splitveil.config import to_dict

    return to_dict(run.config)


def test_an_attack_learns_from_the_images_asked_for(
    trained: tuple[Run, Splits], elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, splits = trained
    given: list[Tensor] = []
    fit = MeanImage.fit

    def spied(self: MeanImage, access: Access) -> MeanImage:
        assert access.auxiliary is not None
        given.append(access.auxiliary.images)
        return fit(self, access)

    monkeypatch.setattr(MeanImage, "fit", spied)
    asked = {"usual": "same distribution", "audit": "same set", "far": f"npz:{elsewhere}"}
    run = with_attacks(run, *({"name": "mean_image", "label": k, "auxiliary": v} for k, v in asked.items()))
    attack_run(run, splits, CPU)
    grey = np.full((60, 1, 16, 16), 200, np.uint8)
    for images, expected in zip(given, (splits.auxiliary.images, splits.task.images, grey), strict=True):
        assert np.array_equal(images.numpy(), expected)
    facts = {label: read_json(run.folder / "attacks" / f"{label}-0" / "attack.json") for label in asked}
    assert [facts[label]["threat"]["own images"] for label in asked] == ["same distribution", "same set", "other (npz)"]
    assert [facts[label]["auxiliary_images"] for label in asked] == [200, 160, 60]
    assert facts["audit"]["auxiliary_sha256"] == splits.task.digest()
    assert read_attack(run.folder / "attacks" / "far-0")["mse"] > read_attack(run.folder / "attacks" / "usual-0")["mse"]


def test_an_attack_that_learns_from_classes_is_refused_images_of_others(
    trained: tuple[Run, Splits], elsewhere: Path
) -> None:
    run, splits = trained
    run = with_attacks(run, {"name": "class_mean", "auxiliary": f"npz:{elsewhere}"})
    with pytest.raises(UserError, match="class_mean learns from the classes of its own images, which are not those"):
        attack_run(run, splits, CPU)


def test_no_test_image_is_among_the_attackers_own(trained: tuple[Run, Splits], pictures: Path) -> None:
    _, splits = trained
    private = {image.tobytes() for image in splits.test.images}
    for asked in ("same distribution", "same set", f"npz:{pictures}"):
        assert not private & {image.tobytes() for image in own_images(asked, splits, 0).images}


def test_every_attack_is_judged_and_probed(trained: tuple[Run, Splits]) -> None:
    run, splits = trained
    run = with_attacks(run, {"name": "mean_image"}, {"name": "class_mean"})
    attack_run(run, splits, CPU)
    mean, by_class = (run.folder / "attacks" / f"{name}-0" for name in ("mean_image", "class_mean"))
    assert read_rows(mean)["recognised"].shape == (120,) and read_rows(mean)["recognised"].dtype == bool
    assert read_attack(mean)["recognised"] == pytest.approx(0.25, abs=0.01)  # one of four classes
    assert read_attack(by_class)["recognised"] == 1.0
    assert read_attack(by_class)["recognised_original"] == read_attack(mean)["recognised_original"] > 0.5
    assert read_attack(mean)["identity_cosine"] is None
    found = {folder: read_json(folder / "attack.json")["probes"]["class"] for folder in (mean, by_class)}
    assert found[by_class]["linear"] == found[by_class]["mlp"] == 1.0
    assert found[mean]["linear"] < 0.4


def test_a_folder_of_before_an_option_and_the_judges_is_still_that_of_the_attack(trained: tuple[Run, Splits]) -> None:
    run, splits = trained
    attack_run(run, splits, CPU)
    config, weights = run.config.attacks[0], weights_digest(run)
    folder = attack_folder(run, config)
    facts, rows = read_json(folder / "attack.json"), read_rows(folder)
    del facts["options"]["auxiliary"], facts["probes"]
    write_json(folder / "attack.json", facts)
    np.savez(folder / "rows.npz", **{name: rows[name] for name in ("mse", "ssim", "psnr")})  # type: ignore[arg-type]
    assert done_before(folder, config, weights)
    assert read_attack(folder)["recognised"] is None
    write_json(folder / "attack.json", facts | {"options": facts["options"] | {"auxiliary": "same set"}})
    assert not done_before(folder, config, weights)
