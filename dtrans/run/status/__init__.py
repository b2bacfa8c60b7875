"""Watching a running job from outside: `dtrans status`.

observer         asks the servers of a job for their status
job_view         the status of a job: its servers, and its trainers over all servers
status_table     the same as tables for a terminal
job_metrics      the same as metrics that Prometheus scrapes
show_status      the command: once, repeated, as JSON or as metrics
"""
