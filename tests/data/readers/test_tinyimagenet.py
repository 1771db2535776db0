import os
from pathlib import Path

import pytest
from PIL import Image

from splitveil.registry import DATASETS, UserError

WNIDS = ("n02124075", "n01443537", "n00000003")


def picture(file: Path, level: int, mode: str = "RGB") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (64, 64), level).convert(mode).save(file)


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """Three classes with two training images each, and three test images, in the official layout."""
    root = tmp_path / "tiny-imagenet-200"
    for label, wnid in enumerate(WNIDS):
        for i in range(2):
            picture(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", 100 * label, "L" if i else "RGB")
    lines = []
    for i, label in enumerate((2, 0, 1)):
        picture(root / "val" / "images" / f"val_{i}.JPEG", 100 * label)
        lines.append(f"val_{i}.JPEG\t{WNIDS[label]}\t0\t32\t44\t62\n")
    picture(root / "test" / "images" / "test_0.JPEG", 0)
    (root / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    return root


def make(path: Path):
    return DATASETS["tinyimagenet"].make(path=str(path))


@pytest.mark.parametrize("inside", [True, False])
def test_classes_are_numbered_as_in_wnids_and_val_is_the_test(official: Path, inside: bool):
    source = make(official if inside else official.parent)
    assert source.train.classes == WNIDS
    assert source.train.images.shape == (6, 3, 64, 64)
    assert source.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert source.test.labels.tolist() == [2, 0, 1]
    assert source.test.images[:, 0, 0, 0].tolist() == [200, 0, 100]
    assert source.train.images[:, 2, 5, 5].tolist() == [0, 0, 100, 100, 200, 200]


def test_windows_line_ends_do_not_matter(official: Path):
    for file in (official / "wnids.txt", official / "val" / "val_annotations.txt"):
        file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert make(official).test.labels.tolist() == [2, 0, 1]


def test_a_missing_class_folder_is_named(official: Path):
    (official / "train" / WNIDS[1]).rename(official / "elsewhere")
    with pytest.raises(UserError, match=f"{WNIDS[1]}/images is missing"):
        make(official)


@pytest.mark.parametrize("line", ["val_0.JPEG\tn99\t0\t0\t1\t1", "val_0.JPEG"])
def test_an_annotation_of_no_class_is_named_with_its_line(official: Path, line: str):
    file = official / "val" / "val_annotations.txt"
    file.write_text(file.read_text() + line)
    with pytest.raises(UserError, match=r"val_annotations.txt line 4: class '(n99)?' is not in wnids"):
        make(official)


def test_missing_annotations_are_named(official: Path):
    (official / "val" / "val_annotations.txt").unlink()
    with pytest.raises(UserError, match=r"val_annotations.txt cannot be read"):
        make(official)


def test_a_broken_or_missing_image_is_named(official: Path):
    (official / "val" / "images" / "val_1.JPEG").unlink()
    with pytest.raises(UserError, match=r"val_1.JPEG cannot be read"):
        make(official)


def test_the_real_set_has_its_images():
    if not (Path(os.environ.get("SPLITVEIL_DATA", "")) / "tiny-imagenet-200" / "wnids.txt").is_file():
        pytest.skip("no tiny-imagenet-200 in $SPLITVEIL_DATA")
    source = DATASETS["tinyimagenet"].make()
    assert (len(source.train), len(source.test), len(source.train.classes)) == (100_000, 10_000, 200)
