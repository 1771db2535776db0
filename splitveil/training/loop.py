"""The training loop, top to bottom: what happens before, in and after the steps of an epoch.

    splitveil train recipes/cem_small_fashion.toml --name first --train.epochs 10
    torchrun --nproc-per-node 2 -m splitveil train recipes/cem_small_fashion.toml      # the same batch, spread over processes

An epoch's randomness is a function of (seed, epoch), and everything else that the next epoch needs is saved at its end. So a run
on a CPU that is killed at any moment and started again with the same command ends with exactly the weights of a run that was not
killed. With `train.compile` that holds unless torch adds up in parallel, as it does for kmeans from batches of about 1,024 on.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import cos, pi
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from splitveil.cem import CEM, ramped
from splitveil.compute.cuda_graph import settings_of
from splitveil.compute.launch import Repeated
from splitveil.config import TrainConfig
from splitveil.data.loader import DeviceImages, Feed
from splitveil.data.mixup import mix
from splitveil.data.splits import Splits
from splitveil.manifest import changing
from splitveil.metrics.leakage import variance_histogram
from splitveil.progress import steps_bar, warn
from splitveil.registry import UserError
from splitveil.rng import seed_of, stream
from splitveil.runs import Run
from splitveil.training.average import Average
from splitveil.training.build import Parts
from splitveil.training.checkpoint import below, restore, state_of, weights_of
from splitveil.training.forward_pass import features_of, run_pass
from splitveil.training.health import check_health, rates_of, setting_warnings, task_warnings, tell, warnings_of
from splitveil.training.optimizer import check_muon
from splitveil.training.step import Means, Stepper, assemble, compiles_steps
from splitveil.training.teachers import Teacher, Teaching
from splitveil.training.tensorboard import show, tensorboard
from splitveil.training.warm_start import warm_start

PATIENCE = 30.0
"""Seconds between two checkpoints, unless `checkpoint_every` says otherwise."""
LAUNCH, LAUNCH_OF_ALL = 16, 64
"""Steps of one run, and of all runs together, that one launch may replay."""


def learning_rate(config: TrainConfig, epoch: int) -> float:
    lr = config.lr * ramped(epoch, 0, config.lr_warmup)
    if config.schedule == "cosine":
        return lr * 0.5 * (1 + cos(pi * epoch / config.epochs))
    return lr * config.gamma ** sum(epoch >= milestone for milestone in config.milestones)


def check_batch(batch: int, images: int, world: int) -> None:
    """Refuse a batch that the images or the processes do not allow."""
    if batch > images:
        raise UserError(f"train.batch is {batch}, but there are {images} task images; lower it")
    if batch % world:
        raise UserError(f"train.batch is {batch}, must be a multiple of the {world} processes")


def check_training(parts: Parts, config: TrainConfig, splits: Splits, world: int) -> None:
    """Refuse settings that do not go together, before a folder is made."""
    check_batch(config.batch, len(splits.task), world)
    check_muon(parts, config)
    if parts.cem is None:
        return
    if parts.cem.config.growth is not None and world > 1:
        raise UserError("cem.growth needs the validation accuracy in every process, which only the first has; leave it out")
    if parts.cem.config.growth is not None and splits.validation is splits.official_test:
        raise UserError("cem.growth would go by test images, as splits.validation is 0; give it some, or leave growth out")
    if keeps_features(parts.cem):
        if world > 1:
            raise UserError("cem.refresh_from is 'training', which needs all features in one process; leave it out")
        if config.augment.mixup:
            raise UserError("cem.refresh_from is 'training', where train.augment.mixup would leave mixed features; use 'pass'")


def keeps_features(cem: CEM) -> bool:
    """True if steps leave z for the next refresh."""
    return cem.config.refresh_from != "pass" and cem.surrogate.refresh_every is not None


def validate(parts: Parts, images: DeviceImages, seed: int, epoch: int) -> dict[str, Any]:
    """Accuracy with the channel on, the rate bound and the histogram of class variances, on the validation images."""
    outcome = run_pass(parts.model, parts.channel, images, stream(images.device, seed, "validation", epoch))
    return {
        "accuracy": outcome.correct.float().mean().item(),
        "val_loss": outcome.loss.item(),
        "bits": outcome.bits(images.labels, images.classes),
        "variance_histogram": variance_histogram(outcome.z, images.labels, images.classes).tolist(),
    }


def counters(cem: CEM | None) -> dict[str, int]:
    names = ("steps", "skipped", "inactive")
    return {f"cem_{name}": 0 if cem is None else int(getattr(cem, name)) for name in names}


def line_of(epoch: int, lr: float, cem: CEM | None, means: Means) -> dict[str, Any]:
    """The metrics of an epoch's training. The host waits for the device here, and never in a step."""
    line = {"epoch": epoch, "lr": lr, "cem_coef": 0.0 if cem is None else (cem.coef * cem.multiplier).item()}
    line |= means.read() | counters(cem)
    if cem is not None and (cem.config.target_bits or cem.config.growth) is not None:
        line["cem_multiplier"] = cem.multiplier.item()
    if "cem_loss" in line:
        line["cem_excess"] = line["cem_loss"] - line["cem_loss_uniform"]
    return line


def wants_refresh(cem: CEM | None, epoch: int) -> bool:
    """True before the epochs in which a surrogate asks for new statistics over the whole training set, once CEM acts."""
    every = None if cem is None or not cem.active else cem.surrogate.refresh_every
    return cem is not None and every is not None and (epoch - cem.warmup) % every == 0


class Training(Stepper):
    """One run in training: its folder, and what it does before, in and after the steps of an epoch."""

    feed: Feed

    def __init__(
        self, run: Run, parts: Parts, splits: Splits, device: torch.device, rank: int = 0, world: int = 1,
        teachers: Mapping[str, Teacher | None] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        config = run.config.train
        check_training(parts, config, splits, world)
        self.run, self.rank, self.seed = run, rank, run.config.seed
        self.task, self.validation = DeviceImages(splits.task, device), DeviceImages(splits.validation, device)
        self.auxiliary, self.images = splits.auxiliary, splits.task.kind
        self.first, self.best, leaves = restore(parts, run)
        super().__init__(parts, config, Feed(self.task, config.batch, config.augment, rank, world), device, world)
        self.optimizer.restore(leaves)
        if rank == 0:
            run.drop_metrics_from(self.first)
            if parts.cem is not None and parts.cem.surrogate.unasked:
                warn(parts.cem.surrogate.about_the_bank())
            sigma = None if parts.cem is None else run.config.cem.sigma
            tell(setting_warnings(config.muon, sigma, parts.channel.noise_std), set())
        self.board = tensorboard(run, self.first) if config.tensorboard and rank == 0 else None
        self.compiled = compiles_steps(config, device)
        if self.compiled:
            self.feed.compile()
        self.kept = self.features_kept(leaves.get("kept"))
        self.average = None if config.ema is None else Average(parts, config.ema, below(leaves, "average"))
        assert teachers.keys() == config.distillation.teachers.keys()
        if teachers:
            self.teaching = Teaching(parts, config, teachers, self.feed, self.seed, self.bf16, below(leaves, "teaching"))
        self.settings: dict[str, object] = {}
        self.told: set[str] = set()
        self.shares = (self.validation.labels.bincount(minlength=self.task.classes) / len(self.validation)).tolist()
        self.saved = time.perf_counter()
        self.champion: tuple[dict[str, Tensor], int] | None = None
        """The best weights since the last checkpoint, and their epoch."""

    def features_kept(self, saved: Tensor | None) -> Tensor | None:
        """The tensor in which steps leave z for the next refresh, NaN before the first epoch; None if it is not wanted."""
        if self.parts.cem is None or not keeps_features(self.parts.cem):
            return None
        shape = (*self.feed.order.shape, *self.parts.model.z_shape)
        return saved.to(self.device) if saved is not None else torch.full(shape, torch.nan, device=self.device)

    def refresh(self, epoch: int) -> None:
        """Give the surrogate the features of all task images: from a pass, or those that the last epoch's steps left."""
        torch.manual_seed(seed_of(self.seed, "refresh", epoch))  # the same in every process, and after a resume
        assert self.parts.cem is not None
        if self.kept is None or self.kept[0, 0].isnan().all():
            features = features_of(self.parts.model, self.task, self.bf16, self.compiled)
            labels = self.task.labels
        else:
            self.feed.begin(self.seed, epoch - 1)  # brings back the order of the epoch before
            features, labels = self.kept.flatten(0, 1), self.task.labels[self.feed.order.flatten()]
        self.parts.cem.refresh(features, labels)

    def begin(self, epoch: int) -> bool:
        """Bring everything to the start of an epoch; true if the step has changed, so that it must be recorded anew."""
        config, seed, cem = self.config, self.seed, self.parts.cem
        self.began, self.lr = time.perf_counter(), learning_rate(config, epoch)
        if epoch == 0 and self.parts.channel.warm_start:
            warm_start(self.parts, DeviceImages(self.auxiliary, self.device), config.batch, seed, show=self.rank == 0)
        replaced = self.parts.channel.on_epoch(epoch, self.parts.model)
        if replaced:
            self.pipeline, self.optimizer = assemble(self.parts, config, self.world)
            self.average = None if config.ema is None else Average(self.parts, config.ema, {})  # shapes may be others now
        if self.teaching is not None:
            self.teaching.begin(epoch, replaced)
        self.optimizer.set_lr(self.lr)
        if cem is not None:
            cem.schedule(epoch, self.lr, config.epochs)
            if wants_refresh(cem, epoch):
                self.refresh(epoch)
        self.noise.manual_seed(seed_of(seed, "noise", epoch, self.rank))
        torch.manual_seed(seed_of(seed, "layers", epoch, self.rank))  # dropout layers and the like
        self.pipeline.train()
        watched = [self.pipeline, cem, None if self.teaching is None else self.teaching.distillation]
        before, self.settings = self.settings, settings_of(*(module for module in watched if module is not None))
        changed = replaced or self.settings != before
        if changed:
            self.means = Means()
        self.feed.begin(seed, epoch)
        self.means.begin()
        return changed

    def end(self, epoch: int) -> str:
        """Measure, warn and save; returns a note for the progress bar."""
        cem, rates = self.parts.cem, rates_of(self.config)
        line = line_of(epoch, self.lr, cem, self.means)
        check_health(line, rates)
        if self.rank > 0:
            return ""
        if cem is not None:
            cem.surrogate.tell()
        if self.run.config.cem.surrogate is not None:
            tell(warnings_of(line, type(self.run.config.cem.surrogate).method, self.config.batch), self.told)
        line["seconds"] = time.perf_counter() - self.began
        with self.deployed():
            line |= validate(self.parts, self.validation, self.seed, epoch)
        last = epoch + 1 == self.config.epochs
        tell(task_warnings(line, self.shares, len(self.validation), last, rates), self.told)
        if cem is not None:
            cem.heed(epoch, line["accuracy"])
        self.run.append_metrics(line)
        if self.board is not None:
            show(self.board, line)
        if line["accuracy"] > self.best and (cem is None or cem.full_strength(epoch)):
            self.best = line["accuracy"]
            with self.deployed():
                self.champion = {name: tensor.clone() for name, tensor in weights_of(self.parts).items()}, epoch
        if self.due(epoch):
            self.save(epoch)
        return f"accuracy {line['accuracy']:.3f}"

    def mixed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        most = self.config.augment.mixup
        return mix(x, y, most * self.feed.share(), self.task.classes) if most else (x, None)

    def deployed(self) -> AbstractContextManager[None]:
        """Within this context the model holds the weights that are validated and saved: with `train.ema` the averages."""
        return nullcontext() if self.average is None else self.average.deployed()

    def due(self, epoch: int) -> bool:
        """True if a checkpoint should be written after this epoch."""
        if epoch + 1 == self.config.epochs:
            return True
        if self.config.checkpoint_every is None:
            return time.perf_counter() - self.saved >= PATIENCE
        return (epoch + 1) % self.config.checkpoint_every == 0

    def save(self, epoch: int) -> None:
        """Write a checkpoint. Its state comes last: a run that is killed before that goes on from the checkpoint before."""
        kept = {} if self.kept is None else {"kept": self.kept}
        kept |= {} if self.average is None else {"average": self.average.state()}
        kept |= {} if self.teaching is None else {"teaching": self.teaching.state()}
        with changing(self.run.folder) as step:
            if self.champion is not None:
                self.run.save_weights("best", *self.champion, self.images, step)
            with self.deployed():
                self.run.save_weights("last", weights_of(self.parts), epoch, self.images, step)
            self.run.save_state(state_of(self.parts, self.optimizer.state(), self.best) | kept, epoch, step)
        self.saved, self.champion = time.perf_counter(), None


def why_not_captured(steppers: Sequence[Stepper]) -> str | None:
    """Why a step cannot be captured, as far as that is known before it is tried."""
    if steppers[0].device.type != "cuda":
        return "there is no CUDA device"
    if not all(stepper.config.capture for stepper in steppers):
        return "train.capture is false"
    world = steppers[0].world
    return f"gradients are averaged over {world} processes" if world > 1 else None


def step_all(steppers: Sequence[Stepper], many: int) -> None:
    """Make `many` steps of every run. On a GPU they run side by side: eight runs take five times as long as one."""
    for stepper in steppers:
        if len(steppers) == 1:
            repeat(stepper, many)
        else:
            with stepper.side.run_on(stepper.device):
                repeat(stepper, many)
    for stepper in steppers:
        stepper.side.wait()


def repeat(stepper: Stepper, many: int) -> None:
    for _ in range(many):
        stepper.step()


def epoch_of(steppers: Sequence[Stepper], steps: int) -> Repeated:
    """The `steps` steps of an epoch of all these runs, by as few launches as possible."""
    noises, most = [stepper.noise for stepper in steppers], min(LAUNCH, LAUNCH_OF_ALL // len(steppers))
    return Repeated(partial(step_all, steppers), steps, steppers[0].device, noises, why_not_captured(steppers), most)


def train(trainings: Sequence[Training]) -> None:
    """Train runs side by side until their last epoch, each from where its folder stands."""
    length = {(training.config.epochs, training.feed.steps) for training in trainings}
    if len(length) > 1:
        raise UserError(
            f"runs that are trained together must have the same epochs and steps, these have {sorted(length)}; train them apart"
        )
    epochs, steps = length.pop()
    first, name = min(training.first for training in trainings), trainings[0].run.config.name
    title = name if len(trainings) == 1 else f"{name} and {len(trainings) - 1} more"
    present: list[Training] = []
    whole_epoch = epoch_of(trainings, steps)
    with steps_bar(title, epochs * steps, done=first * steps, show=trainings[0].rank == 0) as advance:
        for epoch in range(first, epochs):
            before, present = present, [training for training in trainings if training.first <= epoch]
            changed = [training.begin(epoch) for training in present]  # all of them, also after a yes
            if any(changed) or present != before:
                whole_epoch = epoch_of(present, steps)
            whole_epoch(advance)
            notes = [training.end(epoch) for training in present]
            advance(0, notes[0])
