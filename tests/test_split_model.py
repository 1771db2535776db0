import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.cut_by_fx import cuts, split
from splitveil.registry import UserError
from splitveil.split_model import SplitModel


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Written as torchvision writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 4, 1))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2), BasicBlock(8, 8, 1))
        self.layer3 = nn.Sequential(BasicBlock(8, 12, 2), BasicBlock(12, 12, 1))
        self.layer4 = nn.Sequential(BasicBlock(12, 16, 2), BasicBlock(16, 16, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 5)

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


LAYERS = ["layer1", "layer2", "layer3", "layer4"]
RESNET_CUTS = ["conv1", "bn1", "relu", *(f"{layer}{part}" for layer in LAYERS for part in (".0", ".1", "")), "avgpool"]


class Branchy(nn.Module):
    """Control flow on values, which cannot be traced."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum() > 0 else -self.inner(x)


class ViT(nn.Module):
    """Reads the batch size of its input after the cut, and keeps a table that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, 8))
        self.register_buffer("position", torch.randn(1, 20, 8), persistent=False)
        self.blocks = nn.ModuleList([Branchy(8), Branchy(8)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b = x.shape[0]
        tokens = self.patches(x)
        tokens = tokens.flatten(2).transpose(1, 2)
        if mask is not None:
            tokens = tokens * mask
        tokens = torch.cat([self.class_token.expand(b, -1, -1), tokens], 1)
        tokens = tokens + self.position[:, : tokens.shape[1]]
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens)[:, 0].reshape(x.size(0), -1))


def images(n: int = 3, size: int = 8) -> Tensor:
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(1))


def plain(forward: Callable[..., object], **parts: nn.Module | Tensor) -> nn.Module:
    """A module with these submodules, parameters and this forward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        forward: Callable[..., object]

    Net.forward = forward
    torch.manual_seed(0)
    return Net()


def refusal(module: nn.Module, at: str, x: Tensor) -> str:
    with pytest.raises(UserError) as refused:
        split(module, at=at, example=x)
    message = str(refused.value)
    assert "\n" not in message
    return message


def assert_same_training_step(module: nn.Module, at: str, x: Tensor) -> None:
    """Outputs, all gradients and BatchNorm statistics in float64; the halves are called by hand as in a user's loop."""
    whole = copy.deepcopy(module).double().train()
    parted = copy.deepcopy(whole)
    model = split(parted, at=at, example=x.double())
    x_whole, x_parted = x.double().requires_grad_(), x.double().requires_grad_()
    expected = whole(x_whole)
    z = model.edge(x_parted)
    z.retain_grad()
    before = z.detach().clone()
    logits = model.cloud(z)
    torch.testing.assert_close(z.detach(), before, rtol=0, atol=0)
    torch.testing.assert_close(logits, expected)
    expected.square().sum().backward()
    logits.square().sum().backward()
    torch.testing.assert_close(x_parted.grad, x_whole.grad)
    for (name, one), (_, other) in zip(whole.named_parameters(), parted.named_parameters()):
        torch.testing.assert_close(other.grad, one.grad, msg=lambda text, name=name: f"{name}: {text}")
    for one, other in zip(whole.buffers(), parted.buffers()):
        torch.testing.assert_close(other, one)


@pytest.fixture
def resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet()


@pytest.fixture
def vit() -> ViT:
    torch.manual_seed(0)
    return ViT()


def test_the_possible_cuts_of_a_resnet_are_listed_in_order(resnet: ResNet) -> None:
    assert cuts(resnet, images()) == RESNET_CUTS


@pytest.mark.parametrize("at", RESNET_CUTS)
def test_a_split_resnet_gives_what_the_whole_gives(resnet: ResNet, at: str) -> None:
    model = split(resnet, at=at, example=images())
    assert isinstance(model, SplitModel)
    x = images(5)
    for mode in (False, True):
        resnet.train(mode)
        model.train(mode)
        torch.testing.assert_close(model(x), resnet(x), rtol=0, atol=0)


@pytest.mark.parametrize("at", ["conv1", "bn1", "layer1", "layer2.0", "avgpool"])
def test_a_training_step_through_the_halves_equals_one_through_the_whole(resnet: ResNet, at: str) -> None:
    assert_same_training_step(resnet, at, images())


def test_the_shapes_come_from_the_example(resnet: ResNet) -> None:
    model = split(resnet, at="layer2", example=images(2, 16))
    assert model.z_shape == (8, 8, 8)
    assert model.x_shape == (3, 16, 16)


@pytest.mark.parametrize("at", ["conv1", "layer1", "layer2.0", "layer2"])
def test_the_state_dicts_of_the_halves_are_together_that_of_the_whole(resnet: ResNet, at: str) -> None:
    model = split(resnet, at=at, example=images())
    edge, cloud, whole = model.edge.state_dict(), model.cloud.state_dict(), resnet.state_dict()
    assert not edge.keys() & cloud.keys()
    assert edge.keys() | cloud.keys() == whole.keys()
    assert all(whole[name].data_ptr() == value.data_ptr() for name, value in (edge | cloud).items())
    assert set(model.parameters()) == set(resnet.parameters())


def test_splitting_leaves_the_module_as_it_was(resnet: ResNet) -> None:
    resnet.train()
    resnet.layer1.eval()
    before = copy.deepcopy(resnet.state_dict())
    flags = [part.training for part in resnet.modules()]
    attributes = set(vars(resnet))
    random = torch.get_rng_state()
    model = split(resnet, at="layer2.0", example=images())
    assert [part.training for part in resnet.modules()] == flags
    assert model.training
    assert not model.edge.get_submodule("layer1").training
    assert set(vars(resnet)) == attributes
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in resnet.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(part._forward_hooks for part in resnet.modules())


def test_a_module_in_eval_mode_gives_a_split_in_eval_mode(resnet: ResNet) -> None:
    model = split(resnet.eval(), at="layer2.0", example=images())
    assert not any(part.training for part in model.modules())


def test_a_cut_inside_a_block_is_refused_with_the_possible_ones(resnet: ResNet) -> None:
    message = refusal(resnet, "layer1.0.conv1", images())
    assert message.startswith("cannot cut after 'layer1.0.conv1': 'relu' is also used after it")
    assert message.endswith("possible cuts: " + ", ".join(RESNET_CUTS))


def test_a_layer_that_is_called_twice_is_refused(resnet: ResNet) -> None:
    assert "it is called 2 times in one forward pass" in refusal(resnet, "layer1.0.relu", images())


def test_the_last_layer_is_refused(resnet: ResNet) -> None:
    assert "nothing is left for the cloud" in refusal(resnet, "fc", images())


def test_an_unknown_name_gets_a_suggestion_among_the_possible_cuts(resnet: ResNet) -> None:
    assert refusal(resnet, "layr2", images()) == "unknown cut 'layr2'; did you mean 'layer2'?"
    assert "unknown cut ''" in refusal(resnet, "", images())


@pytest.mark.parametrize("at", ["patches", "blocks.0", "blocks.1", "norm"])
def test_a_batch_size_that_crosses_the_cut_is_read_from_z(vit: ViT, at: str) -> None:
    model = split(vit, at=at, example=images(2, 16))
    for n in (1, 2, 5):
        x = images(n, 16)
        torch.testing.assert_close(model(x), vit(x), rtol=0, atol=0)
    assert_same_training_step(vit, at, images(2, 16))


def test_modules_off_the_path_to_the_cut_are_never_traced(vit: ViT) -> None:
    assert cuts(vit, images(2, 16)) == ["patches", "blocks.0", "blocks.1", "norm"]
    assert "`return self.inner(x) if x.sum() > 0" in refusal(vit, "blocks.0.inner", images(2, 16))


def test_a_class_token_and_a_table_lie_on_the_side_that_uses_them(vit: ViT) -> None:
    early, late = (split(vit, at=at, example=images(2, 16)) for at in ("patches", "blocks.0"))
    assert "class_token" in early.cloud.state_dict()
    assert "class_token" in late.edge.state_dict()
    assert "position" in dict(early.cloud.named_buffers())
    for model in (early, late, copy.deepcopy(late)):
        assert model.edge.state_dict().keys() | model.cloud.state_dict().keys() == vit.state_dict().keys()


def test_a_copy_of_a_split_is_independent_and_gives_the_same(vit: ViT) -> None:
    model = split(vit, at="blocks.0", example=images(2, 16))
    twin = copy.deepcopy(model)
    x = images(3, 16)
    torch.testing.assert_close(twin(x), model(x), rtol=0, atol=0)
    assert not set(twin.parameters()) & set(model.parameters())


@pytest.mark.parametrize("size", [lambda x: x.shape[0], lambda x: x.size(0), lambda x: x.size(dim=0), lambda x: x.size()[0]])
@pytest.mark.parametrize("early", [True, False])
def test_every_way_to_ask_for_the_batch_size_may_cross(size: Callable[[Tensor], int], early: bool) -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        b = size(x) if early else None
        y = self.conv(x)
        b = b if early else size(x)
        return self.fc(y.reshape(b * 2, -1).reshape(b, -1))

    module = plain(forward, conv=nn.Conv2d(3, 2, 1), fc=nn.Linear(128, 5))
    model = split(module, at="conv", example=images())
    torch.testing.assert_close(model(images(7)), module(images(7)))
    assert "size" not in str(model.edge.graph)  # type: ignore[union-attr]


def test_unpacking_the_shape_may_cross_if_only_the_batch_is_used() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        b, _c, _h, _w = x.shape
        y = self.conv(x)
        return self.fc(y.reshape(b, -1).to(x.device))

    module = plain(forward, conv=nn.Conv2d(3, 2, 1), fc=nn.Linear(128, 5))
    torch.testing.assert_close(split(module, at="conv", example=images())(images(7)), module(images(7)))


def test_the_length_of_a_parameter_is_not_taken_for_the_batch_size() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        rows = self.rows.shape[0]
        return self.fc(self.conv(x).flatten(1) * rows) + self.rows.sum(0)

    rows = nn.Parameter(torch.rand(7, 5))
    module = plain(forward, conv=nn.Conv2d(3, 4, 3), fc=nn.Linear(144, 5), rows=rows)
    assert_same_state_and_output(module, "conv")


def test_another_part_of_the_shape_does_not_cross() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return self.up(self.conv(x)).reshape(x.shape[0], x.shape[2] * 128)

    module = plain(forward, conv=nn.Conv2d(3, 4, 2, 2), up=nn.Upsample(scale_factor=4))
    assert "the input is also used after it" in refusal(module, "conv", images())


def test_a_shape_that_is_not_batch_first_is_refused() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return self.norm(self.fc(x.flatten(2).transpose(0, 1))).transpose(0, 1).flatten(1)

    module = plain(forward, fc=nn.Linear(64, 2), norm=nn.LayerNorm(2))
    for n in (2, 3, 6):  # with 3 images of 3 channels one batch alone could not tell
        assert "the batch must come first" in refusal(module, "fc", images(n))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("depth", ["first", "in a leaf", "behind a view"])
def test_an_in_place_layer_after_the_cut_changes_neither_z_nor_the_gradients(inplace: bool, depth: str) -> None:
    relu = nn.ReLU(inplace=inplace)
    after: dict[str, nn.Module] = {
        "first": nn.Sequential(relu, nn.Flatten()),
        "in a leaf": nn.Sequential(nn.Sequential(nn.Identity(), nn.Sequential(relu)), nn.Flatten()),
        "behind a view": nn.Sequential(nn.Flatten(), relu),
    }
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), after[depth], nn.Linear(144, 5))
    assert_same_training_step(module, "1", images())


def test_an_in_place_step_whose_result_is_not_used_is_kept() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        x = self.conv(x)
        x.mul_(2)
        self.relu(x)
        x = self.second(x)
        self.relu(x)
        return self.fc(x.flatten(1))

    relu = nn.ReLU(inplace=True)
    module = plain(forward, conv=nn.Conv2d(3, 4, 3), relu=relu, second=nn.Conv2d(4, 4, 3), fc=nn.Linear(64, 5))
    assert cuts(module, images()) == ["conv", "second"]
    for at in ("conv", "second"):
        assert_same_training_step(module, at, images())


def test_a_sequential_is_cut_by_number_and_through_its_containers() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(0.5))
    module = nn.Sequential(body, nn.Flatten(), nn.Linear(144, 5))
    assert cuts(module, images()) == ["0.0", "0.1", "0.2", "0", "1"]
    for at in cuts(module, images()):
        assert_same_state_and_output(module, at)


def assert_same_state_and_output(module: nn.Module, at: str) -> None:
    model = split(module, at=at, example=images())
    assert model.edge.state_dict().keys() | model.cloud.state_dict().keys() == module.state_dict().keys()
    for mode in (False, True):
        module.train(mode)
        model.train(mode)
        torch.manual_seed(3)
        expected = module(images())
        torch.manual_seed(3)
        torch.testing.assert_close(model(images()), expected, rtol=0, atol=0)


def test_a_frozen_training_flag_is_refused_by_name_with_the_remedy() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        x = self.conv(x).flatten(1)
        return self.fc(F.dropout(x, 0.5, training=self.training))

    module = plain(forward, conv=nn.Conv2d(3, 4, 3), fc=nn.Linear(144, 5))
    message = refusal(module, "conv", images())
    assert "dropout() in Net.forward depends on self.training" in message
    assert "use a layer that follows train() and eval() (nn.Dropout" in message


def test_a_branch_on_the_training_flag_is_refused_by_name() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        x = self.conv(x).flatten(1)
        if self.training:
            x = self.noise(x)
        return self.fc(x)

    module = plain(forward, conv=nn.Conv2d(3, 4, 3), noise=nn.Dropout(), fc=nn.Linear(144, 5))
    assert "'noise' in Net.forward depends on self.training" in refusal(module, "conv", images())


def test_the_training_flag_may_be_read_inside_a_submodule() -> None:
    def drop(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return F.dropout(x, 0.5, training=self.training)

    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), plain(drop), nn.Linear(144, 5))
    for at in ("0", "1", "2"):
        assert_same_state_and_output(module, at)


def test_a_step_that_cannot_be_traced_is_named_with_its_line_and_the_remedy() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        x = self.conv(x).flatten(1)
        if x.mean() > 0:
            x = -x
        return self.fc(x)

    message = refusal(plain(forward, conv=nn.Conv2d(3, 4, 3), fc=nn.Linear(144, 5)), "conv", images())
    assert "`if x.mean() > 0:` (test_split_model.py:" in message
    assert "Net.forward" in message
    assert "move that step into a submodule" in message
    assert message.endswith("possible cuts: none")


def test_a_constant_that_the_forward_makes_anew_each_time_is_refused() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return self.fc(self.conv(x).flatten(1) + torch.randn(144))

    module = plain(forward, conv=nn.Conv2d(3, 4, 3), fc=nn.Linear(144, 5))
    assert "a tensor made in Net.forward depends on self.training (or on chance)" in refusal(module, "conv", images())


def test_what_tracing_froze_unseen_is_found_by_comparing_with_the_whole() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        y = self.conv(x).flatten(1)
        return self.fc(2 * y if type(x) is Tensor else y)

    module = plain(forward, conv=nn.Conv2d(3, 4, 3), fc=nn.Linear(144, 5))
    assert "the halves give another result than the whole on a batch of 3" in refusal(module, "conv", images())


def test_a_first_dimension_that_is_not_the_batch_does_not_pass_for_it() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        channels = x.transpose(0, 1).shape[0]
        return self.fc(self.conv(x).flatten(1) * channels)

    module = plain(forward, conv=nn.Conv2d(3, 4, 3), fc=nn.Linear(144, 5))
    assert "another result than the whole on a batch of 6" in refusal(module, "conv", images(3))


def test_a_fixed_constant_is_kept_and_not_saved_with_the_weights() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return self.fc((self.conv(x) * self.scale).flatten(1) + torch.ones(144))

    module = plain(forward, conv=nn.Conv2d(3, 4, 3), scale=torch.tensor(2.0), fc=nn.Linear(144, 5))
    assert_same_state_and_output(module, "conv")
    assert not any(name.startswith("_tensor") for name in vars(module))


def test_a_parameter_on_both_sides_is_refused_by_name() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return self.head(self.mid(x.flatten(1) * self.gain)) * self.gain

    module = plain(forward, mid=nn.Linear(192, 8), head=nn.Linear(8, 5), gain=nn.Parameter(torch.ones(1)))
    assert "parameter 'gain' is used on both sides" in refusal(module, "mid", images())


def test_tied_weights_on_both_sides_are_refused() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 192), nn.Tanh(), nn.Linear(192, 192))
    module[3].weight = module[1].weight
    assert "is used on both sides" in refusal(module, "2", images())
    assert cuts(module, images()) == ["0"]


def test_a_buffer_may_be_used_on_both_sides() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return self.head(self.mid(x.flatten(1)[:, :8] * self.table) * self.table)

    module = plain(forward, mid=nn.Linear(8, 8), head=nn.Linear(8, 5))
    module.register_buffer("table", torch.rand(8))
    assert_same_state_and_output(module, "mid")


@pytest.mark.parametrize(
    ("output", "kind"), [(lambda y: (y, y), "tuple"), (lambda y: {"out": y}, "dict"), (lambda y: [y], "list")]
)
def test_a_module_with_extra_outputs_is_refused(output: Callable[[Tensor], object], kind: str) -> None:
    def forward(self, x: Tensor) -> object:  # type: ignore[no-untyped-def]
        return output(self.fc(self.conv(x).flatten(1)))

    module = plain(forward, conv=nn.Conv2d(3, 4, 3), fc=nn.Linear(144, 5))
    message = refusal(module, "conv", images())
    assert f"Net returns a {kind}" in message
    assert "wrap the module" in message


def test_a_cut_after_a_layer_with_several_outputs_is_refused() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        y, _ = self.gru(x.flatten(2))
        return self.fc(y[:, -1])

    module = plain(forward, gru=nn.GRU(64, 4, batch_first=True), fc=nn.Linear(4, 5))
    assert "its output is a tuple, not one tensor" in refusal(module, "gru", images())


def test_a_module_that_forward_never_calls_is_refused() -> None:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return self.fc(x.flatten(1))

    module = plain(forward, spare=nn.Linear(2, 2), fc=nn.Linear(192, 5))
    assert "forward never calls it" in refusal(module, "spare", images())
