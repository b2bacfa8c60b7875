"""One trainer's view of the trainers of collectives that have ended."""

from __future__ import annotations

from dtrans.protocol.collective.membership_table import GRACE, ExitStatus, MembershipTable


def roll() -> MembershipTable:
    return MembershipTable(0, ["trainer 0", "trainer 1 (h:1)", "trainer 2 (h:2)"])


def test_last_words_come_before_the_end_of_a_connection_is_taken_for_one() -> None:
    known = roll()
    assert known.due() is None
    known.broken(1, 10.0)
    assert known.due() == 10.0 + GRACE
    assert known.silent(10.0 + GRACE / 2) == []
    assert known.note(1, ExitStatus(4, "KeyError: 'w'"))
    assert known.due() is None
    assert known.silent(10.0 + GRACE) == []
    assert known.failure() == "trainer 1 (h:1) has ended: KeyError: 'w'"
    assert known.failed() == [1]


def test_a_connection_that_ends_without_a_word() -> None:
    known = roll()
    known.broken(2, 10.0)
    known.broken(2, 11.0)  # and is not counted again
    assert known.silent(10.0 + GRACE) == [2]
    assert known.silent(12.0) == []
    assert known.failure() == "trainer 2 (h:2) has ended: its connection ended without a goodbye"


def test_who_has_come_to_its_end_is_missed_only_by_those_that_do_more() -> None:
    known = roll()
    known.begun = 5
    assert known.note(1, ExitStatus(5)) and known.note(2, ExitStatus(7))
    assert (known.failure(), known.failed()) == ("", [])
    assert known.why(1) == "trainer 1 (h:1) has finished"
    known.begun = 6
    assert known.failure() == (
        "trainer 1 (h:1) has finished after 5 operations of the job, but this trainer has begun 6"
    )


def test_a_failure_is_named_before_an_end() -> None:
    known = roll()
    known.begun = 9
    known.note(1, ExitStatus(5))
    known.note(2, ExitStatus(8, "it was stopped"))
    assert known.failure() == "trainer 2 (h:2) has ended: it was stopped"


def test_what_cannot_be_is_not_noted() -> None:
    known = roll()
    assert known.note(1, ExitStatus(5))
    assert not known.note(1, ExitStatus(0, "again"))
    assert not known.note(0, ExitStatus(0, "this one"))
    assert not known.note(3, ExitStatus(0, "nobody"))
    assert not known.note(-1, ExitStatus(0, "nobody"))
    assert known.failure() == ""


def test_a_connection_that_is_made_again_in_time_has_not_ended() -> None:
    known = roll()
    known.broken(1, 10.0, 5.0)
    assert known.due() == 15.0 and known.silent(14.9) == []
    known.back(1)
    assert known.due() is None and known.silent(20.0) == []
    known.broken(1, 20.0, 5.0)
    assert known.silent(25.0) == [1]
