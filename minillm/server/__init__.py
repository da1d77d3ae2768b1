"""A server that speaks OpenAI's protocol: HTTP in one process, the engine in another."""
