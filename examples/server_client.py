"""Use `minillm serve` with OpenAI's Python client (`pip install openai`). Start the server first: `minillm serve`.

The second part uses a feature that OpenAI's protocol lacks: it continues an earlier answer from its cached blocks.
"""

import json
import os

import openai

client = openai.OpenAI(
    base_url=os.environ.get("MINILLM_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("MINILLM_API_KEY", "none"),
)
[model] = [each.id for each in client.models.list()]

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}],
    temperature=0.7,
    max_tokens=60,
    seed=1,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print("\n")

first = client.completions.create(
    model=model, prompt="The capital of France is", max_tokens=1, temperature=0, extra_body={"keep": True}
)
second = client.completions.create(
    model=model, prompt=". The capital of Italy is", max_tokens=1, temperature=0, extra_body={"fork_of": first.id}
)
print(f"The capital of France is{first.choices[0].text}. The capital of Italy is{second.choices[0].text}.")

schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[
        {"role": "user", "content": "Tom is 52 and comes from London."},
        {"role": "assistant", "content": '{"name": "Tom", "age": 52}'},
        {"role": "user", "content": "Maria lives in Madrid and is 27 years old."},
    ],
    temperature=0,
    max_tokens=60,
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
)
print(json.loads(answer.choices[0].message.content or "{}"))
