"""The folder of an audit: the results of `splitveil.audit`, laid out as those of a run so that the same code reads them.

    audit/  schema.json audit.json attacks/ATTACK-SEED/{attack.json,rows.npz,samples.safetensors} summary.json report.html

audit.json says what was audited and how. An audit that was killed goes on where it stopped: an attack that was finished on the
same edge, channel and images is not run again. Up to 14 private images are in the samples of each attack, for the report.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from splitveil.files.folder import json_bytes, read_table
from splitveil.manifest import NAME, begin, changing, lists, verified
from splitveil.registry import ATTACKS, UserError

SCHEMA = 1
KIND = "splitveil audit"


@dataclass(frozen=True)
class AuditConfig:
    """What was audited, and how."""

    name: str
    seed: int
    attacks: tuple[Any, ...]
    """Configs of attacks, as a run's config holds them."""
    what: str
    """The model in words, such as "ResNet, cut after layer1"."""
    channel: tuple[str, ...]
    """The names of the defences."""
    notes: tuple[str, ...] = ()
    """What a reader must know about the images or the model, in sentences."""

    def to_dict(self) -> dict[str, Any]:
        attacks = [{"name": ATTACKS.of(attack).name, **asdict(attack)} for attack in self.attacks]
        return asdict(self) | {"attacks": attacks, "channel": list(self.channel), "notes": list(self.notes)}

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class AuditFolder:
    """Where the results of an audit are kept."""

    folder: Path
    config: AuditConfig

    @classmethod
    def create(cls, folder: Path, config: AuditConfig) -> "AuditFolder":
        """Make the folder, or take that of an earlier audit, whose attacks count as far as they are the same."""
        begun = {NAME, "audit.json"}  # all that a kill can leave before the folder is that of an audit
        found = {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.exists() else set()
        if found and lists(folder, "schema.json"):
            verified(folder, "schema.json")  # of a damaged folder it is not said that it holds something else
        if not is_audit(folder) and found - begun:
            raise UserError(f"{folder} exists and holds no audit; name a new folder, or an empty one")
        folder.mkdir(parents=True, exist_ok=True)
        if not found:
            begin(folder)
        with changing(folder) as step:
            step.write("audit.json", json_bytes(config.to_dict()))
            step.write("schema.json", json_bytes({"schema": SCHEMA, "kind": KIND}))
        return cls(folder, config)


def is_audit(folder: Path) -> bool:
    """True if the folder is that of an audit."""
    path = folder / "schema.json"
    return path.exists() and read_table(path).get("kind") == KIND
