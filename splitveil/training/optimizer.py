"""What trains edge and cloud: SGD for all of it, or Muon for the matrices inside and SGD for the rest.

Muon moves a matrix as far in directions of which the gradient tells little as in those of which it tells much
(`splitveil.compute.muon`), so that few epochs do what SGD takes many for. The last linear layer, whose rows are the classes,
stays with SGD, as do biases, gains, parameters of defences and matrices with a short side (the bottleneck at the cut).
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
    layers = [layer for layer in parts.model.cloud.modules() if isinstance(layer, nn.Linear)]
    heads = {id(layer.weight) for layer in layers[-1:]}
    matrices = matrices_of(parts.model.edge) + matrices_of(parts.model.cloud)
    return [matrix for matrix in matrices if matrix.requires_grad and id(matrix) not in heads]


def check_muon(parts: Parts, config: TrainConfig) -> None:
    """Refuse Muon where there is nothing that it may train."""
    if config.muon and not inner_matrices(parts):
        raise UserError(f"train.muon is {config.muon}, but no matrix here has two sides of {SHORTEST} or more; leave it out")


class TaskOptimizer:
    """SGD over the parameters that the task trains, with Muon for the matrices among them where `train.muon` gives its rate."""

    def __init__(self, parts: Parts, config: TrainConfig) -> None:
        device = next(parts.model.parameters()).device
        check_muon(parts, config)
        matrices = inner_matrices(parts) if config.muon else []
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
