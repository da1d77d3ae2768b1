"""The command line. Each command is a function that takes the parsed arguments and returns the exit code."""
