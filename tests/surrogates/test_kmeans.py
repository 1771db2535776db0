from math import log
from typing import Any

import numpy as np
import pytest
import torch
from golden import FEATURES, LABELS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.cli.arguments import parse
from splitveil.config import from_dict, to_dict
from splitveil.registry import SURROGATES, UserError
from splitveil.surrogates import FeatureSpace, Surrogate, build, kmeans


def labelled(seed: int, n: int, d: int = 4, classes: int = 3) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((n, d)) + 1), torch.from_numpy(rng.integers(0, classes, n))


def refreshed(z: Tensor, y: Tensor, classes: int = 3, sigma: float = 0.1, **options: Any) -> Surrogate:
    torch.manual_seed(0)
    surrogate = build("kmeans", dim=z.shape[1], classes=classes, sigma=sigma, **options).double()
    surrogate.refresh(z, y)
    return surrogate


def members(surrogate: Any, z: Tensor, y: Tensor) -> dict[int, dict[int, list[float]]]:
    """Class -> cluster -> squared distances, summed over dimensions, of its samples; by loops."""
    found: dict[int, dict[int, list[float]]] = {}
    for row, c in zip(z.numpy(), y.tolist(), strict=True):
        squares = ((row - surrogate.centre[c].numpy()) ** 2).sum(1)
        squares[surrogate.weight[c].numpy() == 0] = np.inf
        if np.isfinite(squares).any():
            found.setdefault(c, {}).setdefault(int(squares.argmin()), []).append(float(squares.min()))
    return found


@pytest.mark.parametrize(
    ("tau", "penalties", "loss"),
    [(0.05, [0, 0, 0], 0), (0.002, [0.85146565, 1.37544949, 1.37544949], 1.20078821)],
)
def test_the_golden_numbers_of_the_worked_example(
    tau: float, penalties: list[float], loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kmeans, "TRIES", 50)  # the numbers are those of the best clusters
    surrogate = refreshed(FEATURES, LABELS, preset="as_written", clusters=2, tau=tau)
    output = surrogate(FEATURES, LABELS)
    v = 2 * output.diagnostics["variance"]  # it is averaged over the two dimensions
    assert v.tolist() == pytest.approx([0.0046875, 0.0079166667, 0.0079166667], abs=1e-9)
    assert surrogate.hinge(v).tolist() == pytest.approx(penalties, abs=1e-6)
    assert output.loss.item() == pytest.approx(loss, abs=1e-6)
    assert sorted(surrogate.weight[1].tolist()) == pytest.approx([0.25, 0.75])
    assert 2 * surrogate.variance[1].max().item() == pytest.approx(0.0105556, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000), b=st.integers(1, 40), k=st.integers(1, 6), form=st.sampled_from(["log", "linear"]),
    distance=st.sampled_from(["mean", "sum"]), offset=st.floats(0.001, 0.1),
)  # fmt: skip
def test_the_reference_preset_is_a_loop_over_the_published_formula(
    seed: int, b: int, k: int, form: str, distance: str, offset: float
) -> None:
    z, y = labelled(seed, 150)
    surrogate: Any = refreshed(z, y, preset="reference", clusters=k, form=form, distance=distance, offset=offset, sigma=0.3)
    tau = 0.125 * 0.3**2 + offset
    scale = 4 if distance == "sum" else 1
    n_c = max(1, 150 // b) * b / 3
    batch, labels = z[:b] + 0.1, y[:b]
    values = []
    for c, clusters in members(surrogate, batch, labels).items():
        value = 0.0
        for j, squares in clusters.items():
            pi = surrogate.weight[c, j].item()
            q = 10 * len(squares) / (pi * n_c)
            m = q if q < 1 else 0.99
            v = m * np.mean(squares) / 4 * scale + (1 - m) * surrogate.variance[c, j].item() * scale
            value += pi * (max(0.0, log(v + offset) - log(tau)) if form == "log" else v + 0.001)
        values.append(value)
    assert surrogate(batch, labels).loss.item() == pytest.approx(np.mean(values), abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(1, 40), prior=st.floats(0, 20))
def test_the_default_is_a_loop_over_classes_and_clusters(seed: int, b: int, prior: float) -> None:
    z, y = labelled(seed, 150)
    z = z + 3 * (torch.arange(150) % 2).unsqueeze(1) * (y > 0).unsqueeze(1)  # two modes in two of the classes
    surrogate: Any = refreshed(z, y, prior=prior, offset=0.01)
    batch, labels = 1.2 * z[:b], y[:b]
    loss, variance = 0.0, [0.0] * 3

    def penalty(v: float) -> float:
        return max(0.0, log(v + 0.01) - log(0.125 * 0.1**2 + 0.01))

    for c, clusters in members(surrogate, batch, labels).items():
        total = sum(surrogate.weight[c, j].item() for j in clusters)
        count = sum(len(squares) for squares in clusters.values())
        pi = surrogate.weight[c].numpy()
        value = -2 / 4 * sum(share * log(share) for share in pi if share > 0)
        for j, squares in clusters.items():
            share = pi[j] / total
            v = (sum(squares) / 4 + prior * surrogate.variance[c, j].item()) / (len(squares) + prior)
            variance[c] += share * v
            value += share * penalty(v)
        own, rows = z[y == c].numpy(), batch[labels == c].numpy()
        whole = (((rows - own.mean(0)) ** 2).mean(1).sum() + prior * own.var(0).mean()) / (count + prior)
        if penalty(whole) < value:
            value, variance[c] = penalty(whole), whole
        loss += count / b * value
    output = surrogate(batch, labels)
    assert output.loss.item() == pytest.approx(loss, abs=1e-9)
    assert output.diagnostics["variance"].tolist() == pytest.approx(variance, abs=1e-9)


@pytest.mark.parametrize("preset", ["default", "reference", "as_written"])
@pytest.mark.parametrize("form", ["log", "linear"])
def test_before_the_first_refresh_a_class_is_one_cluster_and_it_says_so(form: str, preset: str) -> None:
    z, y = labelled(0, 30)
    options = {"distance": "mean", "offset": 0.01, "form": form}
    surrogate = build("kmeans", dim=4, classes=3, sigma=0.1, preset=preset, **options).double()
    expected = 0.0
    for c in range(3):
        v = z[y == c].var(0, unbiased=False).mean().item()
        penalty = max(0.0, log(v + 0.01) - log(0.125 * 0.1**2 + 0.01)) if form == "log" else v
        expected += (y == c).sum().item() / 30 * (penalty + (0.001 if (preset, form) == ("reference", "linear") else 0))
    z.requires_grad_()
    output = surrogate(z, y)
    assert [output.loss.item(), output.loss_uniform.item()] == pytest.approx([expected] * 2, rel=1e-9)
    assert output.diagnostics["fallback"] == 1
    assert torch.isfinite(torch.autograd.grad(output.loss, z)[0]).all()
    surrogate.refresh(z.detach(), y)
    after = surrogate(z, y)
    assert after.diagnostics["fallback"] == 0
    assert after.loss_uniform.item() == pytest.approx(expected, rel=1e-9)


def test_a_sample_without_company_is_pulled_to_its_centre() -> None:
    z, y = labelled(0, 150)
    surrogate: Any = refreshed(z, y, clusters=1)
    one = (surrogate.centre[2, 0] + torch.tensor([1.0, 0, 0, 0])).unsqueeze(0).requires_grad_()
    (pull,) = torch.autograd.grad(surrogate(one, torch.tensor([2])).loss, one)
    assert pull[0, 0] > 0
    assert pull[0, 1:].abs().max() < 1e-12


def test_modes_that_lie_apart_do_not_count_as_spread() -> None:
    generator = torch.Generator().manual_seed(0)
    modes = 5 * torch.randn(4, 16, generator=generator)
    y = torch.zeros(400, dtype=torch.int64)
    z = (modes[torch.arange(400) % 4] + 0.3 * torch.randn(400, 16, generator=generator)).double()
    surrogate = refreshed(z, y, classes=1, clusters=4)
    assert surrogate(z, y).diagnostics["variance"].item() == pytest.approx(0.09, rel=0.05)


@pytest.mark.parametrize("modes", [1, 4])
def test_the_loss_charges_what_a_samples_cluster_tells_and_never_more_than_one_cluster_would_cost(modes: int) -> None:
    """Four points far apart hold log 4 nats, in the loss 2 / d of that; a single cloud cut into four is a cloud all the same."""
    generator = torch.Generator().manual_seed(0)
    centres = 5 * torch.randn(modes, 16, generator=generator)
    z = (centres[torch.arange(400) % modes] + 0.3 * torch.randn(400, 16, generator=generator)).double()
    y = torch.zeros(400, dtype=torch.int64)
    charged, free = (refreshed(z, y, classes=1, clusters=4, charge_modes=charge)(z, y) for charge in (True, False))
    one = refreshed(z, y, classes=1, clusters=1, charge_modes=False)(z, y).loss.item()
    assert free.loss <= charged.loss
    assert charged.loss.item() <= one * (1 + 1e-9)
    if modes == 4:
        assert charged.loss.item() == pytest.approx(free.loss.item() + 2 / 16 * log(4), rel=1e-6)


def test_points_far_apart_and_nothing_else_are_not_free() -> None:
    """Without noise around them their spread is 0, and so was their loss: up to log K nats went through unseen."""
    z = (5 * torch.eye(4).repeat(20, 1)).double()
    y = torch.zeros(80, dtype=torch.int64)
    assert refreshed(z, y, classes=1, clusters=4)(z, y).loss.item() == pytest.approx(2 / 4 * log(4))
    for preset in ("reference", "as_written"):
        assert refreshed(z, y, classes=1, clusters=4, preset=preset)(z, y).loss == 0  # as published


def test_where_one_cluster_costs_less_samples_are_pulled_to_the_middle_of_their_class() -> None:
    z = torch.randn(200, 2, generator=torch.Generator().manual_seed(0)).double()
    y = torch.zeros(200, dtype=torch.int64)
    surrogate: Any = refreshed(z, y, classes=1, clusters=3)
    assert surrogate(z, y).diagnostics["classes_apart"] == 0
    features = z[:1].clone().requires_grad_()
    (pull,) = torch.autograd.grad(surrogate(features, y[:1]).loss, features)
    towards = features.detach() - z.mean(0)
    assert torch.nn.functional.cosine_similarity(pull, towards).item() == pytest.approx(1)


def test_a_warm_start_keeps_the_clusters_and_its_state_travels() -> None:
    z, y = labelled(1, 150)
    surrogate: Any = refreshed(z, y)
    before = surrogate.centre.clone()
    torch.manual_seed(123)
    surrogate.refresh(z + 1e-6, y)  # other random numbers; in data without modes every start ends somewhere else
    torch.testing.assert_close(surrogate.centre, before + 1e-6)
    fresh: Any = build("kmeans", dim=4, classes=3, sigma=0.1).double()
    fresh.load_state_dict(surrogate.state_dict())
    assert fresh.images == 150
    assert torch.equal(fresh(z, y).loss, surrogate(z, y).loss)


def test_an_outlier_is_held_by_the_variance_clip() -> None:
    z, y = labelled(2, 150)
    spoilt = z[:30].clone()
    spoilt[0] += 100
    losses = {}
    for clip in (None, 2.0):
        surrogate: Any = refreshed(z, y, clusters=1, mix="batch", form="linear", variance_clip=clip)
        losses[clip] = surrogate(spoilt, y[:30]).loss.item()
        bound = 2 * surrogate.variance.max().item()
    assert losses[2.0] <= bound < losses[None]
    surrogate.variance.zero_()  # clusters of one image each: nothing to compare with
    assert surrogate(spoilt, y[:30]).loss.item() == pytest.approx(losses[None])


def test_a_class_without_training_images_is_skipped_and_counted() -> None:
    z, y = labelled(3, 150)
    surrogate: Any = refreshed(z, y, classes=5)
    labels = y[:30].clone()
    labels[:4] = 4
    features = z[:30].clone().requires_grad_()
    output = surrogate(features, labels)
    (pull,) = torch.autograd.grad(output.loss, features)
    assert output.diagnostics["skipped_classes"] == 1
    assert output.diagnostics["variance"][3:].tolist() == [0, 0]
    assert not pull[:4].any()
    assert pull[4:].any(1).all()


def test_diagnostics_tell_how_many_clusters_there_are_and_how_many_a_batch_hits() -> None:
    y = torch.repeat_interleave(torch.arange(3), torch.tensor([80, 17, 3]))
    z = torch.randn(100, 4, generator=torch.Generator().manual_seed(0)).double()
    surrogate = refreshed(z, y)
    everyone, one = surrogate(z, y).diagnostics, surrogate(z[:1], y[:1]).diagnostics
    assert everyone["clusters_used"].item() == pytest.approx((5 + 2 + 1) / 3)
    assert everyone["clusters_hit"] == 1
    assert one["clusters_hit"].item() == pytest.approx(1 / 8)


def test_reference_uses_its_own_number_of_clusters_unless_told() -> None:
    sizes = {
        preset: build("kmeans", dim=2, classes=1, sigma=0.1, preset=preset).weight.shape[1]  # type: ignore[union-attr]
        for preset in kmeans.PRESETS
    }
    assert sizes == {"default": 5, "reference": 15, "as_written": 5}
    told: Any = build("kmeans", dim=2, classes=1, sigma=0.1, preset="reference", clusters=4, refresh=3)
    assert told.weight.shape == (1, 4)
    assert told.refresh_every == 3


def test_the_old_name_of_a_preset_still_works_in_options_flags_and_recipes() -> None:
    losses = []
    for preset in ("seed002", "as_written"):
        config = parse(["--cem.surrogate", "kmeans", "--cem.surrogate.preset", preset])
        assert from_dict(to_dict(config)).cem.surrogate.preset == preset
        losses.append(refreshed(FEATURES, LABELS, preset=preset, clusters=2, tau=0.002)(FEATURES, LABELS).loss)
    assert torch.equal(*losses)


@pytest.mark.parametrize(("bounded", "clusters"), [(False, 15), (True, 5)])
def test_reference_has_fewer_clusters_where_z_is_bounded(bounded: bool, clusters: int) -> None:
    space = FeatureSpace(2, 1, 0.1, bounded=bounded)
    surrogate = SURROGATES["kmeans"].make({"space": space}, preset="reference")
    assert surrogate.weight.shape == (1, clusters)
    assert SURROGATES["kmeans"].make({"space": space}, preset="reference", clusters=7).weight.shape == (1, 7)
    assert SURROGATES["kmeans"].make({"space": space}).weight.shape == (1, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clusters": 0}, "clusters is 0, must be at least 1"),
        ({"refresh": 0}, "refresh is 0"),
        ({"members": 0}, "members is 0"),
        ({"prior": -1.0}, "prior is -1.0"),
        ({"variance_clip": 0.0}, "variance_clip is 0.0"),
        ({"mix": "both"}, "mix is 'both', must be one of 'prior'"),
        ({"form": "square"}, "form is 'square'"),
        ({"distance": "max"}, "distance is 'max'"),
        ({"preset": "seed2"}, "preset is 'seed2', must be one of 'default'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build("kmeans", dim=2, classes=2, sigma=0.1, **options)
