"""Randomness as a function of names: every random draw comes from a stream called after its purpose.

    stream("cpu", config.seed, "noise", epoch)

An epoch's draws depend on the seed and the epoch's number only, never on what was drawn before. That is why a killed run
resumes bit for bit from the last finished epoch without any saved generator state.
"""

import hashlib

import torch


def seed_of(*words: object) -> int:
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # 63 bits: what every torch generator takes


def stream(device: torch.device | str, *words: object) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed_of(*words))
