"""The Textual chat app. It talks to the engine's process by messages (`minillm.service`) and never imports torch.

app.py, engine_app.py   the app and its screen; the engine's process, notifications, themes, the app's messages
chat/                   the talk (questions, commands, answers), the transcript, the conversation as data and on disk
memory/                 the pool of blocks as data, and the six views of it
bars.py, dialogs.py     the lines at the top and the bottom; the dialogs that open above the chat
settings.py             the settings that the user can change
textual_internals.py    the private names of Textual, all of them
terminal.py             the terminal before and after the app, however it ends
plain.py                the chat line by line, without Textual
"""
