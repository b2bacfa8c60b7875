"""Where things of the repository are."""

from __future__ import annotations

from pathlib import Path


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GOLDEN = ROOT / "tests" / "golden"
SUPPORT = Path(__file__).parent
