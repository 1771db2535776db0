"""Every edge that a device can afford: each model, cut after each of its stages, with a bottleneck of few channels behind it.

A model with an option `budget` is made as wide as the budget allows and is cut where it says itself. Nothing is computed here:
networks are built on the meta device, where a layer has shapes and no numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from splitveil.defences.bottleneck import Bottleneck
from splitveil.defences.bottleneck import Config as BottleneckConfig
from splitveil.designing.budget import Budget
from splitveil.evaluation.where_to_cut import every_stage
from splitveil.metrics.cost import Cost, cost, latency
from splitveil.models import build_model
from splitveil.progress import tell_once
from splitveil.registry import UserError
from splitveil.split_model import SplitModel

CHANNELS = (4, 8, 16)
"""Numbers of channels that a bottleneck may have; the published rows send 8."""


@dataclass(frozen=True)
class Edge:
    """The part of a model that would run on the device."""

    model: Any
    """The config of the model, cut where this edge ends."""
    channels: int
    """Channels of the bottleneck behind the edge."""
    cost: Cost

    @property
    def method(self) -> str:
        return type(self.model).method

    @property
    def name(self) -> str:
        return f"{self.method}-{self.model.cut}-{self.channels}"


def edges_within(budget: Budget, models: Sequence[Any], x_shape: tuple[int, ...], classes: int) -> dict[str, Edge]:
    """The edges of these models that the budget allows, by name; of each model the deepest cut comes first.

    A model that does not take such images is left out, which is told.
    """
    found: dict[str, Edge] = {}
    seen: list[Edge] = []
    for config in models:
        try:
            with torch.device("meta"):
                every = [*edges_of(config, budget, x_shape, classes)]
        except UserError as error:
            tell_once(f"{type(config).method} is left out: {error}")
            continue
        seen += every
        found |= {edge.name: edge for edge in reversed(every) if budget.allows(edge.cost)}
    if not found:
        names = ", ".join(type(config).method for config in models)
        raise UserError(f"no edge of {names} stays within the budget; {least_of(seen)}raise it, or name other --models")
    return found


def least_of(edges: Sequence[Edge]) -> str:
    """What the edge of fewest multiply-adds takes, for somebody whose budget allows none."""
    if not edges:
        return ""
    least = min(edges, key=lambda edge: edge.cost.macs or 0)
    return (
        f"the one of fewest multiply-adds, {least.name}, takes {least.cost.macs:,}, has {least.cost.parameters:,} weights and "
        f"sends {least.cost.bytes // 4:,} numbers; "
    )


def edges_of(config: Any, budget: Budget, x_shape: tuple[int, ...], classes: int) -> Iterator[Edge]:
    """Each edge of a model, from the first cut to the last that can be paid, the usual 8 channels after the others of a cut."""
    order = sorted(CHANNELS, key=lambda channels: channels == BottleneckConfig().channels)
    if has_budget(config):
        yield from filter(None, (fitted(config, channels, budget, x_shape, classes) for channels in order))
        return
    for cut, model in every_stage(build_model(config, x_shape, classes)):
        if cut == "normalise":  # the image itself
            continue
        here = [edge for channels in order if (edge := edge_of(replace(config, cut=cut), model, channels)) is not None]
        yield from here
        if here and not any(replace(budget, numbers=None).allows(edge.cost) for edge in here):
            return  # what comes after it costs more


def fitted(config: Any, channels: int, budget: Budget, x_shape: tuple[int, ...], classes: int) -> Edge | None:
    """The edge of a model that chooses its own width, so wide that it stays within the budget with its bottleneck."""
    if budget.macs is None:
        return edge_of(config, build_model(config, x_shape, classes), channels)
    millions = budget.macs / 1e6
    edge = None
    for _ in range(3):  # first without the bottleneck in mind, then with what it costs taken off
        try:
            config = replace(config, budget=round(millions, 3))
            edge = edge_of(config, build_model(config, x_shape, classes), channels)
        except UserError:  # the narrowest costs more
            return None
        if edge is None or budget.allows(edge.cost):
            return edge
        assert edge.cost.macs is not None
        millions -= (edge.cost.macs - budget.macs) / 1e6 + 1e-3
    return edge


def edge_of(config: Any, model: SplitModel, channels: int) -> Edge | None:
    """The edge of a cut model with a bottleneck of so many channels; None if it has nothing to narrow."""
    if len(model.z_shape) != 3 or model.z_shape[0] < channels:
        return None
    narrowed = Bottleneck(BottleneckConfig(channels=channels)).rebuild(model)
    return Edge(config, channels, cost(narrowed, with_cloud=False)["edge"])


def has_budget(config: Any) -> bool:
    return any(field.name == "budget" for field in fields(config))


def fast_enough(edges: dict[str, Edge], milliseconds: float, x_shape: tuple[int, ...], classes: int) -> dict[str, Edge]:
    """The edges that take at most so long for one image, on one thread of this CPU."""
    found: dict[str, Edge] = {}
    for name, edge in edges.items():
        built = Bottleneck(BottleneckConfig(channels=edge.channels)).rebuild(build_model(edge.model, x_shape, classes))
        if latency(built.edge, x_shape).milliseconds <= milliseconds:
            found[name] = edge
    if not found:
        raise UserError(f"no edge within the budget takes {milliseconds:g} ms or less on this CPU; raise --max-ms")
    return found
