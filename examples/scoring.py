"""Scoring: the log-probability of given texts, for multiple choice and for perplexity. Nothing is generated."""

from minillm import LLM

EXAMPLES = "Complete each sentence with one word. The sun is hot, and ice is cold. A dog barks, and a cat meows. "

llm = LLM("smollm2-135m")

# All choices share the blocks of the examples. Each begins with a space, as a word in a sentence does.
for question, choices in {
    "The capital of France is": [" Paris", " Berlin", " Rome"],
    "The opposite of hot is": [" blue", " warm", " cold"],
    "Birds can fly, and fish can": [" fly", " talk", " swim"],
}.items():
    scores = llm.score(EXAMPLES + question, choices)
    best = max(range(len(choices)), key=lambda number: scores[number].total)
    print(
        f"{question}{choices[best]}   "
        + ", ".join(f"{c.strip()} {s.total:.1f}" for c, s in zip(choices, scores, strict=True))
    )

for text in ("The sun rises in the east and sets in the west.", "The west rises in the sun and east sets in the."):
    print(f"perplexity {llm.perplexity(text):6.1f}   {text}")
