"""The adapter on a small world: it follows a shift, costs little without one, forgets, and returns to its start."""

import ast
import copy
import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from small_world import CLASSES, SHAPE, SIGMA, World, world
from torch import Tensor, nn

import splitveil.adaptation
from splitveil.adaptation import Adapter, AdapterConfig, Client
from splitveil.adaptation.adapter import Adapted, classes_answered, loss_of, statistics_follow, weights_of
from splitveil.options import UserError

SEEDS = (0, 1, 2)
QUICK = AdapterConfig(batch=16, replayed=16, lr=0.01, descent=True)


def adapter_of(made: World, config: AdapterConfig = QUICK, **more) -> Adapter:
    x, _ = made.images(256, 11)
    return Adapter(made.model.cloud, made.sent(x, 12), config, **more)


def accuracy(answers: Tensor, y: Tensor) -> float:
    return (answers.argmax(1) == y).float().mean().item()


def stream(adapter: Adapter, z: Tensor) -> Tensor:
    return torch.cat([adapter.observe(part) for part in z.split(40)])


def shifted(z: Tensor) -> Tensor:
    """What a changed camera might do to z: two channels are weaker and moved."""
    return z * torch.tensor([0.4, 1.0, 1.5, 1.0]).view(-1, 1, 1) + torch.tensor([0.8, 0.0, 0.0, -0.5]).view(-1, 1, 1)


@pytest.mark.slow
def test_it_wins_back_accuracy_under_a_shift_over_seeds() -> None:
    gains = []
    for seed in SEEDS:
        made = world(seed)
        x, y = made.images(2000, 100 + seed)
        z = shifted(made.sent(x, 200 + seed))
        adapter = adapter_of(made)
        stream(adapter, z[:1600])
        assert adapter.retention.kept <= 0.4 * adapter.retention.seen
        gains.append(accuracy(adapter(z[1600:]), y[1600:]) - accuracy(made.model.cloud(z[1600:]), y[1600:]))
    assert sum(gains) / len(gains) > 0.02


def test_without_a_shift_it_costs_little_over_seeds() -> None:
    losses = []
    for seed in SEEDS:
        made = world(seed)
        x, y = made.images(2000, 100 + seed)
        z = made.sent(x, 200 + seed)
        answers = stream(adapter_of(made), z)
        losses.append(accuracy(made.model.cloud(z), y) - accuracy(answers, y))
    assert sum(losses) / len(losses) < 0.02


def test_the_cloud_that_was_given_and_its_answers_stay_as_they_are() -> None:
    made = world()
    before = copy.deepcopy(made.model.cloud.state_dict())
    stream(adapter_of(made), shifted(made.sent(made.images(400, 1)[0], 2)))
    assert all(torch.equal(before[name], value) for name, value in made.model.cloud.state_dict().items())
    assert not any(parameter.requires_grad for parameter in made.model.cloud.parameters())


def test_before_the_first_step_it_answers_as_the_cloud_and_an_answer_depends_on_its_own_z_only() -> None:
    made = world()
    z, adapter = made.sent(made.images(600, 1)[0], 2), adapter_of(made)
    assert torch.allclose(adapter(z), made.model.cloud(z), atol=1e-6)
    stream(adapter, shifted(z))
    assert adapter.steps > 3
    assert torch.allclose(adapter(z[:1]), adapter(z)[:1], atol=1e-5)


def test_the_same_stream_and_seed_give_the_same_cloud() -> None:
    made = world()
    z = shifted(made.sent(made.images(400, 1)[0], 2))
    one, two = (adapter_of(made, seed=5) for _ in range(2))
    assert torch.equal(stream(one, z), stream(two, z))


def test_only_the_affine_at_the_cut_and_the_norms_are_learnt() -> None:
    made = world()
    adapter = adapter_of(made)
    before = {name: value.clone() for name, value in adapter.model.state_dict().items()}
    stream(adapter, shifted(made.sent(made.images(600, 1)[0], 2)))
    moved = {name for name, value in adapter.model.state_dict().items() if not torch.equal(value, before[name])}
    norm = {f"cloud.1.{name}" for name in ("weight", "bias", "running_mean", "running_var")}
    assert moved == {"gain", "shift"} | norm


def test_a_cloud_without_norms_learns_at_the_cut_alone() -> None:
    made = world(norm=False)
    adapter = adapter_of(made)
    stream(adapter, shifted(made.sent(made.images(600, 1)[0], 2)))
    assert adapter.steps > 3
    assert len(adapter.model.learnt()) == 2
    with pytest.raises(UserError, match="has no BatchNorm whose statistics could follow; set descent"):
        adapter_of(made, AdapterConfig())


def test_statistics_follow_the_batch_by_their_share() -> None:
    norm, x = nn.BatchNorm2d(3).eval(), torch.randn(20, 3, 4, 4) * 2 + 1
    with statistics_follow([norm], 0.25):
        norm(x)
    norm(x + 100)  # outside nothing moves
    assert norm.running_mean is not None and norm.running_var is not None
    rows = x.permute(1, 0, 2, 3).reshape(3, -1)
    assert torch.allclose(norm.running_mean, 0.25 * rows.mean(1), atol=1e-5)
    assert torch.allclose(norm.running_var, 0.75 + 0.25 * rows.var(1), atol=1e-5)


def test_the_loss_is_that_of_a_plain_loop() -> None:
    logits, taught = torch.randn(7, 4).double(), torch.randn(7, 4).double()
    h = [-sum(p * math.log(p) for p in row) for row in logits.softmax(1).tolist()]
    w = [math.exp(-value) for value in h]
    expected = sum(a * b for a, b in zip(w, h)) / sum(w)
    kl = (
        sum(q * math.log(q / p) for a, b in zip(taught.softmax(1).tolist(), logits.softmax(1).tolist()) for q, p in zip(a, b)) / 7
    )
    assert math.isclose(loss_of(logits, None, 1.0), expected, rel_tol=1e-9)
    assert math.isclose(loss_of(logits, taught, 2.0), expected + 2 * kl, rel_tol=1e-9)
    assert math.isclose(weights_of(torch.tensor(h)).mean(), 1.0, rel_tol=1e-6)


def test_what_was_kept_is_forgotten_after_its_time() -> None:
    now, made = [0.0], world()
    adapter = adapter_of(made, AdapterConfig(batch=16, replayed=16, seconds=60), clock=lambda: now[0])
    z = made.sent(made.images(100, 1)[0], 2)
    stream(adapter, z)
    assert len(adapter.replay) > 0
    now[0] = 60.0
    assert len(adapter.replay) == 0
    assert not adapter.replay._rows.any()
    steps = adapter.steps
    adapter.step()  # nothing is left to learn from
    assert adapter.steps == steps


@pytest.mark.parametrize("config", [AdapterConfig(batch=16, lr=1.0, descent=True, anchor=0.0, collapse=0.0, reset_every=4)])
def test_after_so_many_steps_everything_returns_to_the_start(config: AdapterConfig) -> None:
    made = world()
    adapter = adapter_of(made, config)
    start = copy.deepcopy(adapter.model.state_dict())
    z = shifted(made.sent(made.images(1600, 1)[0], 2))
    for part in z.split(20):
        adapter.observe(part)
        if adapter.steps and adapter.steps % 4 == 0:
            assert all(torch.equal(start[name], value) for name, value in adapter.model.state_dict().items())
    assert adapter.resets == adapter.steps // 4 > 2


def test_a_stream_of_one_class_collapses_without_a_net_and_is_caught_by_each_of_them() -> None:
    loose = {"keep": 1.0, "descent": True, "batch": 16, "replayed": 16, "lr": 3.0, "anchor": 0.0, "statistics": 0.5}
    periodic, reference = {"collapse": 0.0, "reset_every": 5}, {"collapse": 0.9, "check_every": 1}
    nets = {"none": {"collapse": 0.0}, "periodic": periodic, "reference": reference}
    spread: dict[str, float] = {}
    for name, net in nets.items():
        found = []
        for seed in SEEDS:
            made = world(seed)
            adapter = adapter_of(made, AdapterConfig(**loose, **net))  # type: ignore[arg-type]
            stream(adapter, made.sent(made.images(1200, 7, only=0)[0], 8))
            assert adapter.steps == 30
            found.append((classes_answered(adapter(made.sent(made.images(400, 9)[0], 10))), adapter.resets))
        assert (sum(resets for _, resets in found) > 0) == (name != "none")
        spread[name] = sum(classes for classes, _ in found) / len(found)
    assert spread["none"] < 0.8 * CLASSES
    assert spread["periodic"] > 0.95 * CLASSES  # the 30th step ends a period
    assert spread["reference"] > 0.9 * CLASSES


def test_a_rate_that_is_far_too_large_ends_at_the_start_and_not_in_answers_that_are_no_numbers() -> None:
    made = world()
    adapter = adapter_of(made, AdapterConfig(batch=16, lr=1e38, descent=True, collapse=0.0))
    z = shifted(made.sent(made.images(400, 1)[0], 2))
    stream(adapter, z)
    assert adapter.resets > 0
    assert adapter(z).isfinite().all()


def test_z_of_another_shape_is_refused() -> None:
    with pytest.raises(UserError, match=r"z is \[5, 4, 4\], the reference is \[4, 4, 4\]"):
        adapter_of(world()).observe(torch.zeros(2, 5, 4, 4))


def test_what_is_no_z_of_this_cloud_is_one_line() -> None:
    made, adapter = world(), adapter_of(world())
    with pytest.raises(UserError, match="z is a ndarray, must be a tensor of floats, as it was received"):
        adapter.observe(np.zeros((2, *SHAPE)))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the reference is a ndarray, must be a tensor of floats"):
        Adapter(made.model.cloud, np.zeros((8, *SHAPE)))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"the cloud does not take a reference of \[4, 4, 4\] .*; give the half behind the cut"):
        Adapter(made.model, adapter.reference)
    with pytest.raises(UserError, match="the config is a dict, must be an AdapterConfig"):
        Adapter(made.model.cloud, adapter.reference, {"keep": 0.2})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_z_in_another_precision_is_answered_kept_and_learnt_from_in_that_of_the_reference(dtype: torch.dtype) -> None:
    made, adapter = world(), adapter_of(world(), AdapterConfig(keep=1, batch=16))
    z = made.sent(made.images(64, 1)[0], 2)
    assert (adapter.observe(z.to(dtype)) - made.model.cloud(z)).abs().max() < 0.1
    assert adapter.steps == 1 and adapter.replay.newest(1).dtype == torch.float32


def test_an_update_is_confirmed_with_the_noise_of_the_channel() -> None:
    adapter = adapter_of(world())
    message = adapter.update("edge")
    with pytest.raises(UserError, match="sigma is 0, must be above 0: that of the channel's noise"):
        adapter.confirm(message, 0)


def test_of_a_stream_of_one_class_little_is_kept() -> None:
    made = world()
    adapter = adapter_of(made)
    stream(adapter, made.sent(made.images(1200, 7, only=0)[0], 8))
    assert adapter.retention.kept < 0.2 * adapter.retention.seen


@pytest.mark.slow
def test_poison_moves_the_answers_to_clean_z_little_over_seeds() -> None:
    moved: dict[str, list[float]] = {"random": [], "ten times": [], "not a number": []}
    for seed in SEEDS:
        made = world(seed)
        (x, y), generator = made.images(1600, 20 + seed), torch.Generator().manual_seed(seed)
        clean = made.sent(x, 30 + seed)
        bad = {"random": clean.std() * torch.randn(160, *SHAPE, generator=generator)}
        bad |= {"ten times": 10 * clean[:160], "not a number": clean[:160] * float("nan")}
        alone = adapter_of(made)
        stream(alone, clean)
        for name, z in bad.items():
            adapter = adapter_of(made)
            stream(adapter, torch.cat([clean, z])[torch.randperm(1760, generator=generator)])
            moved[name].append(accuracy(alone(clean), y) - accuracy(adapter(clean), y))
    assert all(sum(values) / len(values) < 0.02 for values in moved.values())


def test_an_update_moves_what_it_may_to_the_device_and_the_answers_mean_the_same() -> None:
    made = world()
    adapter, client = adapter_of(made), Client(made.model.edge, made.channel, SHAPE)
    with torch.no_grad():
        adapter.model.gain.copy_(torch.tensor([0.5, 1.0, 2.0, 0.8]))
        adapter.model.shift.copy_(torch.tensor([0.1, 0.0, -0.4, 0.3]))
    x, _ = made.images(50, 1)
    z = made.model.edge(x)
    before = adapter(z)  # without noise, so that only the two affines count
    adapter.replay.add(z)
    message = adapter.update(client.digest)
    client.apply(message)
    assert client.affine.gain.tolist() == pytest.approx([0.5, 1.0, 1.0, 0.8])
    adapter.confirm(message, SIGMA)
    assert torch.allclose(adapter(client.edge(x)), before, atol=1e-5)
    assert len(adapter.replay) == 0  # of another gain
    adapter.reset()  # the start is that of the release, whatever the device has
    assert torch.allclose(adapter(client.edge(x)), made.model.cloud(z), atol=1e-4)


def test_after_a_restart_of_the_server_devices_take_its_next_update() -> None:
    made = world()
    client = Client(made.model.edge, made.channel, SHAPE)
    before = adapter_of(made)
    messages = [before.update(client.digest) for _ in range(2)]
    for message in messages:
        client.apply(message)
    anew = adapter_of(made)
    with pytest.raises(UserError, match="the update has number 1, must be above 2"):
        client.apply(adapter_of(made).update(client.digest))
    anew.confirm(messages[-1], SIGMA)
    client.apply(anew.update(client.digest))
    assert client.number == 3


def test_without_descent_there_is_nothing_to_send() -> None:
    with pytest.raises(UserError, match="descent is off"):
        adapter_of(world(), AdapterConfig()).update("")


def test_the_reference_of_an_updated_device_is_what_that_would_have_sent() -> None:
    made = world()
    adapter, client = adapter_of(made), Client(made.model.edge, made.channel, SHAPE)
    with torch.no_grad():
        adapter.model.gain.fill_(0.5)
    message = adapter.update(client.digest)
    client.apply(message)
    adapter.confirm(message, SIGMA)
    again = client.send(made.images(256, 11)[0], torch.Generator().manual_seed(1))
    assert adapter.reference.std().item() == pytest.approx(again.std().item(), rel=0.05)
    assert adapter.reference.mean().item() == pytest.approx(again.mean().item(), abs=0.05)


@pytest.mark.parametrize("reference", [torch.zeros(1, *SHAPE), torch.full((4, *SHAPE), float("nan"))])
def test_a_reference_that_says_nothing_is_refused(reference: Tensor) -> None:
    with pytest.raises(UserError, match="the reference must be"):
        Adapter(world().model.cloud, reference)


@pytest.mark.parametrize(("name", "value"), [("keep", 0.0), ("lr", -1.0), ("cap", 0), ("seconds", 0.0), ("reset_every", 0)])
def test_an_option_out_of_bounds_is_refused(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"adaptation: {name} is {value}, must be "):
        AdapterConfig(**{name: value})


def test_no_image_is_an_argument_of_anything_that_runs_in_the_cloud() -> None:
    """Images may be named on the device (Client) and where one's own images are attacked (attack_again), and nowhere else."""
    room = Path(splitveil.adaptation.__file__).parent
    words = {"x", "image", "images", "picture", "pictures", "pixels", "private", "attacker"}
    for file in sorted(room.glob("*.py")):
        if file.stem in ("client", "attack_again"):
            continue
        tree = ast.parse(file.read_text())
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(str(module).startswith("splitveil.data") for module in modules), file
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.Lambda):
                arguments = node.args
                names = {each.arg for each in [*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs]}
                assert not names & words, f"{file.name}: {getattr(node, 'name', 'a lambda')} takes {names & words}"
    assert list(inspect.signature(Adapter.observe).parameters) == ["self", "z"]
    assert [name for name, _ in Adapted(nn.Identity(), SHAPE).named_buffers()] == ["device_gain", "device_shift"]


def test_steps_of_a_single_z_leave_finite_statistics_and_are_no_reason_to_return_to_the_start() -> None:
    """One number has a mean and no variance: only the mean follows."""
    cloud = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).eval()
    z = torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(0))
    adapter = Adapter(cloud, z, AdapterConfig(batch=1, replayed=0, keep=1.0, collapse=0.0))
    for one in z[:8].split(1):
        adapter.observe(one)
    norm = adapter.model.followers()[0]
    assert adapter.steps > 0 and adapter.resets == 0
    assert norm.running_mean is not None and norm.running_mean.abs().max() > 0
    assert norm.running_var is not None and torch.equal(norm.running_var, torch.ones(8))


def test_a_norm_that_a_cloud_uses_twice_can_learn_by_descent() -> None:
    norm = nn.BatchNorm2d(SHAPE[0])
    cloud = nn.Sequential(norm, nn.ReLU(), norm, nn.Flatten(), nn.Linear(64, CLASSES)).eval()
    z = torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(0))
    adapter = Adapter(cloud, z, AdapterConfig(batch=8, keep=1.0, descent=True))
    stream(adapter, z)
    assert adapter.steps > 0 and adapter.model.gain.ne(1).any()


@pytest.mark.parametrize(("cloud", "reference"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_a_reference_of_another_type_than_the_cloud_is_refused(cloud: torch.dtype, reference: torch.dtype) -> None:
    made = world()
    z = made.sent(made.images(64, 1)[0], 2).to(reference)
    with pytest.raises(
        UserError, match=r"the reference is of float\d\d, the cloud of float\d\d; give z as the cloud receives it"
    ):
        Adapter(copy.deepcopy(made.model.cloud).to(cloud), z)


@pytest.mark.parametrize("like", [torch.float64, torch.float16])
def test_z_of_another_type_than_the_reference_is_answered_and_kept_in_the_types_of_the_reference(like: torch.dtype) -> None:
    made = world()
    adapter = adapter_of(made)
    z = made.sent(made.images(400, 1)[0], 2).to(like)
    assert torch.equal(adapter(z), adapter(z.float()))
    stream(adapter, z)
    assert adapter.steps > 0 and adapter.replay.newest(4).dtype == torch.float32


@pytest.mark.parametrize("like", [torch.bfloat16, torch.float64])
def test_a_cloud_of_another_type_learns_as_well(like: torch.dtype) -> None:
    made = world()
    x, _ = made.images(256, 11)
    z = made.sent(x, 12).to(like)
    adapter = Adapter(copy.deepcopy(made.model.cloud).to(like), z, QUICK)
    assert torch.allclose(adapter(z), copy.deepcopy(made.model.cloud).to(like).eval()(z), atol=1e-6)
    answers = stream(adapter, shifted(z).to(like))
    assert answers.dtype == like and answers.isfinite().all()
    assert adapter.steps > 0
