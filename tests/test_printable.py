"""What came from a file moves no cursor and sets no title."""

import pytest
from rich.table import Table

from splitveil.printable import printable, say
from splitveil.progress import SafeConsole, rate, steps_bar, tell_once, warn

HOSTILE = "run\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\r"


def test_escapes_and_marks_that_reorder_text_are_shown_as_what_they_are_not():
    assert printable(HOSTILE) == "run�]0;owned��[2J�31m�evil�"
    assert printable("gaussian+cem: Größe ∞,\t4 × 4\n") == "gaussian+cem: Größe ∞,\t4 × 4\n"
    assert printable("\udcff") == "?"  # a name on disk that is no UTF-8


def test_a_note_of_a_progress_bar_is_no_markup(capsys: pytest.CaptureFixture[str]):
    with steps_bar("run [/b]", total=1) as advance:
        advance(1, "attack [/b]")
    assert "attack [/b]" in capsys.readouterr().err


def test_the_speed_of_long_steps_is_told_in_seconds():
    assert [rate(speed) for speed in (None, 0.0, 60.66, 1.0, 0.0215)] == ["", "", "60.7/s", "1/s", "46.5 s each"]


def test_nothing_that_is_printed_lets_them_through(capsys: pytest.CaptureFixture[str]):
    say("name:", HOSTILE)
    warn(HOSTILE)
    tell_once(HOSTILE)
    table = Table()
    table.add_column(HOSTILE)
    table.add_row(f"[yellow]{HOSTILE}[/]")
    SafeConsole(width=200).print(table)
    with steps_bar(HOSTILE, total=1) as advance:
        advance(1, HOSTILE)
    out, err = capsys.readouterr()
    for text, times in ((out, 3), (err, 3)):
        assert text.count("evil") >= times
        for unsafe in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e"):
            assert unsafe not in text
