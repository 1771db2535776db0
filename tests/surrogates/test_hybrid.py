import pytest
import torch
from cheating import CLASSES, DIM, frozen, mixture, trained

from splitveil.registry import UserError
from splitveil.statistics.clustering import Clusters, kmeans
from splitveil.surrogates import build
from splitveil.surrogates.hybrid import Hybrid, better


def hybrid(attention: str, classes: int = CLASSES, dim: int = DIM) -> Hybrid:
    torch.manual_seed(0)
    surrogate = build("hybrid", dim=dim, classes=classes, sigma=0.1, attention=attention)
    assert isinstance(surrogate, Hybrid)
    return surrogate


@pytest.mark.parametrize("attention", ["gated", "slots"])
def test_its_loss_and_pull_are_those_of_kmeans_and_the_attention_is_trained_too(attention: str) -> None:
    z, y = frozen("gaussian")
    z = z + 5 * (torch.arange(len(z)) % 2).unsqueeze(1)  # two modes in every class
    surrogate = hybrid(attention)
    surrogate.refresh(z, y)
    z.requires_grad_()
    output, alone = surrogate(z, y), surrogate.kmeans(z, y)
    assert torch.equal(output.loss, alone.loss)
    (pull,) = torch.autograd.grad(output.loss, z, retain_graph=True)
    (expected,) = torch.autograd.grad(alone.loss, z)
    assert torch.equal(pull, expected)
    output.loss.backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in surrogate.attention.parameters())


@pytest.mark.parametrize("attention", ["gated", "slots"])
def test_training_its_attention_does_not_move_its_loss(attention: str) -> None:
    z, y = frozen("heavy")
    surrogate = hybrid(attention)
    surrogate.refresh(z, y)
    before, after = trained(surrogate, z, y, 1e-2, steps=50)
    assert torch.equal(after.loss, before.loss)
    assert torch.equal(after.loss_uniform, before.loss_uniform)


@pytest.mark.parametrize("attention", ["gated", "slots"])
def test_a_refresh_is_never_worse_than_going_on_from_the_centres_that_are_there(attention: str) -> None:
    z, y = frozen("gaussian")
    surrogate = hybrid(attention)
    surrogate.refresh(z, y)
    trained(surrogate, z, y, 1e-2, steps=30)
    before = surrogate.kmeans.stored()
    onward = kmeans(z, y, CLASSES, 5, start=Clusters(*(part.clone() for part in before)), members=8)
    surrogate.refresh(z, y)
    now = surrogate.kmeans.stored()
    spread = (now.weight * now.variance).sum(1)
    assert (spread <= (onward.weight * onward.variance).sum(1) * (1 + 1e-6)).all()


def test_slots_lead_k_means_out_of_a_bad_optimum() -> None:
    z, inside = mixture(0)
    y = torch.zeros(len(z), dtype=torch.long)
    surrogate = hybrid("slots", classes=1, dim=64)
    surrogate.refresh(z, y)
    stuck = z.mean(0).expand(1, 5, -1) + torch.linspace(0, 1e-3, 5).view(1, 5, 1)
    bad = Clusters(torch.full((1, 5), 0.2), stuck, torch.full((1, 5), 9.0), torch.tensor([len(z)]))
    surrogate.kmeans.store(bad)
    surrogate.refresh(z, y)
    now = surrogate.kmeans.stored()
    assert (now.weight * now.variance).sum().item() == pytest.approx(inside, rel=0.05)


def test_of_each_class_the_better_clusters_are_kept() -> None:
    a = Clusters(torch.ones(2, 1), torch.zeros(2, 1, 3), torch.tensor([[1.0], [5.0]]), torch.tensor([4, 4]))
    b = Clusters(torch.ones(2, 1), torch.ones(2, 1, 3), torch.tensor([[2.0], [3.0]]), torch.tensor([4, 4]))
    kept = better(a, b)
    assert kept.variance.flatten().tolist() == [1, 3]
    assert kept.centre[:, 0, 0].tolist() == [0, 1]


def test_another_attention_is_refused() -> None:
    with pytest.raises(UserError, match="attention is 'rate'"):
        build("hybrid", dim=3, classes=2, sigma=0.1, attention="rate")


@pytest.mark.parametrize("attention", ["gated", "slots"])
def test_its_attention_is_asked_to_tell(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    surrogate = build("hybrid", dim=4, classes=2, sigma=0.1, attention=attention)
    asked: list[bool] = []
    monkeypatch.setattr(surrogate.attention, "tell", lambda: asked.append(True))
    surrogate.tell()
    assert asked == [True]
