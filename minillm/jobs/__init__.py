"""Files of prompts, answered by one engine or several."""
