"""What the commands give: fields for machines, lines for people."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm_patches.installation import Installation, Mismatch
from vllm_patches.releases import public


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

    @property
    def code(self) -> str:
        """The kind of what is wrong, in a word; gives the exit status."""
        return "refused"


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
    """What died half way, "apply", "update" or "revert"."""

    def told(self) -> str:
        return (
            f"interrupted: an {self.interrupted} died half way; the next apply or "
            "revert undoes it first"
        )


@dataclass(frozen=True)
class Leftover(Status):
    def told(self) -> str:
        return (
            "unpatched; a build that is gone left its patches' state, which the next "
            "apply or revert clears"
        )


@dataclass(frozen=True)
class Patched(Status):
    by: str
    """How the patches came: "apply", "wheel" or "source" (a patched checkout)."""
    release: str
    patches: list[str]
    contract: int | None
    tool: str | None
    """The version of this project that they are of, None if unknown."""
    digest: str | None
    """Theirs, as of `PatchSet.digest`; None if unknown."""
    out_of_date: bool
    """Whether this version of the project has others for the release."""

    def told(self) -> str:
        words = {"wheel": " (from a patched wheel)", "source": " (in its source)"}
        origin = words.get(self.by, "")
        if not self.out_of_date:
            return f"patched{origin}"
        way = {"apply": "`vllm-patches apply --update` brings it up"}.get(
            self.by, "install a newer one"
        )
        return f"patched{origin}, out of date: {way}"

    def rows(self) -> list[tuple[str, ...]]:
        chosen = self.release != public(self.installation.version)
        return [
            *super().rows(),
            ("series", f"v{self.release}" + " (chosen with --release)" * chosen),
            *(("patch", name) for name in self.patches),
            *([] if self.contract is None else [("contract", str(self.contract))]),
            ("digest", (self.digest or "unknown")[:16]),
            ("by", f"vllm-logical-blocks {self.tool or 'of unknown version'}"),
        ]


@dataclass(frozen=True)
class Checked(Result):
    """Whether an installation is patched as it should be."""

    status: Status
    mismatches: list[Mismatch]

    def document(self) -> dict[str, Any]:
        mismatches = [asdict(each) for each in self.mismatches]
        return self.status.document() | {"mismatches": mismatches}

    def lines(self) -> list[str]:
        wrong = [f"{each.problem}: {each.path}" for each in self.mismatches]
        return [*self.status.lines(), *wrong]

    @property
    def code(self) -> str:
        status = self.status
        if status.state == "patched":
            assert isinstance(status, Patched)
            return "out-of-date" if status.out_of_date else "changed"
        if status.state == "unpatched" and not status.supported:
            return "unsupported"
        return status.state

    @property
    def error(self) -> str | None:
        status = self.status
        good = isinstance(status, Patched) and not status.out_of_date
        if good and not self.mismatches:
            return None
        what = status.told()
        if good:
            what = f"{len(self.mismatches)} files are not as recorded"
        return f"{status.installation}: {what}"


@dataclass(frozen=True)
class Undone(About):
    """A result of a command that undoes first what died half way."""

    undone: str | None
    """What that was, "apply", "update", "revert", or "leftover": of another build."""
    dry_run: bool

    def lines(self) -> list[str]:
        if not self.undone:
            return []
        verb = "would be undone" if self.dry_run else "undone"
        if self.undone == "leftover":
            return [f"{verb}: the patches' state of a build that is gone"]
        return [f"{verb}: an {self.undone} that died half way"]


@dataclass(frozen=True)
class Kept(Undone):
    """Nothing was to do."""

    release: str

    def lines(self) -> list[str]:
        return [*super().lines(), f"patched already: {self.installation}"]


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
    outside: list[Mismatch]
    """Of the files that RECORD lists outside the root; copies go without them."""

    def lines(self) -> list[str]:
        notes = [f"note: {each.problem}: {each.path}" for each in self.outside]
        if not self.mismatches:
            unpatched = "" if self.patched else " (unpatched)"
            return [f"as recorded{unpatched}: {self.installation}", *notes]
        return [f"{each.problem}: {each.path}" for each in self.mismatches] + notes

    @property
    def code(self) -> str:
        return "changed"

    @property
    def error(self) -> str | None:
        if not self.mismatches:
            return None
        return (
            f"{len(self.mismatches)} files of {self.installation} are not as recorded; "
            "undo that or reinstall it"
        )


@dataclass(frozen=True)
class Differences(About):
    """What the patches change."""

    patch: str

    def lines(self) -> list[str]:
        return self.patch.splitlines()


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
        return [
            f"built: {self.wheel}",
            f"sha256: {self.sha256}",
            f"checksum file: {self.wheel}.sha256",
        ]


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
