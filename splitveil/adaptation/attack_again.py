"""Before an update is published: the attacks are run again on the edge that has it, and compared with the edge as released.

    again = attack_again(model, channel, message, private, attacker, attacks=["ridge", "decoder"])
    again.before, again.after, again.ratio          MSE of each attack; that of the strongest after, over that before

The attacker is the one of an audit: it has images of its own, knows the new edge, and is fitted on what that sends. The guard's
proof already says that no attack gains; this finds where an assumption of the proof does not hold.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from splitveil.adaptation.client import Client
from splitveil.auditing.audit import audit
from splitveil.channel import Channel
from splitveil.options import UserError
from splitveil.split_model import SplitModel

LEAST = 0.98
"""After an update the strongest attack's MSE must be at least this share of what it was."""


@dataclass(frozen=True)
class Again:
    """The attacks on an edge before and after an update."""

    before: dict[str, float]
    """The MSE of each attack."""
    after: dict[str, float]

    @property
    def ratio(self) -> float:
        """MSE of the strongest attack after, over that of the strongest before: below 1 the attacker gains."""
        return min(self.after.values()) / min(self.before.values())


def attack_again(
    model: SplitModel, channel: Channel, message: bytes, private: Any, attacker: Any, attacks: Sequence[Any] | None = None,
    suite: str = "quick", targets: int | None = None, seed: int = 0, least: float = LEAST,
) -> Again:  # fmt: skip
    """Attack the edge as released and with the update, by the same attacks and seed; refused if the attacker gains.

    `private` and `attacker` are images of your own that stand for those of devices and attacker; `splitveil.audit` says what
    they may be. A UserError says by how much the MSE falls below `least` of what it was.
    """
    client = Client(copy.deepcopy(model.edge), channel, tuple(model.z_shape))
    client.apply(message)

    def mse(edge: nn.Module) -> dict[str, float]:
        report = audit(
            (edge, model.cloud), private=private, attacker=attacker, channel=channel, attacks=attacks, suite=suite,
            targets=targets, seed=seed,
        )  # fmt: skip
        return {name: found.mse for name, found in report.attacks.items()}

    again = Again(mse(model.edge), mse(client.edge))
    if not again.ratio >= least:
        raise UserError(
            f"with the update the strongest attack's MSE is {again.ratio:.3f} of what it was, must be {least} or more; "
            "do not publish it"
        )
    return again
