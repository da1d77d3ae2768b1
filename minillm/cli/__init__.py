"""The command line: functions that take the parsed arguments of a subcommand and return the exit code."""
