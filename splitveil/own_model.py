"""A user's own network: what pkg.module:function gives, and weights to put into it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from splitveil.files.folder import read_tensors
from splitveil.files.foreign import open_file
from splitveil.own_code import load_object
from splitveil.registry import UserError, told


def model_from(where: str) -> nn.Module:
    """The nn.Module that `pkg.module:name` is, or that it returns when it is called without arguments."""
    found = load_object(where)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise UserError(f"{where} is a {type(found).__name__}, must be a function that returns an nn.Module")
    try:
        module = found()
    except Exception as error:
        raise UserError(f"{where}() fails: {told(error)}; it is called without arguments") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"{where}() returns a {type(module).__name__}, must return an nn.Module")
    return module


def load_weights(module: nn.Module, path: Path, rename: Callable[[str], str | None] = str) -> None:
    """Put weights into a network: a .safetensors file, or a state dict that torch.load reads without unpickling objects.

    The path may be a link, as in the cache of a hub. A weight whose new name is None is left out.
    """
    if path.suffix == ".safetensors":
        state: Any = read_tensors(path.resolve())[0]
    else:
        with open_file(path) as stream:
            try:
                state = torch.load(stream, "cpu", weights_only=True)
            except Exception as error:  # there is nothing that a made-up file cannot raise
                raise UserError(f"--weights: {path} is no state dict of tensors alone ({type(error).__name__})") from None
    try:
        named = {rename(name): tensor for name, tensor in state.get("state_dict", state).items()}
        module.load_state_dict({name: tensor for name, tensor in named.items() if name is not None})
    except (RuntimeError, AttributeError, TypeError) as error:
        what = " ".join(str(error).split())[:300]
        raise UserError(f"--weights: {path} does not fit the model ({what})") from None
