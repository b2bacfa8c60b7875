"""A seeded simulator of jobs: the machines of `dtrans.protocol` over a virtual network and a
virtual clock.

    python -m tools.simulate --seed 16          shows one schedule
    python -m tools.simulate --count 5000       checks many

clock       events in the order of their times
network     connections: delays, bandwidth, breaks, one-way partitions, messages that come twice
case        a job and what happens to it, drawn from a seed
updates     what simulated servers compute
one_device  the same steps on one device
job         the processes of a case, and the events that happen to them
process     a role, which takes one event at a time:
server_role, trainer_role   a server and a trainer, each around its machine
between_steps               requests of a trainer: checkpoints, and tables
storage                     the folder that a server saves to
noise_maker                 a process that sends malformed messages
judge, judge_answers        what a job must have done, and what it must have answered
judge_guests                what processes that are not of the job must have been answered
judge_events                ends of roles that are lost and come back, or send malformed messages
verdict     one case from its seed to its verdict, and a smaller case that fails as it does

Clock and network know of no fault: roles and `case` ask them for what happens.
"""
