"""Who has the run folder and tries seeds finds planted ones, and is at chance against secret noise."""

from collections.abc import Callable, Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from splitveil import defences
from splitveil.channel import Channel
from splitveil.defences import AttackHints, Defence
from splitveil.evaluation.predict_noise import CERTAIN, IMAGES, Stream, predicted_stream, streams, tries
from splitveil.noise import AHEAD
from splitveil.split_model import SplitModel

DRAWING = ["gaussian", "dropout", "vib", "shredder", "quantise", "local_dp", "keyed_noise"]
SHAPE = (4, 8, 8)
Z = torch.rand(IMAGES, *SHAPE, generator=torch.Generator().manual_seed(1))
X = torch.rand(IMAGES, 3, 8, 8, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def torchs_generator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SPLITVEIL_KEY", "correct horse battery staple")
    with torch.random.fork_rng(devices=[]):
        yield
    AHEAD.stop()


def loaded(make: Callable[[], Defence]) -> Channel:
    """As from a run folder: the same weights, and torch's own generator in the same state."""
    torch.manual_seed(0)
    channel = Channel([make()])
    channel.rebuild(SplitModel(nn.Identity(), nn.Identity(), SHAPE, SHAPE))
    return channel


def tried(make: Callable[[], Defence], serve: bool = False, most: int = 5000) -> list[tuple[str, float]]:
    public, channel = loaded(make), loaded(make)
    if serve:
        channel.serve()
    return list(islice(tries(channel, public, Z, X, streams(5, torch.default_generator.get_state())), most))


class Seeded(Defence):
    """Noise from torch's generators, as somebody may write it: `kind` says from which."""

    noise_std = 0.3

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.own = kind, torch.Generator().manual_seed(123_456_789)

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.kind == "seed 1234" and generator is None:
            generator = torch.Generator().manual_seed(1234)
        if self.kind == "its own":
            generator = self.own
        if self.kind == "every release":
            generator = torch.Generator().manual_seed(9)
        return z + 0.3 * torch.randn(z.shape, generator=generator)

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(random=True)


@pytest.mark.parametrize(("kind", "named"), [
    ("torch's", "torch's own generator as loading the run leaves it"),
    ("seed 1234", "seed 1234"),
    ("its own", "torch's own generator as loading the run leaves it"),  # whatever seeds it, a loaded run draws it again
    ("every release", "every release"),
])  # fmt: skip
def test_noise_of_a_seed_is_found_and_its_stream_is_named(kind: str, named: str) -> None:
    assert predicted_stream(iter(tried(lambda: Seeded(kind)))) == f"the noise is that of {named}"


@pytest.mark.parametrize(("name", "serve", "most"), [*((name, False, 300) for name in DRAWING), ("gaussian", True, 5000)])
def test_against_secret_noise_no_stream_stands_out(name: str, serve: bool, most: int) -> None:
    """The right one would, by 100 standard deviations or so; of 2,000 wrong ones one reaches 6.5 once in 10 million times."""
    found = tried(lambda: defences.build(name), serve, most)
    assert len(found) == min(most, 2009)
    assert predicted_stream(iter(found)) is None
    t = torch.tensor([t for _, t in found])
    assert t.max() < CERTAIN
    assert (t.max() - t.mean()) / t.std() < 6.5


def test_a_channel_without_noise_has_none_to_be_predicted() -> None:
    assert tried(lambda: defences.build("topk")) == [("every release", 0.0)]


def test_the_seeds_around_the_configs_own_are_tried_and_none_twice() -> None:
    names = [stream.name for stream in streams(70_000, torch.get_rng_state())]
    assert {"seed 0", "seed 1999", "seed 69992", "seed 70008", "the config's seed for 'weights'"} <= set(names)
    assert len(names) == len(set(names))
    assert isinstance(next(streams(0, torch.get_rng_state())), Stream)
