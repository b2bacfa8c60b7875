"""The log of a job's generations, and the trainers of each step."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrans.errors import ConfigError
from dtrans.run.net.generation_log import (
    GenerationLog,
    GenerationRecord,
    members_of_steps,
    read_log,
)


ALL = GenerationRecord(0, None, (0, 1, 2))


def members(records: list[GenerationRecord], first: int, stop: int) -> list[str]:
    return ["".join(map(str, x)) for x in members_of_steps(records, first, stop)]


def test_the_last_generation_that_made_a_step_determines_its_trainers() -> None:
    records = [
        ALL,
        GenerationRecord(1, 4, (0, 2)),
        GenerationRecord(2, 4, (0, 2)),
        GenerationRecord(3, 5, (2,)),
    ]
    assert members(records, 0, 7) == ["012"] * 4 + ["02"] + ["2"] * 2
    assert members(records, 0, 4) == ["012"] * 4
    assert members(records, 0, 3) == ["012"] * 3


def test_a_generation_without_a_snapshot_begins_at_the_first_step() -> None:
    records = [ALL, GenerationRecord(1, 35, (0, 1)), GenerationRecord(2, None, (0,))]
    assert members(records[:2], 30, 37) == ["012"] * 5 + ["01"] * 2
    assert members(records, 30, 37) == ["0"] * 7


def test_a_log_is_read_as_written(tmp_path: Path) -> None:
    log = GenerationLog(tmp_path)
    log.add(ALL)
    log.add(GenerationRecord(1, 20, (0, 1), "trainer 2", "signal SIGKILL"))
    first, second = read_log(log.path)
    assert (first.generation, first.snapshot, first.members, first.lost) == (0, None, (0, 1, 2), "")
    assert (second.snapshot, second.members, second.reason) == (20, (0, 1), "signal SIGKILL")
    assert 0 < first.time <= second.time


def test_a_new_job_begins_a_new_log(tmp_path: Path) -> None:
    log = GenerationLog(tmp_path)
    for record in (ALL, GenerationRecord(1, 20, (0, 1)), ALL):
        log.add(record)
    assert [x.generation for x in read_log(log.path)] == [0]


def test_the_last_line_with_a_number_counts(tmp_path: Path) -> None:
    """A launcher was killed before it granted the generation of the first line."""
    log = GenerationLog(tmp_path)
    for record in (ALL, GenerationRecord(1, 20, (0, 1)), GenerationRecord(1, 30, (0, 1, 2))):
        log.add(record)
    assert [(x.generation, x.snapshot) for x in read_log(log.path)] == [(0, None), (1, 30)]


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"none.jsonl does not exist; pass the file generations.jsonl"
    ):
        read_log(tmp_path / "none.jsonl")
    other = tmp_path / "other"
    for text in ("not json", "{}", '{"generation": 0}', "[1]", '{"members": [0], "more": 1}'):
        other.write_text(text)
        with pytest.raises(ConfigError, match="other is not a log of generations"):
            read_log(other)
