"""One role of the digits job: the script that `dtrans launch` starts as every process.

Written as a user of Paddle's interface would. Started by `dtrans train --engine processes`, or by hand:

    dtrans launch --trainers 2 --pservers 2 -m dtrans.examples.train_role runs/digits --optimizer adam
    dtrans launch --mode nccl2 --trainers 2 -m dtrans.examples.train_role runs/digits --optimizer adam
    dtrans launch --mode nccl2 --trainers 2 -m dtrans.examples.train_role runs/digits --sharding-stage 3
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np

import dtrans
from dtrans.examples import digits, report
from dtrans.examples.job import DigitsSettings, Outcome, train, training


def main() -> None:
    """Be the role that the environment says, and leave what a trainer saw as `trainer-K.npz` in a directory."""
    directory, *rest = sys.argv[1:]
    settings = DigitsSettings.parse(rest)
    role = dtrans.Role.from_env()
    if role.mode == "nccl2":
        dtrans.connect(deadline=settings.deadline)  # before JAX looks for devices
    data = digits.load(settings.seed)

    def my_batches(epoch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        whole = digits.batches(data, settings.seed, epoch, settings.batch_size)
        return [digits.shard(batch, role.trainer_id, role.trainers) for batch in whole]

    step, init = training(settings)
    program = dtrans.trace(step, *jax.eval_shape(init, settings.key), *my_batches(0)[0])
    startup = dtrans.trace(init, settings.key)
    first = role.trainer_id == 0
    # without pservers each has the loss of all
    bar = report.progress(settings, what="loss of trainer 0" if role.mode == "pserver" else "loss", shown=first)
    file = Path(directory) / f"trainer-{role.trainer_id}.npz"

    if settings.sharding_stage:
        plan = dtrans.sharding(program, startup, degree=role.trainers, stage=settings.sharding_stage)
        if first:
            report.show_plan(plan)
        with plan.on_cluster() as job, bar as advance:
            whole = lambda epoch: digits.batches(data, settings.seed, epoch, settings.batch_size)
            train(job, settings, lambda epoch: (job.shard_batch(*x) for x in whole(epoch)), advance).save(file)
        return

    config = dtrans.DistributeTranspilerConfig(mode=role.mode, min_block_size=settings.min_block_size)
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
        # params; in nccl2 mode (params, opt_state)
        started = exe.run(t.get_trainer_startup_program(), settings.key)
        state = started if role.mode == "nccl2" else (started,)
        for epoch in range(settings.epochs):
            for x, y in my_batches(epoch):
                *state, loss = exe.run(trainer, *state, x, y)
                losses.append(float(loss))
                advance(epoch, losses[-1])
    Outcome(np.array(losses), state[0]).save(file)


if __name__ == "__main__":
    main()
