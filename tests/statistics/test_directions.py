import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitveil.statistics.directions import PRIOR, leading_of_classes


def features(seed: int, n: int, d: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((n, d)) @ np.diag(0.5 ** np.arange(d)) @ np.linalg.qr(rng.standard_normal((d, d)))[0]
    return torch.from_numpy(z + 3), torch.from_numpy(rng.integers(0, classes, n))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), n=st.integers(1, 80), d=st.integers(1, 12), classes=st.integers(1, 5), r=st.integers(1, 12),
    scale=st.sampled_from([0.0, 1e-25, 1.0, 1e25]),
)  # fmt: skip
def test_directions_are_orthonormal_whatever_the_features_are(seed: int, n: int, d: int, classes: int, r: int, scale: float):
    z, y = features(seed, n, d, classes)
    basis = leading_of_classes((scale * z).float(), y, classes, min(r, d))
    expected = torch.eye(min(r, d)).expand(classes, -1, -1)
    torch.testing.assert_close(basis.mT @ basis, expected, atol=1e-5, rtol=0)


def test_they_are_the_eigenvectors_of_the_class_mixed_with_a_few_samples_like_all_others() -> None:
    """Variances fall by a factor of four from one direction to the next, so three rounds find them."""
    z, y = features(0, 300, 10, 2)
    basis = leading_of_classes(z, y, 2, 4)
    rows = [z[y == c].numpy() for c in range(2)]
    inside = sum(len(own) * np.cov(own, rowvar=False, bias=True) for own in rows) / 300
    for c, own in enumerate(rows):
        mixed = (len(own) * np.cov(own, rowvar=False, bias=True) + PRIOR * inside) / (len(own) + PRIOR)
        expected = np.linalg.eigh(mixed)[1][:, ::-1][:, :2]
        np.testing.assert_allclose(np.abs(expected.T @ basis[c].numpy()[:, :2]), np.eye(2), atol=1e-2)


def test_a_class_that_is_hardly_known_has_the_directions_of_the_others() -> None:
    z, y = features(0, 300, 10, 2)
    y = torch.where(torch.arange(300) < 1, 2, y)  # one image of class 2, and none of class 3
    basis = leading_of_classes(z, y, 4, 3)
    torch.testing.assert_close(basis[2], basis[3])
    overlap = (basis[3, :, 0] @ basis[0, :, 0]).abs()  # all classes are spread alike here
    assert overlap > 0.95
