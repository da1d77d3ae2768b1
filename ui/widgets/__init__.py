"""One widget per file. They show what they are given and post messages upwards; none knows the engine."""
