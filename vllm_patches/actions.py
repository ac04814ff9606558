"""What the commands do, each giving a document that JSON can hold."""

import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_patches import releases, transaction, wheel
from vllm_patches.errors import PatchesError
from vllm_patches.installation import Installation
from vllm_patches.patch_set import PatchSet, contract_version

Document = dict[str, Any]


def supported() -> list[Document]:
    """Every supported release with its patches."""
    documents = []
    for release in releases.RELEASES:
        patch_set = PatchSet.of(release)
        documents.append(
            {
                "release": release.version,
                "torch": release.torch,
                "lmcache": list(release.lmcache),
                "patches": [patch.name for patch in patch_set.patches],
                "contract": patch_set.contract,
            }
        )
    return documents


def status(root: Path | None) -> Document:
    """Whether the vLLM is patched. `state` is one of "unpatched", "patched",
    "interrupted" (`interrupted` says by what), "busy" and "editable"."""
    installation = Installation.find(root)
    patch_set = PatchSet.find(installation.version)
    document = _about(installation) | {"supported": patch_set is not None}
    if installation.editable:
        return document | {"state": "editable"}
    try:
        with transaction.locked(installation):
            was = transaction.interrupted(installation)
            journal = transaction.read_journal(installation)
    except transaction.Busy:
        return document | {"state": "busy"}
    if was:
        return document | {"state": "interrupted", "interrupted": was}
    if journal:
        return document | {
            "state": "patched",
            "release": journal.release,
            "patches": journal.series,
            "contract": journal.contract,
        }
    if installation.patched_wheel:
        overlay = patch_set.overlay if patch_set else {}
        files = [installation.root / path for path in overlay]
        present = [path.read_bytes() for path in files if path.is_file()]
        contract = contract_version(present)
        return document | {"state": "patched", "by": "wheel", "contract": contract}
    return document | {"state": "unpatched"}


def apply(root: Path | None, dry_run: bool) -> Document:
    """Patch the vLLM."""
    installation = _installed(root)
    with transaction.locked(installation):
        undone = transaction.interrupted(installation)
        if undone and dry_run:
            return _about(installation) | {"undone": undone}
        transaction.recover(installation)
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
    return _about(installation) | {
        "release": patch_set.version,
        "patches": names,
        "contract": patch_set.contract,
        "modified": patch_set.touched,
        "new": list(patch_set.overlay),
        "undone": undone,
    }


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


def revert(root: Path | None, dry_run: bool) -> Document:
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
    return _about(installation) | {"files": files, "undone": was}


def verify(root: Path | None) -> Document:
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
    return _about(installation) | {
        "patched": bool(journal),
        "mismatches": [asdict(each) for each in bad],
    }


def build_wheel(source: Path, folder: Path, dry_run: bool) -> Document:
    """Build a patched wheel in a folder."""
    plan = wheel.plan(source, folder)
    return {
        "wheel": str(plan.wheel),
        "version": plan.version,
        "release": plan.release,
        "sha256": None if dry_run else wheel.build(plan),
    }


def export(
    folder: Path, root: Path | None, release: str | None, dry_run: bool
) -> Document:
    """Write a release's patches, the overlay as the first, into a new folder."""
    if release:
        patch_set = PatchSet.find(release)
    else:
        installation = Installation.find(root)
        release, patch_set = installation.version, PatchSet.find(installation.version)
    if not patch_set:
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
    return {"release": patch_set.version, "folder": str(folder), "files": list(files)}


def _installed(root: Path | None) -> Installation:
    """The vLLM, unless it is an editable install."""
    installation = Installation.find(root)
    if installation.editable:
        raise PatchesError(
            f"{installation} is an editable install of a checkout; in the checkout, "
            "run `vllm-patches export DIR` and `git am DIR/*.patch`"
        )
    return installation


def _about(installation: Installation) -> Document:
    return {
        "distribution": installation.name,
        "version": installation.version,
        "root": str(installation.root),
    }
