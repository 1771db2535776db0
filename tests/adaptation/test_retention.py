"""Retention: what is kept of synthetic answers, whatever the number of classes; the equations against plain loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitveil.adaptation.retention import Retention, entropy, likeness, plausible, size, usual_sizes
from splitveil.options import UserError


def answers(classes: int, n: int, confidence: float, seed: int = 0) -> torch.Tensor:
    """Logits whose classes are equally frequent; the right one is `confidence` above the noise."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=generator)
    logits[torch.arange(n), torch.randint(classes, (n,), generator=generator)] += confidence
    return logits


@pytest.mark.parametrize("confidence", [0.0, 2.0, 8.0])
@pytest.mark.parametrize("classes", [10, 100, 530, 1000])
def test_about_as_many_are_kept_as_were_asked_for_whatever_the_number_of_classes(classes: int, confidence: float) -> None:
    retention = Retention(classes, keep=0.4)
    for logits in answers(classes, 2000, confidence).split(50):
        retention(logits)
    assert retention.seen == 2000
    assert 0.33 <= retention.kept / retention.seen <= 0.4


@pytest.mark.parametrize("classes", [10, 100])
def test_the_published_margin_keeps_nothing_of_confident_answers_below_a_thousand_classes(classes: int) -> None:
    p = answers(classes, 500, 8.0).softmax(1)
    assert (likeness(p, torch.full((classes,), 1 / classes)) < 0.05).sum() == 0


@given(
    keep=st.floats(0.01, 1.0), batches=st.lists(st.integers(0, 30), max_size=12), confidence=st.sampled_from([0.0, 3.0, 50.0]),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_never_are_more_kept_than_the_share_of_what_was_seen(
    keep: float, batches: list[int], confidence: float, seed: int
) -> None:
    retention, kept = Retention(7, keep), 0
    for i, n in enumerate(batches):
        kept += int(retention(answers(7, n, confidence, seed + i)).sum())
        assert kept == retention.kept <= keep * retention.seen + 1e-6


def test_answers_that_are_all_equal_are_kept_up_to_the_share_and_no_further() -> None:
    retention = Retention(10, keep=0.4)
    assert sum(int(retention(torch.zeros(20, 10)).sum()) for _ in range(50)) == 400


def test_uncertain_answers_are_dropped() -> None:
    retention = Retention(3, keep=0.16)  # sqrt(0.16) of the answers pass the first limit, and half of them are sure
    for seed in range(20):
        chosen = retention(torch.cat([answers(3, 20, 20.0, seed), 0.1 * answers(3, 20, 0.0, seed)]))
        assert not chosen[20:].any()
    assert retention.kept >= 100


def test_a_rare_class_has_a_larger_share_among_what_is_kept_than_in_the_stream() -> None:
    retention, kept = Retention(2, keep=0.4), torch.zeros(2)
    rare = torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.1
    logits = 8 * torch.stack([rare, ~rare], 1).float()
    for part in logits.split(20):
        kept += part[retention(part)].softmax(1).sum(0)
    assert kept[0] / kept.sum() > 1.5 * rare.float().mean()


def test_answers_that_are_not_finite_are_dropped_and_move_no_limit() -> None:
    clean, dirty = Retention(4), Retention(4)
    logits = answers(4, 40, 3.0)
    broken = torch.cat([logits, torch.full((5, 4), float("nan")), torch.full((5, 4), float("inf"))])
    chosen = dirty(broken)
    assert not chosen[40:].any()
    clean(logits)
    assert dirty.unreliable.values == clean.unreliable.values


def test_entropy_likeness_and_size_are_those_of_plain_loops() -> None:
    logits, mean = answers(6, 9, 2.0).double(), torch.rand(6).double()
    for h, s, row in zip(entropy(logits), likeness(logits.softmax(1), mean), logits.softmax(1).tolist()):
        assert math.isclose(h, -sum(p * math.log(p) for p in row), rel_tol=1e-9)
        dot = sum(p * m for p, m in zip(row, mean.tolist()))
        assert math.isclose(s, dot / math.sqrt(sum(p * p for p in row) * sum(m * m for m in mean.tolist())), rel_tol=1e-9)
    assert torch.allclose(size(torch.full((2, 3, 4), -3.0)), torch.tensor([3.0, 3.0]))


def test_z_that_no_image_makes_is_not_plausible() -> None:
    z = torch.randn(50, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    sizes = usual_sizes(z)
    assert plausible(z, sizes).all()
    assert not plausible(torch.cat([10 * z, 0.1 * z, z * float("nan")]), sizes).any()


@pytest.mark.parametrize(
    ("name", "value"), [("classes", 1), ("keep", 0.0), ("keep", 1.5), ("keep", float("nan")), ("window", 0), ("memory", 1.0)]
)
def test_a_setting_out_of_bounds_is_refused_with_its_bound(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"retention: {name} is {value}, must be "):
        Retention(**({"classes": 10} | {name: value}))  # type: ignore[arg-type]
