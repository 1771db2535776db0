import functools
import json
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reachable import reachable, share_memory
from torch import Tensor, nn
from torch.nn.utils import prune

from splitveil import defences
from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.shared.image_descent import Release
from splitveil.attacks.threat import OWN_IMAGES, Access, Observation, ThreatModel, grant
from splitveil.channel import Channel
from splitveil.config import from_dict
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.defences import AttackHints
from splitveil.defences.keyed_noise import Key
from splitveil.evaluation.run_attacks import attack_run
from splitveil.registry import ATTACKS
from splitveil.runs import Run
from splitveil.split_model import SplitModel
from splitveil.training.build import build_parts, build_splits
from splitveil.training.checkpoint import weights_of

CPU = torch.device("cpu")


def images(n: int = 30, seed: int = 0) -> DeviceImages:
    rng = np.random.default_rng(seed)
    return DeviceImages(ImageSet(rng.integers(0, 256, (n, 1, 8, 8), np.uint8), np.arange(n) % 3, ("a", "b", "c")), CPU)


def setting(sigma: float = 0.5) -> tuple[SplitModel, Channel]:
    torch.manual_seed(0)
    edge = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.MaxPool2d(2))
    model = SplitModel(edge, nn.Sequential(nn.Flatten(), nn.Linear(32, 3)), (2, 4, 4), (1, 8, 8))
    return model, Channel([defences.build("gaussian", sigma=sigma)])


DENIED = {
    "encoder_weights": ["edge"], "cloud_weights": ["cloud"], "queries": ["query"], "channel": ["channel", "hints"],
    "architecture": ["architecture"], "captured": ["captured"],
}  # fmt: skip


@pytest.mark.parametrize("field", [*DENIED, "auxiliary"])
def test_what_the_threat_model_denies_is_none_and_the_rest_is_there(field: str) -> None:
    everything = ThreatModel(encoder_weights=True, cloud_weights=True, architecture=True, captured=True)
    wire = torch.zeros(7, 2, 4, 4)
    threat = replace(everything, **{field: "none" if field == "auxiliary" else False})
    model, channel = setting()
    access = grant(threat, model, channel, images(), CPU, 0, wire)
    missing = {name for name, value in vars(access).items() if value is None}
    assert missing == set(DENIED.get(field, ["auxiliary"]))
    assert None not in vars(grant(everything, model, channel, images(), CPU, 0, wire)).values()


def test_the_architecture_comes_without_the_victims_parameters() -> None:
    model, channel = setting()
    access = grant(ThreatModel(architecture=True), model, channel, images(), CPU, 0)
    assert access.architecture is not None and access.edge is None
    first, second = access.architecture(), access.architecture()
    victim = {name: value for name, value in model.edge.named_parameters() if value.std() > 0}  # not BatchNorm's
    for name, value in victim.items():
        for edge in (first, second, access.architecture._template):
            assert dict(edge.named_parameters())[name].shape == value.shape
            assert not torch.equal(dict(edge.named_parameters())[name], value)
    assert not torch.equal(first[0].weight, second[0].weight)  # type: ignore[index]


def test_the_default_is_the_black_box_with_queries() -> None:
    model, channel = setting()
    access = grant(ThreatModel(), model, channel, images(), CPU, 0)
    assert access.edge is None
    assert access.cloud is None
    assert (access.x_shape, access.z_shape) == ((1, 8, 8), (2, 4, 4))
    assert access.hints == channel.hints


def test_a_query_is_edge_and_channel_in_eval_mode_with_fresh_noise_for_every_release() -> None:
    model, channel = setting(sigma=0.5)
    model.train()
    access = grant(ThreatModel(observations=3), model, channel, images(), CPU, 0)
    x = images().take(slice(0, 5))
    assert access.query is not None
    first, second = access.query(x), access.query(x)
    assert first.shape == (5, 3, 2, 4, 4)
    assert not first.requires_grad
    assert len({tuple(release.flatten().tolist()) for z in (first, second) for release in z.unbind(1)}) == 6
    with torch.no_grad():
        noise = torch.cat([access.query(x) for _ in range(40)], 1) - model.eval().edge(x).unsqueeze(1)
    assert noise.std().item() == pytest.approx(0.5, rel=0.03)
    assert noise.mean().abs() < 0.03


def test_a_seed_gives_the_same_queries_again() -> None:
    model, channel = setting()
    x = images().take(slice(0, 5))
    one, same, other = (grant(ThreatModel(), model, channel, images(), CPU, seed).query(x) for seed in (0, 0, 1))  # type: ignore[misc]
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_the_threat_model_is_told_in_words_and_every_field_counts() -> None:
    base = ThreatModel()
    yes = dict.fromkeys(("encoder_weights", "architecture", "cloud_weights", "labels", "captured", "near_duplicates"), True)
    no = dict.fromkeys(("queries", "channel", "any_image"), False)
    other = ThreatModel(**yes, **no, auxiliary="none", elsewhere="cifar10", observations=4)  # type: ignore[arg-type]
    for field in vars(base):
        changed = replace(base, **{field: getattr(other, field)})
        differing = {key for key, words in base.describe().items() if changed.describe()[key] != words}
        assert len(differing) == 1, field
    assert other.describe()["releases of one image"] == "4, of near-duplicates"


@pytest.mark.parametrize("kind", ["other", "same set"])
def test_the_images_that_a_threat_model_speaks_of_are_given_whatever_they_are(kind: str) -> None:
    model, channel = setting()
    own = images()
    assert grant(ThreatModel(auxiliary=kind), model, channel, own, CPU, 0).auxiliary is own  # type: ignore[arg-type]


@pytest.mark.parametrize(("threat", "expected"), [
    (ThreatModel(), False), (ThreatModel(cloud_weights=True), False), (ThreatModel(labels=True), True),
    (ThreatModel(cloud_weights=True, queries=False), True), (ThreatModel(labels=True, auxiliary="none"), False),
], ids=["black box", "logits", "label of the target", "through the cloud", "no images"])  # fmt: skip
def test_who_needs_the_classes_of_own_images(threat: ThreatModel, expected: bool) -> None:
    assert threat.own_classes == expected


THREATS = st.builds(
    ThreatModel, *[st.booleans()] * 5, st.sampled_from(OWN_IMAGES), st.sampled_from(["", "cifar10"]), *[st.booleans()] * 2,
    observations=st.integers(1, 64), near_duplicates=st.booleans(),
)  # fmt: skip


@given(THREATS)
def test_a_threat_model_is_stored_as_its_fields_and_comes_back(threat: ThreatModel) -> None:
    stored = threat.to_dict()
    assert stored == {field.name: getattr(threat, field.name) for field in fields(ThreatModel)}
    assert ThreatModel.from_dict(json.loads(json.dumps(stored))) == threat


@given(THREATS, THREATS, THREATS)
def test_to_know_no_more_is_a_preorder_that_the_edge_has_no_part_in(
    one: ThreatModel, two: ThreatModel, three: ThreatModel
) -> None:
    assert one.knows_no_more_than(one)
    if one.knows_no_more_than(two) and two.knows_no_more_than(three):
        assert one.knows_no_more_than(three)
    edge = {"encoder_weights": two.encoder_weights, "architecture": two.architecture, "queries": two.queries}
    assert replace(one, **edge).knows_no_more_than(three) == one.knows_no_more_than(three)


@pytest.mark.parametrize(
    "more", [{"cloud_weights": True}, {"labels": True}, {"captured": True}, {"observations": 2}, {"auxiliary": "same set"}]
)  # fmt: skip
def test_who_has_one_thing_more_knows_more(more: dict[str, Any]) -> None:
    less = ThreatModel()
    assert less.knows_no_more_than(replace(less, **more)) and not replace(less, **more).knows_no_more_than(less)
    assert not less.knows_no_more_than(replace(less, channel=False))


def standard(rows: Tensor) -> Tensor:
    """Each row with mean 0 and norm 1, so that brightness and contrast do not hide an image; constant rows become 0."""
    centred = rows.double() - rows.double().mean(1, keepdim=True)
    norm = centred.norm(dim=1, keepdim=True)
    return torch.where(norm > 1e-6, centred / norm.clamp_min(1e-6), 0)


def leaks(root: Any, private: list[Tensor]) -> list[str]:
    """Ways from `root` to a tensor that shares memory with a private image, equals one up to scale, or remembers one."""
    found = []
    pixels = private[0][0].numel()
    originals = standard(private[0].reshape(-1, pixels))
    for path, tensor in reachable(root):
        if any(share_memory(tensor, image) for image in private):
            found.append(f"{path} shares memory")
        if tensor.grad_fn is not None:
            found.append(f"{path} has a graph, which keeps its inputs")
        if tensor.numel() >= pixels and (tensor.is_floating_point() or tensor.dtype == torch.uint8):
            flat = tensor.detach().flatten()
            rows = flat[: len(flat) // pixels * pixels].reshape(-1, pixels)
            if (standard(rows) @ originals.T).abs().max() > 0.9999:
                found.append(f"{path} holds a private image")
    return found


class Spy(Attack[AttackConfig]):
    """Asks for everything and looks for private images in all that it is given."""

    requires = ThreatModel(encoder_weights=True, cloud_weights=True, observations=2)
    private: ClassVar[list[Tensor]] = []
    found: ClassVar[list[str]] = []
    walked: ClassVar[list[int]] = []

    def fit(self, access: Access) -> "Spy":
        self.access = access
        self.look(access)
        assert access.auxiliary is not None
        self.mean = access.auxiliary.images.float().mean(0) / 255
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        assert torch.is_grad_enabled()  # an attack by optimisation needs it
        self.look((self.access, observation, self.on_progress))
        return self.mean.expand(len(observation.z), *self.mean.shape)

    def look(self, given: Any) -> None:
        # What the test itself holds is not the attack's: the spy is not walked, only what it is handed.
        Spy.found += leaks(given, Spy.private)
        Spy.walked.append(sum(1 for _ in reachable(given)))


@pytest.fixture
def spied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Runs `splitveil attack` on a small defended run with the spy as its attack; returns what it found."""
    ATTACKS.names()  # discovered for good before the copy that the spy goes into
    monkeypatch.setattr(ATTACKS, "_entries", dict(ATTACKS._entries))
    ATTACKS.register("spy", AttackConfig)(Spy)
    monkeypatch.setattr(Spy, "found", [])
    monkeypatch.setattr(Spy, "walked", [])
    monkeypatch.setattr("splitveil.evaluation.judge_network.STEPS", 1)  # the judge may be as bad as it likes
    monkeypatch.setattr("splitveil.evaluation.judge_network.EPOCHS", 1)
    config = from_dict({
        "attacks": [{"name": "spy"}], "model": {"name": "small", "width": 4}, "cem": {"surrogate": "rate"},
        "defences": [{"name": "bottleneck"}, {"name": "gaussian"}],
        "splits": {"task": 200, "validation": 50, "auxiliary": 300},
    })  # fmt: skip
    splits = build_splits(config)
    splits = replace(splits, test=splits.test.take(np.arange(600)))  # two batches of observations
    monkeypatch.setattr(Spy, "private", [torch.from_numpy(splits.test.images)])

    def run() -> list[str]:
        folder = Run.create(tmp_path / "run", config)
        folder.save_weights("last", weights_of(build_parts(folder.config, splits.task, CPU)), 0, splits.task.kind)
        attack_run(folder, splits, CPU)
        return Spy.found

    return run


def test_no_private_image_can_be_reached_from_what_an_attack_is_given(spied: Callable[[], list[str]]) -> None:
    assert spied() == []
    assert len(Spy.walked) == 3  # Access, and two Observations
    assert min(Spy.walked) > 30


def test_a_defence_that_keeps_the_images_it_saw_is_found(spied: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def hoard(self: Any, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        self.last = x
        return z + 0.1

    monkeypatch.setattr(defences.DEFENCES["gaussian"].build, "send", hoard)
    assert any(way.endswith(".last holds a private image") for way in spied())


def given_to_an_attack() -> tuple[Access, Observation, Tensor]:
    model, channel = setting()
    threat = ThreatModel(encoder_weights=True, cloud_weights=True)
    access = grant(threat, model, channel, images(30, seed=1), CPU, 0)
    private = images(10, seed=2).take(slice(None))
    with torch.no_grad():
        return access, Observation(model.edge(private).unsqueeze(1)), private


class Slotted:
    __slots__ = ("kept",)

    def __init__(self, kept: Any) -> None:
        self.kept = kept


class Shelf(defences.Defence):
    kept: ClassVar[list[Any]] = []


PLANTS: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "attribute": lambda a, o, x: (setattr(a.channel, "kept", x[3]), a, o),
    "copy in a buffer": lambda a, o, x: (a.edge.register_buffer("kept", x.clone()), a, o),
    "normalised copy": lambda a, o, x: (setattr(a.query, "kept", [(x - 0.5) / 0.25]), a, o),
    "inverted": lambda a, o, x: (setattr(a.query, "kept", 1 - x), a, o),
    "array of bytes": lambda a, o, x: (setattr(a.channel, "kept", (x * 255).round().byte().numpy()), a, o),
    "read-only array": lambda a, o, x: (setattr(a.channel, "kept", np.broadcast_to(x[0].numpy(), (2, 1, 8, 8))), a, o),
    "closure": lambda a, o, x: (setattr(a.channel, "send", lambda *_: x), a, o),
    "default argument": lambda a, o, x: (setattr(a.query, "again", lambda kept=x: None), a, o),
    "partial": lambda a, o, x: (setattr(a.query, "again", functools.partial(print, x)), a, o),
    "bound method": lambda a, o, x: (setattr(a.query, "again", Slotted(x).__init__), a, o),
    "slots": lambda a, o, x: (setattr(a.query, "again", Slotted(x)), a, o),
    "class attribute": lambda a, o, x: (Shelf.kept.append(x), a.channel.defences.append(Shelf()), a, o),
    "nested containers": lambda a, o, x: (replace(a, hints=(AttackHints(side_information={"a": [({"b": x},)]}),)), o),
    "strided view": lambda a, o, x: (replace(a, hints=(x[:, :, ::2, ::2],)), o),
    "logits": lambda a, o, x: (a, replace(o, logits=x.flatten(1))),
    "one image among others": lambda a, o, x: (a, replace(o, z=torch.cat([torch.rand(50, 1, 8, 8), x[7:8]]))),
    "gradient": lambda a, o, x: (setattr(a.edge, "leaf", nn.Parameter(x * 0)), setattr(a.edge.leaf, "grad", x), a, o),
    "graph": lambda a, o, x: (a, replace(o, z=a.edge(x).unsqueeze(1))),
}


@pytest.mark.parametrize("where", PLANTS)
def test_the_walker_finds_an_image_planted_anywhere(where: str) -> None:
    access, observation, private = given_to_an_attack()
    assert leaks((access, observation), [private]) == []
    planted = PLANTS[where](access, observation, private)
    try:
        assert leaks(planted, [private]) != []
    finally:
        Shelf.kept.clear()


@pytest.mark.parametrize(
    "wrap", [nn.utils.weight_norm, nn.utils.spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)]
)
def test_the_architecture_of_a_layer_that_computes_its_weight_comes_without_the_victims_parameters(wrap: Any) -> None:
    """Such a layer's own reset writes into what is computed, and not into the parameters that it is computed from."""
    model, channel = setting()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an older way, which many networks still have
        edge = nn.Sequential(wrap(nn.Conv2d(1, 4, 3, padding=1)), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1))
    with torch.no_grad():
        edge(torch.rand(2, 1, 8, 8))
    model = SplitModel(edge, model.cloud, (2, 4, 4), (1, 8, 8))
    access = grant(ThreatModel(architecture=True), model, channel, images(), CPU, 0)
    assert access.architecture is not None
    first, second = access.architecture(), access.architecture()
    victim = {name: value for name, value in model.edge.named_parameters() if value.std() > 0}
    assert any(name.startswith("0.weight_") for name in victim)
    for name, value in victim.items():
        assert not torch.equal(dict(first.named_parameters())[name], value), name
        assert not torch.equal(dict(first.named_parameters())[name], dict(second.named_parameters())[name]), name


def test_an_edge_that_writes_into_its_input_leaves_the_attackers_images() -> None:
    class Shifts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sub_(0.5)

    model, channel = setting()
    model = SplitModel(nn.Sequential(Shifts(), model.edge), model.cloud, (2, 4, 4), (1, 8, 8))
    access = grant(ThreatModel(encoder_weights=True), model, channel, images(), CPU, 0)
    assert access.query is not None and access.auxiliary is not None
    x = access.auxiliary.take(slice(0, 4))
    before = x.clone()
    access.query(x)
    assert torch.equal(x, before)
    Release(access, torch.Generator())(x.requires_grad_())
    assert torch.equal(x, before)


def test_the_key_of_the_devices_noise_reaches_no_attack() -> None:
    """It has queries for noise of this key. What it draws itself is fresh, as the noise of a key that it does not have is."""
    model, _ = setting()
    channel = Channel([defences.build("keyed_noise", sigma=0.5)])
    channel.deploy()
    access = grant(ThreatModel(encoder_weights=True), model, channel, images(), CPU, 0)
    assert access.channel is not None and access.query is not None and access.hints is not None
    assert not any(isinstance(held, Key) for defence in access.channel.defences for held in vars(defence).values())
    x, z = images().take(slice(0, 2)), torch.zeros(2, 2, 4, 4)
    generator = torch.Generator().manual_seed(0)
    own = [access.channel.send(z, x, generator) for _ in range(2)]
    assert not torch.equal(*own)
    assert not torch.equal(own[0], channel.send(z, x, generator))
    assert torch.equal(access.query(x), access.query(x))
    assert not access.hints[0].random  # it knows what the device does
