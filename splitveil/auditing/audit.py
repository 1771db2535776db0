"""The call: does a model leak that splitveil never trained?

    report = splitveil.audit(net, at="layer1", private=test_set, attacker=aux_set, channel=[...], suite="quick", seed=0)
    report.worst_case.mse, report.flags, report.verdict; report.save("audit/"); report.html("audit.html")

It trains nothing but attackers and judges, and leaves the model as it was. docs/audit.md says what can be given.
"""

import hashlib
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from splitveil.auditing.channel import channel_of, names_of
from splitveil.auditing.doors.exported import exported, load_program
from splitveil.auditing.doors.function import black_box
from splitveil.auditing.doors.module import cut_module, of_model, pair
from splitveil.auditing.doors.onnx import onnx_edge
from splitveil.auditing.doors.pairs import open_pairs
from splitveil.auditing.images import Pictures, as_sets, check_labels, few, halved, in_both, read_images
from splitveil.auditing.precision import as_it_takes, in_float32
from splitveil.auditing.report import AuditReport
from splitveil.auditing.subject import Subject, same, weights_sha256
from splitveil.channel import Channel
from splitveil.config import from_dict
from splitveil.data import ImageSet
from splitveil.data.splits import balanced_order
from splitveil.evaluation.audit_folder import AuditConfig, AuditFolder
from splitveil.evaluation.channel_modes import sent_in
from splitveil.evaluation.evaluate import Training, evaluate
from splitveil.evaluation.judges import SHELF
from splitveil.evaluation.run_attacks import attack_all
from splitveil.evaluation.suites import entry
from splitveil.evaluation.suites import suite as suite_named
from splitveil.evaluation.summary import Part
from splitveil.evaluation.victim import ACCURACY, FOLDER, LOG, Victim
from splitveil.files.folder import locked
from splitveil.registry import UserError
from splitveil.rng import seed_of
from splitveil.runs import environment
from splitveil.split_model import SplitModel, in_mode
from splitveil.training.health import best_guess

TARGET_NUMBERS = 2**25
"""The images that are rebuilt, and their z, have at most so many numbers (128 MB). Of more images a sample is rebuilt, unless
`targets` says how many."""


def audit(
    net: Any = None, at: str | None = None, *, private: Any = None, attacker: Any = None, pairs: Any = None, channel: Any = (),
    suite: str = "quick", attacks: Sequence[Any] | None = None, targets: int | None = None, seed: int = 0, name: str = "audit",
    folder: str | Path | None = None,
) -> AuditReport:  # fmt: skip
    """Attack what a model sends, and measure what comes of it.

    net       an nn.Module with the name `at` of its cut, a pair (edge, cloud), a SplitModel; or as a black box a function, the
              path of an .onnx file, or a loaded torch.export program
    private   the images to protect: a Dataset, a DataLoader, arrays; with labels, accuracy is measured too
    attacker  images of the same kind that the attacker has; if not given, half of the private ones, drawn by the seed
    pairs     in the place of all these: what was sent and the images, as an .npz, a .safetensors or a folder of .npy files
    channel   the defences between edge and cloud: objects, names, or tables such as {"name": "gaussian", "sigma": 0.1}
    suite     quick, standard or plus; or `attacks`, a list of names and tables
    targets   private images that are rebuilt, at most; accuracy is always over all of them
    folder    where results are kept; the same call goes on there where it was stopped
    """
    chosen, notes = chosen_attacks(suite, attacks), ()
    with tempfile.TemporaryDirectory(prefix="splitveil-images-") as place:
        scratch = Path(place)
        if pairs is not None:
            if net is not None or private is not None or channel:
                raise UserError("pairs hold the images and what was sent of them; leave out the model, private and channel")
            subject, mine, theirs, notes = open_pairs(pairs, attacker, seed, scratch)
        else:
            if net is None or private is None:
                raise UserError("an audit needs a model and private images, or pairs; give net and private=…, or pairs=…")
            mine = read_images(private, "private", scratch)
            if attacker is None:
                mine, theirs = halved(mine, seed, scratch)
            else:
                theirs = read_images(attacker, "attacker", scratch)
            x = precision_of(net, few(mine))
            subject = in_float32(open_door(net, at, x), x)
        return run_audit(subject, mine, theirs, channel, chosen, targets, seed, name, folder, notes)


def open_door(net: Any, at: str | None, x: torch.Tensor) -> Subject:
    """The Subject that the fitting door makes of what was given; x are a few of its images."""
    if isinstance(net, SplitModel):
        return pair_of(net, x)
    if isinstance(net, tuple | list):
        if len(net) != 2:
            raise UserError(f"the model is a {type(net).__name__} of {len(net)}, must be a pair (edge, cloud)")
        return pair(net[0], net[1], x) if isinstance(net[0], nn.Module) else black_box(net[0], x, "the edge", cloud=net[1])
    if isinstance(net, nn.Module):
        return cut_module(net, at, x)
    if at is not None:
        raise UserError(f"at is {at!r}, but only an nn.Module is cut by name; leave it out")
    if isinstance(net, torch.export.ExportedProgram):
        return exported(net, x)
    if isinstance(net, str | Path):
        path = Path(net).expanduser()
        return exported(load_program(path, trusted=False), x) if path.suffix == ".pt2" else onnx_edge(path, x)
    if callable(net):
        return black_box(net, x, f"the function {getattr(net, '__name__', type(net).__name__)}")
    raise UserError(
        f"the model is a {type(net).__name__}, must be an nn.Module, a pair (edge, cloud), a SplitModel or a function"
    )


def precision_of(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Images in the precision that the first half of what was given takes."""
    first = net.edge if isinstance(net, SplitModel) else net[0] if isinstance(net, tuple | list) and net else net
    return as_it_takes(first, x) if isinstance(first, nn.Module) else x


def pair_of(net: SplitModel, x: torch.Tensor) -> Subject:
    if tuple(x.shape[1:]) != tuple(net.x_shape):
        raise UserError(f"the images are {list(x.shape[1:])}, the model takes {list(net.x_shape)}; give images of its size")
    return of_model(net, f"{type(net.edge).__name__} and {type(net.cloud).__name__}", net)


def chosen_attacks(suite: str, attacks: Sequence[Any] | None) -> tuple[Any, ...]:
    """The configs of the suite, or those of a list of names and tables."""
    if attacks is None:
        return suite_named(suite)
    return from_dict({"attacks": [entry(item) if isinstance(item, str) else item for item in attacks]}).attacks


def sampled(private: ImageSet, z_numbers: int, targets: int | None, seed: int) -> ImageSet:
    """The private images that are rebuilt: all of them, or as many as fit, balanced over the classes."""
    numbers = max(int(np.prod(private.shape)), z_numbers)
    most = max(2, TARGET_NUMBERS // numbers) if targets is None else targets
    if most < 2:
        raise UserError(f"targets is {targets}, must be 2 or more")
    if len(private) <= most:
        return private
    return private.take(np.sort(balanced_order(private.labels, seed_of(seed, "targets"))[:most]))


def run_audit(
    subject: Subject, mine: Pictures, theirs: Pictures, channel: Any, attacks: tuple[Any, ...], targets: int | None, seed: int,
    name: str, folder: str | Path | None, notes: tuple[str, ...] = (),
) -> AuditReport:  # fmt: skip
    """Attack and measure a Subject."""
    lacks, device = lacking(subject, mine, theirs), subject.device
    check_labels(mine, theirs, None if ACCURACY in lacks else scores_of(subject, few(mine)))
    private, auxiliary = as_sets(mine, theirs)
    test = sampled(private, subject.model.z_shape.numel(), targets, seed)
    built = channel_of(channel, subject.model).to(device)
    defences, notes = names_of(built), subject.notes + notes + notes_on(mine, theirs, private, test)
    splits = {"test": Part(len(test), test.digest()), "auxiliary": Part(len(auxiliary), auxiliary.digest())}
    digest = digest_of(subject.digest, of_channel(built, subject, few(mine)), *(part.sha256 for part in splits.values()))
    victim = Victim(
        subject.model, built, test, auxiliary, None, seed, device, digest, lacks, subject.opaque,
        classified=private if len(private) > len(test) else None, z_itemsize=subject.z_itemsize,
    )  # fmt: skip
    where = Path(tempfile.mkdtemp(prefix="splitveil-audit-") if folder is None else folder)
    random = torch.random.fork_rng([device] if device.type == "cuda" else [])  # attacks seed the user's own generator
    alone = nullcontext() if folder is None else locked(where.absolute())  # nobody else knows of a temporary folder
    with alone, in_mode(subject.owner, False), random:
        kept = AuditFolder.create(where, AuditConfig(name, seed, attacks, subject.what, defences, notes))
        attack_all(kept, digest, lambda: victim, where / SHELF, attacks)
        origin = {"config_sha256": kept.config.sha256, "splits": splits, "environment": environment(device)}
        summary = evaluate(kept, victim, defences, Training(), **origin)
    return AuditReport(summary, where, notes + notes_on_guessing(summary.accuracy, private.labels), temporary=folder is None)


def digest_of(*parts: str) -> str:
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


@torch.no_grad()
def of_channel(channel: Channel, subject: Subject, x: torch.Tensor) -> str:
    """Digest of a channel: its options, its weights, and what it sends of a few images, for defences that have neither.

    An edge that draws its own noise never gives the same z twice; the channel is then asked about random numbers.
    """
    options = [repr(getattr(defence, "config", None)) for defence in channel.defences]
    with in_mode(subject.owner, False):
        z, again = (subject.model.edge(x.to(subject.device)) for _ in range(2))
    if not same(z, again):
        z = torch.rand(z.shape, generator=torch.Generator().manual_seed(0)).to(z)
    sent = sent_in(False, channel, z, x.to(subject.device), seed=0)
    content = sent.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()  # numpy has no bfloat16
    return digest_of(*options, weights_sha256(channel), hashlib.sha256(content).hexdigest())


def lacking(subject: Subject, mine: Pictures, theirs: Pictures) -> dict[str, str]:
    """What cannot be known in this audit, with the reasons (see `Victim.lacks`)."""
    lacks = {LOG: "an audit has no training log", FOLDER: "an audit has no run folder that a device loads", **subject.lacks}
    if mine.labels is None:
        lacks |= {"labels": "the private images have no labels", ACCURACY: "the private images have no labels"}
    elif theirs.labels is None:
        lacks["labels"] = "the attacker's images have no labels"
    return lacks


@torch.no_grad()
def scores_of(subject: Subject, x: torch.Tensor) -> int:
    """The number of classes that the cloud tells apart."""
    with in_mode(subject.owner, False):
        logits = subject.model(x.to(subject.device))
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2:
        shown = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise UserError(
            f"the cloud returns {shown} for {len(x)} images, must return scores [n, classes]; "
            "leave labels out to audit without accuracy"
        )
    return logits.shape[1]


def notes_on_guessing(accuracy: float, labels: np.ndarray) -> tuple[str, ...]:
    """A network whose weights were forgotten, or whose normalisation is missing, guesses; an accuracy of NaN was not measured."""
    most = np.bincount(labels).max() / len(labels)
    if not accuracy <= best_guess(most, len(labels)):
        return ()
    return (
        f"The model is no better than guessing: its accuracy is {100 * accuracy:.1f} %, the most frequent class has "
        f"{100 * most:.1f} % of the images. Are its weights loaded, is its normalisation inside it, are these its classes?",
    )


def notes_on(mine: Pictures, theirs: Pictures, private: ImageSet, test: ImageSet) -> tuple[str, ...]:
    found = []
    if known := in_both(mine, theirs):
        found.append(
            f"{known} of the private images are among the attacker's, pixel for pixel: of these it knows all beforehand."
        )
    if mine.rounded or theirs.rounded:
        found.append("The images had more than 8 bits a pixel and were rounded to 8: the model saw the rounded ones.")
    if len(test) < len(private):
        found.append(
            f"Of {len(private)} private images {len(test)} were rebuilt, drawn by the seed; accuracy is over all of them."
        )
    return tuple(found)
