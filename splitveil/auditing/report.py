"""What an audit gives back: the summary of its evaluation, and the folder that holds everything behind it."""

import shutil
import weakref
from dataclasses import dataclass
from pathlib import Path

from splitveil.evaluation.audit_folder import is_audit
from splitveil.evaluation.summary import AttackResult, RaisedFlag, Summary, WorstCase
from splitveil.evaluation.verdict import Verdict, verdict
from splitveil.registry import UserError
from splitveil.report import write_report


@dataclass(frozen=True, repr=False)
class AuditReport:
    """The result of `splitveil.audit`."""

    summary: Summary
    """All numbers, as summary.json holds them."""
    folder: Path
    """The folder of the results: the one that was asked for, or a temporary one, whose content `save` keeps."""
    notes: tuple[str, ...] = ()
    """What a reader must know about the images or the model."""
    temporary: bool = False
    """True if the folder is deleted together with this object."""

    def __post_init__(self) -> None:
        if self.temporary:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def __repr__(self) -> str:
        """The verdict; all numbers of the summary would fill a screen."""
        counts = f"{len(self.attacks)} attacks, {len(self.flags)} flags"
        return f"<AuditReport {self.summary.name}: {self.verdict} {counts}, in {self.folder}>"

    @property
    def worst_case(self) -> WorstCase:
        """Each private image's best reconstruction over all attacks: mse, ssim and psnr, with intervals."""
        if self.summary.worst_case is None:
            raise UserError("no attack gave a number, so there is no worst case; `attacks` and `skipped` say what became of them")
        return self.summary.worst_case

    @property
    def accuracy(self) -> float | None:
        """The accuracy with the channel on, as a fraction; None without labels or without a cloud."""
        return self.summary.accuracy if self.summary.accuracy == self.summary.accuracy else None

    @property
    def attacks(self) -> dict[str, AttackResult]:
        return self.summary.attacks

    @property
    def flags(self) -> tuple[RaisedFlag, ...]:
        """Signs that a number should not be believed as it stands; docs/flags.md explains them."""
        return self.summary.flags

    @property
    def skipped(self) -> dict[str, str]:
        """Attacks of the suite that could not be run here, with the reasons."""
        return self.summary.skipped

    @property
    def not_checked(self) -> dict[str, str]:
        """Flags that could not be checked here, with the reasons."""
        return self.summary.not_checked

    @property
    def verdict(self) -> Verdict:
        """The answer in plain words; docs/verdict.md says how it is found."""
        return verdict(self.summary)

    def save(self, folder: str | Path) -> Path:
        """Copy the results into `folder`; an audit that lies there is replaced."""
        target = Path(folder)
        if target.resolve() == self.folder.resolve():
            return target
        if target.exists() and any(target.iterdir()):
            if not is_audit(target):
                raise UserError(f"{target} exists and holds no audit; name a new folder, or an empty one")
            shutil.rmtree(target)
        shutil.copytree(self.folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
        return target

    def html(self, file: str | Path) -> Path:
        """Write the report as one HTML file."""
        return write_report([self.folder], Path(file))
