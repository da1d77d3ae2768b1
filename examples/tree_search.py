"""Tree search: at each level, continue every text in several ways, and keep the most probable texts.

Branches share the blocks of their common beginning. All branches of a level are computed in one batch.
"""

from minillm import LLM, SamplingParams


def tree_search(llm: LLM, prompt: str, width: int = 3, depth: int = 4, tokens: int = 6) -> list[tuple[float, str]]:
    """Return the ``width`` best texts with their log-probabilities, the best first."""
    alive = [(0.0, llm.branch(prompt))]
    for level in range(depth):
        children = [(score, branch.fork()) for score, branch in alive for _ in range(width)]
        for _, branch in alive:
            branch.free()
        params = [
            SamplingParams(temperature=0.7, max_tokens=tokens, logprobs=0, seed=level * 100 + number)
            for number in range(len(children))
        ]
        completions = llm.sample([branch for _, branch in children], params)
        scored = [
            (score + (completion.cumulative_logprob or 0.0), branch)
            for (score, branch), completion in zip(children, completions, strict=True)
        ]
        alive = []
        for score, branch in sorted(scored, key=lambda pair: pair[0], reverse=True):
            if len(alive) < width and branch.text not in {other.text for _, other in alive}:
                alive.append((score, branch))
            else:  # too improbable, or two samples gave the same text
                branch.free()
    found = [(score, branch.text) for score, branch in alive]
    for _, branch in alive:
        branch.free()
    return found


llm = LLM("smollm2-135m")
for score, text in tree_search(llm, "The best way to learn a language is"):
    print(f"{score:6.1f}  {text}")
