"""The wheel: the package, and nothing else of the repository."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from paths import ROOT


def test_the_wheel_has_the_package_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    files = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    code = {file for file in files if file.suffix == ".py"}
    assert code == {path.relative_to(ROOT) for path in (ROOT / "dtrans").rglob("*.py")}
    metadata = {file.parts[0] for file in files} - {"dtrans"}
    assert len(metadata) == 1 and metadata.pop().endswith(".dist-info")
    folders = {part for file in files for part in file.parent.parts}
    assert not folders & {"examples", "simulate", "simulation", "tools", "tests"}
