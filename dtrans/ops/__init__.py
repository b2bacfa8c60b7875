"""JAX primitives for communication, which are equations in the programs of trainers and servers.

Each primitive defines the types of its results, so a program with communication can be inspected,
costed, transformed and tested. A *runner* (a module of `dtrans.run`) runs programs, and implements
the primitives.

rpc               send, recv and their barriers: a trainer's messages to parameter servers
lookup            split_ids, prefetch, send_rows, fake_init, init_on_use: rows of tables
split_concat      split_byref, concat: split of an array into blocks of rows, and the inverse
listen_and_serv   a parameter server as one equation
bootstrap         gen_nccl_id, broadcast: trainers connect, and start with equal values
collective        `Collective`, the definition of a collective, and `new_collective`
all_reduce        reduction of all trainers' or servers' arrays; each gets the result
reduce_scatter    sum of the trainers' arrays; each trainer gets a slice
all_gather        concatenation of the trainers' arrays
all_to_all        exchange of rows among shards
after             an array that is available only after another array
trainer_index     index of a trainer
exact_sum         sums whose bits do not depend on the order and placement of the numbers
moved_rows        movement of rows by their ids on the host, for verification only
wire_types        types of arrays in messages, and their encoding

A new collective is a file that calls `new_collective`; other primitives call `communication`. A
runner raises an error for a primitive that it does not implement.
"""

from dtrans.ops.after import after_p as after_p
from dtrans.ops.all_gather import all_gather_p as all_gather_p
from dtrans.ops.all_reduce import (
    COMBINE as COMBINE,
    EXACT as EXACT,
    LAYERS as LAYERS,
    all_reduce_p as all_reduce_p,
    combine as combine,
    identity_of as identity_of,
)
from dtrans.ops.all_to_all import all_to_all_p as all_to_all_p
from dtrans.ops.bootstrap import broadcast_p as broadcast_p, gen_nccl_id_p as gen_nccl_id_p
from dtrans.ops.collective import (
    COLLECTIVES as COLLECTIVES,
    Collective as Collective,
    collective_of as collective_of,
    is_way as is_way,
    moved_values as moved_values,
    new_collective as new_collective,
    way_of as way_of,
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
from dtrans.ops.primitive import (
    OVER_AXIS as OVER_AXIS,
    UNDER_VMAP as UNDER_VMAP,
    communication as communication,
    token as token,
)
from dtrans.ops.reduce_scatter import reduce_scatter_p as reduce_scatter_p
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
from dtrans.ops.trainer_index import trainer_index_p as trainer_index_p
from dtrans.ops.wire_types import (
    CASTS as CASTS,
    TOPK as TOPK,
    WIRE_TYPES as WIRE_TYPES,
    WireType as WireType,
    decoded as decoded,
    encode_with_feedback as encode_with_feedback,
    encode_with_momentum as encode_with_momentum,
    encoded as encoded,
    without_last_bit as without_last_bit,
)
