"""Role tables, from counts and from plans of each strategy, and the placement of processes by
`place`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import dtrans
from dtrans.errors import ConfigError
from dtrans.hosts.named_plan import named_plan
from dtrans.hosts.role_table import place, role_table, servers_stand_alone


COMMAND = ["python", "train.py", "a b"]
ENDPOINTS = ("127.0.0.1:6174", "127.0.0.1:6175")


def loss(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def traced() -> tuple[dtrans.Program, dtrans.Program]:
    tx = optax.adam(1e-3)
    init = lambda: (p := [jnp.ones((4, 4)), jnp.ones((4, 4))], tx.init(p))
    step = dtrans.make_train_step(loss, tx)
    return dtrans.trace(step, *init(), jnp.ones((8, 4))), dtrans.trace(init)


MAKERS = {
    "pserver": lambda *p: dtrans.pserver(*p, pservers=",".join(ENDPOINTS), trainers=2),
    "nccl2": lambda *p: dtrans.nccl2(*p, trainers=2),
    "sharding": lambda *p: dtrans.sharding(*p, degree=2),
    "pipeline": lambda *p: dtrans.pipeline(*p, num_stages=2, num_micro_batch=2),
}


@pytest.fixture(scope="module", params=MAKERS)
def planned(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, MAKERS[request.param](*traced())


# -- from plans ------------------------------------------------------------------------------------


def test_every_strategy_has_roles(planned: tuple[str, Any]) -> None:
    mode, plan = planned
    table = plan.roles(COMMAND, env={"EXTRA": "1"}, cores=2)
    assert table.mode == mode
    servers = 2 if mode == "pserver" else 0
    assert [e.role.kind for e in table] == ["pserver"] * servers + ["trainer"] * 2
    for entry in table:
        assert entry.argv == tuple(COMMAND) and entry.cores == 2
        assert dtrans.Role.from_env(entry.environment) == entry.role
        observed = {} if servers else {"DTRANS_STATUS_ENDPOINT": "127.0.0.1:6176"}
        assert entry.environment == {**entry.role.environment(), **observed, "EXTRA": "1"}
        assert entry.ports == ((int(entry.endpoint[-4:]),) if entry.endpoint else ())
    assert table == plan.roles(COMMAND, env={"EXTRA": "1"}, cores=2)


def test_memory_and_bytes_are_those_of_the_costs(planned: tuple[str, Any]) -> None:
    mode, plan = planned
    table, costs = plan.roles(), plan.costs()
    found = [(e.memory, e.sent, e.received) for e in table]
    if mode == "pserver":
        trainer, *servers = ((c.state_bytes, c.sent, c.received) for c in costs)
        assert found == [*servers, trainer, trainer]
        assert [e.endpoint for e in table] == [*ENDPOINTS, "", ""]
    elif mode == "pipeline":
        assert found == [(c.state_bytes, c.sent, c.received) for c in costs]
    else:
        assert found == [(c.state_bytes, c.sent, c.received) for c in costs] * 2
    assert all(n > 0 for row in found for n in row)


def test_processes_with_several_devices() -> None:
    main, startup = traced()
    one = dtrans.nccl2(main, startup, trainers=4)
    (cost,) = one.costs()
    table = one.roles(processes=2)
    assert [(e.memory, e.sent) for e in table] == [(2 * cost.state_bytes, 2 * cost.sent)] * 2
    staged = dtrans.pipeline(main, startup, num_stages=2, num_micro_batch=2)
    (whole,) = staged.roles(processes=1)
    assert whole.memory == sum(c.state_bytes for c in staged.costs())
    assert whole.sent is None  # most bytes stay in the process
    for plan, message in ((one, "4 trainers"), (staged, "2 stages")):
        with pytest.raises(ConfigError, match=f"processes=3 does not divide the plan's {message}"):
            plan.roles(processes=3)
    with pytest.raises(
        ConfigError, match="endpoints has 1 entries, expected 4, one for each process"
    ):
        one.roles(endpoints=["127.0.0.1:1"])


# -- from counts, and what is printed --------------------------------------------------------------


def test_a_table_of_counts() -> None:
    table = role_table("pserver", 1, 2, COMMAND, cores=3)
    assert str(table) == (
        "roles of a pserver job: 2 pservers, 1 trainer\n"
        "  role       endpoint        cores  memory  bytes sent  bytes received  away from  "
        "beside\n"
        "  pserver 0  127.0.0.1:6174      3       -           -               -  pserver    "
        "trainer\n"
        "  pserver 1  127.0.0.1:6175      3       -           -               -  pserver    "
        "trainer\n"
        "  trainer 0  -                   3       -           -               -  -          "
        "pserver\n"
        "each runs: python train.py 'a b'"
    )
    assert "<code>127.0.0.1:6174</code>" in table._repr_html_()
    found = json.loads(table.to_json())
    assert [r["name"] for r in found["roles"]] == ["pserver 0", "pserver 1", "trainer 0"]
    assert [(r["ports"], r["memory"]) for r in found["roles"]] == [
        ([6174], None),
        ([6175], None),
        ([], None),
    ]
    for entry, role in zip(found["roles"], table, strict=True):
        assert dtrans.Role.from_env(entry["environment"]) == role.role
        assert entry["argv"] == COMMAND


@pytest.mark.parametrize("mode", ["nccl2", "sharding", "pipeline"])
def test_trainers_only(mode: str) -> None:
    table = role_table(mode, 2)
    assert [(e.name, e.endpoint, e.beside) for e in table] == [
        ("trainer 0", "127.0.0.1:6174", ("trainer",)),
        ("trainer 1", "127.0.0.1:6175", ("trainer",)),
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("async", 1), "mode must be 'pserver', 'nccl2', 'sharding' or 'pipeline', it is 'async'"),
        (("pserver", 0), "trainers must be a number of processes"),
        (("pserver", 1, 0), "pservers must be a number of processes"),
        (("nccl2", 1, 1), "pservers=1: mode='nccl2' has no parameter servers"),
    ],
)
def test_counts_that_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        role_table(*arguments)


def test_endpoints_on_hosts() -> None:
    table = role_table("pserver", 1, 3, env={"EXTRA": "1"}).at(["a", "::1", "a", "b"], port=7000)
    assert [e.endpoint for e in table] == ["a:7000", "[::1]:7000", "a:7001", ""]
    assert {e.environment["DTRANS_ALLOW_REMOTE"] for e in table} == {"1"}
    assert {e.environment["EXTRA"] for e in table} == {"1"}
    for entry in table:
        assert dtrans.Role.from_env(entry.environment) == entry.role
    back = table.with_endpoints(["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"])
    assert not any("DTRANS_ALLOW_REMOTE" in e.environment for e in back)
    with pytest.raises(
        ConfigError, match="endpoints has 1 entries, expected 3, one for each pserver"
    ):
        table.with_endpoints(["127.0.0.1:1"])
    with pytest.raises(ConfigError, match="places has 1 entries, expected 4, one for each role"):
        table.at(["a"])


# -- placement -------------------------------------------------------------------------------------


def busiest(trainers: list[int], servers: list[int]) -> float:
    """Return the bytes over the busiest link.

    Each trainer exchanges one byte with all servers together.
    """
    load: dict[int, float] = {}
    for t, s in itertools.product(trainers, servers):
        if t != s:
            for h in (t, s):
                load[h] = load.get(h, 0.0) + 1 / len(servers)
    return max(load.values(), default=0.0)


@pytest.mark.parametrize("n, k", [(n, k) for n in range(1, 6) for k in range(1, 6)])
def test_the_rule_is_that_of_bandwidth(n: int, k: int) -> None:
    """Compare with every placement of servers beside trainers.

    Servers get separate hosts if the busiest link then carries less.
    """
    alone = busiest(list(range(n)), list(range(n, n + k)))
    assert alone == pytest.approx(max(1, n / k))  # the formula of BytePS
    beside = min(
        busiest(list(range(n)), list(at))
        for at in itertools.combinations_with_replacement(range(n), k)
    )
    assert servers_stand_alone(n, [(1.0, 1.0)] * k) == (alone < beside - 1e-9)


@pytest.mark.parametrize(
    "n, k, slots",
    [(2, 2, [1, 1, 1, 1]), (2, 2, [2, 2]), (3, 3, [2, 2, 2]), (3, 3, [1] * 6), (2, 2, [4, 4, 4]),
     (4, 2, [3, 1, 2]),
     (1, 2, [1, 3]), (2, 3, [1, 2, 3]), (3, 1, [2, 2, 2])],
)  # fmt: skip
def test_no_placement_is_better(n: int, k: int, slots: list[int]) -> None:
    hosts = [(str(h), s) for h, s in enumerate(slots)]
    found = [int(h) for h in place(role_table("pserver", n, k), hosts)]
    assert all(found.count(h) <= s for h, s in enumerate(slots))
    best = min(
        busiest(list(at[k:]), list(at[:k]))
        for at in itertools.product(range(len(slots)), repeat=n + k)
        if all(at.count(h) <= s for h, s in enumerate(slots))
        # On one host nothing would cross a link, but users list hosts to use them all.
        and len(set(at[k:])) == min(n, len(slots))
    )
    assert busiest(found[k:], found[:k]) == pytest.approx(best)


def test_places() -> None:
    four = [("a", 1), ("b", 1), ("c", 1), ("d", 1)]
    assert place(role_table("pserver", 2, 2), four) == ("c", "d", "a", "b")
    assert place(role_table("pserver", 2, 2), [("a", 2), ("b", 2)]) == ("a", "b", "a", "b")
    assert place(role_table("pserver", 1, 1), four) == ("b", "a")
    assert place(role_table("pserver", 1, 1), [("a", 2), ("b", 2)]) == ("a", "a")
    assert place(role_table("pserver", 2, 2), [("a", 4), ("b", 4), ("c", 4)]) == (
        "c",
        "a",
        "a",
        "b",
    )
    assert place(role_table("nccl2", 3), [("a", 2), ("b", 2)]) == ("a", "a", "b")


def test_a_server_with_more_bytes_gets_the_quieter_link() -> None:
    table = role_table("pserver", 2, 2)
    weigh = lambda e, n: dataclasses.replace(e, sent=n, received=n)
    heavy, light = (weigh(e, n) for e, n in zip(table.of("pserver"), (10, 1), strict=True))
    weighed = dtrans.RoleTable("pserver", (heavy, light, *table.of("trainer")))
    # On a separate host, the link of the large server would carry 10 bytes. Beside a trainer, the
    # link carries half of these, and half of 1.
    assert place(weighed, [("a", 2), ("b", 2), ("c", 1)]) == ("a", "c", "a", "b")
    assert place(table, [("a", 2), ("b", 2), ("c", 1)]) == ("c", "a", "a", "b")


@pytest.mark.parametrize(
    "hosts, message",
    [
        ([("a", 2), ("b", 1)],
         "the hosts a:2,b:1 have slots for 3 processes, but there are 4 roles "
"of a pserver job: 2 "
         "pservers, 2 trainers; add hosts or slots for 1"),
        ([], "the hosts none have slots for 0 processes"),
        ([("a", 2), ("a", 2)], "host a is listed twice; write it once, with the sum of its slots"),
        ([("a", 0)], "the slots of host a must be a number of processes"),
    ],
)  # fmt: skip
def test_hosts_that_are_refused(hosts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(role_table("pserver", 2, 2), hosts)


# -- plans by name ---------------------------------------------------------------------------------

MODULE = """
import jax.numpy as jnp, optax, dtrans

def planned():
    tx, x = optax.sgd(0.5), jnp.ones((4, 2))
    step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params) ** 2), tx)
    init = lambda: (p := jnp.ones(2), tx.init(p))
    return dtrans.nccl2(dtrans.trace(step, *init(), x), dtrans.trace(init), trainers=2)

plan = planned()
number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "planned_here.py").write_text(MODULE)
    (tmp_path / "broken_here.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("planned_here", "broken_here"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_plans_by_name(here: Path) -> None:
    assert (
        named_plan("planned_here:plan").trainers == named_plan("planned_here:planned").trainers == 2
    )
    for name, message in (
        ("planned_here", "expected module:plan"),
        ("planned_here:other", "the module planned_here has no other"),
        ("planned_here:number", "planned_here:number is a int; expected the result of"),
        ("nothing_here:plan", "the module nothing_here is neither in"),
    ):
        with pytest.raises(ConfigError, match=message):
            named_plan(name)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        named_plan("broken_here:plan")
