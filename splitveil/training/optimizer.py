"""The optimiser of edge and cloud: SGD for all parameters, or Muon for the inner matrices and SGD for the rest.

Muon moves a matrix equally far in all directions, those in which the gradient is small and those in which it is large
(`splitveil.compute.muon`). So it needs fewer epochs than SGD. The last layer, whose rows are the classes, stays with
SGD, as do biases, gains, parameters of defences, convolutions in groups, and matrices with a short side (the bottleneck at the
cut).
"""

from typing import Any

import torch
from torch import Tensor, nn

from splitveil.compute.cuda_graph import lr_on, set_lr
from splitveil.compute.muon import SHORTEST, Muon, matrices_of
from splitveil.config import TrainConfig
from splitveil.options import UserError
from splitveil.training.build import Parts
from splitveil.training.checkpoint import below, restore_optimizer


def inner_matrices(parts: Parts) -> list[Tensor]:
    """Matrices of edge and cloud that Muon may train."""
    both = nn.ModuleList([parts.model.edge, parts.model.cloud])
    layers = [layer for layer in both.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    heads = {id(layer.weight) for layer in layers[-1:]}
    return [matrix for matrix in matrices_of(both) if id(matrix) not in heads]


def check_muon(parts: Parts, config: TrainConfig) -> None:
    """Refuse Muon where there is no matrix that it may train. Called before a run's folder is made."""
    if config.muon and not inner_matrices(parts):
        raise UserError(f"train.muon is {config.muon}, but no matrix here has two sides of {SHORTEST} or more; leave it out")


class TaskOptimizer:
    """SGD over the parameters that the task trains, with Muon for the matrices among them where `train.muon` gives its rate."""

    def __init__(self, parts: Parts, config: TrainConfig) -> None:
        device = next(parts.model.parameters()).device
        # None may be left when a defence has frozen or cut them late in a training.
        matrices = [matrix for matrix in inner_matrices(parts) if matrix.requires_grad] if config.muon else []
        taken = {id(matrix) for matrix in matrices}
        self.parameters = [p for p in (*parts.model.parameters(), *parts.channel.task_parameters()) if p.requires_grad]
        by_sgd = [p for p in self.parameters if id(p) not in taken]
        groups: list[Any] = by_sgd
        if config.edge_weight_decay is not None:
            edge = {id(p) for p in parts.model.edge.parameters()}  # these come first, so that saved states fit in both cases
            groups = [{"params": [p for p in by_sgd if id(p) in edge], "weight_decay": config.edge_weight_decay}]
            groups += [{"params": [p for p in by_sgd if id(p) not in edge]}]
        self.sgd = torch.optim.SGD(
            groups, lr_on(device, config.lr), config.momentum, weight_decay=config.weight_decay, nesterov=config.nesterov,
            fused=True if device.type == "cuda" else None,
        )  # fmt: skip
        self.muon = Muon(matrices, lr_on(device, config.muon)) if matrices else None
        self.muon_share = config.muon / config.lr

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        self.sgd.step()
        if self.muon is not None:
            self.muon.step()

    def set_lr(self, lr: float) -> None:
        """Set SGD's rate; Muon's rises and falls with it."""
        set_lr(self.sgd, lr)
        if self.muon is not None:
            set_lr(self.muon, self.muon_share * lr)

    def state(self) -> dict[str, Any]:
        muon = {} if self.muon is None else {"muon": self.muon.state_dict()["state"]}
        return {"optimizer": self.sgd.state_dict()["state"]} | muon

    def restore(self, leaves: dict[str, Any]) -> None:
        """Go on from what `state` gave, as a checkpoint has it."""
        restore_optimizer(self.sgd, below(leaves, "optimizer"))
        if self.muon is not None:
            restore_optimizer(self.muon, below(leaves, "muon"))
