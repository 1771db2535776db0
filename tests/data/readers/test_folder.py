import io
import os
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splitveil.data.readers.folder import FORMATS, MOST_PIXELS
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


def test_val_stands_in_for_test(tmp_path: Path):
    for part in ("train", "val"):
        picture(tmp_path / part / "a" / "1.png", (0, 0, 255) if part == "val" else (255, 0, 0))
    source = make(tmp_path)
    assert source.test is not None and source.test.images[0, :, 8, 8].tolist() == [0, 0, 255]
    picture(tmp_path / "test" / "a" / "1.png", (0, 255, 0))
    assert make(tmp_path).test.images[0, :, 8, 8].tolist() == [0, 255, 0]


def test_a_class_may_be_called_train(tmp_path: Path):
    picture(tmp_path / "train" / "1.png")
    picture(tmp_path / "plane" / "1.png")
    assert make(tmp_path).train.classes == ("plane", "train")


@pytest.mark.parametrize(("name", "mode", "saving"), [
    ("x.jpg", "RGB", {"quality": 95}),
    ("x.png", "RGBA", {}),
    ("x.png", "P", {"transparency": b"\x00\x10"}),
    ("x.bmp", "RGB", {}),
    ("x.webp", "RGB", {"lossless": True}),
    ("x.tif", "CMYK", {}),
    ("x.ppm", "RGB", {}),
    ("without_ending", "RGB", {"format": "PNG"}),
])  # fmt: skip
def test_every_format_gives_the_same_colours(name: str, mode: str, saving: dict, tmp_path: Path):
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
@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "tif", "bmp", "ppm"])
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


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("name", ["x.eps", "x.png"])
def test_postscript_is_refused_and_no_interpreter_is_started(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # Pillow looks for the interpreter once
    (tmp_path / "set" / "a").mkdir(parents=True)
    (tmp_path / "set" / "a" / name).write_bytes(POSTSCRIPT)
    with pytest.raises(UserError, match=r"is not a readable image .*; convert it to PNG, or remove it"):
        make(tmp_path / "set")
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("form", ["GIF", "ICO", "PCX", "TGA", "PDF"])
def test_a_format_outside_the_list_is_refused(form: str, tmp_path: Path):
    picture(tmp_path / "a" / "x.png", format=form)
    with pytest.raises(UserError, match="it is none of PNG, JPEG, BMP, WEBP, PPM, TIFF"):
        make(tmp_path)


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels, and has none."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [8193, 12_000, 60_000, 2**31 - 1])
def test_more_pixels_than_the_budget_are_refused_by_the_header(side: int, tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(png_header(side, side))
    with pytest.raises(
        UserError, match=rf"has ({side} x {side}|more than {MOST_PIXELS:,}) pixels, may have {MOST_PIXELS:,}; make"
    ):
        make(tmp_path)


def test_the_largest_picture_within_the_budget_is_read(tmp_path: Path):
    (tmp_path / "a").mkdir()
    Image.new("1", (8192, 8192), 1).save(tmp_path / "a" / "x.png")
    assert (make(tmp_path, grey=True).train.images == 255).all()


def test_a_set_beyond_its_budget_is_refused_before_a_picture_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a").mkdir()
    for i in range(3):
        (tmp_path / "a" / f"{i}.png").write_bytes(b"never read")
    monkeypatch.setenv("SPLITVEIL_MAX_GIB", "0.001")
    with pytest.raises(UserError, match=r"3 images of 1024 x 1024 pixels would take 9\.4 MB .* 1\.1 MB; lower size"):
        make(tmp_path, size=1024)


@pytest.mark.timeout(10)
def test_a_pipe_among_the_images_is_refused(tmp_path: Path):
    picture(tmp_path / "a" / "x.png")
    os.mkfifo(tmp_path / "a" / "y.png")
    with pytest.raises(UserError, match=r"y\.png is a pipe"):
        make(tmp_path)


def test_an_image_file_of_a_terabyte_is_refused(tmp_path: Path):
    picture(tmp_path / "a" / "x.webp")  # Pillow reads a whole WebP before it knows its size
    with open(tmp_path / "a" / "x.webp", "ab") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match=r"x\.webp has 1\.1 TB"):
        make(tmp_path)


def outcome(path: Path) -> str:
    try:
        return str(make(path).train.images.shape)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("form", FORMATS)
def test_whatever_is_in_a_file_it_is_read_or_refused_in_one_line(form: str, tmp_path: Path):
    """120 files a format in which some bytes were changed, cut off or doubled."""
    rng, made = random.Random(form), io.BytesIO()
    Image.effect_noise((24, 20), 60).convert("RGB").save(made, form)
    (tmp_path / "a").mkdir()
    for _ in range(120):
        damaged = bytearray(made.getvalue())
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(min(len(damaged), 200))] = rng.randrange(256)
        if rng.random() < 0.3:
            at = rng.randrange(len(damaged))
            damaged[at:] = damaged[at:] * 2 if rng.random() < 0.5 else b""
        (tmp_path / "a" / "x").write_bytes(damaged)
        assert outcome(tmp_path).count("\n") == 0
