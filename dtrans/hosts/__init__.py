"""Roles of a job on several hosts: placement and start.

role_table      every process of a job, and a host for each
named_plan      a plan that the command line names
host_list       the hosts that a user names, in a file or in short
on_hosts        a script per role on these hosts: `dtrans launch --hosts`
host_check      versions and free ports of the hosts, before a job starts
connection      the command that reaches one: ssh, or another
remote_child    a role on another host, as the launcher sees it
remote_agent    a role on another host, as that host sees it
role_states     the table of roles and their states
on_ray          a job as actors of a Ray cluster
portable_plan   the way of a plan to another process
ray_launch      a script per role on a Ray cluster: `dtrans launch --on ray`
ray_group       actors for roles: where they run, waiting for them, and the role to blame
ray_actor       a role as an actor
emit            a job as text for a scheduler or a shell: `dtrans launch --emit`
emit_parts      values of a role table that every emitter writes
emit_slurm      an sbatch file
emit_jobset     a Kubernetes JobSet
emit_torchx     a TorchX component
emit_ssh        a shell script with ssh
"""
