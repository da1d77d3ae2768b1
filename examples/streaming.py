"""Streaming: print an answer as it is generated, then several answers at once with asyncio."""

import asyncio

from minillm import LLM, SamplingParams

llm = LLM("smollm2-135m")
params = SamplingParams(temperature=0, max_tokens=24)

for delta in llm.stream("One, two, three,", params):
    print(delta.text, end="", flush=True)
print("\n")


async def complete(prompt: str) -> str:
    """Return a prompt with its completion. The prompts of all tasks are computed in one batch."""
    return prompt + "".join([delta.text async for delta in llm.astream(prompt, params)])


async def main() -> None:
    prompts = ["The capital of France is", "The opposite of hot is", "Water boils at"]
    for text in await asyncio.gather(*map(complete, prompts)):
        print(text.splitlines()[0])


asyncio.run(main())
