from typing import Any

import pytest
import torch
from cheating import CLASSES, DIM, OTHERS, SAMPLES, frozen, mixture, trained
from golden import FEATURES, LABELS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.registry import UserError
from splitveil.statistics.by_class import class_moments
from splitveil.surrogates import Surrogate, build
from splitveil.surrogates.gated import (
    Gated,
)  # fmt: skip
from splitveil.training.health import warnings_of

EYE, ONES = torch.eye(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)


def golden(**options: Any) -> Surrogate:
    surrogate = build(
        "gated", dim=2, classes=3, sigma=None, hidden=2, form="trace", offset=1e-6, tau=0.002, ess_floor=0.0, **options
    ).double()
    with torch.no_grad():
        surrogate.V.copy_(EYE), surrogate.U.copy_(EYE), surrogate.w.copy_(ONES)
    return surrogate


def test_the_golden_numbers_with_layernorm_through_the_surrogate() -> None:
    variance = golden(gate_objective="cooperative")(FEATURES, LABELS).diagnostics["variance"]
    expected = torch.tensor([0.01833906, 0.02945802, 0.02421875]).double()
    torch.testing.assert_close(2 * variance, expected, atol=1e-7, rtol=0)  # variance is the mean of two dimensions


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(1, 40), classes=st.integers(1, 12))
@pytest.mark.parametrize("form", ["per_dimension", "trace"])
@pytest.mark.parametrize("space", ["raw", "normalised"])
def test_the_loss_is_that_of_a_loop_over_the_classes(space: str, form: str, seed: int, b: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z, y = torch.randn(b, 5, generator=generator).double(), torch.randint(0, classes, (b,), generator=generator)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"gate_objective": "cooperative", "space": space, "form": form, "ess_floor": 0.0, "offset": 0.01}
    surrogate = build("gated", dim=5, classes=classes, sigma=0.1, capacity=b + 2, **options).double()
    loss = torch.zeros(())
    tau = 0.125 * 0.1**2 + 0.01
    for c in range(classes):
        x = z[y == c]
        if len(x) < 2:
            continue
        normalised = torch.nn.functional.layer_norm(x, (5,))
        logit = (torch.tanh(normalised @ surrogate.V.T) * torch.sigmoid(normalised @ surrogate.U.T)) @ surrogate.w
        a = (logit.exp() / logit.exp().sum()).unsqueeze(1)
        measured = normalised if space == "normalised" else x
        v = (a * (measured - (a * measured).sum(0)) ** 2).sum(0)
        v = v.sum() if form == "trace" else v
        loss = loss + len(x) / b * (torch.log(v + 0.01) - torch.log(torch.tensor(tau))).clamp_min(0).mean()
    torch.testing.assert_close(surrogate(z, y).loss.double(), loss.double())


def answers(t: list[Tensor], q: list[Tensor], k: list[Tensor], kind: str) -> list[Tensor]:
    """What all tokens of a class answer each of them, token by token: a softmax, or NaLaFormer's equations."""
    told = []
    for own in q:
        if kind == "softmax":
            weights = torch.stack([own @ other / len(own) ** 0.5 for other in k]).softmax(0)
        else:
            norm = own.norm()
            u, power = own / norm, 3 * (0.5 + norm.tanh())
            Q = torch.cat([u.clamp_min(0) ** power, (-u).clamp_min(0) ** power])
            weights = torch.stack([Q @ torch.cat([other.clamp_min(0) ** 3, (-other).clamp_min(0) ** 3]) + 1e-6 for other in k])
            weights = weights / weights.sum()
        told.append(torch.stack([w * v for w, v in zip(weights, t)]).sum(0))
    return told


def of_a_class(surrogate: Gated, maps: Tensor, cells: int, kind: str) -> tuple[Tensor, Tensor]:
    """The hinge of equal weights and of the gate's, of samples [n, c, h, w] of one class, token by token."""
    high, wide = maps.shape[2] // cells, maps.shape[3] // cells
    apart = maps - maps.mean(0)
    places = [(i, row, column) for i in range(len(maps)) for row in range(cells) for column in range(cells)]
    cut = [apart[i, :, r * high : (r + 1) * high, k * wide : (k + 1) * wide].flatten() for i, r, k in places]
    assert surrogate.view is not None
    scale = torch.stack([each.square().mean() for each in cut]).mean().sqrt().detach()
    t = [each.detach() / scale + surrogate.view.place[r * cells + k] for each, (_, r, k) in zip(cut, places)]
    seen = t
    if surrogate.view.to_q is not None and surrogate.view.to_k is not None:
        q, k = ([each @ to.weight.T for each in t] for to in (surrogate.view.to_q, surrogate.view.to_k))
        seen = [torch.cat([each, each - answer]) for each, answer in zip(t, answers(t, q, k, kind))]
    logits = [torch.tanh(surrogate.V @ each) * torch.sigmoid(surrogate.U @ each) @ surrogate.w for each in seen]
    a, m = torch.stack(logits).softmax(0), len(t)
    excess = m * a.square().sum() - 1  # m / ESS - 1, which must be 1 at most where half of the tokens stay effective
    a = 1 / m + (a - 1 / m) * (1 / excess).sqrt().clamp_max(1)
    penalties = []
    for weights in ([1 / m] * m, a):
        mean = sum(weight * e for weight, e in zip(weights, cut))
        v = sum(weight * (e - mean) ** 2 for weight, e in zip(weights, cut))
        assert isinstance(v, Tensor)
        penalties.append(torch.log((v + 0.01) / (0.125 * 0.1**2 + 0.01)).clamp_min(0).mean())
    return penalties[0], penalties[1]


@pytest.mark.parametrize(("cells", "kind"), [(2, "none"), (4, "none"), (4, "softmax"), (4, "linear")])
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(3, 6))
def test_over_tokens_loss_and_gradients_are_those_of_a_loop_over_classes_and_tokens(cells: int, kind: str, seed: int, b: int):
    generator = torch.Generator().manual_seed(seed)
    z, y = torch.randn(b, 2, 4, 4, generator=generator).double(), torch.randint(0, 2, (b,), generator=generator)
    z = z * torch.linspace(0.2, 3, 4).double()  # places that differ in their spread
    torch.manual_seed(seed)
    options: dict[str, Any] = {"tokens": cells, "attention": kind, "hidden": 5, "offset": 0.01, "capacity": b + 2, "bank": 0}
    surrogate = build("gated", dim=32, classes=2, sigma=0.1, z_shape=(2, 4, 4), **options).double()
    assert isinstance(surrogate, Gated)
    for parameter in surrogate.parameters():
        torch.nn.init.normal_(parameter)
    trained = list(surrogate.parameters())
    z.requires_grad_()
    worse, climb = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for c in range(2):
        own = z[y == c]
        if len(own) > 1:
            equal, found = of_a_class(surrogate, own, cells, kind)
            worse, climb = worse + len(own) / b * torch.maximum(equal, found), climb - len(own) / b * found
    output = surrogate(z, y)
    torch.testing.assert_close(output.loss, worse)
    pulls = torch.autograd.grad(output.loss, [z, *trained])
    goals = *torch.autograd.grad(worse, z, retain_graph=True), *torch.autograd.grad(climb, trained)  # the gate climbs
    torch.testing.assert_close(pulls, goals, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("tails", ["gaussian", "heavy"])
@pytest.mark.parametrize("lr", [1e-3, 1e-2])
@pytest.mark.parametrize("objective", ["adversarial", "stopgrad"])
def test_an_honest_gate_cannot_cheat(objective: str, lr: float, tails: str) -> None:
    z, y = frozen(tails)
    torch.manual_seed(0)
    surrogate = build("gated", dim=DIM, classes=CLASSES, sigma=0.1, gate_objective=objective)
    before, after = trained(surrogate, z, y, lr)
    assert before.loss_uniform >= 0.5
    assert torch.equal(after.loss_uniform, before.loss_uniform)
    assert after.loss >= 0.95 * before.loss_uniform
    assert after.diagnostics["effective_samples"] >= 0.25 or after.diagnostics["collapsed"] > 0
    if objective == "adversarial":
        assert after.loss > 1.02 * before.loss_uniform  # it has found a worse weighting
        assert after.diagnostics["attention_entropy"] < 0.98


@pytest.mark.slow
@pytest.mark.parametrize("tails", ["gaussian", "heavy", "low_rank"])
@pytest.mark.parametrize(("by", "lr", "steps"), OTHERS)
@pytest.mark.parametrize("objective", ["adversarial", "stopgrad"])
def test_no_other_optimiser_makes_an_honest_gate_cheat(
    objective: str, by: type[torch.optim.Optimizer], lr: float, steps: int, tails: str
) -> None:
    z, y = frozen(tails)
    torch.manual_seed(0)
    surrogate = build("gated", dim=DIM, classes=CLASSES, sigma=0.1, gate_objective=objective)
    before, after = trained(surrogate, z, y, lr, steps, by)
    assert before.loss_uniform >= 0.5
    assert torch.equal(after.loss_uniform, before.loss_uniform)
    assert after.loss >= 0.95 * before.loss_uniform
    assert after.diagnostics["effective_samples"] >= 0.25 or after.diagnostics["collapsed"] > 0


@pytest.mark.parametrize("tails", ["gaussian", "heavy"])
@pytest.mark.parametrize("attention", ["none", "linear"])
@pytest.mark.parametrize(
    ("by", "lr", "steps"), [(torch.optim.Adam, 1e-2, 60), *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)]
)
def test_nor_can_a_gate_over_tokens(by: type[torch.optim.Optimizer], lr: float, steps: int, attention: str, tails: str) -> None:
    z, y = frozen(tails)
    torch.manual_seed(0)
    shape: dict[str, Any] = {"z_shape": (2, 4, 4), "tokens": "positions", "attention": attention}
    surrogate = build("gated", dim=DIM, classes=CLASSES, sigma=0.1, **shape)
    before, after = trained(surrogate, z, y, lr, steps, by)
    assert before.loss_uniform >= 0.5
    assert torch.equal(after.loss_uniform, before.loss_uniform)
    assert after.loss >= 0.95 * before.loss_uniform
    assert after.diagnostics["effective_samples"] >= 0.25 or after.diagnostics["collapsed"] > 0
    if by is torch.optim.Adam:
        assert after.loss > 1.02 * before.loss_uniform  # it has found tokens that spread more than the rest


def test_an_untrained_gate_over_tokens_measures_the_mean_of_the_variances_of_all_positions() -> None:
    z, y = (part[:90] for part in frozen("gaussian"))
    z = z * torch.linspace(0.5, 2, 16).repeat(2)  # positions that differ in their spread
    options: dict[str, Any] = {"dim": DIM, "classes": CLASSES, "sigma": 0.1}
    tokens = build("gated", **options, z_shape=(2, 4, 4), tokens="positions")(z, y)
    _, _, variance = class_moments(z, y, CLASSES)
    surrogate = build("uniform", **options)
    expected = surrogate.hinge(variance.view(CLASSES, 2, 16).mean(2)).mean()
    torch.testing.assert_close(tokens.loss, expected)
    torch.testing.assert_close(tokens.loss_uniform, expected)
    assert expected > surrogate(z, y).loss  # the logarithm of a mean


def test_linear_attention_among_tokens_ranks_classes_as_the_softmax_does() -> None:
    """The same gate; only how tokens answer each other differs."""
    generator = torch.Generator().manual_seed(0)
    classes, y = 12, torch.arange(240) % 12
    spread = torch.linspace(0.2, 2, classes)[torch.randperm(classes, generator=generator)]
    z = spread[y].unsqueeze(1) * torch.randn(240, DIM, generator=generator)
    variances = []
    options: dict[str, Any] = {"dim": DIM, "classes": classes, "sigma": 0.1, "z_shape": (2, 4, 4), "tokens": "positions"}
    for kind in ("softmax", "linear"):
        torch.manual_seed(0)
        surrogate = build("gated", **options, attention=kind)
        torch.nn.init.normal_(surrogate.w)
        variances.append(surrogate(z, y).diagnostics["variance"])
    ranks = [values.argsort().argsort().double() for values in variances]
    assert torch.corrcoef(torch.stack(ranks))[0, 1] >= 0.9


@pytest.mark.parametrize("tails", ["gaussian", "heavy"])
@pytest.mark.parametrize("options", [{"preset": "as_written"}, {"gate_objective": "cooperative", "ess_floor": 0.0}], ids=str)
def test_a_cooperative_gate_cheats_and_the_alarm_says_so(options: dict[str, Any], tails: str) -> None:
    z, y = frozen(tails)
    torch.manual_seed(0)
    before, after = trained(build("gated", dim=DIM, classes=CLASSES, sigma=0.1, **options), z, y, 1e-2, steps=100)
    assert torch.equal(after.loss_uniform, before.loss_uniform)
    assert after.loss < 0.95 * before.loss_uniform
    assert after.diagnostics["collapsed"] == 1
    if options.get("preset"):
        assert after.loss < 0.05 * before.loss_uniform


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_as_written_an_untrained_gate_is_not_said_to_have_collapsed(scale: float) -> None:
    """It measures LayerNorm(z); held against the spread of z itself, any z of scale 1 or more looked hidden."""
    z, y = frozen("gaussian")
    torch.manual_seed(0)
    told = build("gated", dim=DIM, classes=CLASSES, sigma=0.1, preset="as_written")(scale * z, y).diagnostics
    assert told["collapsed"] == 0
    assert told["hidden"] < 0.02


def test_a_layernorm_that_shrinks_is_seen_to_hide() -> None:
    z, y = frozen("gaussian")
    surrogate: Any = build("gated", dim=DIM, classes=CLASSES, sigma=0.1, preset="as_written")
    torch.nn.init.constant_(surrogate.norm.weight, 0.5)
    told = surrogate(z, y).diagnostics
    assert told["collapsed"] == 1
    assert told["hidden"] > 0.2


def test_what_is_hidden_in_a_few_classes_is_told_too() -> None:
    """Four of ten classes are collapsed, which is not most of them; a tenth of the loss is gone all the same."""
    z, y = torch.randn(640, DIM, generator=torch.Generator().manual_seed(0)), torch.arange(640) % 10
    tight = (y < 4) & (torch.arange(640) // 10 % 4 == 0)  # a quarter of the samples of four classes, which the gate can tell
    z[tight] *= 0.1
    z[:, 0] = torch.where((y < 4) & ~tight, -8.0, 8.0)
    surrogate: Any = build("gated", dim=DIM, classes=10, sigma=0.1, gate_objective="cooperative", ess_floor=0.0, hidden=1)
    with torch.no_grad():
        surrogate.V.zero_(), surrogate.U.zero_(), surrogate.w.fill_(30.0)
        surrogate.V[0, 0] = 5.0
    output = surrogate(z, y)
    assert output.diagnostics["collapsed"].item() == pytest.approx(0.4)
    assert output.loss < 0.95 * output.loss_uniform
    told = warnings_of(
        {"epoch": 3, "cem_loss": output.loss.item(), "cem_loss_uniform": output.loss_uniform.item()}
        | {f"cem_{name}": value.item() for name, value in output.diagnostics.items() if value.dim() == 0}, "gated", 640,
    )  # fmt: skip
    assert list(told) == ["hidden"]


@pytest.mark.parametrize("seed", range(5))
def test_on_a_mixture_the_adversarial_gate_sees_at_least_the_total_variance(seed: int) -> None:
    z, inside = mixture(seed)
    y, total = torch.zeros(len(z), dtype=torch.long), z.var(0).mean().item()
    assert total > 3 * inside
    uniform = build("uniform", dim=64, classes=1, sigma=0.1)(z, y).diagnostics["variance"].item()
    assert uniform == pytest.approx(total, rel=0.01)
    torch.manual_seed(seed)
    surrogate = build("gated", dim=64, classes=1, sigma=0.1, capacity=len(z))
    _, after = trained(surrogate, z, y, 1e-3, steps=200)
    assert after.diagnostics["variance"].item() >= 0.999 * uniform
    assert after.diagnostics["attention_entropy"] < 0.98
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in surrogate.parameters())


def test_the_pull_of_a_trained_adversarial_gate_is_the_derivative_at_its_weights() -> None:
    z, y = frozen("gaussian")
    surrogate = build("gated", dim=DIM, classes=CLASSES, sigma=0.1)
    trained(surrogate, z, y, 1e-2, steps=50)
    surrogate, z = surrogate.double(), z.double().requires_grad_()
    (pull,) = torch.autograd.grad(surrogate(z, y).loss, z)
    own = z.detach().view(SAMPLES, CLASSES, DIM).transpose(0, 1)  # classes in turn
    mask = torch.ones(CLASSES, SAMPLES).double()
    assert isinstance(surrogate, Gated)
    a = surrogate.attend(surrogate.softmax(surrogate.logits(surrogate.norm(own)), mask), mask / SAMPLES).detach()

    def at_these_weights(x: torch.Tensor) -> torch.Tensor:
        return surrogate.penalty(surrogate.variances(surrogate.grouped(z, y), a, of=x)).mean()

    assert torch.autograd.gradcheck(at_these_weights, own.clone().requires_grad_(), fast_mode=True)
    own.requires_grad_()
    (expected,) = torch.autograd.grad(at_these_weights(own), own)
    torch.testing.assert_close(pull, expected.transpose(0, 1).reshape(-1, DIM))


@pytest.mark.parametrize("form", ["per_dimension", "trace"])
@pytest.mark.parametrize("objective", ["adversarial", "stopgrad", "cooperative"])
def test_a_bank_that_remembers_nothing_changes_nothing(objective: str, form: str) -> None:
    z, y = (each[:50] for each in frozen("heavy"))  # unequal classes
    told = []
    for bank in (0, 6):
        torch.manual_seed(0)
        surrogate = build("gated", dim=DIM, classes=CLASSES, sigma=0.1, gate_objective=objective, form=form, bank=bank).double()
        torch.nn.init.normal_(surrogate.w)
        features = z.double().requires_grad_()
        output = surrogate(features, y)
        pulls = torch.autograd.grad(output.loss, [features, *(p for p in surrogate.parameters() if p.requires_grad)])
        told.append((output.loss, output.loss_uniform, output.diagnostics, pulls))
    torch.testing.assert_close(*told)


def test_under_stopgrad_z_does_not_feel_the_gate() -> None:
    z, y = frozen("heavy")
    surrogate = build("gated", dim=DIM, classes=CLASSES, sigma=0.1, gate_objective="stopgrad").double()
    z = z.double().requires_grad_()
    (pull,) = torch.autograd.grad(surrogate(z, y).loss, z)
    own = z.detach().view(SAMPLES, CLASSES, DIM).transpose(0, 1).requires_grad_()
    mask = torch.ones(CLASSES, SAMPLES).double()
    assert isinstance(surrogate, Gated)
    a = surrogate.attend(surrogate.softmax(surrogate.logits(surrogate.norm(own)), mask), mask / SAMPLES).detach()
    assert a.std() > 0
    (expected,) = torch.autograd.grad(surrogate.penalty(surrogate.variances(surrogate.grouped(z, y), a, of=own)).mean(), own)
    torch.testing.assert_close(pull, expected.transpose(0, 1).reshape(-1, DIM))


def test_a_floor_of_all_samples_is_equal_weights_with_finite_gradients() -> None:
    z, y = frozen("gaussian")
    surrogate = build("gated", dim=DIM, classes=CLASSES, sigma=0.1, ess_floor=1.0)
    torch.nn.init.normal_(surrogate.w)
    output = surrogate(z, y)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(output.loss_uniform.item(), rel=1e-3)
    assert all(torch.isfinite(p.grad).all() for p in surrogate.parameters() if p.grad is not None)


def test_a_class_whose_gate_finds_less_spread_is_measured_with_equal_weights() -> None:
    z, y = frozen("heavy")
    surrogate = build("gated", dim=DIM, classes=CLASSES, sigma=0.1)
    trained(surrogate, z, y, 1e-2, steps=100)
    with torch.no_grad():
        surrogate.w.neg_()  # the gate now looks for the least spread
    output = surrogate(z, y)
    assert output.diagnostics["fallback"] == 1
    assert output.loss.item() == pytest.approx(output.loss_uniform.item(), rel=1e-6)


@pytest.mark.parametrize(("dim", "width"), [(8, 64), (1024, 128), (8192, 512)])
def test_the_hidden_width_follows_the_features(dim: int, width: int) -> None:
    assert len(build("gated", dim=dim, classes=2, sigma=0.1).w) == width


def test_as_written_the_gate_is_twice_as_wide() -> None:
    assert len(build("gated", dim=1024, classes=2, sigma=0.1, preset="as_written").w) == 256


@pytest.mark.parametrize("options", [{"ess_floor": 1.5}, {"entropy_floor": -0.1}, {"hidden": 0}, {"capacity": 1}], ids=str)
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        build("gated", dim=4, classes=2, sigma=0.1, **options)
