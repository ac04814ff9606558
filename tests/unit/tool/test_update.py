"""From one version's patches to the next; what status says of either."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.tool.conftest import WORKER, edit, git, kill, snapshot
from tests.unit.tool.test_bad_input import refused, run
from tests.unit.tool.test_transaction import each_step, no_space, work_folder
from tests.unit.tool.test_wheel import pack, unpack
from vllm_patches import actions, patch_set, sums, transaction
from vllm_patches.errors import STATUS, PatchesError
from vllm_patches.installation import Installation
from vllm_patches.record import Record
from vllm_patches.results import Patched

__all__ = ["work_folder"]
OTHER = f"{WORKER}/utils.py"


def update(root: Path) -> None:
    actions.apply(root, dry_run=False, update=True)


@pytest.fixture
def every(request: pytest.FixtureRequest) -> int:
    """At which file operations a run is ended: at all with --full."""
    return 1 if request.config.getoption("full") else 5


@pytest.fixture(params=["installed", "bare"])
def trees(
    request: pytest.FixtureRequest,
    cut: Path,
    work_folder: Path,  # noqa: F811
    small_series: Path,
    patched: Path,
    tmp_path: Path,
) -> Iterator[tuple[Path, Path, Path]]:
    """The cut as released, patched by an older version, and patched by this one.

    This one patches another file, no longer patches one, and has another overlay."""
    pristine, old, new = (work_folder / name for name in ("pristine", "old", "new"))
    shutil.copytree(cut, pristine)
    if request.param == "bare":
        (info,) = pristine.glob("*.dist-info")
        shutil.rmtree(info)
    shutil.copytree(pristine, old)
    shutil.copytree(pristine, new)
    actions.apply(old, dry_run=False)
    checkout = tmp_path / "next"
    git(tmp_path, "clone", "-q", "-b", "v0.32.0", str(patched), str(checkout))
    edit(checkout / WORKER / "block_table.py", "Apache-2.0", "Apache-2.1")
    edit(checkout / OTHER, "Apache-2.0", "Apache-2.1")
    git(checkout, "commit", "-qam", "The next version's")
    for path in small_series.glob("*.patch"):
        path.unlink()
    git(checkout, "format-patch", "-q", "v0.32.0", "-o", str(small_series))
    overlay = patch_set.OVERLAY
    shutil.rmtree(overlay / "vllm/pages")
    (overlay / "vllm/sheets").mkdir()
    (overlay / "vllm/sheets/__init__.py").write_text("")
    (overlay / WORKER / "logical.py").write_text("CONTRACT_VERSION = 8\n")
    for folder in (small_series, overlay):
        sums.write(folder)
    actions.apply(new, dry_run=False)
    yield pristine, old, new


def test_an_older_patch_is_seen(trees: tuple[Path, Path, Path]) -> None:
    pristine, old, new = trees
    told = run("status", "--target", old).stdout
    assert "patched, out of date: `vllm-patches apply --update` brings it up" in told
    before = snapshot(old)
    for options in ([], ["--if-needed"]):
        result = run("apply", "--json", "--target", old, *options)
        assert result.exit_code == STATUS["out-of-date"]
        assert json.loads(result.stdout)["code"] == "out-of-date"
    assert run("apply", "--update", "--dry-run", "--target", old).exit_code == 0
    assert snapshot(old) == before
    assert run("apply", "--update", "--target", old).exit_code == 0
    assert snapshot(old) == snapshot(new)
    if list(new.glob("*.dist-info")):
        assert run("verify", "--target", old).stdout.startswith("as recorded: ")
    assert "state\tpatched\n" in run("status", "--target", old).stdout
    for options in (["--update"], ["--if-needed"]):
        result = run("apply", "--target", old, *options)
        assert result.stdout.startswith("patched already: ")
        assert result.exit_code == 0
    assert snapshot(old) == snapshot(new)
    actions.revert(old, dry_run=False)
    assert snapshot(old) == snapshot(pristine)


@pytest.mark.parametrize("then", [update, "revert"])
def test_update_killed_at_every_step(
    trees: tuple[Path, Path, Path],
    then: object,
    work_folder: Path,  # noqa: F811
    every: int,
) -> None:
    pristine, old, new = map(snapshot, trees)
    work, seen = work_folder / "work", set()
    for status in each_step(trees[1], work, update, kill, every):
        assert status == -signal.SIGKILL
        found = actions.status(work)
        seen.add(found.state)
        if isinstance(found, Patched):
            assert snapshot(work) == (old if found.out_of_date else new)
        else:
            assert found.state == "interrupted"
        if then == "revert":
            actions.revert(work, dry_run=False)
        else:
            update(work)
        assert snapshot(work) == (pristine if then == "revert" else new)
    assert seen == {"patched", "interrupted"}


def test_undoing_an_update_killed_at_every_step(
    trees: tuple[Path, Path, Path],
    work_folder: Path,  # noqa: F811
    every: int,
) -> None:
    _, old, new = map(snapshot, trees)
    half, work, halves = work_folder / "half", work_folder / "work", 0

    def undo(root: Path) -> None:
        transaction.restore(Installation.find(root))

    for step, _ in enumerate(each_step(trees[1], half, update, kill, every)):
        if (
            step % (9 if every == 1 else 2)
            or actions.status(half).state != "interrupted"
        ):
            continue
        halves += 1
        for _ in each_step(half, work, undo, kill, every):
            if actions.status(work).state == "interrupted":
                undo(work)
            assert snapshot(work) in (old, new)
        shutil.rmtree(work)
    assert halves > 2


def test_update_that_fails_at_every_step(
    trees: tuple[Path, Path, Path],
    work_folder: Path,  # noqa: F811
    every: int,
) -> None:
    """The patches of before stay, or the new ones are there."""
    _, old, new = map(snapshot, trees)
    work = work_folder / "work"
    for _ in each_step(trees[1], work, update, no_space, every):
        if actions.status(work).state == "interrupted":
            transaction.restore(Installation.find(work))
        assert snapshot(work) in (old, new)


def test_update_never_overwrites_an_edit(trees: tuple[Path, Path, Path]) -> None:
    _, old, _ = trees
    (old / WORKER / "block_table.py").write_text("mine = True\n")
    before = snapshot(old)
    for options in (["--dry-run"], []):
        line = refused("apply", "--update", "--target", old, *options)
        assert "block_table.py is changed" in line
    assert snapshot(old) == before


@pytest.mark.usefixtures("small_series")
class TestGate:
    """`status --check`: 0 only for patched, current and unchanged."""

    def code(self, root: Path, *options: str) -> str | None:
        result = run("status", "--check", "--json", "--target", root, *options)
        document = json.loads(result.stdout)
        assert result.exit_code == STATUS.get(document.get("code"), 0)
        return document.get("code")

    def test_codes(self, small: Path) -> None:
        assert self.code(small) == "unpatched"
        assert run("verify", "--target", small).stdout.startswith(
            "as recorded (unpatched): "
        )
        actions.apply(small, dry_run=False)
        assert self.code(small) is None
        (small / "vllm/extra.py").write_text("")
        assert self.code(small) == "changed"
        assert "not listed: vllm/extra.py" in run("verify", "--target", small).stdout
        (small / "vllm/extra.py").unlink()
        edit(small / OTHER, "Apache-2.0", "Apache-3.0")
        assert self.code(small) == "changed"
        edit(small / OTHER, "Apache-3.0", "Apache-2.0")
        (small / ".vllm_patches/journal.tmp").write_text("")
        assert self.code(small) == "interrupted"
        assert self.code(small.parent) == "not-found"

    def test_apply_if_needed_is_idempotent(self, small: Path) -> None:
        assert run("apply", "--if-needed", "--target", small).exit_code == 0
        before = snapshot(small)
        assert run("apply", "--if-needed", "--target", small).exit_code == 0
        assert snapshot(small) == before

    def test_journal_of_an_earlier_tool(self, small: Path) -> None:
        """Up to 0.2.0: in the dist-info, without version and digest."""
        actions.apply(small, dry_run=False)
        (info,) = small.glob("*.dist-info")
        (small / ".vllm_patches").rename(info / "vllm_patches")
        journal = info / "vllm_patches/journal.json"
        document = json.loads(journal.read_text())
        for name in ("tool", "digest", "update", "previous"):
            del document[name]
        journal.write_text(json.dumps(document))
        record = info / "RECORD"
        record.write_text(
            record.read_text().replace(".vllm_patches/", f"{info.name}/vllm_patches/")
        )
        assert self.code(small) == "out-of-date"
        update(small)
        assert run("verify", "--target", small).exit_code == 0
        assert self.code(small) is None
        actions.revert(small, dry_run=False)
        assert not (info / "vllm_patches").exists()

    def test_wheels_name_is_its_content(self, small: Path, tmp_path: Path) -> None:
        source = pack(small, tmp_path / "in")
        first = actions.build_wheel(source, tmp_path / "1", dry_run=False)
        tree = unpack(Path(first.wheel), tmp_path / "tree")
        assert self.code(tree) is None
        logical = patch_set.OVERLAY / WORKER / "logical.py"
        logical.write_text("CONTRACT_VERSION = 7  # other bytes\n")
        sums.write(patch_set.OVERLAY)
        second = actions.build_wheel(source, tmp_path / "2", dry_run=False)
        assert Path(first.wheel).name != Path(second.wheel).name
        assert self.code(tree) == "out-of-date"
        with pytest.raises(PatchesError, match="install a newer one"):
            update(tree)

    def test_patched_in_its_source(self, small: Path, tmp_path: Path) -> None:
        """A checkout after `export` and `git am`, and a wheel built from it."""
        checkout = tmp_path / "checkout"
        shutil.copytree(small, checkout)
        git(checkout, "init", "-q")
        git(checkout, "add", "-A")
        git(checkout, "commit", "-qm", "As released")
        actions.export(tmp_path / "patches", None, "0.32.0", dry_run=False)
        mails = sorted(str(path) for path in (tmp_path / "patches").iterdir())
        git(checkout, "am", "-q", *mails)
        (info,) = checkout.glob("*.dist-info")
        kept = info.rename(tmp_path / info.name)
        assert self.code(checkout) is None
        assert "patched (in its source)" in run("status", "--target", checkout).stdout
        assert "nothing to apply" in refused("apply", "--target", checkout)
        assert "before it was built" in refused("revert", "--target", checkout)
        kept.rename(info)
        record = info / "RECORD"
        names = [f"{WORKER}/logical.py", "vllm/pages/deep/__init__.py"]
        names += [f"{WORKER}/block_table.py", f"{WORKER}/worker_base.py"]
        files = {name: (checkout / name).read_bytes() for name in names}
        rows = with_rows(record, checkout, files)
        record.write_bytes(rows)
        assert self.code(checkout) is None
        assert "nothing to apply" in refused("apply", "--target", checkout)
        shutil.rmtree(checkout / ".git")
        source = pack(checkout, tmp_path / "in")
        assert "already" in refused("wheel", source, "-o", tmp_path / "out")
        edit(checkout / WORKER / "logical.py", "VERSION = 7", "VERSION = 8")
        assert self.code(checkout) == "out-of-date"


def with_rows(path: Path, root: Path, files: dict[str, bytes]) -> bytes:
    """RECORD with the rows of these files."""
    return Record.parse(path.read_bytes(), root).with_files(files).encode()
