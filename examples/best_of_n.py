"""Best of n: sample several answers to one question, and keep the one with the highest log-probability per token.

The answers share the blocks of the prompt, which is computed once.
"""

from minillm import LLM, CompletionOutput, SamplingParams


def mean_logprob(answer: CompletionOutput) -> float:
    """Return the log-probability of an answer per token."""
    return (answer.cumulative_logprob or 0.0) / len(answer.token_ids)


llm = LLM("smollm2-135m")
messages = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]
params = SamplingParams(n=6, temperature=0.7, top_p=0.95, max_tokens=80, logprobs=0, seed=1)
[output] = llm.chat(messages, params)

answers = sorted(output.outputs, key=mean_logprob, reverse=True)
for answer in answers:
    print(f"{mean_logprob(answer):6.2f}  {' '.join(answer.text.split())[:80]}")
print(f"\nBest: {answers[0].text}")
