"""Implement the command line: a function per command takes the parsed arguments and returns the exit code."""
