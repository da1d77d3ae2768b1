"""Speed, measured: what ``minillm bench`` runs. Each workload is one file with one protocol, stated at its head."""
