"""Several processes: the ranks of one model (tensor parallelism), and the devices of several engines."""
