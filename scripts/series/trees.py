"""vLLM releases as git repositories: pristine, with a series' patches as commits."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from scripts.engines import environment
from scripts.series import wheels
from vllm_patches.patch_set import OVERLAY

TREES = environment.CACHE / "checkouts"
AUTHOR = "vllm-logical-blocks maintainers"
EMAIL = "maintainers@vllm-logical-blocks.invalid"
PRISTINE = "refs/tags/pristine"
"""The release as published, the commit below the series."""
AM = ("am", "--quiet", "--keep-non-patch", "--keep-cr")
"""How mails become commits."""
WRITTEN = "refs/written"
"""The commits that the patch files hold."""

# One way to write a patch, whatever git's version and the user's settings.
_FORMAT = ("--zero-commit", "--no-signature", "--no-stat", "--full-index", "-N")
_CONFIG = {
    "user.name": AUTHOR,
    "user.email": EMAIL,
    "commit.gpgSign": "false",
    "core.autocrlf": "false",
    "diff.algorithm": "myers",
}


class GitFailed(Exception):
    """git refused; the message is what it printed."""


def path(release: str) -> Path:
    """Where the release's repository is, or would be."""
    return TREES / release


def git(tree: Path, *arguments: str, stdin: bytes | None = None) -> str:
    """Run git there, deaf to the user's settings; returns what it printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    done = subprocess.run(
        ["git", "-C", str(tree), *arguments], env=env, input=stdin, capture_output=True
    )
    if done.returncode:
        raise GitFailed((done.stderr or done.stdout).decode().strip())
    return done.stdout.decode()


def init(tree: Path) -> None:
    """Make a folder a git repository."""
    git(tree, "init", "--quiet", "--initial-branch=series")
    for name, value in _CONFIG.items():
        git(tree, "config", name, value)


def commit_pristine(tree: Path, message: str) -> None:
    """Commit all that is there as what the series stands on."""
    git(tree, "add", "--all", "--force")
    git(tree, "commit", "--quiet", "--no-verify", "-m", message)
    git(tree, "update-ref", PRISTINE, "HEAD")


def make(
    release: str,
    patches: Iterable[bytes] = (),
    tree: Path | None = None,
    pristine: Path | None = None,
) -> Path:
    """Make the release's repository with the patches as commits; returns its path.
    `pristine` has its files, if not the package index.

    The overlay's files are links to the project's own, unknown to git.

    Raises:
        GitFailed: if a patch does not apply. Nothing is left behind.

    """
    tree = tree or path(release)
    tree.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=tree.parent, prefix=f".{tree.name}-"))
    try:
        source = pristine or wheels.unpack_python(release)
        shutil.copytree(source / "vllm", fresh / "vllm")
        init(fresh)
        commit_pristine(fresh, f"vLLM {release} as released")
        apply(fresh, patches)
        git(fresh, "update-ref", WRITTEN, "HEAD")
        _link_overlay(fresh)
        fresh.rename(tree)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return tree


def _link_overlay(tree: Path) -> None:
    with (tree / ".git/info/exclude").open("a") as exclude:
        exclude.write("__pycache__/\n")
        for file in OVERLAY.rglob("*.py"):
            name = file.relative_to(OVERLAY).as_posix()
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).symlink_to(file)
            exclude.write(f"/{name}\n")


def apply(tree: Path, patches: Iterable[bytes]) -> None:
    """Commit each patch, its message and date as they are."""
    for patch in patches:
        try:
            git(tree, *AM, stdin=patch)
        except GitFailed:
            git(tree, "am", "--abort")
            raise


def export(tree: Path, tip: str = "HEAD", since: str = PRISTINE) -> dict[str, bytes]:
    """The commits above the pristine one, or a later one, as patch files, by name."""
    with tempfile.TemporaryDirectory() as folder:
        revisions = f"{since}..{tip}"
        git(tree, "format-patch", "--quiet", *_FORMAT, "-o", folder, revisions)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def unfinished(tree: Path) -> bool:
    """Whether edits or an operation of git's wait there to be committed."""
    started = ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD")
    return bool(git(tree, "status", "--porcelain")) or any(
        (tree / ".git" / name).exists() for name in started
    )
