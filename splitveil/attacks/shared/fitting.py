"""What attacks that train are made of: held-out images, an Adam with a falling rate, and a loop that a GPU can replay.

    learner = Learner(net.parameters(), lr)

    def step() -> Tensor:                                          # losses, [] or [terms]
        loss = …
        learner.step(loss)
        return loss

    (losses,) = train(step, [100] * 20, device, [generator], before=lambda part: learner.slow(part / 20))

On a GPU a launch replays several steps that were recorded as one CUDA graph (`splitveil.compute.launch`). So a step must not wait
for the device, and its random numbers must come from the given generators or from torch's own. Between two parts the host may do
anything; losses stay on the device and are read once, at the end.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from math import cos, gcd, pi, prod

import torch
from torch import Tensor, nn

from splitveil.compute.cuda_graph import lr_on, set_lr
from splitveil.compute.launch import Repeated, one_by_one
from splitveil.compute.muon import Muon
from splitveil.data.loader import LARGE, DeviceImages, Feed, Rows
from splitveil.rng import stream

COPIED = 2**30
"""A part of images is copied if all have at most so many bytes; its batches are then a little faster."""
FIRST = 0.1
"""Share of its rate with which a learner begins that has to warm up."""
IN_A_LAYER = 2**25
"""Numbers that one layer holds for the images of a step, at most (128 MiB)."""
POINTS = 50
"""A training without epochs reports at most so many means of its loss."""


def which_out(count: int, of: int, device: torch.device) -> Tensor:
    """Which `count` of `of` images are held out, at least one: [of] bool. Drawn at random, as every tenth may be of one class."""
    order = torch.randperm(of, generator=stream("cpu", 0, "held out"))
    return (order < max(1, count)).to(device)


def thinned(images: DeviceImages, most: int) -> DeviceImages:
    """At most `most` of the images, at equal distances; 0 keeps all."""
    if not 0 < most < len(images):
        return images
    return Rows(images, torch.arange(most, device=images.device) * len(images) // most)


def held_out(images: DeviceImages, count: int) -> tuple[DeviceImages, DeviceImages]:
    """All images but `count`, and those `count`; if there is only one image, it is in both."""
    out = which_out(count, len(images), images.device)
    kept = ~out if len(images) > 1 else out
    if isinstance(images, Rows) or images.numbers * len(images) > COPIED:
        return Rows(images, kept.nonzero().squeeze(1)), Rows(images, out.nonzero().squeeze(1))
    parts = copy.copy(images), copy.copy(images)
    for part, chosen in zip(parts, (kept, out)):
        part.images, part.labels = images.images[chosen], images.labels[chosen]
    return parts


def step_size(batch: int, x_shape: Sequence[int], width: int) -> int:
    """Images a step: the batch that was asked for, or of large images as many as a layer of this width may hold at full size."""
    if prod(x_shape) <= LARGE:
        return batch
    return max(2, min(batch, IN_A_LAYER // (width * prod(x_shape[1:]))))


class Watch:
    """Notes the error of a network on held-out images after every epoch, and keeps the weights with the least error.

    The training error falls for as long as the network can learn its images by heart; the held-out error says whether a longer
    training would help. Nothing here waits for the device.
    """

    def __init__(self, net: nn.Module, error: Callable[[], Tensor], epochs: int) -> None:
        self.net, self.error = net, error
        self.live = [value for value in net.state_dict().values() if value.is_floating_point()]
        self.best = [value.clone() for value in self.live]
        self.errors = torch.full((epochs,), torch.inf, device=self.live[0].device)

    @torch.no_grad()
    def look(self, epoch: int) -> None:
        self.net.eval()
        error = self.error()
        self.net.train()
        better = error < self.errors.nan_to_num(nan=torch.inf).amin()
        self.errors[epoch] = error
        for best, live in zip(self.best, self.live):
            best.copy_(torch.where(better, live, best))

    def put(self) -> list[float]:
        """Put the best weights into the network and return the errors."""
        for live, best in zip(self.live, self.best):
            live.copy_(best)
        return self.errors.tolist()


class Learner:
    """Parameters and their Adam. `step` changes only these, whatever other parameters the loss depends on."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, weight_decay: float = 0.0, amsgrad: bool = False, eps: float = 1e-8,
        beta1: float = 0.9, *, decoupled: bool = False, clip: float = 0.0, warm: float = 0.0,
        matrices: Sequence[Tensor] = (), matrix_lr: float = 0.0, matrix_decay: float = 0.01,
    ) -> None:  # fmt: skip
        """`decoupled`: weight decay as in AdamW; `clip`: most norm of all gradients that Adam gets; `warm`: share of the training
        in which the rate rises; `matrices`: those of the parameters that Muon trains instead, with weight decay `matrix_decay`,
        at `matrix_lr`, which rises and falls as Adam's rate does. None of them if not given."""
        self.parameters, self.lr, self.clip, self.warm, self.matrix_lr = list(parameters), lr, clip, warm, matrix_lr
        taken = {id(matrix) for matrix in matrices}
        self.by_adam = [parameter for parameter in self.parameters if id(parameter) not in taken]
        self.adam: torch.optim.Adam | None = None
        self.muon: Muon | None = None
        if self.by_adam:  # an edge may have none
            device = self.by_adam[0].device
            on_gpu = device.type == "cuda"
            self.adam = torch.optim.Adam(
                self.by_adam, lr_on(device, lr), (beta1, 0.999), eps, weight_decay, amsgrad,
                capturable=on_gpu, fused=on_gpu, decoupled_weight_decay=decoupled,
            )  # fmt: skip
        if matrices:
            self.muon = Muon(matrices, lr_on(matrices[0].device, matrix_lr), weight_decay=matrix_decay)

    def step(self, loss: Tensor) -> None:
        if not self.parameters:
            return
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward(inputs=self.parameters)  # no gradients for edge, cloud and channel: they are the victim's
        if self.clip and self.by_adam:
            nn.utils.clip_grad_norm_(self.by_adam, self.clip)
        for optimizer in (self.adam, self.muon):
            if optimizer is not None:
                optimizer.step()

    def set_lr(self, lr: float) -> None:
        if self.adam is not None:
            set_lr(self.adam, lr)
        if self.muon is not None:
            set_lr(self.muon, self.matrix_lr * lr / self.lr)

    def slow(self, share: float, last: float = 1e-5) -> None:
        """Set the rate for this share of the training: half a cosine from the first to `last` (1e-5 as in CEM's code)."""
        last = min(last, self.lr)
        risen = min(1.0, max(share / self.warm, FIRST)) if self.warm else 1.0
        self.set_lr(risen * (last + (self.lr - last) * 0.5 * (1 + cos(pi * share))))


class OnePartAhead:
    """Lets the host run one part ahead of the device and no more: the device never waits, and progress is nearly true."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.last = device, None

    def __call__(self) -> None:
        if self.device.type == "cuda":
            before, self.last = self.last, torch.cuda.current_stream(self.device).record_event()
            if before is not None:
                before.synchronize()


def train(
    step: Callable[[], Tensor], counts: Sequence[int], device: torch.device, generators: Iterable[torch.Generator] = (),
    before: Callable[[int], None] = lambda part: None, tell: Callable[[int, int], None] = lambda done, total: None,
    terms: int = 1, after: Callable[[int], None] = lambda part: None,
) -> list[list[float]]:  # fmt: skip
    """Train in parts of `counts` steps each; the mean of each of the step's losses over each part.

    The host may set rates `before` a part and look at the network `after` it; both get the part's number.
    """
    parts, together = len(counts), gcd(*counts)
    history, part = torch.zeros(parts, terms, device=device), torch.zeros(1, dtype=torch.int64, device=device)

    def body() -> None:
        history.index_add_(0, part, step().detach().reshape(1, terms))

    calls, wait = sum(counts) // together, OnePartAhead(device)
    steps = Repeated(one_by_one(body), together, device, generators, calls=calls)
    for done, count in enumerate(counts):
        before(done)
        part.fill_(done)
        for _ in range(count // together):
            steps()
        after(done)
        wait()
        tell(done + 1, parts)
    return [[total / count for total, count in zip(totals, counts)] for totals in history.T.tolist()]


def points(steps: int) -> list[int]:
    """Divide a training into at most POINTS parts, as equal as possible; the steps of each."""
    parts = min(POINTS, steps)
    return [(part + 1) * steps // parts - part * steps // parts for part in range(parts)]


def train_in_epochs(
    step: Callable[[], Tensor], feed: Feed, learners: Sequence[Learner], epochs: int, seed: int,
    generators: Iterable[torch.Generator], tell: Callable[[int, int], None], after: Callable[[int], None] = lambda epoch: None,
) -> list[float]:  # fmt: skip
    """Train with steps that each take a batch from the feed, at rates that fall to 1e-5; the mean loss of each epoch."""

    def before(epoch: int) -> None:
        feed.begin(seed, epoch)
        for learner in learners:
            learner.slow(epoch / epochs)

    (losses,) = train(step, [feed.steps] * epochs, feed.images.device, generators, before, tell, after=after)
    return losses
