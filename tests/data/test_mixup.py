import torch
from hypothesis import given
from hypothesis import strategies as st

from splitveil.data.mixup import mix, unmixed


@given(st.integers(2, 9), st.integers(0, 99))
def test_the_second_half_is_mixed_with_the_first_and_its_target_alike(b: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.rand(b, 2, 3, 3, generator=generator), torch.randint(4, (b,), generator=generator)
    share, n = 0.5 * torch.rand(b, generator=generator), unmixed(b)
    images, target = mix(x, y, share, 4)
    assert torch.equal(images[:n], x[:n])
    for i in range(b):
        m = float(share[i]) if i >= n else 0.0
        torch.testing.assert_close(images[i], (1 - m) * x[i] + m * x[i - n])
        expected = torch.zeros(4)
        expected[y[i]] += 1 - m
        expected[y[i - n]] += m
        torch.testing.assert_close(target[i], expected)
