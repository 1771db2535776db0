"""Claims: one small JSON file for every number that we publish, with what produced it. Tables are made from these.

results/NAME.json   {schema, claim, command, commit, config_sha256, data_sha256, seeds, device, torch, rows, flags, …}

Schema 2: `threat` of a row holds the fields of ThreatModel. In claims of schema 1 it holds words, which no code reads.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from splitveil.evaluation.summary import Summary
from splitveil.registry import UserError
from splitveil.runs import write_json

FIELDS = {
    "schema": int, "claim": str, "command": str, "commit": str, "config_sha256": str, "data_sha256": str,
    "seeds": list, "device": str, "torch": str, "rows": list, "flags": list,
}  # fmt: skip
ROW_FIELDS = {
    "run": str, "seed": int, "accuracy": float, "attack": str, "options": dict, "threat": dict, "n_images": int,
    "mse": float, "ssim": float, "psnr": float, "ci95": list,
}  # fmt: skip


def rows_of(summary: Summary) -> list[dict[str, Any]]:
    """One row for each attack on a run."""
    run = {
        "run": summary.name, "seed": summary.seed, "accuracy": summary.accuracy, "bits": summary.bits, "sigma": summary.sigma,
        "surrogate": summary.surrogate, "strength": summary.strength,
    }  # fmt: skip
    return [
        run | {
            "attack": name, "options": attack.options, "threat": attack.threat.to_dict(), "n_images": attack.n_images,
            "mse": attack.mse, "ssim": attack.ssim, "psnr": attack.psnr, "ci95": list(attack.mse_ci95),
            "config_sha256": summary.config_sha256,
        }
        for name, attack in summary.attacks.items()
    ]  # fmt: skip


def digest(parts: list[str]) -> str:
    """One digest for one or more digests."""
    return parts[0] if len(set(parts)) == 1 else hashlib.sha256("".join(sorted(parts)).encode()).hexdigest()


def write_claim(path: Path, claim: str, command: str, summaries: Sequence[Summary], **more: Any) -> dict[str, Any]:
    """Write the claim that these runs support, with anything `more` it needs to state."""
    environment = summaries[0].environment
    table = {
        "schema": 2,
        "claim": claim,
        "command": command,
        "commit": ", ".join(sorted({str(summary.environment["commit"]) for summary in summaries})),
        "config_sha256": digest([summary.config_sha256 for summary in summaries]),
        "data_sha256": digest([part.sha256 for summary in summaries for part in summary.splits.values()]),
        "seeds": sorted({summary.seed for summary in summaries}),
        "device": environment["device"],
        "torch": environment["torch"],
        **more,
        "rows": [row for summary in summaries for row in rows_of(summary)],
        "flags": [{"run": s.name, "seed": s.seed, **asdict(raised)} for s in summaries for raised in s.flags],
    }
    check_claim(table, str(path))
    write_json(path, table)
    return table


def check_claim(table: dict[str, Any], where: str) -> None:
    """Refuse a claim that lacks a field or has one of another type."""
    for row, fields in [(table, FIELDS), *((row, ROW_FIELDS) for row in table.get("rows", []))]:
        for name, kind in fields.items():
            if name not in row or not isinstance(row[name], kind):
                raise UserError(f"{where}: field {name!r} is {row.get(name)!r}, must be {kind}")
