"""Placement and start of a job's roles (its server and trainer processes) on several hosts.

role_table      table of a job's processes; choice of a host for each
named_plan      imports the plan that a command line names as `module:plan`
host_list       hosts that a user lists, in a file or as `gpu1:2,gpu2`

Start by ssh (`dtrans launch --hosts`):

on_hosts        starts the roles of a job on these hosts
host_check      checks of versions and free ports on the hosts, before the job starts
connection      the command that runs another command on a host: ssh, or the user's `--rsh`
remote_child    starts a role on another host, receives its output and end
remote_agent    the other host's side: starts a role and reports its end
role_states     terminal table of roles and their states

Ray (`plan.on_ray()`, `dtrans launch --on ray`):

on_ray          a job whose roles are actors of a Ray cluster
portable_plan   plans that are pickled for another process
ray_launch      scripts as the roles of a job on a Ray cluster
ray_group       actors for roles: placement, calls, and the role that caused a failure
ray_actor       the class of the actors

Text for a scheduler (`dtrans launch --emit`):

emit            the emitters by name
emit_parts      values of a role table that every emitter writes
emit_slurm      an sbatch file
emit_jobset     a Kubernetes JobSet
emit_torchx     a TorchX component
emit_ssh        a shell script with ssh
"""
