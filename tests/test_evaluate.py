import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from splitveil import attacks
from splitveil.arguments import parse
from splitveil.build import Parts
from splitveil.channel import Channel
from splitveil.commands import train_run
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.defences import Batch, Defence, build
from splitveil.evaluate import (
    acts,
    attack_run,
    collapse_of,
    evaluate_run,
    mean_interval,
    observe,
    sample_index,
    score,
    wilson,
)
from splitveil.metrics.image import mse, psnr, ssim
from splitveil.metrics.lpips import lpips_or_why
from splitveil.split import SplitModel
from splitveil.threat import Observation, ThreatModel

CPU = torch.device("cpu")


@given(st.integers(1, 20_000).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_the_wilson_interval_is_scipys(counts: tuple[int, int]) -> None:
    correct, total = counts
    expected = stats.binomtest(correct, total).proportion_ci(0.95, method="wilson")
    low, high = wilson(correct, total)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-4)
    assert -1e-12 <= low < high <= 1 + 1e-12


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
        super().__init__(seed=0)
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
    parts, images = setting()
    x = images.take(slice(0, 8))
    with torch.no_grad():
        z = parts.model.edge(x)
        assert acts(defence, Batch(x, z, z.clone(), images.labels[:8]), torch.Generator()) == expected


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
        return {flag["flag"] for flag in evaluate_run(run, splits, device)["flags"]}

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
    assert summary["defences"] == ["bottleneck", "local_dp"]
    first, second = summary["reports"]
    assert first == {}
    assert second["guarantees"][0]["epsilon"] == pytest.approx(20)
    assert second["sigma"] == pytest.approx(summary["sigma"])
    assert 0 <= second["clipping_rate"] <= 1
    # sum_d log(1 + v_d / sigma^2) <= sum_d v_d / sigma^2 <= (bound / sigma)^2, but for m / (m - 1) in the sample variance
    assert 0 < summary["bits"] < 1.1 * second["guarantees"][0]["bits"]
    assert json.loads((run.folder / "summary.json").read_text())["reports"] == summary["reports"]
