"""Work beside the work: on a GPU, a second stream that runs along with the first until `join`; elsewhere, nothing special.

    with aside.of(z.device):
        gradient = …            # queued on the second stream, after what is on the first one by now
        aside.mark()
        …                       # more of it
    …                           # queued on the first one; runs at the same time
    aside.join_mark()           # what is queued on the first one from here on waits for the second as far as the mark
    aside.join()                # and from here on for all of it

A small kernel leaves most of a GPU idle, and a chain of them takes its time however wide the GPU is: two chains take as long as
one. Tensors made aside may be used after the join that covers them; those that it reads must live until `join`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Aside:
    """One second stream."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.marked: torch.cuda.Event | None = None

    @contextmanager
    def of(self, device: torch.device) -> Iterator[None]:
        if device.type != "cuda":
            yield
            return
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> None:
        """To be called inside `of`."""
        if self.stream is not None:
            self.marked = torch.cuda.Event()
            self.marked.record(self.stream)

    def join_mark(self) -> None:
        if self.stream is not None and self.marked is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self.marked)

    def join(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
