"""The equations of two-teacher distillation."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.config import Config, TrainConfig
from splitveil.distillation import (
    LEAST,
    MOST,
    Distillation,
    DistillationConfig,
    balanced_temperatures,
    divergence,
    drifted,
    entropy,
    rebalanced,
)
from splitveil.options import UserError

BOTH = DistillationConfig(clean="a", defended="b", temperatures="balanced", losses="balanced", first=3)


def logits(seed: int, scale: float, classes: int = 10, images: int = 64) -> Tensor:
    return scale * torch.randn(images, classes, generator=torch.Generator().manual_seed(seed))


def test_entropy_and_divergence_are_those_of_torchs_distributions():
    teacher, student, t = logits(0, 4), logits(1, 2), torch.tensor(2.5)
    p, q = torch.distributions.Categorical(logits=teacher / t), torch.distributions.Categorical(logits=student)
    torch.testing.assert_close(entropy(teacher, t), p.entropy().mean())
    torch.testing.assert_close(divergence(teacher, student, t), torch.distributions.kl_divergence(p, q).mean())


def test_the_divergence_is_classes_times_that_of_the_published_code():
    teacher, student = logits(0, 4, classes=7), logits(1, 2, classes=7)
    theirs = F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="none").mean()  # over images and classes
    torch.testing.assert_close(divergence(teacher, student, torch.ones(())), 7 * theirs)


@given(st.integers(0, 1000), st.floats(0.1, 6), st.floats(0.1, 6), st.sampled_from([2, 10, 100]))
@settings(max_examples=60)
def test_bisection_makes_both_teachers_equally_sure_or_goes_as_far_as_it_may(seed: int, one: float, other: float, classes: int):
    answers = logits(seed, one, classes), logits(seed + 1, other, classes)
    temperatures = balanced_temperatures(answers, LEAST)
    assert bool((temperatures >= LEAST).all() and (temperatures <= MOST).all())
    assert temperatures.min() == LEAST  # only the sharper one is softened
    a, b = (entropy(each, t) for each, t in zip(answers, temperatures))
    assert abs(a - b) < 0.01 or temperatures.max() > 0.999 * MOST


def test_a_teacher_ten_times_as_sharp_gets_a_temperature_near_ten():
    """A known answer: the same logits times 4 need a temperature of 4."""
    answers = logits(0, 2), 4 * logits(0, 2)
    torch.testing.assert_close(balanced_temperatures(answers, LEAST), torch.tensor([1.0, 4.0]), rtol=1e-4, atol=0)


def test_equal_teachers_keep_their_temperatures_and_equal_losses_their_weights():
    same = logits(0, 3)
    assert balanced_temperatures((same, same), LEAST).tolist() == [1, 1]
    method = Distillation(BOTH)
    method.calibrate([same, same])
    for _ in range(20):
        method(torch.zeros(()), [same, same], [logits(1, 1)] * 2)
    assert method.temperatures.tolist() == [1, 1]
    assert method.weights.tolist() == [0.5, 0.5]


def test_the_sign_rule_softens_the_sharper_teacher_and_stays_within_the_bounds():
    t = torch.tensor([1.0, 1.0])
    for _ in range(5):
        t = drifted(t, torch.tensor([0.2, 0.5]), 1e-3)
    torch.testing.assert_close(t, torch.tensor([1.005, 1.0]))
    assert drifted(torch.tensor([10.0, 1.0]), torch.tensor([0.2, 0.5]), 1e-3).tolist() == [10, 1]


def test_the_sign_rule_ends_near_where_bisection_does():
    """Two ways to the same equation: from 2.9, 300 steps of 1e-3 reach the temperature 3 that bisection finds."""
    answers = 3 * logits(0, 2), logits(0, 2)
    method = Distillation(BOTH)
    method.temperatures.copy_(torch.tensor([2.9, 1.0]))
    for _ in range(300):
        method(torch.zeros(()), answers, answers)
    torch.testing.assert_close(method.temperatures, balanced_temperatures(answers, LEAST), rtol=0, atol=2e-3)


losses = st.lists(st.floats(0, 50), min_size=2, max_size=2).map(torch.tensor)


@given(st.floats(0, 1), losses, losses, st.floats(0, 1))
@settings(max_examples=100)
def test_weights_are_shares(first: float, now: Tensor, usual: Tensor, rate: float):
    weights = rebalanced(torch.tensor([first, 1 - first]), now, usual, rate)
    assert bool((weights >= 0).all())
    assert abs(weights.sum().item() - 1) < 1e-5


def test_the_path_that_has_improved_less_gets_more_weight_after_the_first_batches():
    method, teacher = Distillation(BOTH), logits(0, 3)
    other = logits(1, 1)
    for _ in range(3):
        method(torch.zeros(()), [teacher, teacher], [other, other])
        assert method.weights.tolist() == [0.5, 0.5]
    usual = divergence(teacher, other, torch.ones(()))
    torch.testing.assert_close(method.usual, usual.expand(2))
    for _ in range(400):
        method(torch.zeros(()), [teacher, teacher], [other, 0.9 * teacher])  # the defended path has learned
    now = torch.stack([divergence(teacher, other, torch.ones(())), divergence(teacher, 0.9 * teacher, torch.ones(()))])
    torch.testing.assert_close(method.weights, now / now.sum(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(method.usual, usual.expand(2))  # still that of the first three


@pytest.mark.parametrize("label", [0.0, 0.3])
def test_the_loss_is_the_weighted_sum_and_teaches_only_the_student(label: float):
    method = Distillation(DistillationConfig(clean="a", defended="b", label=label, temperature=2.0))
    students = [logits(2, 1).requires_grad_(), logits(3, 1).requires_grad_()]
    teachers, own = [logits(0, 3), logits(1, 3)], torch.tensor(0.7)
    loss, told = method(own, teachers, students)
    each = [divergence(t, s, torch.tensor(2.0)) for t, s in zip(teachers, students)]
    torch.testing.assert_close(loss, label * own + (1 - label) * (each[0] + each[1]) / 2)
    torch.testing.assert_close(told["teachers_clean"], each[0].detach())
    loss.backward()
    for teacher, student in zip(teachers, students):  # d KL / d logits = softmax(student) - p, over the batch
        expected = (1 - label) / 2 * (student.detach().softmax(1) - (teacher / 2).softmax(1)) / len(teacher)
        torch.testing.assert_close(student.grad, expected)


def test_one_teacher_has_all_of_the_teachers_weight():
    method = Distillation(DistillationConfig(defended="b", label=0.0))
    loss, told = method(torch.tensor(9.0), [logits(0, 3)], [logits(1, 1)])
    torch.testing.assert_close(loss, divergence(logits(0, 3), logits(1, 1), torch.ones(())))
    assert set(told) == {"teachers_defended", "temperature_defended", "teacher_weight_defended"}


def test_a_loss_of_nothing_at_the_start_does_no_harm():
    method, same = Distillation(BOTH), logits(0, 3)
    for _ in range(5):
        loss, _ = method(torch.zeros(()), [same, same], [same, same])
    assert math.isclose(loss.item(), 0, abs_tol=1e-5)
    assert method.weights.isfinite().all()


@pytest.mark.parametrize(("options", "message"), [
    ({"clean": "ema"}, r"train\.distillation\.clean is 'ema', but the student's average teaches the defended path only"),
    ({"clean": "a", "losses": "balanced"}, r"train\.distillation\.losses is 'balanced', which needs two teachers"),
    ({"temperatures": "balanced"}, r"train\.distillation\.temperatures is 'balanced', which needs two teachers"),
    ({"label": 1.0}, r"train\.distillation\.label is 1\.0, must be at least 0 and below 1"),
    ({"temperature": 0.5}, r"train\.distillation\.temperature is 0\.5, must be at least 1 and at most 10"),
    ({"losses": "even"}, r"train\.distillation\.losses is 'even', must be one of 'fixed', 'balanced'"),
])  # fmt: skip
def test_what_cannot_be_is_refused(options: dict[str, object], message: str):
    with pytest.raises(UserError, match=message):
        Config(train=TrainConfig(distillation=DistillationConfig(**options)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "name"),
    [({"label": 0.3}, "label is 0.3"), ({"warmup": 2}, "warmup is 2"), ({"cache": "never"}, "cache is never")],
)
def test_an_option_of_teaching_without_a_teacher_is_refused(options: dict[str, object], name: str):
    with pytest.raises(UserError, match=rf"train\.distillation\.{name}, but nobody teaches; give clean or defended"):
        Config(train=TrainConfig(distillation=DistillationConfig(**options)))  # type: ignore[arg-type]
    Config(train=TrainConfig(distillation=DistillationConfig(clean="a", **options)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "said"), [
    ({"defended": "b", "decay": 0.9}, "decay is 0.9, but no teacher is the student's average; set defended = 'ema'"),
    ({"temperature_rate": 0.1}, "temperature_rate is 0.1, but temperatures is 'fixed'; set temperatures = 'balanced'"),
    ({"losses": "balanced", "defended": "b", "temperature_rate": 0.1}, "temperature_rate is 0.1, but temperatures is 'fixed'"),
    ({"weight_rate": 0.1}, "weight_rate is 0.1, but losses is 'fixed'; set losses = 'balanced'"),
    ({"temperatures": "balanced", "defended": "b", "first": 3}, "first is 3, but losses is 'fixed'; set losses = 'balanced'"),
])  # fmt: skip
def test_an_option_that_changes_nothing_is_refused(options: dict[str, object], said: str):
    with pytest.raises(UserError, match=re.escape(f"train.distillation.{said}")):
        Config(train=TrainConfig(distillation=DistillationConfig(clean="a", **options)))  # type: ignore[arg-type]


def test_an_option_of_the_average_or_of_what_is_balanced_is_taken_where_it_acts():
    for config in (
        DistillationConfig(defended="ema", decay=0.9),
        DistillationConfig(clean="a", defended="b", temperatures="balanced", temperature_rate=0.1),
        DistillationConfig(clean="a", defended="b", losses="balanced", weight_rate=0.1, first=3),
    ):
        Config(train=TrainConfig(distillation=config))
