"""OpenAI's chat completions and text completions."""
