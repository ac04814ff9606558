"""What the commands give: fields for machines, lines for people."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm_patches.installation import Installation, Mismatch


@dataclass(frozen=True)
class Result:
    """What a command did or found. Its fields are the keys of its JSON document."""

    def document(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)

    def lines(self) -> list[str]:
        """What to tell a person."""
        return []

    @property
    def failed(self) -> bool:
        """Whether the command ends with exit status 1."""
        return self.error is not None

    @property
    def error(self) -> str | None:
        """What is wrong and the way out, in one line."""
        return None


@dataclass(frozen=True)
class Rows(Result):
    """A result that a terminal shows as a table."""

    header: ClassVar[tuple[str, ...]] = ()

    def rows(self) -> list[tuple[str, ...]]:
        raise NotImplementedError

    def notes(self) -> list[str]:
        """What stands below the table."""
        return []

    def lines(self) -> list[str]:
        return ["\t".join(row) for row in self.rows()] + self.notes()


@dataclass(frozen=True)
class Supported(Result):
    """One supported release."""

    release: str
    torch: str
    lmcache: list[str]
    patches: list[str]
    contract: int | None


@dataclass(frozen=True)
class Releases(Rows):
    header = ("vLLM", "torch", "tested with LMCache", "patches", "contract")
    releases: list[Supported]

    def rows(self) -> list[tuple[str, ...]]:
        return [
            (
                each.release,
                each.torch,
                ", ".join(each.lmcache),
                str(len(each.patches)),
                str(each.contract),
            )
            for each in self.releases
        ]


@dataclass(frozen=True)
class About(Result):
    """A result about an installation."""

    installation: Installation

    @property
    def name(self) -> str:
        return f"{self.installation.name} {self.installation.version}"

    def document(self) -> dict[str, Any]:
        document = super().document()
        del document["installation"]
        return {
            "distribution": self.installation.name,
            "version": self.installation.version,
            "root": str(self.installation.root),
        } | document


@dataclass(frozen=True)
class Status(About, Rows):
    """Whether an installation is patched."""

    supported: bool
    state: str
    """"unpatched", "patched", "interrupted", "busy" or "editable"."""

    def told(self) -> str:
        """The state in words."""
        words = {
            "busy": "busy: another vllm-patches is at work on it",
            "editable": "editable install of a checkout: see `vllm-patches export "
            "--help`",
        }
        if self.state == "unpatched" and not self.supported:
            return "unpatched, release not supported"
        return words.get(self.state, self.state)

    def rows(self) -> list[tuple[str, ...]]:
        return [
            ("vLLM", self.name),
            ("where", str(self.installation.root)),
            ("state", self.told()),
        ]


@dataclass(frozen=True)
class Interrupted(Status):
    interrupted: str
    """What died half way, "apply" or "revert"."""

    def told(self) -> str:
        return (
            f"interrupted: an {self.interrupted} died half way; the next apply or "
            "revert undoes it first"
        )


@dataclass(frozen=True)
class Patched(Status):
    release: str
    patches: list[str]
    contract: int | None

    def rows(self) -> list[tuple[str, ...]]:
        return [
            *super().rows(),
            ("series", f"v{self.release}"),
            *(("patch", name) for name in self.patches),
            *_contract(self.contract),
        ]


@dataclass(frozen=True)
class PatchedByWheel(Status):
    by: str
    """"wheel"."""
    contract: int | None

    def told(self) -> str:
        return "patched (from a patched wheel)"

    def rows(self) -> list[tuple[str, ...]]:
        return [*super().rows(), *_contract(self.contract)]


def _contract(contract: int | None) -> list[tuple[str, ...]]:
    return [] if contract is None else [("contract", str(contract))]


@dataclass(frozen=True)
class Undone(About):
    """A result of a command that undoes first what died half way."""

    undone: str | None
    """What that was, "apply" or "revert"."""
    dry_run: bool

    def lines(self) -> list[str]:
        if not self.undone:
            return []
        verb = "would be undone" if self.dry_run else "undone"
        return [f"{verb}: an {self.undone} that died half way"]


@dataclass(frozen=True)
class Applied(Undone):
    release: str
    patches: list[str]
    contract: int | None
    modified: list[str]
    new: list[str]

    def lines(self) -> list[str]:
        verb = "can be patched" if self.dry_run else "patched"
        counts = (
            f"release {self.release}, {len(self.patches)} patches, "
            f"{len(self.modified)} files modified, {len(self.new)} new"
        )
        return [*super().lines(), f"{verb}: {self.installation} ({counts})"]


@dataclass(frozen=True)
class Reverted(Undone):
    files: list[str]

    def lines(self) -> list[str]:
        verb = "can be put back" if self.dry_run else "as installed"
        return [*super().lines(), f"{verb}: {self.installation}"]


@dataclass(frozen=True)
class Verified(About):
    patched: bool
    mismatches: list[Mismatch]

    def lines(self) -> list[str]:
        if not self.mismatches:
            return [f"as recorded: {self.installation}"]
        return [f"{each.problem}: {each.path}" for each in self.mismatches]

    @property
    def error(self) -> str | None:
        if not self.mismatches:
            return None
        return (
            f"{len(self.mismatches)} files of {self.installation} are not as recorded; "
            "undo that or reinstall it"
        )


@dataclass(frozen=True)
class Built(Result):
    """A patched wheel."""

    wheel: str
    version: str
    release: str
    sha256: str | None
    """None in a dry run."""
    dry_run: bool

    def lines(self) -> list[str]:
        if self.dry_run:
            return [f"can be built: {self.wheel}"]
        return [f"built: {self.wheel}", f"sha256: {self.sha256}"]


@dataclass(frozen=True)
class Exported(Result):
    """A release's patches in a folder."""

    release: str
    folder: str
    files: list[str]
    dry_run: bool

    def lines(self) -> list[str]:
        what = f"{len(self.files)} patches for vLLM {self.release} to {self.folder}"
        if self.dry_run:
            return [f"can be exported: {what}"]
        folder = Path(self.folder).resolve()
        return [f"exported: {what}", f"in the checkout: git am {folder}/*.patch"]


@dataclass(frozen=True)
class Compared(Result):
    """Two engines' fingerprints."""

    here: str
    there: str
    differences: list[str]

    def lines(self) -> list[str]:
        return self.differences or [f"the same: {self.here}"]

    @property
    def failed(self) -> bool:
        return bool(self.differences)
