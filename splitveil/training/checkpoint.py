"""What a run saves and how it is restored: weights for attack, evaluate and serve, and all that the next epoch needs."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from splitveil.files.folder import is_there
from splitveil.manifest import intact
from splitveil.progress import warn
from splitveil.registry import UserError
from splitveil.runs import Run
from splitveil.training.average import Average
from splitveil.training.build import Parts


def state_of(parts: Parts, optimizer: dict[str, Any], best: float) -> dict[str, Any]:
    """All that a training needs to go on with its next epoch, including the state of the task's optimiser."""
    tree: dict[str, Any] = {
        "model": parts.model.state_dict(),
        "channel": parts.channel.state_dict(),
        "best": best,
    } | optimizer
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
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for name, value in leaves.items():
        index, _, key = name.partition(".")
        if not index.isdigit() or int(index) >= len(parameters):
            raise UserError(
                f"the state has {name!r} of an optimiser with {len(parameters)} parameters; restore it, or train anew"
            )
        parameter = parameters[int(index)]
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            # Laid out as the parameter is, which fused optimisers insist on.
            value = torch.empty_like(parameter).copy_(value)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def restore(parts: Parts, run: Run) -> tuple[int, float, dict[str, Any]]:
    """Bring everything but the task's optimiser to where it was after the last checkpoint, if there is one.

    Returns the next epoch, the best accuracy so far, and what was saved. A defence may have changed the model's shapes, so the
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
        with refused():
            parts.cem.load_state_dict(below(tensors, "cem"))
        if parts.cem.optimizer is not None:
            restore_optimizer(parts.cem.optimizer, below(leaves, "cem_optimizer"))
    return epoch + 1, others["best"], leaves


def weights_of(parts: Parts) -> dict[str, Tensor]:
    """The tensors that attack, evaluate and serve need: the split model and the channel's state."""
    model = {f"model.{name}": tensor for name, tensor in parts.model.state_dict().items()}
    return model | {f"channel.{name}": tensor for name, tensor in parts.channel.state_dict().items()}


def load_weights(parts: Parts, tensors: dict[str, Tensor]) -> None:
    parts.channel.reshape(parts.model, below(tensors, "channel"))
    with refused():
        parts.model.load_state_dict(below(tensors, "model"))
        parts.channel.load_state_dict(below(tensors, "channel"))


def mend_weights(run: Run, parts: Parts, images: dict[str, Any]) -> None:
    """Write the weights of a finished run again from its state, if they are damaged or missing."""
    path = run.folder / "weights" / "last.safetensors"
    if is_there(path) and intact(run.folder, "weights/last.safetensors"):
        return
    warn(f"{path} is missing or not what manifest.json says; it is written again from the state")
    following, _, leaves = restore(parts, run)
    decay, saved = run.config.train.ema, below(leaves, "average")
    with nullcontext() if decay is None else Average(parts, decay, saved).deployed():
        run.save_weights("last", weights_of(parts), following - 1, images)


@contextmanager
def refused() -> Iterator[None]:
    """Turn torch's complaint about tensors that do not fit into one line for the user."""
    try:
        yield
    except RuntimeError as error:
        what = " ".join(str(error).split())[:200]
        raise UserError(f"the weights are not those of config.toml ({what}…); restore either, or train anew") from None
