"""What the commands do."""

import difflib
import os
import shutil
import tempfile
from pathlib import Path

from vllm_patches import __version__, releases, transaction, wheel
from vllm_patches.errors import PatchesError
from vllm_patches.installation import Installation, Mismatch, unpatched
from vllm_patches.patch import signed_off
from vllm_patches.patch_set import PatchSet, contract_version, unsupported
from vllm_patches.record import lists
from vllm_patches.results import (
    Applied,
    Built,
    Checked,
    Differences,
    Exported,
    Interrupted,
    Kept,
    Leftover,
    Patched,
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
    """Whether the vLLM is patched, and by what."""
    installation = Installation.find(root)
    known = PatchSet.find(installation.version) is not None
    if installation.editable:
        return Status(installation, known, "editable")
    try:
        with transaction.locked(installation, shared=True):
            was = transaction.interrupted(installation)
            found = None if was else _found(installation)
    except transaction.Busy:
        return Status(installation, known, "busy")
    if was == transaction.LEFTOVER:
        return Leftover(installation, known, "unpatched")
    if was:
        return Interrupted(installation, known, "interrupted", was)
    if found:
        return found
    return Status(installation, known, "unpatched")


def check(root: Path | None) -> Checked:
    """Whether the vLLM is patched by this version's series, every Python file of it as
    it should be."""
    found = status(root)
    wrong: list[Mismatch] = []
    if isinstance(found, Patched):
        installation = found.installation
        if installation.record:
            wrong = [*installation.mismatches(".py"), *installation.unlisted()]
        elif journal := transaction.read_journal(installation):
            wrong = transaction.mismatches(installation, journal)
    return Checked(found, wrong)


def _found(installation: Installation) -> Patched | None:
    """The patches that a vLLM has, whichever way they came; None if it has none."""
    version = installation.version
    if journal := transaction.read_journal(installation):
        known = PatchSet.find(journal.release)
        return Patched(
            installation,
            PatchSet.find(version) is not None,
            "patched",
            "apply",
            journal.release,
            journal.series,
            journal.contract,
            journal.tool,
            journal.digest,
            known is None or known.digest != journal.digest,
        )
    known = PatchSet.find(version)
    if installation.patched_wheel:
        said = installation.wheel_patches
        paths = known.overlay if known else {}
        present = [
            installation.read(path)
            for path in paths
            if (installation.root / path).is_file()
        ]
        return Patched(
            installation,
            known is not None,
            "patched",
            "wheel",
            said.release if said else releases.public(version),
            said.patches if said else [],
            said.contract if said else contract_version(present),
            said.tool if said else None,
            said.digest if said else None,
            not known or not said or known.digest != said.digest,
        )
    sets = [known] if known else map(PatchSet.of, releases.RELEASES)
    for patch_set in sets:
        new = [p for p in patch_set.overlay if (installation.root / p).is_file()]
        if new and _is_own(installation, new):
            current = patch_set.is_in(installation.read)
            if not current and not known:
                continue
            return Patched(
                installation,
                known is not None,
                "patched",
                "source",
                patch_set.version,
                [patch.name for patch in patch_set.patches] if current else [],
                contract_version(map(installation.read, new)),
                None,
                patch_set.digest if current else None,
                not current,
            )
    return None


def _is_own(installation: Installation, paths: list[str]) -> bool:
    """Whether files came with the vLLM: it has no RECORD, or one that lists them."""
    if not installation.record:
        return True
    record = installation.record.read_bytes()
    return all(lists(record, path) for path in paths)


def apply(
    root: Path | None,
    dry_run: bool,
    if_needed: bool = False,
    update: bool = False,
    release: str | None = None,
) -> Undone:
    """Patch the vLLM; with `update`, go over from the patches that it has."""
    installation = _installed(root)
    with transaction.locked(installation):
        undone = transaction.interrupted(installation)
        if undone:
            transaction.restore(installation, dry_run)
            if dry_run and undone != transaction.LEFTOVER:
                return Undone(installation, undone, dry_run)
        has = _found(installation)
        if has and (if_needed or update) and not has.out_of_date:
            return Kept(installation, undone, dry_run, has.release)
        code = "out-of-date" if has and has.out_of_date else "patched"
        if has and has.by != "apply":
            kind = "patched wheel" if has.by == "wheel" else "patched checkout"
            way = "it is out of date: install a newer one"
            raise PatchesError(
                f"{installation} was installed from a {kind}; "
                + (way if has.out_of_date else "there is nothing to apply"),
                code=code,
            )
        if has and not update:
            way = " by another version; `vllm-patches apply --update` brings it up"
            raise PatchesError(
                f"{installation} is patched already"
                + (way if has.out_of_date else "; `vllm-patches revert` undoes it"),
                code=code,
            )
        if has and not PatchSet.find(installation.version):
            release = release or has.release
        patch_set = PatchSet.require(
            installation.version,
            lambda path: transaction.pristine(installation, path),
            release,
        )
        chosen = release is not None and not PatchSet.find(installation.version)
        if release and not chosen and release != releases.public(installation.version):
            raise PatchesError(
                f"vLLM {installation.version} has a series of its own; leave --release "
                "out"
            )
        files = _patched(installation, patch_set, search=chosen)
        names = [patch.name for patch in patch_set.patches]
        head = transaction.Journal(
            transaction.APPLY,
            patch_set.version,
            names,
            patch_set.contract,
            tool=__version__,
            digest=patch_set.digest,
        )
        transaction.swap(installation, files, head, dry_run)
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


def _patched(
    installation: Installation, patch_set: PatchSet, search: bool
) -> dict[str, bytes]:
    """The files to write. Raises PatchesError if the vLLM is not as released, or not
    as it was patched before."""
    release = f"{installation.name} {installation.version}"
    again = f"undo that or reinstall {release}, then apply"
    journal = transaction.read_journal(installation)
    bad = transaction.mismatches(installation, journal) if journal else []
    if installation.record:
        bad = installation.mismatches(".py")
    if bad:
        more = f" (nor are {len(bad) - 1} others)" if bad[1:] else ""
        raise PatchesError(
            f"{installation.root / bad[0].path} is {bad[0].problem}, not as its "
            f"release shipped it{more}; {again}",
            code="changed",
        )
    for path in patch_set.overlay:
        place = installation.root / path
        if os.path.lexists(place) and not (journal and path in journal.files):
            raise PatchesError(
                f"{place} exists and is not its release's; remove it (reinstalling "
                "does not), then apply",
                code="changed",
            )
    return (
        patch_set.apply(lambda path: transaction.pristine(installation, path), search)
        | patch_set.overlay
    )


def revert(root: Path | None, dry_run: bool) -> Reverted:
    """Put the vLLM back as it was installed, or undo what died half way."""
    installation = _installed(root)
    with transaction.locked(installation):
        was = transaction.interrupted(installation)
        journal = transaction.read_journal(installation)
        if not was and not journal:
            has = _found(installation)
            if has and has.by == "wheel":
                release = unpatched(installation.version)
                raise PatchesError(
                    f"{installation} was installed from a patched wheel; to go back, "
                    "`pip install --force-reinstall --no-deps "
                    f"'{installation.name}==={release}'`"
                )
            if has:
                raise PatchesError(
                    f"{installation} was patched before it was built; go back in its "
                    "checkout"
                )
            raise PatchesError(
                f"{installation} is not patched; there is nothing to revert "
                "(`vllm-patches apply` patches it)",
                code="unpatched",
            )
        transaction.restore(installation, dry_run)
        if was == transaction.UPDATE and not dry_run:
            transaction.restore(installation)
    files = list(journal.files) if journal else []
    return Reverted(installation, was, dry_run, files)


def verify(root: Path | None) -> Verified:
    """Recompute the hash and the size of every file that RECORD lists, in a tree
    without one of every file that `apply` changed."""
    installation = _installed(root)
    notes: list[Mismatch] = []
    with transaction.locked(installation, shared=True):
        was = transaction.interrupted(installation)
        if was and was != transaction.LEFTOVER:
            raise PatchesError(
                f"an interrupted {was} left {installation.root} half done; "
                "`vllm-patches revert` undoes it",
                code="interrupted",
            )
        journal = transaction.read_journal(installation)
        found = _found(installation)
        if installation.record:
            bad = [*installation.mismatches(), *installation.unlisted()]
            notes = installation.outside()
        elif journal:
            bad = transaction.mismatches(installation, journal)
        else:
            raise PatchesError(
                f"{installation.root} has no RECORD and no patches; there is nothing "
                "to verify"
            )
    return Verified(installation, found is not None, bad, notes)


def diff(root: Path | None) -> Differences:
    """What the patches change, as a patch."""
    installation = Installation.find(root)
    with transaction.locked(installation, shared=True):
        journal = transaction.read_journal(installation)
        if not journal or transaction.interrupted(installation):
            raise PatchesError(
                f"{installation} was not patched by `apply`; see `vllm-patches status`",
                code="unpatched",
            )
        text: list[str] = []
        for path in journal.files:
            if ".dist-info/" in path:
                continue
            try:
                old = transaction.pristine(installation, path).decode()
            except FileNotFoundError:
                old = ""
            new = installation.read(path).decode()
            names = (f"a/{path}" if old else "/dev/null", f"b/{path}")
            lines = (old.splitlines(keepends=True), new.splitlines(keepends=True))
            text += difflib.unified_diff(*lines, *names)
    return Differences(installation, "".join(text))


def build_wheel(source: Path, folder: Path, dry_run: bool) -> Built:
    """Build a patched wheel in a folder."""
    plan = wheel.plan(source, folder)
    if dry_run:
        wheel.check(plan)
    sha256 = None if dry_run else wheel.build(plan)
    return Built(str(plan.wheel), plan.version, plan.release, sha256, dry_run)


def export(
    folder: Path,
    root: Path | None,
    release: str | None,
    dry_run: bool,
    signoff: str | None = None,
) -> Exported:
    """Write a release's patches, the overlay as the first, into a new folder."""
    release = release or Installation.find(root).version
    if not (patch_set := PatchSet.find(release)):
        raise unsupported(release)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PatchesError(f"{folder} is there and not empty; give a new folder")
    files = {"0000-overlay.patch": patch_set.overlay_patch()}
    files |= {patch.name: patch.text for patch in patch_set.patches}
    if signoff:
        files = {name: signed_off(text, signoff) for name, text in files.items()}
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
