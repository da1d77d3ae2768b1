"""The subcommands of ``minillm``, one file each, with a `run(arguments)` that returns the exit code."""
