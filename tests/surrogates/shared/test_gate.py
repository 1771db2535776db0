import torch
from golden import Z
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splitveil.statistics.attention import effective_samples, relative_entropy
from splitveil.surrogates.shared.gate import Gate, attention, gate_logits, keep_effective, keep_entropy
from splitveil.surrogates.shared.groups import weighted_moments
from splitveil.surrogates.shared.hinge import hinge

EYE, ONES = torch.eye(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)


def test_the_golden_numbers_without_layernorm() -> None:
    logits = gate_logits(Z, EYE, EYE, ONES)
    torch.testing.assert_close(logits[0], torch.tensor([0, 0.16084728, -0.02174083, 0.05566042]).double(), atol=1e-7, rtol=0)
    a = attention(logits, torch.ones(3, 4))
    expected = torch.tensor([0.23751626, 0.27896418, 0.23240819, 0.25111136]).double()
    torch.testing.assert_close(a[0], expected, atol=1e-7, rtol=0)
    _, mean, variance = weighted_moments(Z, a.unsqueeze(2))
    torch.testing.assert_close(mean[0, 0], torch.tensor([0.07021872, 0.02696126]).double(), atol=1e-7, rtol=0)
    trace = variance.squeeze(1).sum(1)
    torch.testing.assert_close(trace, torch.tensor([0.01747352, 0.02649601, 0.02433010]).double(), atol=1e-7, rtol=0)
    penalty = hinge(trace, 0.002 + 1e-6, 1e-6)
    torch.testing.assert_close(penalty, torch.tensor([2.16709660, 2.58338469, 2.49810845]).double(), atol=1e-6, rtol=0)


def test_descent_on_a_logit_takes_weight_away_from_far_samples() -> None:
    """dv/dlogit_m = a_m (|x_m - mu|^2 - v): it does not look for them, as one might expect of attention."""
    x = torch.randn(1, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = torch.randn(1, 9, dtype=torch.float64, requires_grad=True)
    a = attention(logits, torch.ones(1, 9))
    _, mean, variance = weighted_moments(x, a.unsqueeze(2))
    v = variance.sum()
    (slope,) = torch.autograd.grad(v, logits)
    far = (x - mean).square().sum(2)
    torch.testing.assert_close(slope, (a * (far - v)).detach())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(2, 30), floor=st.floats(0.05, 1), sharp=st.floats(0, 40))
@example(seed=0, n=12, floor=1.0, sharp=0.0003)  # nearly equal: the logarithm of a count must have all digits
def test_the_floors_hold_and_the_weights_stay_weights(seed: int, n: int, floor: float, sharp: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(2, n, dtype=torch.float64)
    mask[1, n // 2 + 1 :] = 0
    m = mask.sum(1)
    equal = mask / m.unsqueeze(1)
    a = attention(sharp * torch.randn(2, n, generator=generator, dtype=torch.float64), mask)
    kept = keep_effective(a, equal, floor)
    assert (effective_samples(kept) >= floor * m * (1 - 1e-9)).all()
    varied = keep_entropy(a, equal, floor)
    assert (relative_entropy(varied, m) >= floor - 1e-9).all()
    for weights in (kept, varied):
        torch.testing.assert_close(weights.sum(1), torch.ones(2).double())
        assert (weights >= -1e-12).all() and not (weights * (1 - mask)).any()


def test_the_gate_is_that_of_normalised_samples_and_so_are_its_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    x, V, U, w = (torch.randn(*shape, generator=generator).double() for shape in ((7, 5), (3, 5), (3, 5), (3,)))
    parameters = [each.requires_grad_() for each in (V, U, w)]
    found, expected = Gate.apply(5 + x, V, U, w), gate_logits(torch.nn.functional.layer_norm(5 + x, (5,)), V, U, w)
    torch.testing.assert_close(found, expected)
    slope = torch.randn(7, generator=generator).double()
    torch.testing.assert_close(
        torch.autograd.grad((found * slope).sum(), parameters),
        torch.autograd.grad((expected * slope).sum(), parameters),
    )
