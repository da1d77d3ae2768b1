"""``minillm run``: answer one question on standard output, or open the chat."""

import argparse
import os
import re

from minillm.cli import generate
from minillm.cli.chat import chat
from minillm.cli.grammars import given_grammar
from minillm.errors import UsageError
from minillm.user_config import read_config
from minillm.weights.manifest import load_manifest
from minillm.weights.resolve import find

_NAME = re.compile(r"[\w.:/@~+-]*[\w/]", re.ASCII)  # a model's name, or its path


def run(arguments: argparse.Namespace) -> int:
    """Answer the question on the command line or from a pipe. Without a question, open the chat."""
    model, question = model_and_question(arguments.model, [arguments.name or "", *arguments.question])
    options = {**vars(arguments), "model": model}
    if not question and os.isatty(0):
        if arguments.json or given_grammar(arguments):
            raise UsageError("without a question `minillm run` opens the chat, which has no --json and no grammars")
        opened = {"question": None, "plain": False, "server": None, "resume": False, "no_save": False, "theme": None}
        return chat(argparse.Namespace(**{**options, **opened}))
    options["system"] = arguments.system or read_config(arguments.config).system
    fixed = {"chat": True, "parse_special": False, "file": None, "form": None, "output": None}
    fixed |= {"replicas": None, "ray": None, "engines": None, "shard": None}
    prompts = [question] if question else []
    return generate.run(argparse.Namespace(**{**options, **fixed, "prompts": prompts}), for_chat=True)


def model_and_question(model: str | None, words: list[str]) -> tuple[str | None, str]:
    """Split the arguments into the model's name and the question.

    As for ``ollama run``, the first word is the model's name if it could be one.

    Args:
        model: the value of ``--model``. If it is given, all words belong to the question.

    Raises:
        UsageError: the first word could be a name, but there is no such model.
    """
    first, *rest = [word for word in words if word] or [""]
    if model is None and (_NAME.fullmatch(first) or os.path.exists(first)):
        try:
            find(first, load_manifest())
        except UsageError as error:
            advice = "put the question in quotation marks; a question of one word needs --model"
            raise UsageError(f"{error}; {advice}") from None
        model, first = first, ""
    return model, " ".join(word for word in (first, *rest) if word)
