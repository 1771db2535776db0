"""manifest.json says what the files of a folder are, by their sha256, and what each of them was computed from.

    begin(folder)               from now on the folder has a manifest; `train` does this for a new run
    with changing(folder) as step:
        step.write("weights/last.safetensors", data, come_from=("config.toml", "splits.json"))
    verified(folder, name)      the bytes of a file; a Damaged error says which one is not what the manifest says, and what to run
    why_stale(folder, name)     what a file was computed from and is no longer what lies there
    problems(folder)            all that `splitveil verify` finds
    out_of_date(folder)         a report that is older than what it shows, which is no problem

listing.py has the file itself, step.py changes a folder so that no kill damages it, verify.py reads, signing.py signs. A folder
without a manifest, as older versions of splitveil left it, reads as before: it is unverified. Whoever can write into the folder
can also write a manifest: it finds damage and mistakes, and only a signature finds forgery.
"""

from splitveil.manifest.listing import NAME, SIGNATURE, Damaged, Entry, Manifest, remedy
from splitveil.manifest.step import Step, begin, changing
from splitveil.manifest.verify import intact, lists, out_of_date, problems, verified, why_stale

__all__ = [
    "NAME", "SIGNATURE", "Damaged", "Entry", "Manifest", "Step", "begin", "changing", "intact", "lists", "out_of_date",
    "problems", "remedy", "verified", "why_stale",
]  # fmt: skip
