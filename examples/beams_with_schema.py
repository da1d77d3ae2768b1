"""Beam search over JSON that follows a schema. Every beam is valid JSON, and the best one comes first."""

import json

from minillm import LLM, BeamSearchParams, Grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
PROMPT = """\
Text: Tom is 52 and comes from London.
JSON: {"name": "Tom", "age": 52, "city": "London"}
Text: Maria lives in Madrid and is 27 years old.
JSON: {"name": "Maria", "age": 27, "city": "Madrid"}
Text: Anna is 31 years old and lives in Rome.
JSON: """

llm = LLM("smollm2-135m")
params = BeamSearchParams(beam_width=4, max_tokens=60, grammar=Grammar.json(SCHEMA))
[output] = llm.beam_search(PROMPT, params)
for beam in output.outputs:
    print(f"{beam.score:.3f}  {json.loads(beam.text)}")
