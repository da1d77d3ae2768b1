"""Ops on the state of decode steps that is kept on the device."""
