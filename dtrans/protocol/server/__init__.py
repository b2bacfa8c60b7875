"""A parameter server: its trainers, its updates and its connections to other servers.

admission          checks of the greetings of trainers and servers
trainer_registry   the trainers of a server: their connections, and late trainers
trainer_state      state of one trainer at a server
lost_trainers      failures of trainers: connections and processes that ended without a goodbye
trainer_exits      trainers that leave a synchronous server before other trainers do
sync_server        a synchronous server
trainer_turns      gradients of the current step, and answers to trainers after the update
joint_update       the update of a step, and its waits for other servers
step_waits         deadlines of a synchronous server's trainers within a step
newest_states      states of a synchronous server for snapshots at the failure of a process
between_steps      evictions of table rows between two steps of a synchronous server
trainer_rounds     exchanges between trainers in the middle of a step
async_server       an asynchronous server
async_steps        steps of an asynchronous server's trainers
step_counts        counts of the steps of an asynchronous server's trainers
server_peers       the other servers
exchange           partial results that servers send each other
peer_line          one server's connection to another
serving            dispatch of one server's messages, and the end of the server
save_requests      requests of a server's trainers for checkpoints
server_loop        one server over a transport
"""
