"""The order of the packages."""

# Rooms of the house, one floor a line: a room imports only rooms on the lines before its own. A folder is one room,
# and so is a file directly in minillm/.
FLOORS = """
kernels errors outputs forms
checks system
text
grammar
params config cache prompt_scores
sequence progress parallel
model
weights
fit
runner user_config
blockstore
engine
beams speculation branch
verbs
scoring depths
loading
llm service
jobs
server ui ray
bench
cli
"""
