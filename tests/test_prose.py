"""The check of prose finds sentences that break its rules, and the listed folders obey these
rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_prose import (
    LISTED,
    check,
    check_file,
    check_page,
    check_source,
    check_statements,
    listed,
)


def found(source: str) -> list[str]:
    return [fault for _, fault in check_source(source)]


@pytest.mark.parametrize(
    "source, fault",
    [
        ('def fn():\n    """What is left."""', "a docstring starts with 'What'"),
        ('class A:\n    """Whether it is."""', "a docstring starts with 'Whether'"),
        ('def fn():\n    """Entries before it."""', "fn starts with 'Entries'"),
        ('def fn():\n    """Layout of a value."""', "fn starts with 'Layout'"),
        ('def fn():\n    """Return rows that are of a table."""', '"are of" in'),
        ("x = 1  # a list of which one is read", 'a comment has "of which"'),
        ('raise ValueError("w is of no table")', 'a string has "is of"'),
        (f'"""{"word " * 26}."""', "26 words, at most 25"),
        ('"""A row. What it has."""', "a sentence starts with 'What'"),
        (
            'def fn():\n    """Return it.\n\n    Args:\n      a: how many.\n    """',
            "starts with 'how'",
        ),
        ("def told_to(x): ...", "told_to is named by a participle"),
        ("class Made: ...", "Made is named by a participle"),
        ("def fn(x_given): ...", "x_given is named by a participle"),
        ("own = 1", "own is named by a participle"),
        ("import os as own_os", "own_os is named by a participle"),
        ("try: ...\nexcept OSError as told: ...", "told is named by a participle"),
    ],
)
def test_a_fault_is_found(source: str, fault: str) -> None:
    assert [text for text in found(source) if fault in text]


@pytest.mark.parametrize(
    "source",
    [
        'def fn():\n    """Return the remainder."""',
        'def fn():\n    """Pass it on."""',
        'class A:\n    @property\n    def size(self):\n        """Bytes of all rows."""',
        'class A:\n    """Layout of a value."""',
        f'def fn():\n    """Return.\n\n    Args:\n      a: {"word " * 20}\n      b: '
        f'{"word " * 20}\n    """',
        "owner = stored_rows = 1",
    ],
)
def test_good_prose_has_no_fault(source: str) -> None:
    assert found(source) == []


def test_code_and_tables_of_a_page_are_left_out() -> None:
    words = "word " * 30
    assert list(check_page(f"```\n{words}\n```\n| {words} |\n")) == []
    assert [line for line, _ in check_page(f"Short.\n\n{words}\n")] == [3]


def test_a_long_page_is_found() -> None:
    assert list(check_page("Word. " * 1200)) == []
    assert list(check_page("Word. " * 1201)) == [(1, "the page has 1201 words, at most 1200")]


def test_a_long_line_of_a_module_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(f'x = 1\nname = "{"x" * 100}"\n')
    assert list(check_file(path)) == [(path, 2, "109 columns, at most 100")]


@pytest.mark.parametrize(
    "source, lines",
    [
        ("x = [a for a in b]\ny = {c for c in d}", []),
        ("x = [[a for a in b] for b in c]", [1]),
        ("fn([a for a in b], {c for c in d})", [1]),
        ("for a in [b for b in c]:\n    x = [d for d in a]", []),
        ("if any(a for a in b) and all(c for c in d): ...", [1]),
        ("try: ...\nexcept OSError:\n    x = [a for a in b]\n    y = [c for c in d]", []),
    ],
)
def test_a_statement_has_at_most_one_comprehension(source: str, lines: list[int]) -> None:
    assert [line for line, _ in check_statements(source)] == lines


def test_a_list_has_names_and_comments() -> None:
    assert listed("# names\na/b\nc  # a reason\n\n") == ["a/b", "c"]


def test_listed_folders_keep_to_the_rules() -> None:
    names = listed(LISTED.read_text())
    assert names == sorted(names)
    assert check(names) == []
