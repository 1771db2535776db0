"""A second CUDA stream that runs along with the main one until `wait`; where there is no GPU it does nothing.

    with side.run_on(z.device):
        gradient = …            # queued on the second stream, behind what the main stream has queued so far
        side.mark()
        …                       # more work on the second stream
    …                           # queued on the main stream; both streams run at the same time
    side.wait_for_mark()        # from here on the main stream waits for the second one, up to the mark
    side.wait()                 # from here on the main stream waits for all of it

A small kernel leaves most of a GPU idle, so two chains of small kernels take as long as one. Tensors made on the second stream
may be used after the wait that covers them. Tensors that it reads must live until `wait`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """One second stream, made when it is first used."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.marked: torch.cuda.Event | None = None

    @contextmanager
    def run_on(self, device: torch.device) -> Iterator[None]:
        """Work that is started inside goes to the second stream of this device."""
        if device.type != "cuda":
            yield
            return
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> None:
        """Mark how far the second stream is now; to be called inside `run_on`."""
        if self.stream is not None:
            self.marked = torch.cuda.Event()
            self.marked.record(self.stream)

    def wait_for_mark(self) -> None:
        if self.stream is not None and self.marked is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self.marked)

    def wait(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
