"""shredder: a learned library of noise tensors behind a frozen edge (Shredder, Mireshghallah et al., ASPLOS 2020)

    z'      = z + n_k              k uniform in 1 … K, drawn anew for every image and release
    penalty = -keep * 1/K sum_k |n_k|_1                      the task loss makes the noise harmless, this keeps it large

    z [b, *z_shape] what the edge made     n [K, *z_shape] the library, at first Laplace noise of standard deviation `scale`

Until epoch `freeze_after` edge and cloud learn the task with the library in place, as it was drawn. From then on the edge is
frozen (weights and BatchNorm statistics) and the library and the cloud are trained on the task loss.

Where we deviate: in the paper the whole network is pre-trained without noise and stays as it is, and each tensor of the library
is learned alone and apart ("self-supervised"), its `keep` lowered once the noise-to-signal ratio is reached. Here one run does
it all: all tensors learn together, on the labels, the cloud goes on learning, and `keep` is constant. The task's weight decay
acts on the library too: an entry that the task does not care for settles at |n| = keep / (K * weight decay).

Known failure: K tensors hide at most log2 K bits a release, 4.3 at K = 20: whoever knows the library, or learns it from queries,
can try them all. Two releases of one x differ by n_j - n_k and tell both. No rate bound holds (`noise_std` is None). CEM has
nobody to talk to once the edge is frozen; those steps are counted as inactive.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitveil.defences import AttackHints, Batch, Defence
from splitveil.defences.local_dp import add_laplace
from splitveil.registry import DEFENCES, UserError
from splitveil.split_model import SplitModel


@dataclass(frozen=True)
class Config:
    tensors: int = 20
    """K, noise tensors in the library; at least 2."""
    scale: float = 1.0
    """Standard deviation of the noise that they start from, in units of z; above 0."""
    keep: float = 0.01
    """Weight of the mean L1 norm of the tensors, which is raised; 0 or more."""
    freeze_after: int = 10
    """Epochs that edge and cloud learn before the edge is frozen and the library learns; 0 or more."""


def laplace(shape: tuple[int, ...], std: float) -> Tensor:
    """Laplace noise with this standard deviation."""
    return add_laplace(torch.zeros(shape), std / 2**0.5, None)


def add_one_of(z: Tensor, library: Tensor, generator: torch.Generator | None) -> Tensor:
    """Each image gets one of the K tensors, at random."""
    k = torch.randint(len(library), (len(z),), generator=generator, device=z.device)
    return z + library[k].to(z.dtype)


def mean_norm(library: Tensor) -> Tensor:
    """1/K sum_k |n_k|_1, [K, ...] -> ()."""
    return library.abs().flatten(1).sum(1).mean()


def freeze(edge: nn.Module) -> None:
    """No gradient for its weights, and BatchNorm keeps the statistics that it has, also in train()."""
    edge.requires_grad_(False)
    for module in edge.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.0


@DEFENCES.register("shredder", Config)
class Shredder(Defence):
    """Adds one of a library of learned noise tensors, behind an edge that is frozen half-way."""

    frozen: Tensor

    def __init__(self, tensors: int, scale: float, keep: float, freeze_after: int) -> None:
        super().__init__()
        if tensors < 2:
            raise UserError(f"shredder: tensors is {tensors}, must be at least 2; one alone is a constant shift")
        if not 0 < scale < float("inf"):
            raise UserError(f"shredder: scale is {scale}, must be above 0; about the spread of z is a good start")
        if not 0 <= keep < float("inf"):
            raise UserError(f"shredder: keep is {keep}, must be 0 or more")
        if freeze_after < 0:
            raise UserError(f"shredder: freeze_after is {freeze_after}, must be 0 epochs or more")
        self.tensors, self.scale, self.keep, self.freeze_after = tensors, scale, keep, freeze_after
        self.register_buffer("frozen", torch.zeros((), dtype=torch.uint8))
        self.library = nn.Parameter(torch.empty(0), requires_grad=False)
        self.learns = False  # `frozen` as the host knows it

    def attach(self, model: SplitModel) -> None:
        like = next(model.parameters(), torch.empty(0))
        self.library = nn.Parameter(laplace((self.tensors, *model.z_shape), self.scale).to(like), requires_grad=False)

    def on_epoch(self, epoch: int, model: SplitModel) -> bool:
        if self.learns or epoch < self.freeze_after:
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
        self.learns = True

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return add_one_of(z, self.library, generator)

    def penalty(self, batch: Batch) -> Tensor | None:
        return -self.keep * mean_norm(self.library) if self.learns else None

    def task_parameters(self) -> list[nn.Parameter]:
        return [self.library] if self.learns else []

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(random=True, side_information={"library": self.library.detach()})
