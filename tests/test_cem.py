import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import splitveil
from splitveil import cem as cem_module
from splitveil import cem_watch, surrogates
from splitveil.cem import CEM, ramped, rescale
from splitveil.channel import Channel
from splitveil.compute import process_group as distributed
from splitveil.compute.cuda_graph import settings_of
from splitveil.registry import UserError
from splitveil.statistics.by_class import class_moments, over_classes
from splitveil.surrogates import FeatureSpace, Surrogate, SurrogateOutput

B, D, CLASSES = 12, 4 * 4 * 4, 3


class Learned(Surrogate):
    """A surrogate with parameters: the class variance of the features, each dimension weighted by a learned gate."""

    warmup = 0

    def __init__(self, dim: int = D, classes: int = CLASSES) -> None:
        super().__init__(None, FeatureSpace(dim, classes))
        self.gate = nn.Linear(dim, dim)

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        z = z.flatten(1)
        weight = torch.sigmoid(self.gate(z)).mean(0)
        count, _, variance = class_moments(z, y, self.classes)
        loss = over_classes((variance * weight).mean(1), count)
        plain = over_classes(variance.mean(1), count).detach()
        return SurrogateOutput(loss, plain, {"variance": variance.mean(1).detach()})


def small_edge() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4))


def small_cloud(inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.ReLU(inplace=inplace), nn.Flatten(), nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.rand(B, 1, 8, 8, dtype=dtype), torch.arange(B) % CLASSES


def halves(dtype: torch.dtype = torch.float64, inplace: bool = False) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    return small_edge().to(dtype), small_cloud(inplace).to(dtype)


def active_cem(surrogate: Surrogate | None = None, epoch: int = 50, lr: float = 1e-4, **options: object) -> CEM:
    """A CEM past its warm-up."""
    if surrogate is None:
        torch.manual_seed(2)
        surrogate = Learned().double()
    cem = CEM(surrogate, **options)  # type: ignore[arg-type]
    cem.schedule(epoch, lr)
    return cem


def grads(*modules: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None]


def two_passes(
    edge: nn.Module, cloud: nn.Module, surrogate: nn.Module, x: Tensor, y: Tensor, coef: float
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Gradients of edge, cloud and surrogate by two passes: of the surrogate's loss first, then of the task's, then their sum."""
    z = edge(x)
    loss = F.cross_entropy(cloud(z), y)
    surrogate(z, y).loss.backward(retain_graph=True)
    stash = grads(edge)
    learned = grads(surrogate)
    for module in (edge, cloud, surrogate):
        module.zero_grad()
    loss.backward()
    blended = [task + coef * own for task, own in zip(grads(edge), stash, strict=True)]
    return blended, grads(cloud), learned


def assert_equal_gradients(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert b.norm() > 1e-9  # a comparison of zeros would prove nothing
        assert (a - b).norm() <= 1e-6 * b.norm() + 1e-12


@pytest.mark.parametrize("coef", [0.5, 16.0])
def test_one_backward_pass_equals_two_passes(coef: float) -> None:
    x, y = data()
    edge, cloud = halves()
    cem = active_cem(strength=coef, lr_rescale="off")
    expected = two_passes(*copy.deepcopy((edge, cloud, cem.surrogate)), x, y, coef)
    z = edge(x)
    cem.backward(F.cross_entropy(cloud(z), y), z, y)
    for ours, theirs in zip((grads(edge), grads(cloud), grads(cem.surrogate)), expected, strict=True):
        # A bias in front of a BatchNorm has no gradient but rounding errors: leave it out.
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if b.norm() > 1e-9]
        assert len(pairs) >= len(theirs) - 1
        assert_equal_gradients([a for a, _ in pairs], [b for _, b in pairs])


def test_the_cem_gradient_matters_in_that_comparison() -> None:
    x, y = data()
    edge, cloud = halves()
    cem = active_cem(strength=16.0, lr_rescale="off")
    with_cem, _, _ = two_passes(*copy.deepcopy((edge, cloud, cem.surrogate)), x, y, 16.0)
    without, _, _ = two_passes(*copy.deepcopy((edge, cloud, cem.surrogate)), x, y, 0.0)
    assert max((a - b).norm() / b.norm() for a, b in zip(with_cem, without, strict=True)) > 0.01


@pytest.mark.parametrize("inplace", [False, True])
def test_an_in_place_relu_behind_an_identity_channel_changes_no_gradient(inplace: bool) -> None:
    x, y = data()
    edge, cloud = halves(inplace=inplace)
    channel, cem = Channel(), active_cem(strength=4.0, lr_rescale="off")
    plain = copy.deepcopy((edge, halves(inplace=False)[1], cem.surrogate))
    expected_edge, expected_cloud, expected_surrogate = two_passes(*plain, x, y, 4.0)
    z = edge(x)
    cem.backward(F.cross_entropy(cloud(channel.send(z, x)), y), z, y)
    assert_equal_gradients(grads(edge)[2:], expected_edge[2:])  # BatchNorm's own; its input's bias has no gradient
    assert_equal_gradients(grads(edge)[:1], expected_edge[:1])
    assert_equal_gradients(grads(cloud)[2:], expected_cloud[2:])
    assert_equal_gradients(grads(cem.surrogate), expected_surrogate)


class TheirNet(nn.Module):
    """A user's own network; the ReLU after the cut writes in place."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=inplace)
        self.fc = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.relu(self.bn1(self.conv1(x))), 1))


def test_a_users_own_loop_of_six_lines_gets_the_same_gradients_as_two_passes() -> None:
    x, y = data()
    torch.manual_seed(0)
    net = TheirNet(inplace=True).double()
    plain = TheirNet(inplace=False).double()
    plain.load_state_dict(net.state_dict())

    model = splitveil.split(net, at="bn1", example=x)
    cem = splitveil.CEM(surrogates.build("rate", dim=D, classes=CLASSES, sigma=0.1), strength=4, warmup=0)
    cem.schedule(epoch=0, lr=0.05)
    z = model.edge(x)
    loss = F.cross_entropy(model.cloud(z), y)
    cem.backward(loss, z, y)

    z = plain.bn1(plain.conv1(x))
    loss = F.cross_entropy(plain.fc(torch.flatten(plain.relu(z), 1)), y)
    own = torch.autograd.grad(cem.surrogate(z, y).loss, list(plain.parameters()), retain_graph=True, allow_unused=True)
    task = torch.autograd.grad(loss, list(plain.parameters()))
    coef = 4 * 1e-3 / 0.05
    expected = [t if o is None else t + coef * o for t, o in zip(task, own, strict=True)]
    assert sum(o is not None for o in own) == 3  # conv1 and bn1's two: the edge and nothing else
    assert_equal_gradients(grads(net), expected)


@pytest.mark.parametrize(("kind", "lr", "rho"), [
    ("off", 0.1, 1.0), ("off", 1e-5, 1.0),
    ("capped", 1e-5, 1.0), ("capped", 1e-3, 1.0), ("capped", 4e-3, 0.25), ("capped", 0.1, 0.01), ("capped", 0.0, 1.0),
    ("reference", 4.09e-4, 1.0), ("reference", 4.1e-4, 1e-3 / 4.1e-4), ("reference", 5e-4, 2.0), ("reference", 0.1, 0.01),
])  # fmt: skip
def test_the_learning_rate_rescaling_has_its_published_values(kind: str, lr: float, rho: float) -> None:
    assert rescale(kind, lr) == pytest.approx(rho, rel=1e-12)


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0))
def test_the_capped_rescaling_never_grows_with_the_learning_rate_and_never_exceeds_one(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert 0 < rescale("capped", high) <= rescale("capped", low) <= 1


def test_warm_up_then_ramp_then_full_strength() -> None:
    assert [ramped(epoch, 2, 0) for epoch in range(5)] == [0, 0, 1, 1, 1]
    assert [ramped(epoch, 0, 0) for epoch in range(2)] == [1, 1]
    assert [ramped(epoch, 1, 3) for epoch in range(6)] == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])


def test_the_coefficient_is_strength_times_ramp_times_loss_scale_times_rescaling() -> None:
    cem = CEM(Learned(), strength=8, lr_rescale="capped", warmup=1, ramp=1, loss_scale=0.25)
    seen = []
    for epoch in range(4):
        cem.schedule(epoch, lr=0.01)
        seen.append((cem.coef.item(), cem.active, cem.full_strength(epoch)))
    assert [coef for coef, _, _ in seen] == pytest.approx([0, 0.1, 0.2, 0.2])
    assert [active for _, active, _ in seen] == [False, True, True, True]
    assert [full for _, _, full in seen] == [False, False, True, True]


def test_warm_up_and_loss_scale_default_to_the_surrogates_own() -> None:
    surrogate = surrogates.build("uniform", dim=D, classes=CLASSES, sigma=0.1)
    assert (CEM(surrogate).warmup, CEM(surrogate).loss_scale) == (surrogate.warmup, surrogate.loss_scale)
    assert surrogate.loss_scale != 1
    assert (CEM(surrogate, warmup=7, loss_scale=3.0).warmup, CEM(surrogate, loss_scale=3.0).loss_scale) == (7, 3.0)


def test_during_warm_up_only_the_task_is_trained_and_nothing_is_counted() -> None:
    x, y = data()
    edge, cloud = halves()
    cem = CEM(Learned().double(), warmup=3)
    cem.schedule(2, 1e-3)
    expected, _, _ = two_passes(*copy.deepcopy((edge, cloud, cem.surrogate)), x, y, 0.0)
    z = edge(x)
    cem.backward(F.cross_entropy(cloud(z), y), z, y)
    for ours, theirs in zip(grads(edge), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert (cem.steps, cem.skipped, cem.inactive, cem.last) == (0, 0, 0, None)
    assert not grads(cem.surrogate)


def test_an_impossible_setting_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"strength is -1\.0, must be at least 0"):
        CEM(Learned(), strength=-1.0)


def gradient_at_the_cut(cem: CEM, scaler: object = None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient that reached z, the task's own and the CEM's own, the latter two computed apart."""
    x, y = data(dtype)
    edge, cloud = halves(dtype)
    z = edge(x)
    loss = F.cross_entropy(cloud(z), y)
    (task,) = torch.autograd.grad(loss, z, retain_graph=True)
    own = z.detach().clone().requires_grad_()
    wide = own if dtype == torch.float64 else own.float()
    (entropy,) = torch.autograd.grad(copy.deepcopy(cem.surrogate)(wide, y).loss, own)
    z.retain_grad()
    cem.backward(loss, z, y, scaler)  # type: ignore[arg-type]
    assert z.grad is not None
    return z.grad, task, entropy


@pytest.mark.parametrize("clip", [0.01, 0.5])
def test_clipping_bounds_the_cem_gradient_by_a_share_of_the_task_gradient(clip: float) -> None:
    total, task, entropy = gradient_at_the_cut(active_cem(strength=1e4, lr_rescale="off", clip=clip))
    added = total - task
    assert added.norm() == pytest.approx(clip * task.norm().item(), rel=1e-6)
    assert F.cosine_similarity(added.flatten(), entropy.flatten(), dim=0) > 1 - 1e-9  # shortened, not turned


def test_clipping_leaves_a_small_cem_gradient_as_it_is() -> None:
    total, task, entropy = gradient_at_the_cut(active_cem(strength=1e-3, lr_rescale="off", clip=10.0))
    torch.testing.assert_close(total - task, 1e-3 * entropy, rtol=1e-5, atol=1e-15)


def test_clipping_of_a_zero_cem_gradient_leaves_the_task_gradient() -> None:
    surrogate = surrogates.build("uniform", dim=D, classes=CLASSES, sigma=1.0, var_threshold=1e6)
    cem = active_cem(surrogate, clip=1.0)
    total, task, entropy = gradient_at_the_cut(cem)
    assert not entropy.any()
    torch.testing.assert_close(total, task)
    assert cem.inactive == 1


def test_the_bound_of_clipping_holds_for_scaled_float16_gradients_whose_norm_overflows() -> None:
    """The largest float16 is 65,504, and the sum of squares of a scaled gradient is larger."""
    z = torch.randn(64, 100, dtype=torch.float16, requires_grad=True)
    y = torch.arange(64) % CLASSES
    rate = surrogates.build("rate", dim=100, classes=CLASSES, sigma=0.1)
    cem = active_cem(rate, strength=1e7, lr_rescale="off", clip=0.5)
    cem.backward((z * 1000).sum(), z, y, StubScaler(10.0))  # type: ignore[arg-type]
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()
    task = torch.full_like(z, 10000.0).double()
    assert (z.grad.double() - task).norm() == pytest.approx(0.5 * task.norm().item(), rel=0.01)


class StubScaler:
    """What CEM needs of a GradScaler."""

    def __init__(self, factor: float) -> None:
        self.factor = torch.tensor(factor)

    def scale(self, value: Tensor) -> Tensor:
        return value * self.factor


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_gradient_scaler_scales_both_gradients_alike(clip: float | None) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain, _, _ = gradient_at_the_cut(active_cem(strength=16.0, lr_rescale="off", clip=clip))
    scaled, _, _ = gradient_at_the_cut(active_cem(strength=16.0, lr_rescale="off", clip=clip), scaler)
    torch.testing.assert_close(scaled, 1024 * plain)


def test_a_gradient_scaler_reaches_the_task_during_warm_up_too() -> None:
    cem = CEM(Learned().double(), warmup=9)
    cem.schedule(0, 1e-3)
    scaled, task, _ = gradient_at_the_cut(cem, StubScaler(8.0))
    torch.testing.assert_close(scaled, 8 * task)


def test_bfloat16_features_get_a_bfloat16_gradient_from_float32_statistics() -> None:
    torch.manual_seed(0)
    z = (3 + 0.1 * torch.randn(64, 20)).bfloat16().requires_grad_()
    y = torch.arange(64) % CLASSES
    cem = active_cem(surrogates.build("rate", dim=20, classes=CLASSES, sigma=0.1), strength=2.0, lr_rescale="off")
    cem.backward(z.float().mean() * 0, z, y)
    wide = z.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(cem.surrogate(wide, y).loss, wide)
    assert z.grad is not None
    assert z.grad.dtype == torch.bfloat16
    torch.testing.assert_close(z.grad, (2 * expected).bfloat16())
    assert cem.last is not None
    assert cem.last.loss.dtype == torch.float32


def poisoned(z: Tensor) -> Tensor:
    """NaN in the last sample."""
    bad = torch.zeros_like(z, dtype=torch.bool)
    bad[-1] = True
    return torch.where(bad, torch.nan, z)


def test_a_nan_in_one_sample_skips_the_cem_step_counts_it_and_leaves_all_parameters_finite() -> None:
    x, y = data()
    edge, cloud = halves()
    cem = active_cem(strength=16.0)
    z = poisoned(edge(x))
    loss = F.cross_entropy(cloud(z[:-1]), y[:-1])
    expected = torch.autograd.grad(loss, list(edge.parameters()), retain_graph=True)
    cem.backward(loss, z, y)
    for parameter, task in zip(edge.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, task)  # the task's step is taken, CEM's is not
    assert (cem.steps, cem.skipped) == (1, 1)
    for parameter in cem.parameters():
        assert torch.isfinite(parameter).all()


def test_a_skipped_step_does_not_move_the_surrogate_not_even_by_adams_momentum() -> None:
    """A zero gradient would move it, because Adam goes on along its running mean."""
    x, y = data()
    z = x.flatten(1).requires_grad_()
    torch.manual_seed(2)
    cem = active_cem(Learned().double())
    for _ in range(3):
        cem.backward(z.sum() * 0, z, y)
    before, state = copy.deepcopy(cem.surrogate.state_dict()), copy.deepcopy(cem.optimizer.state_dict()["state"])  # type: ignore[union-attr]
    bad = poisoned(z)
    cem.backward(z.sum() * 0, bad, y)
    after = cem.optimizer.state_dict()["state"]  # type: ignore[union-attr]
    assert cem.skipped == 1
    assert all(torch.equal(before[name], value) for name, value in cem.surrogate.state_dict().items())
    assert state[0].keys() == after[0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(state[i][key], after[i][key]) for i in state for key in state[i])
    cem.backward(z.sum() * 0, z, y)
    assert not torch.equal(before["gate.weight"], cem.surrogate.state_dict()["gate.weight"])  # and then it goes on


class Spiky(Surrogate):
    """Its loss and the gradient of z are finite, but the gradient of one parameter is infinite."""

    def __init__(self) -> None:
        super().__init__(None, FeatureSpace(1, CLASSES))
        self.root, self.other = nn.Parameter(torch.zeros(())), nn.Parameter(torch.ones(()))

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        loss = z.square().mean() * self.other + self.root.sqrt()
        return SurrogateOutput(loss, loss.detach(), {})


def test_an_infinite_gradient_of_a_surrogate_parameter_skips_and_counts_the_whole_step() -> None:
    cem = active_cem(Spiky())
    z = torch.randn(B, 4, requires_grad=True)
    cem.backward(z.sum() * 0, z, torch.arange(B) % CLASSES)
    assert cem.skipped == 1
    assert z.grad is not None
    assert not z.grad.any()
    assert [p.item() for p in cem.surrogate.parameters()] == [0.0, 1.0]


def test_the_surrogate_is_trained_as_plain_adam_trains_it() -> None:
    x, y = data()
    z = x.flatten(1).requires_grad_()
    torch.manual_seed(2)
    cem = active_cem(Learned().double(), lr=1e-4)
    twin = copy.deepcopy(cem.surrogate)
    adam = torch.optim.Adam(twin.parameters(), lr=1e-3, foreach=False)
    for _ in range(5):
        cem.backward(z.sum() * 0, z, y)
        adam.zero_grad()
        twin(z.detach(), y).loss.backward()
        adam.step()
    for ours, theirs in zip(cem.surrogate.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_steps_with_a_zero_gradient_are_counted_as_inactive_and_others_are_not() -> None:
    cem = active_cem(surrogates.build("uniform", dim=4, classes=CLASSES, sigma=0.1))
    y = torch.arange(B) % CLASSES
    for spread in (0.0, 1.0, 0.0, 1.0, 0.0):
        z = (spread * torch.randn(B, 4)).requires_grad_()
        cem.backward(z.sum(), z, y)
    assert (cem.steps, cem.inactive, cem.skipped) == (5, 3, 0)


def test_a_frozen_edge_trains_the_cloud_and_counts_as_inactive() -> None:
    x, y = data()
    edge, cloud = halves()
    edge.requires_grad_(False)
    cem = active_cem()
    z = edge(x)
    cem.backward(F.cross_entropy(cloud(z), y), z, y)
    assert not grads(edge)
    assert all(g.any() for g in grads(cloud)[2:])
    assert (cem.steps, cem.inactive, cem.skipped) == (1, 1, 0)


def test_the_gradients_left_on_the_surrogate_are_those_of_this_step_alone() -> None:
    x, y = data()
    z = x.flatten(1).requires_grad_()
    torch.manual_seed(2)
    cem = active_cem(Learned().double())
    cem.backward(z.sum(), z, y)
    twin = copy.deepcopy(cem.surrogate)
    twin.zero_grad()
    twin(z.detach(), y).loss.backward()
    cem.backward(z.sum(), z, y)
    for ours, theirs in zip(grads(cem.surrogate), grads(twin), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_state_survives_safetensors_and_a_resumed_run_goes_on_alike() -> None:
    x, y = data()
    z = x.flatten(1).requires_grad_()
    torch.manual_seed(2)
    first = active_cem(Learned().double(), strength=3.0)
    for _ in range(2):
        first.backward(z.sum(), z, y)
    second = CEM(Learned().double(), strength=3.0)
    second.load_state_dict(safetensors.torch.load(safetensors.torch.save(first.state_dict())))
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))  # type: ignore[union-attr]
    assert (second.coef, second.steps, second.inactive, second.skipped) == (first.coef, 2, 0, 0)
    second.schedule(50, 1e-4)
    for cem in (first, second):
        z.grad = None
        cem.backward(z.sum(), z, y)
    assert first.state_dict().keys() == second.state_dict().keys()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


@contextmanager
def no_reads(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raise an error at whatever brings a value from the device to the host."""

    def raising(name: str) -> Callable[..., None]:
        def read(*_: object, **__: object) -> None:
            raise AssertionError(f"Tensor.{name} waits for the device")

        return read

    names = (
        "item", "tolist", "cpu", "numpy", "nonzero",
        "__bool__", "__float__", "__int__", "__index__", "__contains__",
    )  # fmt: skip
    with patch.context() as context:
        for name in names:
            context.setattr(Tensor, name, raising(name))
        yield


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", ["learned", *surrogates.SURROGATES.names()])
def test_backward_never_waits_for_the_device_after_its_first_step(
    name: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data(torch.float32)
    edge, cloud = halves(torch.float32)
    surrogate = Learned()
    if name != "learned":
        surrogate = surrogates.build(name, dim=D, classes=CLASSES, sigma=0.1, image=(1, 8, 8))
    cem = active_cem(surrogate, clip=clip)
    monkeypatch.setattr(cem_watch, "on_host", lambda y: False)  # as if these tensors were on a GPU
    z = edge(x)
    cem.backward(F.cross_entropy(cloud(z), y), z, y, x=x)  # the first step may look at labels and statistics, once
    z = edge(x)
    loss = F.cross_entropy(cloud(z), y)
    with no_reads(monkeypatch):
        with pytest.raises(AssertionError, match="waits"):
            bool(loss > 0)
        cem.backward(loss, z, y, x=x)
    assert cem.steps == 2


class Looking(Learned):
    """A surrogate that looks at images: each class by how bright they are."""

    needs_images = True

    def __init__(self, dim: int = D) -> None:
        Surrogate.__init__(self, None, FeatureSpace(dim, CLASSES, image=(1, 8, 8)))
        self.gate = nn.Linear(dim, dim)
        self.remembered: Tensor | None = None

    def forward(self, z: Tensor, y: Tensor, x: Tensor) -> SurrogateOutput:
        return super().forward(z * x.flatten(1).mean(1).view(-1, *(1,) * (z.dim() - 1)), y)

    def after_step(self, z: Tensor, y: Tensor, finite: Tensor, x: Tensor | None = None) -> None:
        self.remembered = x


def test_images_reach_the_surrogate_that_looks_at_them_and_no_other() -> None:
    x, y = data()
    edge, cloud = halves()
    torch.manual_seed(2)
    cem = active_cem(Looking().double(), strength=2.0, lr_rescale="off")
    expected = copy.deepcopy(cem.surrogate)
    z = edge(x)
    cem.backward(F.cross_entropy(cloud(z), y), z, y, x=x)
    assert cem.last is not None
    torch.testing.assert_close(cem.last.loss, expected(z, y, x).loss.detach())
    assert cem.surrogate.remembered is not None
    assert torch.equal(cem.surrogate.remembered, x)  # type: ignore[arg-type]
    plain = active_cem()
    z = edge(x)
    plain.backward(F.cross_entropy(cloud(z), y), z, y, x=torch.full_like(x, torch.nan))  # Learned would not take a third argument
    assert plain.skipped == 0


@pytest.mark.parametrize("epoch", [0, 50])
def test_images_may_be_given_to_look_alone_also_in_the_warm_up(epoch: int) -> None:
    cem = active_cem(Looking(4), epoch=epoch, warmup=1)
    z, y = torch.randn(B, 4, requires_grad=True), torch.arange(B) % CLASSES
    cem.look(z, y, x=torch.rand(B, 1, 8, 8))
    cem.backward(z.sum(), z, y)
    assert z.grad is not None


@pytest.mark.parametrize("epoch", [0, 50])
def test_images_that_are_missing_are_one_line_also_in_the_warm_up(epoch: int) -> None:
    cem = active_cem(Looking(4), epoch=epoch, warmup=1)
    z, y = torch.randn(B, 4, requires_grad=True), torch.arange(B) % CLASSES
    with pytest.raises(UserError, match=r"^surrogate 'looking' looks at the images .*: cem.backward\(loss, z, y, x=x\)$"):
        cem.backward(z.sum(), z, y)
    with pytest.raises(TypeError):  # by name only: a third tensor in the place of the scaler would be taken for one
        cem.backward(z.sum(), z, y, None, torch.zeros(B, 1, 8, 8))  # type: ignore[misc]


def test_a_surrogate_that_looks_at_images_must_know_their_shape() -> None:
    with pytest.raises(UserError, match=r"'recall' looks at images .*image=\(3, 32, 32\)"):
        surrogates.build("recall", dim=4, classes=2, sigma=0.1)


@settings(max_examples=10, deadline=None)
@given(world=st.integers(2, 4), seed=st.integers(0, 1000))
def test_images_of_all_processes_reach_a_surrogate(world: int, seed: int) -> None:
    """Each process takes its turn, as below: the average of their gradients is that of the whole batch with its images."""
    b = 8
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(world * b, 5, generator=generator, dtype=torch.float64)
    images = torch.rand(world * b, 1, 8, 8, generator=generator, dtype=torch.float64) + whole[:, :1, None, None]
    y = torch.randint(0, CLASSES, (world * b,), generator=generator)
    everywhere = {torch.int64: lambda _: y, torch.float64: lambda own: whole if own.dim() == 2 else images}
    surrogate = surrogates.build("recall", dim=5, classes=CLASSES, sigma=0.1, image=(1, 8, 8), bank=6).double()

    def gradient(z: Tensor, labels: Tensor, x: Tensor) -> tuple[Tensor, Surrogate]:
        cem = active_cem(copy.deepcopy(surrogate), strength=2.0, lr_rescale="off")
        z = z.clone().requires_grad_()
        cem.backward(z.sum() * 0, z, labels, x=x)
        assert z.grad is not None
        return z.grad, cem.surrogate

    expected, taught = gradient(whole, y, images)
    assert expected.any()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cem_module, "gather", lambda tensor: everywhere[tensor.dtype](tensor))
        for rank in range(world):
            patch.setattr(cem_module.dist, "get_rank", lambda rank=rank: rank)
            mine = slice(rank * b, (rank + 1) * b)
            own, after = gradient(whole[mine], y[mine], images[mine])
            torch.testing.assert_close(own / world, expected[mine])
            torch.testing.assert_close(after.state_dict(), taught.state_dict())  # all remember the same


@settings(max_examples=10, deadline=None)
@given(world=st.integers(2, 4), seed=st.integers(0, 1000))
def test_the_average_over_processes_is_the_gradient_of_the_whole_batch(world: int, seed: int) -> None:
    """Each process takes its turn here and is given the rows of the others, as all_gather would do."""
    b, dim = 6, 5
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(world * b, dim, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (world * b,), generator=generator)
    torch.manual_seed(seed)
    surrogate = Learned(dim).double()

    def gradient(z: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        cem = active_cem(copy.deepcopy(surrogate), strength=2.0, lr_rescale="off")
        z = z.clone().requires_grad_()
        cem.backward(z.sum() * 0, z, labels)
        assert z.grad is not None
        return z.grad, [p.detach() for p in cem.surrogate.parameters()]

    expected, trained = gradient(whole, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cem_module, "gather", lambda tensor: y if tensor.dtype == torch.int64 else whole)
        for rank in range(world):
            patch.setattr(cem_module.dist, "get_rank", lambda rank=rank: rank)
            mine = slice(rank * b, (rank + 1) * b)
            own, parameters = gradient(whole[mine], y[mine])
            torch.testing.assert_close(own / world, expected[mine])  # DDP divides by the number of processes
            for a, b_ in zip(parameters, trained, strict=True):
                torch.testing.assert_close(a, b_)


def test_all_processes_skip_a_step_that_one_of_them_must_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "in_group", lambda: True)
    monkeypatch.setattr(cem_module, "gather", lambda tensor: tensor)
    monkeypatch.setattr(cem_module.dist, "all_reduce", lambda votes, op: votes.zero_())  # another process said no
    torch.manual_seed(2)
    cem = active_cem(Learned(4))
    before = copy.deepcopy(cem.surrogate.state_dict())
    z = torch.randn(B, 4, requires_grad=True)
    cem.backward(z.sum() * 0, z, torch.arange(B) % CLASSES)
    assert z.grad is not None
    assert not z.grad.any()
    assert cem.skipped == 1
    assert all(torch.equal(before[name], value) for name, value in cem.surrogate.state_dict().items())


def test_damping_holds_a_jump_of_the_gradient_to_the_running_mean_of_its_norm() -> None:
    cem = active_cem(strength=1.0, lr_rescale="off", damping=0.9)
    total, task, entropy = gradient_at_the_cut(cem)
    torch.testing.assert_close(total - task, entropy)  # the first is what is usual
    assert cem.usual.item() == pytest.approx(entropy.norm().item())
    usual = cem.usual.mul_(0.1).item()  # as if all before had been a tenth
    total, task, entropy = gradient_at_the_cut(cem)
    added = total - task
    assert added.norm().item() == pytest.approx(0.9 * usual + 0.1 * entropy.norm().item(), rel=1e-5)
    assert F.cosine_similarity(added.flatten(), entropy.flatten(), dim=0) > 1 - 1e-9  # shortened, not turned
    cem.usual.mul_(100)
    total, task, entropy = gradient_at_the_cut(cem)
    torch.testing.assert_close(total - task, entropy)  # a small one is left as it is


def test_strength_grows_while_validation_accuracy_does_not_fall_and_not_beyond_its_bound() -> None:
    cem = active_cem(growth=1.5, growth_most=3.0, warmup=2)
    for epoch in range(5):  # two of warm-up, and three from which no trend can be told
        cem.heed(epoch, 0.8)
    assert cem.multiplier == 1
    cem.heed(5, 0.8)
    assert cem.multiplier == 1.5
    cem.heed(6, 0.7)
    assert cem.multiplier == 1.5  # it falls: strength stays
    for epoch in range(7, 20):
        cem.heed(epoch, 0.8)
    assert cem.multiplier == 3
    again = active_cem(growth=1.5, growth_most=3.0, warmup=2)
    again.load_state_dict(cem.state_dict())
    assert torch.equal(again.accuracies, cem.accuracies)


def test_two_options_that_both_set_strength_are_refused() -> None:
    with pytest.raises(UserError, match="both set strength"):
        CEM(surrogates.build("rate", dim=2, classes=2, sigma=0.1), target_bits=5.0, growth=1.1, sigma=0.1)


def features(spread: float, b: int = 60) -> tuple[Tensor, Tensor]:
    z = spread * torch.randn(b, 8, generator=torch.Generator().manual_seed(0))
    return z, torch.arange(b) % CLASSES


@pytest.mark.parametrize(("spread", "rises"), [(1.0, True), (0.01, False)])
def test_strength_rises_while_more_bits_get_through_than_the_target_and_falls_while_fewer(spread: float, rises: bool):
    surrogate = surrogates.build("rate", dim=8, classes=CLASSES, sigma=0.1)
    cem = CEM(surrogate, warmup=0, target_bits=5.0, target_rate=0.1, sigma=0.1)
    cem.schedule(0, 1e-3)
    z, y = features(spread)
    z.requires_grad_()
    for _ in range(10):
        cem.backward(z.sum() * 0, z, y)
    assert (cem.multiplier > 1.5) == rises
    assert (cem.multiplier < 0.7) == (not rises)


def test_strength_finds_the_target_on_features_that_can_be_moved() -> None:
    """The task pulls z back to where it was, CEM pulls it together; the target decides where they balance."""
    wanted, y = features(1.0)
    z = wanted.clone().requires_grad_()
    surrogate = surrogates.build("rate", dim=8, classes=CLASSES, sigma=0.1)
    cem = CEM(surrogate, strength=1.0, warmup=0, lr_rescale="off", target_bits=6.0, target_rate=0.02, sigma=0.1)
    optimizer = torch.optim.SGD([z], lr=0.5)
    cem.schedule(0, 1e-3)
    for _ in range(1000):
        optimizer.zero_grad()
        cem.backward((z - wanted).square().sum(1).mean(), z, y)
        optimizer.step()
    assert surrogate(z, y).diagnostics["bits"].item() == pytest.approx(6.0, rel=0.1)
    assert 0.01 < cem.multiplier < 100


def test_a_skipped_step_does_not_move_strength() -> None:
    cem = CEM(surrogates.build("rate", dim=8, classes=CLASSES, sigma=0.1), warmup=0, target_bits=5.0, sigma=0.1)
    cem.schedule(0, 1e-3)
    z, y = features(1.0)
    z[0, 0] = torch.nan
    z.requires_grad_()
    cem.backward(z.nan_to_num().sum() * 0, z, y)
    assert cem.multiplier == 1
    assert cem.skipped == 1


def test_a_target_without_noise_is_refused() -> None:
    with pytest.raises(UserError, match="target_bits needs Gaussian noise"):
        CEM(surrogates.build("uniform", dim=8, classes=3, sigma=None), target_bits=3.0)


def test_pooling_measures_averages_and_hands_the_gradient_to_all_of_z() -> None:
    cem = CEM(surrogates.build("uniform", dim=3 * 4, classes=CLASSES, sigma=0.1), warmup=0, pool=2)
    cem.schedule(0, 1e-3)
    z = torch.randn(B, 3, 8, 8, requires_grad=True)
    cem.backward(z.sum() * 0, z, torch.arange(B) % CLASSES)
    assert z.grad is not None
    assert z.grad.ne(0).all()
    torch.testing.assert_close(z.grad[:, :, :4, :4], z.grad[:, :, :1, :1].expand(-1, -1, 4, 4))
    with pytest.raises(UserError, match=r"pool needs z of shape \[c, h, w\]"):
        cem.measured(z.flatten(1))


def step_of(cem: CEM, z: Tensor, y: Tensor) -> None:
    """A step in a user's own loop, with a task that pulls at all of z."""
    cem.backward(z.square().mean(), z, y)


def batch_of_features() -> tuple[Tensor, Tensor]:
    z, y = features(1.0)
    return z.requires_grad_(), y


def warned(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The warnings printed since the last look, each on one line."""
    return "".join(capsys.readouterr().err.split("\n")).split("warning: ")[1:]


def test_a_loop_that_never_calls_schedule_is_told_at_its_first_step() -> None:
    cem = CEM(surrogates.build("rate", dim=8, classes=CLASSES, sigma=0.1))
    with pytest.raises(UserError, match=r"cem\.schedule was never called.*once an epoch"):
        step_of(cem, *batch_of_features())


def test_a_training_that_ends_with_the_warm_up_is_told_when_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    cem = CEM(surrogates.build("rate", dim=8, classes=CLASSES, sigma=0.1), warmup=1)
    for epoch in range(2):
        cem.schedule(epoch, 1e-3, epochs=2)
    assert warned(capsys) == []
    cem = CEM(surrogates.build("rate", dim=8, classes=CLASSES, sigma=0.1), warmup=1)
    cem.schedule(0, 1e-3, epochs=1)
    (line,) = warned(capsys)
    assert "never acts" in line and "warm-up is 1 epoch, the training has 1" in line and "warmup=0" in line
    step_of(cem, *batch_of_features())
    del cem
    gc.collect()
    assert warned(capsys) == []  # it was told once


@pytest.mark.parametrize(("epochs", "strength", "told"), [(1, 16.0, True), (2, 16.0, False), (1, 0.0, False)])
def test_a_loop_that_does_not_tell_its_epochs_hears_at_its_end_that_nothing_acted(
    epochs: int, strength: float, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    cem = CEM(surrogates.build("rate", dim=8, classes=CLASSES, sigma=0.1), warmup=1, strength=strength)
    for epoch in range(epochs):
        cem.schedule(epoch, 1e-3)
        step_of(cem, *batch_of_features())
    assert warned(capsys) == []
    del cem
    gc.collect()
    lines = warned(capsys)
    assert len(lines) == told
    assert not told or "CEM did nothing in all 1 steps: its warm-up is 1 epoch" in lines[0]


@pytest.mark.parametrize("name", ["kmeans", "gmm", "slots", "hybrid"])
def test_a_surrogate_without_its_refresh_is_told_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    z, y = batch_of_features()
    torch.manual_seed(0)
    for refreshed, expected in ((False, 1), (True, 0)):
        cem = CEM(surrogates.build(name, dim=8, classes=CLASSES, sigma=0.1), warmup=0)
        cem.schedule(0, 1e-3)
        if refreshed:
            cem.surrogate.refresh(z.detach(), y)
        for _ in range(2):
            step_of(cem, z, y)
        lines = [line for line in warned(capsys) if "cem.refresh" in line]
        assert len(lines) == expected, lines
        resumed = CEM(surrogates.build(name, dim=8, classes=CLASSES, sigma=0.1), warmup=0)
        resumed.load_state_dict(cem.state_dict())
        resumed.schedule(1, 1e-3)
        step_of(resumed, z, y)
        assert len(warned(capsys)) == expected  # a state that holds a refresh is as good as one


def test_labels_beyond_the_classes_are_refused_at_the_step_that_brings_them() -> None:
    cem = CEM(surrogates.build("rate", dim=8, classes=CLASSES, sigma=0.1), warmup=0)
    cem.schedule(0, 1e-3)
    z, y = batch_of_features()
    step_of(cem, z, y)
    with pytest.raises(UserError, match=rf"label {CLASSES} .* {CLASSES} classes.*classes={CLASSES + 1}"):
        step_of(cem, z, y + 1)


def test_what_the_checks_remember_is_no_setting_of_a_recorded_step() -> None:
    """A captured step is recorded anew if a plain attribute has changed, which the checks must not cause."""
    cem = CEM(surrogates.build("rate", dim=8, classes=CLASSES, sigma=0.1), warmup=0)
    cem.schedule(0, 1e-3)
    before = settings_of(cem)
    step_of(cem, *batch_of_features())
    assert settings_of(cem) == before
