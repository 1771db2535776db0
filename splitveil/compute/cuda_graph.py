"""A training step as one CUDA graph: recorded once, then replayed by a single launch.

    step = Captured(body, device, generators=[noise])
    for _ in range(steps):
        step()

A step of a small network is hundreds of kernels that run for microseconds each; started one by one, the GPU waits for Python. In
a graph they follow each other without it. `body` takes and returns nothing: it finds its inputs in tensors that stay where they
are (`data.loader.Feed`) and leaves its results in such tensors. It must not wait for the device, and what Python decided
while it was recorded stays decided: record anew when `settings_of` the modules has changed.

The first `warmup` calls run `body` as it is, the next one records it, and every later call replays the record. All of them are
real steps. Where there is no GPU, or `body` cannot be recorded (because it waits for the device, say), every call runs `body` as
it is; `why_not` then holds the reason, and a warning says it.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from splitveil.progress import warn

WARMUP = 3
"""Steps before the recording, in which optimisers make their state and libraries choose their kernels."""


TOLD: set[str] = set()


def tell(message: str) -> None:
    """Print a warning, each only once, though a step is recorded anew in every phase of a training."""
    if message not in TOLD:
        TOLD.add(message)
        warn(message)


class Captured:
    """Calls `body`, or replays what it did."""

    def __init__(
        self, body: Callable[[], None], device: torch.device, generators: Iterable[torch.Generator] = (),
        why_not: str | None = None, warmup: int = WARMUP,
    ) -> None:  # fmt: skip
        self.body, self.device, self.generators, self.warmup = body, device, list(generators), warmup
        self.why_not = "there is no CUDA device" if why_not is None and device.type != "cuda" else why_not
        """Why the step is not recorded; None if it is, or will be."""
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.why_not is None and self.graph is None and self.calls == self.warmup:
            self._record()
        self.calls += 1
        if self.graph is not None:
            self.graph.replay()
        elif self.why_not is None:
            self._warm_up()
        else:
            self.body()

    def _warm_up(self) -> None:
        """Run `body` on a second stream, as the recording will: autograd remembers on which stream a parameter was first used."""
        here, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            self.body()
        here.wait_stream(side)

    def _record(self) -> None:
        """Record the kernels of `body`. Nothing is computed here."""
        random = [torch.cuda.default_generators[torch.cuda.current_device()], *self.generators]
        states = [generator.get_state() for generator in random]
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        try:
            with torch.cuda.graph(graph):
                self.body()
        except Exception as error:  # whatever a user's module raises when it is recorded, it may be fine when it is run
            self.why_not = " ".join(str(error).split())[:160] or type(error).__name__
            tell(f"a step is not captured as a CUDA graph, which makes it slower: {self.why_not}")
            # A recording that broke off leaves the generators in it; they are given states that are in none.
            for generator, state in zip(random, states):
                generator.graphsafe_set_state(torch.Generator(self.device).set_state(state))  # type: ignore[attr-defined]
        else:
            self.graph = graph


def lr_on(device: torch.device, lr: float) -> torch.Tensor | float:
    """A learning rate for an optimiser. On a GPU it is a tensor there, so that a recorded step reads it at every replay."""
    return torch.tensor(lr, device=device) if device.type == "cuda" else lr


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def settings_of(*modules: nn.Module) -> dict[str, object]:
    """Plain attributes of the modules (switches, numbers, words): their Python code may branch on these."""
    return {
        f"{i}.{path}.{name}": value
        for i, module in enumerate(modules)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, bool | int | float | str)
    }
