"""Several processes: the ranks of one model, which work in step (tensor parallelism), and the devices of several engines."""
