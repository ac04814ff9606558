"""What is done to a release: its series of patches and the overlay."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.version import Version

from vllm_patches import releases, sums
from vllm_patches.errors import PatchesError
from vllm_patches.patch import Files, Outcome, Patch, Read
from vllm_patches.releases import Release

OVERLAY = Path(__file__).parent / "overlay"
CONTRACT = re.compile(rb"^CONTRACT_VERSION = (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class PatchSet:
    """What is done to a release: its series and the overlay."""

    version: str
    patches: list[Patch]
    overlay: dict[str, bytes]
    """New files, by their path relative to the root."""

    @classmethod
    def of(cls, release: Release) -> "PatchSet":
        """Read a release's series and the overlay."""
        series = sums.read(release.series)
        patches = [Patch(name, data.decode()) for name, data in series.items()]
        if not patches:
            raise PatchesError(
                f"no patches in {release.series}; reinstall vllm-logical-blocks"
            )
        return cls(release.version, patches, sums.read(OVERLAY))

    @classmethod
    def find(cls, version: str) -> "PatchSet | None":
        """The patch set for a vLLM version, its local tag aside; None where there is
        none."""
        release = releases.find(version)
        return cls.of(release) if release else None

    @classmethod
    def nearest(cls, version: str, read: Read | None = None) -> "PatchSet":
        """The patch set that fits these files best."""
        return cls.by_fit(version, read)[0]

    @classmethod
    def by_fit(cls, version: str, read: Read | None = None) -> list["PatchSet"]:
        """All patch sets, first the one with the fewest hunks in conflict with these
        files, then of the release next in number. By number alone without files."""

        def rank(text: str) -> int:
            number = Version(text)
            return 1_000_000 * number.major + 1_000 * number.minor + number.micro

        def distance(patch_set: "PatchSet") -> tuple[int, int]:
            outcomes = patch_set.port(read) if read else []
            conflicts = sum(len(outcome.conflicts) for outcome in outcomes)
            return conflicts, abs(rank(patch_set.version) - rank(version))

        return sorted((cls.of(each) for each in releases.RELEASES), key=distance)

    @classmethod
    def require(cls, version: str, read: Read, chosen: str | None = None) -> "PatchSet":
        """The patch set for a vLLM version, or for the release chosen in its place.
        Raises PatchesError on an unsupported one, with a report of how far the series
        applies that fits best."""
        if patch_set := cls.find(chosen or version):
            return patch_set
        if chosen:
            raise unsupported(chosen)
        near = cls.nearest(version, read)
        outcomes = near.port(read)
        fits = not any(outcome.conflicts for outcome in outcomes)
        raise PatchesError(
            f"vLLM {version} is not supported; the nearest supported release is "
            f"{near.version}: "
            + (
                f"its series fits, `--release {near.version}` applies it"
                if fits
                else f"install that, or `export --release {near.version}` its patches "
                "and port them"
            ),
            [str(outcome) for outcome in outcomes],
            code="unsupported",
        )

    @property
    def digest(self) -> str:
        """SHA-256 of all that it does, in hex."""
        sha256 = hashlib.sha256(self.version.encode())
        named = [(patch.name, patch.text.encode()) for patch in self.patches]
        for name, data in [*named, *self.overlay.items()]:
            sha256.update(f"\n{name} {len(data)}\n".encode() + data)
        return sha256.hexdigest()

    @property
    def contract(self) -> int | None:
        """The overlay's contract version."""
        return contract_version(self.overlay.values())

    @property
    def touched(self) -> list[str]:
        """The files that the series modifies."""
        return list(dict.fromkeys(path for p in self.patches for path in p.hunks))

    def apply(self, read: Read, search: bool = False) -> dict[str, bytes]:
        """The modified files' new bytes. Every hunk must match at its very line, or
        with `search` at the nearest; raises PatchesError on the first that does not."""
        files = Files(read)
        for patch in self.patches:
            for path, hunks in patch.hunks.items():
                for hunk, offset in files.patch(path, hunks, search):
                    if offset is None:
                        raise PatchesError(
                            f"{patch.name} does not apply: {hunk.where} does not "
                            f"match; is this vLLM {self.version} as released?",
                            code="changed",
                        )
        return files.bytes()

    def is_in(self, read: Read) -> bool:
        """Whether files have the overlay and every change of the series."""
        try:
            if any(read(path) != data for path, data in self.overlay.items()):
                return False
        except (OSError, KeyError):
            return False
        files = Files(read)
        return all(files.unpatch(patch) for patch in reversed(self.patches))

    def port(self, read: Read) -> list["Outcome"]:
        """How each patch fares on files that it was not made for. Hunks are searched
        for near their lines, and a patch applies wholly or not at all, as in git."""
        files = Files(read)
        return [files.port(patch) for patch in self.patches]

    def report(self, read: Read) -> list[str]:
        """One line per patch: its outcome on these files."""
        return [str(outcome) for outcome in self.port(read)]

    def overlay_patch(self) -> str:
        """The overlay as a mail that `git am` takes, from the series' first author."""
        headers = HeaderParser().parsestr(self.patches[0].text)
        lines = [
            "From " + "0" * 40 + " Mon Sep 17 00:00:00 2001",
            "From: " + " ".join(headers["From"].split()),
            f"Date: {headers['Date']}",
            "Subject: [PATCH] Add the files that the series wires in",
            "",
            "---",
        ]
        for path, data in self.overlay.items():
            lines += [f"diff --git a/{path} b/{path}", "new file mode 100644"]
            if not data:
                lines += ["index 0000000..e69de29"]  # git's name of an empty file
                continue
            added = data.decode().removesuffix("\n").split("\n")
            lines += ["--- /dev/null", f"+++ b/{path}", f"@@ -0,0 +1,{len(added)} @@"]
            lines += ["+" + line for line in added]
        return "\n".join(lines) + "\n"


def unsupported(version: str) -> PatchesError:
    """The error for a release that was asked for by name."""
    versions = ", ".join(each.version for each in releases.RELEASES)
    return PatchesError(
        f"vLLM {version} is not supported; choose with --release: {versions}",
        code="unsupported",
    )


def contract_version(files: Iterable[bytes]) -> int | None:
    """The `CONTRACT_VERSION` that one of the files sets, None where none does."""
    for data in files:
        if match := CONTRACT.search(data):
            return int(match[1])
    return None
