"""Plans as lines of text: communication with shapes and bytes, blocks, owners, roles, and losses.

`golden/fingerprints.json` has these lines from before the package got its present layout.
`golden/renames.json` has names that have changed since: old name -> new name. No other difference
is allowed. The text of a jaxpr depends on the version of JAX. The character model is trained on the
source files of Python's library. So the file also records both versions.

    python tests/support/fingerprints.py tests/golden/fingerprints.json     writes the file again
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import math
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flat_options
import jax
from paths import GOLDEN


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # before a module makes an array

import numpy as np
import optimizer_zoo
import paddle_golden
import pipeline_models
import sharding_models

import dtrans
from dtrans._jax import jaxprs_in_params, opened
from dtrans.ir.display import short_type
from dtrans.ir.program import Program, is_communication
from dtrans.ops import listen_and_serv_p


STEPS = 20


# -- programs --------------------------------------------------------------------------------------


def lines_of(program: Program) -> Iterator[str]:
    """Yield the lines of a program: each equation that communicates, and counts of other equations
    by role.
    """
    yield "in " + " ".join(f"{n}:{short_type(t)}" for n, t in program.inputs.items())
    yield "out " + " ".join(
        f"{n}:{short_type(t)}" for n, t in program.outputs.items() if n not in program.inputs
    )
    plain: collections.Counter[str] = collections.Counter()
    role = ""
    for op, eqn in zip(program.ops, program.jaxpr.jaxpr.eqns, strict=True):
        if plain and (op.role != role or is_communication(eqn)):
            yield _counted(role, plain)
        role = op.role
        if is_communication(eqn):
            yield f"{role} {op.type} {_operands(op, eqn)} {_attributes(eqn)}"
            if eqn.primitive is listen_and_serv_p:
                yield from _blocks(eqn)
        else:
            plain[op.type] += 1
            yield from _nested(eqn, 1)
    if plain:
        yield _counted(role, plain)


def moved(lines: list[str]) -> list[str]:
    """Return the lines without the parts that depend on the version of JAX.

    These parts are equations without communication, the numbers of values without a name, and
    residuals of derivatives.
    """
    kept = (line for line in lines if not line.lstrip().startswith("ops "))
    return [re.sub(r"%\d+", "%", re.sub(r" ?@residual/\S+", "", line)) for line in kept]


def _counted(role: str, plain: collections.Counter[str]) -> str:
    line = f"ops {role} " + " ".join(f"{n}*{k}" if k > 1 else n for n, k in sorted(plain.items()))
    plain.clear()
    return line


def _operands(op: Any, eqn: Any) -> str:
    side = lambda names, atoms: " ".join(
        f"{n}:{short_type(a.aval)}" for n, a in zip(names, atoms, strict=True)
    )
    return f"{side(op.inputs, eqn.invars)} -> {side(op.outputs, eqn.outvars)} ({_bytes(eqn)} bytes)"


def _bytes(eqn: Any) -> int:
    return sum(
        math.prod(a.aval.shape) * a.aval.dtype.itemsize
        for a in eqn.invars
        if hasattr(a.aval, "dtype")
    )


def _attributes(eqn: Any) -> str:
    shown = {
        k: v
        for k, v in eqn.params.items()
        if k not in ("optimize_blocks", "types") and "jaxpr" not in k
    }
    return " ".join(f"{k}={v}" for k, v in shown.items())


def _nested(eqn: Any, depth: int) -> Iterator[str]:
    """Yield lines for communication in the bodies of loops and branches."""
    for body in jaxprs_in_params(eqn.params):
        for e in opened(body).eqns:
            if is_communication(e):
                types = [short_type(a.aval) for a in (*e.invars, *e.outvars)]
                yield (
                    f"{'  ' * depth}in {eqn.primitive.name}: {e.primitive.name} "
                    f"{' '.join(types)} {_attributes(e)}"
                )
            yield from _nested(e, depth + 1)


def _blocks(eqn: Any) -> Iterator[str]:
    for block in eqn.params["optimize_blocks"]:
        inner = opened(block.jaxpr)
        sent = {g.name: list(g.sent.values()) for g in block.grads}
        read = [name for n in block.in_names for name in sent.get(n, [n])]
        yield f"  block {block.name} {block.role} level {block.level}: {' '.join(read)}"
        yield f"    makes {' '.join(block.out_names)}"
        for e in inner.eqns:
            if is_communication(e):
                yield (
                    f"    {e.primitive.name} {' '.join(short_type(a.aval) for a in e.invars)} "
                    f"{_attributes(e)}"
                )
        means = [
            op for of in sent.values() if len(of) > 1 for op in [*["add"] * (len(of) - 1), "mul"]
        ]
        names = (e.primitive.name for e in inner.eqns if not is_communication(e))
        yield f"ops   {' '.join([*means, *names])}"


# -- plans -----------------------------------------------------------------------------------------


def of_servers(plan: Any, trainer_id: int = 0) -> list[str]:
    """Return lines for the blocks, the owners, and the programs of a trainer and of each server."""
    found = []
    for b in plan.placement.all_blocks:
        rows = "-" if b.span is None else f"{b.span.start}:{b.span.stop}"
        found.append(f"block {b.name} {rows} {b.nbytes} {b.endpoint}")
    found += [f"whole {leaf}: {why}" for leaf, why in plan.placement.reasons_unsliced.items()]
    found += [f"holds {row.slice_name} {row.slice_shape} of {row.origin_name} at {row.offset}, "
f"{row.vtype}, "
              f"{row.endpoint}" for row in plan.overview]  # fmt: skip
    found += ["held " + " ".join(plan.frozen), "shared " + " ".join(plan.update.shared_state)]
    programs = {
        "trainer": plan.trainer_program(trainer_id),
        "startup": plan.trainer_startup_program(trainer_id),
    }
    for ep, of in plan.servers.items():
        programs |= {f"server {ep}": of.main, f"server startup {ep}": of.startup}
    for name, program in programs.items():
        found += [f"program {name}", *lines_of(program)]
    return found


def of_ranks(plan: Any) -> list[str]:
    """Return lines for the state of ranks, and for their program."""
    found = [
        f"cut {n} axis {s.axis} size {s.size} padded {s.padded} of {s.degree}"
        for n, s in plan.sliced.items()
    ]
    found += [f"memory {plan.memory()}", f"traffic {plan.traffic()}"]
    return [*found, *of_trainers(plan)]


def of_trainers(plan: Any) -> list[str]:
    """Return lines for the buckets, the merges, and the program of each trainer."""
    found = [
        f"bucket {b.name} {' '.join(b.leaves)} {np.dtype(b.dtype).name} {b.nbytes}"
        for b in plan.buckets
    ]
    found += [f"merge {n} {way}" for n, way in plan.merges.items()]
    return [*found, f"moved {plan.bytes_per_step}", *lines_of(plan.program)]


def of_stages(plan: Any) -> list[str]:
    """Return lines for the stages, their programs, and the order of their tasks."""
    found = [
        f"stage {s.index}: {' '.join(s.params)}; sends {s.sends}, holds {s.stores}, keeps {s.peak} "
        "micro-batches"
        for s in plan.stages
    ]
    found += [
        f"ops {s.ops} in stage {s.index}: {s.flops} flops, keeps {s.saves}" for s in plan.stages
    ]
    found += [f"home {n} {s}" for n, s in plan.model.homes.items()] + [
        f"users {n} {s}" for n, s in plan.model.users.items()
    ]
    found += [f"merge {n} {way}" for n, way in plan.model.merges.items()]
    for k, order in enumerate(plan.schedule.orders):
        found.append(f"device {k}: " + " ".join(f"{t.kind}{t.micro}.{t.stage}" for t in order))
    if plan.schedule.name in SAME_PROGRAMS:
        return found
    for s in plan.step_programs.stages:
        found += [f"program forward {s.index}", *lines_of(s.forward)]
        found += [f"program backward {s.index}", *lines_of(s.backward)]
    return [*found, "program update", *lines_of(plan.update.program)]


# -- recorded plans --------------------------------------------------------------------------------


OPTIMIZERS = (
    "sgd", "adam", "adamw", "adagrad", "adafactor", "lamb", "lars", "lion", "nadam", "radam",
    "rmsprop", "novograd",
    "sm3", "yogi", "optimistic_gradient_descent", "noisy_sgd", "muon", "prodigy",
    "schedule_free_adamw", "adabelief",
)  # fmt: skip
SHARDED = ("uneven", "transformer", "scan")
SAME_PROGRAMS = ("PreferForward", "PreferBackwardOptimizer")  # the programs of PreferBackward
SCHEDULES = (
    "PreferForward",
    "PreferBackward",
    "PreferBackwardOptimizer",
    "Interleaved",
    "ZeroBubble",
)


def plans() -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Yield pairs: the name of a plan, and a function that returns its lines."""
    for name in (*paddle_golden.CASES, paddle_golden.GEO):
        yield f"golden {name}", lambda name=name: _golden(name)  # type: ignore[misc]
    for name in OPTIMIZERS:
        yield (
            f"optimizer {name}",
            lambda name=name: of_servers(optimizer_zoo.plan_of(optimizer_zoo.CASES[name])),
        )  # type: ignore[misc]
    for model in SHARDED:
        for stage in (1, 2, 3):
            yield (
                f"sharding {model} {stage}",
                lambda model=model, stage=stage: _sharded(model, stage),
            )  # type: ignore[misc]
    for name in SCHEDULES:
        yield f"pipeline {name}", lambda name=name: _staged(name)  # type: ignore[misc]
    yield "nccl2", lambda: of_trainers(dtrans.nccl2(*_traced("transformer"), trainers=4))
    many = {
        "trainers_per_node": 2,
        "compress": "bf16",
        "num_micro_batch": 2,
        "clip_local_norm": 1.0,
    }
    yield (
        "nccl2 with options",
        lambda: of_trainers(flat_options.nccl2(*_traced("transformer"), trainers=4, **many)),
    )


def _golden(name: str) -> list[str]:
    recorded = (
        paddle_golden.RECORDED[paddle_golden.WITHOUT_CLIP.get(name, name)]
        | paddle_golden.RECORDED[name]
    )
    main, startup = paddle_golden.programs("fc_sgd" if name == paddle_golden.GEO else name)
    return of_servers(
        paddle_golden.transpiled(recorded, main, startup).plan, recorded["trainer_id"]
    )


def _sharded(name: str, stage: int) -> list[str]:
    model = sharding_models.MODELS[name]
    tx = model.around(sharding_models.OPTIMIZERS["clip, adam"]())
    params, batch = model.params(np.float32), model.batch(0, np.float32)
    return of_ranks(
        sharding_models.plan_of(model.loss, tx, params, *batch, degree=2, replicas=2, stage=stage)
    )


def _traced(model: str, rows: int = 16) -> tuple[Program, Program]:
    return pipeline_models.MODELS[model].job(rows).traced()


def _staged(schedule: str) -> list[str]:
    chunks = {"chunks": 2} if schedule == "Interleaved" else {}
    main, startup = _traced("transformer")
    return of_stages(
        flat_options.pipeline(
            main, startup, num_stages=2, num_micro_batch=4, schedule=schedule, **chunks
        )
    )


def losses() -> Iterator[tuple[str, Callable[[], list[float]]]]:
    """Yield pairs: the name of a job, and a function that returns the losses of some steps."""
    yield "digits pserver", lambda: _digits(lambda main, startup: dtrans.pserver(
        main, startup, pservers="127.0.0.1:6174,127.0.0.1:6175", trainers=2))  # fmt: skip
    yield (
        "digits nccl2",
        lambda: _digits(lambda main, startup: dtrans.nccl2(main, startup, trainers=2)),
    )
    yield "characters pipeline", _characters


def _digits(plan_of: Callable[..., Any]) -> list[float]:
    from examples import digits
    from examples.digits_training import DigitsSettings, training

    settings = DigitsSettings()
    data = digits.load(settings.seed)
    step, init = training(settings)
    batches = list(digits.batches(data, settings.seed, 0, settings.batch_size))[:STEPS]
    main = dtrans.trace(step, *jax.eval_shape(init, settings.key), *batches[0])
    job = plan_of(main, dtrans.trace(init, settings.key)).on_mesh()
    state, found = job.init(settings.key), []
    for batch in batches:
        state, loss = job.step(state, *batch)
        found.append(float(loss))
    return found


def _characters() -> list[float]:
    from examples import character_job, characters

    settings, text = character_job.CharactersSettings(), characters.load()
    job = character_job.plan_characters(settings, text).on_mesh()
    state, found = job.init(settings.key), []
    for i in range(STEPS):
        state, loss = job.step(state, character_job.batch(settings, text, i))
        found.append(float(loss))
    return found


# -- old and new -----------------------------------------------------------------------------------


def renamed(line: str, renames: Mapping[str, str]) -> str:
    """Return an old line with the present names; only full words are replaced."""
    return re.sub(r"[A-Za-z_]\w*", lambda m: renames.get(m[0], m[0]), line)


def recorded() -> dict[str, Any]:
    """Return the recorded lines, with names replaced by their present names."""
    old = json.loads((GOLDEN / "fingerprints.json").read_text())
    renames = json.loads((GOLDEN / "renames.json").read_text())
    old["plans"] = {
        name: [renamed(line, renames) for line in lines] for name, lines in old["plans"].items()
    }
    return old


def versions() -> dict[str, str]:
    """Return the versions on which the lines depend."""
    return {"jax": jax.__version__, "python": platform.python_version()}


def main(path: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        found = {
            "versions": versions(),
            "plans": {name: make() for name, make in plans()},
            "losses": {name: run() for name, run in losses()},
        }
    Path(path).write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
