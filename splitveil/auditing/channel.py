"""The channel of an audit, from what a user has: a Channel, defences as objects, or their names and options."""

import copy
from typing import Any

from splitveil.channel import Channel
from splitveil.defences import Defence, name_of
from splitveil.registry import DEFENCES, UserError
from splitveil.split_model import SplitModel


def channel_of(given: Any, model: SplitModel) -> Channel:
    """The channel between edge and cloud, ready to send. What was given is copied and not changed."""
    if isinstance(given, Channel):
        channel = copy.deepcopy(given)
        channel.in_service = False  # attacks repeat its noise by generators
    else:
        items = [given] if isinstance(given, str | dict | Defence) else list(given or ())
        channel = Channel(made(item) for item in items)
        stack: list[Defence] = list(channel.defences)  # type: ignore[arg-type]
        for defence, item in zip(stack, items):
            defence.check(stack)
            prepare(defence, isinstance(item, Defence), model)
    channel.deploy()
    return channel.eval()


def made(item: Any) -> Defence:
    if isinstance(item, Defence):
        return copy.deepcopy(item)
    if isinstance(item, str):
        return DEFENCES[item].make()
    if isinstance(item, dict) and isinstance(item.get("name"), str):
        options = {name: value for name, value in item.items() if name != "name"}
        return DEFENCES[item["name"]].make(**options)
    raise UserError(
        f"channel holds {item!r}, must hold defences: objects, names, or tables such as {{'name': 'gaussian', 'sigma': 0.1}}"
    )


def prepare(defence: Defence, trained: bool, model: SplitModel) -> None:
    """Let a defence see the shape of z. A defence that must learn is refused unless it was given as a trained object."""
    name, learned = name_of(defence), any(True for _ in defence.parameters())
    if trained and learned:
        return
    if not trained and type(defence).rebuild is not Defence.rebuild:
        raise UserError(f"{name} changes the network and is trained with it; audit the network that has it, without {name} here")
    defence.attach(model)
    if not trained and any(True for _ in defence.parameters()):
        raise UserError(f"{name} has to be trained with the network; give the trained defence itself, not its name")


def names_of(channel: Channel) -> tuple[str, ...]:
    return tuple(name_of(defence) for defence in channel.defences)
