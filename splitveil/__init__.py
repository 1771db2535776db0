"""splitveil: train, attack, certify and serve split inference.

    from splitveil import CEM, split, surrogates

Names are imported when they are first used, so that `splitveil --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitveil import attacks, defences, surrogates
    from splitveil.auditing.audit import audit
    from splitveil.cem import CEM
    from splitveil.channel import Channel
    from splitveil.cut_by_fx import cuts, split
    from splitveil.split_model import SplitModel
    from splitveil.training.load import load

__version__ = "0.1.0"
__all__ = ["CEM", "Channel", "SplitModel", "attacks", "audit", "cuts", "defences", "load", "split", "surrogates"]

_HOMES = {
    "CEM": "cem", "Channel": "channel", "SplitModel": "split_model", "audit": "auditing.audit", "cuts": "cut_by_fx",
    "load": "training.load", "split": "cut_by_fx",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'splitveil' has no attribute {name!r}")
    home = import_module(f"splitveil.{_HOMES.get(name, name)}")
    return getattr(home, name) if name in _HOMES else home
