"""The training loop, top to bottom.

    splitveil train recipes/cem_small_fashion.toml --name first --train.epochs 10
    torchrun --nproc-per-node 2 -m splitveil train recipes/cem_small_fashion.toml      # the same batch, spread over processes

An epoch's randomness is a function of (seed, epoch), and everything else that the next epoch needs is saved at its end: killed
at any moment and started again with the same command, a run on the CPU ends with bit-identical weights.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import cos, isfinite, pi
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from splitveil.alarms import warnings_of
from splitveil.cem import CEM
from splitveil.channel import Channel
from splitveil.data.augment import AugmentConfig
from splitveil.data.loader import DeviceImages
from splitveil.defences import Batch
from splitveil.measure import run_pass
from splitveil.metrics.leakage import HISTOGRAM, rate_bits, variance_histogram
from splitveil.registry import UserError
from splitveil.rng import seed_of, stream
from splitveil.split import SplitModel

if TYPE_CHECKING:
    from splitveil.build import Parts
    from splitveil.config import Config
    from splitveil.data.splits import Splits
    from splitveil.runs import Run


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
    checkpoint_every: int = 1
    """Epochs between checkpoints: what a kill can cost at most."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, into the run folder's tensorboard/."""


def learning_rate(config: TrainConfig, epoch: int) -> float:
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + cos(pi * epoch / config.epochs))
    return config.lr * config.gamma ** sum(epoch >= milestone for milestone in config.milestones)


def check(config: TrainConfig, images: int, world: int) -> None:
    for name, low in {"epochs": 1, "batch": 2, "checkpoint_every": 1}.items():
        if getattr(config, name) < low:
            raise UserError(f"train.{name} is {getattr(config, name)}, must be at least {low}")
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


class Pipeline(nn.Module):
    """edge -> channel -> cloud in one forward, as DistributedDataParallel wants it."""

    def __init__(self, model: SplitModel, channel: Channel) -> None:
        super().__init__()
        self.model, self.channel = model, channel

    def forward(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        z = self.model.edge(x)
        z = z.float() if z.dtype in (torch.bfloat16, torch.float16) else z  # noise and statistics need the digits
        sent = self.channel.send(z, x, generator)
        return z, sent, self.model.cloud(sent)


class Means:
    """Averages over an epoch, summed on the device and read once at its end."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            value = value.detach().double()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
            self.counts[name] = self.counts.get(name, 0) + 1

    def read(self) -> dict[str, Any]:
        return {name: (total / self.counts[name]).tolist() for name, total in self.sums.items()}


def train_step(
    pipeline: nn.Module, channel: Channel, cem: CEM | None, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor,
    noise: torch.Generator, smoothing: float, bf16: bool, means: Means,
) -> None:  # fmt: skip
    """One step; nothing in it waits for the device."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        z, sent, logits = pipeline(x, noise)
    logits = logits.float()
    batch = Batch(x, z, sent, y)
    task = F.cross_entropy(logits, y, label_smoothing=smoothing)
    penalties = channel.penalties(batch)
    loss = task + sum(penalties) if penalties else task
    optimizer.zero_grad(set_to_none=True)
    if cem is None:
        loss.backward()
    else:
        cem.backward(loss, z, y)
    optimizer.step()
    channel.inner_step(Batch(x, z.detach(), sent.detach(), y))
    means.add({"loss": task, "train_accuracy": (logits.argmax(1) == y).float().mean()})
    if penalties:
        means.add({"penalty": (loss - task)})
    if cem is not None and cem.active and cem.last is not None:
        means.add({"cem_loss": cem.last.loss, "cem_loss_uniform": cem.last.loss_uniform})
        means.add({f"cem_{name}": value for name, value in cem.last.diagnostics.items()})


def validate(parts: "Parts", images: DeviceImages, seed: int, epoch: int) -> dict[str, Any]:
    """Accuracy with the channel on, the rate bound and the histogram of class variances, on the validation images."""
    outcome = run_pass(parts.model, parts.channel, images, stream(images.device, seed, "validation", epoch))
    return {
        "accuracy": outcome.correct.float().mean().item(),
        "val_loss": outcome.loss.item(),
        "bits": rate_bits(outcome.z, images.labels, images.classes, parts.channel.noise_std),
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


def check_health(line: dict[str, Any]) -> None:
    """No silent fall-back: a diverged or mostly skipped training stops with what to do."""
    if not isfinite(line["loss"]):
        raise UserError(
            f"the loss is {line['loss']} in epoch {line['epoch']}; lower train.lr ({line['lr']:.3g}) or cem.strength"
        )
    if line["cem_skipped"] > max(1, 0.01 * line["cem_steps"]):
        raise UserError(
            f"CEM skipped {line['cem_skipped']} of {line['cem_steps']} steps because its gradient was not finite (bound: 1 %); "
            "lower cem.strength or train.lr, or set cem.clip"
        )


def warn(line: dict[str, Any], config: "Config", told: set[str]) -> None:
    """Say what the surrogate's diagnostics complain about: each kind once, not in every epoch."""
    from splitveil.progress import console

    if config.cem.surrogate is None:
        return
    for kind, message in warnings_of(line, type(config.cem.surrogate).method, config.train.batch).items():
        if kind not in told:
            told.add(kind)
            console.print(f"warning: {message}", style="yellow", markup=False, highlight=False)


def refresh(parts: "Parts", images: DeviceImages, seed: int, epoch: int) -> None:
    """Surrogates with statistics over the whole training set get them before the epochs they ask for, once CEM acts."""
    cem = parts.cem
    if cem is None or not cem.active or not (every := cem.surrogate.refresh_every) or (epoch - cem.warmup) % every:
        return
    torch.manual_seed(seed_of(seed, "refresh", epoch))  # the same in every process, and after a resume
    outcome = run_pass(parts.model, parts.channel, images, stream(images.device, seed, "refresh", epoch))
    cem.refresh(outcome.z.view(-1, *parts.model.z_shape), images.labels)


def state_of(parts: "Parts", optimizer: torch.optim.Optimizer, best: float) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "model": parts.model.state_dict(),
        "channel": parts.channel.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "best": best,
    }
    for i, own in enumerate(parts.channel.optimizers()):
        tree[f"channel_optimizer{i}"] = own.state_dict()["state"]
    if parts.cem is not None:
        tree["cem"] = parts.cem.state_dict()
        if parts.cem.optimizer is not None:
            tree["cem_optimizer"] = parts.cem.optimizer.state_dict()["state"]
    return tree


def below(tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}


def restore_optimizer(optimizer: torch.optim.Optimizer, leaves: dict[str, Any]) -> None:
    state: dict[int, dict[str, Any]] = {}
    for name, value in leaves.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def restore(parts: "Parts", run: "Run") -> tuple[int, float, dict[str, Any]]:
    """Everything but the task's optimiser as after the last finished epoch, if there is one.

    Returns the next epoch, the best accuracy so far, and the saved leaves. A defence may have changed the model's shapes, so the
    optimiser can only be made after this.
    """
    saved = run.load_state()
    if saved is None:
        return 0, -1.0, {}
    tensors, others, epoch = saved
    leaves = tensors | others
    load_weights(parts, tensors)
    for i, own in enumerate(parts.channel.optimizers()):
        restore_optimizer(own, below(leaves, f"channel_optimizer{i}"))
    if parts.cem is not None:
        parts.cem.load_state_dict(below(tensors, "cem"))
        if parts.cem.optimizer is not None:
            restore_optimizer(parts.cem.optimizer, below(leaves, "cem_optimizer"))
    return epoch + 1, others["best"], leaves


def weights_of(parts: "Parts") -> dict[str, Tensor]:
    """What attack, evaluate and serve need: the split model and the channel's state."""
    model = {f"model.{name}": tensor for name, tensor in parts.model.state_dict().items()}
    return model | {f"channel.{name}": tensor for name, tensor in parts.channel.state_dict().items()}


def load_weights(parts: "Parts", tensors: dict[str, Tensor]) -> None:
    parts.channel.reshape(parts.model, below(tensors, "channel"))
    try:
        parts.model.load_state_dict(below(tensors, "model"))
        parts.channel.load_state_dict(below(tensors, "channel"))
    except RuntimeError as error:
        what = " ".join(str(error).split())[:200]
        raise UserError(
            f"the saved weights are not those of config.toml ({what}…); restore either, or train anew"
        ) from None


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


def assemble(parts: "Parts", config: TrainConfig, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The pipeline, and the task's optimiser over its parameters as they are now."""
    pipeline: nn.Module = Pipeline(parts.model, parts.channel)
    parameters = [p for p in (*parts.model.parameters(), *parts.channel.task_parameters()) if p.requires_grad]
    if world > 1:
        own = {name for name, p in pipeline.named_parameters() if all(p is not trained for trained in parameters)}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            pipeline, own
        )  # a defence trains these itself
        pipeline = DistributedDataParallel(pipeline)
    return pipeline, torch.optim.SGD(parameters, config.lr, config.momentum, weight_decay=config.weight_decay)


def train(run: "Run", parts: "Parts", splits: "Splits", device: torch.device, rank: int = 0, world: int = 1) -> None:
    """Train until the config's last epoch, from wherever the run folder stands."""
    from splitveil.progress import steps_bar

    config, seed = run.config.train, run.config.seed
    check(config, len(splits.task), world)
    task, validation = DeviceImages(splits.task, device), DeviceImages(splits.validation, device)
    model, channel, cem = parts
    first, best, leaves = restore(parts, run)
    pipeline, optimizer = assemble(parts, config, world)
    restore_optimizer(optimizer, below(leaves, "optimizer"))
    if rank == 0:
        run.drop_metrics_from(first)
    board = tensorboard(run, first) if config.tensorboard and rank == 0 else None
    steps = task.steps(config.batch)
    told: set[str] = set()

    with steps_bar(run.config.name, config.epochs * steps, done=first * steps, show=rank == 0) as advance:
        for epoch in range(first, config.epochs):
            began = time.perf_counter()
            lr = learning_rate(config, epoch)
            noise = stream(device, seed, "noise", epoch, rank)
            if channel.on_epoch(epoch, model):
                pipeline, optimizer = assemble(parts, config, world)
            for group in optimizer.param_groups:
                group["lr"] = lr
            if cem is not None:
                cem.schedule(epoch, lr)
                refresh(parts, task, seed, epoch)
            torch.manual_seed(seed_of(seed, "layers", epoch, rank))  # dropout layers and the like
            pipeline.train()
            means = Means()
            for x, y in task.shuffled(config.batch, seed, epoch, config.augment, rank, world):
                bf16 = config.bf16 and device.type == "cuda"
                train_step(pipeline, channel, cem, optimizer, x, y, noise, config.label_smoothing, bf16, means)
                advance(1)
            line = line_of(epoch, lr, cem, means)
            check_health(line)
            if rank == 0:
                warn(line, run.config, told)
                line["seconds"] = time.perf_counter() - began
                line |= validate(parts, validation, seed, epoch)
                advance(0, f"accuracy {line['accuracy']:.3f}")
                at_full_strength = cem is None or cem.full_strength(epoch)
                is_best = at_full_strength and line["accuracy"] > best
                best = max(best, line["accuracy"]) if at_full_strength else best
                save(run, parts, optimizer, line, best, is_best, board)


def save(
    run: "Run",
    parts: "Parts",
    optimizer: torch.optim.Optimizer,
    line: dict[str, Any],
    best: float,
    is_best: bool,
    board: Any,
) -> None:
    """End of an epoch. The state comes last: until it is there, the epoch has not happened."""
    config, epoch = run.config.train, line["epoch"]
    run.append_metrics(line)
    if board is not None:
        show(board, line)
    if is_best:
        run.save_weights("best", weights_of(parts), epoch)
    if (epoch + 1) % config.checkpoint_every == 0 or epoch + 1 == config.epochs:
        run.save_weights("last", weights_of(parts), epoch)
        run.save_state(state_of(parts, optimizer, best), epoch)


def tensorboard(run: "Run", first: int) -> Any:
    """A writer that hides what an earlier, killed process wrote from epoch `first` on."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "train.tensorboard needs the package tensorboard: pip install 'splitveil[tensorboard]'"
        ) from None
    return SummaryWriter(str(run.folder / "tensorboard"), purge_step=first)


def show(board: Any, line: dict[str, Any]) -> None:
    """An epoch's line on TensorBoard: numbers as curves, vectors (one number a class) as histograms."""
    epoch = line["epoch"]
    for name, value in line.items():
        if isinstance(value, int | float):
            board.add_scalar(name, value, epoch)
        elif isinstance(value, list) and name != "variance_histogram":
            finite = torch.tensor(value, dtype=torch.float64).flatten()
            finite = finite[finite.isfinite()]
            if len(finite):
                board.add_histogram(name, finite, epoch)
    # These are counts in bins of log10(variance) already; as they stand they would be shown as a histogram of counts.
    counts = torch.tensor(line["variance_histogram"], dtype=torch.float64)
    if counts.sum() > 0:
        low, high, bins = HISTOGRAM
        edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
        middle = (edges[1:] + edges[:-1]) / 2
        sums = {"num": counts.sum(), "sum": (counts * middle).sum(), "sum_squares": (counts * middle**2).sum()}
        board.add_histogram_raw(
            "variance_log10", low, high, **{name: value.item() for name, value in sums.items()},
            bucket_limits=edges[1:].tolist(), bucket_counts=counts.tolist(), global_step=epoch,
        )  # fmt: skip
    board.flush()
