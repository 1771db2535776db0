"""Write requirements.lock: constraints.txt with the sha256 of every wheel that the index offers, for all packages but torch.

    make lock                      python3 .ci/lock.py < constraints.txt > requirements.lock

The hashes come from the index's own pages (PEP 503) and nothing is downloaded, so the lock holds for every platform and Python
that we support. Wheels that only older Pythons can use are left out, and so are source archives: what is locked is installed
from wheels alone. torch is left out because its wheel differs by machine (CPU, CUDA); constraints.txt has its version.
"""

import re
import subprocess
import sys
import urllib.request
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

WITHOUT = ("torch",)
WHEEL = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-\d[^-]*)?-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl")
OLDEST = 11
"""The minor version of the oldest Python that pyproject.toml allows."""


class Links(HTMLParser):
    """The addresses on a page of the index."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def normal(name: str) -> str:
    """A package's name as the index writes it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(constraints: str) -> dict[str, str]:
    """Versions by name, without those that are not locked."""
    lines = [line.split("#")[0].strip() for line in constraints.splitlines()]
    pins = dict(line.split("==") for line in lines if line)
    return {name: version for name, version in pins.items() if normal(name) not in WITHOUT}


def usable(python: str, abi: str) -> bool:
    """True if a CPython that we support can use a wheel with these tags; one for the stable ABI fits every later Python."""
    if "abi3" in abi.split(".") or "py3" in python.split("."):
        return True
    return any(int(tag[3:]) >= OLDEST for tag in python.split(".") if re.fullmatch(r"cp3\d+", tag))


def hashes(page: str, name: str, version: str) -> list[str]:
    """sha256 of the usable wheels of one version, from the package's page."""
    links, found = Links(), set()
    links.feed(page)
    for link in links.found:
        address = urlsplit(link)
        wheel = WHEEL.fullmatch(unquote(address.path.rpartition("/")[2]))
        if wheel is None or normal(wheel["name"]) != normal(name) or wheel["version"] != version:
            continue
        if usable(wheel["python"], wheel["abi"]) and address.fragment.startswith("sha256="):
            found.add(address.fragment.removeprefix("sha256="))
    if not found:
        sys.exit(f"the index has no wheel of {name} {version}; choose a version that has one")
    return sorted(found)


def index() -> str:
    """The index that pip uses here."""
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True)
    if asked.returncode == 0:
        return asked.stdout.strip().rstrip("/")
    from pip._internal.models.index import PyPI  # pip has no public name for its default

    return PyPI.simple_url.rstrip("/")


def entry(name: str, version: str, found: list[str]) -> str:
    return f"{name}=={version} \\\n" + " \\\n".join(f"    --hash=sha256:{each}" for each in found)


def main() -> None:
    print("# Made by `make lock` from constraints.txt: do not edit. `make install-locked` installs it and checks every file.")
    root = index()
    for name, version in pinned(sys.stdin.read()).items():
        with urllib.request.urlopen(f"{root}/{normal(name)}/", timeout=60) as answer:
            print(entry(name, version, hashes(answer.read().decode(), name, version)))


if __name__ == "__main__":
    main()
