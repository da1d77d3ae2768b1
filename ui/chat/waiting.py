"""Questions and commands that wait until the answer has ended, or the model is loaded."""

from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.transcript import Transcript
from minillm.ui.numbers import plural

_FAR = 3  # if more lines than this are below the screen, the line below the prompt says so


class WaitingQuestions:
    """A queue of questions and commands. The line below the prompt shows how many there are.

    The queue has its own references to the prompt and the transcript, because `unsent` is also read after these widgets
    are removed from the screen.
    """

    def __init__(self, prompt: PromptInput, transcript: Transcript) -> None:
        self.prompt, self.transcript = prompt, transcript
        self._texts: list[str] = []
        self._aside = ""  # the unsent text of the prompt, while it shows an earlier question to edit

    def put(self, text: str) -> None:
        """Queue a text."""
        self._texts.append(text)
        self.show()

    def next(self) -> str | None:
        """Remove and return the first queued text. Return None if no text is queued."""
        text = self._texts.pop(0) if self._texts else None
        self.show()
        return text

    def clear(self) -> list[str]:
        """Remove and return all queued texts."""
        texts, self._texts = self._texts, []
        self.show()
        return texts

    def restore_to_prompt(self) -> bool:
        """Put the queued texts back into the prompt. Return False if no text is queued."""
        texts = self.clear()
        for text in reversed(texts):
            self.prompt.put_back(text)
        return bool(texts)

    def set_aside(self) -> None:
        """Store the prompt's unsent text until `bring_back`."""
        self._aside = self.prompt.draft

    def bring_back(self) -> None:
        """Put the text that was set aside back into the prompt."""
        text, self._aside = self._aside, ""
        if text:
            self.prompt.put_back(text)

    @property
    def unsent(self) -> str:
        """Return all texts that were not sent, joined by blank lines."""
        return "\n\n".join(filter(None, [*self._texts, self.prompt.draft, self._aside]))

    def show(self, *_: object) -> None:
        """Show below the prompt how many texts are queued.

        If no text is queued, show whether there is text below the screen.
        """
        at = max(0, self.transcript.scroll_offset.y)  # negative if the text is shorter than the screen
        far = self.transcript.max_scroll_y - at > _FAR
        words = f"{plural(len(self._texts), 'question')} queued · Esc to take back"
        self.prompt.border_subtitle = words if self._texts else "more below ↓ Ctrl+End" if far else ""
