"""The command line: one file for each subcommand, with a `run(arguments)` that returns the exit code."""
