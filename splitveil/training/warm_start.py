"""Before the first epoch: trains the network that a defence trains against, on the attacker's images and a fixed edge.

    for each batch of each pass        z = edge(x)        z' = channel(z)        inner_step of the defences that ask for it

The edge is as it was initialised, in eval mode, so that neither its weights nor its running statistics change. Every process of a
group makes the same steps. A run that is killed before its first checkpoint does this again when it is resumed.
"""

import torch

from splitveil.data.augment import AugmentConfig
from splitveil.data.loader import DeviceImages, Feed
from splitveil.defences import Batch
from splitveil.progress import steps_bar
from splitveil.rng import seed_of, stream
from splitveil.split_model import in_mode
from splitveil.training.build import Parts


def warm_start(parts: Parts, images: DeviceImages, batch: int, seed: int, show: bool = True) -> None:
    """Make as many passes over the images as the channel's defences want."""
    model, channel, _ = parts
    own = seed_of(seed, "warm start")
    feed, noise = Feed(images, batch, AugmentConfig(crop=0, flip=False)), stream(images.device, own, "noise")
    with steps_bar("warm start", channel.warm_start * feed.steps, show=show) as advance, in_mode(model, False):
        for number in range(channel.warm_start):
            feed.begin(own, number)
            for _ in range(feed.steps):
                x, y = feed.next()
                with torch.no_grad():
                    z = model.edge(x)
                    sent = channel.send(z, x, noise)
                channel.warm_step(Batch(x, z, sent, y), number)
                advance(1)
