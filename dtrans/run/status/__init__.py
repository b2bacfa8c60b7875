"""Status of a running job, seen from outside: `dtrans status`.

observer         asks the servers of a job for their status
job_view         status of the trainers, merged over all servers
status_table     status as tables for a terminal
job_metrics      status as metrics that Prometheus scrapes
show_status      the command: once, repeated, as JSON or as metrics
"""
