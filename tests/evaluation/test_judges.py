from pathlib import Path

import numpy as np
import pytest
import torch

from splitveil.data import ImageSet
from splitveil.data.splits import Splits
from splitveil.evaluation.attack_folder import JUDGED
from splitveil.evaluation.judge_network import Judge
from splitveil.evaluation.judges import SHELF, Panel, attributes, why_no_classes

CPU = torch.device("cpu")


def people(n: int, first: int, seed: int, named: bool = True) -> ImageSet:
    """Images of 8 x 8 of 6 people in 2 classes: a noisy copy of the person's pattern, brighter in the second class."""
    rng, who = np.random.default_rng(seed), np.arange(n) % 6 + first
    patterns = np.random.default_rng(9).integers(0, 150, (20, 1, 8, 8))
    labels = rng.integers(0, 2, n)
    images = patterns[who] + 60 * labels[:, None, None, None] + rng.integers(0, 20, (n, 1, 8, 8))
    return ImageSet(images.astype(np.uint8), labels, ("dark", "bright"), who.astype(np.int64) if named else None)


def parts(named: bool = True) -> Splits:
    """The attacker knows other people than those of the test images."""
    task, validation, test = (people(60, 6, seed, named) for seed in (1, 2, 3))
    return Splits(task, validation, people(600, 0, 4, named), test)


@pytest.fixture(scope="module")
def panel(tmp_path_factory: pytest.TempPathFactory) -> Panel:
    return Panel(parts(), CPU, 0, tmp_path_factory.mktemp("runs") / SHELF)


def originals() -> torch.Tensor:
    return torch.from_numpy(parts().test.images).float() / 255


def test_of_the_images_themselves_a_panel_says_what_it_says_of_originals(panel: Panel) -> None:
    rows = panel.rows(originals())
    assert rows.keys() == set(JUDGED)
    assert all(values.shape == (60,) for values in rows.values())
    assert rows["recognised"].double().mean() > 0.8
    assert torch.equal(rows["recognised"], rows["recognised_original"])
    assert torch.equal(rows["same_identity"], rows["same_identity_original"])
    assert rows["identity_cosine"].min() > 0.999
    assert rows["same_image"].mean() > 0.9
    assert rows["identity_others"].mean() < 0.8


def test_of_grey_images_a_panel_says_that_nobody_is_there(panel: Panel) -> None:
    rows = panel.rows(torch.full((60, 1, 8, 8), 0.5))
    assert rows["recognised"].double().mean() == pytest.approx(0.5, abs=0.2)  # all in one class
    assert rows["same_image"].sum() == 1
    assert rows["identity_cosine"].mean() < 0.8
    assert rows["recognised_original"].double().mean() > 0.8


def test_a_judge_is_trained_once_for_the_same_images_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Panel(parts(named=False), CPU, 0, tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("classifier-") and file.suffix == ".safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(Judge, "fit", lambda *args: pytest.fail("it has been trained before"))
        again = Panel(parts(named=False), CPU, 0, tmp_path)
    noisy = (originals() + 0.2 * torch.randn(60, 1, 8, 8)).clamp(0, 1)
    assert torch.equal(again.rows(noisy)["recognised"], first.rows(noisy)["recognised"])
    Panel(parts(named=False), CPU, 1, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_other_images_have_another_judge(tmp_path: Path) -> None:
    splits = parts(named=False)
    Panel(splits, CPU, 0, tmp_path)
    Panel(Splits(splits.task, splits.validation, splits.auxiliary.take(np.arange(300)), splits.test), CPU, 0, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_without_people_only_classes_are_judged_and_with_other_classes_only_people(tmp_path: Path) -> None:
    nobody = parts(named=False)
    assert Panel(nobody, CPU, 0, tmp_path).rows(originals()).keys() == {"recognised", "recognised_original"}
    assert why_no_classes(nobody) is None
    other = people(60, 0, 4)
    other = ImageSet(other.images, other.labels, ("small", "large"), other.identities)
    splits = Splits(nobody.task, nobody.validation, other, parts().test)
    assert "of other classes than the test images" in (why_no_classes(splits) or "")
    assert Panel(splits, CPU, 0, tmp_path).rows(originals()).keys() == set(JUDGED) - {
        "recognised",
        "recognised_original",
    }


def test_an_attacker_who_has_one_class_teaches_no_judge(tmp_path: Path) -> None:
    splits = parts(named=False)
    one = splits.auxiliary.take(np.flatnonzero(splits.auxiliary.labels == 0))
    splits = Splits(splits.task, splits.validation, one, splits.test)
    assert "all of one class" in (why_no_classes(splits) or "")
    assert Panel(splits, CPU, 0, tmp_path).rows(originals()) == {}


def test_who_is_on_an_image_is_an_attribute_where_the_class_does_not_say_it() -> None:
    part = people(30, 3, 0)
    assert part.identities is not None
    found = attributes(part)
    assert found.keys() == {"class", "identity"}
    assert found["identity"].tolist() == (part.identities - 3).tolist()
    same = ImageSet(part.images, 5 - (part.identities - 3), tuple("abcdef"), part.identities)
    assert attributes(same).keys() == {"class"}
    assert attributes(people(30, 3, 0, named=False)).keys() == {"class"}
