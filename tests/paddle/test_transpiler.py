"""Paddle's interface: defaults, errors and their texts, and programs that do not depend on the
order of calls."""

from __future__ import annotations

import json
import logging
from typing import Any

import jax
import optax
import pytest
from helpers import communication, init_of, mlp_batch, mlp_loss, mlp_params, tree_equal
from paths import GOLDEN as GOLDEN_FOLDER

import dtrans
from dtrans import DistributeTranspiler, DistributeTranspilerConfig, PSDispatcher
from dtrans.errors import (
    ConfigAssertionError,
    ConfigError,
    GradientError,
    TraceError,
    UnknownEndpointError,
)
from dtrans.paddle.config import EXTENSIONS


GOLDEN = json.loads((GOLDEN_FOLDER / "paddle-transpiler.json").read_text())
EPS = "127.0.0.1:6174,127.0.0.1:6175"
FIRST, SECOND = EPS.split(",")
SIZES = (30, 600, 5)  # w1 is cut into two blocks of 8192 elements or more


@pytest.fixture(scope="module")
def programs() -> tuple[Any, Any]:
    """Return a traced step and its traced init."""
    params, tx = mlp_params(SIZES), optax.adam(1e-2)
    step = dtrans.make_train_step(mlp_loss, tx)
    main = dtrans.trace(step, params, tx.init(params), *mlp_batch(8, SIZES))
    return main, dtrans.trace(init_of(tx), params)


def transpiled(
    programs: tuple[Any, Any], config: Any = None, **options: Any
) -> DistributeTranspiler:
    t = DistributeTranspiler(config)
    main, startup = programs
    t.transpile(
        **{
            "trainer_id": 0,
            "program": main,
            "startup_program": startup,
            "pservers": EPS,
            "trainers": 2,
        }
        | options
    )
    return t


# -- the config ------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_paddle() -> None:
    ours = {n: v for n, v in vars(DistributeTranspilerConfig()).items() if n not in EXTENSIONS}
    assert ours == GOLDEN["config_defaults"]
    assert {n: type(v) for n, v in ours.items()} == {
        n: type(v) for n, v in GOLDEN["config_defaults"].items()
    }


def test_every_option_is_an_attribute_with_a_type() -> None:
    assert set(DistributeTranspilerConfig.__annotations__) == {
        *GOLDEN["config_defaults"],
        *EXTENSIONS,
    }


def test_configs_do_not_share_what_is_set() -> None:
    config = DistributeTranspilerConfig()
    config.min_block_size = 10000
    assert DistributeTranspilerConfig().min_block_size == 8192
    assert repr(config) == "DistributeTranspilerConfig(min_block_size=10000)"
    config.dc_asgd_lambda = 0.5
    assert repr(config) == "DistributeTranspilerConfig(min_block_size=10000, dc_asgd_lambda=0.5)"


@pytest.mark.parametrize(
    "name, meant",
    [
        ("min_blocksize", "min_block_size"),
        ("slice_var", "slice_var_up"),
        ("split_methods", "split_method"),
        ("sync", "sync_mode"),
    ],
)
def test_an_unknown_option_is_refused_with_the_one_that_was_meant(name: str, meant: str) -> None:
    message = f"^DistributeTranspilerConfig has no option {name}; did you mean {meant}\\?$"
    with pytest.raises(ConfigError, match=message):
        DistributeTranspilerConfig(**{name: 1})
    with pytest.raises(ConfigError, match=message):
        setattr(DistributeTranspilerConfig(), name, 1)


def test_an_option_like_no_other_is_refused_with_the_list_of_all() -> None:
    with pytest.raises(
        ConfigError,
        match="^DistributeTranspilerConfig has no option xyzzy; its options are slice_var_up, ",
    ):
        DistributeTranspilerConfig(xyzzy=1)


@pytest.mark.parametrize("size", [8191, 4096, 1, 0, -1, None, "8192", 8192.0, True])
def test_a_min_block_size_below_the_floor_of_paddle_is_refused(programs: Any, size: Any) -> None:
    message = (
        f"^min_block_size must be 8192 or more, it is {size!r}; dtrans.pserver takes any "
        "positive number$"
    )
    with pytest.raises(ConfigError, match=message) as caught:
        DistributeTranspiler(DistributeTranspilerConfig(min_block_size=size))
    assert isinstance(caught.value, ConfigAssertionError) and isinstance(
        caught.value, AssertionError
    )
    t = DistributeTranspiler()
    t.config.min_block_size = size  # an option that is set later is checked by `transpile`
    with pytest.raises(AssertionError, match=message):
        t.transpile(0, programs[0], EPS, 2, startup_program=programs[1])


def test_min_block_size_says_into_what_leaves_are_cut(programs: Any) -> None:
    small, large = (
        transpiled(programs, DistributeTranspilerConfig(min_block_size=n)).plan.placement
        for n in (8192, 1 << 20)
    )
    assert [b.name for b in small.all_blocks if b.count > 1] == [
        "params/w1.block0",
        "params/w1.block1",
    ]
    assert [b.name for b in large.all_blocks if b.count > 1] == []


def test_slice_var_up_off_leaves_every_leaf_whole(programs: Any) -> None:
    plan = transpiled(programs, DistributeTranspilerConfig(slice_var_up=False)).plan
    assert [b.name for b in plan.placement.all_blocks] == [
        f"params/{n}" for n in ("b1", "b2", "w1", "w2")
    ]


@pytest.mark.parametrize(
    "method",
    [object, int, "RoundRobin", dtrans.RoundRobin([FIRST]), PSDispatcher, lambda eps: None],
)
def test_a_split_method_that_is_not_a_dispatcher_is_refused(programs: Any, method: Any) -> None:
    with pytest.raises(AssertionError) as caught:
        DistributeTranspiler(DistributeTranspilerConfig(split_method=method))
    assert isinstance(caught.value, ConfigAssertionError)
    t = DistributeTranspiler()
    t.config.split_method = method  # an option that is set later is checked by `transpile`
    with pytest.raises(
        ConfigError, match="^split_method is .*; expected a subclass of dtrans.PSDispatcher"
    ):
        t.transpile(0, programs[0], EPS, 2, startup_program=programs[1])
    assert str(caught.value) == (
        f"split_method is {method!r}; expected a subclass of dtrans.PSDispatcher, such as "
        "dtrans.RoundRobin or dtrans.HashName"
    )


class AllOnTheLast(dtrans.RoundRobin):
    """Dispatcher of a user that is an indirect subclass of PSDispatcher."""

    def dispatch(self, varlist: Any) -> list[str]:
        return [self.eps[-1]] * len(varlist)


@pytest.mark.parametrize(
    "method", [dtrans.HashName, dtrans.RoundRobin, dtrans.SizeBalanced, AllOnTheLast]
)
def test_a_split_method_places_the_blocks(programs: Any, method: Any) -> None:
    table = transpiled(
        programs, DistributeTranspilerConfig(split_method=method)
    ).plan.placement.all_blocks
    if method is AllOnTheLast:
        assert {b.endpoint for b in table} == {SECOND}
    else:
        assert {b.endpoint for b in table} == {FIRST, SECOND}


@pytest.mark.parametrize(
    "answer, message",
    [
        (
            [],
            f"Wrong.dispatch returned [] for 5 blocks; expected one of {FIRST}, {SECOND} for each "
            "block",
        ),
        (
            None,
            f"Wrong.dispatch returned None for 5 blocks; expected one of {FIRST}, {SECOND} for "
            "each "
            "block",
        ),
        (
            3,
            f"Wrong.dispatch returned 3 for 5 blocks; expected one of {FIRST}, {SECOND} for each "
            "block",
        ),
        (
            [FIRST, SECOND, "127.0.0.1:1", FIRST, FIRST],
            "Wrong.dispatch returned '127.0.0.1:1' for params/w1.block0; expected one of "
            f"{FIRST}, {SECOND}",
        ),
    ],
)
def test_a_dispatcher_that_answers_wrongly_is_named(
    programs: Any, answer: Any, message: str
) -> None:
    class Wrong(PSDispatcher):
        def dispatch(self, varlist: Any) -> Any:
            return answer

    with pytest.raises(ConfigError) as caught:
        transpiled(programs, DistributeTranspilerConfig(split_method=Wrong))
    assert str(caught.value) == message


def test_a_config_of_another_kind_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="^config must be a DistributeTranspilerConfig, it is dict$"
    ):
        DistributeTranspiler({"min_block_size": 8192})  # type: ignore[arg-type]


# -- print_log -------------------------------------------------------------------------------------


def test_trainers_clip_as_the_config_says(programs: tuple[Any, Any]) -> None:
    clip = {"clip_local_norm": 2.0, "clip_local_by": "norm"}
    config = DistributeTranspilerConfig(sync_mode=False, **clip)
    assert transpiled(programs, config).plan.options.mode == dtrans.Async(**clip)
    config = DistributeTranspilerConfig(
        sync_mode=False, runtime_split_send_recv=True, half_async=True, **clip
    )
    assert transpiled(programs, config, sync_mode=False).plan.options.mode == dtrans.HalfAsync(
        **clip
    )
    reduce = nccl2(programs, DistributeTranspilerConfig(mode="nccl2", **clip)).plan.options.reduce
    assert (reduce.clip_local_norm, reduce.clip_local_by) == (2.0, "norm")
    with pytest.raises(ConfigError, match=r"^clip_local_norm=2.0 needs sync_mode=False or mode="):
        transpiled(programs, DistributeTranspilerConfig(**clip))


@pytest.mark.parametrize("mode", ["pserver", "nccl2"])
def test_print_log_logs_the_plan(
    programs: Any, mode: str, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    plan = transpiled if mode == "pserver" else nccl2
    t = plan(programs, DistributeTranspilerConfig(mode=mode))
    assert caplog.records == []
    # a failure of the log does not prevent the result
    assert logging.getLogger().level == logging.WARNING
    plan(programs, DistributeTranspilerConfig(mode=mode, print_log=True))
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == (
        "dtrans.paddle.transpiler",
        "INFO",
        str(t.plan),
    )
    assert capsys.readouterr() == ("", "")


def test_a_level_that_the_user_sets_is_kept(
    programs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dtrans.paddle.transpiler"):
        transpiled(programs, DistributeTranspilerConfig(print_log=True))
    assert caplog.records == []


def test_the_plan_goes_to_stderr_where_logging_is_not_set_up(
    programs: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # added by pytest
    for _ in range(2):
        t = transpiled(programs, DistributeTranspilerConfig(print_log=True))
        assert capsys.readouterr() == ("", f"{t.plan}\n")
    assert logging.getLogger("dtrans.paddle.transpiler").handlers == []


# -- transpile -------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer_id", [2, 3, -1, None, "0", 0.0, True])
def test_a_trainer_id_out_of_range_is_refused(programs: Any, trainer_id: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        transpiled(programs, trainer_id=trainer_id)
    assert (
        str(caught.value)
        == f"trainer_id is {trainer_id!r}; with 2 trainers, expected an integer from 0 to 1"
    )


@pytest.mark.parametrize("trainers", [0, -1, 1.5, None, True])
def test_a_number_of_trainers_that_is_none_is_refused(programs: Any, trainers: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        transpiled(programs, trainers=trainers)
    assert (
        str(caught.value) == f"trainers must be a positive number of trainers, it is {trainers!r}"
    )


def test_trainers_as_a_list_of_endpoints_is_refused(programs: Any) -> None:
    with pytest.raises(
        ConfigError,
        match="^trainers is '127.0.0.1:1,127.0.0.1:2'; expected a number of trainers",
    ):
        transpiled(programs, trainers="127.0.0.1:1,127.0.0.1:2")


def test_half_async_is_asynchronous(programs: Any) -> None:
    config = DistributeTranspilerConfig(half_async=True)
    assert transpiled(programs, config, sync_mode=False).plan.sync_mode is False
    with pytest.raises(ConfigError, match="^half_async=True needs sync_mode=False, it is True$"):
        transpiled(programs, config)
    with pytest.raises(ConfigError, match="^sync_mode must be True or False, it is 'async'$"):
        transpiled(programs, sync_mode="async")


@pytest.mark.parametrize("option", ["sync_mode", "enable_dc_asgd"])
@pytest.mark.parametrize(
    "mode", [{"mode": "nccl2"}, {"mode": "collective", "collective_mode": "local_sgd"}]
)
def test_collectives_are_synchronous(programs: Any, mode: Any, option: str) -> None:
    value = option != "sync_mode"
    with pytest.raises(ConfigError, match=f"^{option}={value}"):
        nccl2(programs, DistributeTranspilerConfig(**mode, **{option: value}))


@pytest.mark.parametrize("config, argument", [(False, True), (True, False), (False, False)])
def test_async_training_is_asked_for_in_either_place(
    programs: Any, config: bool, argument: bool
) -> None:
    t = transpiled(programs, DistributeTranspilerConfig(sync_mode=config), sync_mode=argument)
    assert t.plan.sync_mode is False
    assert "send_barrier" not in communication(t.get_trainer_program())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sync_mode": None}, "sync_mode must be True or False, it is None"),
        ({"half_async": 1}, "half_async must be True or False, it is 1"),
    ],
)
def test_modes_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        DistributeTranspiler(DistributeTranspilerConfig(**options))


def test_an_endpoint_that_is_listed_twice_is_refused(programs: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        transpiled(programs, pservers=f"{EPS},{FIRST}")
    assert (
        str(caught.value)
        == f"the endpoint {FIRST} is listed 2 times; each pserver needs a different endpoint"
    )


@pytest.mark.parametrize(
    "bad",
    [
        "127.0.0.1",
        "127.0.0.1:",
        ":6174",
        "127.0.0.1:0",
        "127.0.0.1:99999",
        "127.0.0.1:x",
        "a b:1",
        "tcp://a:1x",
    ],
)
def test_something_that_is_not_an_endpoint_is_refused(programs: Any, bad: str) -> None:
    with pytest.raises(ConfigError) as caught:
        transpiled(programs, pservers=f"{FIRST},{bad}")
    assert (
        str(caught.value)
        == f"{bad!r} is not an endpoint; expected host:port, such as 127.0.0.1:6174"
    )


@pytest.mark.parametrize("none", ["", "  "])
def test_no_endpoints_at_all_are_refused(programs: Any, none: str) -> None:
    with pytest.raises(
        ConfigError,
        match="^pservers has no endpoints; write e.g. pservers='127.0.0.1:6174,127.0.0.1:6175'$",
    ):
        transpiled(programs, pservers=none)


def test_spaces_around_endpoints_are_let_be(programs: Any) -> None:
    assert list(transpiled(programs, pservers=f" {FIRST} , {SECOND}").plan.servers) == [
        FIRST,
        SECOND,
    ]


@pytest.mark.parametrize("missing", ["program", "startup_program"])
def test_a_missing_program_is_refused(programs: Any, missing: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^transpile needs program=dtrans.trace\(step, ...\) and startup_program=",
    ):
        transpiled(programs, **{missing: None})


def test_something_that_is_not_a_program_is_refused(programs: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^main is a function; expected a Program",
    ):
        transpiled(programs, program=lambda: None)
    with pytest.raises(ConfigError, match=r"^startup is a str; expected a Program"):
        transpiled(programs, startup_program="startup")


def test_a_startup_program_of_another_model_is_refused(programs: Any) -> None:
    other = mlp_params((30, 7, 5))
    with pytest.raises(
        TraceError,
        match=r"params/b1 as float32\[7\], but the step has float32\[600\]; startup must be",
    ):
        transpiled(programs, startup_program=dtrans.trace(init_of(optax.adam(1e-2)), other))


def test_a_program_that_does_not_train_is_refused(programs: Any) -> None:
    forward = dtrans.trace(mlp_loss, mlp_params(SIZES), *mlp_batch(8, SIZES))
    with pytest.raises(GradientError, match="^mlp_loss is not a training step: "):
        transpiled(programs, program=forward)


def test_a_refused_transpile_leaves_the_plan_of_before(programs: Any) -> None:
    t = transpiled(programs)
    plan = t.plan
    with pytest.raises(ConfigError):
        t.transpile(5, programs[0], EPS, 2, startup_program=programs[1])
    assert t.plan is plan
    assert t.get_trainer_program().name == "trainer 0"


# -- programs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.plan,
        lambda t: t.get_trainer_program(),
        lambda t: t.get_trainer_startup_program(),
        lambda t: t.get_pserver_program(FIRST),
        lambda t: t.get_pserver_programs(FIRST),
        lambda t: t.get_startup_program(FIRST),
    ],
)
def test_programs_are_not_there_before_transpile(ask: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^the transpiler has no programs yet; call transpile\(...\) first$"
    ):
        ask(DistributeTranspiler())


@pytest.mark.parametrize(
    "ask", ["get_pserver_program", "get_pserver_programs", "get_startup_program"]
)
def test_an_unknown_endpoint_is_named_beside_those_there_are(programs: Any, ask: str) -> None:
    t = transpiled(programs)
    with pytest.raises(KeyError) as caught:
        getattr(t, ask)("127.0.0.1:1")
    assert isinstance(caught.value, UnknownEndpointError) and isinstance(caught.value, ConfigError)
    # str(error) is the plain text; a plain KeyError would show its repr, with quotes and
    # backslashes
    assert (
        str(caught.value)
        == f"'127.0.0.1:1' is not a pserver of this plan; its pservers are {FIRST}, {SECOND}"
    )


def listings(t: DistributeTranspiler, order: int) -> dict[str, str]:
    """Return the text of every program of every role, requested in one of several orders."""
    asks = [
        ("trainer", lambda: str(t.get_trainer_program())),
        ("trainer startup", lambda: str(t.get_trainer_startup_program())),
        ("first", lambda: str(t.get_pserver_program(FIRST))),
        ("both", lambda: "\n".join(map(str, t.get_pserver_programs(SECOND)))),
        ("startup", lambda: str(t.get_startup_program(FIRST))),
    ]
    asks = asks[order:] + asks[:order] if order < len(asks) else asks[::-1]
    return {name: ask() for name, ask in asks}


def test_any_order_of_calls_and_any_number_of_them_gives_the_same_programs(programs: Any) -> None:
    t = transpiled(programs)
    want = listings(transpiled(programs), 0)
    for order in range(6):
        assert listings(t, order) == want
    t.transpile(0, programs[0], EPS, 2, startup_program=programs[1])  # once more
    assert listings(t, 3) == want


def test_positional_arguments_are_in_the_order_of_paddle(programs: Any) -> None:
    main, startup = programs
    t = DistributeTranspiler()
    t.transpile(1, main, EPS, 2, True, startup, SECOND)
    assert t.get_trainer_program().name == "trainer 1"
    assert list(t.plan.servers) == [FIRST, SECOND]


def test_the_programs_that_are_handed_in_are_not_changed(programs: Any) -> None:
    main, startup = programs
    before = [str(main), str(startup), main.roles, startup.roles, dict(main.labels)]
    jaxprs = main.jaxpr, startup.jaxpr
    t = transpiled(programs)
    listings(t, 0)
    assert [str(main), str(startup), main.roles, startup.roles, dict(main.labels)] == before
    assert (main.jaxpr, startup.jaxpr) == jaxprs
    params, tx = mlp_params(SIZES), optax.adam(1e-2)
    tree_equal(startup(params), (params, tx.init(params)))


def test_one_object_gives_the_programs_of_every_role(programs: Any) -> None:
    t = transpiled(programs, trainer_id=1)
    trainer = t.get_trainer_program()
    assert trainer.name == "trainer 1"
    assert t.get_trainer_program(wait_port=False) is trainer
    sends = [op for op in trainer.ops if op.type == "send"]
    assert {op.attrs["trainer_id"] for op in sends} == {1}
    assert all(n.endswith(".trainer_1") for op in sends for n in op.attrs["names"])
    assert communication(trainer)[-7:] == ["send_barrier", *["recv"] * 4, "fetch_barrier", "concat"]
    assert communication(t.get_trainer_startup_program()) == [
        *["recv"] * 4,
        "fetch_barrier",
        "concat",
    ]
    for ep in (FIRST, SECOND):
        main, startup = t.get_pserver_programs(ep)
        assert main is t.get_pserver_program(ep)
        assert startup is t.get_startup_program(ep, main, "ignored")
        (op,) = main.ops
        assert (op.type, op.attrs["endpoint"], op.attrs["Fanin"], op.attrs["sync_mode"]) == (
            "listen_and_serv",
            ep,
            2,
            True,
        )
        assert not startup.communicates
        assert startup.out_names == main.in_names


def test_roles_that_plan_apart_plan_the_same(programs: Any) -> None:
    """Each process has a separate transpiler. A trainer must send what its server expects."""
    params, tx = mlp_params(SIZES), optax.adam(1e-2)
    again = (
        dtrans.trace(
            dtrans.make_train_step(mlp_loss, tx),
            params,
            jax.eval_shape(tx.init, params),
            *mlp_batch(8, SIZES),
        ),
        dtrans.trace(
            init_of(tx), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        ),
    )
    server, trainer = transpiled(programs), transpiled(again, trainer_id=1)
    sent: dict[str, dict[str, Any]] = {FIRST: {}, SECOND: {}}
    for eqn in trainer.get_trainer_program().jaxpr.jaxpr.eqns:
        if eqn.primitive.name == "send":
            for atom, ep, name in zip(
                eqn.invars, eqn.params["epmap"], eqn.params["names"], strict=True
            ):
                sent[ep][name] = (atom.aval.shape, atom.aval.dtype)
    from dtrans.run.parameter_server.update import ServerUpdate

    for ep, grads in sent.items():
        expected = ServerUpdate.from_program(server.get_pserver_program(ep)).grad_types
        assert grads == {
            n: (t.shape, t.dtype) for n, t in expected.items() if n.endswith(".trainer_1")
        }


def test_one_trainer_and_one_pserver_is_a_job_like_any_other(programs: Any) -> None:
    t = transpiled(programs, trainers=1, pservers=FIRST)
    sends = [op for op in t.get_trainer_program().ops if op.type == "send"]
    assert {n for op in sends for n in op.attrs["names"]} == {
        f"params/{n}@GRAD" for n in ("b1", "b2", "w1", "w2")
    }


def test_a_program_that_communicates_says_how_to_run_it(programs: Any) -> None:
    trainer = transpiled(programs).get_trainer_program()
    with pytest.raises(
        dtrans.errors.NotRunnableError,
        match=r"run it with dtrans.Executor\(\), or run the full job with plan.on_mesh\(\)",
    ):
        trainer(mlp_params(SIZES), *mlp_batch(8, SIZES))


# -- what Paddle got wrong: the class of its error where it had one, the words, or no error where
# none is due ---------


def refusal(programs: Any, config: dict[str, Any], options: dict[str, Any]) -> ConfigError:
    """Return the error for a config with these options, set at once or changed later."""
    t = DistributeTranspiler()
    for name, value in config.items():
        setattr(t.config, name, value)
    with pytest.raises(ConfigError) as caught:
        t.transpile(
            **{
                "trainer_id": 0,
                "program": programs[0],
                "startup_program": programs[1],
                "pservers": EPS,
                "trainers": 2,
            }
            | options
        )
    if (
        config.get("enable_dc_asgd") is not True
    ):  # only `transpile` knows if updates are synchronous
        with pytest.raises(type(caught.value)) as at_once:
            transpiled(programs, DistributeTranspilerConfig(**config), **options)
        assert str(at_once.value) == str(caught.value)
    return caught.value


@pytest.mark.parametrize("config, options, kind, message", [
    ({"sync_mode": None}, {}, ValueError, "sync_mode must be True or False, it is None"),
    ({"runtime_split_send_recv": None}, {}, ValueError, "runtime_split_send_recv must be True or "
"False, it is None"),
    ({"runtime_split_send_recv": True}, {}, ValueError,
     "runtime_split_send_recv=True needs sync_mode=False, it is True"),
    ({"runtime_split_send_recv": True, "sync_mode": True}, {}, ValueError,
     "runtime_split_send_recv=True needs sync_mode=False, it is True"),
    ({"completely_not_async": True, "sync_mode": False}, {}, ValueError,
     "completely_not_async=True needs runtime_split_send_recv=True, it is False; "
     "for synchronous updates without a communicator, set sync_mode=True"),
    ({"completely_not_async": True}, {}, ValueError, "completely_not_async=True needs "
     "sync_mode=False, it is True"),
    ({"half_async": True}, {}, ValueError, "half_async=True needs sync_mode=False, it is True"),
    ({"geo_sgd_mode": True}, {}, ValueError, "geo_sgd_mode=True needs sync_mode=False, it is "
     "True"),
    ({"geo_sgd_need_push_nums": 5}, {}, ValueError,
     "geo_sgd_need_push_nums=5 needs geo_sgd_mode=True, it is False"),
    ({"geo_sgd_mode": True, "sync_mode": False, "geo_sgd_need_push_nums": 0}, {}, ValueError,
     "geo_sgd_need_push_nums must be a positive number of steps, it is 0"),
    ({"geo_sgd_mode": True, "sync_mode": False, "geo_sgd_block_on_pull": "no"}, {}, ValueError,
     "geo_sgd_block_on_pull must be True or False, it is 'no'"),
    ({"geo_sgd_mode": True, "sync_mode": False, "enable_dc_asgd": True}, {}, ValueError,
     "enable_dc_asgd=True needs geo_sgd_mode=False: in GEO-SGD trainers update their own "
     "parameters"),
    ({"geo_sgd_mode": True, "mode": "nccl2"}, {"trainers": EPS}, ValueError,
     "geo_sgd_mode=True needs mode='pserver', but mode is 'nccl2'"),
    ({"half_async": True, "mode": "nccl2"}, {"trainers": EPS}, ValueError,
     "half_async=True needs mode='pserver', but mode is 'nccl2'"),
    ({"enable_dc_asgd": True, "sync_mode": False, "runtime_split_send_recv": True}, {}, ValueError,
     "enable_dc_asgd=True with runtime_split_send_recv=True needs half_async=True, it is "
     "False: if a step does not wait, servers cannot know which parameters the step used"),
    ({"nccl_comm_num": 2}, {}, ValueError,
     "nccl_comm_num=2 needs mode='nccl2', but mode is 'pserver'"),
    ({"hierarchical_allreduce_inter_nranks": 2}, {}, ValueError,
     "hierarchical_allreduce_inter_nranks=2 needs mode='nccl2', but mode is 'pserver'"),
    ({"dc_asgd_lambda": 0.5, "mode": "nccl2"}, {"trainers": EPS}, ValueError,
     "dc_asgd_lambda=0.5 needs mode='pserver', but mode is 'nccl2'"),
    ({"dc_asgd_decay": 0.5, "geo_sgd_mode": True, "sync_mode": False}, {}, ValueError,
     "dc_asgd_decay=0.5 needs geo_sgd_mode=False: in GEO-SGD trainers update their own parameters"),
    ({"merge": {0: "mean"}}, {}, ValueError,
     "merge={0: 'mean'} must be a dict from names to merges, such as {'aux': 'sum'}"),
    ({"communicator": dtrans.CommunicatorConfig(), "sync_mode": False}, {}, ValueError,
     "communicator needs runtime_split_send_recv=True and completely_not_async=False"),
    ({"communicator": 20, "sync_mode": False, "runtime_split_send_recv": True}, {}, ValueError,
     "communicator must be a CommunicatorConfig, it is 20"),
    ({"enable_dc_asgd": True, "sync_mode": False, "runtime_split_send_recv": True,
      "completely_not_async": True}, {},
     AssertionError, "enable_dc_asgd=True needs completely_not_async=False: synchronous gradients "
     "have no delay"),
    ({"merge": {"params/nothing": "mean"}}, {}, ValueError,
     "merge['params/nothing'] matches no leaf that trainers compute; expected one of these "
     "leaves, or a prefix of their names: none"),
    ({"merge": "mean"}, {}, ValueError,
     "merge='mean' must be a dict from names to merges, such as {'aux': 'sum'}"),
    ({"min_block_size": 4096}, {}, AssertionError,
     "min_block_size must be 8192 or more, it is 4096; dtrans.pserver takes any positive number"),
    ({"split_method": object}, {}, AssertionError,
     "split_method is <class 'object'>; expected a subclass of dtrans.PSDispatcher, such as "
     "dtrans.RoundRobin or dtrans.HashName"),
    ({"enable_dc_asgd": True}, {}, AssertionError,
     "enable_dc_asgd=True needs sync_mode=False: synchronous gradients have no delay"),
    ({"mode": "bogus"}, {}, ValueError, "mode must be 'pserver', 'nccl2' or 'collective', it is "
"'bogus'"),
    ({"mode": None}, {}, ValueError, "mode must be 'pserver', 'nccl2' or 'collective', it is None"),
    ({"mode": ["nccl2"]}, {}, ValueError, "mode must be 'pserver', 'nccl2' or 'collective', it is "
"['nccl2']"),
    ({"print_log": "yes"}, {}, ValueError, "print_log must be True or False, it is 'yes'"),
    ({"wait_port": 1}, {}, ValueError, "wait_port must be True or False, it is 1"),
    ({"enable_dc_asgd": 0}, {}, ValueError, "enable_dc_asgd must be True or False, it is 0"),
    ({"slice_var_up": None}, {}, ValueError, "slice_var_up must be True, False or 'require', it is "
"None"),
    ({}, {"trainer_id": 2}, ValueError, "trainer_id is 2; with 2 trainers, expected an integer "
     "from 0 to 1"),
    ({}, {"trainers": "a,b"}, ValueError,
     "trainers is 'a,b'; expected a number of trainers in pserver mode (a list of endpoints is for "
     "mode='nccl2')"),
    ({}, {"pservers": f"{FIRST},{FIRST}"}, ValueError,
     f"the endpoint {FIRST} is listed 2 times; each pserver needs a different endpoint"),
    ({}, {"seed": -1}, ValueError, "seed must be an integer from 0 to 2**32 - 1, it is -1"),
    ({}, {"seed": 2**32}, ValueError, "seed must be an integer from 0 to 2**32 - 1, it is "
f"{2**32}"),
    ({}, {"seed": None}, ValueError, "seed must be an integer from 0 to 2**32 - 1, it is None"),
    ({}, {"seed": True}, ValueError, "seed must be an integer from 0 to 2**32 - 1, it is True"),
    ({"mode": "nccl2"}, {}, AssertionError,
     f"trainers is 2; with mode='nccl2', expected the trainers' endpoints, such as '{EPS}'"),
    ({"mode": "nccl2"}, {"trainers": EPS, "seed": "1"}, ValueError,
     "seed must be an integer from 0 to 2**32 - 1, it is '1'"),
])  # fmt: skip
def test_what_paddle_refused_or_should_have(
    programs: Any,
    config: dict[str, Any],
    options: dict[str, Any],
    kind: type[Exception],
    message: str,
) -> None:
    error = refusal(programs, config, options)
    assert isinstance(error, kind)
    assert str(error) == message


def test_dc_asgd_is_for_asynchronous_training_by_either_switch(programs: Any) -> None:
    for config, argument in ((True, False), (False, True), (False, False)):
        try:
            transpiled(
                programs,
                DistributeTranspilerConfig(enable_dc_asgd=True, sync_mode=config),
                sync_mode=argument,
            )
        except ConfigError as error:
            assert not isinstance(error, AssertionError)


@pytest.mark.parametrize("ask", [3, "threads", object()])
def test_there_are_no_threads_of_servers_to_set(programs: Any, ask: Any) -> None:
    t = transpiled(programs)
    with pytest.raises(TypeError) as caught:
        t._set_server_config(ask)
    assert isinstance(caught.value, ConfigError)
    assert str(caught.value) == (
        f"server_config is {ask!r}, but dtrans has no ServerRuntimeConfig: its servers have no "
        "numbers of threads to set; leave _set_server_config out"
    )
    t._set_server_config()


def test_a_step_without_an_optimizer_is_refused(programs: Any) -> None:
    """Paddle creates a job that trains nothing."""
    grad = dtrans.value_and_grad(mlp_loss)
    params, tx = mlp_params(SIZES), optax.adam(1e-2)

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        loss, _ = grad(params, x, y)
        return params, opt_state, loss

    main = dtrans.trace(step, params, tx.init(params), *mlp_batch(8, SIZES))
    with pytest.raises(
        GradientError,
        match="^no gradient was found in step: none of its parameters .* Take gradients with "
        "dtrans",
    ):
        transpiled(programs, program=main)


WORKS = {
    "lamb, unknown to Paddle's servers": optax.lamb(1e-2),
    "adadelta, which stood still": optax.adadelta(1.0),
    "a warm-up, whose block had variables of its own": optax.sgd(
        optax.warmup_exponential_decay_schedule(0, 1, 4, 8, 0.5)
    ),
    "a clip, whose shapes were those of whole gradients": optax.chain(
        optax.clip(1.0), optax.sgd(0.1)
    ),
    "a clip by a norm of which each server had a part": optax.chain(
        optax.clip_by_global_norm(1.0), optax.sgd(0.1)
    ),
}


@pytest.mark.parametrize("name", WORKS)
def test_what_paddle_refused_and_works(name: str) -> None:
    params, tx = mlp_params(SIZES), WORKS[name]
    step = dtrans.make_train_step(mlp_loss, tx)
    main = dtrans.trace(step, params, tx.init(params), *mlp_batch(8, SIZES))
    t = transpiled((main, dtrans.trace(init_of(tx), params)))
    assert [b.name for b in t.plan.placement.all_blocks if b.count > 1] == [
        "params/w1.block0",
        "params/w1.block1",
    ]
    for endpoint in (FIRST, SECOND):
        assert [op.type for op in t.get_pserver_program(endpoint).ops] == ["listen_and_serv"]


def test_get_startup_program_needs_no_program_of_the_server(programs: Any) -> None:
    t = transpiled(programs)
    assert t.get_startup_program(FIRST) is t.get_pserver_programs(FIRST)[1]


def test_the_seed_is_that_of_the_order_of_whole_leaves(programs: Any) -> None:
    config = DistributeTranspilerConfig(slice_var_up=False)
    main, startup = programs
    orders = set()
    for seed in range(6):
        plan: Any = transpiled(programs, config, seed=seed).plan
        same = dtrans.pserver(
            main,
            startup,
            pservers=EPS,
            trainers=2,
            placement=dtrans.BlockPlacement(slice_var_up=False, seed=seed),
        )
        assert plan.placement == same.placement
        orders.add(plan.placement.order)
    assert len(orders) > 1
    assert (
        transpiled(programs, config).plan.placement
        == transpiled(programs, config, seed=0).plan.placement
    )
    assert transpiled(programs, seed=5).plan.placement == transpiled(programs).plan.placement


# -- nccl2 mode ------------------------------------------------------------------------------------


def nccl2(programs: tuple[Any, Any], config: Any = None, **options: Any) -> DistributeTranspiler:
    main, startup = programs
    t = DistributeTranspiler(config or DistributeTranspilerConfig(mode="nccl2"))
    given = {
        "trainer_id": 0,
        "program": main,
        "startup_program": startup,
        "trainers": EPS,
        "current_endpoint": FIRST,
    }
    t.transpile(**given | options)
    return t


@pytest.mark.parametrize(
    "trainers", [EPS, EPS.split(","), tuple(EPS.split(",")), f" {FIRST} , {SECOND}"]
)
def test_nccl2_programs(programs: Any, trainers: Any) -> None:
    t = nccl2(programs, trainers=trainers, trainer_id=1, current_endpoint=SECOND)
    assert isinstance(t.plan, dtrans.CollectivePlan) and t.plan.trainers == 2
    assert t.get_trainer_program() is t.plan.program
    sums = [op for op in t.get_trainer_program().ops if op.type == "all_reduce"]
    assert [op.attrs["name"] for op in sums] == ["bucket/0", "results/sum"]
    startup = t.get_trainer_startup_program()
    assert startup.name == "startup of trainer 1"
    assert communication(startup) == ["gen_nccl_id", "broadcast"]
    op, *_, last = startup.ops
    assert (op.role, op.attrs) == ("rpc", {"trainer_id": 1, "endpoints": (FIRST, SECOND)})
    assert (last.role, last.attrs["root"]) == ("dist", 0)
    assert startup.out_names == t.get_trainer_program().in_names[: len(startup.out_names)]
    assert [op.type for op in startup.ops[1:-1]] == [op.type for op in t.plan.startup.ops]


def test_nccl2_as_paddle_writes_it(programs: Any) -> None:
    config = DistributeTranspilerConfig()
    config.mode = "nccl2"
    t = DistributeTranspiler(config=config)
    t.transpile(
        0, program=programs[0], startup_program=programs[1], trainers=EPS, current_endpoint=FIRST
    )
    assert t.plan.trainers == 2


def test_nccl2_with_one_trainer(programs: Any) -> None:
    t = nccl2(programs, trainers=FIRST)
    assert not t.get_trainer_program().communicates
    assert communication(t.get_trainer_startup_program()) == ["gen_nccl_id", "broadcast"]


@pytest.mark.parametrize("trainers", [2, None, 1.5, [1, 2], {FIRST: 0}])
def test_nccl2_trainers_must_be_endpoints(programs: Any, trainers: Any) -> None:
    with pytest.raises(ConfigAssertionError) as caught:
        nccl2(programs, trainers=trainers)
    assert str(caught.value) == (
        f"trainers is {trainers!r}; with mode='nccl2', expected the trainers' endpoints, such as "
        f"'{EPS}'"
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"trainer_id": 2}, "trainer_id is 2; with 2 trainers, expected an integer from 0 to 1"),
        ({"trainer_id": -1}, "trainer_id is -1; with 2 trainers, expected an integer from 0 to 1"),
        (
            {"trainer_id": "0"},
            "trainer_id is '0'; with 2 trainers, expected an integer from 0 to 1",
        ),
        (
            {"trainer_id": 1},
            f"current_endpoint is {FIRST}, the endpoint of trainer 0; expected {SECOND}, the "
            "endpoint "
            "of trainer 1",
        ),
        (
            {"current_endpoint": "127.0.0.1:9"},
            f"current_endpoint is '127.0.0.1:9'; expected one of the trainers' endpoints {EPS}",
        ),
        (
            {"current_endpoint": None},
            f"current_endpoint is None; expected one of the trainers' endpoints {EPS}",
        ),
        (
            {"trainers": f"{EPS},{FIRST}"},
            f"the endpoint {FIRST} is listed 2 times; each trainer needs a different endpoint",
        ),
        ({"trainers": ""}, f"trainers has no endpoints; write e.g. trainers='{EPS}'"),
        ({"trainers": "a"}, "'a' is not an endpoint; expected host:port, such as 127.0.0.1:6174"),
        (
            {"sync_mode": False},
            "sync_mode=False needs mode='pserver', but mode is 'nccl2'",
        ),
    ],
)
def test_nccl2_refuses(programs: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        nccl2(programs, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "mode, reductions",
    [
        ("grad_allreduce", ["bucket/0", "bucket/1", "bucket/2", "bucket/3"]),
        ("local_sgd", ["bucket/0"]),
    ],
)
def test_collective_mode(programs: Any, mode: str, reductions: list[str]) -> None:
    t = nccl2(programs, DistributeTranspilerConfig(mode="collective", collective_mode=mode))
    assert isinstance(t.plan, dtrans.CollectivePlan)
    names = [op.attrs["name"] for op in t.get_trainer_program().ops if op.type == "all_reduce"]
    assert names == [*reductions, "results/sum"]
    assert communication(t.get_trainer_startup_program()) == ["gen_nccl_id", "broadcast"]
    leaves = {n for b in t.plan.buckets for n in b.leaves}
    assert any(n.startswith("opt_state/") for n in leaves) == (mode == "local_sgd")


@pytest.mark.parametrize(
    "config, options, message",
    [
        (
            {"collective_mode": None},
            {},
            "collective_mode must be 'grad_allreduce' or 'local_sgd' with mode='collective'",
        ),
        (
            {"collective_mode": "x"},
            {},
            "collective_mode must be 'grad_allreduce' or 'local_sgd' with mode='collective'",
        ),
        (
            {"mode": "nccl2"},
            {},
            "collective_mode='local_sgd' needs mode='collective', but mode is 'nccl2'",
        ),
        (
            {"mode": "pserver"},
            {},
            "collective_mode='local_sgd' needs mode='collective', but mode is 'pserver'",
        ),
        (
            {},
            {"trainers": 2},
            "trainers is 2; with mode='collective', expected the trainers' endpoints",
        ),
        (
            {},
            {"sync_mode": False},
            "sync_mode=False needs mode='pserver', but mode is 'collective'",
        ),
    ],
)
def test_collective_mode_that_cannot_be(
    programs: Any, config: Any, options: Any, message: str
) -> None:
    given = {"mode": "collective", "collective_mode": "local_sgd"} | config
    with pytest.raises(ValueError, match=f"^{message}"):
        nccl2(programs, DistributeTranspilerConfig(**given), **options)


def of_hosts(*counts: int) -> list[str]:
    """Return endpoints of trainers, with the given number of trainers on each host."""
    return [
        f"10.0.0.{host}:{6170 + k}" for host, count in enumerate(counts, 1) for k in range(count)
    ]


@pytest.mark.parametrize("inter, endpoints, axes", [
    (2, of_hosts(4), (2, 2)),
    (2, of_hosts(8), (4, 2)),
    (4, of_hosts(4, 4), (2, 4)),
    (0, of_hosts(2, 2), (2, 2)),
    (1, of_hosts(3, 3), (2, 3)),
])  # fmt: skip
def test_nccl2_over_nodes(
    programs: Any, inter: int, endpoints: list[str], axes: tuple[int, int]
) -> None:
    config = DistributeTranspilerConfig(
        mode="nccl2", use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=inter
    )
    plan = nccl2(programs, config, trainers=endpoints, current_endpoint=endpoints[0]).plan
    assert plan.axes == (("trainers_exter", axes[0]), ("trainers_inter", axes[1]))
    kinds = [
        op.type
        for op in plan.program.ops
        if op.role == "dist" and op.attrs.get("name") == "bucket/0"
    ]
    assert kinds == ["reduce_scatter", "all_reduce", "all_gather"]


@pytest.mark.parametrize("inter, endpoints, kind, message", [
    (3, of_hosts(4), AssertionError, "the 4 trainers have 3 per node; expected several nodes"),
    (4, of_hosts(4), AssertionError, "the 4 trainers have 4 per node; expected several nodes"),
    (0, of_hosts(4), AssertionError, "the 4 trainers have 4 per node; .* Set "
     "hierarchical_allreduce_inter_nranks to the number of trainers per node$"),
    (0, of_hosts(1, 1), AssertionError, "the 2 trainers have 1 per node; expected several nodes"),
    (0, of_hosts(3, 2), ConfigError, "needs hosts with equally many trainers, .*10.0.0.2:6171. "
     "Set hierarchical"),
    (-1, of_hosts(4), ConfigError, "hierarchical_allreduce_inter_nranks must be a number of "
"trainers, it is -1"),
])  # fmt: skip
def test_nccl2_nodes_that_cannot_be(
    programs: Any, inter: int, endpoints: list[str], kind: type[Exception], message: str
) -> None:
    config = DistributeTranspilerConfig(
        mode="nccl2", use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=inter
    )
    with pytest.raises(kind, match=message):
        nccl2(programs, config, trainers=endpoints, current_endpoint=endpoints[0])


def test_nccl2_contradictions(programs: Any) -> None:
    with pytest.raises(
        ConfigError,
        match="^hierarchical_allreduce_inter_nranks=2 needs use_hierarchical_allreduce=T",
    ):
        nccl2(
            programs,
            DistributeTranspilerConfig(mode="nccl2", hierarchical_allreduce_inter_nranks=2),
        )
    with pytest.raises(
        ConfigError,
        match="^use_hierarchical_allreduce=True needs mode='nccl2', but mode is 'pserver'$",
    ):
        DistributeTranspiler(DistributeTranspilerConfig(use_hierarchical_allreduce=True))
    with pytest.raises(
        ConfigError, match="^nccl_comm_num must be a positive number, or None; it is 0$"
    ):
        nccl2(programs, DistributeTranspilerConfig(mode="nccl2", nccl_comm_num=0))


@pytest.mark.parametrize("count, chains", [(1, None), (2, 2)])
def test_nccl2_chains(programs: Any, count: int, chains: int | None) -> None:
    plan = nccl2(programs, DistributeTranspilerConfig(mode="nccl2", nccl_comm_num=count)).plan
    assert plan.options.reduce.chains == chains


@pytest.mark.parametrize(
    "ask", ["get_pserver_program", "get_pserver_programs", "get_startup_program"]
)
def test_nccl2_has_no_pservers(programs: Any, ask: str) -> None:
    with pytest.raises(ConfigError, match=f"^{ask} needs mode='pserver', but mode is 'nccl2'; "):
        getattr(nccl2(programs), ask)(FIRST)


def test_nccl2_communication_does_not_run_by_accident(programs: Any) -> None:
    t = nccl2(programs)
    with pytest.raises(dtrans.errors.NotRunnableError):
        t.get_trainer_startup_program()(mlp_params(SIZES))
    exe = dtrans.Executor(deadline=5)
    with pytest.raises(
        ConfigError, match=r"^JAX was used already, .* call dtrans.connect\(\) before"
    ):
        exe.run(t.get_trainer_startup_program(), mlp_params(SIZES))
    params, tx = mlp_params(SIZES), optax.adam(1e-2)
    with pytest.raises(
        ConfigError,
        match=r"^this process is not connected to other trainers: call dtrans.connect\(\)",
    ):
        exe.run(t.get_trainer_program(), params, tx.init(params), *mlp_batch(8, SIZES))
