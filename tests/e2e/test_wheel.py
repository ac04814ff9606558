"""A patched wheel, installed by pip, runs the round trip as the in-place patch does."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from scripts.engines import environment
from scripts.series.wheels import fetch_wheel
from vllm_patches import releases

RELEASE = releases.default().version
TOOL = ("-c", "from vllm_patches.cli import app; app()")


def test_round_trip_from_an_installed_patched_wheel(tmp_path: Path) -> None:
    """In an environment of its own, which borrows all but vLLM from this one."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*run, _patched_wheel(tmp_path)], check=True)
    (site_packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    borrowed = sysconfig.get_path("purelib")
    (site_packages / "borrowed.pth").write_text(
        f"import site; site.addsitedir({borrowed!r})\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    tool = [str(python), *TOOL, "status", "--json"]
    status = subprocess.run(
        tool, env=env, capture_output=True, text=True, cwd=environment.ROOT
    )
    document = json.loads(status.stdout)
    assert document["version"].startswith(f"{RELEASE}+logical.3.d")
    assert document["state"] == "patched"
    done = subprocess.run(
        [str(python), "-m", "scripts.engines.roundtrip_cli", "--model", "plain"],
        env=env,
        capture_output=True,
        text=True,
        cwd=environment.ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every difference is 0.0" in done.stdout
    where = [str(python), "-c", "import vllm; print(vllm.__file__)"]
    vllm = subprocess.run(where, env=env, capture_output=True, text=True).stdout
    assert Path(vllm.split("\n")[-2]).is_relative_to(site_packages)


def _patched_wheel(folder: Path) -> str:
    tool = [sys.executable, *TOOL, "wheel"]
    subprocess.run([*tool, fetch_wheel(RELEASE), "-o", folder], check=True)
    (wheel,) = folder.glob(f"*-{RELEASE}+logical.3.*.whl")
    return str(wheel)
