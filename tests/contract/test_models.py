"""What every registered model must do. A new one is tested here without a line added."""

from dataclasses import fields

import pytest
import safetensors.torch
import torch
from torch import nn

from splitveil.models import build_model
from splitveil.registry import MODELS, UserError
from splitveil.split_model import SplitModel, cut_stages

every_model = pytest.mark.parametrize("name", MODELS.names())
FRUGAL = "stem block1 down1 block2 down2 block3 down3 last tail*2"
ATTENTIVE = "stem block1 down1 block2 down2 {} tail*2"
STAGES = {
    "attentive": ATTENTIVE.format("attend*2 last"), "slot_bottleneck": ATTENTIVE.format("slots"),
    "mobilenetv2": "stem block*17 last", "resnet18": "stem block*8", "resnet20": "stem block*9", "resnet32": "stem block*15",
    "separable": FRUGAL, "small": "conv*4", "thin": FRUGAL, "vgg11": "conv*8", "vgg13": "conv*10", "vgg16": "conv*13",
    "vit": "patches block*6",
}  # fmt: skip
"""The names that recipes cut at; conv*4 stands for conv1 to conv4."""


def make(name: str, channels: int = 1, **options: object) -> SplitModel:
    torch.manual_seed(0)
    return build_model(MODELS[name].configure(options), (channels, 32, 32), 7)


@every_model
@pytest.mark.parametrize("channels", [1, 3])
def test_it_takes_any_number_of_channels_and_its_z_has_the_shape_it_says(name: str, channels: int) -> None:
    model, x = make(name, channels).eval(), torch.rand(2, channels, 32, 32)
    with torch.no_grad():
        z = model.edge(x)
        assert z.shape == (2, *model.z_shape)
        assert model.cloud(z).shape == (2, 7)
        torch.testing.assert_close(model(x), model.cloud(z))


@every_model
@pytest.mark.parametrize(("channels", "size"), [(1, 32), (3, 64)])
def test_behind_every_stage_it_can_be_cut_and_the_cloud_gives_logits(name: str, channels: int, size: int) -> None:
    stages = MODELS[name].make({"channels": channels, "size": size, "classes": 7})
    *cuts, head = (stage for stage, _ in stages.named_children())
    words = [word.partition("*") for word in STAGES.get(name, " ".join(cuts)).split()]
    known = [f"{kind}{i + 1}" if n else kind for kind, _, n in words for i in range(int(n or 1))]
    assert (cuts, head) == (known, "head")
    x = torch.rand(2, channels, size, size)
    with torch.no_grad():
        for cut in cuts:
            model = cut_stages(stages, cut, x.shape[1:])
            z = model.edge(x)
            assert z.shape == (2, *model.z_shape)
            assert model.cloud(z).shape == (2, 7)


@every_model
def test_every_parameter_of_both_halves_receives_a_gradient(name: str) -> None:
    model = make(name)
    nn.functional.cross_entropy(model(torch.rand(4, 1, 32, 32)), torch.arange(4)).backward()
    assert [path for path, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    assert any(bool(p.grad.ne(0).any()) for p in model.edge.parameters() if p.grad is not None)


@every_model
def test_one_image_is_answered_whatever_else_is_in_the_batch(name: str) -> None:
    model, x = make(name).eval(), torch.rand(3, 1, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(x)[1:2], model(x[1:2]), atol=1e-5, rtol=1e-4)


@every_model
def test_a_seed_gives_the_same_weights_and_they_travel_without_pickle(name: str) -> None:
    model, twin = make(name), make(name)
    bytes_ = safetensors.torch.save({k: v.contiguous() for k, v in model.state_dict().items()})
    loaded = safetensors.torch.load(bytes_)
    assert loaded.keys() == twin.state_dict().keys()
    assert all(torch.equal(tensor, loaded[path]) for path, tensor in twin.state_dict().items())


@every_model
def test_a_cut_that_does_not_exist_is_answered_with_those_that_do(name: str) -> None:
    with pytest.raises(UserError, match="unknown cut '!'; known: "):
        make(name, cut="!")


@pytest.mark.filterwarnings("ignore")  # torch's exporter warns of itself
@pytest.mark.parametrize("name", [name for name in MODELS.names() if "budget" in {f.name for f in fields(MODELS[name].config)}])
def test_a_frugal_edge_can_be_exported_for_batches_of_any_size(name: str) -> None:
    edge, x = make(name, budget=2.0).edge.eval(), torch.rand(3, 1, 32, 32)
    program = torch.export.export(edge, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    for images in (x, torch.rand(1, 1, 32, 32), torch.rand(7, 1, 32, 32)):
        with torch.no_grad():
            torch.testing.assert_close(program.module()(images), edge(images), atol=1e-5, rtol=1e-4)
