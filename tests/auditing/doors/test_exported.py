from pathlib import Path

import pytest
import torch
from small_net import attacker, private
from torch import Tensor, nn

import splitveil
from splitveil.auditing.audit import open_door
from splitveil.auditing.doors.exported import in_batches, load_program
from splitveil.registry import UserError

X = torch.from_numpy(private()[0][:8]).float() / 255


def program(edge: nn.Module, any_batch: bool = True) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim("n")},) if any_batch else None
    return torch.export.export(edge.eval(), (X,), dynamic_shapes=shapes)


@pytest.mark.parametrize("any_batch", [True, False])
def test_a_program_has_the_figures_of_the_same_edge(any_batch: bool) -> None:
    edge = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU())
    attacks, images = ["nearest", "ridge"], {"private": private()[0], "attacker": attacker()[0]}
    report = splitveil.audit(program(edge, any_batch), **images, attacks=attacks)
    module = splitveil.audit((edge, None), **images, attacks=attacks)
    assert report.worst_case.mse == pytest.approx(module.worst_case.mse, rel=1e-4)
    assert "encoder_weights" not in report.attacks and report.accuracy is None


def test_a_file_is_not_opened_by_its_name_unless_it_is_trusted(tmp_path: Path) -> None:
    file = tmp_path / "edge.pt2"
    torch.export.save(program(nn.Sequential(nn.Conv2d(1, 2, 3))), file)
    with pytest.raises(UserError, match="loading one unpickles, which can run any code; if you trust it, load it yourself"):
        splitveil.audit(file, private=private())
    assert isinstance(load_program(file, trusted=True), torch.export.ExportedProgram)
    file.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"cannot be loaded by torch\.export"):
        load_program(file, trusted=True)


def test_a_program_of_other_inputs_is_refused() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    two = torch.export.export(Two(), (X, X))
    with pytest.raises(UserError, match=r"the program takes 2 inputs \(x, y\)"):
        open_door(two, None, X)
    with pytest.raises(UserError, match=r"the images are \[1, 4, 4\], the program takes \[1, 8, 8\]"):
        open_door(program(nn.Sequential(nn.Conv2d(1, 2, 3))), None, X[:, :, ::2, ::2])


@pytest.mark.parametrize("n", [1, 3, 7, 9])
def test_a_function_of_one_batch_size_answers_any_number_of_images(n: int) -> None:
    sizes = []

    def ask(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return x.flatten(1) + 1

    x = torch.rand(n, 1, 2, 3)
    assert torch.equal(in_batches(ask, 3)(x), x.flatten(1) + 1)
    assert set(sizes) == {3}
