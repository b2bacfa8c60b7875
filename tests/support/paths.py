"""Paths of files in the repository."""

from __future__ import annotations

from pathlib import Path


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GOLDEN = ROOT / "tests" / "golden"
SUPPORT = Path(__file__).parent
