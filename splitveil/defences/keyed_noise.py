"""keyed_noise: Gaussian noise that a secret key and the input determine, so that repeats of one x teach nothing new.

    z' = z + sigma * n(key, m(x))         n = Box-Muller(SHAKE128(BLAKE2b(key; shapes, m)))                 in service
    z' = z + sigma * N(0, I)              fresh noise from the generator                                    in training only

    x         [b, c, h, w] in [0, 1]
    m(x)      key_from "pixels": 8-bit pixels, so that what differs by less than half a step of 1/255 is the same image
              key_from "coarse": the mean brightness of cells x cells parts of the image, in `levels` steps
    key       secret of the device, from the environment variable SPLITVEIL_KEY: 16 bytes at least, in hex or as text
    z, z'     [b, *z_shape]

To whoever does not have the key, the noise of different m is independent and N(0, I), as that of `gaussian`, and the bound on
one release is the same; but n releases of one x are one release. The key exists only from `deploy` on, or from the first release
without a generator, and only in memory: it is not in the state, the config, the hints or a run folder. If the variable is not
set, a random key is drawn for this process and forgotten when it ends.

Cost: pixels are hashed and noise is made on the CPU, so that every device sends the same; a batch of 256 images of 3 x 32 x 32
with 512 entries of z took about 20 ms on one slow core. The host waits for the device; training does not take this path.

Known failure: inputs that differ by one pixel step have fresh noise, so near-repeats (video, queries of one's own) average it
down again (the attack `burst`). A coarse key gives near-repeats the same noise, unless a cell's mean crosses a step, and so it
does all other images of the same m: their differences are free of noise, and whoever has the edge and may query with an image of
the same m learns the noise itself. docs/defences/keyed_noise.md has what was measured. With either key, equal z' give away equal
x; whoever has the key can subtract the noise. After an update of the edge the same key sends the same noise on other features,
and the difference of both is free of noise: new weights need a new key.
"""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, shake_128
from typing import Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from splitveil.defences import AttackHints, Defence
from splitveil.defences.gaussian import add_noise
from splitveil.options import option
from splitveil.registry import DEFENCES, UserError

VARIABLE = "SPLITVEIL_KEY"
SHORTEST = 16
"""The fewest bytes of a key: nobody can try out all keys of 128 bits."""


@dataclass(frozen=True)
class Config:
    sigma: float = option(0.025, above=0, remedy="for no noise leave the defence out")
    """Standard deviation of the noise, in units of z; as for gaussian."""
    key_from: Literal["pixels", "coarse"] = "pixels"
    """What of the input decides the noise: every pixel, or the mean brightness of its parts."""
    cells: int = option(4, at_least=1)
    """For key_from = coarse: how many parts the image has in each direction."""
    levels: int = option(4, at_least=2)
    """For key_from = coarse: how many steps the brightness of a part has."""


class Key:
    """A secret that is not printed, pickled or copied."""

    def __init__(self, secret: bytes) -> None:
        self._hash = blake2b(key=blake2b(secret).digest(), digest_size=32)  # the inner hash takes keys of any length

    def digest(self, message: bytes) -> bytes:
        keyed = self._hash.copy()
        keyed.update(message)
        return keyed.digest()

    def __deepcopy__(self, memo: object) -> "Key":
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"the key of keyed_noise cannot be pickled; give the other process {VARIABLE}")


def read_key(text: str) -> bytes:
    """The bytes that the text spells in hex, or if it is not hex the text's own bytes."""
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = text.encode()
    if len(secret) < SHORTEST:
        raise UserError(
            f"{VARIABLE} has {len(secret)} bytes, must have at least {SHORTEST}; "
            'make one with `python -c "import secrets; print(secrets.token_hex(32))"`'
        )
    return secret


def normals(seed: bytes, count: int) -> np.ndarray:
    """`count` standard normal numbers as a function of the seed: the hash gives uniform words, Box-Muller turns pairs of them."""
    half = (count + 1) // 2
    uniform = (np.frombuffer(shake_128(seed).digest(8 * half), "<u4") + 0.5) / 2**32  # in (0, 1), float64
    radius, angle = np.sqrt(-2 * np.log(uniform[:half])), 2 * np.pi * uniform[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count].astype(np.float32)


def pixels_of(x: Tensor) -> np.ndarray:
    """The pixels of x [b, c, h, w] in [0, 1] as bytes."""
    # In numpy, because it is the same for every device and starts no threads.
    return np.rint(np.clip(np.nan_to_num(x.detach().float().cpu().numpy()), 0, 1) * 255).astype(np.uint8)


def coarse(pixels: np.ndarray, cells: int, levels: int) -> np.ndarray:
    """The brightness of cells x cells parts in `levels` steps, [b, cells, cells], in whole numbers: alike on every machine."""
    c, h, w = pixels.shape[1:]
    rows, columns = (np.unique(np.arange(cells) * side // cells) for side in (h, w))  # where parts begin
    sums = np.add.reduceat(np.add.reduceat(pixels.sum(1, dtype=np.int64), rows, 1), columns, 2)
    brightest = 255 * c * np.outer(np.diff([*rows, h]), np.diff([*columns, w]))
    return np.minimum(sums * levels // brightest, levels - 1).astype("<u2")


def keyed_normals(key: Key, messages: np.ndarray, x: Tensor, z: Tensor) -> Tensor:
    """Noise of z's shape as a function of the key and of each sample's message; on the CPU."""
    shapes = f"{tuple(x.shape[1:])}{tuple(z.shape[1:])}".encode()
    noise = [normals(key.digest(shapes + message.tobytes()), z[:1].numel()) for message in messages]
    return torch.from_numpy(np.stack(noise)).view(z.shape) if noise else torch.empty(z.shape)


@DEFENCES.register("keyed_noise", Config)
class KeyedNoise(Defence[Config]):
    """Adds Gaussian noise that a secret key and the input determine: repeats of one input do not average out."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.noise_std = config.sigma
        self._key: Key | None = None

    def check(self, stack: Sequence[Defence]) -> None:
        fresh = [type(other).__name__.lower() for other in stack if other is not self and other.attack_hints.random]
        if fresh:
            raise UserError(
                f"keyed_noise sends the same for the same input, {' and '.join(fresh)} draws afresh each time, so that averaging "
                "works again; leave one of them out"
            )

    def deploy(self) -> None:
        """Make the noise depend on the key from here on. A second call changes nothing."""
        if self._key is not None:
            return
        if text := os.environ.get(VARIABLE):
            self._key = Key(read_key(text))
            return
        from splitveil.progress import console

        self._key = Key(secrets.token_bytes(32))
        notice = f"keyed_noise: {VARIABLE} is not set; a random key is used, and forgotten when this process ends"
        console.print(notice, style="yellow", markup=False, highlight=False)

    def without_secrets(self) -> "KeyedNoise":
        """Without the key: whoever simulates it draws fresh noise, by a generator."""
        return KeyedNoise(self.config)

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        if self._key is None and generator is not None:
            return add_noise(z, self.config.sigma, generator)
        self.deploy()  # an experiment would have a generator: noise that nobody repeats must not average out
        assert self._key is not None
        return z + (self.config.sigma * keyed_normals(self._key, self.message(x), x, z)).to(z)

    def message(self, x: Tensor) -> np.ndarray:
        """The part of each input that decides its noise."""
        pixels = pixels_of(x)
        return pixels if self.config.key_from == "pixels" else coarse(pixels, self.config.cells, self.config.levels)

    @property
    def attack_hints(self) -> AttackHints:
        fresh = self._key is None
        of = "x" if self.config.key_from == "pixels" else f"x at {self.config.cells} x {self.config.cells} parts"
        source = "fresh" if fresh else f"a function of {of} and a key that the attacker does not have"
        return AttackHints(fresh, "identity", side_information={"sigma": self.config.sigma, "noise": source})
