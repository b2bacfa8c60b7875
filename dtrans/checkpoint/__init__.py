"""Checkpoints of jobs, under the names of the single-device step, with orbax.

    parameter servers
      ckpt/300/pserver-0   an orbax checkpoint {"params/w.block0": ..., ...} of the first server,
                           and the rows of the step's arrays in each block (`plan.overview`)
      ckpt/300/pserver-1   ...
      ckpt/300/trainer-0   leaves on no server (`plan.frozen`), if any: frozen leaves, batch
                           statistics

    dtrans.sharding
      ckpt/300/rank-0      rows of each array, {"params/w": ...}, and arrays that are not sliced
      ckpt/300/rank-1      ...

    dtrans.nccl2
      ckpt/300/trainer-0   everything

Each process writes its *pieces* without communication: processes share only the folder. A piece is
written under another name, then renamed, so that it exists completely or not at all. Each piece
lists all pieces, its run and its step. Pieces of two runs or two steps are never combined. A
complete checkpoint is never overwritten: save each step to another folder, and restore the last
complete one (`latest`). A later save under the same name replaces the pieces of a crashed save.

Arrays are assembled by names and rows of the step, not by blocks or slices. So a checkpoint fits
other numbers of servers, blocks and dispatchers, and other degrees, stages, groups and precisions.
It also fits jobs of another strategy, and one device (`load`). `gather` and `scatter` do the same
for servers without files.

A rank saves its rows without padding from its device, and reads only its rows: no device ever
assembles a leaf. The first group of ranks saves. `save` returns when this process has written its
pieces. The checkpoint is complete when all processes have; `latest` checks this.

A server saves when it has ended: `exe.run(pserver, state)` returns its state when every trainer has
closed. Another job may continue from that state, or from a restored one. A running server saves
during its steps (`job.save`), to NumPy files (`array_files`) instead of an orbax checkpoint.

Source: `save_persistables` and `load_persistables` of python/paddle/fluid/io.py,
`checkpoint_notify` and `recv_save` of paddle/fluid/operators/distributed_ops. In Paddle one trainer
joined the blocks of a parameter. State was joined by guesses from names. Only the same server could
load its rows.

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
  ...     for endpoint in plan.servers:  # in the server's process, after exe.run(pserver, ...)
  ...         dtrans.checkpoint.save(f"{folder}/1", plan, endpoint, state.servers[endpoint])
  ...     params, opt_state = dtrans.checkpoint.load(dtrans.checkpoint.latest(folder), main)
  ...     one = dtrans.pserver(main, startup, pservers="127.0.0.1:6180")
  ...     restored = dtrans.checkpoint.restore(f"{folder}/1", one, "127.0.0.1:6180")
  >>> bool((params["w"] == job.params(state)["w"]).all()), int(opt_state[0].count)
  (True, 1)
  >>> {name: x.shape for name, x in restored.items()}
  {'opt_state/0/count': (), 'opt_state/0/mu/w': (5, 2), 'opt_state/0/nu/w': (5, 2), 'params/w': (5,
  2)}

Source files, from the top; none imports one below it:

    runs               the run of a process, and the marks of pieces
    assemble           assembly of arrays from slices
    pserver_state      state of servers from pytrees of the step, and back, without files
    collective_state   state of trainers and ranks, without files
    saved_rows         rows of tables, in segments
    table_files        files of table rows
    array_files        NumPy files of arrays
    orbax_io           pieces and checkpoints; the only module that imports orbax
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
