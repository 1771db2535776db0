from pathlib import Path

import pytest
import torch
from interrupting import train_in_two
from seeded import seeded
from small_split import small_split
from torch import Tensor

from splitveil import defences
from splitveil.channel import Channel
from splitveil.cli.arguments import parse
from splitveil.defences import Batch
from splitveil.defences.shredder import Shredder, laplace
from splitveil.split_model import SplitModel
from splitveil.training.train_runs import train_run


def attached(**options: float) -> tuple[Shredder, SplitModel]:
    model = small_split(4, batchnorm=True)
    defence = defences.build("shredder", **options)
    assert isinstance(defence, Shredder)
    return defence, Channel([defence]).rebuild(model)


def task_loss(model: SplitModel, defence: Shredder, x: Tensor, generator: torch.Generator) -> Tensor:
    return model.cloud(defence.send(model.edge(x), x, generator)).logsumexp(1).mean()


def test_every_image_gets_one_tensor_of_the_library_and_all_are_used_equally() -> None:
    defence, _ = attached(tensors=5)
    z = torch.zeros(10_000, 4, 6, 6)
    picked = (defence.send(z, z, seeded()).unsqueeze(1) == defence.library).flatten(2).all(2)  # [b, K]
    assert (picked.sum(1) == 1).all()
    shares = picked.float().mean(0)
    assert (shares - 1 / 5).abs().max() < 0.02


def test_the_noise_starts_as_laplace_noise_of_the_given_spread() -> None:
    torch.manual_seed(0)
    noise = laplace((200_000,), 0.3)
    assert noise.mean().abs() < 0.005
    assert noise.std().item() == pytest.approx(0.3, rel=0.02)
    assert ((noise / 0.3) ** 4).mean().item() == pytest.approx(6, rel=0.1)  # the fourth moment of Laplace noise


def test_whoever_knows_the_library_is_left_with_as_many_candidates_as_there_are_tensors() -> None:
    """The documented failure: the true z is among the K that the attacker can try."""
    defence, _ = attached(tensors=4)
    z = torch.randn(7, 4, 6, 6)
    library = defence.attack_hints.side_information["library"]
    candidates = defence.send(z, z, seeded()).unsqueeze(1) - library  # [b, K, *z_shape]
    assert (candidates - z.unsqueeze(1)).flatten(2).norm(dim=2).min(1).values.max() < 1e-5


def test_before_the_edge_is_frozen_the_library_is_as_it_was_drawn() -> None:
    defence, model = attached(freeze_after=2)
    assert [defence.on_epoch(epoch, model) for epoch in range(2)] == [False, False]
    assert Channel([defence]).task_parameters() == []
    task_loss(model, defence, torch.rand(8, 3, 6, 6), seeded()).backward()
    assert defence.library.grad is None
    assert all(p.grad is not None for p in model.parameters())


def test_from_the_epoch_on_edge_and_its_statistics_stand_still_and_library_and_cloud_learn() -> None:
    defence, model = attached(freeze_after=2, tensors=3)
    x = torch.rand(64, 3, 6, 6)
    assert [defence.on_epoch(epoch, model) for epoch in (2, 3)] == [True, False]  # optimisers are made anew once
    before = {name: tensor.clone() for name, tensor in model.edge.state_dict().items() if "num_batches" not in name}
    model.train()
    trained = [p for p in (*model.parameters(), *Channel([defence]).task_parameters()) if p.requires_grad]
    optimizer, library = torch.optim.SGD(trained, 0.1), defence.library.detach().clone()
    z = model.edge(x)
    assert not z.requires_grad
    task_loss(model, defence, x, seeded()).backward()
    optimizer.step()
    assert all(torch.equal(tensor, model.edge.state_dict()[name]) for name, tensor in before.items())
    assert not torch.equal(defence.library, library)
    assert all(p.grad is not None and p.grad.any() for p in model.cloud.parameters())


def test_a_checkpoint_of_a_frozen_run_is_opened_frozen() -> None:
    defence, model = attached(freeze_after=0)
    defence.on_epoch(0, model)
    again, fresh = attached(freeze_after=0)
    again.reshape(fresh, defence.state_dict())
    again.load_state_dict(defence.state_dict())
    assert not any(p.requires_grad for p in fresh.edge.parameters())
    assert len(Channel([again]).task_parameters()) == 1
    assert not again.on_epoch(1, fresh)


@pytest.mark.parametrize("killed_in", [1, 2])
def test_a_run_killed_around_the_freeze_ends_bit_for_bit_as_one_that_was_not(
    killed_in: int, pictures: Path, tmp_path: Path
) -> None:
    config = parse(f"""
        --data npz --data.path {pictures} --splits.task 160 --splits.validation 40 --splits.auxiliary 200 --model.width 4
        --train.epochs 3 --train.batch 32 --attacks mean_image --device cpu --cem.surrogate uniform --cem.sigma 0.1
        --cem.warmup 0 --defences bottleneck,shredder --defences.1.freeze-after 1
    """.split())  # fmt: skip
    whole, _, _ = train_run(tmp_path / "whole", config)
    assert [line["cem_inactive"] for line in whole.metrics()] == [0, 5, 10]  # nobody to tell once the edge is frozen
    half = train_in_two(5 * killed_in + 2, tmp_path / "half", config)  # five steps an epoch
    for file in ("weights/last.safetensors", "state/train.safetensors"):
        assert (whole.folder / file).read_bytes() == (half.folder / file).read_bytes()


def test_the_penalty_is_minus_keep_times_the_mean_norm_of_the_tensors() -> None:
    defence, model = attached(keep=0.2, freeze_after=0, tensors=3)
    batch = Batch(*(torch.zeros(2),) * 4)
    assert defence.penalty(batch) is None
    defence.on_epoch(0, model)
    penalty = defence.penalty(batch)
    assert penalty is not None
    expected = -0.2 * sum(entry.abs().sum().item() for entry in defence.library.detach()) / 3
    assert penalty.item() == pytest.approx(expected, rel=1e-5)
    penalty.backward()
    assert defence.library.grad is not None
    torch.testing.assert_close(defence.library.grad, -0.2 / 3 * defence.library.detach().sign())


def test_with_weight_decay_an_idle_entry_settles_where_the_docstring_says() -> None:
    defence, model = attached(keep=0.3, freeze_after=0, tensors=2, scale=0.01)
    defence.on_epoch(0, model)
    optimizer = torch.optim.SGD(Channel([defence]).task_parameters(), 0.5, weight_decay=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        penalty = defence.penalty(Batch(*(torch.zeros(2),) * 4))
        assert penalty is not None
        penalty.backward()
        optimizer.step()
    settled = torch.full((2, 4, 6, 6), 0.3 / (2 * 0.1))
    torch.testing.assert_close(defence.library.detach().abs(), settled, rtol=1e-3, atol=0)
