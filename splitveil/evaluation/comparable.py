"""Which summaries may stand side by side. Other weights and other settings are the point of a comparison; other images are not.

    differences(first, other)       what forbids it: another layout, other test images or images of the attacker, another suite
    check_comparable(summaries)     refuses a list of which one does not compare with the first
    groups(summaries)               lists of those that compare with each other

Other attacks do not forbid it: the report warns, and rows of one attack can still be compared. What an older file does not say is
not held against it.
"""

from collections.abc import Sequence

from splitveil.evaluation.summary import Part, Summary
from splitveil.registry import UserError


def differences(first: Summary, other: Summary) -> list[str]:
    """The reasons why the numbers of two summaries must not stand side by side; empty if they may."""
    found = []
    if first.layout and other.layout and first.layout != other.layout:
        found.append(f"another layout of the images (attacker: {other.layout}, not {first.layout})")
    ours, theirs = first.splits.get("test"), other.splits.get("test")
    if ours is not None and theirs is not None and ours != theirs:
        found.append(f"other test images ({told(theirs)}, not {told(ours)})")
    ours, theirs = first.splits.get("auxiliary"), other.splits.get("auxiliary")
    if ours is not None and theirs is not None and ours != theirs and not drawn_alike(first, other):
        found.append(f"other images of the attacker ({told(theirs)}, not {told(ours)})")
    versions = first.suite_version, other.suite_version
    if first.suite == other.suite and None not in versions and versions[0] != versions[1]:
        found.append(f"another version of suite {other.suite} ({versions[1]}, not {versions[0]})")
    return found


def drawn_alike(first: Summary, other: Summary) -> bool:
    """True if two seeds drew equally many images for the attacker, so that the images differ only by chance."""
    return first.seed != other.seed and first.splits["auxiliary"].images == other.splits["auxiliary"].images


def told(part: Part) -> str:
    return f"{part.images} images, sha256 {part.sha256[:8]}"


def check_comparable(summaries: Sequence[Summary]) -> None:
    """Refuse summaries if one of them does not compare with the first; the error says how they differ."""
    for other in summaries[1:]:
        if found := differences(summaries[0], other):
            raise UserError(
                f"{other.name} does not compare with {summaries[0].name}: {'; '.join(found)}; report them apart, or with --anyway"
            )


def groups(summaries: Sequence[Summary]) -> list[list[Summary]]:
    """The summaries in lists of those that compare with each other, in their order."""
    found: list[list[Summary]] = []
    for summary in summaries:
        group = next((group for group in found if not differences(group[0], summary)), None)
        if group is None:
            found.append([summary])
        else:
            group.append(summary)
    return found
