"""`splitveil audit` from the command line, in this process and with the user's own file beside it."""

import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from in_process import exit_code
from PIL import Image
from small_net import Normalised, attacker, private, trained_net

import splitveil
from splitveil.__main__ import main
from splitveil.evaluation.summary import read_summary

NETS = """
from small_net import Normalised, trained_net

def fresh():
    return Normalised()

trained = trained_net

def edge(x):
    return x[:, :, ::2, ::2]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's own nets.py, images, weights and pairs, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    (tmp_path / "nets.py").write_text(NETS)
    (test, test_labels), (images, labels) = private(), attacker()
    np.savez("images.npz", images=images, labels=labels, test_images=test, test_labels=test_labels)
    np.savez("sent.npz", sent=test[:, :, ::2, ::2], images=test, labels=test_labels)
    safetensors.torch.save_file(trained_net().state_dict(), "net.safetensors")
    torch.save(trained_net().state_dict(), "net.pt")
    return tmp_path


DATA = ["--data", "npz", "--data.path", "images.npz", "--attacks", "mean_image,ridge"]


def audit(*words: str) -> object:
    return exit_code("audit", *words)


@pytest.mark.parametrize("weights", ["net.safetensors", "net.pt"])
def test_a_model_with_its_weights_is_audited_and_a_condition_decides_the_exit_code(here: Path, weights: str) -> None:
    words = [
        "--model",
        "nets:fresh",
        "--weights",
        weights,
        "--at",
        "stem",
        *DATA,
        "--defences",
        "gaussian",
        "--defences.0.sigma=0.1",
    ]
    assert audit(*words, "--fail-if", "mse<0.0", "--fail-if", "accuracy<0.5") == 0
    summary = read_summary(here / "audit")
    assert set(summary.attacks) == {"mean_image", "ridge"} and summary.defences == ("gaussian",) and summary.sigma == 0.1
    assert (here / "audit" / "report.html").exists()
    assert audit(*words, "--fail-if", "mse>0") == 3


def test_it_is_the_call_from_python(here: Path) -> None:
    assert audit("--model", "nets:trained", "--at", "stem", *DATA, "--out", "mine", "--splits.task", "0.2") == 0
    own, summary = attacker(), read_summary(here / "mine")
    assert summary.splits["test"].images == 120 and summary.splits["auxiliary"].images == 0.45 * len(own[0])
    called = splitveil.audit(trained_net(), "stem", private=private(), attacker=own, attacks=["mean_image"])
    assert summary.accuracy == called.accuracy


def test_an_edge_and_pairs_are_audited(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("--edge", "nets:edge", *DATA, "--out", "a") == 0
    assert audit("--pairs", "sent.npz", "--attacks", "ridge", "--out", "b") == 0
    assert read_summary(here / "b").z_shape == (1, 4, 4)
    told = capsys.readouterr()
    assert "not checked: whitebox-weaker, only pairs are known, not the edge's weights" in " ".join(told.err.split())
    main(["report", "a", "b", "--out", "both.html", "--anyway"])
    assert (here / "both.html").exists()


WRONG = {
    "": "audit needs one of --model, --edge, --onnx, --exported, --pairs",
    "--onnx a --pairs b": "not 2 of them",
    "--model nets": "'nets' is not of the form pkg.module:function",
    "--model nets:fersh --data npz": "unknown name in nets 'fersh'; did you mean 'fresh'?",
    "--model stone:fresh --data npz": "there is no module 'stone'",
    "--model nets:fresh": "audit needs images: --data NAME",
    "--model nets:fresh --data npz --train.lr 1": "audit has no flag --train.lr: it trains no model",
    "--model nets:fresh --data npz --suite quick --attacks ridge": "--suite quick is a fixed list",
    "--model nets:fresh --data npz --fail-if sim>1": "--fail-if is 'sim>1'",
    "--model nets:fresh --data npz --targets few": "--targets is 'few', must be a whole number",
    "--model nets:fresh --weights no.pt --data npz": "no.pt cannot be read",
    "--model nets:fresh --weights images.npz --data npz": "--weights: images.npz is no state dict of tensors alone",
    "--exported edge.pt2 --data npz": "loading one unpickles, which can run any code",
    "--pairs sent.npz --data npz": "--pairs holds the images too; leave --data out",
    "nets.py": "audit needs one of",
}


@pytest.mark.parametrize(("words", "message"), WRONG.items(), ids=range(len(WRONG)))
def test_a_mistake_is_one_line_and_exit_code_2(here: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(*words.split()) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def test_weights_that_are_a_pickle_of_objects_are_not_loaded(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(Normalised(), "whole.pt")
    assert audit("--model", "nets:fresh", "--weights", "whole.pt", *DATA) == 2
    assert "whole.pt is no state dict of tensors alone" in capsys.readouterr().err


def test_help_shows_the_flags_of_an_audit_and_none_of_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("--data", "folder", "--help") == 0
    told = capsys.readouterr().out
    assert "--onnx" in told and "--data.size" in told and "--seed" in told and "--fail-if" in told
    assert "--train.lr" not in told and "--cem" not in told


def test_a_weaker_list_in_the_same_folder_does_not_make_a_condition_pass(here: Path) -> None:
    weaker = ["--data", "npz", "--data.path", "images.npz", "--attacks", "nearest", "--out"]
    assert audit("--edge", "nets:edge", *DATA, "--out", "a") == audit("--edge", "nets:edge", *weaker, "b") == 0
    strong, weak = (summary.worst_case for summary in map(read_summary, (here / "a", here / "b")))
    assert strong is not None and weak is not None and strong.mse < weak.mse
    condition = f"mse<{(strong.mse + weak.mse) / 2}"
    assert audit("--edge", "nets:edge", *weaker, "b", "--fail-if", condition) == 0
    assert audit("--edge", "nets:edge", *weaker, "a", "--fail-if", condition) == 3
    assert read_summary(here / "a").attacks.keys() == {"mean_image", "nearest", "ridge"}


def test_weights_may_be_a_link_and_a_model_that_cannot_be_made_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("link.safetensors").symlink_to("net.safetensors")
    assert audit("--model", "nets:fresh", "--weights", "link.safetensors", "--at", "stem", *DATA) == 0
    capsys.readouterr()
    assert audit("--model", "nets:edge", *DATA) == 2
    assert "nets:edge() fails" in capsys.readouterr().err


@pytest.fixture
def folders(here: Path) -> Path:
    """mine/ and theirs/, each with one folder a class."""
    for name, (images, labels) in (("mine", private()), ("theirs", attacker())):
        for i, (image, label) in enumerate(zip(images, labels)):
            (here / name / str(label)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0]).save(here / name / str(label) / f"{i:04d}.png")
    return here


@pytest.mark.usefixtures("folders")
def test_two_folders_of_images_are_the_private_and_the_attacker_s() -> None:
    sizes = ["--data.size", str(private()[0].shape[2]), "--data.grey", "--attacks", "mean_image,ridge"]
    assert audit("--model", "nets:trained", "--at", "stem", "--private", "mine", "--attacker", "theirs", *sizes) == 0
    by_class = [np.argsort(labels, kind="stable") for _, labels in (private(), attacker())]
    sorted_sets = [(images[order], labels[order]) for (images, labels), order in zip((private(), attacker()), by_class)]
    expected = splitveil.audit(
        trained_net(), "stem", private=sorted_sets[0], attacker=sorted_sets[1], attacks=["mean_image", "ridge"]
    )
    found = read_summary(Path("audit"))
    assert (found.accuracy, found.worst_case) == (expected.accuracy, expected.worst_case)


@pytest.mark.usefixtures("folders")
def test_a_folder_without_classes_has_no_labels_and_is_halved_without_an_attacker_s() -> None:
    words = ["--data.size", str(private()[0].shape[2]), "--data.grey", "--attacks", "mean_image,nearest"]
    assert audit("--edge", "nets:edge", "--private", "mine/0", *words) == 0
    assert np.isnan(read_summary(Path("audit")).accuracy)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--attacker", "theirs"], "name that of the private ones by --private"),
        (["--private", "nowhere"], "nowhere is not a folder"),
        (["--private", "mine", "--data", "fashion"], "leave --data out"),
        (["--private", "mine", "--data.path", "mine"], "leave --data.path out"),
        (["--private", "mine/0/0000.png"], "is not a folder"),
    ],
)
@pytest.mark.usefixtures("folders")
def test_mistakes_with_folders_are_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("--edge", "nets:edge", *words) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
