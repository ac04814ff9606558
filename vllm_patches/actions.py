"""What the commands do, each giving a document that JSON can hold."""

import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_patches import releases, series, target, transaction, wheel
from vllm_patches.errors import PatchesError
from vllm_patches.series import PatchSet
from vllm_patches.target import Target

Document = dict[str, Any]


def supported() -> list[Document]:
    """Every supported release with its patches."""
    documents = []
    for release in releases.RELEASES:
        patch_set = PatchSet.load(release.version, release.series)
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


def status(path: Path | None) -> Document:
    """Whether the vLLM is patched. `state` is one of "unpatched", "patched",
    "interrupted" (`interrupted` says by what), "busy" and "editable"."""
    vllm = target.find(path)
    document = _about(vllm) | {"supported": series.find(vllm.version) is not None}
    if vllm.editable:
        return document | {"state": "editable"}
    try:
        with transaction.locked(vllm):
            was = transaction.interrupted(vllm)
            journal = transaction.read_journal(vllm)
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
    if vllm.patched_wheel:
        patch_set = series.find(vllm.version)
        files = [vllm.root / path for path in patch_set.overlay] if patch_set else []
        present = [path.read_bytes() for path in files if path.is_file()]
        contract = series.contract_version(present)
        return document | {"state": "patched", "by": "wheel", "contract": contract}
    return document | {"state": "unpatched"}


def apply(path: Path | None, dry_run: bool) -> Document:
    """Patch the vLLM."""
    vllm = _installed(path)
    with transaction.locked(vllm):
        undone = transaction.interrupted(vllm)
        if undone and dry_run:
            return _about(vllm) | {"undone": undone}
        transaction.recover(vllm)
        if transaction.read_journal(vllm):
            raise PatchesError(
                f"{vllm} is patched already; `vllm-patches revert` undoes it"
            )
        if vllm.patched_wheel:
            raise PatchesError(
                f"{vllm} was installed from a patched wheel; there is nothing to apply"
            )
        patch_set = series.require(vllm.version, vllm.read)
        files = _patched(vllm, patch_set)
        names = [patch.name for patch in patch_set.patches]
        if not dry_run:
            transaction.swap(vllm, files, patch_set.version, names, patch_set.contract)
    return _about(vllm) | {
        "release": patch_set.version,
        "patches": names,
        "contract": patch_set.contract,
        "modified": patch_set.touched,
        "new": list(patch_set.overlay),
        "undone": undone,
    }


def _patched(vllm: Target, patch_set: PatchSet) -> dict[str, bytes]:
    """The files to write. Raises PatchesError if the vLLM is not as released."""
    again = f"undo that or reinstall {vllm.name} {vllm.version}, then apply"
    if vllm.record and (bad := target.mismatches(vllm, ".py")):
        more = f" (nor are {len(bad) - 1} others)" if bad[1:] else ""
        raise PatchesError(
            f"{vllm.root / bad[0].path} is {bad[0].problem}, not as its release "
            f"shipped it{more}; {again}"
        )
    for path in patch_set.overlay:
        if os.path.lexists(vllm.root / path):
            raise PatchesError(
                f"{vllm.root / path} exists and is not its release's; {again}"
            )
    return patch_set.apply(vllm.read) | patch_set.overlay


def revert(path: Path | None, dry_run: bool) -> Document:
    """Put the vLLM back as it was installed, or undo what died half way."""
    vllm = _installed(path)
    with transaction.locked(vllm):
        was = transaction.interrupted(vllm)
        journal = transaction.read_journal(vllm)
        if not was and not journal:
            if vllm.patched_wheel:
                way_out = f"install {vllm.name} {releases.public(vllm.version)} instead"
                raise PatchesError(
                    f"{vllm} was installed from a patched wheel; {way_out}"
                )
            raise PatchesError(
                f"{vllm} is not patched; there is nothing to revert "
                "(`vllm-patches apply` patches it)"
            )
        if not dry_run:
            transaction.restore(vllm)
    files = list(journal.files) if journal else []
    return _about(vllm) | {"files": files, "undone": was}


def verify(path: Path | None) -> Document:
    """Recompute the hash and the size of every file that RECORD lists, in a tree
    without one of every file that `apply` changed."""
    vllm = _installed(path)
    with transaction.locked(vllm):
        if was := transaction.interrupted(vllm):
            raise PatchesError(
                f"an interrupted {was} left {vllm.root} half done; "
                "`vllm-patches revert` undoes it"
            )
        journal = transaction.read_journal(vllm)
        if vllm.record:
            bad = target.mismatches(vllm)
        elif journal:
            bad = transaction.mismatches(vllm, journal)
        else:
            raise PatchesError(
                f"{vllm.root} has no RECORD and no patches; there is nothing to verify"
            )
    return _about(vllm) | {
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
    folder: Path, path: Path | None, release: str | None, dry_run: bool
) -> Document:
    """Write a release's patches, the overlay as the first, into a new folder."""
    if release:
        patch_set = series.find(release)
    else:
        vllm = target.find(path)
        release, patch_set = vllm.version, series.find(vllm.version)
    if not patch_set:
        versions = ", ".join(each.version for each in releases.RELEASES)
        raise PatchesError(
            f"vLLM {release} is not supported; choose with --release: {versions}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PatchesError(f"{folder} is there and not empty; give a new folder")
    files = {"0000-overlay.patch": series.overlay_patch(patch_set)}
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


def _installed(path: Path | None) -> Target:
    """The vLLM, unless it is an editable install."""
    vllm = target.find(path)
    if vllm.editable:
        raise PatchesError(
            f"{vllm} is an editable install of a checkout; in the checkout, run "
            "`vllm-patches export DIR` and `git am DIR/*.patch`"
        )
    return vllm


def _about(vllm: Target) -> Document:
    return {
        "distribution": vllm.name,
        "version": vllm.version,
        "root": str(vllm.root),
    }
