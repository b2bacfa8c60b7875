"""The command line: `dtrans launch`, `dtrans roles`, `dtrans status`, `dtrans check`, `dtrans train` and others.

Errors of the package come out as one message without a traceback and exit code 1, usage errors with 2, and a
failed role with that role's own exit code. `dtrans check` has exit codes of its own.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import dtrans
from dtrans.checks import check_one_of
from dtrans.endpoints import parse_endpoints
from dtrans.errors import ConfigError, DtransError, LaunchError


# a bug should look like one: plain tracebacks, not boxes with local variables
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")

Trainers = Annotated[int, typer.Option(min=1, help="How many trainers.")]
PServers = Annotated[int | None, typer.Option(min=1, help="How many parameter servers; none in nccl2 mode.")]
RAY, HOSTS = "On a Ray cluster", "On several hosts"
Mode = Annotated[str, typer.Option(help="`pserver`, or `nccl2`: trainers only, also for sharding and pipelines.")]


def main() -> None:
    """The entry point."""
    try:
        app()
    except LaunchError as e:
        _fail(e)
        sys.exit(e.code)
    except DtransError as e:
        _fail(e)
        sys.exit(1)


def _fail(error: DtransError) -> None:
    # markup off: messages may hold brackets, shapes for instance
    Console(stderr=True, soft_wrap=True).print(f"dtrans: {error}", style="red", markup=False, highlight=False)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dtrans {dtrans.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Rewrites a training step written for one device into the programs of a distributed job."""


# what follows the script is the script's
@app.command(name="launch", context_settings={"allow_interspersed_args": False})
def launch_command(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The script that every role runs.", metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments, verbatim.", metavar="ARGS...")] = None,
    trainers: Trainers = 1,
    pservers: PServers = None,
    mode: Mode = "pserver",
    on_trainer_loss: Annotated[
        str, typer.Option(help="`abort`; or `drop`: go on without a trainer that fails (nccl2 and asynchronous jobs).")
    ] = "abort",
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in `python -m`.")] = False,
    time_limit: Annotated[
        float | None, typer.Option(min=0, help="End the job when it takes more seconds than this.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(help="`ray`: on the nodes of a Ray cluster.", show_default="this host", rich_help_panel=RAY),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="The cluster: `auto`, or host:port of its head.",
            show_default="RAY_ADDRESS, or a new cluster on this host",
            rich_help_panel=RAY,
        ),
    ] = None,
    trainers_on: Annotated[
        str, typer.Option(help="`PACK`: on few nodes. `SPREAD`: on different ones.", rich_help_panel=RAY)
    ] = "PACK",
    trainer_resources: Annotated[
        str, typer.Option(help="For each trainer, such as `CPU=4,GPU=1`.", rich_help_panel=RAY)
    ] = "CPU=1",
    server_resources: Annotated[str, typer.Option(help="For each server.", rich_help_panel=RAY)] = "CPU=1",
    hosts: Annotated[
        str | None,
        typer.Option(
            help="A file with a host on each line, or a list such as `gpu1:2,gpu2:2`: start the roles there, by ssh.",
            show_default="this host",
            rich_help_panel=HOSTS,
        ),
    ] = None,
    rsh: Annotated[
        str, typer.Option(help="The command that reaches a host, such as `ssh -p 2222`.", rich_help_panel=HOSTS)
    ] = "ssh",
    python: Annotated[
        str | None,
        typer.Option(help="Python of the hosts.", show_default="the path of this one", rich_help_panel=HOSTS),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="A variable of this environment that roles get too, beside DTRANS_*, JAX_*, XLA_*, NCCL_* and such.",
            metavar="NAME",
            rich_help_panel=HOSTS,
        ),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Write what roles print into files of this folder too, one for each.")
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(help="Start nothing; print the job for `slurm`, `jobset`, `torchx`, or `hosts` (ssh)."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --emit slurm: servers and trainers share this number of nodes, in one allocation.",
            show_default="a node for each process",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write what --emit prints to this file.")] = None,
) -> None:
    """Start the roles of a job and wait for them: on this host, with `--hosts` on others, or with `--on ray`.

    With `--emit` nothing is started: the job is printed for what starts it.

    Each role finds out what it is from DTRANS_ROLE, DTRANS_TRAINER_ID, DTRANS_TRAINERS,
    DTRANS_PSERVER_ENDPOINTS (DTRANS_TRAINER_ENDPOINTS in nccl2 mode) and DTRANS_CURRENT_ENDPOINT;
    `dtrans.Role.from_env()` reads them, and so does `dtrans.connect()`. When one fails
    the others are ended, and its error and exit code are those of this command.
    """
    from dtrans.hosts.host_list import read_hosts
    from dtrans.hosts.on_hosts import launch_on_hosts
    from dtrans.hosts.ray_launch import launch_on_ray, resources
    from dtrans.run.distributed.launcher import launch

    if emit is not None:
        _emit(context, emit, [*(["-m"] if module else []), script, *(arguments or [])])
        return
    for option, given in (("--output", output), ("--nodes", nodes)):
        if given is not None:
            raise ConfigError(f"{option} is for --emit; say which, or leave it out")
    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"there is no script {script}", param_hint="SCRIPT")
    command = [sys.executable, *(["-m"] if module else []), script, *(arguments or [])]
    options: dict[str, Any] = {
        "trainers": trainers,
        "pservers": pservers,
        "mode": mode,
        "on_trainer_loss": on_trainer_loss,
        "deadline": time_limit,
        "log_dir": log_dir,
    }
    check_one_of("--on", on, (None, "ray"))
    if on is None:
        _refuse_options(context, RAY, "--on ray")
    if hosts is None:
        _refuse_options(context, HOSTS, "--hosts")
    elif on is not None:
        raise ConfigError("--hosts and --on ray are two ways to reach other hosts; give one of them")
    if hosts is not None:
        where = read_hosts(hosts)
        launch_on_hosts(command, where, rsh=rsh, python=python or sys.executable, carried=env or (), **options)
        return
    if on is None:
        launch(command, **options)
        return
    launch_on_ray(
        command,
        address=ray_address,
        trainers_on=trainers_on,
        trainer_resources=resources("--trainer-resources", trainer_resources),
        server_resources=resources("--server-resources", server_resources),
        **options,
    )


_EMITTED = (
    "script",
    "arguments",
    "trainers",
    "pservers",
    "mode",
    "module",
    "emit",
    "output",
    "nodes",
)


def _emit(context: typer.Context, name: str, arguments: list[str]) -> None:
    """Print or write a job for a scheduler: `dtrans launch --emit`."""
    from dtrans.hosts.emit import EMITTERS, IN_IMAGE
    from dtrans.hosts.role_table import role_table

    check_one_of("--emit", name, tuple(EMITTERS))
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        given = source is not None and source.name == "COMMANDLINE"
        if given and parameter.name not in _EMITTED:
            raise ConfigError(f"{parameter.opts[0]} does not go with --emit; leave it out")
    values = context.params
    python = "python" if name in IN_IMAGE else sys.executable
    table = role_table(values["mode"], values["trainers"], values["pservers"], [python, *arguments])
    shared: dict[str, int] = {}
    if values["nodes"] is not None:
        if name != "slurm":
            raise ConfigError(f"--nodes is an option of --emit slurm; leave it out with --emit {name}")
        shared = {"nodes": values["nodes"]}
    text = EMITTERS[name](table, **shared)
    if values["output"] is None:
        print(text, end="")
    else:
        values["output"].write_text(text)


def _refuse_options(context: typer.Context, panel: str, way: str) -> None:
    """Refuse options of a way to reach other hosts that the user has not chosen."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        given = source is not None and source.name == "COMMANDLINE"
        if given and getattr(parameter, "rich_help_panel", None) == panel:
            raise ConfigError(f"{parameter.opts[0]} is an option of {way}; say so, or leave it out")


@app.command()
def status(
    endpoints: Annotated[
        list[str],
        typer.Argument(help="Where the job answers, as `dtrans launch` prints it.", metavar="ENDPOINT..."),
    ],
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Ask again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two requests of --watch.")] = 1.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a server may take to answer.")] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON document; with --watch one on each line.")] = False,
    prometheus: Annotated[
        str | None,
        typer.Option(help="Serve metrics at this port of loopback, or at HOST:PORT; each scrape asks the job."),
    ] = None,
) -> None:
    """Show a running job: its servers, its trainers, and what each does.

    `dtrans launch` prints where its job answers. Parameter servers answer at their endpoints; with collectives trainer
    0 answers, at the host:port that DTRANS_STATUS_ENDPOINT names in its environment. DTRANS_TOKEN, or
    DTRANS_TOKEN_FILE, must be that of the job. It is not needed for your own jobs on this host. The exit code is 1
    if one does not answer.
    """
    from dtrans.run.status.show_status import show_metrics, show_status

    servers = parse_endpoints(",".join(endpoints))
    if prometheus is not None:
        if json or watch:
            raise ConfigError("--prometheus asks the job at each scrape; leave out --watch and --json")
        show_metrics(servers, prometheus, timeout=timeout)
    elif not show_status(servers, timeout=timeout, interval=interval if watch else None, as_json=json):
        raise typer.Exit(1)


@app.command()
def keygen(
    folder: Annotated[Path | None, typer.Argument(help="Write keys into this folder.", metavar="DIR")] = None,
    trainers: Annotated[int, typer.Option(min=0, help="How many trainers get a separate key.")] = 0,
    token: Annotated[bool, typer.Option("--token", help="Print a token for DTRANS_TOKEN instead.")] = False,
) -> None:
    """Make the secrets of a job: one token for all of its processes, or separate keys that can be revoked.

    With DIR: keys of servers, of each trainer, and of `dtrans status`, in files of mode 0600. Keys that are there stay.
    Processes find them by DTRANS_KEYS=DIR. Remove a file of DIR/clients to revoke a key.
    """
    if token == (folder is not None):
        raise ConfigError("dtrans keygen takes --token, or the folder of the keys")
    if folder is None:
        from dtrans.protocol.token import new_token

        print(new_token())
        return
    from dtrans.run.net.keys import STATUS, make_folder

    for path in make_folder(folder, [*(f"trainer {k}" for k in range(trainers)), STATUS]):
        print(path)


@app.command(name="roles", context_settings={"allow_interspersed_args": False})
def roles_command(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The script that every process runs.", metavar="SCRIPT")] = "",
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments, verbatim.", metavar="ARGS...")] = None,
    trainers: Trainers = 1,
    pservers: PServers = None,
    mode: Annotated[str, typer.Option(help="`pserver`, `nccl2`, `sharding` or `pipeline`.")] = "pserver",
    plan: Annotated[
        str | None, typer.Option(help="`module:plan`: a plan, or a function that returns one; in place of counts.")
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in `python -m`.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with commands and variables.")] = False,
) -> None:
    """Show the processes of a job: role, endpoint, memory and bytes per step.

    From counts, or from a plan, which also knows memory and bytes. Nothing is started.
    """
    from dtrans.hosts.named_plan import named_plan
    from dtrans.hosts.role_table import role_table

    command = ["python", *(["-m"] if module else []), script, *(arguments or [])] if script else []
    if plan is None:
        table = role_table(mode, trainers, pservers, command)
    else:
        for name in ("trainers", "pservers", "mode"):
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                raise ConfigError(f"--{name} does not go with --plan, which says it; leave it out")
        table = named_plan(plan).roles(command)
    print(table.to_json() if json else table)


# which mode an option of `train` is for is checked: one that is ignored would mislead
DIGITS, PIPELINE = "Of pserver, nccl2 and sharding mode (digits)", "Of pipeline mode (characters)"


def _of(panel: str, help: str, min: float | None = None) -> Any:
    return typer.Option(min=min, help=help, rich_help_panel=panel)


@app.command()
def train(
    context: typer.Context,
    mode: Annotated[
        str,
        typer.Option(
            help="`pserver`, `nccl2` (trainers only), `sharding` (they share the state too) or `pipeline` (stages)."
        ),
    ] = "pserver",
    model: Annotated[
        str | None,
        typer.Option(
            help="`digits`, or `characters` in pipeline mode; or, in tables that no trainer holds (with processes of "
            "pservers), `word2vec`: word vectors of the source of Python's standard library, or `ctr`: which "
            "impressions are clicked, of 20 features each.",
            show_default="digits; characters in pipeline mode",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="`processes`: one per role. `mesh`: all in this one. In pipeline mode `mesh`, or `simulate`: all "
            "stages on one device.",
            show_default="processes; mesh in pipeline mode",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Images in a global batch, or rows of characters; trainers or micro-batches share it.",
            show_default="64 images, 32 rows",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the split, the first parameters and the batches.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the loss into this file; in pipeline mode what was planned and what ran.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            help="Train on one device too, compare, and end with exit code 1 when what was learnt, or the difference, "
            "is out of bounds."
        ),
    ] = True,
    optimizer: Annotated[str, _of(DIGITS, "sgd, momentum, adam, adamw, lion, rmsprop, ...")] = "momentum",
    trainers: Annotated[int, _of(DIGITS, "How many trainers.", 1)] = 2,
    pservers: Annotated[int | None, _of(DIGITS, "How many parameter servers; none in nccl2 mode.", 1)] = None,
    epochs: Annotated[int, _of(DIGITS, "How often each image is seen.", 1)] = 20,
    min_block_size: Annotated[int, _of(DIGITS, "The fewest elements worth a block; 8192 or more.")] = 8192,
    sharding_stage: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=3,
            help="Of sharding mode: trainers share the optimizer's state (1), gradients too (2), parameters too (3).",
            show_default="3",
            rich_help_panel=DIGITS,
        ),
    ] = None,
    deadline: Annotated[float, _of(DIGITS, "Seconds that any role may wait for another.", 0.1)] = 60.0,
    stages: Annotated[int, _of(PIPELINE, "How many devices a replica has, each with a stage of the model.", 1)] = 2,
    micro_batches: Annotated[int, _of(PIPELINE, "Into how many parts a replica cuts its rows.", 1)] = 8,
    schedule: Annotated[
        str,
        _of(
            PIPELINE,
            "`PreferForward` (`GPipe`), `PreferBackward` (`1F1B`), `PreferBackwardOptimizer`, `Interleaved` or "
            "`ZeroBubble` (`ZB-H1`).",
        ),
    ] = "PreferBackward",
    replicas: Annotated[int, _of(PIPELINE, "How many copies of the pipeline share a batch.", 1)] = 1,
    chunks: Annotated[int | None, _of(PIPELINE, "Stages on each device, for `Interleaved`; 2 by default.", 1)] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="How many batches are trained on, in pipeline mode, by word2vec and by ctr.",
            show_default="100 of characters, 3000 of words, 6000 of impressions",
            rich_help_panel=PIPELINE,
        ),
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="Of word2vec: `nce`, or `tree` (hierarchical softmax).", show_default="nce")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Of ctr: how many rows the largest table has.", show_default="10000")
    ] = None,
) -> None:
    """Train distributed, and compare with one device on the same batches.

    With trainers (`--mode pserver`, `nccl2` or `sharding`) a perceptron learns handwritten digits. In stages (`--mode
    pipeline`) a transformer learns the source of Python's standard library, character by character. With `--model
    word2vec` two tables of word vectors are learnt from it, of which trainers have the rows that they look up; with
    `--model ctr` twenty tables, from clicks that are drawn by a truth that is known.
    """
    if model in OF_TABLES:
        _refuse_beside_tables(context, model, mode)
    else:
        _refuse(context, mode)
    check_one_of("--model", model, (None, *OF_TABLES, "characters" if mode == "pipeline" else "digits"))
    if model == "word2vec":
        from dtrans.examples import word2vec, word_job

        words = word2vec.WordSettings(loss or "nce", steps or 3000, batch_size or 2048, seed, deadline)
        within = word_job.train(words, trainers=trainers, pservers=pservers or 2, plot=plot, check=check)
    elif model == "ctr":
        from dtrans.examples import click_job, clicks

        wished = clicks.ClickSettings(rows or 10_000, steps or 6000, batch_size or 1024, seed, deadline)
        within = click_job.train(wished, trainers=trainers, pservers=pservers or 2, check=check)
    elif mode == "pipeline":
        from dtrans.examples import pipelined

        per_device = chunks or (2 if schedule.lower() == "interleaved" else 1)
        shape = (stages, micro_batches, schedule, replicas, per_device)
        wanted = pipelined.CharactersSettings(*shape, steps or 100, batch_size or 32, seed, engine or "mesh")
        within = pipelined.train(wanted, plot=plot, check=check)
    else:
        from dtrans.examples import job, train as digits

        settings = job.DigitsSettings(
            optimizer, epochs, batch_size or 64, seed, min_block_size, sharding_stage or 0, deadline
        )
        roles: Any = {"mode": mode, "trainers": trainers, "pservers": pservers}
        within = digits.train(settings, engine=engine or "processes", **roles, plot=plot, check=check)
    if not within:
        raise typer.Exit(1)


@app.command(name="check")
def check_command(
    target: Annotated[str, typer.Argument(help="`module:function`, or `file.py:function`.", metavar="MODULE:FUNCTION")],
    seed: Annotated[int, typer.Option(min=0, help="Of the random points.")] = 0,
    devices: Annotated[
        int | None, typer.Option(min=1, help="CPU devices for the meshes of the module.", show_default="JAX's")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check without a tolerance that a plan, or a step written with shard_map, computes the one-device step.

    The function takes no arguments. It returns a plan, or `(distributed_step, step, args)` as `dtrans.verify`
    takes them.

    The exit code is 0 if everything was compared and is equal, 1 if an output differs. It is 2 if something could not
    be compared, if the check is refused, or if the module fails.
    """
    from dtrans.check_command import INCOMPLETE, check, exit_code, show

    try:
        report = check(target, seed=seed, devices=devices)
    except DtransError as e:
        _fail(e)
        raise typer.Exit(INCOMPLETE) from e
    except Exception as e:  # of the user's module: 1 would say that an output differs
        traceback.print_exc()
        raise typer.Exit(INCOMPLETE) from e
    show(report, as_json=as_json)
    raise typer.Exit(exit_code(report))


@app.command()
def example(
    name: Annotated[str | None, typer.Argument(help="Which; without it all are listed.", metavar="NAME")] = None,
    mode: Annotated[
        str, typer.Option(help="`nccl2`, `sharding`, `pserver` or `pipeline`; or `single`, without dtrans.")
    ] = "nccl2",
    trainers: Annotated[
        int, typer.Option(min=1, help="How many trainers; also how many servers, ranks or stages.")
    ] = 2,
    stage: Annotated[int, typer.Option(min=1, max=3, help="Of sharding.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="How many batches are trained on.")] = 100,
    x64: Annotated[bool, typer.Option(help="Compute in 64 bits, where rounding is small.")] = True,
) -> None:
    """Train a step of Flax, nnx or Equinox distributed, and compare with one device on the same batches."""
    from dtrans.examples import libraries
    from dtrans.examples.libraries.run import run

    if name is None:
        for known, what in libraries.EXAMPLES.items():
            print(f"{known:20} {what}")
    elif not run(name, mode, trainers=trainers, stage=stage, steps=steps, x64=x64):
        raise typer.Exit(1)


@app.command()
def simulate(
    seed: Annotated[int, typer.Option(min=0, help="Of the first schedule; all of it follows from the seed.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="How many schedules; of one all is shown.")] = 1,
) -> None:
    """Run jobs of parameter servers over a simulated network, where messages are late and roles die.

    Servers and trainers are those of real jobs, without their sockets and clocks; what they compute is simulated. A
    schedule in which a job does what it must not do is made as small as it can be, and shown; exit code 1 if there is
    one.
    """
    from dtrans.protocol.simulation.case import drawn
    from dtrans.protocol.simulation.verdict import simulated, smaller, verdicts

    if count == 1:
        found = simulated(drawn(seed))
        print(smaller(found) if found.faults else found)
        raise typer.Exit(bool(found.faults))
    begun, wrong = time.monotonic(), 0
    for found in verdicts(range(seed, seed + count)):
        if found.faults:
            wrong += 1
            print(f"{smaller(found)}\n")
    rate = count / (time.monotonic() - begun) * 60
    print(f"{count - wrong} of {count} schedules are as they must be ({rate:,.0f} a minute)")
    raise typer.Exit(bool(wrong))


def _refuse(context: typer.Context, mode: str) -> None:
    """Refuse options that are given, and are for another mode."""
    other = {"pipeline": DIGITS, "pserver": PIPELINE, "nccl2": PIPELINE, "sharding": PIPELINE}.get(mode)
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        given = source is not None and source.name == "COMMANDLINE"
        if given and other is not None and getattr(parameter, "rich_help_panel", None) == other:
            modes = "pserver, nccl2 and sharding mode" if other == DIGITS else "pipeline mode"
            raise ConfigError(f"{parameter.opts[0]} is an option of {modes}; with --mode {mode} leave it out")


# what `dtrans train` takes with models whose tables are on parameter servers
_ALL = {"mode", "model", "engine", "batch_size", "seed", "check", "trainers", "pservers", "deadline", "steps"}
OF_TABLES = {"word2vec": _ALL | {"plot", "loss"}, "ctr": _ALL | {"rows"}}


def _refuse_beside_tables(context: typer.Context, model: str, mode: str) -> None:
    """Refuse options that such a model does not have."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in OF_TABLES[model]:
            raise ConfigError(f"{parameter.opts[0]} is no option of --model {model}; leave it out")
    if mode != "pserver" or context.params["engine"] not in (None, "processes"):
        raise ConfigError(f"--model {model} has tables on parameter servers: --mode pserver --engine processes")


if __name__ == "__main__":
    main()
