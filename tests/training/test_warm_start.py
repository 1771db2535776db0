"""The warm start trains proxies and nothing else."""

from pathlib import Path

import torch

from splitveil.cli.arguments import parse
from splitveil.data.loader import DeviceImages
from splitveil.training.build import build_parts, build_splits
from splitveil.training.train_runs import train_run
from splitveil.training.warm_start import warm_start

FLAGS = [  # of a small run
    "--model.width=4", "--splits.task=160", "--splits.validation=20", "--splits.auxiliary=96", "--train.epochs=1",
    "--train.batch=32", "--device=cpu", "--defences", "bottleneck,gaussian,adversarial", "--defences.2.blocks=1",
    "--defences.2.width=4", "--defences.2.lr=0.01",
]  # fmt: skip


def test_only_the_proxy_learns_and_it_learns_from_the_attackers_images() -> None:
    config = parse([*FLAGS, "--defences.2.warm-start", "6"])
    splits, device = build_splits(config), torch.device("cpu")
    parts, images = build_parts(config, splits.task, device), DeviceImages(splits.auxiliary, device)
    edge = {name: value.clone() for name, value in parts.model.state_dict().items()}
    proxy = parts.channel.defences[2].proxy
    parts.model.eval()
    x = images.take(slice(None))
    z = parts.model.edge(x).detach()
    before = (proxy.guess(z) - x).square().mean().item()
    warm_start(parts, images, batch=32, seed=0)
    assert all(torch.equal(edge[name], value) for name, value in parts.model.state_dict().items())
    assert (proxy.guess(z) - x).square().mean().item() < 0.8 * before
    assert {int(state["step"]) for state in proxy.optimizer.state.values()} == {6 * 3}  # of 96 images in batches of 32


def test_a_run_makes_its_passes_once_before_the_first_epoch(tmp_path: Path) -> None:
    flags = [*FLAGS, "--defences.2.warm-start", "2", "--defences.2.warmup", "0", "--defences.2.target=-1"]
    run, _, _ = train_run(tmp_path / "run", parse(flags))
    saved = run.load_state()
    assert saved is not None
    assert saved[0]["channel_optimizer0.0.step"] == 2 * 3 + 5  # and then one step for each of the five batches of the task
    assert run.last_metrics()["penalty"] > 0  # from the first epoch on: SSIM is above -1
