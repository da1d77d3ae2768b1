"""The workloads of ``minillm bench``. Each states its protocol at the head of its file."""
