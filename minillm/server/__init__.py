"""An OpenAI-compatible server. HTTP and the engine run in separate processes."""
