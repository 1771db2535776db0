"""The cloud's side: a cloud that learns from the z that it is sent, without labels and without images.

    adapter = Adapter(model.cloud, reference)        reference: z of your own images, as they were received
    logits = adapter.observe(z)                      answers, keeps some z, and learns when enough new ones were kept
    client.apply(adapter.update(digest))             with `descent`: the affine at the cut moves to the device, see `update`

A step takes n z, `batch` of them new and the others drawn from the replay. The running statistics of the cloud's norms follow
theirs. With `descent`, gain and shift of all norms and the affine at the cut learn as well:

    w_i = exp(-H_i) / mean exp(-H)                             confident answers weigh more
    L   = mean w_i H_i + anchor mean KL(teacher_i || p_i)      teacher: the running average of what is learnt
    a   <- within 0.05 to 20 after each step                   the gain at the cut

After CEMA (Chen et al., ICLR 2024), which uploads images: here nothing but z' comes in. We deviate further: their weight is
exp(E_max - H), ours has mean 1, so that E_max drops out and the learning rate means the same whatever the entropies are. Their
norms use the batch's statistics with a renormalisation; ours stay in eval mode with running statistics, so that an answer depends
on nothing but its own z. Their teacher is a larger network of the cloud; a split model has none. Descent is off by default: it
brought nothing (docs/findings.md). The edge's own norms cannot be learnt without x, and stay.

There are two nets, because entropy is lowest where every answer is the same: `reset_every` returns to the start after so many
steps (RDumb, Press et al., 2023); and where the answers to `reference` spread over less than `collapse` of the classes that they
had, it returns at once. Suggested: the defaults. Known failure: a stream of one class moves the answers towards it until one of
the nets acts.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from splitveil.adaptation.cut_affine import along_channels, channels_of, weakened
from splitveil.adaptation.message import Update, read, write
from splitveil.adaptation.replay import Replay
from splitveil.adaptation.retention import Retention, entropy, plausible, usual_sizes
from splitveil.options import UserError, check_options, option
from splitveil.registry import told
from splitveil.rng import stream

NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.RMSNorm)
SMALLEST, LARGEST = 0.05, 20.0
"""The gain at the cut stays between these bounds."""
ROWS = 512
"""So many references are answered at once."""


@dataclass(frozen=True)
class AdapterConfig:
    """What an Adapter keeps, and how it learns."""

    keep: float = option(0.4, above=0, at_most=1)
    """At most this share of the z is kept to learn from; 1 keeps all that are plausible."""
    window: int = option(1024, at_least=1)
    """The limits of entropy and likeness follow from this many of the latest answers."""
    memory: float = option(0.9, at_least=0, below=1)
    """The mean of the kept answers is a running one: this share of it stays when a batch is added."""
    cap: int = option(1000, at_least=1)
    """At most so many z are kept."""
    seconds: float = option(600.0, above=0)
    """A kept z is overwritten when it is so old."""
    batch: int = option(32, at_least=1)
    """A step begins when so many new z were kept."""
    replayed: int = option(64, at_least=0)
    """So many older z, drawn from those kept, join each step."""
    lr: float = option(1e-3, above=0, remedy="0.001 is a good start")
    """Learning rate of SGD with momentum 0.9."""
    anchor: float = option(1.0, at_least=0)
    """Weight of the teacher's answers in the loss; 0 leaves the teacher out, which saves its pass."""
    teacher: float = option(0.99, at_least=0, below=1)
    """The teacher is a running average: this share of it stays in a step."""
    statistics: float = option(0.2, at_least=0, at_most=1)
    """BatchNorm's running mean and variance move by this share towards those of a step; 0 leaves them as they are."""
    descent: bool = False
    """Learn gains and shifts by gradient descent as well; without it only the running statistics change."""
    reset_every: int | None = option(None, at_least=1)
    """After so many steps everything returns to the start; None for never."""
    collapse: float = option(0.7, at_least=0, below=1)
    """Return to the start once the answers to the reference have less than this share of their classes; 0 for never."""
    check_every: int = option(5, at_least=1)
    """The answers to the reference are looked at every so many steps."""

    def __post_init__(self) -> None:
        check_options(self, "adaptation: ")


class Adapted(nn.Module):
    """The cloud behind gain and shift, less `device_gain` and `device_shift`, which the device has applied to z already."""

    device_gain: Tensor
    device_shift: Tensor

    def __init__(self, cloud: nn.Module, z_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels = channels_of(z_shape)
        self.cloud = copy.deepcopy(cloud).eval().requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(channels))  # [c]
        self.shift = nn.Parameter(torch.zeros(channels))
        self.register_buffer("device_gain", torch.ones(channels))
        self.register_buffer("device_shift", torch.zeros(channels))

    def forward(self, z: Tensor) -> Tensor:
        gain = self.gain / self.device_gain
        shift = self.shift - gain * self.device_shift
        return self.cloud((along_channels(gain, z) * z + along_channels(shift, z)).to(z.dtype))  # gain and shift are float32

    def norms(self) -> list[nn.Module]:
        return [module for module in self.cloud.modules() if isinstance(module, NORMS)]

    def followers(self) -> list[_BatchNorm]:
        """The norms that have running statistics."""
        return [norm for norm in self.norms() if isinstance(norm, _BatchNorm) and norm.running_mean is not None]

    def learnt(self) -> list[nn.Parameter]:
        """What descent may change: gain and shift at the cut, and those of every norm."""
        return [self.gain, self.shift, *(own for norm in self.norms() for own in norm.parameters(recurse=False))]


@contextmanager
def statistics_follow(norms: list[_BatchNorm], rate: float) -> Iterator[None]:
    """In this context the running statistics of BatchNorm move by `rate` towards those of the batch before it is normalised."""

    @torch.no_grad()
    def follow(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        (x,) = inputs
        over = [0, *range(2, x.dim())]
        assert isinstance(norm, _BatchNorm) and norm.running_mean is not None and norm.running_var is not None
        # In new tensors: where a norm is used twice, backward still wants those of the first time.
        norm.running_mean = norm.running_mean.lerp(x.mean(over), rate)
        if x.numel() > x.shape[1]:  # one number of each channel has no variance
            norm.running_var = norm.running_var.lerp(x.var(over), rate)

    hooks = [norm.register_forward_pre_hook(follow) for norm in norms] if rate else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def weights_of(h: Tensor) -> Tensor:
    """exp(-H) with mean 1, [b]; no gradient passes."""
    w = (-h.detach()).exp()
    return w / w.mean()


def loss_of(logits: Tensor, taught: Tensor | None, anchor: float) -> Tensor:
    """The loss: the weighted entropy of the answers, plus their distance from the teacher's."""
    h = entropy(logits)
    loss = (weights_of(h) * h).mean()
    if taught is not None:
        loss = loss + anchor * F.kl_div(logits.log_softmax(1), taught.log_softmax(1), reduction="batchmean", log_target=True)
    return loss


def classes_answered(logits: Tensor) -> float:
    """exp(entropy) of the mean answer: how many classes the answers spread over."""
    mean = logits.double().softmax(1).mean(0)
    return mean.clamp_min(1e-12).log().mul(mean).sum().neg().exp().item()


def check_received(name: str, z: Tensor) -> None:
    """Refuse what is no tensor of floats."""
    if not (isinstance(z, Tensor) and z.is_floating_point()):
        what = f"of {z.dtype}" if isinstance(z, Tensor) else f"a {type(z).__name__}"
        raise UserError(f"adaptation: {name} is {what}, must be a tensor of floats, as it was received")


class Adapter:
    """A copy of the cloud that learns from what it is sent; the cloud that was given stays as it is.

    `reference` [n, *z_shape] are z of images of your own (the training's), as received: they say which z are plausible and how
    many classes are answered. `steps` and `resets` count; how many z were seen and kept is in `retention`.
    """

    def __init__(
        self, cloud: nn.Module, reference: Tensor, config: AdapterConfig | None = None, seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.config = config or AdapterConfig()
        if not isinstance(self.config, AdapterConfig):
            raise UserError(f"adaptation: the config is a {type(config).__name__}, must be an AdapterConfig")
        check_received("the reference", reference)
        if len(reference) < 2 or not reference.isfinite().all():
            raise UserError("adaptation: the reference must be two z or more of your own images, all finite")
        self._at_release, self.reference, self.sizes = reference, reference, usual_sizes(reference)
        self.model = Adapted(cloud, tuple(reference.shape[1:])).to(reference.device)
        if not (self.config.descent or self.model.followers()):
            raise UserError("adaptation: the cloud has no BatchNorm whose statistics could follow; set descent = True")
        self.teacher = copy.deepcopy(self.model)
        with torch.no_grad():
            logits = self._first_answers(reference)
        self.classes_at_start = classes_answered(logits)
        c = self.config
        self.retention = Retention(logits.shape[1], c.keep, c.window, c.memory)
        self.replay = Replay(c.cap, c.seconds, clock)
        self._random = stream("cpu", seed, "replay")
        self._start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.steps = self.resets = self._fresh = self._since_reset = self.number = 0
        self._begin()

    def _begin(self) -> None:
        for parameter in self.model.learnt():
            parameter.requires_grad_(self.config.descent)
        self._sgd = torch.optim.SGD(self.model.learnt(), self.config.lr, momentum=0.9)

    def _answers(self, z: Tensor) -> Tensor:
        return torch.cat([self.model(part) for part in z.split(ROWS)])

    def _first_answers(self, reference: Tensor) -> Tensor:
        """The answers to the reference. A type or a shape that the cloud cannot take is told in one line."""
        try:
            return self._answers(reference)
        except (RuntimeError, ValueError, TypeError) as error:
            types = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in self.model.cloud.parameters()})
            own = str(reference.dtype).removeprefix("torch.")
            if types and own not in types:
                raise UserError(
                    f"adaptation: the reference is of {own}, the cloud of {' and '.join(types)}; give z as the cloud receives it"
                ) from error
            raise UserError(
                f"adaptation: the cloud does not take a reference of {list(reference.shape[1:])} ({told(error)}); give the half "
                "behind the cut, and z as it was received"
            ) from error

    def __call__(self, z: Tensor) -> Tensor:
        """The answers [b, classes] to z [b, *z_shape] as it is received; nothing is kept."""
        check_received("z", z)
        if z.shape[1:] != self.reference.shape[1:]:
            raise UserError(
                f"adaptation: z is {list(z.shape[1:])}, the reference is {list(self.reference.shape[1:])}; give both alike"
            )
        with torch.no_grad():
            return self._answers(z.to(self.reference))

    def observe(self, z: Tensor) -> Tensor:
        """Answer z [b, *z_shape], keep what is worth it, and take a step when `batch` new ones are kept."""
        logits, z = self(z), z.to(self.reference)
        kept = self.retention(logits, plausible(z, self.sizes))
        self.replay.add(z[kept])
        self._fresh += int(kept.sum())
        if self._fresh >= self.config.batch:
            self._fresh = 0
            self.step()
        return logits

    def step(self) -> None:
        """Learn once from what is kept."""
        c = self.config
        z = torch.cat([self.replay.newest(c.batch), self.replay.sample(c.replayed, self._random)])
        if not len(z):  # all of it has expired
            return
        with statistics_follow(self.model.followers(), c.statistics):
            logits = self.model(z)
        if c.descent:
            with torch.no_grad():
                taught = self.teacher(z) if c.anchor else None
            loss = loss_of(logits, taught, c.anchor)
            self._sgd.zero_grad()
            loss.backward()
            self._sgd.step()
            with torch.no_grad():
                self.model.gain.clamp_(SMALLEST, LARGEST)
        self._teach()
        self.steps, self._since_reset = self.steps + 1, self._since_reset + 1
        due = self._since_reset % c.check_every == 0
        if self._since_reset == c.reset_every or self.broken() or (due and self.collapsed()):
            self.reset()

    @torch.no_grad()
    def _teach(self) -> None:
        """Move the teacher towards what is learnt; both have the same running statistics."""
        for teacher, own in zip(self.teacher.learnt(), self.model.learnt()):
            teacher.lerp_(own, 1 - self.config.teacher)
        for teacher, own in zip(self.teacher.buffers(), self.model.buffers()):
            teacher.copy_(own)

    def broken(self) -> bool:
        """True if answers are no longer finite: nothing would be kept to learn from again."""
        return not self(self.reference[:8]).isfinite().all()

    def collapsed(self) -> bool:
        """True if the answers to the reference are not finite, or have lost more classes than `collapse` allows."""
        found = classes_answered(self(self.reference))
        return not found >= self.config.collapse * self.classes_at_start

    @torch.no_grad()
    def reset(self) -> None:
        """Return to the start; the device's gain and shift are still taken into account."""
        device = {name: self.model.get_buffer(name).clone() for name in ("device_gain", "device_shift")}
        self.model.load_state_dict(self._start | device)
        self.teacher.load_state_dict(self._start | device)
        self._begin()
        self.resets, self._since_reset = self.resets + 1, 0

    @torch.no_grad()
    def update(self, edge: str) -> bytes:
        """The message that moves the affine at the cut to the device, as far as a guard allows: the gain up to 1.

        What of the gain is above 1 stays in the cloud. Without `descent` there is nothing to move, and it is refused. `edge` is
        the digest of the edge (`digest_of_edge`). Attack the edge again before you send it (`attack_again`), and `confirm` it
        once the devices have it.
        """
        if not self.config.descent:
            raise UserError("adaptation: descent is off, so that nothing was learnt at the cut; there is nothing to send")
        gain = self.model.gain.clamp(max=1.0)
        self.number += 1
        return write(Update(gain.cpu(), (self.model.shift * gain / self.model.gain).cpu(), self.number, edge))

    @torch.no_grad()
    def confirm(self, message: bytes, sigma: float) -> None:
        """Call this when devices have taken this message: z comes from them from here on. `sigma` is that of the channel's noise.

        What was kept before is of another gain and is overwritten. A server that starts anew confirms the last message that
        devices took: its next one is numbered after that, and they refuse any that is not newer.
        """
        if not sigma > 0:
            raise UserError(f"adaptation: sigma is {sigma}, must be above 0: that of the channel's noise")
        update = read(message)
        self.number = max(self.number, update.number)
        self.replay.clear()
        self.model.device_gain.copy_(update.gain)
        self.model.device_shift.copy_(update.shift)
        self._teach()
        self.reference = weakened(self._at_release, self.model.device_gain, self.model.device_shift, sigma, self._random)
        self.sizes = usual_sizes(self.reference)
