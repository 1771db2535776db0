"""Where to cut: the facts of every cut are those of the split model, and the quick attack is `ridge`."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from splitveil.cut_by_fx import cuts, every_split, split
from splitveil.evaluation.where_to_cut import every_stage, images_for, leak_of, linear_answers, products, where_to_cut
from splitveil.metrics.cost import cost
from splitveil.models import build_model
from splitveil.registry import MODELS


class Residual(nn.Module):
    """A user's own network with a block that cannot be cut inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.side = nn.Conv2d(4, 4, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.pool(x + self.side(x)))


def test_every_cut_of_a_users_module_has_the_facts_of_its_split_model() -> None:
    net, x = Residual(), torch.rand(2, 3, 16, 16)
    found = {cut.at: cut for cut in where_to_cut(every_split(net, x))}
    assert list(found) == cuts(net, x) == ["stem", "pool", "head.0"]
    for name, cut in found.items():
        model = split(net, name, x)
        edge = cost(model)["edge"]
        assert cut.z_shape == tuple(model.z_shape)
        assert (cut.bytes, cut.macs, cut.parameters) == (4 * prod(model.z_shape), edge.macs, edge.parameters)
        assert cut.leak is None
    assert found["stem"].macs == 16 * 16 * 4 * 3 * 9


def test_the_cuts_of_a_registered_model_are_the_values_of_its_option() -> None:
    config = MODELS["small"].config(width=4)
    model = build_model(config, (1, 16, 16), 4)
    found = list(every_stage(model))
    assert config.cut in dict(found)
    x = torch.rand(3, 1, 16, 16)
    whole = model.eval()(x)
    for name, cut in found:
        torch.testing.assert_close(cut.eval()(x), whole)
        named = build_model(MODELS["small"].config(width=4, cut=name), (1, 16, 16), 4)
        assert named.z_shape == cut.z_shape


@settings(max_examples=20, deadline=None)
@given(n=st.integers(3, 40), d=st.integers(1, 60), seed=st.integers(0, 1000))
def test_the_dual_answers_as_the_linear_inverse_with_the_best_of_all_alphas_does(n: int, d: int, seed: int) -> None:
    """The oracle is the primal solution, d x d, for every alpha: the answer must be that of one of them."""
    from splitveil.attacks.ridge import ALPHAS

    generator = torch.Generator().manual_seed(seed)
    z, z_new = (torch.randn(rows, d, generator=generator, dtype=torch.float64) for rows in (n, 7))
    x = z @ torch.randn(d, 3, generator=generator, dtype=torch.float64) + 0.3 * torch.randn(n, 3, generator=generator)
    answer = linear_answers(z, x, z_new).double()
    centred, scale = z - z.mean(0), (z - z.mean(0)).square().mean()
    primal = []
    for alpha in ALPHAS[2:]:  # at the smallest two the primal matrix is singular to the last digits where d > n
        matrix = centred.T @ centred + alpha * scale * n * torch.eye(d, dtype=torch.float64)
        weights = torch.linalg.solve(matrix, centred.T @ (x - x.mean(0)))
        primal.append((z_new - z.mean(0)) @ weights + x.mean(0))
    nearest = min((answer - one).abs().max().item() for one in primal)
    exact = torch.linalg.pinv(centred) @ (x - x.mean(0))
    limit = (answer - ((z_new - z.mean(0)) @ exact + x.mean(0))).abs().max().item()
    assert min(nearest, limit) < 1e-3 * max(1.0, answer.abs().max().item())


def test_sums_of_chunks_are_the_whole_product() -> None:
    a, b = torch.randn(5, 9001), torch.randn(3, 9001)
    torch.testing.assert_close(products(a, b), a.double() @ b.double().T, rtol=1e-5, atol=1e-3)


def test_an_edge_that_sends_the_image_leaks_all_and_one_that_sends_a_constant_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(6, 1, 12, 12, generator=generator)  # images that a linear map can tell apart
    mixes = torch.rand(300, 6, generator=generator)
    images = (mixes / mixes.sum(1, keepdim=True)) @ base.flatten(1)
    own, private = images.view(-1, 1, 12, 12).split([250, 50])

    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(len(x), 3)

    everything, nothing = leak_of(nn.Identity(), own, private), leak_of(Constant(), own, private)
    assert everything.mse < 1e-8 and everything.of_ceiling < 1e-4 and everything.ssim > 0.999
    assert nothing.of_ceiling == pytest.approx(1, abs=1e-4)


def test_large_features_get_fewer_images_and_never_less_than_fifty() -> None:
    def with_z(d: int) -> list[nn.Module]:
        model = nn.Module()
        model.z_shape = torch.Size([d])  # type: ignore[assignment]
        return [model]

    assert images_for(with_z(1000), 1000) == 1000  # type: ignore[arg-type]
    assert images_for(with_z(2**20), 1000) == 256  # type: ignore[arg-type]
    assert images_for(with_z(2**28), 1000) == 50  # type: ignore[arg-type]


def test_an_edge_that_begins_in_place_leaves_the_images_for_the_next_cut() -> None:
    class Shifts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sub_(0.5)

    own, private = torch.rand(60, 1, 16, 16), torch.rand(20, 1, 16, 16)
    before = own.clone(), private.clone()
    found = leak_of(nn.Sequential(Shifts(), nn.AvgPool2d(2)), own, private)
    assert torch.equal(own, before[0]) and torch.equal(private, before[1])
    assert found.mse == pytest.approx(leak_of(nn.AvgPool2d(2), own, private).mse, rel=1e-3)
