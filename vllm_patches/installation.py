"""An installed or unpacked vLLM: where it is, which release, and its RECORD."""

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_patches.errors import PatchesError
from vllm_patches.record import Record, lists

OWNED = "vllm/__init__.py"
"""Whose RECORD lists this file owns the package, whatever its name."""
LOCAL_TAG = "logical"
"""Part of the local version of a wheel that this tool patched."""
WHEEL_PATCHES = "vllm_patches.json"
"""The file in such a wheel's dist-info that says how."""


@dataclass(frozen=True)
class Mismatch:
    """A file that is not as RECORD says."""

    path: str
    problem: str
    """"missing", "changed" or "not listed"."""


@dataclass(frozen=True)
class Installation:
    """A vLLM: the folder that holds `vllm/` and, if pip installed it, the dist-info."""

    root: Path
    name: str
    """The distribution's name, "vllm" for a tree without one."""
    version: str
    """With the local tag, if any."""
    dist_info: Path | None = None
    editable: bool = False

    @classmethod
    def find(cls, root: Path | None = None) -> "Installation":
        """The vLLM in `root` (a site-packages, an unpacked tree or a checkout; or a
        Python, for the vLLM that it imports), by default the one that this environment
        imports. Raises PatchesError if there is none."""
        if root and root.is_file():
            return cls._among(root, _path_of(root))
        return cls._among(root, [root] if root else _folders(sys.path))

    @classmethod
    def _among(cls, root: Path | None, folders: list[Path]) -> "Installation":
        for folder in folders:
            if owners := [info for info in _dist_infos(folder) if _owns(info)]:
                if len(owners) > 1:
                    names = " and ".join(sorted(info.name for info in owners))
                    raise PatchesError(
                        f"{names} in {folder} both own vllm; uninstall both, install "
                        "one"
                    )
                return cls._of(folder, owners[0])
        for folder in folders:
            for info in _dist_infos(folder):
                if _editable(info):
                    return cls._of(folder, info, editable=True)
        if root is None or root.is_file():
            raise PatchesError(
                f"no vLLM is installed in {root or 'this environment'}; install it, or "
                "give the folder that holds vllm/ with --target",
                code="not-found",
            )
        if not (root / OWNED).is_file():
            raise PatchesError(
                f"no vllm/ in {root}; give the folder that holds vllm/",
                code="not-found",
            )
        return cls(root.resolve(), "vllm", _tree_version(root))

    @classmethod
    def _of(cls, folder: Path, info: Path, editable: bool = False) -> "Installation":
        metadata = importlib.metadata.Distribution.at(info).metadata
        if metadata is None or "Version" not in metadata or "Name" not in metadata:
            raise PatchesError(
                f"{info} has no METADATA; remove it, it is what an uninstall left",
                code="not-found",
            )
        name, version = metadata["Name"], metadata["Version"]
        root = folder.resolve()
        return cls(root, name, version, root / info.name, editable)

    def __post_init__(self) -> None:
        try:
            Version(self.version)
        except InvalidVersion:
            raise PatchesError(
                f"the vLLM in {self.root} calls its version {self.version!r}, which "
                "names no release; install a release"
            ) from None

    def __str__(self) -> str:
        return f"{self.name} {self.version} in {self.root}"

    @property
    def record(self) -> Path | None:
        return self.dist_info and self.dist_info / "RECORD"

    @property
    def patched_wheel(self) -> bool:
        """Whether it was installed from a wheel that this tool patched."""
        return has_local_tag(self.version)

    def read(self, path: str) -> bytes:
        """A file's bytes, by its path relative to the root."""
        return (self.root / path).read_bytes()

    @property
    def wheel_patches(self) -> "WheelPatches | None":
        """What a patched wheel says of itself; None from an earlier tool's."""
        assert self.dist_info
        try:
            data = (self.dist_info / WHEEL_PATCHES).read_bytes()
            return WheelPatches(**json.loads(data))
        except (OSError, ValueError, TypeError):
            return None

    def outside(self) -> list[Mismatch]:
        """The files that RECORD lists outside the root, such as scripts, and that are
        not as it says. Copies of the root go without them."""
        return self._mismatches(_is_outside)

    def unlisted(self) -> list[Mismatch]:
        """The Python files below vllm/ that RECORD does not list."""
        assert self.record is not None
        listed = Record.parse(self.record.read_bytes(), self).entries
        files = sorted((self.root / "vllm").rglob("*.py"))
        paths = (path.relative_to(self.root).as_posix() for path in files)
        return [Mismatch(path, "not listed") for path in paths if path not in listed]

    def mismatches(self, suffix: str = "") -> list[Mismatch]:
        """The files (ending in `suffix`) whose hash or size is not RECORD's. Rows
        without a hash, such as compiled files', and files outside the root are
        skipped."""
        return self._mismatches(
            lambda path: path.endswith(suffix) and not _is_outside(path)
        )

    def _mismatches(self, wanted: Callable[[str], bool]) -> list[Mismatch]:
        assert self.record is not None
        found = []
        record = Record.parse(self.record.read_bytes(), self)
        for path, entry in record.entries.items():
            if not wanted(path) or not entry.hash_:
                continue
            try:
                with (self.root / path).open("rb") as file:
                    if not entry.validate_stream(file):
                        found.append(Mismatch(path, "changed"))
            except (FileNotFoundError, NotADirectoryError):
                found.append(Mismatch(path, "missing"))
        return found


@dataclass(frozen=True)
class WheelPatches:
    """What a patched wheel's dist-info says of its patches, and a journal too."""

    tool: str
    """This project's version."""
    release: str
    patches: list[str]
    contract: int | None
    digest: str
    """The patch set's."""


def _is_outside(path: str) -> bool:
    return path.startswith(("/", "../"))


def _folders(path: list[str]) -> list[Path]:
    return [Path(entry) for entry in path if entry]


def _path_of(python: Path) -> list[Path]:
    """Where a Python imports from. Raises PatchesError if it is none."""
    command = [str(python), "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        return _folders(json.loads(done.stdout))
    except (OSError, ValueError):
        raise PatchesError(
            f"{python} is no Python that runs here; give an interpreter",
            code="not-found",
        ) from None


def unpatched(version: str) -> str:
    """The version of the wheel that a patched one was made of."""
    return re.split(rf"[+.]{LOCAL_TAG}\b", version)[0]


def has_local_tag(version: str) -> bool:
    """Whether it is the version of a wheel that this tool patched."""
    return LOCAL_TAG in (Version(version).local or "").split(".")


def _dist_infos(folder: Path) -> Iterator[Path]:
    return (record.parent for record in folder.glob("*.dist-info/RECORD"))


def _owns(info: Path) -> bool:
    return lists((info / "RECORD").read_bytes(), OWNED)


def _editable(info: Path) -> bool:
    """Whether this is an editable install of a distribution that provides vllm."""
    try:
        url = json.loads((info / "direct_url.json").read_text(encoding="utf-8"))
        top = (info / "top_level.txt").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return False
    return bool(url.get("dir_info", {}).get("editable")) and "vllm" in top


def _tree_version(root: Path) -> str:
    """The version of a tree without a dist-info: what git or `_version.py` says."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--tags", "--long"]
        done = subprocess.run(
            [*command, "--match", "v*"], capture_output=True, text=True
        )
        if match := re.fullmatch(r"v(.+)-(\d+)-(g\w+)\n", done.stdout):
            tag, commits, commit = match.groups()
            with_commits = f"{Version(tag).base_version}.dev{commits}+{commit}"
            return tag if commits == "0" else with_commits
    version = root / "vllm" / "_version.py"
    if version.is_file():
        match = re.search(r"version = '(.+)'", version.read_text(encoding="utf-8"))
        if match:
            return match[1]
    raise PatchesError(
        f"cannot tell the release of {root}: no dist-info, no git tag, no "
        "vllm/_version.py; fetch the tags, or `export --release` and `git am`"
    )
