"""What secret noise costs the thread that asks for it against torch.randn, in turns with it.

    python -m benchmarks.noise

For 128 x 8 x 8 x 8 numbers it prints the time of torch.randn divided by that of each kind of secret noise; 1 means as fast as
torch.randn. Medians over 300 turns:

    at once               made when it is asked for
    made ahead            the same in service, a batch every 2 ms
    operating system      at once, without the package `cryptography`

Then the share of a request in service (edge, send, cloud; the demo's model, 128 images, z of 8 x 8 x 8, one every 20 ms) that
`send` of each defence takes, with noise made ahead and with noise made at once.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.start import start
from splitveil import defences, noise
from splitveil.channel import Channel
from splitveil.defences.shared.rounded_noise import RoundedLaplace, RoundedNormal
from splitveil.models import build_model
from splitveil.registry import MODELS
from splitveil.split_model import SplitModel

SHAPE, TURNS, REQUESTS = (128, 8, 8, 8), 300, 40
DEFENCES = {
    "gaussian": {},
    "gaussian in whole steps": {"name": "gaussian", "grid": True},
    "local_dp, gaussian": {"name": "local_dp"},
    "local_dp, laplace": {"name": "local_dp", "mechanism": "laplace"},
    "dropout": {},
    "quantise": {},
}


def draws() -> dict[str, Callable[[], Tensor]]:
    """Every way in which a defence draws."""
    like, normal, laplace = torch.empty(SHAPE), RoundedNormal(), RoundedLaplace()
    return {
        "normal": lambda: noise.normal(like, None),
        "uniform": lambda: noise.uniform(like, None),
        "words": lambda: noise.words(SHAPE, like.device, None),
        "normal in whole steps": lambda: normal(SHAPE, None),
        "laplace in whole steps": lambda: laplace(SHAPE, None),
    }


def seconds(draw: Callable[[], object]) -> float:
    """Processor time of the calling thread, which other programs on the machine do not add to."""
    began = time.thread_time()
    draw()
    return time.thread_time() - began


def speed(draw: Callable[[], object], pause: float = 0.0) -> float:
    """torch.randn's time over that of `draw`, measured in turns."""
    ratios = []
    for turn in range(TURNS + 20):
        base = seconds(lambda: torch.randn(SHAPE))
        if pause:  # a sleep of 0 would hand the core, and its cache, to another program before one of the two
            time.sleep(pause)
        ratio = base / seconds(draw)
        ratios += [ratio] * (turn >= 20)  # the first are to warm up
    return statistics.median(ratios)


def shares(ahead: bool) -> dict[str, float]:
    """The share of a request's time that `send` takes, for each defence."""
    plain = Channel([defences.build("bottleneck", channels=SHAPE[1])])
    model = plain.rebuild(build_model(MODELS["small"].config(), (3, 32, 32), 10)).eval()
    x, found = torch.rand(SHAPE[0], 3, 32, 32), {}
    assert model.z_shape == SHAPE[1:]
    for name, options in DEFENCES.items():
        channel = Channel([defences.build(options.get("name", name), **{k: v for k, v in options.items() if k != "name"})])
        channel.rebuild(model)
        channel.serve()
        if not ahead:
            noise.AHEAD.stop()
        with torch.inference_mode():
            found[name] = statistics.median(share_of_send(model, channel, x) for _ in range(REQUESTS))
        noise.AHEAD.stop()
    return found


def share_of_send(model: SplitModel, channel: Channel, x: Tensor) -> float:
    """Of one request: edge, send, cloud."""
    time.sleep(0.02)
    began = time.thread_time()
    z = model.edge(x)
    ready = time.thread_time()
    sent = channel.send(z, x)
    gone = time.thread_time()
    model.cloud(sent)
    return (gone - ready) / (time.thread_time() - began)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    found = {name: [speed(draw)] for name, draw in draws().items()}
    noise.AHEAD.start()
    for name, draw in draws().items():
        draw()
        noise.AHEAD.wait()
        found[name].append(speed(draw, 0.002))
    noise.AHEAD.stop()
    requests = [shares(ahead) for ahead in (True, False)]
    sys.modules["cryptography.hazmat.primitives.ciphers"] = None  # type: ignore[assignment]
    for name, draw in draws().items():
        found[name].append(speed(draw))
    print(f"{'speed over torch.randn':28}at once   ahead   operating system")
    for name, (now, ahead, system) in found.items():
        print(f"{name:28}{now:7.2f} {ahead:7.2f} {system:18.2f}")
    print(f"{'share of send in a request':28}        ahead   at once")
    for name in DEFENCES:
        print(f"{name:28}{requests[0][name]:13.1%} {requests[1][name]:9.1%}")


if __name__ == "__main__":
    start(main)
