"""What secret noise costs against torch.randn, in turns with it on one CPU thread.

    python -m benchmarks.noise

For 128 x 8 x 8 x 8 numbers, the median over 300 turns of torch.randn's time over that of each way, so that 1 is as fast:

    at once               splitveil.noise.normal without a generator
    made ahead            the same in service, a batch every 2 ms
    operating system      without the package `cryptography`
    whole steps           noise of gaussian's option grid and of local_dp
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch

from splitveil import noise
from splitveil.defences.shared.rounded_noise import RoundedLaplace, RoundedNormal

SHAPE, TURNS = (128, 8, 8, 8), 300


def seconds(draw: Callable[[], object]) -> float:
    began = time.perf_counter()
    draw()
    return time.perf_counter() - began


def speed(draw: Callable[[], object], pause: float = 0.0) -> float:
    """torch.randn's time over that of `draw`, measured in turns."""
    ratios = []
    for turn in range(TURNS + 20):
        base = seconds(lambda: torch.randn(SHAPE))
        time.sleep(pause)
        ratio = base / seconds(draw)
        ratios += [ratio] * (turn >= 20)  # the first are to warm up
    return statistics.median(ratios)


def main() -> None:
    torch.set_num_threads(1)
    like, normal, laplace = torch.empty(SHAPE), RoundedNormal(), RoundedLaplace()
    print(f"at once            {speed(lambda: noise.normal(like, None)):.2f}")
    noise.AHEAD.start()
    noise.AHEAD.wait()
    print(f"made ahead         {speed(lambda: noise.normal(like, None), 0.002):.2f}")
    noise.AHEAD.stop()
    print(
        f"whole steps        {speed(lambda: normal(SHAPE, None)):.2f} gaussian, {speed(lambda: laplace(SHAPE, None)):.2f} laplace"
    )
    sys.modules["cryptography.hazmat.primitives.ciphers"] = None  # type: ignore[assignment]
    print(f"operating system   {speed(lambda: noise.normal(like, None)):.2f}")


if __name__ == "__main__":
    main()
