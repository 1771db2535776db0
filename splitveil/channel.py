"""Channel: the defences between edge and cloud, in order. Training, attack, evaluation and serving use the same object."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from splitveil.defences import AttackHints, Batch, Defence
from splitveil.defences.shared.proxy import Proxy
from splitveil.noise import AHEAD, OnlySecret
from splitveil.registry import UserError
from splitveil.split_model import SplitModel


class NoisePlace(NamedTuple):
    """A place in a stack of defences where Gaussian noise is added."""

    first: int  # which defence adds it; the noises of others behind it may be joined to this one
    sigma: float  # standard deviation of all that is added here
    bounds: bool  # True if no defence behind it reads x, so that this noise bounds what is sent
    exact: bool = False  # True if the bound covers floating point arithmetic


class Noisy(NamedTuple):
    """A Gaussian noise and what it was added to.

    Whatever is sent is a function of clean + N(0, sigma^2 I), so a bound on what this sum tells holds for what is sent.
    """

    clean: Tensor  # [b, *z_shape]
    sigma: float
    exact: bool = False  # True if this is so on a computer, and not of real numbers only


def noise_places(stack: Sequence[Defence]) -> list[NoisePlace]:
    """The places where Gaussian noise is added, with its size. Noises count as one if nothing changes z between them."""
    places, untouched = list[NoisePlace](), False  # untouched: nothing has changed z since the last noise
    for i, defence in enumerate(stack):
        if defence.reads_x:
            places, untouched = [place._replace(bounds=False) for place in places], False
        if defence.noise_std is not None:
            if untouched and not defence.changes_before_noise:
                before = places.pop()
                places.append(before._replace(sigma=(before.sigma**2 + defence.noise_std**2) ** 0.5, exact=False))
            else:
                places.append(NoisePlace(i, defence.noise_std, True, defence.noise_is_exact))
            untouched = True
        elif type(defence).send is not Defence.send:
            untouched = False
    return places


class Channel(nn.Module):
    """A stack of defences; `send` gives what leaves the device.

    A generator is for experiments, which its seed repeats. Without one the noise is secret (splitveil/noise.py), and after
    `serve` a generator is refused.
    """

    in_service = False
    """True once `serve` was called."""

    def __init__(self, defences: Iterable[Defence] = ()) -> None:
        super().__init__()
        self.defences = nn.ModuleList(defences)

    def rebuild(self, model: SplitModel) -> SplitModel:
        """Let each defence change the model, and return it. A stack that makes no sense is refused."""
        for defence in self._stack():
            defence.check(self._stack())
            model = defence.rebuild(model)
        for defence in self._stack():
            defence.attach(model)
        return model

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        with self._service(generator):
            sent = z
            for defence in self._stack():
                sent = defence.send(sent, x, generator)
        # The cloud may start with an in-place layer; writing into z would corrupt the edge's gradient and CEM's statistics.
        return sent.clone() if sent is z else sent

    def walk(self, z: Tensor, x: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, list[Noisy]]:
        """What `send` gives, and what each Gaussian noise that bounds it was added to.

        For each of them I(x; z' | y) <= 1/2 log det(I + Cov(clean | y) / sigma^2): what changes z before the noise is part of
        `clean`, and what changes it afterwards can only lose information, unless it reads x.
        """
        sent, found = z, list[Noisy]()
        places = {place.first: place for place in noise_places(self._stack()) if place.bounds}
        with self._service(generator):
            for i, defence in enumerate(self._stack()):
                if i in places:
                    found.append(Noisy(defence.clean(sent, x), places[i].sigma, places[i].exact))
                sent = defence.send(sent, x, generator)
        return sent.clone() if sent is z else sent, found

    @property
    def noise_std(self) -> float | None:
        """Sigma of the first Gaussian noise that bounds what is sent, the one next to z; None if there is none. CEM uses it."""
        return next((place.sigma for place in noise_places(self._stack()) if place.bounds), None)

    @property
    def total_noise_std(self) -> float | None:
        """Standard deviation of all Gaussian noise together, as it spreads what is sent; None if there is none."""
        sigmas = [place.sigma for place in noise_places(self._stack())]
        return sum(sigma**2 for sigma in sigmas) ** 0.5 if sigmas else None

    def penalties(self, batch: Batch) -> list[Tensor]:
        terms = [defence.penalty(batch) for defence in self._stack()]
        return [term for term in terms if term is not None]

    def inner_step(self, batch: Batch) -> None:
        for defence in self._stack():
            defence.inner_step(batch)

    @property
    def warm_start(self) -> int:
        """The most passes over the attacker's images that a defence wants before the first epoch."""
        return max((defence.warm_start for defence in self._stack()), default=0)

    def warm_step(self, batch: Batch, number: int) -> None:
        """Make a step of pass `number` (from 0) of the warm start with the defences that want more than `number` passes."""
        for defence in self._stack():
            if number < defence.warm_start:
                defence.inner_step(batch)

    def on_epoch(self, epoch: int, model: SplitModel) -> bool:
        """Tell the defences that an epoch begins. True if one of them has replaced parameters of the model."""
        changed = [defence.on_epoch(epoch, model) for defence in self._stack()]  # all are asked, also after a yes
        return any(changed)

    def reshape(self, model: SplitModel, state: Mapping[str, Tensor]) -> None:
        for i, defence in enumerate(self._stack()):
            prefix = f"defences.{i}."
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            defence.reshape(model, own)

    def deploy(self) -> None:
        """Call this when training is over. Attacks and evaluation go on from here, with generators; a device calls `serve`."""
        for defence in self._stack():
            defence.deploy()

    def without_secrets(self) -> "Channel":
        """What an attacker knows of it who was told everything but secrets: the same defences, of which some know less."""
        found = Channel(defence.without_secrets() for defence in self._stack())
        found.training = self.training
        return found

    def serve(self) -> Self:
        """Put the channel into service: deploy it, and from here on send only noise that nobody can predict."""
        self.deploy()
        self.in_service = True
        AHEAD.start()
        return self

    def _service(self, generator: torch.Generator | None) -> AbstractContextManager[Any]:
        """In service, refuse a generator, and whatever draws from torch's own generator."""
        if not self.in_service:
            return nullcontext()
        if generator is not None:
            raise UserError(
                "this channel is in service and was given a generator, whose noise can be predicted; send without one"
            )
        return OnlySecret()

    def reports(self) -> list[dict[str, Any]]:
        return [defence.report() for defence in self._stack()]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimisers of the proxy decoders, in the order of the stack. Their state is part of a checkpoint."""
        return [proxy.optimizer for proxy in self._proxies()]

    def task_parameters(self) -> list[nn.Parameter]:
        """Parameters that the task loss trains: all that want a gradient, except the proxies', which train themselves."""
        own = {parameter for proxy in self._proxies() for parameter in proxy.parameters()}
        return [parameter for parameter in self.parameters() if parameter.requires_grad and parameter not in own]

    @property
    def bounds_z(self) -> bool:
        """True if a defence bounds z to (0, 1)."""
        return any(defence.bounds_z for defence in self._stack())

    @property
    def hints(self) -> tuple[AttackHints, ...]:
        return tuple(defence.attack_hints for defence in self._stack())

    def _stack(self) -> list[Defence]:
        return list(self.defences)  # type: ignore[arg-type]

    def _proxies(self) -> list[Proxy]:
        return [module for module in self.modules() if isinstance(module, Proxy)]
