"""Status of a running job for other processes: `dtrans status`.

observer         asks the servers of a job for their status
job_view         status of each trainer, merged over all servers
status_table     status as tables for a terminal
job_metrics      status as metrics for Prometheus
show_status      the command: prints the status once or repeatedly, as tables or JSON
"""
