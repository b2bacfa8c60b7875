"""Plans of the zoos of steps and optimizers compute the step.

`docs/verified.md` lists the refused steps.
"""

from __future__ import annotations

import optimizer_zoo
import pytest
import step_zoo
import table_jobs
import verified_table
from verified_table import CLASSES, STEPS, STRATEGIES, Outcome, train, verify


pytestmark = pytest.mark.usefixtures("x64")


def _check(found: Outcome) -> None:
    """Fail if a plan differs; skip the test if the step is refused."""
    if found.report is None:
        pytest.skip(f"refused: {found.refusal}")
    assert found.report, str(found.report)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [case.name for case in step_zoo.CASES])
def test_the_page_says_what_is_found_for_each_step(name: str) -> None:
    lines = verified_table.PAGE.read_text().splitlines(keepends=True)
    assert verified_table.row(step_zoo.by_name(name)) in lines, "write it anew with `make docs`"


def test_the_page_has_every_step() -> None:
    text = verified_table.PAGE.read_text()
    assert text.startswith(verified_table.HEAD)
    steps, _, tables = text.removeprefix(verified_table.HEAD).partition(verified_table.TABLES_HEAD)
    names = lambda rows: [row.split(" | ")[0][2:] for row in rows.splitlines()]
    assert names(steps) == [case.name for case in step_zoo.CASES]
    assert names(tables) == [*table_jobs.OPTIMIZERS]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", table_jobs.OPTIMIZERS)
def test_the_page_says_what_is_found_for_each_table(optimizer: str) -> None:
    lines = verified_table.PAGE.read_text().splitlines(keepends=True)
    assert verified_table.table_row(optimizer) in lines, "write it anew with `make docs`"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("optimizer", optimizer_zoo.CASES)
def test_every_optimizer_trains_three_losses(optimizer: str, name: str, strategy: str) -> None:
    _check(verify(train(step_zoo.by_name(name), optimizer_zoo.CASES[optimizer]), strategy))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("name", [case.name for case in step_zoo.CASES if case.loss is not None])
def test_each_loss_is_trained_by_an_optimizer_of_each_class(
    name: str, kind: str, strategy: str
) -> None:
    case = train(step_zoo.by_name(name), optimizer_zoo.Case(CLASSES[kind]))
    _check(verify(case, strategy))
