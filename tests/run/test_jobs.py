"""The methods of all plans and jobs, each in every way of running in this process."""

from __future__ import annotations

import dataclasses
import pickle
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html import escape
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import endpoints, tree_close
from jax.sharding import Mesh
from role_threads import HANG, RoleThreads, free_endpoints

import dtrans
from dtrans.costs import Costs, link_rate
from dtrans.errors import BatchError, ConfigError, StateError
from dtrans.job import Job
from dtrans.plan import Plan
from dtrans.run.role_jobs.server_job import ServerJob
from dtrans.run.role_jobs.trainer_job import TrainerJob


KEY = jax.random.key(0)
X, Y = jnp.linspace(-1, 1, 32).reshape(8, 4), jnp.ones((8, 2))


def loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


TX = optax.adam(1e-2)
STEP = dtrans.make_train_step(loss, TX)


def init(key: Any) -> Any:
    one, two = jax.random.split(key)
    params = {"w1": jax.random.normal(one, (4, 6)), "w2": jax.random.normal(two, (6, 2))}
    return params, TX.init(params)


def planned(name: str) -> Plan:
    main, startup = dtrans.trace(STEP, *init(KEY), X, Y), dtrans.trace(init, KEY)
    if name == "pserver":
        return dtrans.pserver(
            main,
            startup,
            pservers=endpoints(2),
            trainers=2,
            placement=dtrans.BlockPlacement(min_block_size=1),
        )
    if name == "nccl2":
        return dtrans.nccl2(main, startup, trainers=2)
    if name == "sharding":
        return dtrans.sharding(
            main, startup, stage=3, degree=2, slices=dtrans.Slicing(min_slice_size=0)
        )
    return dtrans.pipeline(main, startup, num_stages=2, num_micro_batch=2)


PLANS = ("pserver", "nccl2", "sharding", "pipeline")
WAYS = ("on_mesh", "simulate")


@pytest.fixture(scope="module", params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return planned(request.param)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_job_trains_as_one_device_and_says_what_it_is(plan: Plan, way: str) -> None:
    with getattr(plan, way)() as job:
        assert isinstance(job, Job) and type(job.plan) is type(plan)
        state, want = job.init(KEY), init(KEY)
        for _ in range(3):
            state, value = job.step(state, X, Y)
            *want, expected = STEP(*want, X, Y)
        tree_close((job.params(state), job.opt_state(state), value), (*want, expected), 1e-6)
        assert "tanh" in job.lower(state, X, Y).as_text()
        job.step(state, X, Y)  # lowering a step does not run it
        assert repr(plan) in repr(job) and "closed" not in repr(job)
    assert "closed" in repr(job)
    for call in (lambda: job.step(state, X, Y), lambda: job.init(KEY)):
        with pytest.raises(
            StateError, match="^the job of <.* plan of step.* is closed; create a new job"
        ):
            call()


def test_notebooks_show_jobs_and_states_without_entries(plan: Plan) -> None:
    with plan.simulate() as job:
        state, _ = job.step(job.init(KEY), X, Y)
        html = job._repr_html_()
        assert f"{escape(repr(job))}, 1 steps" in html and plan._repr_html_() in html
        root = ET.fromstring(state._repr_html_())
        assert root.findtext("summary") == repr(state) and repr(state).endswith(" bytes>")
        rows = [[cell.findtext("code") or cell.text for cell in row] for row in root.iter("tr")]
        of_w1 = [row for row in rows if "params/w1" in str(row[0])]
        whole = ["params/w1", "f32[4,6]", "96"]
        assert whole in of_w1 or len(of_w1) == 2, rows


def test_text_for_a_function_of_a_job_is_refused_by_name(plan: Plan) -> None:
    with plan.simulate() as job:
        state = job.init(KEY)
        message = r"^args\[1\]\['words'\] is text; job.apply takes arrays of numbers, so convert"
        with pytest.raises(BatchError, match=message):
            job.apply(lambda params, x, more: params, state, X, {"words": "a"})
        with pytest.raises(BatchError, match=r"^args\[0\] is an array of <U1; job.apply takes"):
            job.apply(lambda params, x: params, state, np.array(["a"]))


def test_a_plan_says_what_it_is_and_what_it_costs(plan: Plan) -> None:
    assert isinstance(plan, Plan)
    assert repr(plan) == f"<{str(plan).splitlines()[0]}>"
    html = plan._repr_html_()
    assert html.startswith("<b>") and all(
        cell in html for row in plan.rows for cell in row if "<" not in cell
    )
    assert all(isinstance(p, dtrans.Program) for p in plan.programs.values())
    costs = plan.costs()
    assert isinstance(costs, Costs) and all(
        c.role in str(costs) and c.role in costs._repr_html_() for c in costs
    )
    assert sum(c.count for c in costs) == {"PServerPlan": 4}.get(type(plan).__name__, 2)
    assert all(c.state_bytes > 0 and c.flops > 0 and c.rounds > 0 for c in costs)


SERVERS = {"pservers": "127.0.0.1:1,127.0.0.1:2", "trainers": 2}
CALLS: dict[str, tuple[Callable[..., Plan], dict[str, Any], dict[str, Any]]] = {
    "pserver": (dtrans.pserver, SERVERS, {"pservers": "127.0.0.1:1,127.0.0.1:3"}),
    "geo": (dtrans.pserver, SERVERS | {"mode": dtrans.Geo(push_every=2)}, {"trainers": 3}),
    "nccl2": (dtrans.nccl2, {"trainers": 2}, {"batch": "local"}),
    "sharding": (dtrans.sharding, {"degree": 2, "stage": 3}, {"stage": 2}),
    "pipeline": (dtrans.pipeline, {"num_stages": 2, "num_micro_batch": 2}, {"schedule": "GPipe"}),
}


def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
    return STEP(params, opt_state, x, 2.0 * y)


@pytest.mark.parametrize("name", CALLS)
def test_equal_calls_give_equal_plans(name: str) -> None:
    transform, options, other = CALLS[name]
    trace = lambda: (dtrans.trace(STEP, *init(KEY), X, Y), dtrans.trace(init, KEY))
    one, two = (transform(*trace(), **options) for _ in range(2))
    assert one == two and hash(one) == hash(two) and one in [two]
    assert one != transform(*trace(), **options | other)
    assert one != transform(dtrans.trace(step, *init(KEY), X, Y), trace()[1], **options)
    assert one != dataclasses.replace(one, callback_notes=("somebody",)) and one != "a plan"


@pytest.mark.parametrize("name", CALLS)
def test_plans_hold_no_closures(name: str) -> None:
    transform, options, _ = CALLS[name]
    plan = transform(dtrans.trace(STEP, *init(KEY), X, Y), dtrans.trace(init, KEY), **options)
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    assert not {n for n, x in fields.items() if isinstance(x, FunctionType) and x.__closure__}
    assert all(program.plan in (None, plan) for program in plan.programs.values())


def test_what_is_sent_is_received() -> None:
    """Between two stages, and between trainers and servers, each role receives all that another
    role sends."""
    for name in ("pserver", "pipeline"):
        costs = planned(name).costs()
        assert sum(c.count * c.sent for c in costs) == sum(c.count * c.received for c in costs) > 0


def test_a_trainer_of_geo_sgd_stores_the_optimizer_state() -> None:
    step = dtrans.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), tx := optax.adam(0.1))
    init = lambda: (w := jnp.ones(2), tx.init(w))
    main, startup = dtrans.trace(step, *init(), jnp.ones((4, 2))), dtrans.trace(init)
    trainer, _ = dtrans.pserver(main, startup, mode=dtrans.Geo()).costs()
    assert trainer.state_bytes == 3 * 2 * 4 + 4  # the parameter, its two moments, and the count


@pytest.mark.parametrize(
    "link, rate",
    [("1gbit", 125e6), ("1.5 Gbit/s", 187.5e6), ("200mbit", 25e6), ("64kbit", 8e3), (3, 3.0)],
)
def test_a_rate_is_bytes_or_text(link: Any, rate: float) -> None:
    assert link_rate(link) == rate


@pytest.mark.parametrize("link", ["1gbyte", "0gbit", "fast", 0, -1.0, float("inf"), True, None])
def test_what_is_no_rate_is_refused(link: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f'such as "1gbit"; it is {link!r}')):
        link_rate(link)


@pytest.mark.parametrize(
    "trainers, pservers, share", [(1, 1, 1.0), (2, 1, 2.0), (2, 2, 1.0), (4, 2, 2.0), (1, 2, 1.0)]
)
def test_the_bound_of_a_step_is_that_of_the_busiest_link(
    trainers: int, pservers: int, share: float
) -> None:
    """The bound is M/B, or n M / (k B) with fewer servers than trainers.

    All blocks have one size here.
    """
    step = dtrans.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), tx := optax.adam(0.1))
    init = lambda: (w := jnp.ones(40), tx.init(w))
    main, startup = dtrans.trace(step, *init(), jnp.ones((4, 40))), dtrans.trace(init)
    servers = ",".join(f"127.0.0.1:{i + 1}" for i in range(pservers))
    placement = dtrans.BlockPlacement(min_block_size=1)
    plan = dtrans.pserver(main, startup, pservers=servers, trainers=trainers, placement=placement)
    costs = plan.costs(link=16.0)
    assert costs.link_bytes == share * 40 * 4 and costs.link_seconds == share * 10
    assert costs == plan.costs() and plan.costs().link_seconds is None
    assert f"{share * 160:,.0f} bytes per step in one direction" in str(costs)
    assert f"{share * 10:g} s at 16 bytes/s" in costs._repr_html_()
    assert pickle.loads(pickle.dumps(costs)).link_seconds == costs.link_seconds


def test_the_bound_of_geo_sgd_is_for_one_step() -> None:
    main, startup = dtrans.trace(STEP, *init(KEY), X, Y), dtrans.trace(init, KEY)
    plan = dtrans.pserver(main, startup, trainers=2, mode=dtrans.Geo(push_every=5))
    _, server = plan.costs()
    assert plan.costs(link="8bit").link_seconds == server.sent / 5


@pytest.mark.parametrize("name", ["nccl2", "sharding", "pipeline"])
def test_collectives_have_no_bound(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^link='1gbit' is only for plans of dtrans.pserver, whose"
    ):
        planned(name).costs(link="1gbit")
    assert planned(name).costs().link_bytes is None


def test_costs_are_those_counted_by_hand() -> None:
    w1, w2 = 4 * 6 * 4, 6 * 2 * 4
    trainer, *servers = planned("pserver").costs()
    assert (trainer.state_bytes, trainer.sent, trainer.received, trainer.rounds) == (
        w1 + w2,
        w1 + w2,
        w1 + w2,
        1,
    )
    # each parameter has two moments, and each server has a count
    assert sum(s.state_bytes for s in servers) == 3 * (w1 + w2) + 2 * 4
    (rank,) = planned("nccl2").costs()
    assert (rank.state_bytes, rank.sent) == (
        3 * (w1 + w2) + 4,
        w1 + w2 + 4,
    )  # the gradients, and the loss
    first, last = planned("pipeline").costs()
    sent = planned("pipeline").stages[0].sends
    assert (first.sent, first.received, last.sent, last.received) == (
        2 * sent,
    ) * 4  # of two micro-batches


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(1)
def test_states_that_are_not_of_the_job_are_refused(plan: Plan, way: str) -> None:
    job = getattr(plan, way)()
    with pytest.raises(
        StateError, match="^step takes the state that init or step returned, not dict$"
    ):
        job.step({}, X, Y)
    state = job.init(KEY)
    narrow = dataclasses.replace(
        state, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
    )
    with pytest.raises(
        StateError,
        match=r"^this state belongs to another job: params/w\d is bfloat16\[.*\], expect",
    ):
        job.step(narrow, X, Y)
    with pytest.raises(StateError, match="^this state belongs to another job: it lacks params/w"):
        job.step(dataclasses.replace(state, params={}), X, Y)
    job.step(state, X, Y)


def test_a_state_that_was_donated_is_refused(plan: Plan) -> None:
    job = plan.on_mesh()
    state = job.init(KEY)
    job.step(state, X, Y)
    with pytest.raises(
        StateError, match="a step has already used this state, and its .* was donated to that step"
    ):
        job.step(state, X, Y)
    kept = plan.on_mesh(donate=False)
    state = kept.init(KEY)
    tree_close(kept.step(state, X, Y), kept.step(state, X, Y), 0)


def test_a_mesh_stands_for_its_devices(plan: Plan) -> None:
    devices = np.array(jax.devices()[: 4 if type(plan).__name__ == "PServerPlan" else 2])
    one, other = plan.on_mesh(Mesh(devices, ("any",))), plan.on_mesh(list(devices))
    tree_close(*(job.params(job.step(job.init(KEY), X, Y)[0]) for job in (one, other)), 0)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.sampled(1)
def test_a_job_goes_on_from_a_checkpoint(name: str, tmp_path: Any) -> None:
    job = planned(name).on_mesh()
    state, _ = job.step(job.init(KEY), X, Y)
    dtrans.checkpoint.save(tmp_path / "1", job, state)
    params, opt_state = dtrans.checkpoint.load(tmp_path / "1", job.plan.main)
    tree_close((params, opt_state), (job.params(state), job.opt_state(state)), 0)
    other = planned(name).on_mesh()
    restored = dtrans.checkpoint.restore(tmp_path / "1", other)
    tree_close(other.params(other.step(restored, X, Y)[0]), job.params(job.step(state, X, Y)[0]), 0)


def test_what_runs_no_plan_says_so() -> None:
    class Nothing(Plan):
        main = programs = _role_costs = transfers = notes = rows = _title = _header = None

    with pytest.raises(ConfigError, match="^a Nothing cannot run in the way 'mesh'$"):
        Nothing().on_mesh()


def test_a_role_runs_its_own_part_and_says_what_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("pserver")
    first, second = plan.servers
    environment = dtrans.Role("pserver", 2, (first, second), current_endpoint=second).environment()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with plan.on_cluster() as job:
        state = job.init(KEY)
        assert set(state) == set(plan.servers[second].main.inputs)
        for call, says in (
            (lambda: job.step(state, X, Y), "takes no steps: job.serve"),
            (lambda: job.params(state), "has only blocks of the parameters; save"),
            (lambda: job.opt_state(state), "the optimizer's state is on the servers"),
        ):
            with pytest.raises(ConfigError, match=says):
                call()
    with pytest.raises(StateError, match="^the job of .* is closed"):
        job.serve(state)
    with pytest.raises(ConfigError, match="^donate=False: a server updates its blocks in place"):
        plan.on_cluster(donate=False)
    monkeypatch.setenv("DTRANS_TRAINERS", "3")
    with pytest.raises(
        ConfigError,
        match="^the plan is for 2 trainers and pservers .* environment is for 3 trainers and ",
    ):
        plan.on_cluster()


def test_roles_save_their_own_parts_and_go_on_from_them(tmp_path: Any) -> None:
    """Run two trainers and two servers by `on_cluster`, each in a thread."""

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        trained = {n: params[n] for n in ("w1", "w2")}
        value, grads = dtrans.value_and_grad(lambda w: params["scale"] * loss(w, x, y))(trained)
        updates, opt_state = TX.update(grads, opt_state, trained)
        return {"scale": params["scale"], **optax.apply_updates(trained, updates)}, opt_state, value

    def begin(key: Any) -> Any:
        params, opt_state = init(key)
        return {"scale": jnp.float32(2), **params}, opt_state

    plan = dtrans.pserver(
        dtrans.trace(step, *begin(KEY), X, Y), dtrans.trace(begin, KEY), pservers=free_endpoints(2),
        trainers=2,
        placement=dtrans.BlockPlacement(min_block_size=1),
    )  # fmt: skip
    assert plan.frozen == ("params/scale",)

    def serve(endpoint: str, path: Any, came_from: Any) -> None:
        role = dtrans.Role("pserver", 2, tuple(plan.servers), current_endpoint=endpoint)
        with ServerJob(plan, role, {"deadline": HANG}) as job:
            dtrans.checkpoint.check(path, job)
            first = (
                job.init(KEY) if came_from is None else dtrans.checkpoint.restore(came_from, job)
            )
            dtrans.checkpoint.save(path, job, job.serve(first))

    def train(k: int, path: Any, came_from: Any) -> Any:
        role = dtrans.Role("trainer", 2, tuple(plan.servers), trainer_id=k)
        with TrainerJob(plan, role, {"deadline": HANG}) as job:
            state = (
                job.init(KEY) if came_from is None else dtrans.checkpoint.restore(came_from, job)
            )
            state, _ = job.step(state, X[4 * k : 4 * k + 4], Y[4 * k : 4 * k + 4])
            dtrans.checkpoint.save(path, job, state)
            return job.params(state)

    came_from, want = None, begin(KEY)
    for number in range(2):
        roles = RoleThreads()
        path = tmp_path / str(number)
        for endpoint in plan.servers:
            roles.start(endpoint, serve, endpoint, path, came_from)
        for k in range(2):
            roles.start(f"trainer {k}", train, k, path, came_from)
        ended = roles.all()
        *want, _ = step(*want, X, Y)
        for k in range(2):
            tree_close(ended[f"trainer {k}"], want[0], 1e-6)
        tree_close(dtrans.checkpoint.load(path, plan.main), tuple(want), 1e-6)
        came_from = path


def test_a_checkpoint_looks_for_its_place_before_training(plan: Plan, tmp_path: Any) -> None:
    job = plan.simulate()
    dtrans.checkpoint.check(tmp_path / "new" / "1", job)
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"file/1 cannot be created, since .*file is not a folder; save"
    ):
        dtrans.checkpoint.check(tmp_path / "file" / "1", job)
    dtrans.checkpoint.save(tmp_path / "1", job, job.init(KEY))
    with pytest.raises(
        ConfigError, match="-0 exists already; save each checkpoint to another path$"
    ):
        dtrans.checkpoint.check(tmp_path / "1", job)
