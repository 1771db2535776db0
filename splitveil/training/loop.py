"""The training loop, top to bottom.

    splitveil train recipes/cem_small_fashion.toml --name first --train.epochs 10
    torchrun --nproc-per-node 2 -m splitveil train recipes/cem_small_fashion.toml      # the same batch, spread over processes

An epoch's randomness is a function of (seed, epoch), and everything else that the next epoch needs is saved at its end: killed
at any moment and started again with the same command, a run on the CPU ends with bit-identical weights. With `train.compile` that
holds unless torch adds up in parallel, as it does for kmeans from batches of about 1,024 on.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import ceil, cos, isfinite, pi
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from splitveil.cem import CEM
from splitveil.data.augment import AugmentConfig
from splitveil.data.loader import DeviceImages, Feed
from splitveil.device.capture import WARMUP, Captured, lr_on, set_lr, settings_of
from splitveil.device.side_stream import Aside
from splitveil.metrics.leakage import variance_histogram
from splitveil.registry import UserError
from splitveil.rng import seed_of, stream
from splitveil.training.checkpoint import below, restore, restore_optimizer, state_of, weights_of
from splitveil.training.forward_pass import features_of, run_pass
from splitveil.training.health import check_health, tell, warnings_of
from splitveil.training.step import Means, Pipeline, train_step
from splitveil.training.tensorboard import show, tensorboard

if TYPE_CHECKING:
    from splitveil.data.splits import Splits
    from splitveil.runs import Run
    from splitveil.training.build import Parts


@dataclass(frozen=True)
class TrainConfig:
    epochs: int = 20
    """Passes over the task images."""
    batch: int = 128
    """Images a step, over all processes together."""
    lr: float = 0.05
    """Learning rate at the start."""
    schedule: Literal["cosine", "milestones"] = "cosine"
    """How the learning rate falls: to zero along a cosine, or by `gamma` at each milestone."""
    milestones: tuple[int, ...] = (60, 120, 160)
    """Epochs at which the learning rate is multiplied by `gamma`."""
    gamma: float = 0.2
    """Factor at a milestone."""
    momentum: float = 0.9
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    """Share of the target spread over all classes."""
    augment: AugmentConfig = AugmentConfig()
    bf16: bool = True
    """Autocast to bfloat16 on CUDA; the CPU always computes in float32."""
    capture: bool = True
    """On CUDA, record the step once and replay it as a whole; false starts every kernel from Python, several times slower."""
    compile: bool = False
    """Let torch.compile fuse kernels, half a minute once: on CUDA of the whole step, on a CPU of the surrogate (needs g++)."""
    checkpoint_every: int | None = None
    """Epochs between checkpoints: what a kill can cost at most. Default is as many as half a minute has."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, into the run folder's tensorboard/."""


KINDS = 64
"""Networks and surrogates of different settings that one process may compile; torch gives up at 8, without a word."""
PATIENCE = 30.0
"""Seconds between two checkpoints, unless `checkpoint_every` says otherwise."""


def learning_rate(config: TrainConfig, epoch: int) -> float:
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + cos(pi * epoch / config.epochs))
    return config.lr * config.gamma ** sum(epoch >= milestone for milestone in config.milestones)


def check(config: TrainConfig, images: int, world: int) -> None:
    for name, low in {"epochs": 1, "batch": 2, "checkpoint_every": 1}.items():
        value = getattr(config, name)
        if value is not None and value < low:
            raise UserError(f"train.{name} is {value}, must be at least {low}")
    if not 0 < config.lr < float("inf"):
        raise UserError(f"train.lr is {config.lr}, must be above 0; 0.05 is a good start")
    for name, high in {
        "momentum": 1.0,
        "weight_decay": float("inf"),
        "gamma": float("inf"),
        "label_smoothing": 1.0,
    }.items():
        if not 0 <= getattr(config, name) < high:
            raise UserError(f"train.{name} is {getattr(config, name)}, must be at least 0 and below {high:g}")
    if config.augment.crop < 0:
        raise UserError(f"train.augment.crop is {config.augment.crop}, must be 0 (no crop) or more pixels")
    if not isfinite(config.augment.rotate):
        raise UserError(f"train.augment.rotate is {config.augment.rotate}, must be a number of degrees, such as 15")
    if config.batch > images:
        raise UserError(f"train.batch is {config.batch}, but there are {images} task images; lower it")
    if config.batch % world:
        raise UserError(f"train.batch is {config.batch}, must be a multiple of the {world} processes")


def validate(parts: "Parts", images: DeviceImages, seed: int, epoch: int) -> dict[str, Any]:
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
    """What the training of an epoch was like; the host waits for the device here, and not in a step."""
    line = {"epoch": epoch, "lr": lr, "cem_coef": 0.0 if cem is None else (cem.coef * cem.multiplier).item()}
    line |= means.read() | counters(cem)
    if cem is not None and cem.target_bits is not None:
        line["cem_multiplier"] = cem.multiplier.item()
    if "cem_loss" in line:
        line["cem_excess"] = line["cem_loss"] - line["cem_loss_uniform"]
    return line


def wants_refresh(cem: CEM | None, epoch: int) -> bool:
    """Surrogates with statistics over the whole training set get them before the epochs they ask for, once CEM acts."""
    every = None if cem is None or not cem.active else cem.surrogate.refresh_every
    return cem is not None and every is not None and (epoch - cem.warmup) % every == 0


@contextmanager
def process_group(device: torch.device) -> Iterator[tuple[int, int]]:
    """(rank, world size): of torchrun's process group where there is one, else (0, 1)."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0, 1
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def fuses_steps(config: TrainConfig, device: torch.device) -> bool:
    """Whether all of a step is compiled; a network on the CPU was slower for it, there only a surrogate is compiled."""
    return config.compile and device.type == "cuda"


@cache
def check_compiler() -> None:
    """For a CPU torch.compile needs more than is installed with it: better said now than in the middle of a step."""
    try:
        torch.compile(torch.neg)(torch.zeros(8))
    except Exception as error:
        raise UserError(
            f"train.compile needs a C++ compiler and Python's headers on a CPU (here: {type(error).__name__}); leave it out"
        ) from error


def assemble(parts: "Parts", config: TrainConfig, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The pipeline, and the task's optimiser over its parameters as they are now."""
    device = next(parts.model.parameters()).device
    pipeline: nn.Module = Pipeline(parts.model, parts.channel, config.label_smoothing, fuses_steps(config, device))
    if fuses_steps(config, device):
        torch.backends.cudnn.benchmark = True  # time at the start for time in every step, as compiling is
    if config.compile:
        torch._dynamo.config.recompile_limit = KINDS
        if parts.cem is not None:
            if device.type != "cuda":
                check_compiler()
            parts.cem.surrogate.compile(dynamic=False)
    parameters = [p for p in (*parts.model.parameters(), *parts.channel.task_parameters()) if p.requires_grad]
    if world > 1:
        own = {name for name, p in pipeline.named_parameters() if all(p is not trained for trained in parameters)}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            pipeline, own
        )  # a defence trains these itself
        pipeline = DistributedDataParallel(pipeline)
    lr, fused = lr_on(parameters[0].device, config.lr), True if parameters[0].is_cuda else None
    return pipeline, torch.optim.SGD(parameters, lr, config.momentum, weight_decay=config.weight_decay, fused=fused)


class Training:
    """One run in training: what it is made of, and what it does before, in and after the steps of an epoch."""

    def __init__(
        self, run: "Run", parts: "Parts", splits: "Splits", device: torch.device, rank: int = 0, world: int = 1
    ) -> None:
        self.run, self.parts, self.device, self.rank, self.world = run, parts, device, rank, world
        self.config, self.seed = run.config.train, run.config.seed
        check(self.config, len(splits.task), world)
        self.task, self.validation = DeviceImages(splits.task, device), DeviceImages(splits.validation, device)
        self.first, self.best, leaves = restore(parts, run)
        self.pipeline, self.optimizer = assemble(parts, self.config, world)
        restore_optimizer(self.optimizer, below(leaves, "optimizer"))
        if rank == 0:
            run.drop_metrics_from(self.first)
        self.board = tensorboard(run, self.first) if self.config.tensorboard and rank == 0 else None
        self.feed = Feed(self.task, self.config.batch, self.config.augment, rank, world)
        self.fused = fuses_steps(self.config, device)
        if self.fused:
            self.feed.compile()
        self.noise, self.means, self.aside = torch.Generator(device), Means(), Aside()
        self.bf16 = self.config.bf16 and device.type == "cuda"
        self.kept = self.features_kept(leaves.get("kept"))
        self.settings: dict[str, object] = {}
        self.told: set[str] = set()
        self.saved = time.perf_counter()
        self.champion: tuple[dict[str, Tensor], int] | None = None  # the best weights since then, and their epoch

    def features_kept(self, saved: Tensor | None) -> Tensor | None:
        """[steps, b, *z_shape], where steps leave z for the next refresh; NaN before the first epoch. None if not wanted."""
        cem = self.parts.cem
        if cem is None or cem.refresh_from == "pass" or cem.surrogate.refresh_every is None:
            return None
        if self.world > 1:
            raise UserError(
                "cem.refresh_from is 'training', which needs all features in one process; leave it out here"
            )
        shape = (*self.feed.order.shape, *self.parts.model.z_shape)
        return saved.to(self.device) if saved is not None else torch.full(shape, torch.nan, device=self.device)

    def refresh(self, epoch: int) -> None:
        torch.manual_seed(seed_of(self.seed, "refresh", epoch))  # the same in every process, and after a resume
        assert self.parts.cem is not None
        if self.kept is None or self.kept[0, 0].isnan().all():
            features = features_of(self.parts.model, self.task, self.bf16, self.fused)
            labels = self.task.labels
        else:
            self.feed.begin(self.seed, epoch - 1)  # who was where in the epoch before
            features, labels = self.kept.flatten(0, 1), self.task.labels[self.feed.order.flatten()]
        self.parts.cem.refresh(features, labels)

    def begin(self, epoch: int) -> bool:
        """Bring everything to the start of an epoch; true if the step is no longer the one that was captured."""
        config, seed, cem = self.config, self.seed, self.parts.cem
        self.began, self.lr = time.perf_counter(), learning_rate(config, epoch)
        replaced = self.parts.channel.on_epoch(epoch, self.parts.model)
        if replaced:
            self.pipeline, self.optimizer = assemble(self.parts, config, self.world)
        set_lr(self.optimizer, self.lr)
        if cem is not None:
            cem.schedule(epoch, self.lr)
            if wants_refresh(cem, epoch):
                self.refresh(epoch)
        self.noise.manual_seed(seed_of(seed, "noise", epoch, self.rank))
        torch.manual_seed(seed_of(seed, "layers", epoch, self.rank))  # dropout layers and the like
        self.pipeline.train()
        before, self.settings = self.settings, settings_of(self.pipeline, *([] if cem is None else [cem]))
        changed = replaced or self.settings != before
        if changed:
            self.means = Means()
        self.feed.begin(seed, epoch)
        self.means.begin()
        return changed

    def step(self) -> None:
        x, y = self.feed.next()
        _, channel, cem = self.parts
        z = train_step(self.pipeline, channel, cem, self.optimizer, x, y, self.noise, self.bf16, self.means)
        if self.kept is not None:
            self.kept.index_copy_(0, self.feed.step - 1, z.unsqueeze(0))

    def end(self, epoch: int) -> str:
        """Measure, warn and save; returns a note for the progress bar."""
        cem = self.parts.cem
        line = line_of(epoch, self.lr, cem, self.means)
        check_health(line)
        if self.rank > 0:
            return ""
        if cem is not None:
            cem.surrogate.tell()
        if self.run.config.cem.surrogate is not None:
            tell(warnings_of(line, type(self.run.config.cem.surrogate).method, self.config.batch), self.told)
        line["seconds"] = time.perf_counter() - self.began
        line |= validate(self.parts, self.validation, self.seed, epoch)
        self.run.append_metrics(line)
        if self.board is not None:
            show(self.board, line)
        if line["accuracy"] > self.best and (cem is None or cem.full_strength(epoch)):
            self.best = line["accuracy"]
            self.champion = {name: tensor.clone() for name, tensor in weights_of(self.parts).items()}, epoch
        if self.due(epoch):
            self.save(epoch)
        return f"accuracy {line['accuracy']:.3f}"

    def due(self, epoch: int) -> bool:
        """Whether a checkpoint is."""
        if epoch + 1 == self.config.epochs:
            return True
        if self.config.checkpoint_every is None:
            return time.perf_counter() - self.saved >= PATIENCE
        return (epoch + 1) % self.config.checkpoint_every == 0

    def save(self, epoch: int) -> None:
        """The state comes last: until it is there, the epochs since the last checkpoint have not happened."""
        if self.champion is not None:
            self.run.save_weights("best", *self.champion)
        self.run.save_weights("last", weights_of(self.parts), epoch)
        kept = {} if self.kept is None else {"kept": self.kept}
        self.run.save_state(state_of(self.parts, self.optimizer, self.best) | kept, epoch)
        self.saved, self.champion = time.perf_counter(), None


def why_not_captured(trainings: Sequence[Training]) -> str | None:
    """What speaks against a captured step before it is tried."""
    if trainings[0].device.type != "cuda":
        return "there is no CUDA device"
    if not all(training.config.capture for training in trainings):
        return "train.capture is false"
    world = trainings[0].world
    return f"gradients are averaged over {world} processes" if world > 1 else None


LAUNCH, LAUNCH_OF_ALL = 16, 64
"""Steps of a run, and of all runs together, that one launch may replay."""


def steps_of_a_launch(steps: int, runs: int) -> int:
    """How many steps of each run to capture in one graph: a divisor of the epoch's steps."""
    most = max(1, min(LAUNCH, LAUNCH_OF_ALL // runs))
    return max(many for many in range(1, most + 1) if steps % many == 0)


def step_all(trainings: Sequence[Training], many: int) -> None:
    """`many` steps of every run; on a GPU side by side, where no run waits for another: eight take five times as long as one."""
    if len(trainings) == 1:
        repeat(many, trainings[0].step)
        return
    for training in trainings:
        with training.aside.of(training.device):
            repeat(many, training.step)
    for training in trainings:
        training.aside.join()


def repeat(times: int, work: Callable[[], None]) -> None:
    for _ in range(times):
        work()


def launch_of(trainings: Sequence[Training], steps: int) -> tuple[Captured, int]:
    """What starts the next steps of runs whose epoch has `steps` of them, and how many of them at a time."""
    noises, why_not = [training.noise for training in trainings], why_not_captured(trainings)
    many = 1 if why_not else steps_of_a_launch(steps, len(trainings))
    body = partial(step_all, trainings, many)
    return Captured(body, trainings[0].device, noises, why_not, ceil(WARMUP / many)), many


def train(trainings: Sequence[Training]) -> None:
    """Train runs side by side, each from wherever its folder stands, until their last epoch."""
    from splitveil.progress import steps_bar

    length = {(training.config.epochs, training.feed.steps) for training in trainings}
    if len(length) > 1:
        raise UserError(
            f"runs that are trained together must have the same epochs and steps, these have {sorted(length)}; train them apart"
        )
    epochs, steps = length.pop()
    first, name = min(training.first for training in trainings), trainings[0].run.config.name
    title = name if len(trainings) == 1 else f"{name} and {len(trainings) - 1} more"
    there: list[Training] = []
    launch, many = Captured(lambda: None, trainings[0].device), 1
    with steps_bar(title, epochs * steps, done=first * steps, show=trainings[0].rank == 0) as advance:
        for epoch in range(first, epochs):
            before, there = there, [training for training in trainings if training.first <= epoch]
            changed = [training.begin(epoch) for training in there]  # all of them, also after a yes
            if any(changed) or there != before:
                launch, many = launch_of(there, steps)
            for _ in range(steps // many):
                launch()
                advance(many)
            notes = [training.end(epoch) for training in there]
            advance(0, notes[0])
