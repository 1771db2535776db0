import pytest
import torch
from sklearn.linear_model import Ridge

from splitveil.metrics import probes
from splitveil.metrics.probes import PROBES, chosen, halves, probe, ridge, told
from splitveil.registry import UserError


def planted(n: int, d: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Features with a bit in their first two numbers: in the sign of one, or in whether both have the same sign."""
    f = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    told = f[:, 0] > 0 if kind == "linear" else (f[:, 0] > 0) == (f[:, 1] > 0)
    return f, told.long()


@pytest.mark.parametrize("kind", PROBES)
def test_a_planted_attribute_is_found(kind: str) -> None:
    f, told = planted(2000, 10, "linear")
    assert probe(kind, f.view(-1, 2, 5), told, seed=0).accuracy > 0.93


def test_only_the_mlp_finds_what_no_line_separates() -> None:
    f, told = planted(2000, 6, "xor")
    assert probe("mlp", f, told, seed=0).accuracy > 0.9
    assert probe("linear", f, told, seed=0).accuracy < 0.6


@pytest.mark.parametrize("kind", PROBES)
def test_on_noise_a_probe_sits_at_the_majority_rate(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    f, told = torch.randn(2000, 30, generator=generator), (torch.rand(2000, generator=generator) < 0.2).long()
    found = probe(kind, f, told, seed=0)
    assert found.majority == pytest.approx(0.8, abs=0.03)
    assert found.accuracy == pytest.approx(found.majority, abs=0.03)


def test_more_features_than_samples_and_constant_features_are_fine() -> None:
    f, told = planted(120, 400, "linear")
    f[:, 1:200] += 2 * told.unsqueeze(1)
    f[:, 5] = 7.0
    found = probe("linear", f, told, seed=0)
    assert found.accuracy > 0.9
    assert found.correct.shape == (60,)


@pytest.mark.parametrize("d", [5, 40])
def test_the_weights_are_those_of_scikit_learn(d: int) -> None:
    generator = torch.Generator().manual_seed(0)
    f, targets = (torch.randn(20, k, generator=generator, dtype=torch.float64) for k in (d, 3))
    expected = Ridge(alpha=0.3 * 20, fit_intercept=False).fit(f.numpy(), targets.numpy()).coef_.T
    torch.testing.assert_close(ridge(f, targets, 0.3), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", PROBES)
def test_the_same_seed_gives_the_same_rows_and_leaves_the_global_random_numbers_alone(kind: str) -> None:
    f, told = planted(200, 5, "xor")
    before = torch.random.get_rng_state()
    one, two = (probe(kind, f, told, seed=3).correct for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_halves_are_disjoint_and_whole() -> None:
    own, other = halves(11, seed=0)
    assert sorted([*own.tolist(), *other.tolist()]) == list(range(11))
    assert len(own) == 5


def test_a_single_value_cannot_be_probed() -> None:
    with pytest.raises(UserError, match="30 samples with 1 values"):
        probe("linear", torch.randn(30, 2), torch.zeros(30, dtype=torch.int64), seed=0)


def test_all_is_told_of_each_attribute_that_can_be_probed() -> None:
    f, bit = planted(400, 5, "linear")
    found = told(f, {"class": bit, "constant": torch.zeros_like(bit)}, seed=0)
    assert found.keys() == {"class"}
    by_kind = {kind: probe(kind, f, bit, seed=0) for kind in PROBES}
    assert found["class"] == {"majority": by_kind["mlp"].majority} | {k: p.accuracy for k, p in by_kind.items()}


def test_too_few_images_and_features_that_are_no_numbers_tell_nothing() -> None:
    f, bit = planted(400, 5, "linear")
    assert told(f[:19], {"class": bit[:19]}, seed=0) == {}
    f[3, 2] = torch.nan
    assert told(f, {"class": bit}, seed=0) == {}


def test_many_images_are_probed_by_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(30, seed=0).tolist() == list(range(30))
    monkeypatch.setattr(probes, "MOST", 10)
    some = chosen(30, seed=0).tolist()
    assert len(set(some)) == 10 and some == sorted(some) and max(some) < 30
    assert some != chosen(30, seed=1).tolist()
