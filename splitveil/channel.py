"""Channel: the defences between edge and cloud, in order. The same object in training, attack, evaluation and serving."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitveil.defences import AttackHints, Batch, Defence
from splitveil.registry import UserError
from splitveil.split_model import SplitModel


class Noisy(NamedTuple):
    """Gaussian noise on the way: all that is sent of x comes from clean + N(0, sigma^2 I), so what bounds this bounds that."""

    clean: Tensor  # [b, *z_shape]
    sigma: float


class Channel(nn.Module):
    """A stack of defences; `send` is what leaves the device."""

    def __init__(self, defences: Iterable[Defence] = ()) -> None:
        super().__init__()
        self.defences = nn.ModuleList(defences)

    def rebuild(self, model: SplitModel) -> SplitModel:
        """The model as the defences want it; a stack that makes no sense is refused."""
        makers = [type(defence).__name__.lower() for defence in self._stack() if defence.makes_z]
        if len(makers) > 1:
            raise UserError(f"{' and '.join(makers)} both decide what z is at this cut; keep one of them")
        for defence in self._stack():
            defence.check(self._stack())
            model = defence.rebuild(model)
        for defence in self._stack():
            defence.attach(model)
        return model

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        sent = z
        for defence in self._stack():
            sent = defence.send(sent, x, generator)
        # The cloud may start with an in-place layer; writing into z would corrupt the edge's gradient and CEM's statistics.
        return sent.clone() if sent is z else sent

    def walk(self, z: Tensor, x: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, list[Noisy]]:
        """What `send` gives, and the places where Gaussian noise came in.

        For each of them I(x; z' | y) <= 1/2 log det(I + Cov(clean | y) / sigma^2): what changes z before the noise is part of
        `clean`, and what changes it behind can only lose information, unless it looks at x; then the noise before it bounds
        nothing. Noises that follow each other are one.
        """
        sent, places = z, list[Noisy]()
        untouched = False  # since the last noise
        for defence in self._stack():
            if defence.reads_x:
                places, untouched = [], False
            if defence.noise_std is not None:
                if untouched and type(defence).clean is Defence.clean:
                    clean, sigma = places.pop()
                    places.append(Noisy(clean, (sigma**2 + defence.noise_std**2) ** 0.5))
                else:
                    places.append(Noisy(defence.clean(sent, x), defence.noise_std))
                untouched = True
            elif type(defence).send is not Defence.send:
                untouched = False
            sent = defence.send(sent, x, generator)
        return sent.clone() if sent is z else sent, places

    def penalties(self, batch: Batch) -> list[Tensor]:
        terms = [defence.penalty(batch) for defence in self._stack()]
        return [term for term in terms if term is not None]

    def inner_step(self, batch: Batch) -> None:
        for defence in self._stack():
            defence.inner_step(batch)

    def on_epoch(self, epoch: int, model: SplitModel) -> bool:
        """Whether parameters of the model have been replaced."""
        changed = [defence.on_epoch(epoch, model) for defence in self._stack()]  # all of them, also after a yes
        return any(changed)

    def reshape(self, model: SplitModel, state: Mapping[str, Tensor]) -> None:
        for i, defence in enumerate(self._stack()):
            prefix = f"defences.{i}."
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            defence.reshape(model, own)

    def deploy(self) -> None:
        for defence in self._stack():
            defence.deploy()

    def reports(self) -> list[dict[str, Any]]:
        return [defence.report() for defence in self._stack()]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for defence in self._stack() for optimizer in defence.optimizers()]

    def task_parameters(self) -> list[nn.Parameter]:
        return [parameter for defence in self._stack() for parameter in defence.task_parameters()]

    @property
    def noise_std(self) -> float | None:
        """Standard deviation of all Gaussian noise on the way: the one source of sigma; None without Gaussian noise."""
        variances = [d.noise_std**2 for d in self._stack() if d.noise_std is not None]
        return sum(variances) ** 0.5 if variances else None

    @property
    def bounds_z(self) -> bool:
        """True if a defence bounds z to (0, 1)."""
        return any(defence.bounds_z for defence in self._stack())

    @property
    def hints(self) -> tuple[AttackHints, ...]:
        return tuple(defence.attack_hints for defence in self._stack())

    def _stack(self) -> list[Defence]:
        return list(self.defences)  # type: ignore[arg-type]
