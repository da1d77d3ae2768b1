"""``minillm completions``: print a script for a shell.

At every Tab, the script runs this command to list the possible next words. They therefore always match the parser and
the available models.
"""

import argparse
from collections.abc import Sequence

from minillm.cli.main import command_parser
from minillm.cli.options import Parser
from minillm.weights.files import downloaded
from minillm.weights.manifest import load_manifest

_SCRIPTS = {
    "bash": r"""# eval "$(minillm completions bash)" in ~/.bashrc
_minillm() {
    local IFS=$'\n'
    COMPREPLY=($(minillm completions bash "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null))
}
complete -o default -F _minillm minillm
""",
    "zsh": r"""#compdef minillm
# eval "$(minillm completions zsh)" in ~/.zshrc, after compinit
_minillm() {
    local -a found=("${(@f)$(minillm completions zsh "${(@)words[1,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found" ]]; then compadd -- $found; else _files; fi
}
compdef _minillm minillm
""",
    "fish": r"""# minillm completions fish > ~/.config/fish/completions/minillm.fish
function __minillm
    set -l found (minillm completions fish (commandline -opc) (commandline -ct) 2>/dev/null)
    if set -q found[1]
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c minillm -f -a '(__minillm)'
""",
}


def run(arguments: argparse.Namespace) -> int:
    found = (
        candidates(command_parser(), arguments.words[1:] or [""]) if arguments.words else [_SCRIPTS[arguments.shell]]
    )
    for each in found:
        print(each)
    return 0


def candidates(parser: Parser, words: Sequence[str]) -> list[str]:
    """Return the possible completions of the last of ``words``; the words before it are complete.

    The result is empty where a file name or free text is expected.
    """
    *before, last = words
    begun = ""  # the part of the last word, such as "model:", that bash has split off; completions leave it out
    if last == ":" and before:  # bash splits model:quantization into three words
        *before, begun = before
        last = begun = f"{begun}:"
    elif before[-1:] == [":"] and len(before) > 1:
        *before, begun, _ = before
        begun += ":"
        last = begun + last
    option: argparse.Action | None = None  # the option that takes the next word as its value
    for word in before:
        actions = parser.filled()._actions
        commands = next((each.choices for each in actions if isinstance(each, argparse._SubParsersAction)), {})
        if word == "=":  # bash splits --model=x into three words
            continue
        if option is None and word.startswith("-"):
            option = next((each for each in actions if word in each.option_strings and each.nargs is None), None)
        else:
            parser = parser if option is not None else commands.get(word, parser)
            option = None
    actions = parser.filled()._actions
    if option is None and last.startswith("-"):
        found = [text for each in actions if each.help != argparse.SUPPRESS for text in each.option_strings]
    else:
        places = [option] if option is not None else [each for each in actions if not each.option_strings]
        found = [value for each in places for value in _values(each)]
    return [each.removeprefix(begun) for each in found if each.startswith(last.removeprefix("="))]


def _values(action: argparse.Action) -> list[str]:
    """Return all possible values of an option or an argument. The list is empty if the values cannot be listed."""
    if action.choices is not None:
        return list(action.choices)
    if action.dest in ("model", "name", "downloaded"):
        entries = [] if action.dest == "downloaded" else load_manifest().models.values()
        listed = [form.name for entry in entries for form in entry.all_forms()]
        return list(dict.fromkeys([*listed, *(files.name for files in downloaded())]))
    return list(getattr(action, "values", ()))
