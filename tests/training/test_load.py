"""A trained run is loaded as a model to use: as attacks meet it, without its data set, and with no effect on the caller."""

import json
from pathlib import Path

import pytest
import torch

import splitveil
from splitveil.cli.arguments import parse
from splitveil.evaluation.run_attacks import load_parts
from splitveil.files.folder import read_tensors, write_tensors
from splitveil.registry import UserError
from splitveil.runs import Run
from splitveil.training.train_runs import train_run

CPU = torch.device("cpu")


@pytest.fixture
def run(small: list[str], tmp_path: Path) -> Run:
    return train_run(tmp_path / "run", parse([*small, "--cem.surrogate", "slots", "--name", "run"]))[0]


def x(n: int = 5) -> torch.Tensor:
    return torch.rand(n, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def test_it_answers_as_the_model_that_attacks_meet(run: Run, small: list[str]) -> None:
    run, splits, _ = train_run(run.folder, run.config)
    ours, theirs = splitveil.load(run.folder, "cpu"), load_parts(run, splits, CPU)
    assert ours.classes == splits.task.classes
    assert not ours.model.training
    z = [part.channel.send(part.model.edge(x()), x(), torch.Generator().manual_seed(1)) for part in (ours, theirs)]
    assert torch.equal(*z)
    assert torch.equal(ours.model.cloud(z[0]), theirs.model.cloud(z[1]))
    assert torch.isfinite(ours.channel.serve().send(ours.model.edge(x()), x())).all()


def test_the_data_set_is_not_needed(run: Run, pictures: Path) -> None:
    away = pictures.rename(pictures.with_suffix(".away"))
    try:
        model, _, classes = splitveil.load(str(run.folder))
        assert model.cloud(model.edge(x())).shape == (5, len(classes))
    finally:
        away.rename(pictures)


def test_the_callers_random_numbers_stay_as_they_were(run: Run) -> None:
    before = torch.get_rng_state()
    splitveil.load(run.folder)
    assert torch.equal(torch.get_rng_state(), before)


def header_with(run: Run, images: object) -> None:
    """Write the weights as a version would that says this of the images; without a manifest, which such runs do not have."""
    path = run.folder / "weights" / "last.safetensors"
    tensors, metadata = read_tensors(path)
    said = {key: value for key, value in json.loads(metadata["weights"]).items() if key != "images"}
    write_tensors(path, tensors, {"weights": json.dumps(said | ({} if images is None else {"images": images}))})
    for file in run.folder.glob("manifest*"):
        file.unlink()


def test_of_older_weights_the_data_set_says_for_which_images_they_are(run: Run, small: list[str]) -> None:
    before = splitveil.load(run.folder)
    header_with(run, None)
    after = splitveil.load(run.folder)
    assert after.classes == before.classes
    assert torch.equal(after.model.edge(x()), before.model.edge(x()))


@pytest.mark.parametrize(
    "images", [[], {"shape": [1, 16]}, {"shape": [1, 16, 0], "classes": ["a", "b"]}, {"shape": [1, 16, 16], "classes": [1, 2]}]
)
def test_a_header_that_says_nonsense_is_refused_in_one_line(run: Run, images: object) -> None:
    header_with(run, images)
    with pytest.raises(UserError, match="does not say for which images it is"):
        splitveil.load(run.folder)


def test_what_is_no_trained_run_is_refused(small: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing"):
        splitveil.load(tmp_path / "nothing")
    begun = Run.create(tmp_path / "begun", parse([*small, "--name", "begun"]))
    with pytest.raises(UserError, match="is not trained to its end; `splitveil train` it first"):
        splitveil.load(begun.folder)
