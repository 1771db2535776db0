"""What every registered defence must do. A new one is tested here without a line added; OPTIONS can name settings."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from interrupting import train_in_two
from on_device import nobody_waits
from scipy import stats
from seeded import seeded
from torch import Tensor, nn

from splitveil.channel import Channel
from splitveil.cli.arguments import parse
from splitveil.defences import Batch, Defence, build
from splitveil.evaluation.run_attacks import load_parts
from splitveil.registry import DEFENCES
from splitveil.split_model import SplitModel, cut_stages
from splitveil.training.train_runs import train_run

OPTIONS: dict[str, dict[str, Any]] = {
    "adversarial": {"warmup": 0, "likeness": "mse", "width": 8, "blocks": 1},
    "pruning": {"at": 1, "ratio": 0.3},
    "local_dp": {"bound": 100.0},  # clips nothing here: what it adds is then its noise
}
"""Settings under which a defence acts from the first step, and is small."""
COMPANIONS = {"adversarial_noise": "adversarial"}
"""Defences that cannot stand alone, with whom they need."""
every_defence = pytest.mark.parametrize("name", DEFENCES.names())
B = 6


def stacked(name: str) -> tuple[Channel, SplitModel]:
    """The defence behind those that it needs, and the model around them."""
    torch.manual_seed(0)
    stages = nn.Sequential()
    stages.add_module("body", nn.Sequential(nn.Conv2d(3, 10, 3, padding=1), nn.BatchNorm2d(10)))
    stages.add_module("tail", nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(10 * 64, 4)))
    names = [*filter(None, [COMPANIONS.get(name)]), name]
    channel = Channel(build(own, **OPTIONS.get(own, {})) for own in names)
    return channel, channel.rebuild(cut_stages(stages, "body", (3, 8, 8)))


def make(name: str) -> tuple[Defence, SplitModel]:
    channel, model = stacked(name)
    return channel.defences[-1], model  # type: ignore[return-value]


def features(model: SplitModel) -> tuple[Tensor, Tensor]:
    x = torch.rand(B, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return model.edge(x).detach(), x


@every_defence
def test_the_rebuilt_model_works_and_knows_its_shapes(name: str) -> None:
    _, model = make(name)
    x = torch.rand(B, 3, 8, 8)
    assert tuple(model.edge(x).shape[1:]) == model.z_shape
    assert model.x_shape == (3, 8, 8)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@every_defence
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_sent_has_the_shape_and_type_of_z(name: str, dtype: torch.dtype) -> None:
    defence, model = make(name)
    z, x = features(model)
    sent = defence.send(z.to(dtype), x, seeded())
    assert (sent.shape, sent.dtype, sent.device) == (z.shape, dtype, z.device)
    assert torch.isfinite(sent).all()


@every_defence
def test_neither_z_nor_x_is_written_into(name: str) -> None:
    defence, model = make(name)
    z, x = features(model)
    before = z.clone(), x.clone()
    defence.send(z, x, seeded())
    defence.penalty(Batch(x, z, z.clone(), torch.arange(B) % 4))
    assert torch.equal(z, before[0])
    assert torch.equal(x, before[1])


@every_defence
def test_the_channel_never_hands_out_the_memory_of_z(name: str) -> None:
    defence, model = make(name)
    z, x = features(model)
    sent = Channel([defence]).send(z, x, seeded())
    assert sent.untyped_storage().data_ptr() != z.untyped_storage().data_ptr()


@every_defence
def test_training_and_evaluation_send_the_same(name: str) -> None:
    defence, model = make(name)
    z, x = features(model)
    trained, evaluated = (defence.train(mode).send(z, x, seeded()) for mode in (True, False))
    assert torch.equal(trained, evaluated)


@every_defence
def test_the_gradient_reaches_z(name: str) -> None:
    defence, model = make(name)
    z, x = features(model)
    z.requires_grad_()
    sent = defence.send(z, x, seeded())
    (gradient,) = torch.autograd.grad(sent.square().sum(), z)
    assert torch.isfinite(gradient).all()
    assert gradient.any()


@every_defence
@pytest.mark.parametrize("value", [0.0, 3.0, float("nan"), float("inf")])
def test_constant_and_broken_features_are_sent_without_an_exception(name: str, value: float) -> None:
    defence, model = make(name)
    z, x = features(model)
    assert defence.send(torch.full_like(z, value), x, seeded()).shape == z.shape


@every_defence
def test_its_hint_on_randomness_is_true(name: str) -> None:
    defence, model = make(name)
    z, x = features(model)
    generator = seeded()
    first, second = defence.send(z, x, generator), defence.send(z, x, generator)
    assert torch.equal(first, second) == (not defence.attack_hints.random)


@every_defence
def test_its_noise_has_the_standard_deviation_that_it_states(name: str) -> None:
    defence, model = make(name)
    z, x = features(model)
    if defence.noise_std is None:
        assert "sigma" not in defence.attack_hints.side_information
        return
    generator = seeded()
    noise = torch.stack([defence.send(z, x, generator) - z for _ in range(50)])
    assert noise.std().item() == pytest.approx(defence.noise_std, rel=0.02)
    assert noise.mean().abs() < 0.02 * defence.noise_std
    assert defence.attack_hints.side_information["sigma"] == defence.noise_std


@every_defence
def test_it_does_something_and_only_none_does_nothing(name: str) -> None:
    defence, model = make(name)
    z, x = features(model)
    batch = Batch(x, z, defence.send(z, x, seeded()), torch.arange(B) % 4)
    assert defence.acts(batch, seeded()) == (name != "none")


@every_defence
def test_its_state_and_the_rebuilt_models_export_without_pickle(name: str) -> None:
    defence, model = make(name)
    fresh, fresh_model = make(name)
    z, x = features(model)
    with torch.no_grad():
        for parameter in (*defence.parameters(), *model.parameters()):
            parameter.add_(0.5)
    for old, new in ((defence, fresh), (model, fresh_model)):
        new.load_state_dict(safetensors.torch.load(safetensors.torch.save(old.state_dict())))
    assert torch.equal(defence.send(z, x, seeded()), fresh.send(z, x, seeded()))
    assert torch.equal(model.eval()(x), fresh_model.eval()(x))


@every_defence
def test_its_penalty_is_a_finite_scalar_if_it_has_one(name: str) -> None:
    defence, model = make(name)
    z, x = features(model)
    z.requires_grad_()
    penalty = defence.penalty(Batch(x, z, defence.send(z, x, seeded()), torch.arange(B) % 4))
    assert penalty is None or (penalty.shape == () and torch.isfinite(penalty) and penalty.requires_grad)


@every_defence
def test_nothing_in_a_step_waits_for_the_device(name: str) -> None:
    channel, model = stacked(name)
    channel.on_epoch(5, model)
    channel, model = channel.to("meta"), model.to("meta")
    x, y = torch.empty(B, 3, 8, 8, device="meta"), torch.empty(B, dtype=torch.int64, device="meta")
    with nobody_waits():
        z = model.edge(x)
        sent = channel.send(z, x, seeded())
        task = model.cloud(sent).sum()
        (task + sum(channel.penalties(Batch(x, z, sent, y)))).backward()
        channel.inner_step(Batch(x, z.detach(), sent.detach(), y))


@every_defence
def test_what_it_says_of_itself_can_be_written_down_and_its_noise_is_added_to_what_is_clean(name: str) -> None:
    defence, model = make(name)
    z, x = features(model)
    sent = defence.send(z, x, seeded())
    assert isinstance(json.loads(json.dumps(defence.report())), dict)
    if defence.noise_std is not None:
        noise = (sent - defence.clean(z, x)) / defence.noise_std
        assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 0.01


@every_defence
def test_it_says_so_if_what_it_sends_depends_on_x_beyond_z(name: str) -> None:
    defence, model = make(name)
    z, x = features(model)
    same = torch.equal(defence.send(z, x, seeded()), defence.send(z, 1 - x, seeded()))
    assert same == (not defence.reads_x)


def stack_of(name: str) -> list[str]:
    """Flags for a stack with this defence on a bottleneck."""
    names = [] if name in ("none", "bottleneck") else ["bottleneck"]
    names += [COMPANIONS[name]] if name in COMPANIONS else []
    flags = ["--defences", ",".join([*names, name])]
    for i, own in enumerate([*names, name]):
        for option, value in OPTIONS.get(own, {}).items():
            flags += [f"--defences.{i}.{option.replace('_', '-')}", str(value)]
    return flags


@every_defence
def test_it_trains_and_an_interrupted_run_ends_bit_for_bit_as_an_uninterrupted_one(
    name: str, pictures: Path, tmp_path: Path
) -> None:
    flags = f"""
        --data npz --data.path {pictures} --splits.task 160 --splits.validation 40 --splits.auxiliary 200 --model.width 4
        --train.epochs 2 --train.batch 32 --attacks mean_image --device cpu --cem.surrogate uniform --cem.sigma 0.1
    """.split()
    config = parse([*flags, *stack_of(name)])
    whole, splits, device = train_run(tmp_path / "whole", config)
    half = train_in_two(7, tmp_path / "half", config)  # Ctrl-C comes in the second of two epochs of five steps
    for file in ("weights/last.safetensors", "state/train.safetensors"):
        assert (whole.folder / file).read_bytes() == (half.folder / file).read_bytes()
    load_parts(whole, splits, device)  # what attack and evaluate open


@every_defence
def test_it_has_a_page_that_names_its_options(name: str) -> None:
    if name == "none":
        return
    page = (Path(__file__).parents[2] / "docs" / "defences" / f"{name}.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(DEFENCES[name].config):
        assert f"`{field.name}`" in page
