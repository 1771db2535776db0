from math import log2
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from splitveil import metrics
from splitveil.cli.arguments import parse
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.defences import Batch, Defence, build
from splitveil.evaluation.attack_folder import read_rows
from splitveil.evaluation.evaluate import ceiling_mse, collapse_of, evaluate_run, wilson
from splitveil.evaluation.run_attacks import attack_run
from splitveil.evaluation.summary import read_summary
from splitveil.registry import UserError
from splitveil.report import write_report
from splitveil.runs import read_json
from splitveil.training.train_runs import train_run


@given(st.integers(1, 20_000).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_the_wilson_interval_is_scipys(counts: tuple[int, int]) -> None:
    correct, total = counts
    expected = stats.binomtest(correct, total).proportion_ci(0.95, method="wilson")
    low, high = wilson(correct, total)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-4)
    assert -1e-12 <= low < high <= 1 + 1e-12


def test_the_ceiling_is_the_error_of_the_mean_of_the_attackers_images() -> None:
    rng = np.random.default_rng(0)
    auxiliary, test = (rng.integers(0, 256, (n, 1, 4, 4), dtype=np.uint8) for n in (12, 9))
    parts = [
        DeviceImages(ImageSet(part, np.arange(len(part)) % 3, tuple("abc")), torch.device("cpu")) for part in (auxiliary, test)
    ]
    assert ceiling_mse(*parts) == pytest.approx(np.square(test / 255 - auxiliary.mean(0) / 255).mean(), rel=1e-5)


class Pull(Defence):
    """Leaves z as it is and asks for a penalty."""

    def __init__(self, strength: float, on: str = "z") -> None:
        super().__init__()
        self.strength, self.on = strength, on

    def penalty(self, batch: Batch) -> Tensor | None:
        return self.strength * getattr(batch, self.on).square().mean()


class Silent(Defence):
    def penalty(self, batch: Batch) -> Tensor | None:
        return torch.ones(())


@pytest.mark.parametrize(
    ("defence", "expected"),
    [
        (Defence(), False), (build("none"), False), (build("gaussian"), True), (build("bottleneck"), True),
        (Pull(1.0), True), (Pull(1.0, on="sent"), True), (Pull(0.0), False), (Pull(1.0, on="x"), False), (Silent(), False),
    ],
    ids=["base", "none", "gaussian", "bottleneck", "pull", "pull on what is sent", "no pull", "pull on x", "constant"],
)  # fmt: skip
def test_a_defence_acts_if_it_changes_z_or_the_architecture_or_pulls_on_z(defence: Defence, expected: bool) -> None:
    x, z, y = torch.rand(8, 1, 16, 16), torch.randn(8, 2, 16, 16), torch.arange(8) % 3
    with torch.no_grad():
        assert defence.acts(Batch(x, z, z.clone(), y), torch.Generator()) == expected


def test_a_share_of_none_or_all_ends_at_0_or_1_exactly() -> None:
    assert wilson(0, 60)[0] == 0.0
    assert wilson(60, 60)[1] == 1.0


def test_test_images_that_are_the_attacker_s_mean_are_refused() -> None:
    grey = ImageSet(np.full((6, 1, 8, 8), 77, np.uint8), np.zeros(6, np.int64), ("only",))
    with pytest.raises(UserError, match="nothing is left to rebuild; use images that differ"):
        ceiling_mse(DeviceImages(grey, torch.device("cpu")), DeviceImages(grey, torch.device("cpu")))


def test_the_collapse_is_read_from_the_epochs_in_which_cem_acted() -> None:
    warmup = {"epoch": 0, "loss": 1.0}
    acted = [{"cem_loss": 1.0, "cem_loss_uniform": 2.0, "cem_collapsed": share} for share in (0.2, 0.8)]
    assert collapse_of([]) == collapse_of([warmup]) == ([], None)
    assert collapse_of([warmup, *acted]) == ([0.2, 0.8], 0.5)
    assert collapse_of([{"cem_loss": 1.0, "cem_loss_uniform": 1.0}]) == ([], 1.0)  # a surrogate without attention
    assert collapse_of([{"cem_loss": 0.0, "cem_loss_uniform": 0.0}]) == ([], None)  # all below tau


def test_a_run_whose_attention_collapsed_is_flagged(small: list[str], tmp_path: Path) -> None:
    run, splits, device = train_run(tmp_path, parse(small))
    attack_run(run, splits, device)

    def flags() -> set[str]:
        return set(evaluate_run(run, splits, device).flag_names)

    assert not flags() & {"attention-collapsed", "defence-inactive"}
    lines = run.metrics()
    run.drop_metrics_from(0)
    for line in lines:
        collapsed = {"cem_collapsed": 0.9, "cem_loss": 0.001 * line["cem_loss_uniform"]} if line["epoch"] else {}
        run.append_metrics(line | collapsed)
    assert flags() >= {"attention-collapsed", "defence-inactive"}


def test_the_summary_has_what_each_defence_reports_of_what_was_sent(small: list[str], tmp_path: Path) -> None:
    stack = ["--defences", "bottleneck,local_dp", "--defences.1.epsilon", "20", "--train.epochs", "1"]
    plain = [flag for flag in small if flag not in ("--defences.1.sigma", "0.1")]
    run, splits, device = train_run(tmp_path, parse([*plain, *stack]))
    attack_run(run, splits, device)
    summary = evaluate_run(run, splits, device)
    assert summary.defences == ("bottleneck", "local_dp")
    first, second = summary.reports
    assert first == {}
    assert second["guarantees"][0]["epsilon"] == pytest.approx(20)
    assert second["sigma"] == pytest.approx(summary.sigma)
    assert 0 <= second["clipping_rate"] <= 1
    # sum_d log(1 + v_d / sigma^2) <= sum_d v_d / sigma^2 <= (bound / sigma)^2, but for m / (m - 1) in the sample variance
    assert 0 < (summary.bits or 0) < 1.1 * second["guarantees"][0]["bits"]
    assert read_summary(run.folder) == summary


def test_a_finite_code_has_its_bits_its_certificates_and_what_the_edge_reaches_alone(small: list[str], tmp_path: Path) -> None:
    stack = [
        "--defences",
        "bottleneck,finite_code",
        "--defences.1.levels",
        "2",
        "3",
        "--train.epochs",
        "1",
        "--cem.surrogate",
        "none",
    ]
    plain = [flag for flag in small if flag not in ("--defences.1.sigma", "0.1")]
    run, splits, device = train_run(tmp_path, parse([*plain, *stack, "--attacks", "mean_image,code_mean"]))
    attack_run(run, splits, device)
    summary = evaluate_run(run, splits, device)
    assert summary.bits == pytest.approx(log2(6))
    bounds = {(row.unit, row.holds_for): row.value for row in summary.certificates}
    assert bounds.keys() == {("bits", 1), ("bits", 16), ("MSE", 1), ("MSE", 16)}
    assert 0 < bounds["MSE", 16] <= summary.attacks["code_mean"].mse
    assert "bound-violated" not in summary.flag_names
    assert summary.edge_alone is not None and summary.edge_alone.images == len(splits.task)
    assert summary.latency is not None and summary.latency.milliseconds > 0


def test_the_summary_says_what_judge_and_probes_found_and_what_an_old_folder_lacks(small: list[str], tmp_path: Path) -> None:
    run, splits, device = train_run(tmp_path, parse([*small, "--train.epochs", "1"]))
    attack_run(run, splits, device)
    summary = evaluate_run(run, splits, device)
    assert 0.5 < (summary.recognised_original or 0) <= 1
    assert summary.no_judge is None
    assert summary.probes.keys() == {"class"}
    assert summary.probes["class"].keys() == {"majority", "linear", "mlp"}
    assert summary.probes["class"]["linear"] > summary.probes["class"]["majority"] + 0.2
    assert summary.attacks["mean_image"].probes["class"]["linear"] < 0.4
    file = run.folder / "attacks" / "mean_image-0" / "rows.npz"
    with np.load(file) as rows:
        old = {name: rows[name] for name in ("mse", "psnr", "ssim", "label")}
    np.savez(file, **old)  # type: ignore[arg-type]
    (run.folder / "manifest.json").unlink()  # there was none either
    before = evaluate_run(run, splits, device)
    assert before.recognised_original is before.attacks["mean_image"].recognised is None
    assert "no judge was asked when these attacks were run" in (before.no_judge or "")
    assert before.attacks["mean_image"].mse == summary.attacks["mean_image"].mse


def test_a_new_metric_is_measured_summed_up_and_shown_because_it_is_registered(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PER_IMAGE", dict(metrics.per_image_metrics()))

    @metrics.per_image("worst_pixel", higher_hides=True, equal=0.0, unit="of 255")
    def worst_pixel(rebuilt: Tensor, x: Tensor) -> Tensor:
        return 255 * (rebuilt - x).abs().flatten(1).amax(1)

    run, splits, device = train_run(tmp_path / "run", parse(small))
    attack_run(run, splits, device)
    evaluate_run(run, splits, device)
    rows = read_rows(run.folder / "attacks" / f"mean_image-{run.config.seed}")
    found = read_json(run.folder / "summary.json")["attacks"]["mean_image"]["more"]
    assert rows["worst_pixel"].shape == (120,)
    assert found["worst_pixel"] == pytest.approx(rows["worst_pixel"].mean())
    page = write_report([run.folder], tmp_path / "report.html").read_text(encoding="utf-8")
    _, _, table = page.partition("<h3>Further metrics</h3>")
    title = "worst_pixel, of 255 (high: less leaked)"
    assert f'<th scope="col" class="n">{title}</th>' in table
    assert f'<td class="n" data-label="{title}">{found["worst_pixel"]:.3g}</td>' in table


def test_where_the_attacker_has_test_images_accuracy_is_measured_on_all_of_them(small: list[str], tmp_path: Path) -> None:
    layout = ["--splits.attacker", "test", "--splits.validation", "0", "--splits.auxiliary", "0.75", "--attacks", "mean_image"]
    run, splits, device = train_run(tmp_path / "run", parse([*small, *layout]))
    attack_run(run, splits, device)
    summary = evaluate_run(run, splits, device)
    whole = len(splits.auxiliary) + len(splits.test)
    assert summary.n_test == whole == len(splits.validation)
    assert summary.attacks["mean_image"].n_images == len(splits.test) == whole // 4
    assert summary.attacks["mean_image"].auxiliary_images == len(splits.auxiliary)
    assert summary.layout == "test"
    assert abs(summary.accuracy - run.last_metrics()["accuracy"]) < 0.2  # the same images under other noise
