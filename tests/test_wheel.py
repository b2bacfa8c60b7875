"""The wheel and the sdist: their files and names."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

from paths import ROOT


def build(target: str, folder: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr


def test_the_wheel_has_the_package_alone(tmp_path: Path) -> None:
    build("wheel", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    files = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    code = {file for file in files if file.suffix == ".py"}
    assert code == {path.relative_to(ROOT) for path in (ROOT / "dtrans").rglob("*.py")}
    metadata = {file.parts[0] for file in files} - {"dtrans"}
    assert len(metadata) == 1 and metadata.pop().endswith(".dist-info")
    folders = {part for file in files for part in file.parent.parts}
    assert not folders & {"examples", "simulate", "simulation", "tools", "tests"}


def test_the_release_compares_its_tag_with_the_name_of_the_sdist(tmp_path: Path) -> None:
    build("sdist", tmp_path)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    release = (ROOT / ".github/workflows/release.yml").read_text()
    (compared,) = re.findall(r'test -f "dist/(.*)"', release)
    (sdist,) = tmp_path.iterdir()
    assert sdist.name == compared.replace("${GITHUB_REF_NAME#v}", version)
    with tarfile.open(sdist) as archive:
        files = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    assert {Path("LICENSE"), Path("README.md"), Path("tests/test_wheel.py")} <= files
    assert not any(file.parts[:1] in ((".ci",), (".github",)) for file in files)
