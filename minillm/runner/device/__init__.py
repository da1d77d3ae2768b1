"""The runner for GPUs: state of decoding sequences on the device, CUDA graphs, one file per kind of step."""
