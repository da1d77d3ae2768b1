"""Ops on the state of decoding sequences, which is kept on the device."""
