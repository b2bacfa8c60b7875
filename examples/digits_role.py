"""Script of every role of the digits job, with the calls of Paddle's interface.

`dtrans example digits` starts the script. You can also start it yourself:

    dtrans launch --trainers 2 --pservers 2 -m examples.digits_role runs/digits --optimizer adam

With collectives:

    dtrans launch --mode nccl2 --trainers 2 -m examples.digits_role runs/digits --sharding-stage 3

Trainers write their results to the folder `runs/digits`. With `-` in place of the folder, trainer 0
prints the accuracy instead, for hosts that share no folder:

    dtrans launch --hosts gpu1,gpu2 --mode nccl2 --trainers 2 -m examples.digits_role - --stages 2
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dtrans
from examples import digits, report
from examples.digits_training import DigitsSettings, Outcome, train, training


MICRO_BATCHES = 4


def main() -> None:
    """Run the role of this process. A trainer writes its result to `trainer-K.npz` in a folder.

    With `-` in place of the folder, trainer 0 prints the accuracy on the test set instead.
    """
    directory, *rest = sys.argv[1:]
    settings = DigitsSettings.parse(rest)
    role = dtrans.Role.from_env()
    if role.mode == "nccl2":
        dtrans.connect(deadline=settings.deadline)  # before JAX creates devices
    data = digits.load(settings.seed)

    def my_batches(epoch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        batches = digits.batches(data, settings.seed, epoch, settings.batch_size)
        return [digits.shard(batch, role.trainer_id, role.trainers) for batch in batches]

    step, init = training(settings)
    program = dtrans.trace(step, *jax.eval_shape(init, settings.key), *my_batches(0)[0])
    startup = dtrans.trace(init, settings.key)
    first = role.trainer_id == 0
    # without pservers, each trainer has the loss of the global batch
    bar = report.progress(
        settings, what="loss of trainer 0" if role.mode == "pserver" else "loss", shown=first
    )
    leave = _leave(directory, role.trainer_id, data)

    if settings.sharding_stage or settings.stages:
        plan = _collective_plan(settings, program, startup, role.trainers)
        if first and settings.sharding_stage:
            report.show_plan(plan)
        with plan.on_cluster() as job, bar as advance:
            batches = lambda epoch: digits.batches(data, settings.seed, epoch, settings.batch_size)
            leave(
                train(
                    job,
                    settings,
                    lambda epoch: (job.shard_batch(*x) for x in batches(epoch)),
                    advance,
                )
            )
        return

    config = dtrans.DistributeTranspilerConfig(
        mode=role.mode, min_block_size=settings.min_block_size
    )
    t = dtrans.DistributeTranspiler(config)
    t.transpile(
        role.trainer_id,
        program,
        role.pservers,
        role.trainer_endpoints or role.trainers,
        startup_program=startup,
        current_endpoint=role.current_endpoint,
    )

    if role.is_pserver:
        pserver, pserver_startup = t.get_pserver_programs(role.current_endpoint)
        exe = dtrans.Executor(deadline=settings.deadline)
        exe.run(pserver, exe.run(pserver_startup, settings.key))
        return

    if first:
        report.show_plan(t.plan)
    trainer = t.get_trainer_program()
    losses = []
    with dtrans.Executor(deadline=settings.deadline) as exe, bar as advance:
        # `started` is params; in nccl2 mode it is (params, opt_state)
        started = exe.run(t.get_trainer_startup_program(), settings.key)
        state = started if role.mode == "nccl2" else (started,)
        for epoch in range(settings.epochs):
            for x, y in my_batches(epoch):
                *state, loss = exe.run(trainer, *state, x, y)
                losses.append(float(loss))
                advance(epoch, losses[-1])
    leave(Outcome(np.array(losses), state[0]))


def _collective_plan(
    settings: DigitsSettings, program: dtrans.Program, startup: dtrans.Program, trainers: int
) -> Any:
    if settings.sharding_stage:
        return dtrans.sharding(program, startup, degree=trainers, stage=settings.sharding_stage)
    return dtrans.pipeline(
        program, startup, num_stages=settings.stages, num_micro_batch=MICRO_BATCHES
    )


def _leave(directory: str, trainer: int, data: digits.Digits) -> Callable[[Outcome], None]:
    """Return a function that saves a trainer's result, or prints its accuracy."""
    if directory != "-":
        return lambda outcome: outcome.save(Path(directory) / f"trainer-{trainer}.npz")

    def show(outcome: Outcome) -> None:
        if trainer == 0:
            accuracy = digits.accuracy(outcome.params, data.test_x, data.test_y)
            print(f"test accuracy {accuracy:.4f} on {len(data.test_y)} images")

    return show


if __name__ == "__main__":
    main()
