import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from splitveil.evaluation.attack_folder import average, marked_index, mean_interval, sample_index


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
