"""The order of the packages, and their files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "minillm", "ui")

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


def sources(package: str) -> list[Path]:
    """Return the Python files of a folder at the top of the repository."""
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    return files
