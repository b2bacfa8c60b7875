"""Checkpoints of jobs, under the names of the single-device step, with orbax.

    ckpt/300/pserver-0     what the first server holds: an orbax checkpoint {"params/w.block0": ..., ...},
                           and which rows of which array of the step each of them is
                           (`plan.overview`)
    ckpt/300/pserver-1     ...
    ckpt/300/trainer-0     what no server holds (`plan.frozen`): frozen leaves, batch statistics; where there is any

    ckpt/300/rank-0        of a job of `dtrans.sharding`: rows of each array, {"params/w": ...}, and what is not cut
    ckpt/300/rank-1        ...

    ckpt/300/trainer-0     of a job of `dtrans.nccl2`: everything

Each process writes its own *pieces*, without a word to any other: all they share is the folder. A
piece is there or is not, since it is written beside its place and renamed. Each says which pieces
there are to be, and of which run and step it is: pieces of two runs, or of two steps, are never put
together. A whole checkpoint is never written over: save each step to a folder of its own, and take
up the last that is whole (`latest`). Pieces that a crash has left of a save are replaced when a
later run saves under the same name.

What is read is put together by the names and rows of the step, not by those of blocks or slices. So
a checkpoint serves another number of servers, other blocks, another dispatcher; another degree,
stage, number of groups, or type to compute in; a job of another kind; or one device (`load`).
`gather` and `scatter` do the same without files, for servers.

A rank saves its rows without padding, from its device, and reads what it is to hold: no leaf is
ever put together on a device. Of several groups of ranks the first one saves. Pieces are written
before `save` returns, each by itself: the checkpoint is whole when every process has come so far,
which `latest` finds out.

A server is saved when it has ended: `exe.run(pserver, state)` returns its state when every trainer
has closed, and a second job may go on from it, or from what was restored. A running server saves
during its steps (`job.save`); its arrays are in files of NumPy's then (`array_files`), not in an
orbax checkpoint.

Source: `save_persistables` and `load_persistables` of python/paddle/fluid/io.py,
`checkpoint_notify` and `recv_save` of paddle/fluid/operators/distributed_ops. There a parameter in
blocks was joined by one trainer, state was joined where its name was guessed to be a slice's, and
one server's rows could be loaded by that server only.

Example:
  >>> import tempfile, jax, jax.numpy as jnp, optax, dtrans
  >>> tx = optax.adam(0.1)
  >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
  >>> init = lambda key: (p := {"w": jax.random.normal(key, (5, 2))}, tx.init(p))
  >>> key, x = jax.random.key(0), jnp.ones((4, 5))
  >>> main, startup = dtrans.trace(step, *init(key), x), dtrans.trace(init, key)
  >>> plan = dtrans.pserver(main, startup, pservers="127.0.0.1:6174,127.0.0.1:6175",
  ...                       placement=dtrans.BlockPlacement(min_block_size=1))
  >>> job = plan.on_mesh()
  >>> state, loss = job.step(job.init(key), x)
  >>> with tempfile.TemporaryDirectory() as folder:
  ...     for endpoint in plan.servers:  # each of them in its process, after exe.run(pserver, ...)
  ...         dtrans.checkpoint.save(f"{folder}/1", plan, endpoint, state.servers[endpoint])
  ...     params, opt_state = dtrans.checkpoint.load(dtrans.checkpoint.latest(folder), main)
  ...     one = dtrans.pserver(main, startup, pservers="127.0.0.1:6180")
  ...     held = dtrans.checkpoint.restore(f"{folder}/1", one, "127.0.0.1:6180")
  >>> bool((params["w"] == job.params(state)["w"]).all()), int(opt_state[0].count)
  (True, 1)
  >>> {name: x.shape for name, x in held.items()}
  {'opt_state/0/count': (), 'opt_state/0/mu/w': (5, 2), 'opt_state/0/nu/w': (5, 2), 'params/w': (5,
  2)}

Source files, from the top; none imports one below it:

    runs               which run a process is in, and the marks of pieces
    assemble           an array out of slices of it
    pserver_state      what servers hold, and the pytrees of the step: without files
    collective_state   what trainers and ranks hold: without files
    saved_rows         rows of tables, some at a time; table_files: their files; array_files: those of whole arrays
    orbax_io           one piece, and what pieces make up: the only file that knows orbax
    api                check, save, restore and load
"""

from dtrans.checkpoint.api import (
    check as check,
    latest as latest,
    load as load,
    restore as restore,
    restore_trainer as restore_trainer,
    save as save,
    save_trainer as save_trainer,
)
from dtrans.checkpoint.pserver_state import gather as gather, scatter as scatter
