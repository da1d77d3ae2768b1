"""Run the workloads of ``minillm bench``. The docstring at the head of each file describes its protocol."""
