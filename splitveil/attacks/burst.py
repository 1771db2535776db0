"""burst: several near-duplicates of one scene, seen by one attacker (a video, a picture that is sent again).

    mean       D(mean of z'_1 … z'_r)                                     D is trained on bursts, to give frame 0
    aligned    mean over j of shift_j^-1( G(z'_j) )                       G is trained on single images

    z'_j       [b, *z_shape] what was sent of frame j (`data/burst.py`: shifted by a pixel, brightness within 2 %, JPEG)
    D, G       inverse networks of the attack `decoder`

Both average out noise that is fresh for every frame. `mean` is better where the frames differ by noise alone, `aligned` where the
shift moves z more than the noise does. The attacker takes the one that has the smaller error on images of its own from which
neither learned. It is told by how many pixels each frame is shifted, because whoever has a video can find that out.

`keyed_noise` does not stop this attack: frames that differ by one step of one pixel get fresh keys there. `frames_gain` says
which share of the error that G makes on frame 0 alone disappears when all frames are used; the flag averaging-hole looks at it.

Known failure: all r frames share one D. An attacker who weighs frames, or knows the path of the camera, gets more.
"""

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.decoder import Config as DecoderConfig
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.data.burst import burst, shifted
from splitveil.data.loader import batch_size
from splitveil.options import option
from splitveil.registry import ATTACKS
from splitveil.rng import seed_of


@dataclass(frozen=True)
class Config(AttackConfig):
    frames: int = option(16, at_least=2)
    """Near-duplicates of one scene that the attacker sees."""
    blocks: int = option(8, at_least=0)
    """ResBlocks of both networks at the resolution of z (N)."""
    width: int = option(64, at_least=1)
    """Channels of both networks (C)."""
    epochs: int = option(50, at_least=1)
    """Passes over the attacker's images, for each of the two networks."""
    batch: int = option(256, at_least=1)
    """Images a step."""
    lr: float = option(1e-3, above=0)
    """Adam's learning rate at the start."""


def ask_frames(access: Access, x: Tensor, frames: int) -> tuple[Tensor, Tensor]:
    """What is sent of a burst of each own image [b, c, h, w], and its shifts: [b, r, *z_shape], [b, r, 2]."""
    assert access.query is not None
    images, shifts = burst(x, frames, access.query.generator)
    return torch.stack([access.query(frame)[:, 0] for frame in images.unbind(1)], 1), shifts


WAYS = ("mean", "aligned")


class OfBursts(Decoder):
    """The decoder whose releases are the frames of a burst."""

    frames: int

    def ask(self, access: Access, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return ask_frames(access, x, self.frames)[0], None


@ATTACKS.register("burst", Config)
class BurstAttack(Attack[Config]):
    """Averages what was sent of near-duplicates, or what a decoder makes of each of them."""

    quick: ClassVar = {"blocks": 1, "width": 8, "epochs": 2, "batch": 32, "frames": 3}

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed)
        self.requires = ThreatModel(observations=config.frames, near_duplicates=True)

    def fit(self, access: Access) -> "BurstAttack":
        c = self.config
        options = DecoderConfig(blocks=c.blocks, width=c.width, epochs=c.epochs, batch=c.batch, lr=c.lr)
        self.of_bursts_ = OfBursts(options, seed_of(self.seed, "bursts"))
        self.of_bursts_.frames = c.frames
        self.of_frames_ = Decoder(options, seed_of(self.seed, "frames"))
        self.of_bursts_.on_progress = lambda done, total: self.on_progress(done, 2 * total)
        self.of_frames_.on_progress = lambda done, total: self.on_progress(total + done, 2 * total)
        access, out = self.of_frames_.hold_out(access)
        for decoder in (self.of_bursts_, self.of_frames_):
            decoder.fit(access)
        errors: dict[str, float] = dict.fromkeys((*WAYS, "single"), 0.0)
        for part in torch.arange(len(out), device=out.device).split(batch_size(out.numbers, len(out))):
            x, share = out.take(part), len(part) / len(out)
            sent, shifts = ask_frames(access, x, c.frames)
            answers = {way: self.rebuild(Observation(sent, shifts=shifts), way) for way in WAYS}
            answers["single"] = self.of_frames_.reconstruct(Observation(sent[:, :1]))
            for what, answer in answers.items():
                errors[what] += share * F.mse_loss(answer, x).item()
        single = errors.pop("single")
        self.way_ = min(errors, key=lambda way: errors[way])
        chosen = self.of_bursts_ if self.way_ == "mean" else self.of_frames_
        self.losses_, self.held_out_ = chosen.losses_, chosen.held_out_
        self.facts_ = {"taken": self.way_, "error_single": single} | {f"error_{way}": error for way, error in errors.items()}
        if isfinite(single) and single > 0:
            self.facts_["frames_gain"] = 1 - errors[self.way_] / single
        return self

    @torch.no_grad()
    def rebuild(self, seen: Observation, way: str) -> Tensor:
        """Frame 0 of each burst, in one of the two ways."""
        if way == "mean":
            return self.of_bursts_.reconstruct(seen)
        n, r = seen.z.shape[:2]
        shifts = seen.shifts if seen.shifts is not None else torch.zeros(n, r, 2, dtype=torch.int64, device=seen.z.device)
        rebuilt = [self.of_frames_.reconstruct(Observation(seen.z[:, j : j + 1])) for j in range(r)]
        return torch.stack([shifted(x, -shifts[:, j]) for j, x in enumerate(rebuilt)]).mean(0)

    def reconstruct(self, observation: Observation) -> Tensor:
        return self.rebuild(observation, self.way_)
