import time
from pathlib import Path

import numpy as np
import pytest

from splitveil.data.bundled.make import first_of_each_class
from splitveil.data.readers import fashion
from splitveil.registry import DATASETS, UserError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def test_the_bundled_set_has_its_12000_images_in_balance():
    source = DATASETS["fashion"].make()
    assert source.train.images.shape == (10_000, 1, 32, 32)
    assert source.test.images.shape == (2_000, 1, 32, 32)
    assert (np.bincount(source.train.labels) == 1000).all()
    assert (np.bincount(source.test.labels) == 200).all()
    assert (np.bincount(source.train.labels[:500]) == 50).all()
    assert len(source.train.classes) == 10


def test_the_padding_is_zero_and_the_images_are_not():
    images = DATASETS["fashion"].make().test.images
    border = np.ones((32, 32), bool)
    border[2:30, 2:30] = False
    assert not images[..., border].any()
    assert images[..., ~border].reshape(len(images), -1).any(axis=1).all()


def test_decoding_takes_less_than_a_second_of_cpu():
    packed = (Path(fashion.__file__).parents[1] / "bundled" / "fashion.xz").read_bytes()
    assert len(packed) < 5_000_000
    start = time.process_time()
    fashion.decode(packed)
    assert time.process_time() - start < 1


def test_other_pixels_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fashion, "PIXELS_SHA256", "0" * 64)
    with pytest.raises(UserError, match=r"sha256.*reinstall splitveil"):
        DATASETS["fashion"].make()


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs the Debian package dataset-fashion-mnist")
def test_the_bundled_set_is_the_first_images_of_each_official_class():
    source = DATASETS["fashion"].make()
    official = first_of_each_class(DEBIAN, "t10k", 200).transpose(0, 2, 1)
    for label in range(10):
        ours = source.test.images[source.test.labels == label, 0, 2:30, 2:30]
        np.testing.assert_array_equal(ours, official[200 * label : 200 * (label + 1)])
