"""The order of the packages."""

# One layer a line: a package imports only packages on earlier lines. A folder is one package,
# and so is a file directly in minillm/.
LAYERS = """
kernels errors outputs storage
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
llm_methods
scoring depths
loading
llm service
jobs
server ui ray
bench
cli
"""
