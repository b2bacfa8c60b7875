"""Realisers: what turns programs into something that runs. One file, or folder, for each way of running.

    pieces      a program, cut at the equations that its fabric must carry out
    update      what a server does with gradients, compiled
    mesh        the whole job in this process, on a mesh of devices
    trainers    a trainer program for all trainers of a mesh at once
    endpoints   one process per role, over ZeroMQ
    executor    `Executor.run`: any one program of a job
    launch      start the processes of a job on this host

A new realiser takes a plan, or programs, and asks `pieces` for the parts to compile; transforms never
import from here.
"""
