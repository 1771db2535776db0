"""Write a software bill of materials of the installed splitveil: CycloneDX 1.6 as JSON (ECMA-424).

    make sbom                      .venv/bin/python .ci/sbom.py > dist/sbom.cdx.json

It names splitveil, every package that it needs to run as it is installed here (with all extras but `dev`), the licence that each
declares, and which needs which. The same installation gives the same bytes if SOURCE_DATE_EPOCH sets the time: the serial number
is made from the content.
"""

import json
import os
import sys
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = "splitveil"


def needs(name: str, extras: Iterable[str] = ()) -> list[tuple[str, tuple[str, ...]]]:
    """What an installed package needs on this machine: names, each with the extras that are asked of it."""
    wanted = [Requirement(text) for text in metadata.distribution(name).requires or ()]
    chosen = [{"extra": extra} for extra in ("", *extras)]
    met = [each for each in wanted if each.marker is None or any(each.marker.evaluate(extra) for extra in chosen)]
    return sorted({(canonicalize_name(each.name), tuple(sorted(each.extras))) for each in met})


def closure(root: str, extras: Iterable[str]) -> dict[str, list[str]]:
    """Every package that is needed, directly or not, with what it needs itself."""
    found: dict[str, set[str]] = {}
    waiting, met = [(root, tuple(extras))], set()
    while waiting:
        name, asked = waiting.pop()
        if (name, asked) in met:
            continue
        met.add((name, asked))
        further = needs(name, asked)
        found.setdefault(name, set()).update(need for need, _ in further)
        waiting += further
    return {name: sorted(below - {name}) for name, below in sorted(found.items())}


def licences(package: metadata.PackageMetadata) -> list[dict[str, Any]]:
    """An SPDX expression where a package declares one (PEP 639), else the name that it gives its licence."""
    if expression := package.get("License-Expression"):
        return [{"expression": expression}]
    classified = [line.rpartition(" :: ")[2] for line in package.get_all("Classifier") or () if line.startswith("License ::")]
    named = classified or [package.get("License") or ""]
    return [{"license": {"name": name.splitlines()[0]}} for name in named if name.strip()]


def purl(name: str) -> str:
    """The package's address (package-url), which is also its reference within the document."""
    return f"pkg:pypi/{name}@{quote(metadata.version(name))}"


def component(name: str, kind: str = "library") -> dict[str, Any]:
    package = metadata.metadata(name)
    found: dict[str, Any] = {
        "type": kind,
        "bom-ref": purl(name),
        "name": name,
        "version": metadata.version(name),
        "purl": purl(name),
    }
    if summary := package.get("Summary"):
        found["description"] = summary
    return found | ({"licenses": known} if (known := licences(package)) else {})


def bill(moment: datetime) -> dict[str, Any]:
    """The whole document."""
    extras = [extra for extra in metadata.metadata(ROOT).get_all("Provides-Extra") or () if extra != "dev"]
    graph = closure(ROOT, extras)
    content: dict[str, Any] = {
        "components": [component(name) for name in graph if name != ROOT],
        "dependencies": [{"ref": purl(name), "dependsOn": [purl(need) for need in below]} for name, below in graph.items()],
    }
    about = {"timestamp": moment.isoformat(timespec="seconds"), "component": component(ROOT, "application")}
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([about, content], sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{serial}", "version": 1}
    return head | {"metadata": about} | content


def main() -> None:
    given = os.environ.get("SOURCE_DATE_EPOCH")
    moment = datetime.fromtimestamp(int(given), UTC) if given else datetime.now(UTC)
    json.dump(bill(moment), sys.stdout, indent=1, ensure_ascii=False)
    print()


if __name__ == "__main__":
    main()
