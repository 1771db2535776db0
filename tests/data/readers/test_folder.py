from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splitveil.registry import DATASETS, UserError


def picture(file: Path, colour=(200, 100, 50), size=(20, 20), mode="RGB", **saving) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(file, **saving)


def make(path: Path, size: int = 16, grey: bool = False, identities: bool = False):
    return DATASETS["folder"].make(path=str(path), size=size, grey=grey, identities=identities)


def test_folders_are_classes_in_sorted_order(tmp_path: Path):
    picture(tmp_path / "zoe" / "1.png", (255, 0, 0))
    picture(tmp_path / "ann" / "b.png", (0, 255, 0))
    picture(tmp_path / "ann" / "a.png", (0, 0, 255))
    source = make(tmp_path)
    assert source.train.classes == ("ann", "zoe")
    assert source.train.labels.tolist() == [0, 0, 1]
    assert source.train.images[:, :, 8, 8].tolist() == [[0, 0, 255], [0, 255, 0], [255, 0, 0]]
    assert source.test is None
    assert source.train.identities is None


def test_train_and_test_folders_are_parts(tmp_path: Path):
    picture(tmp_path / "train" / "a" / "1.png")
    picture(tmp_path / "train" / "b" / "1.png")
    picture(tmp_path / "test" / "b" / "1.png")
    source = make(tmp_path, identities=True)
    assert source.train.classes == source.test.classes == ("a", "b")
    assert source.test.labels.tolist() == source.test.identities.tolist() == [1]
    assert source.train.identities.tolist() == [0, 1]


def test_a_class_may_be_called_train(tmp_path: Path):
    picture(tmp_path / "train" / "1.png")
    picture(tmp_path / "plane" / "1.png")
    assert make(tmp_path).train.classes == ("plane", "train")


@pytest.mark.parametrize(("name", "mode", "saving"), [
    ("x.jpg", "RGB", {"quality": 95}),
    ("x.png", "RGBA", {}),
    ("x.png", "P", {"transparency": b"\x00\x10"}),
    ("x.gif", "P", {}),
    ("x.bmp", "RGB", {}),
    ("x.webp", "RGB", {"lossless": True}),
    ("x.tif", "CMYK", {}),
    ("x.ppm", "RGB", {}),
    ("without_ending", "RGB", {"format": "PNG"}),
])  # fmt: skip
def test_any_format_gives_the_same_colours(name: str, mode: str, saving: dict, tmp_path: Path):
    picture(tmp_path / "a" / name, (204, 102, 51), mode=mode, **saving)
    pixel = make(tmp_path).train.images[0, :, 8, 8].astype(int)
    assert np.abs(pixel - [204, 102, 51]).max() <= 3


@pytest.mark.parametrize("mode", ["L", "1", "RGB"])
def test_grey_has_one_channel_and_colour_three(mode: str, tmp_path: Path):
    picture(tmp_path / "a" / "x.png", (255, 255, 255), mode=mode)
    assert make(tmp_path, grey=True).train.shape == (1, 16, 16)
    assert make(tmp_path).train.images.min() == 255


def test_the_centre_is_cut_out_before_resizing(tmp_path: Path):
    wide = np.zeros((16, 48, 3), np.uint8)
    wide[:, 16:32] = 255
    (tmp_path / "a").mkdir()
    Image.fromarray(wide).save(tmp_path / "a" / "wide.png")
    Image.fromarray(wide.transpose(1, 0, 2)).save(tmp_path / "a" / "tall.png")
    assert (make(tmp_path).train.images == 255).all()


def test_photos_are_turned_upright(tmp_path: Path):
    lying = np.zeros((20, 20, 3), np.uint8)
    lying[:, :10] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn clockwise, so the left side comes to the top
    (tmp_path / "a").mkdir()
    Image.fromarray(lying).save(tmp_path / "a" / "x.png", exif=exif)
    image = make(tmp_path).train.images[0, 0]
    assert image[2].min() > 250
    assert image[-3].max() < 5


def test_hidden_files_and_folders_are_skipped(tmp_path: Path):
    picture(tmp_path / "a" / "x.png")
    picture(tmp_path / ".cache" / "x.png")
    (tmp_path / "a" / ".DS_Store").write_bytes(b"\0")
    (tmp_path / "README.txt").write_text("beside the classes")
    assert len(make(tmp_path).train) == 1


@pytest.mark.parametrize("damage", [lambda data: data[:60], lambda data: b"text", lambda data: b""])
@pytest.mark.parametrize("ending", ["png", "jpg", "gif"])
def test_a_broken_image_is_named(damage, ending: str, tmp_path: Path):
    picture(tmp_path / "a" / "fine.png")
    broken = tmp_path / "a" / f"broken.{ending}"
    picture(broken)
    broken.write_bytes(damage(broken.read_bytes()))
    with pytest.raises(UserError, match="is not a readable image") as error:
        make(tmp_path)
    assert str(broken) in str(error.value)
    assert "\n" not in str(error.value)


def test_16_bit_images_are_refused_instead_of_clipped(tmp_path: Path):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((20, 20), 40_000, np.uint16)).save(tmp_path / "a" / "x.png")
    with pytest.raises(UserError, match="must have 8 bits"):
        make(tmp_path)


def test_an_empty_class_is_named(tmp_path: Path):
    picture(tmp_path / "a" / "x.png")
    (tmp_path / "b").mkdir()
    with pytest.raises(UserError, match="b is a class without images"):
        make(tmp_path)


def test_a_folder_within_a_class_is_named(tmp_path: Path):
    picture(tmp_path / "a" / "x.png")
    picture(tmp_path / "a" / "more" / "x.png")
    with pytest.raises(UserError, match="more is a folder within a class"):
        make(tmp_path)


def test_a_class_only_in_test_is_refused(tmp_path: Path):
    picture(tmp_path / "train" / "a" / "x.png")
    picture(tmp_path / "test" / "b" / "x.png")
    with pytest.raises(UserError, match="b is a class that train/ does not have"):
        make(tmp_path)


def test_a_folder_without_classes_is_refused(tmp_path: Path):
    picture(tmp_path / "x.png")
    with pytest.raises(UserError, match="has no class folders"):
        make(tmp_path)


@pytest.mark.parametrize("path", ["", "/nowhere"])
def test_a_missing_folder_is_asked_for(path: str):
    with pytest.raises(UserError, match="is not a folder; set path"):
        DATASETS["folder"].make(path=path)
