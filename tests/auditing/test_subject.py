import pytest
import torch
from torch import nn

from splitveil.auditing.subject import answer, device_of, output_of
from splitveil.registry import UserError

X = torch.rand(4, 1, 8, 8)


def test_the_device_is_where_the_weights_are() -> None:
    assert device_of(nn.Flatten()) == torch.device("cpu")
    assert (
        device_of(nn.Linear(2, 2, device="meta"))
        == device_of(nn.BatchNorm1d(2, affine=False, device="meta"))
        == torch.device("meta")
    )


def test_an_answer_is_given_in_eval_mode_and_the_images_stay_as_they_are() -> None:
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5))
    x = X - 0.5
    before = x.clone()
    assert torch.equal(answer(net, x, "it"), before.relu())
    assert torch.equal(x, before) and net.training and net[1].training


def test_a_failure_is_one_line_with_the_shape_of_the_images() -> None:
    with pytest.raises(UserError, match=r"it fails on inputs of shape \[1, 8, 8\] \(.*\); are these its inputs\?") as raised:
        output_of(nn.Linear(3, 3), X, "it")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Flatten(0), r"it returns \[256\] for 4 images, must return one row for each"),
        (nn.LSTM(8, 2), "it"),
        (nn.Unflatten(0, (2, 2)), r"it returns \[2, 2, 1, 8, 8\] for 4 images"),
    ],
)
def test_what_is_no_row_of_floats_for_each_image_is_refused(net: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        answer(net, X, "it")
