"""Run the workloads of ``minillm bench``. Each file begins with its protocol."""
