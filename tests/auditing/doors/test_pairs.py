"""Audits of pairs: what a linear edge sent of bundled images, written as other frameworks would write it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from reachable import reachable, share_memory
from small_net import arrays, attacker, private

import splitveil
from splitveil.attacks import build
from splitveil.attacks.threat import grant
from splitveil.auditing.doors.pairs import LACKS, Recorded, key_of, open_pairs
from splitveil.auditing.images import as_sets
from splitveil.channel import Channel
from splitveil.data.loader import DeviceImages
from splitveil.registry import UserError

CPU = torch.device("cpu")


def edge(images: np.ndarray) -> np.ndarray:
    """[n, 1, 8, 8] uint8 -> [n, 16] float32."""
    mixing = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    return (images.reshape(len(images), 64).astype(np.float32) / 255) @ mixing


def table() -> dict[str, np.ndarray]:
    (mine, labels), (theirs, their_labels) = private(), attacker()
    own = {"attacker_sent": edge(theirs), "attacker_images": theirs, "attacker_labels": their_labels}
    return {"sent": edge(mine), "images": mine, "labels": labels, **own}


def npz(folder: Path, tables: dict[str, np.ndarray]) -> Path:
    np.savez(folder / "sent.npz", **tables)  # type: ignore[arg-type]
    return folder / "sent.npz"


def tensor_file(folder: Path, tables: dict[str, np.ndarray]) -> Path:
    safetensors.numpy.save_file(tables, folder / "sent.safetensors")
    return folder / "sent.safetensors"


def npy_folder(folder: Path, tables: dict[str, np.ndarray]) -> Path:
    (folder / "sent").mkdir()
    for name, array in tables.items():
        np.save(folder / "sent" / f"{name}.npy", array)
    return folder / "sent"


@pytest.mark.parametrize("write", [tensor_file, npy_folder, lambda folder, tables: tables])
def test_every_format_holds_the_same_pairs(write: Any, tmp_path: Path) -> None:
    first, other = (open_pairs(form(tmp_path, table()), None, 0, tmp_path) for form in (npz, write))
    assert first[0].digest == other[0].digest
    for one, two in zip(first[1:3], other[1:3]):
        assert np.array_equal(one.images, two.images) and np.array_equal(one.labels, two.labels)


def test_pairs_give_the_figures_of_the_edge_that_made_them(tmp_path: Path) -> None:
    attacks = ["mean_image", "nearest", "ridge"]
    found = splitveil.audit(pairs=npz(tmp_path, table()), attacks=attacks)
    mixing = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32))
    asked = splitveil.audit(lambda x: x.flatten(1) @ mixing, private=private(), attacker=attacker(), attacks=attacks)
    for name in attacks:  # products of batches of another size differ in the last bits
        assert found.attacks[name].mse == pytest.approx(asked.attacks[name].mse, rel=1e-4)
    assert found.summary.z_shape == (16,)


def test_what_pairs_cannot_show_is_skipped_or_not_checked_by_name() -> None:
    tables = {name: values[:60] for name, values in table().items()}
    report = splitveil.audit(pairs=tables, suite="quick")
    assert set(report.attacks) == {"mean_image", "class_mean", "nearest", "ridge", "decoder-small"}
    assert report.skipped == {
        "code_mean": "the channel sends no finite code: there are no codes to count out",
        "decoder-repeats16": "only pairs are known: each image was recorded once",
    }
    assert set(report.not_checked) == {
        "defence-inactive", "attention-collapsed", "whitebox-weaker", "averaging-hole", "gradient-masked", "bound-violated",
        "channel-off-at-inference", "noise-predictable",
    }  # fmt: skip
    assert report.accuracy is None
    assert not report.attacks["decoder-small"].threat.channel  # nobody was told what stood between
    with pytest.raises(UserError, match="rmle: only pairs are known, not the edge's weights"):
        splitveil.audit(pairs=tables, attacks=["rmle"])


def test_of_pairs_no_changed_image_is_asked_about_and_the_summary_says_so() -> None:
    tables = {name: values[:60] for name, values in table().items()}
    strong = {"name": "decoder", "net": "unet", "augment": True, "width": 4, "epochs": 1}
    report = splitveil.audit(pairs=tables, attacks=[strong])
    assert report.attacks["decoder"].facts["augmented"] is False
    assert report.attacks["decoder"].threat.describe()["queries"] == "own images through edge and channel, as recorded"


def test_zeros_of_what_was_sent_may_be_a_mask() -> None:
    dropped = np.random.default_rng(1).random((420, 16)) < 0.5
    tables = table()
    tables |= {
        "sent": np.where(dropped[:120], 0, tables["sent"]),
        "attacker_sent": np.where(dropped[120:], 0, tables["attacker_sent"]),
    }
    small: dict[str, Any] = {"blocks": 0, "width": 4, "epochs": 1}
    report = splitveil.audit(pairs=tables, attacks=[{"name": "decoder", "mask": True, **small}])
    assert report.attacks["decoder"].finite and "mask-aware-gap" not in report.not_checked


def test_an_attack_that_asks_about_other_images_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ridge = splitveil.registry.ATTACKS["ridge"].build
    monkeypatch.setattr(ridge, "fit", lambda self, access: access.query(torch.rand(2, 1, 8, 8)))
    tables = {name: values[:40] for name, values in table().items()}
    assert "it asks about images that were not recorded" in splitveil.audit(pairs=tables, suite="quick").skipped["ridge"]


def test_one_set_of_pairs_is_halved_by_the_seed(tmp_path: Path) -> None:
    tables = {name: table()[name] for name in ("sent", "images", "labels")}
    halves = [open_pairs(tables, None, seed, tmp_path)[1:3] for seed in (0, 0, 1)]
    for mine, theirs in halves:
        assert len(mine) == len(theirs) == 60
        assert not {x.tobytes() for x in mine.images} & {x.tobytes() for x in theirs.images}
    first, same, other = (mine.images.tobytes() for mine, _ in halves)
    assert first == same != other


def test_the_attacker_s_pairs_may_come_from_another_file(tmp_path: Path) -> None:
    tables, scratch = table(), tmp_path / "scratch"
    scratch.mkdir()
    mine = npz(tmp_path, {name: tables[name] for name in ("sent", "images")})
    theirs = npy_folder(tmp_path, {name: tables[f"attacker_{name}"] for name in ("sent", "images")})
    _, private_side, attacker_side, _ = open_pairs(mine, theirs, 0, scratch)
    assert np.array_equal(private_side.images, tables["images"]) and np.array_equal(
        attacker_side.images, tables["attacker_images"]
    )


def test_an_image_counts_once_and_a_private_one_is_not_the_attacker_s(tmp_path: Path) -> None:
    tables = table()
    twice = {name: np.concatenate([values[:1], values]) for name, values in tables.items() if "attacker" not in name}
    names = "sent", "images", "labels"
    stolen = {f"attacker_{name}": np.concatenate([tables[name][:5], tables[f"attacker_{name}"]]) for name in names}
    _, mine, theirs, notes = open_pairs(twice | stolen, None, 0, tmp_path)
    assert (len(mine), len(theirs)) == (120, 300)
    assert notes == ("6 pairs of images that were there before, or that are private, were left out.",)


def test_a_key_tells_every_pixel_and_its_place_apart() -> None:
    images = torch.from_numpy(np.unique(arrays(0, 1000)[0], axis=0))
    keys = key_of(images)
    assert len(keys.unique()) == len(images)
    changed = images[:64].clone()
    for i in range(64):
        changed[i].view(-1)[i] ^= 1
    assert not (key_of(changed) == keys[:64]).any()
    assert not (key_of(images[:64].flip(3)) == keys[:64]).all()


def test_the_record_answers_in_any_order_and_refuses_the_rest() -> None:
    images, _ = private()
    sent = torch.from_numpy(edge(images))
    recorded = Recorded(key_of(torch.from_numpy(images)), sent)
    order = torch.randperm(120)
    x = torch.from_numpy(images).float() / 255
    assert torch.equal(recorded(x[order]), sent[order])
    with pytest.raises(UserError, match="images that were not recorded"):
        recorded(1 - x)


def test_an_attacker_is_handed_no_private_image(tmp_path: Path) -> None:
    subject, mine, theirs, _ = open_pairs(table(), None, 0, tmp_path)
    test, own = as_sets(mine, theirs)
    attack = build("decoder")
    access = grant(attack.requires, subject.model, Channel(), DeviceImages(own, CPU), CPU, 0)
    secret = torch.from_numpy(test.images)
    for path, tensor in reachable(access):
        assert not share_memory(tensor, secret), path


def with_a_nan(sent: np.ndarray) -> np.ndarray:
    """What was sent, with one number of the fourth row lost."""
    sent[3, 2] = np.nan
    return sent


WRONG: dict[str, tuple[Any, str]] = {
    "no sent": ({"images": private()[0]}, "pairs has images, lacks sent"),
    "another name": (table() | {"z": private()[1]}, "pairs has 'z', which is none of sent, images, labels, attacker_sent"),
    "too few rows": (table() | {"sent": table()["sent"][:5]}, "5 rows of sent for 120 images"),
    "words": (table() | {"sent": np.array([["a"]] * 120)}, r"sent is <U1 \[120, 1\], must be numbers"),
    "not finite": (
        table() | {"attacker_sent": with_a_nan(table()["attacker_sent"])},
        "1 of .* rows of attacker_sent have numbers that are not finite, first row 3; leave out",
    ),
    "another width": (table() | {"sent": table()["sent"][:, :3]}, r"private rows of sent are \[3\], the attacker's \[16\]"),
    "only private": (
        {**{f"attacker_{n}": table()[n] for n in ("sent", "images")}, **{n: table()[n] for n in ("sent", "images")}},
        "the attacker has no image that is not private",
    ),
    "no such file": ("nowhere.npz", "nowhere.npz cannot be read"),
    "no such tensors": ("nowhere.safetensors", "nowhere.safetensors cannot be read"),
    "another format": ("sent.pkl", "neither an .npz, a .safetensors nor a folder"),
}


@pytest.mark.parametrize(("pairs", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_pair_is_refused(pairs: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as raised:
        open_pairs(pairs, None, 0, tmp_path)
    assert "\n" not in str(raised.value)


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "sent.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="is not a file of plain numbers"):
        open_pairs(tmp_path / "in", None, 0, tmp_path)


def test_pairs_leave_no_room_for_a_model() -> None:
    with pytest.raises(UserError, match="pairs hold the images and what was sent of them; leave out the model"):
        splitveil.audit(lambda x: x, pairs=table())
    with pytest.raises(UserError, match="an audit needs a model and private images, or pairs"):
        splitveil.audit(private=private())
    assert set(LACKS) >= {"encoder_weights", "channel", "observations"}


@pytest.mark.parametrize("name", ["folder", "pairs.safetensors"])
def test_a_pipe_in_the_place_of_pairs_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    if name == "folder":
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / name / "sent.npy" if name == "folder" else tmp_path / name)
    command = [sys.executable, "-m", "splitveil", "audit", "--pairs", name, "--out", "audit"]
    environment = os.environ | {"PYTHONPATH": str(Path(splitveil.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
