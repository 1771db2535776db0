"""shredder: a learned library of noise tensors behind a frozen edge (Shredder, Mireshghallah et al., ASPLOS 2020)

    z'      = z + n_k              k uniform in 1 … K, drawn anew for every image and release
    penalty = -keep * 1/K sum_k |n_k|_1                      keeps the noise large, while the task loss makes it harmless

    z [b, *z_shape] what the edge made     n [K, *z_shape] the library, at first Laplace noise of standard deviation `scale`

Until epoch `freeze_after` edge and cloud learn the task under the library as it was drawn. From then on the edge is frozen
(weights and BatchNorm statistics), and the library and the cloud are trained on the task loss.

Where we deviate: in the paper the whole network is pre-trained without noise and stays as it is, and each tensor of the library
is learned on its own ("self-supervised"), with a `keep` that is lowered once the noise-to-signal ratio is reached. Here one run
does it all: the tensors learn together and from the labels, the cloud goes on learning, and `keep` is constant. The task's weight
decay acts on the library too: an entry that the task does not need settles at |n| = keep / (K * weight decay).

Known failure: K tensors hide at most log2 K bits a release, 4.3 at K = 20: whoever knows the library, or learns it from queries,
can try them all. Two releases of one x differ by n_j - n_k, which tells both. No rate bound holds (`noise_std` is None). Once the
edge is frozen, CEM cannot change z any more; those steps are counted as inactive.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitveil.defences import AttackHints, Batch, Defence
from splitveil.noise import below
from splitveil.options import option
from splitveil.registry import DEFENCES
from splitveil.split_model import SplitModel


@dataclass(frozen=True)
class Config:
    tensors: int = option(20, at_least=2, remedy="one alone is a constant shift")
    """K, the number of noise tensors in the library."""
    scale: float = option(1.0, above=0, remedy="about the spread of z is a good start")
    """Standard deviation of the noise that they start from, in units of z."""
    keep: float = option(0.01, at_least=0)
    """Weight of the mean L1 norm of the tensors, which is raised."""
    freeze_after: int = option(10, at_least=0)
    """Epochs in which edge and cloud learn, before the edge is frozen and the library learns."""


def laplace(shape: tuple[int, ...], std: float) -> Tensor:
    """Laplace noise with this standard deviation, the difference of two exponential variables. From torch's own generator, which
    building a run seeds: these are weights.
    """
    first, second = (torch.empty(shape).exponential_() for _ in range(2))
    return std / 2**0.5 * (first - second)


def add_one_of(z: Tensor, library: Tensor, generator: torch.Generator | None) -> Tensor:
    """Each image gets one of the K tensors, at random."""
    k = below(len(library), len(z), z.device, generator)
    return z + library[k].to(z.dtype)


def mean_norm(library: Tensor) -> Tensor:
    """1/K sum_k |n_k|_1, [K, ...] -> ()."""
    return library.abs().flatten(1).sum(1).mean()


def freeze(edge: nn.Module) -> None:
    """Freeze the edge: its weights get no gradient, and BatchNorm keeps its statistics, also in train()."""
    edge.requires_grad_(False)
    for module in edge.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.0


@DEFENCES.register("shredder", Config)
class Shredder(Defence[Config]):
    """Adds one of a library of learned noise tensors, behind an edge that is frozen during training."""

    frozen: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.register_buffer("frozen", torch.zeros((), dtype=torch.uint8))
        self.library = nn.Parameter(torch.empty(0), requires_grad=False)

    @property
    def learns(self) -> bool:
        """True once the edge is frozen. Unlike the buffer `frozen` it can be asked without waiting for the device."""
        return self.library.requires_grad

    def attach(self, model: SplitModel) -> None:
        like = next(model.parameters(), torch.empty(0))
        noise = laplace((self.config.tensors, *model.z_shape), self.config.scale)
        self.library = nn.Parameter(noise.to(like), requires_grad=False)

    def on_epoch(self, epoch: int, model: SplitModel) -> bool:
        if self.learns or epoch < self.config.freeze_after:
            return False
        self._freeze(model)
        return True

    def reshape(self, model: SplitModel, state: Mapping[str, Tensor]) -> None:
        if state.get("frozen"):
            self._freeze(model)

    def _freeze(self, model: SplitModel) -> None:
        freeze(model.edge)
        self.library.requires_grad_(True)
        self.frozen.fill_(1)

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return add_one_of(z, self.library, generator)

    def penalty(self, batch: Batch) -> Tensor | None:
        return -self.config.keep * mean_norm(self.library) if self.learns else None

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(random=True, side_information={"library": self.library.detach()})
