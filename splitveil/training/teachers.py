"""The teachers of a run (splitveil/distillation.py): who they are, how they are asked, and what a killed run needs to go on.

    train.distillation.clean = "runs/undefended"          a finished run with its channel, noise included
    train.distillation.clean = "my_models:resnet"         a function that gives an nn.Module; its module needs --import
    train.distillation.defended = "ema"                   the running average of the student itself, through its own channel

A teacher's noise is drawn anew at each step. This is right, because KL is linear in the teacher's answer p, but for a term that
does not depend on the student. So the student's gradient is, on average, that for the answer averaged over the noise.

If a teacher always gives the same answer to an image, and augmentation makes fewer variants of an image than there are epochs in
which the teacher is asked, all answers are computed before the first epoch. The random numbers of a batch then say which of
them it needs.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from splitveil.cem_watch import epochs_of
from splitveil.config import Config, TrainConfig
from splitveil.data.augment import augment, draw_of, variant_of, variants
from splitveil.data.loader import Feed, Rows
from splitveil.data.splits import Splits
from splitveil.distillation import Distillation
from splitveil.own_code import check_imported
from splitveil.own_model import model_from
from splitveil.progress import steps_bar, warn
from splitveil.registry import UserError, told
from splitveil.rng import stream
from splitveil.runs import Run
from splitveil.split_model import encode, in_mode
from splitveil.training.average import Average
from splitveil.training.build import Parts
from splitveil.training.checkpoint import below
from splitveil.training.load import without_training

CALIBRATED = 512
"""Task images that temperatures are balanced on at the start."""
CACHED = 2**30
"""Bytes of answers that are computed ahead for a teacher, at most."""


class Teacher(nn.Module):
    """Answers to images [b, c, h, w] in [0, 1] with logits [b, classes]."""

    def forward(self, x: Tensor, noise: torch.Generator) -> Tensor:
        raise NotImplementedError

    def digest(self) -> str:
        """sha256 over all its numbers; a run goes on only with the teachers that it began with."""
        sha = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            sha.update(name.encode())
            sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


class RunTeacher(Teacher):
    """A trained run, or the student as its average holds it: edge, channel, cloud."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.model, self.channel = parts.model, parts.channel

    def forward(self, x: Tensor, noise: torch.Generator) -> Tensor:
        return self.model.cloud(self.channel.send(encode(self.model, x), x, noise))


class OwnTeacher(Teacher):
    """A user's own network."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, noise: torch.Generator) -> Tensor:
        return self.module(x)


class CachedTeacher(nn.Module):
    """A teacher whose answers to all that augmentation can make of the task images were computed before training."""

    def __init__(self, answers: Tensor, feed: Feed) -> None:
        super().__init__()
        self.answers, self.feed = answers, feed  # [variants, n, classes]

    def forward(self, x: Tensor, noise: torch.Generator) -> Tensor:
        """The answers to the batch that the feed gave last."""
        images, draw = self.feed.last()
        return self.answers[variant_of(draw, self.feed.augmentation), images]


def find_teachers(config: Config, splits: Splits, device: torch.device, world: int = 1) -> dict[str, Teacher | None]:
    """The teachers that the config names, by path; None stands for the student's average. A mistake is told in one line."""
    if world > 1:
        raise UserError(f"train.distillation needs one process, there are {world}; start it without torchrun, or leave it out")
    warmup, epochs = config.train.distillation.warmup, config.train.epochs
    if warmup >= epochs:
        warn(
            f"no teacher ever acts: their warm-up is {epochs_of(warmup)}, the training has {epochs}; train longer, or lower "
            "train.distillation.warmup"
        )
    found = config.train.distillation.teachers
    return {path: None if where == "ema" else find_teacher(path, where, splits, device) for path, where in found.items()}


def find_teacher(path: str, where: str, splits: Splits, device: torch.device) -> Teacher:
    """A teacher in eval mode that answers to this run's images in its classes."""
    setting, task = f"train.distillation.{path}", splits.task
    own = ":" in where and not Path(where).is_dir()
    teacher = own_teacher(where) if own else run_teacher(setting, where, splits, device)
    teacher.to(device).eval().requires_grad_(False)
    wanted = [2, len(task.classes)]
    try:
        with torch.no_grad():
            answer = teacher(torch.from_numpy(task.images[:2]).to(device).float() / 255, stream(device, "teacher"))
    except Exception as error:  # whatever a user's network raises
        raise UserError(f"{setting}: {where} does not take images of {list(task.shape)}: {told(error)}") from error
    if not isinstance(answer, Tensor) or list(answer.shape) != wanted:
        shape = list(answer.shape) if isinstance(answer, Tensor) else f"a {type(answer).__name__}"
        raise UserError(f"{setting}: {where} answers to two images with {shape}, must be {wanted}, a logit for each class")
    return teacher


def own_teacher(where: str) -> Teacher:
    check_imported([where.partition(":")[0]])
    return OwnTeacher(model_from(where))


def run_teacher(setting: str, where: str, splits: Splits, device: torch.device) -> Teacher:
    """Load the teacher from a finished run."""
    folder, task = Path(where), splits.task
    if not folder.is_dir():
        raise UserError(f"{setting} is {where!r}, which is no folder; give that of a trained run, or pkg.module:function")
    run = Run.open(folder)
    if not run.has_weights():
        raise UserError(f"{setting}: the run in {where} is not trained to its end; `splitveil train` it first")
    weights = run.load_weights("last")
    try:
        parts = without_training(run.config, weights, task, device)
    except UserError as error:
        images = f"images of {list(task.shape)} in {len(task.classes)} classes"
        raise UserError(f"{setting}: {where} does not fit this run's {images}; give one that was trained on such") from error
    # Its channel is not deployed: keyed_noise would take a key that may be another in the process that goes on after a kill.
    # With a generator it draws noise of the same law.
    ours, theirs = splits.summary(), run.read("splits.json")
    if ours["task"] != theirs.get("task"):  # else it has learned from nothing but what the student learns from
        other = [name for name in ours if ours[name] != theirs.get(name)]
        warn(
            f"the teacher {where} has other splits than this run ({', '.join(other)}): if it has learned from test images or the "
            f"attacker's, this run looks better than it is; train it with the same data, splits and seed"
        )
    return RunTeacher(parts)


@torch.no_grad()
def same_each_time(teacher: Teacher, x: Tensor) -> bool:
    """True if the teacher's answer to an image does not depend on noise."""
    first, second = (teacher(x, stream(x.device, "teacher", draw)) for draw in range(2))
    return torch.equal(first, second)


@torch.no_grad()
def answers_to_all(teacher: Teacher, feed: Feed, count: int) -> Tensor:
    """Logits [count, n, classes] for each of the `count` variants of each task image."""
    found, images, augmentation = [], feed.images, feed.augmentation
    noise = stream(images.device, "teacher")
    with steps_bar("answers of a teacher", total=count * len(images)) as advance:
        for variant in range(count):
            draw = draw_of(variant, augmentation).to(images.device)
            for x, _ in images.in_order(250):
                found.append(teacher(augment(x, draw.expand(len(x), -1), augmentation), noise).float())
                advance(len(x))
    return torch.cat(found).view(count, len(images), -1)


class Teaching:
    """The teachers of a run in training, and the balance between them."""

    def __init__(
        self, parts: Parts, config: TrainConfig, teachers: Mapping[str, Teacher | None], feed: Feed, seed: int,
        bf16: bool, saved: dict[str, Any],
    ) -> None:  # fmt: skip
        self.config, self.parts, self.feed, self.seed, self.bf16 = config.distillation, parts, feed, seed, bf16
        self.student, self.teachers = RunTeacher(parts), dict(teachers)
        self.digests = {path: teacher.digest() for path, teacher in teachers.items() if teacher is not None}
        for path, digest in self.digests.items():
            if saved and saved.get(f"teachers.{path}") != digest:
                where = self.config.teachers[path]
                raise UserError(f"train.distillation.{path}: {where} is not the teacher that this run began with; restore it")
        self.distillation = Distillation(self.config).to(feed.images.device)
        self.average = None
        """The running average of the student, if it teaches."""
        if None in self.teachers.values():
            self.average = Average(parts, self.config.decay, below(saved, "average"))
        if saved:
            self.distillation.load_state_dict(below(saved, "distillation"))
        self.answering: dict[str, nn.Module | None] = {
            path: self.with_cache(teacher, config.epochs - self.config.warmup) for path, teacher in self.teachers.items()
        }
        """The teachers that answer in a step."""

    @property
    def active(self) -> bool:
        """False during the warm-up."""
        return self.distillation.active

    def with_cache(self, teacher: Teacher | None, epochs: int) -> nn.Module | None:
        """The teacher with its answers computed ahead, where that is possible and saves some of the passes of `epochs`."""
        images, count = self.feed.images, variants(self.feed.augmentation)
        if teacher is None or self.config.cache == "never" or count is None or count >= epochs:
            return teacher
        too_many = count * len(images) * images.classes * 4 > CACHED
        if too_many or not same_each_time(teacher, images.take(slice(0, 8))):
            return teacher
        with self.precision():
            return CachedTeacher(answers_to_all(teacher, self.feed, count), self.feed)

    def precision(self) -> torch.autocast:
        """The precision of a step."""
        return torch.autocast(self.feed.images.device.type, torch.bfloat16, enabled=self.bf16)

    def begin(self, epoch: int, replaced: bool) -> None:
        """Start or go on teaching; `replaced` is true if the student's parameters are others now."""
        self.distillation.active = epoch >= self.config.warmup
        if replaced and self.average is not None:
            self.average = Average(self.parts, self.config.decay, {})
        # The student's average is another teacher in each epoch.
        if epoch == self.config.warmup or (epoch > self.config.warmup and self.average is not None):
            self.calibrate(epoch)

    def calibrate(self, epoch: int) -> None:
        """Balance the temperatures on some task images."""
        if self.config.temperatures == "fixed":
            return
        device = self.feed.images.device
        order = torch.randperm(len(self.feed.images), generator=stream(device, self.seed, "calibration"), device=device)
        some, noise = Rows(self.feed.images, order[:CALIBRATED]), stream(device, self.seed, "calibration noise", epoch)
        answers = [self.ask(self.teachers, x, noise) for x, _ in some.in_order(250)]
        self.distillation.calibrate([torch.cat([answer[path] for answer in answers]) for path in self.teachers])

    @torch.no_grad()
    def ask(self, teachers: Mapping[str, nn.Module | None], x: Tensor, noise: torch.Generator) -> dict[str, Tensor]:
        """Logits [b, classes] by path. To be called before the student's own pass: its average takes its place for a while."""
        found = {}
        with self.precision():
            for path, teacher in teachers.items():
                if teacher is not None:
                    found[path] = teacher(x, noise).float()
                elif self.average is not None:
                    with self.average.deployed(), in_mode(self.parts.model, False):
                        found[path] = self.student(x, noise).float()
        return found

    def answers(self, x: Tensor, noise: torch.Generator) -> dict[str, Tensor]:
        """The teachers' logits [b, classes] for a batch of the feed, by path."""
        return self.ask(self.answering, x, noise)

    def loss(
        self, label: Tensor, taught: Mapping[str, Tensor], students: Mapping[str, Tensor | None]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [] of a step, and what is logged of it."""
        paths = self.distillation.paths
        return self.distillation(label, [taught[path] for path in paths], [students[path] for path in paths])

    def state(self) -> dict[str, Any]:
        """All that the teaching needs to go on with the next epoch."""
        average = {} if self.average is None else {"average": self.average.state()}
        return {"distillation": self.distillation.state_dict(), "teachers": self.digests, **average}
