"""Records of options: the options of the four strategies, checks of single options, and flat lists
of options that become records."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest

import dtrans
from dtrans.checks import (
    check_flag,
    check_int,
    check_known,
    check_name,
    check_number,
    check_one_of,
    check_size,
    check_together,
    check_type,
    group_options,
)
from dtrans.errors import ConfigError


STRATEGIES = (dtrans.nccl2, dtrans.sharding, dtrans.pipeline, dtrans.pserver)
RECORDS = (
    dtrans.Async, dtrans.Batch, dtrans.BlockPlacement, dtrans.DelayCompensation, dtrans.Geo,
    dtrans.HalfAsync,
    dtrans.LossScaling, dtrans.Precision, dtrans.Reduce, dtrans.Slicing, dtrans.StageMemory,
    dtrans.Stages, dtrans.Sync, dtrans.TopK,
)  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda f: f.__name__)
def test_a_strategy_has_nine_options_at_most(strategy: Any) -> None:
    main, startup, *options = parameters = inspect.signature(strategy).parameters.values()
    assert (main.name, startup.name) == ("main", "startup")
    assert len(options) <= 9
    assert not [p for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    with pytest.raises(TypeError, match="bucket_MB"):
        strategy(None, None, bucket_MB=0)


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.__name__)
def test_a_record_is_a_value_whose_fields_are_described(record: Any) -> None:
    """A field has the same default in each record."""
    made = record()
    assert made == record()
    for field in dataclasses.fields(record):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, None)
        assert re.search(rf"^ +(\w+, )*{field.name}(, \w+)*:", record.__doc__, re.M), field.name
        others = [f.default for r in RECORDS for f in dataclasses.fields(r) if f.name == field.name]
        assert field.name in ("communicator",) or all(x == field.default for x in others), (
            field.name
        )


def test_arguments_that_are_no_records_are_named() -> None:
    x = dtrans.trace(lambda p, s, x: (p, s), 1.0, (), 1.0)
    for options, says in [
        ({"batch": "sum"}, "batch must be 'exact', 'local' or 'micro', it is 'sum'"),
        ({"batch": 3}, "batch must be 'exact', 'local' or a dtrans.Batch; it is 3"),
        ({"reduce": 3}, "reduce must be 'mean', 'sum' or a dtrans.Reduce; it is 3"),
    ]:
        for strategy, own in zip(
            STRATEGIES[:3], ({"trainers": 2}, {"degree": 2}, {"num_stages": 2}), strict=True
        ):
            with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
                strategy(x, x, **own, **options)
    for strategy, own, says in [
        (
            dtrans.sharding,
            {"degree": 2, "slices": "rows"},
            "slices must be a dtrans.Slicing, it is 'rows'",
        ),
        (
            dtrans.pipeline,
            {"num_stages": 2, "stages": 2},
            "stages must be a dtrans.Stages, it is 2",
        ),
        (
            dtrans.pipeline,
            {"num_stages": 2, "memory": "auto"},
            "memory must be a dtrans.StageMemory, it is 'auto'",
        ),
        (
            dtrans.pserver,
            {"placement": True},
            "placement must be a dtrans.BlockPlacement, it is True",
        ),
        (
            dtrans.pserver,
            {"batch": dtrans.Batch("local", unsplit_inputs=["x"])},
            r"batch=Batch\(.*sets more than merge; with parameter servers, a local batch has no",
        ),
        (
            dtrans.pserver,
            {"batch": dtrans.Batch("local", merge={"x": "sum"})},
            r"merge\['x'\] must be 'mean' or 'own', it is 'su",
        ),
    ]:
        with pytest.raises(ConfigError, match=f"^{says}"):
            strategy(x, x, **own)


@pytest.mark.parametrize(
    "check, args, fits, others",
    [
        (check_int, (), (1, 7), (0, -1, True, 1.0, "1", None)),
        (check_size, (), (0, 0.5, 32), (-1, float("nan"), True, "1", None)),
        (check_flag, (), (True, False), (1, 0, None, "yes")),
        (check_name, ("a name",), ("x",), ("", None, 3)),
        (check_one_of, ((1, 2, None),), (1, 2, None), (True, 3, "1", [1])),
        (
            check_number,
            ("a number above 1", lambda x: x > 1),
            (1.5, 2),
            (1, True, "2", float("nan")),
        ),
        (check_type, (dtrans.Reduce,), (dtrans.Reduce(),), ("mean", None, dtrans.Reduce)),
    ],
)
def test_an_option_is_named_with_what_it_is(check: Any, args: Any, fits: Any, others: Any) -> None:
    for given in fits:
        check("size", given, *args)
    for given in others:
        with pytest.raises(ConfigError, match=f"^size must be .* it is {re.escape(repr(given))}$"):
            check("size", given, *args)


def test_none_may_stand_for_nothing() -> None:
    check_int("size", None, or_none=True)
    check_number("size", None, "a number", lambda x: True, or_none=True)
    with pytest.raises(ConfigError, match="^size must be a positive number, or None; it is 0$"):
        check_int("size", 0, or_none=True)


def test_what_does_not_go_together_is_named() -> None:
    check_together({"b=2": False}, "why", "a=1")
    with pytest.raises(ConfigError, match="^a=1 cannot be combined with c=3: why$"):
        check_together({"b=2": False, "c=3": True}, "why", "a=1")


def test_flat_options_become_records() -> None:
    records = {"reduce": dtrans.Reduce(), "batch": dtrans.Batch()}
    assert group_options({"trainers": 2}, records) == {"trainers": 2}
    assert group_options({"bucket_MB": 0, "trainers": 2}, records) == {
        "trainers": 2,
        "reduce": dtrans.Reduce(bucket_MB=0),
    }
    assert group_options({"reduce": "sum", "chains": 2}, records) == {
        "reduce": dtrans.Reduce("sum", chains=2)
    }
    given = {"batch": dtrans.Batch(unsplit_inputs=["x"]), "merge": {"loss": "sum"}}
    assert group_options(given, records) == {
        "batch": dtrans.Batch(unsplit_inputs=("x",), merge={"loss": "sum"})
    }


def test_an_option_that_nobody_has_is_named_with_the_closest() -> None:
    records, renamed = {"reduce": dtrans.Reduce()}, {"chains": "comm_stream_num"}
    check_known(
        "it", {"degree": 2, "reduce": "sum", "compress": "fp16"}, ["degree"], records, renamed
    )
    with pytest.raises(
        ConfigError,
        match=r"^reduce=Reduce\(.* is a record, but it has comm_stream_num as separate options; "
        r"pass the",
    ):
        check_known("it", {"reduce": dtrans.Reduce()}, ["degree"], records, renamed)
    for name, says in [
        ("degre", "degre is an unknown option of it; did you mean degree?"),
        ("zzz", "zzz is an unknown option of it; its options are degree, reduce, op, bucket_MB, "),
        ("chains", "chains is an unknown option of it; use comm_stream_num"),
    ]:
        with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
            check_known("it", {name: 2}, ["degree"], records, renamed)
