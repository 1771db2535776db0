"""Noise for what is sent: from a generator in experiments, and without one secret, so that nobody can draw it again.

    normal(z, generator)        N(0, 1) in the shape, type and place of z
    uniform(z, generator)       U[0, 1), always in float32
    words(shape, …)             whole numbers of 63 random bits
    below(k, count, …)          whole numbers in 0 … k - 1

With a generator they are what torch draws with it, bit for bit: training, attacks and evaluation are repeated by their seeds. But
a seed is guessed: torch's generators on a CPU use 32 bits of it, and torch's own one is seeded from the config when a run is
loaded. So without a generator, nothing of torch's is used. Each block of noise takes 256 fresh bits from the operating system's
generator as the key of a ChaCha20 stream (RFC 8439; package `cryptography`) and forgets them; without that package the operating
system gives all the bytes itself, which is slower. No state outlives a draw, so that threads, forked processes and restarts share
nothing; the one exception is the stock that AHEAD keeps in service, which a forked child throws away. A GPU is never waited for:
what it gets from here is copied from pinned memory.

N(0, 1) is made by Box-Muller in the place of z, from 31 bits for each number in float32 (63 in float64): the largest is
sqrt(2 log 2^32) = 6.66 (9.42), beyond which lie 3e-11 (5e-21) of a true normal's draws. torch.randn ends at 5.77.
"""

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import log, pi, prod, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from splitveil.registry import UserError

BLOCK = 1 << 18
"""So many numbers are made ahead at once (1 MiB)."""
DEPTH = 4
"""So many blocks of each kind are kept ready."""
TAILS = {torch.float32: sqrt(2 * log(2**32)), torch.float64: sqrt(2 * log(2**64))}
"""The largest secret normal number."""
ZEROS = memoryview(bytes(1 << 20))
"""Zeros: enciphered they give the key stream itself. They are kept, because new pages of memory cost more than the cipher."""
Kind = Callable[[int], Tensor]
"""A function that makes as many secret numbers as it is told, on the CPU."""
MASKS = {torch.int32: 2**31 - 1, torch.int64: 2**63 - 1}


def secret(count: int, dtype: torch.dtype) -> Tensor:
    """`count` whole numbers of uniform secret bits, on the CPU. The key is used once and kept nowhere."""
    found = torch.empty(count, dtype=dtype)
    into = found.numpy().view(np.uint8)
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ImportError:
        into[:] = np.frombuffer(os.urandom(len(into)), np.uint8)
        return found
    stream = Cipher(algorithms.ChaCha20(os.urandom(32), bytes(16)), mode=None).encryptor()
    for start in range(0, len(into), len(ZEROS)):
        part = into[start : start + len(ZEROS)]
        stream.update_into(ZEROS[: len(part)], part.data)
    return found


def box_muller(word: Tensor, dtype: torch.dtype) -> Tensor:
    """Normal numbers from as many words of 31 (int32) or 63 (int64) random bits, an even number."""
    scale = 1 / (MASKS[word.dtype] + 1)
    u, turn = ((half.to(dtype) + 0.5) * scale for half in (word & MASKS[word.dtype]).chunk(2))  # in (0, 1]
    radius, angle = u.log_().mul_(-2).sqrt_(), turn.mul_(2 * pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin_()])


def fresh_normal(count: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """`count` secret normal numbers, made at once."""
    word = secret(count + count % 2, torch.int64 if dtype == torch.float64 else torch.int32)
    return box_muller(moved(word, device), dtype)[:count]


def secret_normal(count: int) -> Tensor:
    """`count` secret normal numbers in float32, made on the CPU."""
    return fresh_normal(count, torch.device("cpu"))


def secret_uniform(count: int) -> Tensor:
    """`count` secret numbers of 24 bits in [0, 1), in float32, made on the CPU."""
    return (secret(count, torch.int32) & (2**24 - 1)).float().mul_(2**-24)


def moved(made: Tensor, device: torch.device) -> Tensor:
    """Numbers made on the CPU, moved to the device from pinned memory: so nobody waits for a copy to a GPU."""
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


class Ahead:
    """A stock of secret noise, of every kind that was asked for, which a thread makes for the next time. Each number is handed
    out once.
    """

    def __init__(self) -> None:
        self._wanted = False
        self._forget()
        atexit.register(self.stop)  # a thread that is inside torch when the interpreter ends aborts the process
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Empties the stock: a forked child has a copy of its parent's, and none of its threads. `take` starts a new one."""
        self._changed, self._stock, self._thread = threading.Condition(), dict[Kind, deque[Tensor]](), None

    def start(self) -> None:
        with self._changed:
            self._wanted = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._fill, name="splitveil noise", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        with self._changed:
            thread, self._thread, self._wanted = self._thread, None, False
            self._stock.clear()
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def wait(self, seconds: float = 60) -> bool:
        """True once a block of every kind that was asked for is ready."""
        with self._changed:
            return self._changed.wait_for(lambda: all(self._stock.values()), seconds)

    def _scarcest(self) -> Kind | None:
        """The kind that has the fewest blocks; None if there are enough of all."""
        kind = min(self._stock, key=lambda kind: len(self._stock[kind]), default=None)
        return None if kind is None or len(self._stock[kind]) >= DEPTH else kind

    def _fill(self) -> None:
        own = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._thread is not own or self._scarcest())
                kind = self._scarcest()
                if self._thread is not own or kind is None:
                    return
            block = kind(BLOCK)
            with self._changed:
                if self._thread is own:
                    self._stock[kind].append(block)
                    self._changed.notify_all()

    def take(self, kind: Kind, count: int) -> Tensor | None:
        """Numbers from the stock; None if it does not have as many in one block, or is not kept."""
        if not self._wanted or count > BLOCK:
            return None
        if self._thread is None:
            self.start()
        with self._changed:
            blocks = self._stock.setdefault(kind, deque())
            while blocks and len(blocks[0]) < count:
                blocks.popleft()  # what is left of it is too little
            taken = None
            if blocks:
                taken, blocks[0] = blocks[0].split([count, len(blocks[0]) - count])
            self._changed.notify_all()
            return taken


AHEAD = Ahead()


def drawn_secretly(kind: Kind, shape: Sequence[int], device: torch.device) -> Tensor:
    """Secret numbers: those that were made ahead, or if there are too few, new ones made now."""
    _refuse_recording()
    ready = AHEAD.take(kind, prod(shape))
    return moved(kind(prod(shape)) if ready is None else ready, device).view(tuple(shape))


def normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is not None:
        return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
    _refuse_recording()
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    ready = AHEAD.take(secret_normal, like.numel()) if dtype == torch.float32 else None
    made = fresh_normal(like.numel(), like.device, dtype) if ready is None else moved(ready, like.device)
    return made.to(like.dtype).view(like.shape)


def uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform numbers in float32 for every type of z: in bfloat16 a uniform number has only 8 bits."""
    if generator is not None:
        return torch.rand(like.shape, generator=generator, device=like.device)
    return drawn_secretly(secret_uniform, like.shape, like.device)


def words(shape: Sequence[int], device: torch.device, generator: torch.Generator | None) -> Tensor:
    if generator is not None:
        return torch.empty(shape, dtype=torch.int64, device=device).random_(generator=generator)
    _refuse_recording()
    return (moved(secret(prod(shape), torch.int64), device) & MASKS[torch.int64]).view(tuple(shape))


def below(k: int, count: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    if generator is not None:
        return torch.randint(k, (count,), generator=generator, device=device)
    return words((count,), device, None) % k  # one of them is more likely than another by less than k / 2^63


def _refuse_recording() -> None:
    """Secret noise comes from the host: a recorded program would hold it as a constant."""
    recorded = torch.jit.is_tracing() or torch.compiler.is_exporting()
    if recorded or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        raise UserError(
            "noise that is drawn while a program is exported or captured would be the same at every call; export edge and cloud, "
            "and send between them"
        )


class OnlySecret(TorchDispatchMode):
    """Within it, a draw from torch's own generator is refused: loading a run has seeded it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UserError(
                f"a defence draws by {func.overloadpacket.__name__} of torch in service, from a seed that can be guessed; "
                "draw by splitveil.noise with the generator that send is given"
            )
        return func(*args, **(kwargs or {}))
