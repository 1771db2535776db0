"""z cut into tokens, against loops over its cells; and what a gate sees of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.registry import UserError
from splitveil.surrogates import build
from splitveil.surrogates.shared import tokens
from splitveil.surrogates.shared.groups import group
from splitveil.surrogates.shared.tokens import (
    Cut,
    TokenView,
    cut_for,
    in_cells,
    neighbourhoods,
    tokens_of,
    tokens_of_all,
)  # fmt: skip

SHAPES = st.sampled_from([((3, 4, 6), 2, 3), ((1, 2, 2), 2, 2), ((2, 6, 3), 1, 3), ((4, 1, 5), 1, 5)])


def features(seed: int, b: int, shape: tuple[int, ...], classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = 5 + torch.randn(b, *shape, generator=generator, dtype=torch.float64)
    return z, torch.randint(classes, (b,), generator=generator)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(3, 20), cut=SHAPES)
def test_tokens_are_the_cells_of_each_sample_less_those_of_the_mean_of_its_class(seed: int, b: int, cut) -> None:
    shape, R, C = cut
    z, y = features(seed, b, shape)
    found = tokens_of(group(z.flatten(1), y, 3, b), Cut(shape, R, C))
    maps, high, wide = z.numpy(), shape[1] // R, shape[2] // C
    for c in range(3):
        own = maps[y.numpy() == c]
        rows = [
            (sample - own.mean(0))[:, r * high : (r + 1) * high, k * wide : (k + 1) * wide].ravel()
            for sample in own for r in range(R) for k in range(C)
        ] if len(own) > 1 else []  # fmt: skip
        there = found.x[c][found.mask[c] == 1].numpy()
        assert len(there) == len(rows)
        if rows:
            np.testing.assert_allclose(there, np.stack(rows), atol=1e-12)
    assert not found.x[found.mask == 0].any()


def test_of_samples_that_are_all_alike_every_token_is_exactly_zero() -> None:
    z, y = torch.full((9, 8), 0.1), torch.arange(9) % 2
    assert not tokens_of(group(z, y, 2, 9), Cut((2, 2, 2), 2, 2)).x.any()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), c=st.integers(1, 3), h=st.integers(1, 4), w=st.integers(1, 4))
def test_a_position_stands_behind_its_neighbours_and_beyond_the_borders_there_is_nothing(seed: int, c: int, h: int, w: int):
    z, _ = features(seed, 2, (c, h, w))
    found = neighbourhoods(z)
    assert found.shape == (2, h, w, 5 * c)
    for row in range(h):
        for column in range(w):
            places = [(row, column - 1), (row - 1, column - 1), (row - 1, column), (row - 1, column + 1), (row, column)]
            for i, (r, k) in enumerate(places):
                expected = z[:, :, r, k] if 0 <= r < h and 0 <= k < w else torch.zeros(2, c).double()
                assert torch.equal(found[:, row, column, i * c : (i + 1) * c], expected)


def test_a_refresh_looks_at_a_share_of_many_images(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = features(0, 40, (2, 2, 2))
    cut = Cut((2, 2, 2), 2, 2)
    rows, labels = tokens_of_all(z.flatten(1), y, 3, cut)
    assert rows.shape == (160, 2) and len(labels) == 160
    for c in range(3):
        assert rows[labels == c].view(-1, 4, 2).mean(0).abs().max() < 1e-12
    monkeypatch.setattr(tokens, "LOOKED_AT", 80)
    assert len(tokens_of_all(z.flatten(1), y, 3, cut)[0]) <= 80


def test_of_a_large_training_set_every_class_is_looked_at_whatever_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "LOOKED_AT", 100)
    z, y = features(0, 40, (2, 2, 2))[0], torch.arange(40) % 2  # of every second image all are of one class
    rows, labels = tokens_of_all(z.flatten(1), y, 2, Cut((2, 2, 2), 2, 2))
    assert labels.bincount(minlength=2).tolist() == [40, 40]
    assert rows[labels == 1].view(-1, 4, 2).mean(0).abs().max() < 1e-12


@pytest.mark.parametrize("attention", [None, "softmax", "linear"])
def test_a_gate_sees_tokens_whatever_the_scale_of_z_and_knows_nothing_of_empty_places(attention) -> None:
    torch.manual_seed(0)
    cut = Cut((2, 2, 2), 2, 2)
    view = TokenView(cut, attention).double()
    torch.nn.init.normal_(view.place)
    z, y = features(0, 12, (2, 2, 2), classes=1)
    alone, padded = (tokens_of(group(z.flatten(1), y, 1, n), cut) for n in (12, 16))
    seen = view(alone.x, alone.mask)
    assert seen.shape == (1, 48, view.numbers)
    torch.testing.assert_close(view(1e3 * alone.x, alone.mask), seen)
    torch.testing.assert_close(view(padded.x, padded.mask)[:, :48], seen)
    assert view(0 * alone.x, alone.mask).isfinite().all()


def test_the_cells_of_recall_are_those_of_each_place() -> None:
    z, _ = features(0, 3, (2, 4, 4))
    found = in_cells(z.flatten(1), Cut((2, 4, 4), 2, 2))
    assert torch.equal(found[1, 1, 0], z[1, :, 2:, :2])


@pytest.mark.parametrize(
    ("z_shape", "tokens", "said"),
    [(None, "positions", r"build it with z_shape=\(8, 8, 8\)"), ((64,), 2, r"this cut has \[64\]; cut at a convolution"),
     ((4, 4, 4), 3, r"tokens=3 does not divide the sides of z, which has \[4, 4, 4\]; set tokens=positions")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["gated", "slots"])
def test_what_cannot_be_cut_is_refused_with_the_remedy(name: str, z_shape, tokens, said: str) -> None:
    with pytest.raises(UserError, match=said):
        build(name, dim=64, classes=2, sigma=0.1, z_shape=z_shape, tokens=tokens)
    assert cut_for(name, 1, None) is None


@pytest.mark.parametrize("options", [{"attention": "linear"}, {"tokens": 2, "space": "normalised"},
                                     {"tokens": 2, "preset": "as_written"}], ids=str)  # fmt: skip
def test_options_of_the_gate_that_do_not_go_together_are_refused(options) -> None:
    with pytest.raises(UserError, match=r"surrogate 'gated': .*set (tokens=positions|space=raw)"):
        build("gated", dim=16, classes=2, sigma=0.1, z_shape=(1, 4, 4), **options)
