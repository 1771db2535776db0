"""Text that came from a file, made safe for a terminal: no escape in it moves the cursor, renames the window or hides words.

    printable(text)     every control character, and every one that reorders text, becomes �; line ends and tabs stay
    say(*words)         print, with that

Run names, reasons, details of flags and names of classes may be written by somebody else than whoever reads them.
"""

import re
import sys
from typing import TextIO

UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""C0 (escape is one of them) and C1 without tab and line end, and the marks that reorder text on the screen."""


def printable(text: str) -> str:
    return UNSAFE.sub("�", text.encode("utf-8", "replace").decode())  # a name on disk may hold bytes that are no UTF-8


def say(*words: object, sep: str = " ", file: TextIO | None = None) -> None:
    """As `print`, for words that may have come from a file."""
    print(printable(sep.join(map(str, words))), file=file or sys.stdout)
