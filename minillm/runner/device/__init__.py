"""The runner for GPUs: it keeps decoding sequences' state on the device, and replays CUDA graphs.

Each kind of step has its own file.
"""
