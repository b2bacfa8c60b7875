"""Communication as equations.

Each primitive here has a type and no lowering: it can be read, counted, costed, moved and tested, and a
program that holds one cannot run until a realiser (`dtrans.run`) carries it out. One file per family:

    rpc               send, recv and their barriers: the parameter-server wire as a trainer sees it
    lookup            split_ids, prefetch, send_rows, fake_init, init_on_use: tables of which trainers have some rows
    split_concat      split_byref and concat: a leaf to its blocks and back
    listen_and_serv   a whole parameter server as one equation
    bootstrap         gen_nccl_id, broadcast: how trainers become a group, and start equal
    collectives       all_reduce, reduce_scatter, all_gather: what servers, or trainers on an axis, make together
    exact_sum         sums whose bits do not depend on how their parts are dealt out
    all_to_all        rows exchanged among shards
    moved_rows        rows that the host moves by their numbers, in steps that are traced to be verified

A new family is a new file, built with `communication`; a realiser that does not know one of its
primitives refuses by name.
"""

from dtrans.ops.all_to_all import all_to_all_p as all_to_all_p
from dtrans.ops.bootstrap import broadcast_p as broadcast_p, gen_nccl_id_p as gen_nccl_id_p
from dtrans.ops.collectives import (
    COMBINE as COMBINE,
    EXACT as EXACT,
    LAYERS as LAYERS,
    after_p as after_p,
    all_gather_p as all_gather_p,
    all_reduce_p as all_reduce_p,
    combine as combine,
    identity_of as identity_of,
    reduce_scatter_p as reduce_scatter_p,
    trainer_index_p as trainer_index_p,
)
from dtrans.ops.listen_and_serv import (
    BACKUP as BACKUP,
    ON_TRAINER_EXIT as ON_TRAINER_EXIT,
    BlockGradient as BlockGradient,
    OptimizeBlock as OptimizeBlock,
    backup_of as backup_of,
    listen_and_serv_p as listen_and_serv_p,
)
from dtrans.ops.lookup import (
    RowsProgram as RowsProgram,
    fake_init_p as fake_init_p,
    geo_init_p as geo_init_p,
    geo_prefetch_p as geo_prefetch_p,
    init_on_use_p as init_on_use_p,
    prefetch_p as prefetch_p,
    send_rows_p as send_rows_p,
    split_ids_p as split_ids_p,
)
from dtrans.ops.primitive import communication as communication, token as token
from dtrans.ops.rpc import (
    DELTA as DELTA,
    MAX_MERGED as MAX_MERGED,
    CommunicatorConfig as CommunicatorConfig,
    exchange_p as exchange_p,
    exchanged as exchanged,
    fetch_barrier_p as fetch_barrier_p,
    geo_send_p as geo_send_p,
    recv_p as recv_p,
    send_barrier_p as send_barrier_p,
    send_p as send_p,
)
from dtrans.ops.split_concat import concat_p as concat_p, split_byref_p as split_byref_p
