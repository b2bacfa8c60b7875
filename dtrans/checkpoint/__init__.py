"""Checkpoints of jobs, stored with orbax; arrays have the names of the single-device step.

    parameter servers ckpt/300/pserver-0   an orbax checkpoint {"params/w.block0": ..., ...} of the
      first server. It records the rows of the step's arrays that each block (rows on one server)
      contains ckpt/300/pserver-1   ... ckpt/300/trainer-0   leaves that no server stores
      (`plan.frozen`), such as batch statistics; absent if there are none

    dtrans.sharding
      ckpt/300/rank-0      rows of each sliced array, {"params/w": ...}, and all other arrays
      ckpt/300/rank-1      ...

    dtrans.nccl2
      ckpt/300/trainer-0   all arrays

Each process writes its *pieces*, the folders above, without communication: processes share only
the file system. A piece is written under a temporary name and then renamed, so it is never
incomplete. Each piece records its run, its step, and the names of all pieces of the checkpoint.
Pieces of two runs or two steps are never combined. A complete checkpoint is never overwritten: save
each step to its own folder, and restore the last complete checkpoint (`latest`). After a crash
during a save, a later save to the same folder replaces the remaining pieces.

Arrays are saved by their names and rows in the single-device step. So a job with another number of
servers, placement, ZeRO degree, ZeRO stage, precision or strategy can restore a checkpoint. `load`
restores a checkpoint on one device. `gather` and `scatter` convert between the state of servers and
the state of one device, without files.

A rank copies its rows from its device, without padding, and a restore reads only the rows of this
process. So no device ever needs memory for a full leaf. If groups of ranks have equal state, only
the first group writes. `save` returns when this process has written its pieces. The checkpoint is
complete when all processes have written their pieces, which `latest` checks.

`save` stores a server's state after the server has ended: `exe.run(pserver, state)` returns the
server's state when every trainer has closed. Another job can continue from that state, or from a
restored state. To save while servers run, use `job.save`, which writes NumPy files (`array_files`)
instead of an orbax checkpoint.

Source: `save_persistables` and `load_persistables` of python/paddle/fluid/io.py,
`checkpoint_notify` and `recv_save` of paddle/fluid/operators/distributed_ops. In Paddle, one
trainer joins the blocks of a parameter. Paddle recognises blocks of optimizer state by their names.
Only the server that saved such a block can load it.

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

Modules; each imports only modules above it:

    runs               identifier of a run, and the record of run and step in a piece
    assemble           assembly of arrays from slices
    pserver_state      conversion between the state of servers and pytrees of the step
    collective_state   conversion between the state of ranks and arrays of the step
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
