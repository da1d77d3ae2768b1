"""A server with the APIs of OpenAI and Anthropic. HTTP and the engine run in separate processes."""
