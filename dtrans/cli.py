"""Command line: `dtrans launch`, `roles`, `status`, `check`, `keygen` and `example`.

A `DtransError` is printed as one message without a traceback, and the exit code is 1. Usage errors
have the exit code 2. `dtrans launch` exits with the code of a failed role, and `dtrans check` with
the codes in `dtrans.check_command`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import dtrans
from dtrans.checks import check_one_of
from dtrans.endpoints import parse_endpoints
from dtrans.errors import ConfigError, DtransError, LaunchError


if TYPE_CHECKING:
    from dtrans.run.distributed.restarts.launch_record import LaunchRecord


# switch rich's tracebacks off, because they show all local variables and hide the error
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")

Trainers = Annotated[int, typer.Option(min=1, help="Number of trainers.")]
PServers = Annotated[
    int | None, typer.Option(min=1, help="Number of parameter servers; none in nccl2 mode.")
]
RAY, HOSTS = "On a Ray cluster", "On several hosts"
Mode = Annotated[
    str, typer.Option(help="`pserver`, or `nccl2`: trainers only, also for sharding and pipelines.")
]


def main() -> None:
    """Run the command line."""
    run_command(app)


def run_command(command: Callable[[], None]) -> None:
    """Run a command; if it raises a `DtransError`, print the message and exit with its code."""
    try:
        command()
    except LaunchError as e:
        _fail(e)
        sys.exit(e.code)
    except DtransError as e:
        _fail(e)
        sys.exit(1)


def _fail(error: DtransError) -> None:
    # markup would interpret brackets in messages, such as shapes, as styles
    Console(stderr=True, soft_wrap=True).print(
        f"dtrans: {error}", style="red", markup=False, highlight=False
    )


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
    """Rewrite a training step for one device into the programs of a distributed job."""


# Options after SCRIPT belong to the script, so this command does not parse them.
@app.command(name="launch", context_settings={"allow_interspersed_args": False})
def launch_command(
    context: typer.Context,
    script: Annotated[
        str | None,
        typer.Argument(help="The script that every role runs.", metavar="SCRIPT"),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of SCRIPT, passed verbatim.", metavar="ARGS..."),
    ] = None,
    trainers: Trainers = 1,
    pservers: PServers = None,
    mode: Mode = "pserver",
    on_trainer_loss: Annotated[
        str,
        typer.Option(
            help="`restart` starts a failed trainer again, as often as --restarts allows. `abort` "
            "ends the job. `drop` continues without the trainer (synchronous jobs with snapshots, "
            "asynchronous jobs without snapshots, and nccl2). `replace` does the same in "
            "synchronous jobs with snapshots. It also starts the trainer again, as often as "
            "--restarts allows, and the trainer joins the job when it is ready."
        ),
    ] = "restart",
    quorum: Annotated[
        int,
        typer.Option(
            min=1,
            help="With `--on-trainer-loss drop` or `replace`: the smallest number of trainers with "
            "which a job of parameter servers continues.",
        ),
    ] = 1,
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Largest number of restarts. The launcher restarts roles after a signal, or the "
            "failure of a host, has ended a role. In a job with snapshots, only the role that a "
            "signal ended starts again, and the job continues from the newest snapshot. Otherwise "
            "all roles start again, and SCRIPT continues from its newest checkpoint.",
        ),
    ] = 0,
    snapshots: Annotated[
        Path | None,
        typer.Option(
            help="With --restarts: folder for snapshots of the state of parameter "
            "servers. With --hosts, all hosts must share the folder. If the launcher is killed, "
            "`--resume DIR` continues the job from the newest snapshot.",
            metavar="DIR",
            show_default="a temporary folder; with --hosts no snapshots",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue a job after its launcher has ended, from the newest snapshot in DIR. "
            "SCRIPT and all options are those of the earlier launch, except the options that you "
            "write here.",
            metavar="DIR",
        ),
    ] = None,
    spares: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --restarts, in a job with snapshots on this host: number of processes that "
            "run "
            "SCRIPT up to `Role.from_env`, and wait there to take the place of a lost role.",
        ),
    ] = 0,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in `python -m`.")
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option(min=0, help="End the job after this number of seconds.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="`ray`: start the roles on the nodes of a Ray cluster.",
            show_default="this host",
            rich_help_panel=RAY,
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="Address of the cluster: `auto`, or host:port of its head.",
            show_default="RAY_ADDRESS, or a new cluster on this host",
            rich_help_panel=RAY,
        ),
    ] = None,
    trainers_on: Annotated[
        str,
        typer.Option(
            help="`PACK`: on few nodes. `SPREAD`: on different nodes.", rich_help_panel=RAY
        ),
    ] = "PACK",
    trainer_resources: Annotated[
        str,
        typer.Option(help="Resources of each trainer, e.g. `CPU=4,GPU=1`.", rich_help_panel=RAY),
    ] = "CPU=1",
    server_resources: Annotated[
        str, typer.Option(help="Resources of each server.", rich_help_panel=RAY)
    ] = "CPU=1",
    hosts: Annotated[
        str | None,
        typer.Option(
            help="Hosts on which to start the roles with ssh: a file with a host on each line, or "
            "a list such as `gpu1:2,gpu2:2`.",
            show_default="this host",
            rich_help_panel=HOSTS,
        ),
    ] = None,
    rsh: Annotated[
        str,
        typer.Option(
            help="Command that runs a command on a host, e.g. `ssh -p 2222`.",
            rich_help_panel=HOSTS,
        ),
    ] = "ssh",
    python: Annotated[
        str | None,
        typer.Option(
            help="Path of Python on the hosts.",
            show_default="this Python's path",
            rich_help_panel=HOSTS,
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="Environment variable to copy to the roles, in addition to DTRANS_*, JAX_*, "
            "XLA_*, NCCL_* and similar variables.",
            metavar="NAME",
            rich_help_panel=HOSTS,
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Also write the output of each role to a file in this folder."),
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(
            help="Print the job as input for `slurm`, `jobset`, `torchx`, or `hosts` (ssh), and "
            "start nothing."
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --emit slurm: number of nodes that servers and trainers share, in one "
            "allocation.",
            show_default="a node for each process",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the output of --emit to this file.")
    ] = None,
) -> None:
    """Start the roles of a job on this host, on other hosts or on Ray, and wait for them.

    With `--emit` nothing is started: the job is printed as input for a scheduler.

    `dtrans.Role.from_env()` and `dtrans.connect()` read a role from DTRANS_ROLE,
    DTRANS_TRAINER_ID, DTRANS_TRAINERS, DTRANS_PSERVER_ENDPOINTS (DTRANS_TRAINER_ENDPOINTS in nccl2
    mode) and DTRANS_CURRENT_ENDPOINT. If a role fails, this command ends the other roles, prints
    the error, and exits with the failed role's code.
    """
    from dtrans.hosts.host_list import read_hosts
    from dtrans.hosts.on_hosts import launch_on_hosts
    from dtrans.hosts.ray_launch import launch_on_ray, resources
    from dtrans.run.distributed.launcher import launch
    from dtrans.run.distributed.restarts.restart_options import RestartOptions

    if resume is not None:
        _resume(context, resume)
        return
    if script is None:
        context.fail("Missing argument 'SCRIPT'.")
    if emit is not None:
        _emit(context, emit, [*(["-m"] if module else []), script, *(arguments or [])])
        return
    for option, value in (("--output", output), ("--nodes", nodes)):
        if value is not None:
            raise ConfigError(f"{option} needs --emit; add --emit NAME, or remove {option}")
    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"the file {script} does not exist", param_hint="SCRIPT")
    command = [sys.executable, *(["-m"] if module else []), script, *(arguments or [])]
    options: dict[str, Any] = {
        "trainers": trainers,
        "pservers": pservers,
        "mode": mode,
        "on_trainer_loss": on_trainer_loss,
        "deadline": time_limit,
        "log_dir": log_dir,
        "restarts": restarts,
    }
    if snapshots is not None or spares or quorum > 1:
        options["restarts"] = RestartOptions(restarts, snapshots, spares, _record(context), quorum)
    check_one_of("--on", on, (None, "ray"))
    if on is None:
        _refuse_options(context, RAY, "--on ray")
    if hosts is None:
        _refuse_options(context, HOSTS, "--hosts")
    elif on is not None:
        raise ConfigError("--hosts cannot be combined with --on ray; use one of them")
    if hosts is not None:
        where = read_hosts(hosts)
        launch_on_hosts(
            command, where, rsh=rsh, python=python or sys.executable, carried=env or (), **options
        )
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


def _record(context: typer.Context) -> LaunchRecord:
    """Return the options of this command line that differ from the defaults, for `--resume`."""
    from dtrans.run.distributed.restarts.launch_record import LaunchRecord

    values = {}
    for parameter in context.command.params:
        name = str(parameter.name)
        value = context.params.get(name)
        if value not in (parameter.default, None, ()):
            values[name] = value
    return LaunchRecord(values, os.getcwd())


def _resume(context: typer.Context, folder: Path) -> None:
    """Continue the job of a folder with snapshots; options set now replace earlier ones.

    Raises:
      ConfigError: the folder has no job, or the job has another script.
    """
    from dtrans.run.distributed.restarts.launch_record import LaunchRecord

    record = LaunchRecord.read(folder)
    values, earlier = context.params, record.options
    for option in ("snapshots", "emit"):
        if _is_set(context, option):
            raise ConfigError(f"--{option} cannot be combined with --resume; remove it")
    before = [earlier["script"], *earlier.get("arguments", ())]
    now = [values["script"], *(values["arguments"] or ())]
    if values["script"] is not None and now != before:
        raise ConfigError(
            f"--resume {folder}: the job of this folder runs `{shlex.join(before)}`, but this "
            f"command line has `{shlex.join(now)}`; leave SCRIPT and its arguments out, or write "
            f"--snapshots {folder} instead of --resume"
        )
    for name, value in earlier.items():
        if not _is_set(context, name):
            values[name] = value
    # the job runs in its earlier directory, but this command line's paths begin in the current
    # directory
    for name in ("log_dir", "hosts"):
        if _is_set(context, name) and (name == "log_dir" or Path(values[name]).is_file()):
            values[name] = os.path.abspath(values[name])
    values |= {"snapshots": Path(os.path.abspath(folder)), "resume": None}
    with contextlib.chdir(record.directory):
        launch_command(context, **values)


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
    """Print or write a job as input for a scheduler: `dtrans launch --emit`."""
    from dtrans.hosts.emit import EMITTERS, IN_IMAGE
    from dtrans.hosts.role_table import role_table

    check_one_of("--emit", name, tuple(EMITTERS))
    for parameter in context.command.params:
        if _is_set(context, parameter.name) and parameter.name not in _EMITTED:
            raise ConfigError(f"{parameter.opts[0]} cannot be combined with --emit; remove it")
    values = context.params
    python = "python" if name in IN_IMAGE else sys.executable
    table = role_table(values["mode"], values["trainers"], values["pservers"], [python, *arguments])
    shared: dict[str, int] = {}
    if values["nodes"] is not None:
        if name != "slurm":
            raise ConfigError(f"--nodes needs --emit slurm, but --emit is {name}; remove --nodes")
        shared = {"nodes": values["nodes"]}
    text = EMITTERS[name](table, **shared)
    if values["output"] is None:
        print(text, end="")
    else:
        values["output"].write_text(text)


def _refuse_options(context: typer.Context, panel: str, way: str) -> None:
    """Raise ConfigError if an option of a group is set, because the group needs another option.

    Args:
      panel: title of the group in the output of `--help`, such as "On a Ray cluster".
      way: the option that the group needs, such as `--on ray`.
    """
    for parameter in context.command.params:
        is_of_panel = getattr(parameter, "rich_help_panel", None) == panel
        if is_of_panel and _is_set(context, parameter.name):
            option = parameter.opts[0]
            raise ConfigError(f"{option} needs {way}; add {way}, or remove {option}")


def _is_set(context: typer.Context, name: str | None) -> bool:
    """Return True if an option is on the command line."""
    source = context.get_parameter_source(str(name))
    return source is not None and source.name == "COMMANDLINE"


@app.command()
def status(
    endpoints: Annotated[
        list[str],
        typer.Argument(
            help="Status endpoints of the job, as `dtrans launch` prints them.",
            metavar="ENDPOINT...",
        ),
    ],
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Repeat the request until Ctrl-C.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, help="With --watch: seconds between two requests.")
    ] = 1.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 5.0,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print a JSON document; with --watch, one line per request."),
    ] = False,
    prometheus: Annotated[
        str | None,
        typer.Option(
            help="Serve metrics at this loopback port, or at HOST:PORT; each scrape sends a "
            "request to the job."
        ),
    ] = None,
) -> None:
    """Show a running job: the state of each server and trainer.

    `dtrans launch` prints the status endpoints of its job. Parameter servers answer at their
    endpoints. In other jobs trainer 0 answers at the host:port in its variable
    DTRANS_STATUS_ENDPOINT. Your own jobs on this host need no token. For another job, set
    DTRANS_TOKEN or DTRANS_TOKEN_FILE. The exit code is 1 if an endpoint does not answer.
    """
    from dtrans.run.status.show_status import show_metrics, show_status

    servers = parse_endpoints(",".join(endpoints))
    if prometheus is not None:
        if json or watch:
            raise ConfigError(
                "--prometheus cannot be combined with --watch and --json; remove them"
            )
        show_metrics(servers, prometheus, timeout=timeout)
    elif not show_status(
        servers, timeout=timeout, interval=interval if watch else None, as_json=json
    ):
        raise typer.Exit(1)


@app.command()
def keygen(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to write keys into.", metavar="DIR")
    ] = None,
    trainers: Annotated[int, typer.Option(min=0, help="Number of trainers.")] = 0,
    token: Annotated[
        bool, typer.Option("--token", help="Print a token for DTRANS_TOKEN instead.")
    ] = False,
) -> None:
    """Generate the secrets of a job: a token for all processes, or a key for each.

    With DIR, this command writes keys for the servers, for each trainer and for `dtrans status`.
    The files have mode 0600. Existing keys are not replaced. Set DTRANS_KEYS=DIR in every process
    of the job. To revoke a key, delete its file in DIR/clients.
    """
    if token == (folder is not None):
        raise ConfigError("dtrans keygen needs one argument: --token, or a folder for the keys")
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
    script: Annotated[
        str, typer.Argument(help="The script that every process runs.", metavar="SCRIPT")
    ] = "",
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of SCRIPT, passed verbatim.", metavar="ARGS..."),
    ] = None,
    trainers: Trainers = 1,
    pservers: PServers = None,
    mode: Annotated[
        str, typer.Option(help="`pserver`, `nccl2`, `sharding` or `pipeline`.")
    ] = "pserver",
    plan: Annotated[
        str | None,
        typer.Option(
            help="`module:plan`: a plan, or a function that returns a plan. It replaces "
            "--trainers, --pservers and --mode."
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in `python -m`.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with commands and variables.")
    ] = False,
) -> None:
    """Show the processes of a job: role, endpoint, memory and bytes per step.

    Memory and bytes are shown with `--plan`. Nothing is started.
    """
    from dtrans.hosts.named_plan import named_plan
    from dtrans.hosts.role_table import role_table

    command = ["python", *(["-m"] if module else []), script, *(arguments or [])] if script else []
    if plan is None:
        table = role_table(mode, trainers, pservers, command)
    else:
        for name in ("trainers", "pservers", "mode"):
            if _is_set(context, name):
                raise ConfigError(f"--{name} cannot be combined with --plan; remove it")
        table = named_plan(plan).roles(command)
    print(table.to_json() if json else table)


@app.command(name="check")
def check_command(
    target: Annotated[
        str,
        typer.Argument(help="`module:function`, or `file.py:function`.", metavar="MODULE:FUNCTION"),
    ],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the steps' random inputs.")] = 0,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of CPU devices to create, for the meshes of the module.",
            show_default="JAX's devices",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check that a plan, or your shard_map step, computes exactly the one-device results.

    The function has no arguments. It returns a plan, or `(distributed_step, step, args)`, the
    arguments of `dtrans.verify`.

    The exit code is 0 if all outputs are equal, and 1 if an output differs. It is 2 if an output
    could not be compared, the check is not possible, or the module raises an exception.
    """
    from dtrans.check_command import INCOMPLETE, check, exit_code, show

    try:
        report = check(target, seed=seed, devices=devices)
    except DtransError as e:
        _fail(e)
        raise typer.Exit(INCOMPLETE) from e
    except Exception as e:  # the user's module failed; exit code 1 would mean different outputs
        traceback.print_exc()
        raise typer.Exit(INCOMPLETE) from e
    show(report, as_json=as_json)
    raise typer.Exit(exit_code(report))


@app.command(context_settings={"allow_interspersed_args": False})
def example(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of the example; without it, all are listed.", metavar="NAME"),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of the example, passed verbatim.", metavar="ARGS..."),
    ] = None,
) -> None:
    """Train an example of the repository as a distributed job, and compare it with one device.

    `dtrans example NAME --help` lists its options. An installed package has no examples: they are
    in the folder examples/ of a checkout.
    """
    root = Path(dtrans.__file__).parents[1]
    # site-packages may have a folder `examples` of another package next to an installed dtrans
    if not all((root / file).is_file() for file in ("pyproject.toml", "examples/__main__.py")):
        raise ConfigError(
            "the folder examples/ does not exist, because the installed package has no examples; "
            "run `python -m dtrans example` in a checkout of dtrans's repository"
        )
    sys.path.insert(0, str(root))
    importlib.import_module("examples.__main__").main(
        ["--help"] if name is None else [name, *(arguments or [])]
    )


if __name__ == "__main__":
    main()
