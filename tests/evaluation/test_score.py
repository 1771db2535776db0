import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitveil import attacks
from splitveil.attacks.threat import Observation, ThreatModel, grant
from splitveil.channel import Channel
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.defences import build
from splitveil.evaluation.score import observe, score
from splitveil.metrics.image import mse, psnr, ssim
from splitveil.metrics.lpips import lpips_or_why
from splitveil.split_model import SplitModel
from splitveil.training.build import Parts

CPU = torch.device("cpu")


def setting() -> tuple[Parts, DeviceImages]:
    torch.manual_seed(0)
    model = SplitModel(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)), nn.Flatten(), (2, 16, 16), (1, 16, 16))
    rng = np.random.default_rng(0)
    images = ImageSet(rng.integers(0, 256, (510, 1, 16, 16), np.uint8), rng.integers(0, 3, 510), ("a", "b", "c"))
    return Parts(model, Channel([build("gaussian", sigma=0.5)]), None), DeviceImages(images, CPU)


def test_the_wire_shows_each_image_as_often_as_asked_and_in_eval_mode() -> None:
    parts, images = setting()
    batches = list(observe(parts.model, parts.channel, images, ThreatModel(observations=3), torch.Generator().manual_seed(0)))
    x, z = torch.cat([x for x, _ in batches]), torch.cat([seen.z for _, seen in batches])
    assert torch.equal(x, images.take(slice(None)))
    assert z.shape == (510, 3, 2, 16, 16)
    assert not z.requires_grad
    assert not torch.equal(z[:, 0], z[:, 1])
    with torch.no_grad():
        noise = z - parts.model.eval().edge(x).unsqueeze(1)
    assert noise.std().item() == pytest.approx(0.5, rel=0.01)
    assert all(seen.labels is None and seen.logits is None for _, seen in batches)


class Guess(attacks.Attack):
    """Answers with grey; notes how often each image was shown."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(attacks.AttackConfig(), seed=0)
        self.shape = shape

    def reconstruct(self, observation: Observation) -> Tensor:
        return torch.full((len(observation.z), *self.shape), 0.5)


def test_every_image_gets_one_row_of_its_own_figures() -> None:
    parts, images = setting()
    rows, rebuilt = score(Guess((1, 16, 16)), parts, images, 0)
    x = images.take(slice(None))
    grey = torch.full_like(x, 0.5)
    assert torch.equal(rebuilt, grey)
    for name, metric in {"mse": mse, "psnr": psnr, "ssim": ssim}.items():
        np.testing.assert_allclose(rows[name], metric(grey, x).numpy(), rtol=1e-6)
    assert rows["label"].tolist() == images.labels.tolist()
    np.testing.assert_allclose(rows["residual"], rows["residual_ceiling"], rtol=1e-4)  # grey tells no class mates apart
    assert ("lpips" in rows) == (lpips_or_why()[0] is not None)


def test_an_attack_that_gives_images_of_another_size_is_an_error() -> None:
    parts, images = setting()
    with pytest.raises(RuntimeError, match=r"Guess gave \(500, 1, 8, 8\) for images of \(500, 1, 16, 16\)"):
        score(Guess((1, 8, 8)), parts, images, 0)


class Shifts(nn.Module):
    """Brings images to mean 0 as many networks do, in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(0.5).mul_(2)


def test_a_cloud_that_begins_in_place_leaves_what_an_attacker_sees() -> None:
    parts, images = setting()
    cloud = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(512, 3))
    model = SplitModel(parts.model.edge, cloud, (2, 16, 16), (1, 16, 16))
    seen = [
        torch.cat([each.z for _, each in observe(model, parts.channel, images, threat, torch.Generator().manual_seed(0))])
        for threat in (ThreatModel(), ThreatModel(cloud_weights=True))
    ]
    assert seen[0].min() < 0
    assert torch.equal(*seen)


@pytest.mark.parametrize("threat", [ThreatModel(), ThreatModel(observations=3, near_duplicates=True)])
def test_an_edge_that_begins_in_place_leaves_the_private_images(threat: ThreatModel) -> None:
    parts, images = setting()
    model = SplitModel(nn.Sequential(Shifts(), parts.model.edge), parts.model.cloud, (2, 16, 16), (1, 16, 16))
    batches = list(observe(model, parts.channel, images, threat, torch.Generator().manual_seed(0)))
    assert torch.equal(torch.cat([x for x, _ in batches]), images.take(slice(None)))


def test_an_answer_beyond_black_and_white_counts_as_black_or_white() -> None:
    """Whoever attacks knows that no image is brighter than white; without that its error, and so the model, looks better."""

    class Bright(Guess):
        def reconstruct(self, observation: Observation) -> Tensor:
            found = torch.full((len(observation.z), *self.shape), 3e18)
            found[:, :, 0], found[:, :, 1] = -torch.inf, torch.nan
            return found

    parts, images = setting()
    rows, rebuilt = score(Bright((1, 16, 16)), parts, images, 0)
    assert rebuilt[:, :, 0].eq(0).all() and rebuilt[:, :, 1].isnan().all() and rebuilt[:, :, 2:].eq(1).all()
    assert np.isnan(rows["mse"]).all()  # of a number that is none it is known that the attack has failed


def test_an_edge_that_begins_in_place_leaves_the_image_that_the_channel_looks_at() -> None:
    """Otherwise keyed noise is not that of the query, and not that of the device, which has the image as it was taken."""
    parts, images = setting()
    channel = Channel([build("keyed_noise", sigma=0.5)])
    channel.deploy()
    model = SplitModel(nn.Sequential(Shifts(), parts.model.edge), parts.model.cloud, (2, 16, 16), (1, 16, 16))
    access = grant(ThreatModel(), model, channel, images, CPU, 0)
    assert access.query is not None
    batches = list(observe(model, channel, images, ThreatModel(), torch.Generator()))
    for x, seen in batches:
        assert torch.equal(seen.z, access.query(x))
