"""What every registered surrogate must do. A new one is tested here without a line added; VARIANTS can name more settings."""

from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from on_device import nobody_waits
from torch import Tensor

from splitveil.cem import CEM
from splitveil.registry import SURROGATES, UserError
from splitveil.surrogates import Surrogate, SurrogateOutput, build
from splitveil.surrogates.gated import Gated
from splitveil.surrogates.slots import Slots

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "rate": [{"form": "full"}, {"bank": 6}, {"form": "full", "bank": 6}, {"form": "turned", "directions": 3},
             {"form": "turned", "directions": 2, "bank": 6}, {"form": "tokens"},
             {"form": "tokens", "neighbours": False, "bank": 6}],
    "uniform": [{"tau_quantile": 0.3}, {"bank": 6}],
    "kmeans": [{"preset": "reference", "clusters": 2}, {"preset": "as_written", "clusters": 2}, {"form": "linear"},
               {"clusters": "auto"}, {"class_weights": "entropy"}],
    "gmm": [{"covariance": "full", "components": 2, "members": 4}, {"bank": 6}, {"components": "auto"}],
    "gated": [{"gate_objective": "stopgrad"}, {"form": "trace"}, {"entropy_floor": 0.99}, {"bank": 6},
              {"gate_objective": "cooperative"}, {"tokens": "positions"},
              {"tokens": "positions", "attention": "auto", "bank": 6, "monitor": True, "entropy_penalty": "floor"},
              {"monitor": True, "spectral": "capped", "entropy_penalty": "targets", "temperatures": True}],
    "slots": [{"slots": 2, "bank": 0}, {"slots": 2, "gates": "adversarial"}, {"slots": 2, "form": "per_slot"},
              {"slots": "auto", "bank": 0}, {"slots": 2, "bank": 0, "tokens": "positions"},
              {"slots": 2, "monitor": True, "spectral": "capped", "entropy_penalty": "targets", "temperatures": True}],
    "hybrid": [{"attention": "slots"}],
    "recall": [{"memory": "linear", "bank": 0}, {"memory": "both"}, {"unit": "seen", "rate": 0.5, "heads": 2, "width": 3}],
}  # fmt: skip
EVERY = [(name, options) for name in SURROGATES.names() for options in [{}, *VARIANTS.get(name, [])]]
AS_WRITTEN = [(name, {"preset": "as_written"}) for name in ("gated", "slots")]
every_surrogate = pytest.mark.parametrize(("name", "options"), EVERY, ids=lambda value: str(value))
CLASSES = 3
IMAGE = 1, 6, 6


def images_of(z: Tensor) -> Tensor:
    """[b, 1, 6, 6] images that z was made of: what z has in its first dimensions can be seen in them."""
    shown = torch.nn.functional.pad(z.detach().flatten(1)[:, :4], (0, max(0, 4 - z[0].numel())))
    return torch.sigmoid(shown).view(-1, 1, 2, 2).repeat_interleave(3, 2).repeat_interleave(3, 3)


def make(name: str, options: dict[str, Any], z: Tensor, y: Tensor, classes: int = CLASSES) -> Surrogate:
    """Built for these features under noise of 0.1, after a refresh and a step with them, its parameters somewhere."""
    torch.manual_seed(0)
    d = z[0].numel()
    surrogate = build(name, dim=d, classes=classes, sigma=0.1, image=IMAGE, z_shape=(1, 1, d), **options).to(z.dtype)
    with torch.no_grad():
        for parameter in surrogate.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if surrogate.refresh_every:
        surrogate.refresh(z.detach().flatten(1), y)
    if surrogate.bank is not None:
        surrogate.after_step(z.detach(), y, torch.tensor(True), images_of(z))
    return surrogate


def batch(b: int = 48, d: int = 5, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Features well above every threshold, classes in turn."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(b, d, generator=generator, dtype=dtype) + 1, torch.arange(b) % CLASSES


def gradient(surrogate: Surrogate, z: Tensor, y: Tensor) -> tuple[SurrogateOutput, Tensor]:
    x, z = images_of(z), z.detach().clone().requires_grad_()
    output = surrogate(z, y, x)
    (pull,) = torch.autograd.grad(output.loss, z)
    return output, pull


@every_surrogate
def test_it_returns_scalars_and_detached_diagnostics_on_the_device(name: str, options: dict[str, Any]) -> None:
    z, y = batch()
    z.requires_grad_()
    output = make(name, options, z, y)(z, y, images_of(z))
    assert isinstance(output, SurrogateOutput)
    assert output.loss.shape == output.loss_uniform.shape == ()
    assert output.loss.requires_grad
    assert not output.loss_uniform.requires_grad
    assert output.diagnostics
    for tensor in (output.loss, output.loss_uniform, *output.diagnostics.values()):
        assert isinstance(tensor, Tensor)
        assert tensor.device == z.device
    assert not any(value.requires_grad for value in output.diagnostics.values())


@every_surrogate
def test_the_keys_and_shapes_of_its_diagnostics_never_change(name: str, options: dict[str, Any]) -> None:
    z, y = batch(60)
    surrogate = make(name, options, z, y)
    labels = [y, torch.zeros_like(y), torch.arange(60) % 2, torch.tensor([0, *[1] * 59]), y[:1], y[:7]]
    told = [surrogate(z[: len(own)], own, images_of(z[: len(own)])).diagnostics for own in labels]
    assert len({tuple((key, value.shape, value.dtype) for key, value in one.items()) for one in told}) == 1


@pytest.mark.parametrize("name", SURROGATES.names())
def test_what_it_declares_for_the_report_it_logs_as_one_number(name: str) -> None:
    logged = make(name, {}, *batch())(*batch(), images_of(batch()[0])).diagnostics
    for key, quantity in SURROGATES[name].build.quantities.items():  # type: ignore[attr-defined]
        assert logged[key].shape == ()
        assert len(quantity.text) > 20


@every_surrogate
def test_it_writes_neither_into_z_nor_into_y(name: str, options: dict[str, Any]) -> None:
    z, y = batch()
    before = z.clone(), y.clone()
    gradient(make(name, options, z, y), z, y)
    assert torch.equal(z, before[0])
    assert torch.equal(y, before[1])


@every_surrogate
def test_its_reference_loss_knows_nothing_of_its_parameters(name: str, options: dict[str, Any]) -> None:
    z, y = batch()
    surrogate = make(name, options, z, y)
    before = surrogate(z, y, images_of(z)).loss_uniform
    with torch.no_grad():
        for parameter in surrogate.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert torch.equal(surrogate(z, y, images_of(z)).loss_uniform, before)
    assert before > 0


SPREADS = st.floats(0, 20) | st.floats(-30, 0).map(lambda exponent: 10**exponent)
"""Of ordinary size, and of every order of magnitude that z has on its way to 0."""


@every_surrogate
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(1, 40), d=st.integers(1, 12), spread=SPREADS)
@example(seed=0, b=4, d=1, spread=7.872268143170126e-13)  # 1 / spread^4 is infinite in float32
def test_its_loss_is_finite_and_not_negative(
    name: str, options: dict[str, Any], seed: int, b: int, d: int, spread: float
) -> None:
    z, y = batch(b, d, seed)
    output, pull = gradient(make(name, options, spread * z, y), spread * z, y)
    assert output.loss >= 0
    assert torch.isfinite(output.loss)
    assert torch.isfinite(pull).all()


@every_surrogate
def test_spread_features_are_pulled_and_a_small_step_along_the_pull_lowers_the_loss(name: str, options: dict[str, Any]):
    z, y = batch(dtype=torch.float64)
    surrogate = make(name, options, z, y)
    output, pull = gradient(surrogate, z, y)
    assert output.loss > 0
    assert pull.abs().sum(1).gt(0).all()  # every sample, not a few
    assert surrogate(z - 1e-3 * pull / pull.norm(), y, images_of(z)).loss < output.loss


@every_surrogate
def test_its_gradient_is_the_derivative_of_its_loss(name: str, options: dict[str, Any]) -> None:
    z, y = batch(48, 3, dtype=torch.float64)
    surrogate = make(name, options, z, y)
    surrogate.bank = None  # what it remembers multiplies the gradient: see test_groups
    hold_attention(surrogate, z, y)
    x = images_of(z)
    assert torch.autograd.gradcheck(lambda features: surrogate(features, y, x).loss, z.requires_grad_())


def hold_attention(surrogate: Surrogate, z: Tensor, y: Tensor) -> None:
    """Attention that reads z without handing a gradient back stays as it is at z."""
    for part in surrogate.modules():
        if isinstance(part, Slots):
            shares = part.shares(part.grouped(z, y))
            part.shares = lambda groups, shares=shares: shares
        elif isinstance(part, Gated) and part.config.gate_objective != "cooperative":
            groups = part.grouped(z, y)
            equal = groups.mask / groups.total.clamp_min(1).unsqueeze(1)
            weights = part.attend(part.softmax(part.logits(part.looked_at(groups.x, groups.mask)), groups.mask), equal)
            part.attend = lambda *_, weights=weights: weights


@every_surrogate
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_neither_the_order_of_samples_nor_the_names_of_classes_matter(name: str, options: dict[str, Any], seed: int):
    z, y = batch(47, 4, seed, torch.float64)
    order = torch.randperm(47, generator=torch.Generator().manual_seed(seed))
    names = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(seed))
    output, pull = gradient(make(name, options, z, y), z, y)
    shuffled, shuffled_pull = gradient(make(name, options, z, y), z[order], y[order])
    renamed, renamed_pull = gradient(make(name, options, z, names[y]), z, names[y])
    torch.testing.assert_close(shuffled.loss, output.loss)
    torch.testing.assert_close(shuffled_pull, pull[order])
    torch.testing.assert_close(renamed.loss, output.loss)
    torch.testing.assert_close(renamed_pull, pull)


@every_surrogate
def test_classes_do_not_pull_on_each_other(name: str, options: dict[str, Any]) -> None:
    z, y = batch(dtype=torch.float64)
    surrogate = make(name, options, z, y)
    moved = torch.where((y == 0).unsqueeze(1), z + 5, z)  # class 0 moves as a whole
    torch.testing.assert_close(gradient(surrogate, moved, y)[1][y != 0], gradient(surrogate, z, y)[1][y != 0])


@every_surrogate
def test_duplicated_samples_change_nothing(name: str, options: dict[str, Any]) -> None:
    z, y = batch(dtype=torch.float64)  # more samples of a class than dimensions: what is spanned stays the same
    surrogate = make(name, options, z, y)
    both = torch.cat([z, z])
    once, twice = surrogate(z, y, images_of(z)).loss, surrogate(both, torch.cat([y, y]), images_of(both)).loss
    if surrogate.needs_images:  # who remembers a copy recalls the image
        assert twice > once
        return
    # More samples of a class weigh more against what is stored of it, and make a variance less biased.
    exact = not surrogate.knows_classes and surrogate.bank is None and name != "slots"
    torch.testing.assert_close(twice, once, **({} if exact else {"rtol": 0.1, "atol": 0}))


@every_surrogate
@pytest.mark.parametrize(("b", "labels"), [(12, [0] * 12), (3, [0, 1, 2]), (1, [2]), (6, [1, 1, 1, 1, 1, 2])],
                         ids=["one class", "one sample per class", "one sample", "empty class"])  # fmt: skip
def test_odd_batches_give_a_finite_loss_and_gradient(name: str, options: dict[str, Any], b: int, labels: list[int]):
    z, _ = batch(b)
    y = torch.tensor(labels)
    surrogate = make(name, options, *batch())
    output, pull = gradient(surrogate, z, y)
    assert torch.isfinite(output.loss)
    assert torch.isfinite(pull).all()
    pairs = torch.bincount(y, minlength=CLASSES)[y] > 1
    known = surrogate.knows_classes or surrogate.bank is not None
    assert torch.equal(pull.ne(0).any(1), pairs | known)  # who is alone is pulled to what is known


@every_surrogate
def test_constant_features_have_no_loss_and_no_pull(name: str, options: dict[str, Any]) -> None:
    z, y = torch.full((48, 5), 3.0), torch.arange(48) % CLASSES
    output, pull = gradient(make(name, options, z, y), z, y)
    assert output.loss.item() == pytest.approx(0, abs=1e-6)
    assert not pull.any()


@every_surrogate
def test_of_a_thousand_classes_only_those_with_two_samples_are_pulled(name: str, options: dict[str, Any]) -> None:
    z, _ = batch(64, 16)
    y = torch.arange(64) * 15 % 1000
    y[:8] = 999
    output, pull = gradient(make(name, options, z, y, classes=1000), z, y)
    assert output.loss > 0
    assert pull[:8].any(1).all()
    assert not pull[8:].any()


@pytest.mark.parametrize("name", SURROGATES.names())
@pytest.mark.parametrize(("b", "classes"), [(128, 200), (256, 1000)])
def test_with_many_classes_nearly_every_sample_is_pulled(name: str, b: int, classes: int) -> None:
    """Without a memory more than half of them would have no company in their batch."""
    generator = torch.Generator().manual_seed(0)
    surrogate = build(name, dim=4, classes=classes, sigma=0.1, batch=b, image=IMAGE)
    if surrogate.refresh_every:
        y = torch.arange(8 * classes) % classes
        surrogate.refresh(2 * torch.randn(len(y), 4, generator=generator), y)
    for _ in range(3 * classes // b + 3):  # all classes have been seen, most of them twice
        y = torch.randint(classes, (b,), generator=generator)
        z = 2 * torch.randn(b, 4, generator=generator)
        surrogate.after_step(z, y, torch.tensor(True), images_of(z))
    assert gradient(surrogate, z + 0.1, y)[1].any(1).float().mean() > 0.9


@every_surrogate
@pytest.mark.parametrize("d", [1, 2, 64, 4096])
def test_any_number_of_dimensions_works(name: str, options: dict[str, Any], d: int) -> None:
    z, y = batch(48, d)
    if options.get("covariance") == "full" and d > 1024:
        with pytest.raises(UserError, match="diagonal"):
            make(name, options, z, y)
        return
    output, pull = gradient(make(name, options, z, y), z, y)
    assert 0 < output.loss < 100  # per dimension: of the same size for all d
    assert torch.isfinite(pull).all()


@every_surrogate
def test_features_with_spatial_axes_are_taken_as_they_come(name: str, options: dict[str, Any]) -> None:
    z, y = batch(48, 12)
    surrogate = make(name, options, z, y)
    output, pull = gradient(surrogate, z.reshape(48, 3, 2, 2), y)
    assert torch.isfinite(output.loss)
    assert pull.shape == (48, 3, 2, 2)


@every_surrogate
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_are_pulled_through_cem(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    z, y = batch(48)
    cem = CEM(make(name, options, z, y), strength=1.0, warmup=0, loss_scale=1.0)
    cem.schedule(0, 1e-3)
    _, expected = gradient(cem.surrogate, z.to(dtype).float(), y)
    half = z.to(dtype).requires_grad_()
    cem.backward(half.float().sum() * 0, half, y, x=images_of(half.float()))
    assert half.grad is not None
    torch.testing.assert_close(half.grad, expected.to(dtype))
    assert (cem.steps, cem.skipped, cem.inactive) == (1, 0, 0)


@every_surrogate
@pytest.mark.parametrize("how", ["bfloat16", "float16", "autocast"])
def test_without_cem_half_precision_features_are_measured_in_float32(name: str, options: dict[str, Any], how: str) -> None:
    z, y = batch(48)
    surrogate = make(name, options, z, y)
    half = z if how == "autocast" else z.to(getattr(torch, how))
    expected, expected_pull = gradient(surrogate, half.float(), y)
    half = half.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        output = surrogate(half, y, images_of(half.float()))
        surrogate.after_step(half.detach(), y, torch.tensor(True), images_of(half.float()))
    (pull,) = torch.autograd.grad(output.loss, half)
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(output.loss_uniform, expected.loss_uniform)
    assert torch.equal(pull, expected_pull.to(half.dtype))


@every_surrogate
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_values_that_cannot_be_measured_are_a_counted_skip(name: str, options: dict[str, Any], value: float) -> None:
    z, y = batch()
    cem = CEM(make(name, options, z, y), warmup=0)
    cem.schedule(0, 1e-3)
    z[0, 0] = value
    z.requires_grad_()
    cem.backward(z.nan_to_num(0).sum() * 0, z, y, x=images_of(batch()[0]))
    assert cem.skipped == 1
    assert z.grad is not None
    assert not z.grad.any()
    assert all(torch.isfinite(parameter).all() for parameter in cem.parameters())


@pytest.mark.parametrize(("name", "options"), [*EVERY, *AS_WRITTEN], ids=lambda value: str(value))
def test_nothing_in_a_step_waits_for_the_device(name: str, options: dict[str, Any]) -> None:
    surrogate = make(name, options, *batch()).to("meta")
    z = torch.empty(48, 5, device="meta", requires_grad=True)
    y, finite = torch.empty(48, dtype=torch.int64, device="meta"), torch.empty((), dtype=torch.bool, device="meta")
    x = torch.empty(48, *IMAGE, device="meta")
    with nobody_waits():
        surrogate(z, y, x).loss.backward()
        surrogate.after_step(z.detach(), y, finite, x)


@every_surrogate
def test_its_state_survives_safetensors(name: str, options: dict[str, Any]) -> None:
    z, y = batch()
    trained = make(name, options, z, y)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1)
    fresh = build(name, dim=5, classes=CLASSES, sigma=0.1, image=IMAGE, z_shape=(1, 1, 5), **options)
    fresh.load_state_dict(safetensors.torch.load(safetensors.torch.save(trained.state_dict())))
    assert torch.equal(fresh(z, y, images_of(z)).loss, trained(z, y, images_of(z)).loss)


@every_surrogate
def test_its_defaults_for_cem_make_sense(name: str, options: dict[str, Any]) -> None:
    surrogate = make(name, options, *batch())
    assert surrogate.warmup >= 0
    assert surrogate.loss_scale > 0
    assert surrogate.tau is None or surrogate.tau > 0


@pytest.mark.parametrize("name", SURROGATES.names())
@pytest.mark.parametrize("needs", [{"dim": 0, "classes": 2}, {"dim": 3, "classes": 0}])
def test_no_dimensions_or_no_classes_are_refused(name: str, needs: dict[str, int]) -> None:
    with pytest.raises(UserError, match="must be at least 1"):
        build(name, sigma=0.1, image=IMAGE, **needs)


@every_surrogate
def test_features_of_another_size_than_it_was_built_for_are_refused(name: str, options: dict[str, Any]) -> None:
    z, y = batch(d=5)
    with pytest.raises(UserError, match="built for dim=5, z has 6"):
        make(name, options, z, y)(torch.cat([z, z[:, :1]], 1), y, images_of(z))


@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(name, options, marks=[pytest.mark.slow] * bool(options)) for name, options in EVERY],  # ten batches each
    ids=[f"{name}-{options}" for name, options in EVERY],
)
def test_two_threads_give_the_same_bits_every_time(name: str, options: dict[str, Any]) -> None:
    """A run must resume bit for bit with as many threads as the machine has."""
    z, y = batch(64, 512)
    surrogate = make(name, options, z, y)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pulls = {gradient(surrogate, z, y)[1].numpy().tobytes() for _ in range(10)}
    finally:
        torch.set_num_threads(threads)
    assert len(pulls) == 1
