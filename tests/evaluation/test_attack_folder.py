import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from splitveil.evaluation import attack_folder
from splitveil.evaluation.attack_folder import average, marked_index, mean_interval, parse_rows, sample_index
from splitveil.registry import UserError


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


def test_the_mean_of_what_was_not_measured_is_none() -> None:
    rows = {
        "some": np.array([1.0, np.nan, 0.0]),
        "none": np.array([np.nan]),
        "bits": np.array([True, True, False, True]),
    }
    assert average(rows, "some") == 0.5
    assert average(rows, "bits") == 0.75
    assert average(rows, "none") is average(rows, "absent") is None


@given(st.lists(st.floats(0, 1) | st.just(float("nan")), min_size=1, max_size=30))
def test_the_image_that_leaks_most_and_the_one_in_the_middle_are_marked(errors: list[float]) -> None:
    known = sorted(error for error in errors if error == error)
    marked = [errors[i] for i in marked_index(np.array(errors))]
    assert marked == ([known[0], known[len(known) // 2]] if known else [])


def packed(**columns: np.ndarray) -> bytes:
    data = io.BytesIO()
    np.savez_compressed(data, **columns)
    return data.getvalue()


def lying(rows: int) -> bytes:
    """Rows of which one says in its header that it has as many, and has none."""
    npy = io.BytesIO()
    np.lib.format.write_array_header_1_0(npy, {"descr": "<f4", "fortran_order": False, "shape": (rows,)})
    data = io.BytesIO(packed(ssim=np.zeros(3), psnr=np.zeros(3)))
    with zipfile.ZipFile(data, "a") as archive:
        archive.writestr("mse.npy", npy.getvalue())
    return data.getvalue()


COLUMN = np.zeros(3)
BAD_ROWS = {
    "no .npz": (b"text", "not an .npz"),
    "more than it has": (lying(2**31), "says that it has"),
    "too much": (packed(mse=np.zeros(200), ssim=np.zeros(200), psnr=np.zeros(200)), "may take"),
    "objects": (packed(mse=np.array([{}, 1, 2], object), ssim=COLUMN, psnr=COLUMN), "Python objects"),
    "no psnr": (packed(mse=COLUMN, ssim=COLUMN), "must hold one number an image"),
    "another length": (packed(mse=COLUMN, ssim=COLUMN, psnr=COLUMN[:2]), "must hold one number an image"),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_rows_that_are_not_rows_are_refused_before_they_take_memory(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, why = BAD_ROWS[bad]
    monkeypatch.setattr(attack_folder, "LARGEST_ROWS", 2000)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=why) as error:
            parse_rows(data, Path("run/attacks/ridge-0/rows.npz"))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value) and "attack the run again" in str(error.value)


def test_rows_are_read_whatever_their_names_are() -> None:
    rows = {name: np.arange(3.0) for name in ("mse", "ssim", "psnr", "of a metric of one's own")}
    found = parse_rows(packed(**rows), Path("rows.npz"))
    assert {name: values.tolist() for name, values in found.items()} == {name: [0, 1, 2] for name in rows}
