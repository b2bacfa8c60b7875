"""Simulator of jobs: the state machines of `dtrans.protocol` over a virtual network.

    python -m tools.simulate --seed 16          shows one schedule
    python -m tools.simulate --count 5000       checks many
    python -m tools.simulate --exhaustive       checks all runs of a small job

A *case* is a job with its faults. A *promise* is a property of the protocol that is checked after
each run, such as the bits of the result.

clock            virtual clock
network          connections with delays, bandwidth, breaks, partitions and duplicated messages
case             a job with its faults and requests
draw             random cases, each drawn from a seed
updates          the computation of simulated servers
one_device       the same steps on one device
job              the processes of a case, and the scheduled events
process          a simulated process, which handles one event at a time
server_role      a server
trainer_role     a trainer
geo_trainer      a trainer of GEO-SGD
trainer_mean     a leaf that a trainer computes itself, and writes at snapshots
between_steps    requests of a trainer between steps: checkpoints, and requests about tables
storage          the folder to which a server writes checkpoints
noise_maker      a process that sends malformed messages
judge            checks of a job that has ended; the next seven modules contain more checks
judge_answers    checks of the answers to requests between steps
judge_guests     checks of processes that are not a part of the job
judge_snapshots  checks of jobs with snapshots
judge_saves      checks of checkpoints in jobs with snapshots
judge_alone      checks of jobs with snapshots whose servers are asynchronous
judge_geo        checks of jobs of GEO-SGD with snapshots
judge_events     checks of restarted servers and malformed messages
verdict          the run of one case, its violations, and the search for a smaller failing case
explore          exhaustive search of the runs of a small job; the next three modules belong to it
choices          a job whose next event is chosen, and the parts of its state
choice_clock     clock that keeps only the order of events of one channel
state_digest     digest of the state of a process
"""
