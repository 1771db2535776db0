"""One training step: forward through edge, channel and cloud, the blended backward pass, the optimisers.

Nothing in a step waits for the device, so that it can be recorded and replayed as a whole (`splitveil.compute.cuda_graph`).
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from splitveil.cem import CEM
from splitveil.channel import Channel
from splitveil.compute.compile import check_compiler
from splitveil.compute.side_stream import SideStream
from splitveil.config import TrainConfig
from splitveil.data.mixup import unmixed
from splitveil.defences import Batch
from splitveil.split_model import SplitModel, encode
from splitveil.training.average import Average
from splitveil.training.build import Parts
from splitveil.training.optimizer import TaskOptimizer
from splitveil.training.teachers import Teaching


class Forward(NamedTuple):
    """One forward pass through edge, channel and cloud."""

    z: Tensor  # [b, *z_shape]
    sent: Tensor  # the same after the channel
    loss: Tensor  # [], the task's
    accuracy: Tensor  # []
    logits: Tensor  # [b, classes], of what was sent
    clean: Tensor | None  # [b, classes], of z itself, if they were asked for


def answer(
    model: SplitModel, sent: Tensor, y: Tensor, smoothing: float, target: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The task's loss, the accuracy and the logits; the loss is for `target` [b, classes] where images are mixed."""
    logits = model.cloud(sent.clone()).float()  # its first layer may write into it, and defences look at what was sent
    loss = F.cross_entropy(logits, y if target is None else target, label_smoothing=smoothing)
    return loss, (logits.argmax(1) == y).float().mean(), logits


def answer_to_clean(model: SplitModel, z: Tensor) -> Tensor:
    """The cloud's logits for z without the channel. The cloud's running statistics stay those of what is sent."""
    buffers = {name: buffer.clone() for name, buffer in model.cloud.named_buffers()}
    return functional_call(model.cloud, buffers, (z.clone(),)).float()  # a clone, because its first layer may write into it


class Pipeline(nn.Module):
    """edge -> channel -> cloud -> loss in one forward, as DistributedDataParallel wants it."""

    def __init__(self, model: SplitModel, channel: Channel, smoothing: float = 0.0, compiled: bool = False) -> None:
        super().__init__()
        self.model, self.channel, self.smoothing = model, channel, smoothing
        self.encode, self.answer = encode, answer
        if compiled:
            # Functions are compiled and not modules: parameters stay the modules' own, and equal networks share their kernels.
            # Each batch size has kernels of its own: those for any size made a step a tenth slower.
            self.encode, self.answer = torch.compile(encode, dynamic=False), torch.compile(answer, dynamic=False)

    def forward(
        self, x: Tensor, y: Tensor, generator: torch.Generator, look: Callable[[Tensor], None] | None = None,
        target: Tensor | None = None, clean: bool = False,
    ) -> Forward:  # fmt: skip
        """`look` is called with z as soon as the edge has made it; with a `target`, with the z of images that are not mixed.
        With `clean` the cloud also answers to z as it is before the channel."""
        z = seen = self.encode(self.model, x)
        if target is not None:
            seen, mixed = z.tensor_split([unmixed(len(z))])
            z = torch.cat([seen, mixed])  # `seen` must lie on the way from the loss to the edge: CEM's gradient joins there
        if look is not None:
            look(seen)
        sent = self.channel.send(z, x, generator)
        outcome = self.answer(self.model, sent, y, self.smoothing, target)
        return Forward(z, sent, *outcome, answer_to_clean(self.model, z) if clean else None)


class Means:
    """Averages over an epoch: summed on the device, in a tensor that stays where it is, and read once at the end."""

    def __init__(self) -> None:
        self.shapes: dict[str, torch.Size] = {}
        self.one = self.sums = torch.zeros(0)

    def begin(self) -> None:
        self.sums.zero_()

    def add(self, values: dict[str, Tensor]) -> None:
        """Add the values of one step; names and shapes are those of the first step."""
        if not self.shapes:
            self.shapes = {name: value.shape for name, value in values.items()}
            device = next(iter(values.values())).device
            self.one = torch.ones(1, device=device)  # counts the steps along with the rest
            self.sums = torch.zeros(1 + sum(map(prod, self.shapes.values())), dtype=torch.float64, device=device)
        if self.shapes.keys() != values.keys():
            raise RuntimeError(f"a step measured {sorted(values)}, earlier ones {sorted(self.shapes)}")
        self.sums += torch.cat([self.one, *(value.detach().flatten().float() for value in values.values())])

    def read(self) -> dict[str, Any]:
        """Numbers, and lists where a value is a vector. The host waits for the device here."""
        sums = self.sums.cpu()
        each = (sums[1:] / sums[0]).split([prod(shape) for shape in self.shapes.values()])
        return {name: mean.view(shape).tolist() for (name, shape), mean in zip(self.shapes.items(), each)}


def train_step(
    pipeline: nn.Module, channel: Channel, cem: CEM | None, optimizer: TaskOptimizer, x: Tensor, y: Tensor,
    noise: torch.Generator, bf16: bool, means: Means, target: Tensor | None = None, teaching: Teaching | None = None,
) -> Tensor:  # fmt: skip
    """Make one step and return z. With a `target` [b, classes] the second half of x is mixed, and CEM sees the first."""
    seen, own = torch.zeros(0), len(x) if target is None else unmixed(len(x))

    def look(z: Tensor) -> None:
        nonlocal seen
        seen = z
        if cem is not None:
            cem.look(z, y[:own], x=x[:own])

    taught = None if teaching is None else teaching.answers(x, noise)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        z, sent, task, accuracy, logits, clean = pipeline(x, y, noise, look, target, taught is not None and "clean" in taught)
    utility, told = task, dict[str, Tensor]()
    if teaching is not None and taught is not None:
        utility, told = teaching.loss(task, taught, {"clean": clean, "defended": logits})
    batch = Batch(x, z, sent, y)
    penalties = channel.penalties(batch)
    loss = utility + sum(penalties) if penalties else utility
    optimizer.zero_grad()
    if cem is None:
        loss.backward()
    else:
        cem.backward(loss, seen, y[:own], x=x[:own])
    optimizer.step()
    channel.inner_step(Batch(x, z.detach(), sent.detach(), y))
    values = {"loss": task, "train_accuracy": accuracy} | told
    if penalties:
        values["penalty"] = loss - utility
    if cem is not None and cem.active and cem.last is not None:
        values |= {"cem_loss": cem.last.loss, "cem_loss_uniform": cem.last.loss_uniform}
        values |= {f"cem_{name}": value for name, value in cem.last.diagnostics.items()}
    means.add(values)
    return z.detach()


def compiles_steps(config: TrainConfig, device: torch.device) -> bool:
    """True if whole steps are compiled. On a CPU that made networks slower, so only the surrogate is compiled there."""
    return config.compile and device.type == "cuda"


def assemble(parts: Parts, config: TrainConfig, world: int) -> tuple[nn.Module, TaskOptimizer]:
    """The pipeline, and the task's optimiser over the parameters that the model has now."""
    device = next(parts.model.parameters()).device
    pipeline: nn.Module = Pipeline(parts.model, parts.channel, config.label_smoothing, compiles_steps(config, device))
    if config.compile and parts.cem is not None:
        if device.type != "cuda":
            check_compiler()
        parts.cem.surrogate.compile(dynamic=False)
    optimizer = TaskOptimizer(parts, config)
    if world > 1:
        # What a defence trains itself is none of DistributedDataParallel's business.
        own = {name for name, p in pipeline.named_parameters() if all(p is not trained for trained in optimizer.parameters)}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(pipeline, own)
        pipeline = DistributedDataParallel(pipeline)
    return pipeline, optimizer


class Batches(Protocol):
    """Where a step takes its batch from."""

    step: Tensor

    def next(self) -> tuple[Tensor, Tensor]: ...


class Stepper:
    """What a training step works on: model, channel and CEM, the optimiser, the batches and the noise."""

    def __init__(self, parts: Parts, config: TrainConfig, feed: Batches, device: torch.device, world: int = 1) -> None:
        self.parts, self.config, self.feed, self.device, self.world = parts, config, feed, device, world
        self.pipeline, self.optimizer = assemble(parts, config, world)
        self.noise, self.means, self.side = torch.Generator(device), Means(), SideStream()
        self.bf16 = config.bf16 and device.type == "cuda"
        self.average: Average | None = None
        """The running average of the weights, if one is asked for."""
        self.teaching: Teaching | None = None
        """The teachers, if there are any."""
        self.kept: Tensor | None = None
        """[steps, b, *z_shape], where steps leave z for the next refresh of the surrogate; None if nobody asks for it."""

    def mixed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """The images as they are trained on, and targets [b, classes] if some are mixed."""
        return x, None

    def step(self) -> None:
        x, y = self.feed.next()
        x, target = self.mixed(x, y)
        _, channel, cem = self.parts
        teaching = self.teaching if self.teaching is not None and self.teaching.active else None
        z = train_step(self.pipeline, channel, cem, self.optimizer, x, y, self.noise, self.bf16, self.means, target, teaching)
        for average in (self.average, None if self.teaching is None else self.teaching.average):
            if average is not None:
                average.follow()
        if self.kept is not None:
            self.kept.index_copy_(0, self.feed.step - 1, z.unsqueeze(0))
