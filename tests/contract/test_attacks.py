"""What every registered attack must do. A new one is tested here without a line added; its `quick` makes it small."""

import copy
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from on_device import FROM_NUMBERS
from reachable import reachable, share_memory
from torch.overrides import TorchFunctionMode

import splitveil.attacks
from splitveil import defences
from splitveil.attacks import Attack, build
from splitveil.attacks.threat import Access, Observation, ThreatModel, grant
from splitveil.channel import Channel
from splitveil.compute.cuda_graph import Captured
from splitveil.data.loader import DeviceImages
from splitveil.data.readers.fashion import fashion
from splitveil.metrics.image import mse
from splitveil.models import build_model
from splitveil.registry import ATTACKS, DEFENCES, MODELS
from splitveil.split_model import SplitModel

STRONG = {"net": "unet", "augment": True, "members": 2, "width": 4, "epochs": 2, "batch": 64, "ema": 0.9, "probe": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"decoder-strong": ("decoder", STRONG)}
"""Further forms of a method that share little with its usual one, with options that make them small."""
every_attack = pytest.mark.parametrize("name", [*ATTACKS.names(), *VARIANTS])
CPU = torch.device("cpu")
DIGGING = r"__closure__|cell_contents|\bgc\b|\binspect\b|(access|query|architecture)\._"
"""How an attack would get at memory that its Access does not show."""
WAITS = {f"aten::{name}" for name in ["_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "_unique2"]}
"""What the host can only know when the device is done; also where it is deep in another operation or in a gradient."""


@cache
def setting() -> tuple[SplitModel, Channel, DeviceImages, DeviceImages]:
    """A split model with noise, the attacker's images and private ones."""
    torch.manual_seed(0)
    channel = Channel([defences.build("bottleneck"), defences.build("gaussian", sigma=0.1)])
    model = channel.rebuild(build_model(MODELS["small"].config(width=4), (1, 32, 32), 10))  # type: ignore[call-arg]
    source = fashion()
    assert source.test is not None
    own, private = source.train.take(np.arange(200)), source.test.take(np.arange(20))
    return model.eval(), channel, DeviceImages(own, CPU), DeviceImages(private, CPU)


def granted(attack: Attack, own: DeviceImages | None = None) -> Access:
    model, channel, theirs, _ = setting()
    wire = observation()[1].z[:, 0]
    return grant(attack.requires, model, channel, own or theirs, CPU, seed=5, captured=wire)


def quick(name: str, seed: int) -> Attack:
    if name in VARIANTS:
        method, options = VARIANTS[name]
        return build(method, seed=seed, **options)
    return build(name, seed=seed, **ATTACKS[name].build.quick)  # type: ignore[attr-defined]


@cache
def fitted(name: str) -> Attack:
    attack = quick(name, seed=3)
    assert attack.fit(granted(attack)) is attack
    return attack


def observation(repeats: int = 1, n: int = 20) -> tuple[torch.Tensor, Observation]:
    model, channel, _, private = setting()
    x = private.take(slice(0, n))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        z = model.edge(x)
        sent = torch.stack([channel.send(z, x, generator) for _ in range(repeats)], 1)
        return x, Observation(sent, model.cloud(sent[:, 0]), private.labels[:n])


def told(attack: Attack, seen: Observation) -> Observation:
    """What its threat model lets it see."""
    allowed = attack.requires
    return Observation(seen.z, seen.logits if allowed.cloud_weights else None, seen.labels if allowed.labels else None)


def rebuilt_by(attack: Attack, seen: Observation) -> torch.Tensor:
    return attack.reconstruct(told(attack, seen))


@every_attack
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("n", [1, 20])
def test_it_gives_one_image_in_the_unit_interval_for_each_that_it_saw(name: str, repeats: int, n: int) -> None:
    x, seen = observation(repeats, n)
    rebuilt = rebuilt_by(fitted(name), seen)
    assert rebuilt.shape == x.shape
    assert rebuilt.dtype == torch.float32
    assert rebuilt.min() >= 0
    assert rebuilt.max() <= 1
    assert not rebuilt.requires_grad


# One that `quick` makes small is trained for seconds only; its own test says what it reaches.
@pytest.mark.parametrize("name", [name for name in ATTACKS.names() if not ATTACKS[name].build.quick])  # type: ignore[attr-defined]
def test_it_is_not_worse_than_the_mean_image(name: str) -> None:
    x, seen = observation()
    mean = rebuilt_by(fitted("mean_image"), seen)
    assert mse(rebuilt_by(fitted(name), seen), x).mean() <= 1.001 * mse(mean, x).mean()


@every_attack
def test_each_image_is_rebuilt_from_its_own_release_alone(name: str) -> None:
    _, seen = observation()
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    attack = fitted(name)
    assert seen.logits is not None and seen.labels is not None
    shuffled = rebuilt_by(attack, Observation(seen.z[order], seen.logits[order], seen.labels[order]))
    torch.testing.assert_close(shuffled, rebuilt_by(attack, seen)[order], atol=1e-4, rtol=0)


@every_attack
def test_a_seed_gives_the_same_reconstructions_again(name: str) -> None:
    _, seen = observation()
    again = quick(name, seed=3)
    again.fit(granted(again))
    assert torch.equal(rebuilt_by(again, seen), rebuilt_by(fitted(name), seen))


@every_attack
def test_it_leaves_model_channel_and_images_as_they_were(name: str) -> None:
    model, channel, own, _ = setting()
    after = [own.images, *(tensor for part in (model, channel) for tensor in part.state_dict().values())]
    before = [tensor.clone() for tensor in after]
    attack = quick(name, seed=4)
    rebuilt_by(attack.fit(granted(attack)), observation()[1])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@every_attack
def test_it_says_what_it_needs_and_works_with_no_more_than_that(name: str) -> None:
    attack = fitted(name)
    assert isinstance(attack.requires, ThreatModel)
    assert all(attack.requires.describe().values())
    access = granted(attack)
    grants = {
        "edge": attack.requires.encoder_weights, "cloud": attack.requires.cloud_weights, "query": attack.requires.queries,
        "channel": attack.requires.channel, "hints": attack.requires.channel,
        "architecture": attack.requires.architecture, "captured": attack.requires.captured,
        "auxiliary": attack.requires.auxiliary != "none",
    }  # fmt: skip
    for part, allowed in grants.items():
        assert (getattr(access, part) is not None) == allowed, part


@every_attack
def test_it_learns_from_the_classes_of_its_own_images_only_if_its_threat_model_says_so(name: str) -> None:
    attack, mixed, (_, seen) = quick(name, seed=3), copy.copy(setting()[2]), observation()
    mixed.labels = mixed.labels.roll(1)
    same = torch.equal(rebuilt_by(attack.fit(granted(attack, mixed)), seen), rebuilt_by(fitted(name), seen))
    assert same != attack.requires.own_classes


@pytest.mark.parametrize("defence", DEFENCES.names())
def test_a_black_box_reaches_no_number_of_the_edge_by_attributes_and_items(defence: str) -> None:
    """Whatever defends: neither the query nor the channel nor the architecture leads to the victim's edge."""
    channel = Channel([defences.build(name) for name in sorted({"adversarial", defence})])  # some need its decoder
    model = channel.rebuild(build_model(MODELS["small"].config(width=4), (1, 32, 32), 10))  # type: ignore[call-arg]
    threat = ThreatModel(architecture=True, cloud_weights=True, captured=True)
    access = grant(threat, model, channel, setting()[2], CPU, 0, torch.zeros(2, *model.z_shape))
    edge = [*model.edge.parameters(), *model.edge.buffers()]

    def ways(given: object) -> list[str]:
        found = reachable(given, closures=False)
        return [way for way, tensor in found if any(share_memory(tensor, part) for part in edge)]

    assert access.query is not None and set(vars(access.query)) == {"generator"}
    assert ways(access) == []
    assert len(ways((access, model))) == len(edge)  # the walker would have found them


def test_no_attack_digs_for_what_it_was_not_given() -> None:
    folder = Path(splitveil.attacks.__file__).parent
    for file in folder.rglob("*.py"):
        assert not re.search(DIGGING, file.read_text()) or file.name == "threat.py", file.name
    assert re.search(DIGGING, "access.query.__closure__[0].cell_contents") and re.search(DIGGING, "access.query._edge")


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 says so once a process
@every_attack
def test_its_progress_only_grows_and_its_losses_are_numbers(name: str) -> None:
    attack = quick(name, seed=0)
    seen: list[float] = []
    attack.on_progress = lambda done, total: seen.append(done / total)
    attack.fit(granted(attack))
    assert seen == sorted(seen)
    assert all(0 < share <= 1 for share in seen)
    assert all(isinstance(loss, float) for loss in attack.losses_)


class FromNumbers(TorchFunctionMode):
    """Refuses tensors made of the host's numbers: in a step they would be copied to the device, while the host waits."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in FROM_NUMBERS, "a step brings numbers from the host to the device"
        return function(*args, **(kwargs or {}))


def waits_in(body: Callable[[], object]) -> set[str]:
    """What would break a recording of these kernels as a CUDA graph."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen, FromNumbers():
        body()
    return {event.key for event in seen.key_averages()} & WAITS


@every_attack
def test_every_step_of_it_can_be_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[set[str]] = []

    def watched(step: Captured) -> None:
        step.calls += 1
        if step.calls > 1:
            step.body()
        else:
            found.append(waits_in(step.body))

    monkeypatch.setattr(Captured, "__call__", watched)
    monkeypatch.setattr(torch.optim.Adam, "step", lambda adam: None)  # without a GPU it reads its number of steps
    attack = quick(name, seed=0)
    rebuilt_by(attack.fit(granted(attack)), observation()[1])
    assert found or not attack.quick
    assert not set().union(*found)


def test_a_step_that_cannot_be_captured_is_found() -> None:
    x = torch.rand(4, 4, requires_grad=True)
    assert waits_in(lambda: x.trace().backward())  # the gradient of a trace reads a number
    assert waits_in(lambda: x[x > 0.5])
    assert not waits_in(lambda: x.diagonal().sum().backward())
    with pytest.raises(AssertionError, match="from the host"):
        waits_in(lambda: x * torch.tensor([1.0, 2, 3, 4]))
