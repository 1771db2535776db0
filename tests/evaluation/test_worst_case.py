import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from summaries import summary

from splitveil.evaluation.summary import Summary
from splitveil.evaluation.worst_case import bootstrap, over_seeds, over_targets, worst_case

NAN = float("nan")


def rows(*mse: float) -> dict[str, np.ndarray]:
    values = np.array(mse)
    return {"mse": values, "ssim": 1 - values, "psnr": -10 * np.log10(values)}


def mean(drawn: np.ndarray) -> np.ndarray:
    return drawn.mean(1)


def test_each_image_counts_with_its_best_reconstruction() -> None:
    found = worst_case({"a": rows(0.1, 0.4, 0.3), "b": rows(0.2, 0.2, 0.6)})
    assert found is not None
    assert found.mse == pytest.approx((0.1 + 0.2 + 0.3) / 3)
    assert found.ssim == pytest.approx((0.9 + 0.8 + 0.7) / 3)
    assert found.psnr == pytest.approx(-10 * np.log10([0.1, 0.2, 0.3]).mean())
    assert found.lowest == pytest.approx({"a": 2 / 3, "b": 1 / 3})
    assert found.mse_q05 == pytest.approx(0.11)  # a twentieth of the way from the first to the last
    assert found.ssim_q95 == pytest.approx(0.89)
    assert found.n_images == 3


@settings(deadline=None)  # a thousand resamplings for each of three metrics
@given(st.lists(st.lists(st.floats(1e-6, 1), min_size=5, max_size=5), min_size=1, max_size=4))
def test_the_worst_case_is_at_least_as_bad_as_every_attack(errors: list[list[float]]) -> None:
    found = worst_case({str(i): rows(*values) for i, values in enumerate(errors)})
    assert found is not None
    assert found.mse <= min(np.mean(values) for values in errors) + 1e-12
    assert found.mse_q05 <= found.mse + 1e-12
    assert sum(found.lowest.values()) == pytest.approx(1)


def test_an_attack_that_diverged_hides_nothing() -> None:
    found = worst_case({"broken": rows(NAN, NAN), "half": rows(NAN, 0.1), "whole": rows(0.3, 0.2)})
    assert found is not None
    assert found.attacks == ("half", "whole")
    assert found.mse == pytest.approx(0.2)
    assert worst_case({"broken": rows(NAN)}) is None
    assert worst_case({}) is None


def test_the_bootstrap_of_a_mean_is_close_to_scipys_and_seeded() -> None:
    values = np.random.default_rng(0).exponential(size=400)
    ours = bootstrap(values, mean, seed=1)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=2000, rng=0).confidence_interval
    assert ours == pytest.approx((theirs.low, theirs.high), rel=0.02)
    assert bootstrap(values, mean, seed=1) == ours != bootstrap(values, mean, seed=2)


def test_chunks_do_not_change_how_many_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def count(drawn: np.ndarray) -> np.ndarray:
        counted.append(len(drawn))
        return drawn.mean(1)

    monkeypatch.setattr("splitveil.evaluation.worst_case.CHUNK", 3 * 400)
    bootstrap(np.arange(400.0), count, draws=10)
    assert counted == [3, 3, 3, 1]


def test_attackers_are_averaged_inside_a_target_and_targets_are_resampled() -> None:
    centre, (low, high) = over_targets([[1.0, 3.0], [4.0], [6.0]])
    assert centre == pytest.approx(4.0)
    assert (low, high) == (2.0, 6.0)  # three targets: one alone is drawn three times in 1 of 27


def test_runs_of_several_seeds_have_an_interval_over_seeds_and_one_has_none() -> None:
    def run(weights: str, mse: float) -> Summary:
        return summary(weights_sha256=weights, worst_case=worst_case({"a": rows(mse)}))

    assert over_seeds([run("a", 0.1)]) is None
    assert over_seeds([run("a", 0.1), run("a", 0.3), summary(weights_sha256="old")]) is None
    spread = over_seeds([run("a", 0.1), run("a", 0.3), run("b", 0.4)])
    assert spread is not None
    assert spread[0] == 2
    assert spread[1] == pytest.approx(0.3)
    assert spread[2] == pytest.approx((0.2, 0.4))
