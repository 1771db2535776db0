"""Progress bars on the terminal: they show what runs, how far it is, how fast it goes and how long it will still take."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

console = Console(stderr=True)


def warn(message: str) -> None:
    console.print(f"warning: {message}", style="yellow", markup=False, highlight=False)


class Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.3g}/s", style="progress.data.speed")


@contextmanager
def steps_bar(title: str, total: int, done: int = 0, show: bool = True) -> Iterator[Callable[..., None]]:
    """A bar of `total` steps; call the yielded `advance(n, note="")`."""
    title_column = TextColumn("{task.description}", markup=False)
    columns = (title_column, BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn(), "{task.fields[note]}")
    # A thread of rich redraws the bar ten times a second, so that an advance is only an addition and costs a step nothing.
    with Progress(*columns, console=console, disable=not show) as progress:
        task = progress.add_task(title, total=total, completed=done, note="")

        def advance(steps: float, note: str | None = None) -> None:
            progress.advance(task, steps)
            if note is not None:
                progress.update(task, note=note)

        yield advance
