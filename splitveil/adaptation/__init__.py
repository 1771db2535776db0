"""Adaptation: a released split model follows its images as they change, from z alone. docs/adaptation.md shows how.

retention      which z are worth keeping, by quantiles of entropy and redundancy
replay         the z that are kept: with a cap and a time limit
adapter        the cloud's side: answers, keeps, learns its norms and the affine at the cut
cut_affine     that affine, and what an update does to what is sent
message        an update as bytes, under 16 KB, in which no byte changes unseen
guard          what a device asks of an update before it takes it
client         the device's side: sends, and takes updates that its guard lets pass
attack_again   the attacks, once more, before an update is published

No image is an argument of anything that runs in the cloud.
"""

from splitveil.adaptation.adapter import Adapter, AdapterConfig
from splitveil.adaptation.attack_again import Again, attack_again
from splitveil.adaptation.client import Client
from splitveil.adaptation.message import digest_of_edge
from splitveil.adaptation.replay import Replay
from splitveil.adaptation.retention import Retention

__all__ = ["Adapter", "AdapterConfig", "Again", "Client", "Replay", "Retention", "attack_again", "digest_of_edge"]
