"""Self-consistency (Wang et al. 2022): let the model reason several times, and vote on the results."""

import re
from collections import Counter

from minillm import LLM, SamplingParams

EXAMPLES = """\
Q: What is 1 + 1? A: 1 plus 1 makes 2. The answer is 2.
Q: What is 4 + 1? A: 4 plus 1 makes 5. The answer is 5.
Q: What is 3 + 4? A: 3 plus 4 makes 7. The answer is 7.
"""

llm = LLM("smollm2-135m")
params = SamplingParams(n=12, temperature=0.7, max_tokens=20, stop="\n", seed=3)
for question in ("What is 2 + 3?", "What is 1 + 3?"):
    [output] = llm.generate(f"{EXAMPLES}Q: {question} A:", params)
    results = (re.search(r"The answer is (\d+)", answer.text) for answer in output.outputs)
    votes = Counter(result[1] for result in results if result)
    print(f"{question} {votes.most_common(1)[0][0]}   votes: {dict(votes)}")
