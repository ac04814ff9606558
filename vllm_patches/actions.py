"""What the commands do."""

import os
import shutil
import tempfile
from pathlib import Path

from vllm_patches import releases, transaction, wheel
from vllm_patches.errors import PatchesError
from vllm_patches.installation import Installation
from vllm_patches.patch_set import PatchSet, contract_version
from vllm_patches.results import (
    Applied,
    Built,
    Exported,
    Interrupted,
    Patched,
    PatchedByWheel,
    Releases,
    Reverted,
    Status,
    Supported,
    Undone,
    Verified,
)


def supported() -> Releases:
    """Every supported release with its patches."""
    found = []
    for release in releases.RELEASES:
        patch_set = PatchSet.of(release)
        names = [patch.name for patch in patch_set.patches]
        lmcache = list(release.lmcache)
        contract = patch_set.contract
        found.append(
            Supported(release.version, release.torch, lmcache, names, contract)
        )
    return Releases(found)


def status(root: Path | None) -> Status:
    """Whether the vLLM is patched."""
    installation = Installation.find(root)
    patch_set = PatchSet.find(installation.version)
    supported = patch_set is not None
    if installation.editable:
        return Status(installation, supported, "editable")
    try:
        with transaction.locked(installation):
            was = transaction.interrupted(installation)
            journal = transaction.read_journal(installation)
    except transaction.Busy:
        return Status(installation, supported, "busy")
    if was:
        return Interrupted(installation, supported, "interrupted", was)
    if journal:
        release, names = journal.release, journal.series
        return Patched(
            installation, supported, "patched", release, names, journal.contract
        )
    if installation.patched_wheel:
        overlay = patch_set.overlay if patch_set else {}
        files = [installation.root / path for path in overlay]
        present = [path.read_bytes() for path in files if path.is_file()]
        contract = contract_version(present)
        return PatchedByWheel(installation, supported, "patched", "wheel", contract)
    return Status(installation, supported, "unpatched")


def apply(root: Path | None, dry_run: bool) -> Undone:
    """Patch the vLLM."""
    installation = _installed(root)
    with transaction.locked(installation):
        undone = transaction.interrupted(installation)
        if undone and dry_run:
            return Undone(installation, undone, dry_run)
        if undone:
            transaction.restore(installation)
        if transaction.read_journal(installation):
            raise PatchesError(
                f"{installation} is patched already; `vllm-patches revert` undoes it"
            )
        if installation.patched_wheel:
            raise PatchesError(
                f"{installation} was installed from a patched wheel; there is nothing "
                "to apply"
            )
        patch_set = PatchSet.require(installation.version, installation.read)
        files = _patched(installation, patch_set)
        names = [patch.name for patch in patch_set.patches]
        if not dry_run:
            transaction.swap(
                installation, files, patch_set.version, names, patch_set.contract
            )
    return Applied(
        installation,
        undone,
        dry_run,
        patch_set.version,
        names,
        patch_set.contract,
        patch_set.touched,
        list(patch_set.overlay),
    )


def _patched(installation: Installation, patch_set: PatchSet) -> dict[str, bytes]:
    """The files to write. Raises PatchesError if the vLLM is not as released."""
    release = f"{installation.name} {installation.version}"
    again = f"undo that or reinstall {release}, then apply"
    if installation.record and (bad := installation.mismatches(".py")):
        more = f" (nor are {len(bad) - 1} others)" if bad[1:] else ""
        raise PatchesError(
            f"{installation.root / bad[0].path} is {bad[0].problem}, not as its "
            f"release shipped it{more}; {again}"
        )
    for path in patch_set.overlay:
        if os.path.lexists(installation.root / path):
            raise PatchesError(
                f"{installation.root / path} exists and is not its release's; {again}"
            )
    return patch_set.apply(installation.read) | patch_set.overlay


def revert(root: Path | None, dry_run: bool) -> Reverted:
    """Put the vLLM back as it was installed, or undo what died half way."""
    installation = _installed(root)
    with transaction.locked(installation):
        was = transaction.interrupted(installation)
        journal = transaction.read_journal(installation)
        if not was and not journal:
            if installation.patched_wheel:
                release = releases.public(installation.version)
                raise PatchesError(
                    f"{installation} was installed from a patched wheel; install "
                    f"{installation.name} {release} instead"
                )
            raise PatchesError(
                f"{installation} is not patched; there is nothing to revert "
                "(`vllm-patches apply` patches it)"
            )
        if not dry_run:
            transaction.restore(installation)
    files = list(journal.files) if journal else []
    return Reverted(installation, was, dry_run, files)


def verify(root: Path | None) -> Verified:
    """Recompute the hash and the size of every file that RECORD lists, in a tree
    without one of every file that `apply` changed."""
    installation = _installed(root)
    with transaction.locked(installation):
        if was := transaction.interrupted(installation):
            raise PatchesError(
                f"an interrupted {was} left {installation.root} half done; "
                "`vllm-patches revert` undoes it"
            )
        journal = transaction.read_journal(installation)
        if installation.record:
            bad = installation.mismatches()
        elif journal:
            bad = transaction.mismatches(installation, journal)
        else:
            raise PatchesError(
                f"{installation.root} has no RECORD and no patches; there is nothing "
                "to verify"
            )
    return Verified(installation, bool(journal), bad)


def build_wheel(source: Path, folder: Path, dry_run: bool) -> Built:
    """Build a patched wheel in a folder."""
    plan = wheel.plan(source, folder)
    sha256 = None if dry_run else wheel.build(plan)
    return Built(str(plan.wheel), plan.version, plan.release, sha256, dry_run)


def export(
    folder: Path, root: Path | None, release: str | None, dry_run: bool
) -> Exported:
    """Write a release's patches, the overlay as the first, into a new folder."""
    release = release or Installation.find(root).version
    if not (patch_set := PatchSet.find(release)):
        versions = ", ".join(each.version for each in releases.RELEASES)
        raise PatchesError(
            f"vLLM {release} is not supported; choose with --release: {versions}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PatchesError(f"{folder} is there and not empty; give a new folder")
    files = {"0000-overlay.patch": patch_set.overlay_patch()}
    files |= {patch.name: patch.text for patch in patch_set.patches}
    if not dry_run:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        try:
            for name, text in files.items():
                (fresh / name).write_bytes(text.encode())
            fresh.chmod(0o755)
            os.replace(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return Exported(patch_set.version, str(folder), list(files), dry_run)


def _installed(root: Path | None) -> Installation:
    """The vLLM, unless it is an editable install."""
    installation = Installation.find(root)
    if installation.editable:
        raise PatchesError(
            f"{installation} is an editable install of a checkout; in the checkout, "
            "run `vllm-patches export DIR` and `git am DIR/*.patch`"
        )
    return installation
