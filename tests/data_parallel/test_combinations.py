"""Pairs and triples of features in one plan, as in `docs/combinations.md`."""

from __future__ import annotations

import itertools

import mesh_table
import pytest
from pipeline_models import compiled_quickly


@pytest.fixture(autouse=True)
def quickly(x64):
    """Enable 64 bits, and compile programs fast."""
    with compiled_quickly():
        yield


def listed() -> dict[tuple[str, ...], str]:
    """Return the cell of each pair and triple on the page, by its features."""
    cells: dict[tuple[str, ...], str] = {}
    for line in mesh_table.PAGE.read_text().splitlines():
        row, *texts = (text.strip() for text in line.strip("|").split("|"))
        if row in mesh_table.FEATURES:
            columns = mesh_table.FEATURES[: mesh_table.FEATURES.index(row)]
            cells.update(((column, row), t) for column, t in zip(columns, texts, strict=False))
        elif ", " in row and len(texts) == 1:
            cells[tuple(row.split(", "))] = texts[0]
    return cells


LISTED = listed()


def test_the_page_lists_all_pairs_and_many_triples():
    pairs = {features for features, cell in LISTED.items() if len(features) == 2 and cell != "-"}
    assert pairs == {*mesh_table.combinations(2)}
    triples = [features for features, cell in LISTED.items() if len(features) == 3]
    assert sum(LISTED[features] == "equal" for features in triples) >= 10
    for features in triples:
        assert all(LISTED[p] == "equal" for p in itertools.combinations(features, 2)), features


@pytest.mark.sampled(3)
@pytest.mark.parametrize("features", [f for f in LISTED if LISTED[f] != "-"], ids=", ".join)
def test_a_combination_has_the_outcome_of_the_page(features):
    assert mesh_table.combine(features).cell == LISTED[features]
