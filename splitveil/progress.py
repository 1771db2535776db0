"""Progress bars on the terminal: they show what runs, how far it is, how fast it goes and how long it will still take."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from splitveil.printable import printable


class SafeConsole(Console):
    """A console that lets no escape through which came from a file; colours are added after that."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


console = SafeConsole(stderr=True)
_told: set[str] = set()


def warn(message: str) -> None:
    console.print(f"warning: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def warn_once(message: str) -> None:
    """Warn, once in the life of a process."""
    if message not in _told:
        _told.add(message)
        warn(message)


def tell_once(message: str) -> None:
    """Say something that is no reason to stop, once in the life of a process."""
    if message not in _told:
        _told.add(message)
        console.print(message, style="dim", markup=False, highlight=False, soft_wrap=True)


def rate(speed: float | None) -> str:
    """Steps a second, or the seconds of a step that takes longer than one; nothing where no step was timed."""
    if not speed:
        return ""
    return f"{speed:.3g}/s" if speed >= 1 else f"{1 / speed:.3g} s each"


class Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(rate(speed), style="progress.data.speed")


@contextmanager
def steps_bar(title: str, total: int, done: int = 0, show: bool = True) -> Iterator[Callable[..., None]]:
    """A bar of `total` steps; call the yielded `advance(n, note="")`."""
    title_column, note_column = (TextColumn(field, markup=False) for field in ("{task.description}", "{task.fields[note]}"))
    columns = (title_column, BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn(), note_column)
    # A thread of rich redraws the bar ten times a second, so that an advance is only an addition and costs a step nothing.
    with Progress(*columns, console=console, disable=not show) as progress:
        task = progress.add_task(printable(title), total=total, completed=done, note="")

        def advance(steps: float, note: str | None = None) -> None:
            progress.advance(task, steps)
            if note is not None:
                progress.update(task, note=printable(note))

        yield advance
